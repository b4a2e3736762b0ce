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

*Touched* means inserted or updated, even to the same priority. ``sample`` removes nothing:
`Fifo`, `Lifo` and the heaps give the same key n times, as Reverb does, and ``peek(n)`` gives the
first n in order to a caller that removes what it takes.

A call that raises has changed nothing. Selectors hold no lock and no generator: the caller has
both. ``load_state(state())`` gives a selector that goes on exactly as the first would. A key costs
110 to 200 bytes, most of them those of a Python dict.
"""

from __future__ import annotations

import heapq
import math
import operator
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice, repeat
from typing import Any, ClassVar, Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hilt.core.errors import ConfigError, EmptyError, UnknownNameError
from hilt.replay.sampling.sumtree import Floats, Ints, SumTree

_HEAVIEST = 1e290  # of these, even 2**57 have a finite sum


class Selector(ABC):
    """What every selector does. Priorities are finite and 0 or more; left out of ``insert`` they are 1."""

    _columns: ClassVar[tuple[str, ...]] = ("keys",)  # the arrays of a state
    _index: dict[int, int]
    """The keys, and what a subclass wants to find by key."""

    def __init__(self) -> None:
        self.clear()

    def insert(self, keys: Ints, priorities: Floats | None = None) -> None:
        """Add new keys; a key that is there or given twice is an error."""
        keys = _checked_keys(keys)
        weights = np.ones(len(keys)) if priorities is None else _checked_priorities(keys, priorities)
        listed = keys.tolist()
        if not self._index.keys().isdisjoint(listed):
            at = next(at for at, key in enumerate(listed) if key in self._index)
            raise ConfigError(
                f"key {keys[at]} at position {at} is already there; update() changes its priority, "
                "delete() makes room for it"
            )
        _refuse_repeated(listed)
        self._insert(keys, weights)

    def delete(self, keys: Ints) -> None:
        """Remove keys; one that is not there or given twice is an error."""
        keys = _checked_keys(keys)
        self._find(keys)
        _refuse_repeated(keys.tolist())
        self._delete(keys)

    def update(self, keys: Ints, priorities: Floats) -> None:
        """Change priorities; an unknown key is an error, and of a key given twice the last priority counts."""
        keys = _checked_keys(keys)
        priorities = _checked_priorities(keys, priorities)
        self._update(keys, self._find(keys), priorities)

    @abstractmethod
    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """``n`` keys, drawn independently, and the probability of each."""

    def contains(self, keys: Ints) -> NDArray[np.bool_]:
        """For each key whether it is there: so a learner leaves out what was evicted before it updates priorities."""
        keys = _checked_keys(keys)
        return np.fromiter(map(self._index.__contains__, keys.tolist()), np.bool_, len(keys))

    @abstractmethod
    def clear(self) -> None:
        """Remove all keys."""

    @abstractmethod
    def state(self) -> dict[str, object]:
        """Arrays and plain values that ``load_state`` takes."""

    def load_state(self, state: Mapping[str, object]) -> None:
        """Become the selector that gave this state; that of another class or exponent is an error."""
        own = type(self).__name__
        if state.get("selector") != own:
            raise ConfigError(
                f"this is the state of a {state.get('selector')} selector, and a {own} was to "
                "take it; build the same class"
            )
        if missing := [name for name in self._columns if name not in state]:
            raise ConfigError(f"the state of this {own} lacks {', '.join(missing)}; give what state() returned")
        columns = {name: np.asarray(state[name]) for name in self._columns}
        if len({column.shape for column in columns.values()}) > 1:
            shapes = ", ".join(f"{name} {column.shape}" for name, column in columns.items())
            raise ConfigError(
                f"the columns of this {own} state have different lengths: {shapes}; give what state() returned"
            )
        _refuse_repeated(_checked_keys(columns["keys"]).tolist())
        self._load(state, *columns.values())

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} keys)"

    @abstractmethod
    def _insert(self, keys: Ints, priorities: Floats) -> None: ...

    @abstractmethod
    def _delete(self, keys: Ints) -> None: ...

    def _update(self, keys: Ints, found: Ints, priorities: Floats) -> None:
        return  # where priorities decide nothing

    def _load(self, state: Mapping[str, Any], keys: Ints, *columns: Any) -> None:
        self.clear()
        self._insert(keys, np.ones(len(keys)))

    def _find(self, keys: Ints) -> Ints:
        """What the index has for each key; an error names the first that is not there."""
        try:
            return np.fromiter(map(self._index.__getitem__, keys.tolist()), np.int64, len(keys))
        except KeyError:
            at = int(np.argmin(self.contains(keys)))
            raise ConfigError(
                f"key {keys[at]} at position {at} is not among the {len(self)} keys here; ask "
                "contains() before, or insert() it"
            ) from None

    def _draws(self, n: SupportsIndex) -> int:
        number = operator.index(n)
        if number < 1:
            raise ConfigError(f"{number} keys were asked of a {type(self).__name__} selector; ask for 1 or more")
        if not len(self):
            raise EmptyError(
                f"{number} keys were asked of a {type(self).__name__} selector that holds none; insert() some first"
            )
        return number


class OrderedSelector(Selector):
    """A selector with a first, second, ... item: `Fifo`, `Lifo`, `MinHeap`, `MaxHeap`."""

    @abstractmethod
    def peek(self, n: int) -> Ints:
        """The first ``n`` keys in order; fewer when fewer are there."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        return self.peek(1).repeat(n), np.ones(n)


