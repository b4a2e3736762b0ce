"""An environment: a lamp is to be turned up, or down, as the words say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Lamp(gymnasium.Env[Any, Any]):
    """An action changes the light by at most 1; changed by 1.5 the right way within four steps, it is a success."""

    initial_states = {"train": 6, "eval": 4, "test": 3}  # noqa: RUF012
    step_limit, control_hz = 4, 50.0

    def __init__(self, sign: int):
        self._sign, self._light, self._first, self._steps = sign, 0.0, 0.0, 0
        self.instruction = "turn it up" if sign > 0 else "turn it down"
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = spaces.Dict({"state": spaces.Box(-99, 99, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        chosen = {"split": "train", "state": 0, **(options or {})}
        self._light = self._first = (list(self.initial_states).index(chosen["split"]) * 10 + chosen["state"]) / 10
        self._steps = 0
        return self._seen(), {"succeed": False, **chosen}

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._light += float(np.clip(action, -1, 1)[0])
        done = (self._light - self._first) * self._sign > 1.5
        return self._seen(), float(done), done, self._steps >= self.step_limit, {"succeed": done}

    def expert(self) -> Callable[[], np.ndarray]:
        """A script that demonstrates the task."""
        return lambda: np.full(1, 0.9 * self._sign, np.float32)

    def _seen(self) -> Any:
        return {"state": np.array([self._light - self._first, self._sign], np.float32)}


def make(name: str) -> Lamp:
    """``example/up`` and ``example/down``."""
    return Lamp({"up": 1, "down": -1}[name])
