"""What was used last stays in memory, up to a number of bytes that all of it shares."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """Values by key; those that were used least recently are dropped. Several threads may use it at once."""

    def __init__(self, max_bytes: int):
        """`max_bytes`: of all values together; the newest one is kept in any case."""
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self.nbytes = 0
        """Bytes of all values that are kept"""

    def get(self, key: Hashable) -> T | None:
        """The value of this key, None where there is none."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: T, nbytes: int) -> None:
        """Keeps a value of this size."""
        with self._lock:
            self.nbytes += nbytes - self._kept.pop(key, (None, 0))[1]
            self._kept[key] = value, nbytes
            while self.nbytes > self._max_bytes and len(self._kept) > 1:
                self.nbytes -= self._kept.popitem(last=False)[1][1]

    def drop(self, owner: Hashable) -> None:
        """Forgets the values whose key is a tuple that begins with this owner."""
        with self._lock:
            for key in [key for key in self._kept if isinstance(key, tuple) and key[0] == owner]:
                self.nbytes -= self._kept.pop(key)[1]

    def __len__(self) -> int:
        return len(self._kept)
