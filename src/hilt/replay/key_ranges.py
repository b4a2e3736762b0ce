"""Sets of steps as runs of consecutive keys.

A step's *key* names it for ever: ``trajectory << 32 | offset``, the offset counting the trajectory's steps in T-major
order. A view is a set of keys; sets of experience are made of long stretches, so a set is stored as sorted, disjoint
runs ``(first key, count)``. Sampling from it is arithmetic: a random number below the total, a search, an addition.
"""

from __future__ import annotations

import itertools

import numpy as np

from hilt.core.tree import Array

OFFSET_BITS = 32
_versions = itertools.count()


def key_of(trajectory: int, offset: int = 0) -> int:
    return (trajectory << OFFSET_BITS) | offset


class Runs:
    """A set of keys. Adding at or near the end and removing at the front cost the same however large the set is."""

    def __init__(self, starts: Array | None = None, counts: Array | None = None):
        self._starts = np.array(starts if starts is not None else [], np.int64)
        self._counts = np.array(counts if counts is not None else [], np.int64)
        self._ends = np.cumsum(self._counts)  # [run] how many keys lie up to the end of this run, from a moving origin
        self._shift = self._starts - self._ends + self._counts  # [run] from such a count to the key that it leads to
        self._head, self._size = 0, len(self._starts)
        self._fresh = self._size  # ends are right below this run
        self.version = next(_versions)
        """Another one after every change, which no other set ever has."""

    @property
    def starts(self) -> Array:
        return self._starts[self._head : self._size]

    @property
    def counts(self) -> Array:
        return self._counts[self._head : self._size]

    def __len__(self) -> int:
        """How many keys."""
        if self._head == self._size:
            return 0
        ends = self._all_ends()
        return int(ends[self._size - 1] - ends[self._head] + self._counts[self._head])

    def add(self, key: int, count: int = 1, join: bool = True) -> None:
        """Adds keys that are not in the set, to the runs that end or begin there if they may `join` them."""
        if count <= 0:
            return
        self.version = next(_versions)
        last = self._size - 1
        if last >= self._head:
            end = self._starts[last] + self._counts[last]
            if key == end and join:
                self._counts[last] += count
                self._fresh = min(self._fresh, last)
                return
            if key < end:
                self._insert(key, count, join)
                return
        self._append(key, count)

    def remove(self, key: int, count: int) -> None:
        """Removes whatever of ``[key, key + count)`` is in the set."""
        first, stop = self._overlap(key, key + count)
        if first == stop:
            return
        self.version = next(_versions)
        low, high = int(self._starts[first]), int(self._starts[stop - 1] + self._counts[stop - 1])
        if first == self._head and high <= key + count and low >= key:
            self._head = stop
            return
        left, right = max(0, key - low), max(0, high - key - count)
        pieces = [(low, left)] * (left > 0) + [(key + count, right)] * (right > 0)
        self._replace(first, stop, pieces)

    def draw(self, index: Array) -> Array:
        """The keys at these places, ``0 <= index < len(self)``, counted in the order of keys."""
        return self.draw_runs(index)[0]

    def draw_runs(self, index: Array) -> tuple[Array, Array]:
        """Does what `draw` does, and returns the number of the run of each key, too."""
        ends = self._all_ends()
        head = self._head
        if head + 1 == self._size:
            return np.asarray(index + self._starts[head]), np.zeros(len(index), np.int64)
        index = index + (ends[head] - self._counts[head])
        run = search(ends[head : self._size], index)
        return index + self._shift[head : self._size].take(run), run

    def contains(self, keys: Array) -> Array:
        """Per key, whether it is in the set."""
        starts, counts = self.starts, self.counts
        if not len(starts):
            return np.zeros(len(keys), bool)
        run = np.maximum(np.searchsorted(starts, keys, side="right") - 1, 0)
        return (keys >= starts[run]) & (keys < starts[run] + counts[run])

    def keys(self) -> Array:
        """Every key, sorted."""
        starts, counts = self.starts, self.counts
        total = int(counts.sum())
        before = np.cumsum(counts) - counts
        return np.repeat(starts - before, counts) + np.arange(total)

    def copy(self) -> Runs:
        return Runs(self.starts, self.counts)

    def trajectories(self) -> Array:
        """The distinct trajectories, sorted."""
        return np.unique(self.starts >> OFFSET_BITS)

    def since(self, trajectory: int) -> Runs:
        """The keys of this trajectory and later ones."""
        first = self._head + int(np.searchsorted(self.starts, key_of(trajectory)))
        return Runs(self._starts[first : self._size], self._counts[first : self._size])

    def __and__(self, other: Runs) -> Runs:
        return _combine(self, other, lambda a, b: a & b)

    def __or__(self, other: Runs) -> Runs:
        return _combine(self, other, lambda a, b: a | b)

    def __sub__(self, other: Runs) -> Runs:
        return _combine(self, other, lambda a, b: a & ~b)

    # Inside

    def _all_ends(self) -> Array:
        if self._fresh < self._size:
            first = max(self._fresh, self._head)
            base = self._ends[first - 1] if first > self._head else 0  # only differences matter
            fresh = slice(first, self._size)
            self._ends[fresh] = base + np.cumsum(self._counts[fresh])
            self._shift[fresh] = self._starts[fresh] - self._ends[fresh] + self._counts[fresh]
            self._fresh = self._size
        return self._ends

    def _append(self, key: int, count: int) -> None:
        if self._size == len(self._starts):
            self._grow()
        self._starts[self._size], self._counts[self._size] = key, count
        self._fresh = min(self._fresh, self._size)
        self._size += 1

    def _insert(self, key: int, count: int, join: bool) -> None:
        at = self._head + int(np.searchsorted(self.starts, key))
        before = bool(join and at > self._head and self._starts[at - 1] + self._counts[at - 1] == key)
        behind = bool(join and at < self._size and self._starts[at] == key + count)
        if before and not behind:
            self._counts[at - 1] += count
            self._fresh = min(self._fresh, at - 1)
            return
        first, stop = at - before, at + behind
        total = count + int(self._counts[first:stop].sum())
        self._replace(first, stop, [(int(self._starts[first]) if before else key, total)])

    def _overlap(self, low: int, high: int) -> tuple[int, int]:
        starts, counts = self.starts, self.counts
        first = int(np.searchsorted(starts, low, side="right")) - 1
        if first < 0 or starts[first] + counts[first] <= low:
            first += 1
        return self._head + first, self._head + max(first, int(np.searchsorted(starts, high)))

    def _replace(self, first: int, stop: int, pieces: list[tuple[int, int]]) -> None:
        while self._size + len(pieces) > len(self._starts):
            before = self._head
            self._grow()
            first, stop = first - before + self._head, stop - before + self._head
        tail = slice(stop, self._size)
        moved = first + len(pieces)
        for array in (self._starts, self._counts):
            array[moved : moved + self._size - stop] = array[tail].copy()
        for i, (key, count) in enumerate(pieces):
            self._starts[first + i], self._counts[first + i] = key, count
        self._size += len(pieces) - (stop - first)
        self._fresh = min(self._fresh, first)

    def _grow(self) -> None:
        """Drops the removed head and doubles the room."""
        live = self._size - self._head
        room = max(64, 2 * live)
        for name in ("_starts", "_counts", "_ends", "_shift"):
            array = np.zeros(room, np.int64)
            array[:live] = getattr(self, name)[self._head : self._size]
            setattr(self, name, array)
        self._fresh, self._head, self._size = 0, 0, live


