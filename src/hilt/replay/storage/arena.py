"""One array over many files: segments mapped side by side in one stretch of addresses.

A batch touches steps of many segments. Were each segment mapped on its own, a gather would be one call per segment and
a second copy to put the pieces in order. An arena reserves addresses for many equal slots and maps each file into one,
so a whole column is a single numpy array, and a batch is a single ``take``. Where that cannot be done,
`SeparateMaps` has the same slots, and a map for each.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from hilt.core import platform
from hilt.core.errors import StorageError
from hilt.core.tree import Array

LARGE_ITEM_BYTES = 1024


def make_arena(item_bytes: int, items_per_slot: int) -> Arena | SeparateMaps:
    kind = Arena if side_by_side(item_bytes * items_per_slot) else SeparateMaps
    return kind(item_bytes, items_per_slot)


def side_by_side(slot_bytes: int) -> bool:
    """Whether slots of this size can be mapped side by side here. A log from a machine with
    smaller memory pages may not fit this one's."""
    return platform.SIDE_BY_SIDE and slot_bytes % mmap.PAGESIZE == 0


class Arena:
    """Slots of equal size, each empty or the map of one file, as one array of items.

    An empty slot reads as zeros. A file may be shorter than its slot and may grow under the map; only bytes that were
    written are ever read.
    """

    def __init__(self, item_bytes: int, items_per_slot: int):
        self._item_bytes = item_bytes
        self._slot_bytes = item_bytes * items_per_slot
        self._mapped: dict[int, int] = {}
        self._slots = 0
        self.grow(16)

    def grow(self, slots: int) -> None:
        """Room for this many slots. Arrays taken before stay valid; mapped files appear in the new one too."""
        size = slots * self._slot_bytes
        holder = _Reservation(size)
        raw = (ctypes.c_uint8 * size).from_address(holder.address)
        raw._holder = holder  # type: ignore[attr-defined]  # the addresses live as long as any array over them
        self._holder, self._slots = holder, slots
        for slot, fd in self._mapped.items():
            self._map(slot, fd)
        # [slots * items_per_slot, item_bytes]
        self.array: Array = np.frombuffer(raw, np.uint8).reshape(-1, self._item_bytes)
        self.array.flags.writeable = False

    def map(self, slot: int, fd: int) -> None:
        """Shows a file's bytes in a slot. The file stays open until `unmap`."""
        self.unmap(slot)
        if slot >= self._slots:
            self.grow(max(2 * self._slots, slot + 1))
        self._mapped[slot] = fd
        self._map(slot, fd)

    def unmap(self, slot: int) -> None:
        """Empties a slot."""
        if self._mapped.pop(slot, None) is not None:
            self._map(slot, None)

    def take(self, index: Array, out: Array) -> None:
        """The items at these places, ``[n]``, into ``out``, ``[n, item_bytes]``."""
        self.array.take(index, axis=0, out=out, mode="clip")

    def item(self, index: int) -> Array:
        """One item where it lies, ``[item_bytes]``."""
        found: Array = self.array[index]
        return found

    def close(self) -> None:
        for slot in list(self._mapped):
            self.unmap(slot)

    def _map(self, slot: int, fd: int | None) -> None:
        if not self._holder.address:  # garbage that is finalized in another order than it was made
            return
        try:
            platform.map_over(self._holder.address + slot * self._slot_bytes, self._slot_bytes, fd)
        except OSError as error:
            raise _cannot_map(self._slot_bytes, error) from error


class SeparateMaps:
    """The slots of an `Arena`, each file in a map of its own: a gather is one for each file that it touches."""

    def __init__(self, item_bytes: int, items_per_slot: int):
        self._item_bytes, self._items_per_slot = item_bytes, items_per_slot
        self._files: dict[int, int] = {}
        self._arrays: dict[int, Array] = {}

    def map(self, slot: int, fd: int) -> None:
        self.unmap(slot)
        self._files[slot] = fd

    def unmap(self, slot: int) -> None:
        """Empties a slot. Arrays taken before stay valid: a map goes with the last of them."""
        self._files.pop(slot, None)
        self._arrays.pop(slot, None)

    def take(self, index: Array, out: Array) -> None:
        """The items at these places, ``[n]``, into ``out``, ``[n, item_bytes]``."""
        slots, items = np.divmod(index, self._items_per_slot)
        for slot in np.bincount(slots).nonzero()[0].tolist() if len(index) else ():
            places = (slots == slot).nonzero()[0]
            wanted = items[places]
            array = self._array(slot, int(wanted.max()) + 1)
            if len(places) == len(index):
                np.take(array, wanted, axis=0, out=out, mode="clip")
            elif self._item_bytes < LARGE_ITEM_BYTES:
                out[places] = array[wanted]
            else:  # a copy of each, and not two of all
                for place, item in zip(places.tolist(), wanted.tolist(), strict=True):
                    out[place] = array[item]

    def item(self, index: int) -> Array:
        """One item where it lies, ``[item_bytes]``."""
        slot, item = divmod(index, self._items_per_slot)
        found: Array = self._array(slot, item + 1)[item]
        return found

    def _array(self, slot: int, items: int) -> Array:
        """At least this number of items of a slot. A map is as long as its file was:
        when that has grown, it is mapped anew."""
        array = self._arrays.get(slot)
        if array is None or len(array) < items:
            array = self._arrays[slot] = self._map_file(self._files[slot])
        return array

    def _map_file(self, fd: int) -> Array:
        try:
            size = os.fstat(fd).st_size
            return np.frombuffer(platform.map_whole(fd, size), np.uint8, size - size % self._item_bytes).reshape(
                -1, self._item_bytes
            )
        except (OSError, ValueError) as error:  # ValueError: the file has become shorter meanwhile
            raise StorageError(f"mapping a file of {size:,} bytes: {error}. Run: hilt data verify.") from error


class _Reservation:
    """A stretch of addresses, given back when nothing refers to it."""

    def __init__(self, size: int):
        self.size = size
        try:
            self.address = platform.reserve_addresses(size)
        except OSError as error:
            raise _cannot_map(size, error) from error

    def __del__(self) -> None:
        """Gives the addresses back. They may be anybody's from then on: nothing may be mapped there."""
        if address := getattr(self, "address", 0):
            self.address = 0
            platform.release_addresses(address, self.size)


def _cannot_map(size: int, error: OSError) -> StorageError:
    cure = "Raise the limit on address space (ulimit -v) or use larger segments."
    return StorageError(f"mapping {size:,} bytes: {error.strerror}. {cure}")
