"""A small run of which everything is known: episodes by number, logs filled with them, and a wire without ports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict

from hilt.core.config import build, override
from hilt.core.trajectory import Source
from hilt.hil.config import Hil
from hilt.wire import make_trainer_config

SIZE = 32
ACTIONS = 2
PORTS = itertools.count(20_000, 2)
BASE = {
    "agent": {"encoder": {"kind": "none"}, "hidden": [16], "rlpd": {"random_crop": 0}},
    "batch_size": 16,
    "cta_ratio": 1,
    "training_starts": 10,
    "max_steps": 10,
    "log_period": 5,
    "seed": 3,
}
IMAGES = {"kind": "small", "features": 4, "training": "frozen", "precision": "float32"}  # in any process, on any CPU


def spaces(images: bool = False) -> Any:
    """Of an environment with a state of three numbers, and a camera if asked."""
    seen: dict[str, Any] = {"state": Dict({"point": Box(-np.inf, np.inf, (3,), np.float32)})}
    if images:
        seen["images"] = Dict({"front": Box(0, 255, (SIZE, SIZE, 3), np.uint8)})
    return SimpleNamespace(observation_space=Dict(seen), action_space=Box(-1, 1, (ACTIONS,), np.float32))


def config(**changes: Any) -> Hil:
    return override(build(Hil(), BASE), changes)


def wire() -> Any:
    port = next(PORTS)
    return make_trainer_config(port, port + 1, transport="in-process")


NO_CHUNK = {"chunk": np.int32(-1), "chunk_index": np.int16(-1)}
"""The columns of a step that is of no chunk, in a run that has some"""


def episode(
    number: int,
    length: int = 5,
    human: tuple[int, ...] = (),
    lost: tuple[int, ...] = (),
    images: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """The steps of an episode; an even number succeeds at its end, an odd one runs out
    of time. Who acted on which steps is given, and what `more` columns each has."""
    rng = np.random.default_rng(number)
    frames = rng.integers(0, 255, (length + 1, SIZE, SIZE, 3)).astype(np.uint8)
    points = rng.normal(size=(length + 1, 3)).astype(np.float32)
    points[:, 0] = number

    def seen(t: int) -> dict[str, Any]:
        return {"state": {"point": points[t]}, **({"images": {"front": frames[t]}} if images else {})}

    for t in range(length):
        last = t == length - 1
        yield {
            "observations": seen(t),
            "actions": rng.uniform(-1, 1, ACTIONS).astype(np.float32),
            "rewards": np.float32(last and number % 2 == 0),
            "next_observations": seen(t + 1),
            "terminated": np.bool_(last and number % 2 == 0),
            "truncated": np.bool_(last and number % 2 == 1),
            "source": np.uint8(Source.HUMAN if t in human else Source.POLICY),
            "policy_version": np.int64(1_000_000),
            "times": {"observed": np.float64(t), "sent": np.float64(t + 0.1), "applied": np.float64(t + 0.5)},
            "succeed": np.bool_(last and number % 2 == 0),
            "lost": np.bool_(t in lost),
            **(more or {}),
        }


def fill(log: Any, numbers: range, **options: Any) -> None:
    for number in numbers:
        with log.episode(actor="toy", boot="1", store="actor_env") as running:
            for step in episode(number, **options):
                running.append(step)


def demonstrations(path: Path, numbers: range, images: bool = False) -> Path:
    """A log of demonstrations, as `hilt record` writes them but for the flags of a run."""
    from hilt.recording.recording_folder import columns_of
    from hilt.replay import Log, Schema

    with Log.create(path, Schema.declare(columns_of(spaces(images)))) as log:
        for number in numbers:
            with log.episode(actor="person") as running:
                for step in episode(2 * number, images=images):
                    kept = {name: value for name, value in step.items() if name not in ("succeed", "lost")}
                    running.append({**kept, "source": np.uint8(Source.DEMO), "policy_version": np.int64(-1)})
            log.annotate(running.trajectory, success=True)
    return path
