"""Data for the benchmark of `hilt open`: a log of very many episodes, and the same film in each format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.trajectory import Source
from hilt.core.tree import Array
from hilt.replay import Log, Schema

TASKS = ("pick", "place", "push", "open the drawer", "close the drawer")
COLORS = ("red", "green", "blue", "yellow", "white", "black", "purple")
STEPS, SMALL = 6, (24, 32)
"""Of an episode of the long log, and the size of its frames"""
BEGAN = 1_780_000_000.0


def make_many(path: Path, episodes: int) -> Path:
    """A log of this number of short episodes with one small camera: the same every time."""
    pictures = textures(STEPS + 1, SMALL)
    kinds = [
        trajectory(np.roll(pictures, shift, 1)[:, None], success, human)
        for shift, success, human in itertools.product(range(4), (False, True), (0, 2))
    ]
    with Log.create(path, Schema.of(kinds[0], leading=2), durability="never") as log:
        for number in range(episodes):
            log.add(kinds[number % len(kinds)], facts=facts(number, bool(number // 2 % 2)))
    return path


def facts(number: int, success: bool) -> dict[str, Any]:
    """What is known of episode `number`."""
    color = COLORS[number % len(COLORS)]
    known = {"success": success, "task": TASKS[number % len(TASKS)], "level": number % 1000}
    known["language_instruction"] = f"{TASKS[number % len(TASKS)]} with the {color} cube"
    return known | ({"tags": ["grasp"]} if number % 50 == 0 else {})


def make_film(path: Path, episodes: int, steps: int, size: tuple[int, int]) -> Path:
    """A log of long episodes with two cameras of this size."""
    made: Iterator[Any] = (trajectory(film(number, steps + 1, size), True, 0) for number in range(episodes))
    first = next(made)
    with Log.create(path, Schema.of(first, leading=2), durability="never") as log:
        for number, episode in enumerate(itertools.chain([first], made)):
            log.add(episode, facts=facts(number, True))
    return path


def film(number: int, count: int, size: tuple[int, int]) -> Array:
    """``[count, camera, height, width, 3]``: a texture that moves, so that every frame differs from all others."""
    texture = textures(2, size, seed=number)
    return np.stack([np.roll(texture, (step, 3 * step), (1, 2)) for step in range(count)])


def textures(count: int, size: tuple[int, int], seed: int = 0) -> Array:
    """Pictures with broad and fine detail, about as hard to compress as those of a camera."""
    rng, (height, width) = np.random.default_rng(seed), size
    broad = rng.integers(40, 216, (count, -(-height // 8), -(-width // 8), 3))
    image = np.kron(broad, np.ones((1, 8, 8, 1), int))[:, :height, :width]
    image = (image + np.roll(image, 4, 1) + np.roll(image, 4, 2) + np.roll(image, (4, 4), (1, 2))) // 4
    result: Array = np.clip(image + rng.integers(-6, 7, image.shape), 0, 255).astype(np.uint8)
    return result


def trajectory(pictures: Array, success: bool, human: int) -> dict[str, Any]:
    """``[T, 1, ...]`` columns of an episode that shows these pictures ``[T + 1, camera, ...]``; a person makes the last
    `human` steps."""
    length, end = len(pictures) - 1, np.arange(len(pictures) - 1) == len(pictures) - 2
    state = np.linspace(0, 1, 7 * (length + 1), dtype=np.float32).reshape(length + 1, 7)
    seen = {"state": state} | {f"camera_{camera}": pictures[:, camera] for camera in range(pictures.shape[1])}
    times = BEGAN + np.arange(length) / 30
    columns = {
        "observations": {name: column[:-1, None] for name, column in seen.items()},
        "next_observations": {name: column[1:, None] for name, column in seen.items()},
        "actions": state[:-1, None],
        "rewards": (end & success).astype(np.float32)[:, None],
        "terminated": (end & success)[:, None],
        "truncated": (end & (not success))[:, None],
        "source": np.where(np.arange(length) < length - human, Source.POLICY, Source.HUMAN).astype(np.uint8)[:, None],
        "policy_version": np.full((length, 1), 7),
        "times": {"observed": times[:, None], "applied": times[:, None] + 0.02},
    }
    return columns
