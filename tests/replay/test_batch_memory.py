"""Memory that is lent again, and never while somebody holds it."""

from __future__ import annotations

import numpy as np

from hilt.replay.sampling.batch_memory import RecentMemory


def test_batch_memory_is_reused_only_without_references() -> None:
    memory = RecentMemory()
    first = memory.empty((4, 1 << 20), np.dtype(np.uint8))
    first[:] = 1
    kept = first[1:3]  # a view holds it as well
    del first
    second = memory.empty((4, 1 << 20), np.dtype(np.uint8))
    second[:] = 2
    assert (kept == 1).all() and not np.shares_memory(kept, second)
    place = second.__array_interface__["data"]
    del second
    third = memory.empty((3, 1 << 18), np.dtype(np.float32))
    assert third.shape == (3, 1 << 18) and third.dtype == np.float32
    assert third.__array_interface__["data"] == place, "a block that is large enough"
    assert (
        memory.empty((1, 1 << 20), np.dtype(np.uint8)).__array_interface__["data"] != kept.__array_interface__["data"]
    )


def test_a_block_that_is_far_too_large_is_not_taken_and_few_are_kept() -> None:
    memory = RecentMemory(kept=2)
    memory.empty((16, 1 << 20), np.dtype(np.uint8))
    small = memory.empty((1 << 20,), np.dtype(np.uint8))
    assert small.base is not None and small.base.nbytes == 1 << 20
    for size in range(3, 40, 7):
        memory.empty((size, 1 << 20), np.dtype(np.uint8))
    assert len(memory._blocks) == 2
