"""Steps that say themselves what they must contain, so that whatever is read back can be checked without a second copy.

An episode is a seed. Everything in its step number `t` is arithmetic on the two, the pixels included, and both
are columns of the step. A trajectory ``[T, B, ...]`` is `B` episodes with neighboring seeds; its steps carry `B`
and `T` as well, so that half of one is recognized.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.files import DISK, Files
from hilt.core.tree import Array
from hilt.replay import Log, Schema
from hilt.replay.key_ranges import OFFSET_BITS

SIDE = 32
IMAGE = "observations/image"
SPACING = 64
"""Seeds are multiples of this; the seeds between belong to the columns of one trajectory."""
SCHEMA = Schema.declare(
    {
        "observations": {"image": (np.uint8, (SIDE, SIDE, 3)), "state": (np.float32, (5,))},
        "next_observations": {"image": (np.uint8, (SIDE, SIDE, 3)), "state": (np.float32, (5,))},
        "actions": (np.float32, (2,)),
        "rewards": (np.float32, ()),
        "shape": (np.int32, (2,)),
    }
)
"""Pairs of images, which are stored as frames, and small columns. `shape` is (T, B), or (0, 0) for a single step."""
SEGMENT_BYTES = 12 * SCHEMA.layout.step_bytes
"""Segments of a dozen steps."""

_PLACE = np.arange(SIDE * SIDE * 3, dtype=np.uint32)


def make_log(path: Path, files: Files = DISK, schema: Schema = SCHEMA, **settings: Any) -> Log:
    return Log.create(path, schema, files=files, **{"segment_bytes": SEGMENT_BYTES, **settings})


def length(seed: int) -> int:
    """How many steps an episode has until it terminates."""
    return 4 + (seed // SPACING) % 11


def columns(seed: Any, t: Any, shape: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """The steps with these seeds and times, both of any one shape."""
    seed, t = np.broadcast_arrays(np.asarray(seed, np.int64), np.asarray(t, np.int64))
    ends = 4 + (seed // SPACING) % 11
    return {
        "observations": _observation(seed, t),
        "next_observations": _observation(seed, t + 1),
        "actions": np.stack([t, -seed], axis=-1).astype(np.float32),
        "rewards": np.asarray(seed % 101 + t / 8, np.float32),
        "shape": np.broadcast_to(np.array(shape, np.int32), (*seed.shape, 2)),
        "terminated": np.asarray(t == ends - 1),
        "truncated": np.zeros(seed.shape, bool),
        "source": np.asarray(seed // SPACING % 4, np.uint8),
        "policy_version": seed,
    }


def trajectory(seed: int, steps: int, width: int) -> dict[str, Any]:
    """A whole trajectory ``[T, B, ...]``."""
    return columns(np.arange(seed, seed + width)[None, :], np.arange(steps)[:, None], (steps, width))


def all_keys(log: Log) -> list[int]:
    keys: list[int] = log.all().keys().tolist()
    return keys


def check_contents(log: Log, keys: Iterable[int] | None = None, whole: bool = True) -> dict[int, tuple[int, int]]:
    """Reads these steps (all by default) and compares every field of each. Returns (seed, t) by key.

    Also: no step is there twice, every one has the key of its place, and, if
    `whole`, a trajectory is there to its last step.
    """
    present = all_keys(log)
    assert len(set(present)) == len(present) == len(log), "a key is there twice"
    wanted = np.array(present if keys is None else sorted(keys), np.int64)
    found: dict[int, tuple[int, int]] = {}
    for start in range(0, len(wanted), 512):
        part = wanted[start : start + 512]
        batch = log.read(part)
        seed, t = batch["policy_version"], batch["actions"][:, 0].astype(np.int64)
        width = np.maximum(1, batch["shape"][:, 1])
        same(batch, {**columns(seed, t), "shape": batch["shape"]}, part)
        offset = np.where(batch["shape"][:, 1] > 0, t * width + seed % SPACING, t)
        assert np.array_equal(part & 0xFFFFFFFF, offset), "a step has the key of another place"
        found.update(zip(part.tolist(), zip(seed.tolist(), t.tolist(), strict=True), strict=True))
        if keys is None and whole:
            check_whole(part, batch["shape"], present)
    assert len(set(found.values())) == len(found), "a step is there twice, under two keys"
    return found


def check_whole(keys: Array, shape: Array, present: list[int]) -> None:
    counts = dict(zip(*np.unique(np.array(present) >> OFFSET_BITS, return_counts=True), strict=True))
    for number, (steps, width) in zip((keys >> OFFSET_BITS).tolist(), shape.tolist(), strict=True):
        if width:
            assert counts[number] == steps * width, (
                f"trajectory {number} has {counts[number]} of its {steps * width} steps"
            )


def same(batch: dict[str, Any], expected: dict[str, Any], keys: Array, prefix: str = "") -> None:
    assert set(batch) == set(expected)
    for name, value in expected.items():
        if isinstance(value, dict):
            same(batch[name], value, keys, f"{prefix}{name}/")
        elif not np.array_equal(batch[name], value):
            wrong = np.flatnonzero((batch[name] != value).reshape(len(keys), -1).any(axis=1))
            raise AssertionError(
                f"{prefix}{name} is wrong in {len(wrong)} of {len(keys)} steps, first in "
                f"{describe(int(keys[wrong[0]]))}"
            )


def describe(key: int) -> str:
    return f"{key >> OFFSET_BITS}:{key & 0xFFFFFFFF}"


def _observation(seed: Array, t: Array) -> dict[str, Array]:
    a = (seed * 7919 + t * 104729 + 12345).astype(np.uint32)[..., None]
    pixels = ((_PLACE * (2 * a + 1)) ^ (a * np.uint32(2654435761))) >> np.uint32(13)
    state = np.stack([seed, t, seed * 3 + t, seed % 7 - t, seed * t], axis=-1).astype(np.float32)
    return {"image": pixels.astype(np.uint8).reshape(*seed.shape, SIDE, SIDE, 3), "state": state}
