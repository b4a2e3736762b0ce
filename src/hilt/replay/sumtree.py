"""A sum tree over slots: draw slot k with probability weight_k / sum, for millions of weights, in a few numpy calls.

Level 0 has the weights; each number of a level above is the sum of sixteen below it, until a level has at most 8192. A draw is a
binary search in the running sums of that top level, and then, a level at a time, a running sum over sixteen numbers: for a million
weights one search and two such steps, for a whole batch at once. (A binary tree would need twenty steps.)

A sum is always computed anew from its sixteen parts, never changed by a difference, so rounding errors do not build up: after any
history the tree is bit for bit the one built from its weights alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hilt.replay.keyindex import Ints, enlarged

Floats = NDArray[np.float64]

FAN = 16
"""Parts of one sum."""
TOP = 8192
"""The top level has at most this many numbers."""


class SumTree:
    """Weights by slot, 0 or more, and their sums. ``weights[end:]`` must be 0 for the ``end`` last given to ``refresh``."""

    def __init__(self, capacity: int = 64) -> None:
        self._running: Floats | None = None  # sums of the top level, made when they are needed
        self._build(np.zeros(_room(capacity)))

    @property
    def weights(self) -> Floats:
        """Level 0. Whoever writes into it calls ``refresh`` for what was written before the next draw."""
        return self._levels[0]

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    def reserve(self, capacity: int) -> None:
        """Have room for this many slots."""
        if capacity > len(self.weights):
            self._build(enlarged(self.weights, len(self.weights), _room(capacity)))

    def set(self, slots: Ints, weights: Floats) -> None:
        """Change the weights of slots; of a slot given twice the last weight counts."""
        self.weights[slots] = weights
        if len(slots) > len(self.weights) // 64:
            self.refresh(0, len(self.weights))
            return
        parents = slots
        for parts, sums in zip(self._levels, self._levels[1:], strict=False):
            parents = parents // FAN
            sums[parents] = parts.reshape(-1, FAN).take(parents, axis=0).sum(axis=1)
        self._running = None

    def refresh(self, start: int, end: int) -> None:
        """Sum again what is above the slots ``start`` to ``end``."""
        for parts, sums in zip(self._levels, self._levels[1:], strict=False):
            start, end = start // FAN, -(-end // FAN)
            sums[start:end] = parts[start * FAN : end * FAN].reshape(-1, FAN).sum(axis=1)
        self._running = None

    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[-1].sum())

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """``n`` independent slots; the total must be above 0. A slot of weight 0 is never drawn."""
        if self._running is None:
            self._running = self._levels[-1].cumsum()
        running = self._running
        # A target strictly below the last running sum lies in a part that is above 0: that part raised the sum past it.
        targets = np.minimum(rng.random(n) * running[-1], np.nextafter(running[-1], 0.0))
        slots: Ints = running.searchsorted(targets, side="right").astype(np.int64, copy=False)
        targets -= np.where(slots > 0, running[slots - 1], 0.0)
        row = np.arange(n)
        for level in reversed(self._levels[:-1]):
            sums = np.zeros((n, FAN + 1))  # of the first 0, 1, ..., 16 parts
            np.cumsum(level.reshape(-1, FAN).take(slots, axis=0), axis=1, out=sums[:, 1:])
            targets = np.minimum(targets, np.nextafter(sums[:, FAN], 0.0))
            step = (sums[:, 1:] > targets[:, None]).argmax(axis=1)  # the first running sum above the target
            targets = targets - sums[row, step]
            slots = slots * FAN + step
        return slots

    def _build(self, weights: Floats) -> None:
        self._levels = [weights]
        while len(self._levels[-1]) > TOP:
            self._levels.append(self._levels[-1].reshape(-1, FAN).sum(axis=1))
        self._running = None


def _room(slots: int) -> int:
    """At least this many, a multiple of so large a power of two that every level but the top is divisible by `FAN`."""
    unit = 1 << max(2, (slots - 1).bit_length() - 4)
    return -(-slots // unit) * unit
