"""Where each key is: a map from int64 keys to slots, for selectors that hold millions of keys.

A Python dict would take about 120 bytes a key and one interpreted step per key looked up. Our keys are
``trajectory << 32 | offset``: they mostly come in rising order, and are looked up and deleted by the hundred. So the map is two
arrays, keys in rising order and their slots: a rising key is appended, a batch is found with one binary search in numpy, 16
bytes a key. Keys out of order (several actors with open trajectories at once, or keys that are no step numbers at all) go into
a small dict, which is merged into the arrays when it has grown to a sixteenth of them; so random keys work as well, at the cost of
copying each key some sixteen times in its life. Deleted keys stay in the arrays as tombstones until they are half of them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hilt.core.errors import ConfigError

Ints = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_SMALL = 1024  # below this many entries, tidying up costs more than it saves


class KeyIndex:
    """Maps distinct int64 keys to slots, which are numbers from 0 up. Errors leave it unchanged."""

    def __init__(self) -> None:
        self.clear()

    @classmethod
    def of(cls, keys: Ints, slots: Ints | None = None) -> KeyIndex:
        """An index of these keys; without slots, key number k is in slot k."""
        index = cls()
        index.insert(keys, np.arange(len(keys)) if slots is None else slots)
        return index

    def clear(self) -> None:
        self._keys: Ints = np.empty(64, np.int64)  # rising, the first _used
        self._slots: Ints = np.empty(64, np.int64)  # -1: deleted
        self._used = 0
        self._dead = 0
        self._last = -(2**63) - 1  # below every key
        self._late: dict[int, int] = {}  # all at or below _last

    def __len__(self) -> int:
        return self._used - self._dead + len(self._late)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (int, np.integer)) and -(2**63) <= int(key) < 2**63 and self.find_one(int(key)) >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, and about those of the dict."""
        return self._keys.nbytes + self._slots.nbytes + 120 * len(self._late)

    def find(self, keys: Ints) -> Ints:
        """The slot of each key, -1 where it is not there."""
        return self._locate(keys)[1]

    def find_one(self, key: int) -> int:
        """`find` for one key."""
        at = int(self._keys[: self._used].searchsorted(key))
        if at < self._used and self._keys[at] == key and self._slots[at] >= 0:
            return int(self._slots[at])
        return self._late.get(key, -1)

    def insert_one(self, key: int, slot: int) -> None:
        """`insert` for one key; a rising one costs well under a microsecond."""
        if key > self._last:
            used = self._used
            if used == len(self._keys):
                self._grow(used + 1)
            self._keys[used] = key
            self._slots[used] = slot
            self._used = used + 1
            self._last = key
            return
        if self.find_one(key) >= 0:
            raise ConfigError(f"key {key} is already there; update() changes its priority, delete() makes room for it")
        self._late[key] = slot
        self._tidy()

    def insert(self, keys: Ints, slots: Ints) -> None:
        """Add new keys."""
        if not np.all(keys[1:] > keys[:-1]):
            order = np.argsort(keys, kind="stable")
            _refuse_repeated(keys, order)
        else:
            order = None
        if len(keys) and int(keys.min()) <= self._last:
            found = self.find(keys)
            if (found >= 0).any():
                at = int(np.argmax(found >= 0))
                raise ConfigError(
                    f"key {keys[at]} at position {at} is already there; update() changes its priority, delete() makes room for it"
                )
        if order is not None:
            keys, slots = keys[order], slots[order]
        late = int(keys.searchsorted(self._last, side="right")) if self._used else 0
        self._late.update(zip(keys[:late].tolist(), slots[:late].tolist(), strict=True))
        if late < len(keys):
            end = self._used + len(keys) - late
            if end > len(self._keys):
                self._grow(end)
            self._keys[self._used : end] = keys[late:]
            self._slots[self._used : end] = slots[late:]
            self._used = end
            self._last = int(keys[-1])
        self._tidy()

    def require(self, keys: Ints) -> Ints:
        """The slot of each key; an error names the first that is not there."""
        slots = self.find(keys)
        _refuse_unknown(keys, slots, len(self))
        return slots

    def remove(self, keys: Ints) -> Ints:
        """Delete keys and return the slots they had."""
        at, slots = self._locate(keys)
        _refuse_unknown(keys, slots, len(self))
        if len(keys) > 1 and not np.all(keys[1:] > keys[:-1]):
            _refuse_repeated(keys, np.argsort(keys, kind="stable"))
        in_arrays = at >= 0
        self._slots[at[in_arrays]] = -1
        self._dead += int(np.count_nonzero(in_arrays))
        if self._late:
            for key in keys[~in_arrays].tolist():
                del self._late[key]
        self._tidy()
        return slots

    def move(self, keys: Ints, slots: Ints) -> None:
        """Give keys that are there other slots."""
        at, _ = self._locate(keys)
        in_arrays = at >= 0
        self._slots[at[in_arrays]] = slots[in_arrays]
        if self._late:
            self._late.update(zip(keys[~in_arrays].tolist(), slots[~in_arrays].tolist(), strict=True))

    def _locate(self, keys: Ints) -> tuple[Ints, Ints]:
        """For each key its position in the arrays (-1: not in them) and its slot (-1: nowhere)."""
        if self._used == self._dead:
            at = slots = np.full(len(keys), -1, np.int64)
        else:
            near = np.minimum(self._keys[: self._used].searchsorted(keys), self._used - 1)
            slots = np.where(self._keys[near] == keys, self._slots[near], -1)
            at = np.where(slots >= 0, near, -1)
        if self._late:
            slots = slots.copy()
            for position in np.flatnonzero(slots < 0).tolist():
                slots[position] = self._late.get(int(keys[position]), -1)
        return at, slots

    def _tidy(self) -> None:
        if len(self._late) > max(_SMALL, self._used // 16) or self._dead > max(_SMALL, self._used // 2):
            live = self._slots[: self._used] >= 0
            keys = np.concatenate([self._keys[: self._used][live], np.fromiter(self._late.keys(), np.int64, len(self._late))])
            slots = np.concatenate([self._slots[: self._used][live], np.fromiter(self._late.values(), np.int64, len(self._late))])
            self.clear()
            self.insert(keys, slots)

    def _grow(self, needed: int) -> None:
        capacity = next_capacity(len(self._keys), needed)
        self._keys = enlarged(self._keys, self._used, capacity)
        self._slots = enlarged(self._slots, self._used, capacity)


def enlarged(array: NDArray[_Scalar], used: int, capacity: int) -> NDArray[_Scalar]:
    """A zeroed array of ``capacity`` that begins with the first ``used`` of ``array``."""
    larger = np.zeros(capacity, array.dtype)
    larger[:used] = array[:used]
    return larger


def next_capacity(capacity: int, needed: int) -> int:
    """Half as much again: few copies over a life, and at most a third unused."""
    return max(needed, capacity + capacity // 2)


def _refuse_unknown(keys: Ints, slots: Ints, size: int) -> None:
    if (slots < 0).any():
        at = int(np.argmax(slots < 0))
        raise ConfigError(f"key {keys[at]} at position {at} is not among the {size} keys here; ask contains() before, or insert() it")


def _refuse_repeated(keys: Ints, order: NDArray[np.intp]) -> None:
    repeated = keys[order[1:]] == keys[order[:-1]]
    if repeated.any():
        first = int(np.argmax(repeated))
        one, other = order[first : first + 2]
        raise ConfigError(f"key {keys[one]} is given twice, at positions {one} and {other}; give each key once")
