"""Where every step of a log lies: the extents of all segments, sorted by key.

Snapshots hold slices of the arrays here. So entries are appended and the head moves on in place, and whatever would
change the place of an entry makes new arrays.
"""

from __future__ import annotations

import numpy as np

from hilt.core.tree import Array
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.storage.segment import EXTENT

ENTRY = np.dtype(
    [
        ("key", "<i8"),
        ("at", "<i8"),
        ("sequence", "<i8"),
        ("steps", "<i4"),
        ("width", "<u4"),
        ("origin", "<u4"),
        ("segment", "<i4"),
        ("table", "u1"),
        ("sources", "u1"),
        ("ended", "?"),
        ("open", "?"),
    ]
)
"""One extent: its first step's key and address, how many steps, and what is asked of trajectories often."""


class Index:
    """Extents in the order of their keys. Appending costs the same in an empty index and in a large one."""

    def __init__(self) -> None:
        self._use(np.zeros(64, ENTRY), np.zeros(64, np.int64))
        self._head = self._size = 0
        self.version = 0
        """Changes whenever the place of an entry may have changed."""

    @property
    def entries(self) -> Array:
        return self._data[self._head : self._size]

    @property
    def keys(self) -> Array:
        return self._keys[self._head : self._size]

    def __len__(self) -> int:
        return self._size - self._head

    def nbytes(self) -> int:
        return len(self) * (ENTRY.itemsize + 8)

    def add(self, entry: np.void) -> int:
        """Adds one entry; returns its place, which holds until `version` changes."""
        key = entry["key"]
        if self._size == len(self._data):
            self._renew()
        at = self._size
        if at > self._head and key < self._keys[at - 1]:
            self._renew()
            at = int(np.searchsorted(self.keys, key))
            for array in (self._data, self._keys):
                array[at + 1 : self._size + 1] = array[at : self._size].copy()
        self._data[at], self._keys[at] = entry, key
        self._size += 1
        return at - self._head

    def grow(self, place: int, steps: int, sources: int, sequence: int, ended: bool) -> None:
        """Steps were appended to an entry."""
        at = self._head + place
        self._steps[at] += steps
        self._sources[at] |= sources
        self._ended[at] = ended
        if sequence > self._sequence[at]:
            self._sequence[at] = sequence

    def extend(self, entries: Array) -> None:
        """Adds many entries at once, as opening a log does."""
        merged = np.concatenate([self.entries, entries])
        keys = merged["key"].copy()
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys, kind="stable")
            merged, keys = merged[order], keys[order]
        self._use(merged, keys)
        self._head, self._size = 0, len(self._data)
        self.version += 1

    def remove(self, place: int) -> None:
        if place == 0:
            self._head += 1
        else:
            self._renew()
            for array in (self._data, self._keys):
                array[place : self._size - 1] = array[place + 1 : self._size].copy()
            self._size -= 1
        self.version += 1

    def shorten(self, place: int, steps: int) -> None:
        """Takes the first steps off an entry."""
        self._renew()
        entry = self._data[place]
        entry["key"] += steps
        entry["at"] += steps
        entry["steps"] -= steps
        self._keys[place] += steps

    def first_ended(self) -> int | None:
        """The place of the oldest trajectory that no running episode appends to."""
        place = 0
        while place < len(self):
            extents = self.places_of(int(self.keys[place]) >> OFFSET_BITS)
            if not self.entries["open"][extents[-1]]:
                return place
            place = extents.stop
        return None

    def places_of(self, trajectory: int) -> range:
        """The places of a trajectory's extents."""
        first, stop = np.searchsorted(self.keys, [trajectory << OFFSET_BITS, (trajectory + 1) << OFFSET_BITS])
        return range(int(first), int(stop))

    def extents_of(self, segment: int, first: int) -> Array:
        """The extents of one segment, whose first row has the address `first`, as its file lists them."""
        here = self.entries["segment"] == segment
        mine = self.entries[here]
        extents = np.zeros(len(mine), EXTENT)
        for name in ("sequence", "steps", "width", "origin", "sources", "ended"):
            extents[name] = mine[name]
        extents["trajectory"], extents["offset"] = mine["key"] >> OFFSET_BITS, mine["key"] & 0xFFFFFFFF
        extents["row"] = mine["at"] - first
        return extents

    def _use(self, data: Array, keys: Array) -> None:
        self._data = data
        self._keys = keys  # the keys once more, side by side, for searching
        self._steps, self._sources, self._sequence, self._ended = (
            data["steps"],
            data["sources"],
            data["sequence"],
            data["ended"],
        )

    def _renew(self) -> None:
        """New arrays with room for as many entries again."""
        live = len(self)
        data, keys = np.zeros(max(64, 2 * live), ENTRY), np.zeros(max(64, 2 * live), np.int64)
        data[:live], keys[:live] = self.entries, self.keys
        self._use(data, keys)
        self._head, self._size = 0, live
        self.version += 1
