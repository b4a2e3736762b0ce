"""A task that writes down every step it makes, power-safe, before it returns it; and a recipe that trains on it."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from hilt.core.tree import Array
from hilt.hil.config import Hil, Wire
from hilt.policies.agent.config import AgentConfig, EncoderConfig

LIMIT = 12


class Journaled(gymnasium.Env[Any, Any]):
    """No observation is ever shown twice: it has the process and a count in it, and an image that follows from them."""

    instruction, step_limit = "be written down", LIMIT

    def __init__(self, folder: str, delay: float = 0.004):
        self.initial_states = {"train": 10, "test": 5}
        self.life, self.count, self.delay = secrets.randbits(23), 0, delay
        self.observation_space = Dict(
            {"state": Box(-np.inf, np.inf, (3,), np.float32), "image": Box(0, 255, (24, 24, 3), np.uint8)}
        )
        self.action_space = Box(-1, 1, (2,), np.float32)
        self._folder, self._file = Path(folder), -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        assert (options or {})["split"] == "train"
        self.steps, self.start = 0, (options or {})["state"]
        self.count += 1
        return self._seen(), {"succeed": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._file < 0:  # the learner makes one too, and never steps it
            self._file = os.open(self._folder / f"{self.life}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        time.sleep(self.delay)
        self.steps, self.count = self.steps + 1, self.count + 1
        reward, terminated = float(action[0] > 0.5), bool(action[0] > 0.95)
        truncated = not terminated and self.steps == LIMIT
        line = {
            "count": self.count,
            "action": np.asarray(action).tolist(),
            "reward": reward,
            "ends": [terminated, truncated],
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")
        os.fsync(self._file)
        return self._seen(), reward, terminated, truncated, {"succeed": terminated}

    def _seen(self) -> Any:
        return {
            "state": np.array([self.life, self.count, self.start], np.float32),
            "image": image_of(self.life, self.count),
        }


def image_of(life: int, count: int) -> Array:
    return np.random.default_rng([life, count]).integers(0, 256, (24, 24, 3), np.uint8)


def vla_recipe() -> Hil:
    """The same with a vision-language-action policy, which learns from the episodes that succeeded. Give it
    agent.options.policy."""
    columns = {"full_image": "image", "state": "state"}
    return replace(
        recipe(),
        agent=AgentConfig(kind="vla", options={"columns": columns, "sample": True}),
        algorithm="filtered",
        training_starts=Hil().training_starts,
        update_to_data=0.0,
        max_ahead=30,
    )


def recipe() -> Hil:
    """Never ends by itself, but for what the command line says."""
    return Hil(
        task="tests.e2e.journaled:Journaled",
        defaults="images",  # as it stands here
        agent=AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[16]),
        batch_size=16,
        random_steps=30,
        training_starts=40,
        update_to_data=1.0,
        max_ahead=60,  # else a busy machine's learner has thousands of steps to catch up with
        steps_per_update=5,
        checkpoint_period=40,
        wire=Wire(port=0, broadcast_port=0),
    )