class Uniform(Selector):
    """Every key alike, with replacement."""

    # Keys are in slots 0 .. size - 1, and the index has the slot of each. When some are
    # deleted, the last ones move into their slots.

    def clear(self) -> None:
        self._index = {}
        self._keys: Ints = np.zeros(64, np.int64)  # by slot

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        return self._keys[rng.integers(0, len(self), n)], np.full(n, 1.0 / len(self))

    def state(self) -> dict[str, object]:
        return {"selector": type(self).__name__, "keys": self._keys[: len(self)].copy()}

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        start, end = len(self), len(self) + len(keys)
        if end > len(self._keys):
            self._grow(1 << (end - 1).bit_length())
        self._keys[start:end] = keys
        self._index.update(zip(keys.tolist(), range(start, end), strict=True))

    def _delete(self, keys: Ints) -> None:
        slots = np.fromiter(map(self._index.pop, keys.tolist()), np.int64, len(keys))
        size = len(self)
        stays = np.ones(len(slots), np.bool_)  # of the last slots, which are given up
        stays[slots[slots >= size] - size] = False
        source, target = size + np.flatnonzero(stays), np.sort(slots[slots < size])
        self._keys[target] = self._keys[source]
        self._index.update(zip(self._keys[target].tolist(), target.tolist(), strict=True))
        self._move(source, target, np.arange(size, size + len(slots)))

    def _move(self, source: Ints, target: Ints, free: Ints) -> None:
        """What was in the slots ``source`` is now in ``target``; the slots ``free`` are empty."""

    def _grow(self, capacity: int) -> None:
        self._keys = np.concatenate([self._keys, np.zeros(capacity - len(self._keys), np.int64)])