def search(ends: Array, values: Array) -> Array:
    """Returns ``np.searchsorted(ends, values, "right")``: sorted values are found
    so much faster that it pays to sort them."""
    order = values.argsort()
    found = np.empty(len(values), np.int64)
    found[order] = ends.searchsorted(values.take(order), "right")
    return found


def _combine(a: Runs, b: Runs, rule: object) -> Runs:
    """Set algebra by a sweep over the ends of all runs."""
    edges = np.concatenate([a.starts, a.starts + a.counts, b.starts, b.starts + b.counts])
    in_a = np.concatenate([np.ones(len(a.starts)), -np.ones(len(a.starts)), np.zeros(2 * len(b.starts))])
    in_b = np.concatenate([np.zeros(2 * len(a.starts)), np.ones(len(b.starts)), -np.ones(len(b.starts))])
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    inside_a, inside_b = np.cumsum(in_a[order]) > 0, np.cumsum(in_b[order]) > 0
    # the state after all edges at one place
    last = np.r_[edges[1:] != edges[:-1], True] if len(edges) else np.zeros(0, bool)
    edges, inside = edges[last], rule(inside_a, inside_b)[last]  # type: ignore[operator]
    changed = np.flatnonzero(np.diff(np.r_[False, inside]))
    places = edges[changed]
    starts, stops = places[0::2], places[1::2]
    return Runs(starts, stops - starts)


def changes(before: Runs, now: Runs) -> tuple[Runs, Runs]:
    """(added, removed), looking only at the runs that differ: most changes are at the two ends."""
    a, b = (before.starts, before.counts), (now.starts, now.counts)
    head = int(np.searchsorted(a[0], b[0][0])) if len(b[0]) else len(a[0])
    evicted = Runs(a[0][:head], a[1][:head])
    a = (a[0][head:], a[1][head:])
    n = min(len(a[0]), len(b[0]))
    differs = (a[0][:n] != b[0][:n]) | (a[1][:n] != b[1][:n])
    same = int(np.argmax(differs)) if differs.any() else n
    old, new = Runs(a[0][same:], a[1][same:]), Runs(b[0][same:], b[1][same:])
    return new - old - evicted, (old | evicted) - now


def as_runs(keys: Array) -> Runs:
    """The runs of these keys, in any order."""
    keys = np.sort(keys)
    first = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 2) != 1)
    return Runs(keys[first], np.diff(first, append=len(keys)))
