"""A problem with a known answer for learning from good and bad episodes: the action has to have the sign of the state,
and a policy that acts at random is right in half of the episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hilt.core.trajectory import Source
from hilt.policies.base import Policy
from hilt.replay import Edits, Log, Schema

NAMES = {"full_image": "front", "state": "state"}
TINY = {"width": 16, "depth": 1, "heads": 2, "keypoints": 2, "chunk": 2}
STEPS = 2


def write_signs(
    path: Path, episodes: int, source: int | Sequence[int] = Source.POLICY, seed: int = 0, good: bool = False
) -> Path:
    """Episodes with one random action each, of two steps, or as many as `source` has; `good`: of the right sign in
    all."""
    steps = STEPS if isinstance(source, int) else len(source)
    rng, log = np.random.default_rng(seed), None
    for number in range(episodes):
        sign = rng.choice([-1.0, 1.0])
        action = rng.choice([-0.7, 0.7]) if not good else 0.7 * sign
        success = bool(action * sign > 0)
        end = np.arange(steps) == steps - 1
        columns = {
            "observations": {
                "front": np.zeros((steps, 16, 16, 3), np.uint8),
                "state": np.full((steps, 1), sign, np.float32),
            },
            "actions": np.full((steps, 1), action, np.float32),
            "rewards": (end & success).astype(np.float32),
            "terminated": end,
            "truncated": end & False,
            "source": np.broadcast_to(np.array(source, np.uint8), steps),
        }
        columns = _wide(columns)
        log = log or Log.create(path, Schema.of(columns, leading=2), durability="never")
        log.add(columns, facts={"task": "signs", "state": number, "success": success, "language_instruction": "go"})
    assert log is not None
    log.close()
    return path


def write_advantages(path: Path, model: str = "m", skip: int = -1) -> None:
    """What a value model that knows the problem writes: half of the episodes succeed, so the advantage is +-0.5."""
    with Log.open(path, "r") as log:
        found = {}
        for number in log.trajectories():
            success = log.facts.about(number)["success"]
            row = [0.5 if success else -0.5] * STEPS
            if number != skip:
                found[number] = {
                    "model": model,
                    "first": 0,
                    "success": success,
                    "value": [0.5] * STEPS,
                    "advantage": row,
                }
        Edits(log).estimates(found)


def means(policy: Policy, **more: Any) -> tuple[float, float]:
    """Its likeliest action where the state is -1, and where it is 1."""
    rows = [
        {
            "full_image": np.zeros((16, 16, 3), np.uint8),
            "state": np.array([sign], np.float32),
            "instruction": "go",
            **more,
        }
        for sign in (-1.0, 1.0)
    ]
    low, high = policy.act(rows, sample=False)[0][:, 0, 0].tolist()
    return low, high


def _wide(tree: Any) -> Any:
    return {key: _wide(value) for key, value in tree.items()} if isinstance(tree, dict) else tree[:, None]


class Signs(gymnasium.Env[Any, Any]):
    """Two steps; the sum of the actions has to have the sign of the state."""

    initial_states = {"train": 40, "test": 10}  # noqa: RUF012
    instruction, step_limit, control_hz = "go", 2, 10.0

    def __init__(self, reports: bool = True):
        self._reports = reports
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        image = spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.observation_space = spaces.Dict({"front": image, "state": spaces.Box(-2, 2, (1,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._sign, self._sum, self._steps = (1.0 if (options or {}).get("state", 0) % 2 else -1.0), 0.0, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._sum, self._steps = self._sum + float(np.asarray(action)[0]), self._steps + 1
        ended = self._steps == 2
        good = ended and self._sum * self._sign > 0
        return self._seen(), float(good), ended, False, {"succeed": good} if self._reports else {}

    def _seen(self) -> Any:
        return {"front": np.zeros((16, 16, 3), np.uint8), "state": np.array([self._sign], np.float32)}


def signs() -> Signs:
    return Signs()


def silent() -> Signs:
    return Signs(reports=False)
