"""A small task of which everything is known: a point that an action moves, and a goal that its initial state places."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from hilt.core.tree import Array

SPEED, NEAR = 0.2, 0.05


class Toy(gymnasium.Env[Any, Any]):
    """The expert reaches the goal in the steps that it takes, or never from the
    states `hopeless`: it runs the other way."""

    instruction = "reach the goal"

    def __init__(
        self,
        hopeless: Sequence[int] = (),
        step_limit: int = 6,
        penalty: bool = False,
        delay: float = 0.0,
        hz: float = 200.0,
    ):
        self.initial_states, self.step_limit, self.control_hz = {"train": 8, "test": 2}, step_limit, hz
        self._hopeless, self._penalty, self._delay = hopeless, penalty, delay
        state = Dict({"left/point": Box(-np.inf, np.inf, (3,), np.float32)})
        self.observation_space = Dict({"state": state, "images": Dict({"front": Box(0, 255, (16, 24, 3), np.uint8)})})
        self.action_space = Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.steps = (options or {})["state"], 0
        self.point = np.zeros(3)
        self.goal = np.array([0.3 + 0.1 * (self.state % 3), 0.1 * self.state, self.np_random.random() * 0.2])
        return self._seen(), {"succeed": False, "split": (options or {})["split"], "state": self.state}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._delay)
        self.point, self.steps = self.point + SPEED * np.asarray(action), self.steps + 1
        succeed = bool(np.abs(self.point - self.goal).max() < NEAR)
        info = {"succeed": succeed, **({"grasp_penalty": -0.02 * self.steps} if self._penalty else {})}
        return self._seen(), float(succeed), succeed, self.steps >= self.step_limit, info

    def expert(self) -> Any:
        way = -1 if self.state in self._hopeless else 1
        return lambda: np.clip(way * (self.goal - self.point) / SPEED, -1, 1)

    def _seen(self) -> Any:
        image = np.full((16, 24, 3), self.steps * 10, np.uint8)
        image[:, :, 0] = self.state
        return {"state": {"left/point": self.point.astype(np.float32)}, "images": {"front": image}}


def points(log: Any, trajectory: int) -> Array:
    """``[T + 1, 3]``"""
    steps = log.read(log.trajectory_keys(trajectory), ["observations/state", "next_observations/state"])
    before, after = (steps[name]["state"]["left"]["point"] for name in ("observations", "next_observations"))
    return np.concatenate([before[:1], after])