class Prioritized(Uniform):
    """Key k with probability ``priority_k ** exponent / sum_j priority_j ** exponent``, with replacement.

    A priority of 0 has weight 0 whatever the exponent, so such a key is never
    drawn, unless all are 0: then every key alike.

    Args:
        exponent: 0 or more. 0: every key alike but those of priority 0; 1: in proportion to the priorities.
    """

    _columns = ("keys", "weights")

    def __init__(self, exponent: float):
        self.exponent = float(exponent)
        if not 0 <= self.exponent < math.inf:
            raise ConfigError(
                f"exponent ({exponent}) must be 0 or more and finite; 1 samples in proportion to the priorities"
            )
        super().__init__()

    def clear(self) -> None:
        super().clear()
        self._tree = SumTree(len(self._keys))

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        n = self._draws(n)
        total = self._tree.total()
        if total == 0:
            return super().sample(n, rng)
        slots = self._tree.draw(n, rng)
        return self._keys[slots], self._tree.weights[slots] / total

    def state(self) -> dict[str, object]:
        # The capacity decides how many levels of sums there are, and so the last bits of what is drawn.
        weights = self._tree.weights[: len(self)].copy()
        return super().state() | {"exponent": self.exponent, "weights": weights, "capacity": len(self._keys)}

    def _load(self, state: Mapping[str, Any], keys: Ints, *columns: Any) -> None:
        if state.get("exponent") != self.exponent:
            raise ConfigError(
                f"the state was saved with exponent {state.get('exponent')}, and this selector has {self.exponent}; "
                "build it with the saved exponent, or insert the keys again with their priorities"
            )
        weights = _checked_priorities(keys, columns[0])
        super()._load(state, keys)
        if state.get("capacity", 0) > len(self._keys):
            self._grow(state["capacity"])
        self._tree.set(np.arange(len(keys)), weights)

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        weights = self._weights(priorities)
        super()._insert(keys, priorities)
        self._tree.set(np.arange(len(self) - len(keys), len(self)), weights)

    def _update(self, keys: Ints, found: Ints, priorities: Floats) -> None:
        self._tree.set(found, self._weights(priorities))

    def _move(self, source: Ints, target: Ints, free: Ints) -> None:
        self._tree.set(target, self._tree.weights[source])
        self._tree.set(free, 0.0)

    def _grow(self, capacity: int) -> None:
        super()._grow(capacity)
        self._tree.grow(capacity)

    def _weights(self, priorities: Floats) -> Floats:
        highest = float(priorities.max(initial=0.0))
        if highest > 1 and self.exponent * math.log(highest) > math.log(_HEAVIEST):
            raise ConfigError(
                f"the priority at position {int(np.argmax(priorities))} is {highest}, which to the power "
                f"{self.exponent:g} is above {_HEAVIEST:g} and too large to be summed; scale the priorities down"
            )
        return priorities**self.exponent if self.exponent else (priorities > 0).astype(np.float64)


class Fifo(OrderedSelector):
    """The key that came first; updates change nothing."""

    def clear(self) -> None:
        self._index = OrderedDict()  # in the order the keys came; its values mean nothing

    def peek(self, n: int) -> Ints:
        return np.fromiter(islice(self._in_order(), self._draws(n)), np.int64)

    def state(self) -> dict[str, object]:
        return {"selector": type(self).__name__, "keys": np.fromiter(self._index, np.int64, len(self))}

    def _in_order(self) -> Iterator[int]:
        return iter(self._index)

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        self._index.update(zip(keys.tolist(), repeat(0)))

    def _delete(self, keys: Ints) -> None:
        for key in keys.tolist():
            del self._index[key]


class Lifo(Fifo):
    """The key that came last; updates change nothing."""

    def _in_order(self) -> Iterator[int]:
        return reversed(self._index)


class MinHeap(OrderedSelector):
    """The lowest priority; of equals the one inserted or updated least recently."""

    # The heap has (signed priority, touch, key), where touch counts inserts and updates, and the index each key's
    # newest touch: an entry of an older one is stale and skipped when it comes up.

    _columns = ("keys", "priorities", "touches")
    _sign = 1.0

    def clear(self) -> None:
        self._index = {}
        self._heap: list[tuple[float, int, int]] = []
        self._touches = 0

    def peek(self, n: int) -> Ints:
        n = min(self._draws(n), len(self))
        first: list[tuple[float, int, int]] = []
        while len(first) < n:
            entry = heapq.heappop(self._heap)
            if self._index.get(entry[2]) == entry[1]:
                first.append(entry)
        for entry in first:
            heapq.heappush(self._heap, entry)
        return np.array([key for _, _, key in first], np.int64)

    def state(self) -> dict[str, object]:
        self._drop_stale()
        entries = sorted(self._heap)
        return {
            "selector": type(self).__name__,
            "keys": np.array([key for _, _, key in entries], np.int64),
            "priorities": np.array([priority for priority, _, _ in entries]) * self._sign,
            "touches": np.array([touch for _, touch, _ in entries], np.int64),
            "touched": self._touches,
        }

    def _load(self, state: Mapping[str, Any], keys: Ints, *columns: Any) -> None:
        priorities, touches, touched = _checked_priorities(keys, columns[0]), columns[1], int(state.get("touched", -1))
        if len(np.unique(touches)) < len(touches) or np.any((touches < 0) | (touches >= touched)):
            raise ConfigError(
                f"the touches of this state are not distinct numbers from 0 to {touched - 1}; "
                "give what state() returned"
            )
        self.clear()
        order = np.argsort(touches)
        self._push(keys[order], priorities[order], touches[order].tolist())
        self._touches = touched

    def _insert(self, keys: Ints, priorities: Floats) -> None:
        self._push(keys, priorities, range(self._touches, self._touches + len(keys)))

    def _update(self, keys: Ints, found: Ints, priorities: Floats) -> None:
        self._insert(keys, priorities)

    def _delete(self, keys: Ints) -> None:
        for key in keys.tolist():
            del self._index[key]
        self._push(keys[:0], np.zeros(0), range(0))

    def _push(self, keys: Ints, priorities: Floats, touches: range | list[int]) -> None:
        entries = list(zip((priorities * self._sign).tolist(), touches, keys.tolist(), strict=True))
        self._index.update((key, touch) for _, touch, key in entries)
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
        self._heap = [entry for entry in self._heap if self._index.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)


