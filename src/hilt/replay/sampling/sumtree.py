"""A sum tree over slots: draw slot k with probability weight_k / sum, for millions of weights, in a few numpy calls.

Level 0 has the weights; each number of a level above is the sum of sixteen below it, until a level has at
most 8192. A draw is a binary search in the running sums of that top level, and then, a level at a time, a
running sum over sixteen numbers: for a million weights one search and two such steps, for a whole batch
at once. (A binary tree would need twenty steps.)

A sum is always computed anew from its sixteen parts, never changed by a difference, so rounding errors do not build up:
after any history the tree is bit for bit the one built from its weights alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FAN = 16
"""Parts of one sum."""
TOP = 8192
"""The top level has at most this many numbers."""


class SumTree:
    """Weights by slot, 0 or more, and their sums, which are brought up to date when they are asked for."""

    def __init__(self, capacity: int) -> None:
        self.weights: Floats = np.zeros(0)
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Have room for this many slots, a power of two from 16 up."""
        larger = np.zeros(capacity)
        larger[: len(self.weights)] = self.weights
        self.weights = larger
        self._levels = [larger]
        while len(self._levels[-1]) > TOP:
            self._levels.append(np.zeros(len(self._levels[-1]) // FAN))
        self._changed: list[Ints] | None = None  # slots whose sums are out of date; None: all
        self._running: Floats | None = None  # sums of the top level

    def set(self, slots: Ints, weights: Floats | float) -> None:
        """Change the weights of slots; of a slot given twice the last weight counts."""
        self.weights[slots] = weights
        self._running = None
        if self._changed is not None:
            self._changed.append(slots)
            if len(self._changed) > 1024 or len(slots) > len(self.weights) // 64:
                self._changed = None

    def total(self) -> float:
        """The sum of all weights."""
        self._sum()
        return float(self._levels[-1].sum())

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """``n`` independent slots; the total must be above 0. A slot of weight 0 is never drawn."""
        running = self._sum()
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

    def _sum(self) -> Floats:
        if self._running is None:
            slots = None if self._changed is None else np.concatenate(self._changed)
            for parts, sums in zip(self._levels, self._levels[1:], strict=False):
                if slots is None:
                    parts.reshape(-1, FAN).sum(axis=1, out=sums)
                else:
                    slots = slots // FAN
                    sums[slots] = parts.reshape(-1, FAN).take(slots, axis=0).sum(axis=1)
            self._changed = []
            self._running = self._levels[-1].cumsum()
        return self._running
