"""What every selector does (`Selector`), and the part that is the same in all of them (`Keyed`): the index and the checks."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hilt.core.errors import ConfigError, EmptyError
from hilt.replay.keyindex import Ints, KeyIndex
from hilt.replay.sumtree import Floats

_ONE = np.ones(1)


@runtime_checkable
class Selector(Protocol):
    """What every selector does. Priorities are finite and 0 or more; left out of ``insert`` they are 1."""

    def insert(self, keys: Ints, priorities: Floats | None = None) -> None:
        """Add new keys; a key that is there or given twice is an error."""

    def delete(self, keys: Ints) -> None:
        """Remove keys; one that is not there or given twice is an error."""

    def update(self, keys: Ints, priorities: Floats) -> None:
        """Change priorities; an unknown key is an error, and of a key given twice the last priority counts."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """``n`` keys, drawn independently, and the probability of each."""

    def contains(self, keys: Ints) -> NDArray[np.bool_]:
        """For each key whether it is there: so a learner leaves out what was evicted before it updates priorities."""

    def clear(self) -> None:
        """Remove all keys."""

    def state(self) -> dict[str, Any]:
        """Arrays and plain values that ``load_state`` takes."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become the selector that gave this state; that of another class or exponent is an error."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...


@runtime_checkable
class OrderedSelector(Selector, Protocol):
    """A selector with a first, second, ... item: `Fifo`, `Lifo`, `MinHeap`, `MaxHeap`."""

    def peek(self, n: int) -> Ints:
        """The first ``n`` keys in order; fewer when fewer are there."""


class Keyed(ABC):
    """What all selectors share: the index of keys, and the checks before anything changes."""

    def __init__(self) -> None:
        self._index = KeyIndex()
        self.clear()

    def insert(self, keys: Ints, priorities: Floats | None = None) -> None:
        keys = checked_keys(keys)
        if len(keys) != 1:
            self._insert(keys, np.ones(len(keys)) if priorities is None else checked_priorities(keys, priorities))
            return
        # An actor inserts one step at a time: a path of its own, which makes no arrays.
        if priorities is None:
            priorities = _ONE
        elif not isinstance(priorities, np.ndarray) or priorities.shape != (1,) or not 0.0 <= priorities[0] < math.inf:
            priorities = checked_priorities(keys, priorities)
        self._insert_one(int(keys[0]), float(priorities[0]))

    def update(self, keys: Ints, priorities: Floats) -> None:
        keys = checked_keys(keys)
        self._update(keys, checked_priorities(keys, priorities))

    def delete(self, keys: Ints) -> None:
        self._delete(checked_keys(keys))

    def contains(self, keys: Ints) -> NDArray[np.bool_]:
        return self._index.find(checked_keys(keys)) >= 0

    def clear(self) -> None:
        self._index.clear()

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} keys)"

    @abstractmethod
    def _insert(self, keys: Ints, priorities: Floats) -> None: ...

    @abstractmethod
    def _insert_one(self, key: int, priority: float) -> None: ...

    def _update(self, keys: Ints, priorities: Floats) -> None:
        self._index.require(keys)  # where priorities decide nothing, an unknown key is still an error

    @abstractmethod
    def _delete(self, keys: Ints) -> None: ...

    def _draws(self, n: SupportsIndex) -> int:
        number = operator.index(n)
        if number < 1:
            raise ConfigError(f"{number} keys were asked of a {type(self).__name__} selector; ask for 1 or more")
        if not len(self):
            raise EmptyError(f"{number} keys were asked of a {type(self).__name__} selector that holds none; insert() some first")
        return number

    def _columns(self, state: Mapping[str, Any], *names: str) -> list[NDArray[Any]]:
        """The named arrays of a state, all of one length; an error when the state is not one of this selector."""
        own = type(self).__name__
        if state.get("selector") != own:
            raise ConfigError(f"this is the state of a {state.get('selector')} selector, and a {own} was to take it; build the same class")
        if missing := [name for name in names if name not in state]:
            raise ConfigError(f"the state of this {own} lacks {', '.join(missing)}; give what state() returned")
        arrays = [np.asarray(state[name]) for name in names]
        if len({array.shape for array in arrays}) > 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(names, arrays, strict=True))
            raise ConfigError(f"the columns of this {own} state have different lengths: {shapes}; give what state() returned")
        return arrays


def checked_keys(keys: Ints) -> Ints:
    if isinstance(keys, np.ndarray) and keys.dtype == np.int64 and keys.ndim == 1:
        return keys
    array = np.asarray(keys)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"keys must be a one-dimensional array of int64, got shape {array.shape} of {array.dtype}; give np.array([...])")
    if array.size and array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ConfigError(f"key {array.max()} at position {int(array.argmax())} does not fit into int64; give keys below 2**63")
    return array.astype(np.int64)


def checked_priorities(keys: Ints, priorities: ArrayLike) -> Floats:
    array = np.asarray(priorities, np.float64)
    if array.shape != keys.shape:
        raise ConfigError(f"got {len(keys)} keys and priorities of shape {array.shape}; give one priority for each key")
    good = (array >= 0) & (array < math.inf)
    if not good.all():
        at = int(np.argmin(good))
        raise ConfigError(
            f"the priority at position {at} (key {keys[at]}) is {array[at]}; a priority must be 0 or more and finite. Nothing was changed"
        )
    return array
