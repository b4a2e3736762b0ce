"""Selectors: which item is sampled next, or removed next. Reverb's six, over int64 keys.

================  ==========================================================  =========================
class             chooses                                                     probability it reports
================  ==========================================================  =========================
`Uniform`         any key alike                                               1 / size
`Prioritized`     key k with weight priority_k ** exponent                    weight_k / sum of weights
`Fifo`            the key that came first                                     1
`Lifo`            the key that came last                                      1
`MinHeap`         the lowest priority; of equals the least recently touched   1
`MaxHeap`         the highest priority; of equals the least recently touched  1
================  ==========================================================  =========================

*Touched* means inserted or updated, even to the same priority. ``sample`` removes nothing: `Fifo`, `Lifo` and the heaps give the
same key n times, as Reverb does, and ``peek(n)`` gives the first n in order to a caller that removes what it takes.

A call that raises has changed nothing. Selectors hold no lock and no generator: the caller has both. ``load_state(state())``
gives a selector that goes on exactly as the first would.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.replay.keyindex import Ints, KeyIndex, enlarged, next_capacity
from hilt.replay.selector import Keyed, OrderedSelector, Selector, checked_keys, checked_priorities
from hilt.replay.sumtree import Floats, SumTree

__all__ = ["Selector", "OrderedSelector", "Uniform", "Prioritized", "Fifo", "Lifo", "MinHeap", "MaxHeap", "importance_weights"]

_Entry = tuple[float, int, int]  # of a heap: signed priority, touch, key
_HEAVIEST = 1e290  # of these, even 2**57 have a finite sum


class _Dense(Keyed):
    """Keys in slots 0 .. size - 1 without gaps: when some are deleted, the last ones move into their slots."""

    def clear(self) -> None:
        super().clear()
        self._keys: Ints = np.zeros(64, np.int64)

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        start = len(self)
        self._index.insert(keys, np.arange(start, start + len(keys)))
        self._reserve(start + len(keys))
        self._keys[start : start + len(keys)] = keys

    def _insert_one(self, key: int, priority: float) -> None:
        slot = len(self)
        self._index.insert_one(key, slot)
        if slot == len(self._keys):
            self._reserve(slot + 1)
        self._keys[slot] = key

    def _delete(self, keys: Ints) -> None:
        before = len(self)
        slots = self._index.remove(keys)
        size = before - len(slots)
        stays = np.ones(len(slots), np.bool_)  # of the last slots, which are given up
        stays[slots[slots >= size] - size] = False
        source = size + np.flatnonzero(stays)
        target = np.sort(slots[slots < size])
        self._keys[target] = self._keys[source]
        self._index.move(self._keys[target], target)
        self._moved(source, target, size, before)

    def _moved(self, source: Ints, target: Ints, size: int, before: int) -> None:
        """What was in the slots ``source`` is now in ``target``; the slots from ``size`` to ``before`` are free."""

    def _reserve(self, size: int) -> None:
        if size > len(self._keys):
            self._keys = enlarged(self._keys, len(self._keys), next_capacity(len(self._keys), size))

    def _load_keys(self, keys: NDArray[Any], capacity: int = 0) -> None:
        keys = checked_keys(keys)
        index = KeyIndex.of(keys)
        self.clear()
        self._index = index
        self._reserve(max(len(keys), capacity))
        self._keys[: len(keys)] = keys


class Uniform(_Dense):
    """Every key alike, with replacement. 24 bytes a key with the index, up to half more after a growth."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        return self._keys[rng.integers(0, len(self), n)], np.full(n, 1.0 / len(self))

    def state(self) -> dict[str, Any]:
        return {"selector": "Uniform", "keys": self._keys[: len(self)].copy()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        (keys,) = self._columns(state, "keys")
        self._load_keys(keys)


class Prioritized(_Dense):
    """Key k with probability ``priority_k ** exponent / sum_j priority_j ** exponent``, with replacement.

    A priority of 0 has weight 0 whatever the exponent, so such a key is never drawn, unless all are 0: then every key alike.
    17 bytes a key and 16 for the index, up to half more after a growth.

    Args:
        exponent: 0 or more. 0: every key alike but those of priority 0; 1: in proportion to the priorities.
    """

    def __init__(self, exponent: float):
        self.exponent = float(exponent)
        if not 0 <= self.exponent < math.inf:
            raise ConfigError(f"exponent ({exponent}) must be 0 or more and finite; 1 samples in proportion to the priorities")
        super().__init__()

    def clear(self) -> None:
        super().clear()
        self._tree = SumTree(len(self._keys))
        self._summed = 0  # slots from here on have weights that are not in the sums yet

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        if self._summed < len(self):
            self._tree.refresh(self._summed, len(self))
            self._summed = len(self)
        total = self._tree.total()
        if total == 0:
            return self._keys[rng.integers(0, len(self), n)], np.full(n, 1.0 / len(self))
        slots = self._tree.draw(n, rng)
        return self._keys[slots], self._tree.weights[slots] / total

    def state(self) -> dict[str, Any]:
        keys, weights = self._keys[: len(self)].copy(), self._tree.weights[: len(self)].copy()
        # The capacity decides how weights are grouped in the sums, and so the last bits of what is drawn.
        return {"selector": "Prioritized", "exponent": self.exponent, "keys": keys, "weights": weights, "capacity": len(self._keys)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        keys, weights = self._columns(state, "keys", "weights")
        if state.get("exponent") != self.exponent:
            raise ConfigError(
                f"the state was saved with exponent {state.get('exponent')}, and this selector has {self.exponent}; "
                "build it with the saved exponent, or insert the keys again with their priorities"
            )
        weights = checked_priorities(keys, weights)
        self._load_keys(keys, capacity=operator.index(state.get("capacity", 0)))
        self._tree.weights[: len(weights)] = weights

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        weights = self._weights(priorities)
        start = len(self)
        super()._insert(keys, priorities)
        self._tree.weights[start : len(self)] = weights

    def _insert_one(self, key: int, priority: float) -> None:
        try:
            weight = priority**self.exponent if priority else 0.0
        except OverflowError:
            weight = math.inf
        self._refuse_heavy(weight, priority, 0)
        super()._insert_one(key, priority)
        self._tree.weights[len(self) - 1] = weight

    def _update(self, keys: Ints, priorities: Floats) -> None:
        weights = self._weights(priorities)
        self._tree.set(self._index.require(keys), weights)

    def _moved(self, source: Ints, target: Ints, size: int, before: int) -> None:
        weights = self._tree.weights
        moved = weights[source]
        weights[size:before] = 0.0
        self._tree.refresh(size, before)
        self._tree.set(target, moved)
        self._summed = min(self._summed, size)

    def _reserve(self, size: int) -> None:
        super()._reserve(size)
        self._tree.reserve(len(self._keys))

    def _weights(self, priorities: Floats) -> Floats:
        if self.exponent == 1:
            weights = priorities
        else:
            with np.errstate(over="ignore"):
                weights = np.where(priorities == 0, 0.0, priorities**self.exponent)
        if len(weights):
            at = int(np.argmax(weights))
            self._refuse_heavy(weights[at], priorities[at], at)
        return weights

    def _refuse_heavy(self, weight: float, priority: float, at: int) -> None:
        if weight > _HEAVIEST:
            raise ConfigError(
                f"the priority at position {at} is {priority}, which to the power {self.exponent:g} is above {_HEAVIEST:g} "
                "and too large to be summed; scale the priorities down"
            )


class _Arrivals(Keyed):
    """Keys in the order they came, with gaps where some were deleted; the first and the last are never gaps."""

    def clear(self) -> None:
        super().clear()
        self._keys: Ints = np.zeros(64, np.int64)
        self._live: NDArray[np.bool_] = np.zeros(64, np.bool_)
        self._start = self._end = 0

    def state(self) -> dict[str, Any]:
        return {"selector": type(self).__name__, "keys": self._in_order()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        (keys,) = self._columns(state, "keys")
        keys = checked_keys(keys)
        index = KeyIndex.of(keys)
        self.clear()
        self._index = index
        self._place(keys, max(64, len(keys)))

    def _in_order(self) -> Ints:
        return self._keys[self._start : self._end][self._live[self._start : self._end]]

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        if self._end + len(keys) > len(self._keys):
            self._make_room(len(keys))
        self._index.insert(keys, np.arange(self._end, self._end + len(keys)))
        self._keys[self._end : self._end + len(keys)] = keys
        self._live[self._end : self._end + len(keys)] = True
        self._end += len(keys)

    def _insert_one(self, key: int, priority: float) -> None:
        end = self._end
        if end == len(self._keys):
            self._make_room(1)
            end = self._end
        self._index.insert_one(key, end)
        self._keys[end] = key
        self._live[end] = True
        self._end = end + 1

    def _delete(self, keys: Ints) -> None:
        self._live[self._index.remove(keys)] = False
        if not len(self._index):
            self._start = self._end = 0
            return
        if not self._live[self._start]:
            self._start += int(self._live[self._start : self._end].argmax())
        window = 64
        while not self._live[self._end - 1]:
            behind = self._live[max(self._start, self._end - window) : self._end][::-1]
            gaps = int(behind.argmax())
            self._end -= gaps if behind[gaps] else len(behind)
            window *= 2

    def _make_room(self, more: int) -> None:
        """Close the gaps, and grow unless that alone leaves half of the room free."""
        keys = self._in_order()
        room = len(self._keys)
        while 2 * (len(keys) + more) > room:
            room *= 2
        self._index = KeyIndex.of(keys)
        self._place(keys, room)

    def _place(self, keys: Ints, room: int) -> None:
        self._keys = enlarged(keys, len(keys), room)
        self._live = np.zeros(room, np.bool_)
        self._live[: len(keys)] = True
        self._start, self._end = 0, len(keys)


class Fifo(_Arrivals):
    """The key that came first; updates change nothing. 9 bytes a key and 16 for the index, up to four times that after a growth."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        return np.full(n, self._keys[self._start]), np.ones(n)

    def peek(self, n: int) -> Ints:
        n = self._draws(n)
        window = max(n, 64)
        while True:  # a wider window when gaps leave too few in this one
            end = min(self._end, self._start + window)
            keys = self._keys[self._start : end][self._live[self._start : end]]
            if len(keys) >= n or end == self._end:
                return keys[:n]
            window *= 2


class Lifo(_Arrivals):
    """The key that came last; updates change nothing. Memory as `Fifo`."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        return np.full(n, self._keys[self._end - 1]), np.ones(n)

    def peek(self, n: int) -> Ints:
        n = self._draws(n)
        window = max(n, 64)
        while True:
            start = max(self._start, self._end - window)
            keys = self._keys[start : self._end][self._live[start : self._end]]
            if len(keys) >= n or start == self._start:
                return keys[::-1][:n].copy()
            window *= 2


class _Heap(Keyed):
    """Keys by (priority, touch), where touch counts inserts and updates.

    A heap takes and gives one item at a time, which is Python's ``heapq`` at its best and numpy at its worst: so entries are tuples,
    about 180 bytes a key. The index has each key's newest touch; an entry of an older one is stale and skipped when it comes up.
    """

    _sign: float

    def clear(self) -> None:
        super().clear()
        self._heap: list[_Entry] = []
        self._touches = 0

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return np.full(n, self._heap[0][2]), np.ones(n)

    def peek(self, n: int) -> Ints:
        n = min(self._draws(n), len(self))
        first: list[_Entry] = []
        while len(first) < n:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                first.append(entry)
        for entry in first:
            heapq.heappush(self._heap, entry)
        return np.array([key for _, _, key in first], np.int64)

    def state(self) -> dict[str, Any]:
        self._drop_stale()
        columns = list(zip(*self._heap, strict=True)) or [(), (), ()]
        priorities, touches, keys = np.array(columns[0], np.float64), np.array(columns[1], np.int64), np.array(columns[2], np.int64)
        order = np.lexsort((touches, priorities))
        return {
            "selector": type(self).__name__,
            "keys": keys[order],
            "priorities": priorities[order] * self._sign,
            "touches": touches[order],
            "touched": self._touches,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        keys, priorities, touches = self._columns(state, "keys", "priorities", "touches")
        keys, priorities = checked_keys(keys), checked_priorities(keys, priorities)
        touched = int(state.get("touched", -1))
        if len(np.unique(touches)) < len(touches) or np.any((touches < 0) | (touches >= touched)):
            raise ConfigError(f"the touches of this state are not distinct numbers from 0 to {touched - 1}; give what state() returned")
        index = KeyIndex.of(keys, touches)
        self.clear()
        self._index = index
        self._heap = self._entries(keys, priorities, touches)
        heapq.heapify(self._heap)
        self._touches = touched

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        touches = self._touch(keys)
        self._index.insert(keys, touches)
        self._push(self._entries(keys, priorities, touches))

    def _insert_one(self, key: int, priority: float) -> None:
        self._index.insert_one(key, self._touches)
        heapq.heappush(self._heap, (priority * self._sign, self._touches, key))
        self._touches += 1

    def _update(self, keys: Ints, priorities: Floats) -> None:
        self._index.require(keys)
        touches = self._touch(keys)
        self._index.move(keys, touches)
        self._push(self._entries(keys, priorities, touches))

    def _delete(self, keys: Ints) -> None:
        self._index.remove(keys)
        self._push([])

    def _touch(self, keys: Ints) -> Ints:
        return np.arange(self._touches, self._touches + len(keys))

    def _entries(self, keys: Ints, priorities: Floats, touches: Ints) -> list[_Entry]:
        return list(zip((priorities * self._sign).tolist(), touches.tolist(), keys.tolist(), strict=True))

    def _push(self, entries: list[_Entry]) -> None:
        self._touches += len(entries)
        if len(entries) > len(self._heap) // 8:
            self._heap += entries
            heapq.heapify(self._heap)
        else:
            for entry in entries:
                heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self) + 1024:
            self._drop_stale()

    def _drop_stale(self) -> None:
        if len(self._heap) > len(self):
            table = np.array([(touch, key) for _, touch, key in self._heap], np.int64).reshape(-1, 2)
            live = self._index.find(table[:, 1]) == table[:, 0]
            self._heap = [entry for entry, is_live in zip(self._heap, live.tolist(), strict=True) if is_live]
            heapq.heapify(self._heap)

    def _is_live(self, entry: _Entry) -> bool:
        return self._index.find_one(entry[2]) == entry[1]


class MinHeap(_Heap):
    """The lowest priority; of equals the one inserted or updated least recently."""

    _sign = 1.0


class MaxHeap(_Heap):
    """The highest priority; of equals the one inserted or updated least recently."""

    _sign = -1.0


def importance_weights(probabilities: ArrayLike, size: int, beta: float, normalize: Literal["batch max", "none"] = "batch max") -> Floats:
    """Weights that undo the bias of prioritised sampling (Schaul et al., 2016)::

        w_i = (size * probability_i) ** -beta          "none"
        w_i / max_j w_j, over the batch                "batch max": no weight above 1, so learning rates keep their meaning

    Args:
        probabilities: of the sampled keys, as ``sample`` gave them; above 0, at most 1.
        size: keys in the selector when they were sampled.
        beta: 0 (no correction) to 1 (full correction); usually raised to 1 during training.
    """
    p = np.asarray(probabilities, np.float64)
    if not np.all((p > 0) & (p <= 1)):
        at = int(np.argmin(np.where((p > 0) & (p <= 1), 1, 0)))
        raise ConfigError(f"the probability at position {at} is {p.flat[at]}, expected above 0 and at most 1; give what sample() returned")
    if operator.index(size) < 1:
        raise ConfigError(f"size ({size}) must be 1 or more: the keys in the selector when they were sampled")
    if not 0 <= beta < math.inf:
        raise ConfigError(f"beta ({beta}) must be 0 or more and finite; 1 corrects the bias in full")
    if normalize not in ("batch max", "none"):
        raise UnknownNameError("normalisation", normalize, ("batch max", "none"))
    if normalize == "batch max" and p.size:
        return np.asarray((p / p.min()) ** -beta)  # the least probable has the largest weight
    return np.asarray((size * p) ** -beta)