class MaxHeap(MinHeap):
    """The highest priority; of equals the one inserted or updated least recently."""

    _sign = -1.0


def importance_weights(
    probabilities: ArrayLike, size: int, beta: float, normalize: Literal["batch max", "none"] = "batch max"
) -> Floats:
    """Weights that undo the bias of prioritized sampling (Schaul et al., 2016)::

        w_i = (size * probability_i) ** -beta          "none"
        w_i / max_j w_j, over the batch                "batch max": no weight above 1, so learning rates keep their
                                                       meaning

    Args:
        probabilities: of the sampled keys, as ``sample`` gave them; above 0, at most 1.
        size: keys in the selector when they were sampled.
        beta: 0 (no correction) to 1 (full correction); usually raised to 1 during training.
    """
    p = np.asarray(probabilities, np.float64)
    good = (p > 0) & (p <= 1)
    if not good.all():
        at = int(np.argmin(good))
        raise ConfigError(
            f"the probability at position {at} is {p.flat[at]}, expected above 0 and at most 1; "
            "give what sample() returned"
        )
    if operator.index(size) < 1:
        raise ConfigError(f"size ({size}) must be 1 or more: the keys in the selector when they were sampled")
    if not 0 <= beta < math.inf:
        raise ConfigError(f"beta ({beta}) must be 0 or more and finite; 1 corrects the bias in full")
    if normalize not in ("batch max", "none"):
        raise UnknownNameError("normalization", normalize, ("batch max", "none"))
    if normalize == "batch max" and p.size:
        return np.asarray((p / p.min()) ** -beta)  # the least probable has the largest weight
    return np.asarray((size * p) ** -beta)


def _checked_keys(keys: Ints) -> Ints:
    array = np.asarray(keys)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"keys must be a one-dimensional array of int64, got shape {array.shape} of "
            f"{array.dtype}; give np.array([...])"
        )
    if array.size and array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ConfigError(
            f"key {array.max()} at position {int(array.argmax())} does not fit into int64; give keys below 2**63"
        )
    return array.astype(np.int64)


def _checked_priorities(keys: Ints, priorities: ArrayLike) -> Floats:
    array = np.asarray(priorities, np.float64)
    if array.shape != keys.shape:
        raise ConfigError(f"got {len(keys)} keys and priorities of shape {array.shape}; give one priority for each key")
    lowest, highest = (array[0], array[0]) if len(array) == 1 else (array.min(initial=0.0), array.max(initial=0.0))
    if not (lowest >= 0 and highest < math.inf):
        at = int(np.argmin((array >= 0) & (array < math.inf)))
        raise ConfigError(
            f"the priority at position {at} (key {keys[at]}) is {array[at]}; a priority must be 0 or more and "
            "finite. Nothing was changed"
        )
    return array


def _refuse_repeated(keys: list[int]) -> None:
    if len(set(keys)) < len(keys):
        first: dict[int, int] = {}
        at, key = next((at, key) for at, key in enumerate(keys) if first.setdefault(key, at) != at)
        raise ConfigError(f"key {key} is given twice, at positions {first[key]} and {at}; give each key once")
