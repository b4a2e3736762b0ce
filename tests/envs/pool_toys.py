"""Environments that count, and some that fail in every way a simulator can, for the tests of the pool."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hilt.core import errors

RAISES, DIES, HANGS, MADE_WRONG = 7, 8, 9, 10
"""Initial states whose second step does that; the last one's reset"""
LIMIT = 6


class Counting(gymnasium.Env[Any, Any]):
    """What it shows follows from its state, its seed and all actions so far. It succeeds when their sum is over 4."""

    instruction, step_limit = "count", LIMIT
    initial_states = {"train": 20, "eval": 20}  # noqa: RUF012

    def __init__(self, size: int = 4, folder: str = ""):
        self.size, self.folder = size, folder
        self.action_space = spaces.Box(-9.0, 9.0, (1,), np.float32)
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {"state": spaces.Dict({"left/sum": spaces.Box(-99, 99, (2,), np.float32)}), "front": image}
        )
        self.observations = 0
        self._note("made")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state, self.steps = options["state"], 0
        if self.state == MADE_WRONG:
            raise RuntimeError("the scene has no table")
        self.sum = self.state + self.np_random.uniform()
        self.begun = self.sum
        return self._seen(), {"succeed": False, **options}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.sum += float(action[0])
        if self.steps == 2 and self.state == RAISES:
            raise RuntimeError("the gripper fell off")
        if self.steps == 2 and self.state == DIES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.steps == 2 and self.state == HANGS:
            self.wait_for_ever()
        done = self.sum - self.begun > 4
        return self._seen(), float(action[0]), done, self.steps >= self.step_limit, {"succeed": done}

    def wait_for_ever(self) -> None:
        self._note(f"hangs {os.getpid()}")
        time.sleep(1000)

    def close(self) -> None:
        self._note("closed")

    def _seen(self) -> Any:
        self.observations += 1
        self.shown = np.full((self.size, self.size, 3), round(10 * self.sum) % 256, np.uint8)
        return {"state": {"left/sum": np.array([self.sum, self.steps], np.float32)}, "front": self.shown}

    def _note(self, what: str) -> None:
        if self.folder:
            with (Path(self.folder) / "notes").open("a") as file:
                file.write(f"{what}\n")


class Saving(Counting):
    """The same, but one can serve many episodes in turns."""

    instruction = "save"

    def snapshot(self) -> Any:
        return self.state, self.steps, self.sum, self.begun

    def restore(self, snapshot: Any) -> None:
        self.state, self.steps, self.sum, self.begun = snapshot


class Plain(gymnasium.Env[Any, Any]):
    """No task, and its observation is one array; what it observes is written into later."""

    observation_space, action_space = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.shown = self.np_random.uniform(size=2).astype(np.float32)
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.shown += action
        return self.shown, 1.0, False, False, {}


def without_assets(kind: str) -> None:
    """An environment that cannot be made: it raises an error of Hilt's of this name."""
    wrong: Any = getattr(errors, kind)
    raise wrong("task", "pick", ["push"]) if kind in ("UnknownNameError", "MissingPackageError") else wrong("no scenes")
