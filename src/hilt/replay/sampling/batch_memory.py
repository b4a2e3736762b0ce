"""Memory for batches, used again.

Fresh memory costs more than filling it: the system clears every page at its first touch. A pool lends the memory of
batches that are no longer referenced.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from hilt.core.tree import Array
from hilt.replay.storage.lock import after_fork

_SMALL = 1 << 16
"""Below this many bytes the allocator is as fast."""


class BufferPool:
    """Lends arrays. A block is free again when no array refers to its memory, which its reference count says."""

    def __init__(self, kept: int = 8) -> None:
        """`kept` is how many blocks of one size are kept at most."""
        self._kept = kept
        self._blocks: dict[int, list[Array]] = defaultdict(list)
        self.renew_locks()
        after_fork(self, "renew_locks")

    def renew_locks(self) -> None:
        """Also in a forked process."""
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any content."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            blocks = self._blocks[size]
            for block in blocks:
                if sys.getrefcount(block) == _UNUSED:
                    return block.view(dtype).reshape(shape)
            block = np.empty(size, np.uint8)
            if len(blocks) < self._kept:
                blocks.append(block)
            return block.view(dtype).reshape(shape)


class RecentMemory:
    """Lends arrays of changing sizes: from the last few blocks, where one that is not
    referenced is large enough and not far too large."""

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._blocks: list[Array] = []
        self.renew_locks()
        after_fork(self, "renew_locks")

    def renew_locks(self) -> None:
        """Also in a forked process."""
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any content."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL:
            return np.empty(shape, dtype)
        with self._lock:
            for block in self._blocks:
                if size <= block.nbytes <= 2 * size and sys.getrefcount(block) == _UNUSED:
                    return block[:size].view(dtype).reshape(shape)
            block = np.empty(size, np.uint8)
            self._blocks = [*self._blocks, block][-self._kept :]
            return block.view(dtype).reshape(shape)


def _count_unused() -> int:
    """The reference count of a block that only its list, the loop and the call itself refer to."""
    for block in [np.empty(1, np.uint8)]:
        return sys.getrefcount(block)
    raise AssertionError


_UNUSED = _count_unused()
