"""Small steps for tests of views, samplers and buffers: everything in a step follows from two numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten, unflatten
from hilt.replay import Log, Schema

IMAGE = (20, 20, 3)
"""1,200 bytes: stored as frames."""


def observation(number: int) -> dict[str, Any]:
    image = np.full(IMAGE, number % 251, np.uint8)
    image[0, 0] = np.frombuffer(np.uint32(number).tobytes()[:3], np.uint8)
    return {"state": np.array([number, -number], np.float32), "image": image}


def step(now: int, after: int | None = None, **changes: Any) -> dict[str, Any]:
    """The step from observation `now` to `after` (the next number, unless said), with reward `now`."""
    after = now + 1 if after is None else after
    made = {
        "observations": observation(now),
        "actions": np.full(3, now * 0.5, np.float32),
        "rewards": np.float32(now),
        "next_observations": observation(after),
        "terminated": False,
        "truncated": False,
        "source": 0,
        "policy_version": now,
    }
    return made | changes


SCHEMA = Schema.of({key: value for key, value in step(0).items() if key not in ("source", "policy_version")})


def new_log(folder: Path, schema: Schema = SCHEMA, **settings: Any) -> Log:
    return Log.create(folder / "log", schema, **{"durability": "never", **settings})


def write(log: Log, steps: Iterable[dict[str, Any]], **sender: Any) -> list[int]:
    """One episode; returns the keys."""
    with log.episode(**sender) as episode:
        return [episode.append(s) for s in steps]


def numbers(first: int, count: int, **changes: Any) -> list[dict[str, Any]]:
    """Steps that follow each other."""
    return [step(n, **changes) for n in range(first, first + count)]


def trajectory(chains: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """``[T, B, ...]`` columns from B chains of T steps each."""
    flat = [[flatten(s) for s in chain] for chain in chains]
    columns = {}
    for path in flat[0][0]:
        stacked = np.stack([np.stack([np.asarray(s[path]) for s in chain]) for chain in flat], axis=1)
        columns[path] = stacked.astype(SCHEMA.columns[path].dtype)
    return unflatten(columns)


def check(batch: dict[str, Any], i: int, expected: dict[str, Any]) -> None:
    """Element `i` of a batch has exactly these fields."""
    got, wanted = flatten(batch), flatten(expected)
    assert set(got) == set(wanted)
    for path, values in got.items():
        assert np.array_equal(values[i], wanted[path]), f"{path} of element {i}"
