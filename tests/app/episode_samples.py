"""Small logs and datasets with episodes whose every value is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.trajectory import Source
from hilt.replay import Log, Schema

SIZE = (48, 64)
BEGAN = 1_780_000_000.0
"""When the first episode began; every further one begins an hour later."""


def picture(episode: int, step: int, camera: int = 0) -> np.ndarray:
    """A picture from which episode, step and camera can be read back after a lossy compression: three flat bands."""
    image = np.zeros((*SIZE, 3), np.uint8)
    image[:16], image[16:32], image[32:] = 20 * episode, 8 * step, 100 + 100 * camera
    return image


def trajectory(episode: int, length: int, images: bool = True) -> dict[str, Any]:
    """Episode `episode`: odd ones succeed, and in those that 3 divides a person acts in the last third."""
    source = np.full(length, Source.POLICY, np.uint8)
    if episode % 3 == 0:
        source[2 * length // 3 :] = Source.HUMAN
    end = np.arange(length) == length - 1
    states = np.arange(episode, episode + length + 1, dtype=np.float32)[:, None] + np.array([0, 0.1, 0.2], np.float32)
    seen: dict[str, Any] = {"state": states}
    if images:
        for camera, name in enumerate(("front", "wrist")):
            seen[name] = np.stack([picture(episode, step, camera) for step in range(length + 1)])
    times = BEGAN + 3600 * episode + np.arange(length) / 10
    columns = {
        "observations": {name: column[:-1] for name, column in seen.items()},
        "next_observations": {name: column[1:] for name, column in seen.items()},
        "actions": np.tile(np.linspace(-1, 1, length, dtype=np.float32)[:, None], 2),
        "rewards": end.astype(np.float32) * (episode % 2),
        "terminated": end & bool(episode % 2),
        "truncated": end & (not episode % 2),
        "source": source,
        "policy_version": np.full(length, 10 * episode),
        "times": {"observed": times, "applied": times + 0.02},
    }
    return _wide(columns)


def facts(episode: int) -> dict[str, Any]:
    return {
        "success": bool(episode % 2),
        "task": ("pick", "place")[episode // 2 % 2],
        "language_instruction": f"pick up the {'red' if episode < 4 else 'blue'} cube",
        "level": episode % 4,
        **({"tags": ["grasp", "slow"]} if episode == 5 else {}),
    }


def make_log(path: Path, episodes: int = 8, images: bool = True) -> Path:
    """A log of episodes with 6, 7, 8, ... steps."""
    with Log.create(path, Schema.of(trajectory(0, 6, images), leading=2), durability="never") as log:
        for episode in range(episodes):
            log.add(trajectory(episode, 6 + episode, images), facts=facts(episode))
    return path


def _wide(tree: Any) -> Any:
    return {
        name: _wide(value) if isinstance(value, dict) else np.asarray(value)[:, None] for name, value in tree.items()
    }
