"""Frames with labels for tests: drawn ones, and those of an arm that picks up a cube, or nearly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hilt.classifier.frames import Clip
from hilt.core.tree import Array
from hilt.replay import Log, Schema

SIZE = 32
PICK = {"image_size": 64, "step_limit": 45}


def clumsy(env: Any) -> Callable[[], Any]:
    """Picks up the cube and carries it about; or stops short, lets it fall, closes beside
    it. Which, follows from the episode's seed."""
    rng, world, expert = env.unwrapped.np_random, env.unwrapped.world, env.get_wrapper_attr("expert")()
    how = rng.choice(["fine", "fine", "fine", "short", "drops", "beside"])
    turn, off, up = (
        {"fine": 0.12, "short": rng.uniform(0.03, 0.09)}.get(how, 0.07),
        rng.uniform(-0.6, 0.6, 2),
        0.3 * (how == "fine"),
    )
    turned = False

    def act() -> Any:
        nonlocal turned
        action, turned = expert(), turned or world.body_pose("cube")[2] > turn
        if turned:
            return np.array(
                [*rng.uniform(-0.8, 0.8, 2), up * rng.random(), 0, 0, 0, 1 if how == "drops" else -1], np.float32
            )
        if how == "beside" and world.pose()[2] < 0.12:
            action[:2] += off
        return action

    return act


def drawn(labels: Array, rng: np.random.Generator, size: int = SIZE) -> dict[str, Array]:
    """Noise, with a square whose place and color are its class."""
    images = {
        camera: rng.integers(0, 90, (len(labels), size, size, 3), dtype=np.uint8)
        for camera in ("images/front", "images/wrist")
    }
    for image, label in zip(images["images/front"], labels, strict=True):
        image[4 : 4 + size // 3, 2 + 8 * label : 12 + 8 * label, label % 3] = 255
    return images


def clips(episodes: int = 12, classes: int = 2, steps: int = 12, seed: int = 0, states: int = 0) -> list[Clip]:
    """Each ends in the classes above 0, one after the other, but every third, which fails."""
    rng, made = np.random.default_rng(seed), []
    for number in range(episodes):
        labels = np.zeros(steps, np.int64)
        if number % 3:
            labels[steps // 2 :] = np.arange(steps - steps // 2) * (classes - 1) // (steps - steps // 2) + 1
        made.append(
            Clip(drawn(labels, rng), labels, f"state {number % states if states else number}", f"episode {number}")
        )
    return made


def write_log(path: Path, given: list[Clip], stack: bool = False, labels: bool = True) -> Path:
    """As a log, with facts as `hilt record` gives them; `stack`: observations as HIL-SERL's wrappers make them."""

    def seen(clip: Clip) -> dict[str, Any]:
        whole = {name: np.concatenate([image[:1] // 2, image]) for name, image in clip.images.items()}
        return (
            {name.split("/")[1]: image[:, None] for name, image in whole.items()}
            if stack
            else {"images": {name.split("/")[1]: image for name, image in whole.items()}}
        )

    log = None
    for clip in given:
        count, frames = len(clip), seen(clip)
        cut = [
            {"images": {k: v[side] for k, v in frames["images"].items()}}
            if not stack
            else {k: v[side] for k, v in frames.items()}
            for side in (slice(0, -1), slice(1, None))
        ]
        columns = {
            "observations": cut[0],
            "next_observations": cut[1],
            "actions": np.zeros((count, 2), np.float32),
            "rewards": np.zeros(count, np.float32),
            "terminated": np.zeros(count, bool),
            "truncated": np.arange(count) == count - 1,
            "source": np.full(count, 1, np.uint8),
            **({"labels": clip.labels.astype(np.int32)} if labels else {}),
        }
        wide = _map(lambda column: np.asarray(column)[:, None], columns)
        log = log or Log.create(path, Schema.of(wide, leading=2))
        facts = {
            "recorded_as": "labeled frames",
            "task": "drawn",
            "split": "train",
            "state": int(clip.state.split()[-1]),
        }
        log.add(wide, facts=facts if labels else {"task": "drawn"})
    assert log is not None
    log.close()
    return path


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    return {key: _map(function, value) for key, value in tree.items()} if isinstance(tree, dict) else function(tree)
