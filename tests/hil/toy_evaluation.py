"""A task whose every outcome is known: a walker on a line, who succeeds from state n after n + 1 steps forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from hilt.core.config import freeze, override
from hilt.hil.config import Hil
from hilt.policies.agent.config import AgentConfig, EncoderConfig

NO_CHANGES: Mapping[str, Any] = {}
TASK = "tests.hil.toy_evaluation:Walk"
STATES = 6


class Walk(gymnasium.Env[Any, Any]):
    """From the states `broken` its second step fails; a `person` takes over; a
    `silent` one does not say whether it succeeded."""

    instruction, control_hz = "walk", 10.0

    def __init__(
        self,
        limit: int = 4,
        broken: tuple[int, ...] = (),
        person: bool = False,
        silent: bool = False,
        noise: float = 0.0,
        shaped: float = 0.0,
    ):
        self.initial_states, self.step_limit = {"train": 2, "eval": 3, "test": STATES}, limit
        self._broken, self._person, self._silent, self._noise, self._shaped = broken, person, silent, noise, shaped
        place = Dict({"left/place": Box(-np.inf, np.inf, (2,), np.float32)})
        self.observation_space = Dict({"state": place, "images": Dict({"front": Box(0, 255, (16, 16, 3), np.uint8)})})
        self.action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.split, self.state = (options or {})["split"], (options or {})["state"]
        self.place, self.steps = self._noise * self.np_random.normal(), 0
        return self._seen(), {"succeed": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.state in self._broken and self.steps == 2:
            raise RuntimeError("the arm fell off")
        self.place += float(action[0])
        done = self.place >= self.state + 1
        info = {} if self._silent else {"succeed": done}
        if self._person:
            info["intervene_action"] = action
        return self._seen(), float(done) + self._shaped * float(action[0]), done, self.steps >= self.step_limit, info

    def _seen(self) -> Any:
        image = np.full((16, 16, 3), 40 * self.steps, np.uint8)
        return {"state": {"left/place": np.array([self.place, self.state], np.float32)}, "images": {"front": image}}


class Walker:
    """Walks forward; what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, bool]] = []

    def sample_actions(self, observations: Any, seed: int | None = None, argmax: bool = False) -> Any:
        assert set(observations["state"]["left"]) == {"place"}
        self.asked.append((seed, argmax))
        return np.ones(1, np.float32)


def config(**options: Any) -> Hil:
    return Hil(
        task=TASK,
        task_options=options,
        agent=AgentConfig(encoder=EncoderConfig(features=4, precision="float32"), hidden=[8]),
    )


def make_run(
    folder: Path, updates: tuple[int, ...] = (10, 20), changes: Mapping[str, Any] = NO_CHANGES, **options: Any
) -> Path:
    """A run with checkpoints of agents that have learned nothing, each another one; with `changes` of its settings."""
    from hilt.hil.environment import spaces
    from hilt.hil.evaluate import make_agent
    from hilt.runs import checkpoint

    settings = override(config(**options), changes)
    folder.mkdir(parents=True)
    freeze(settings, folder / "config.yaml")
    for update in updates:
        settings.seed = update
        checkpoint.save(folder, update, make_agent(settings, spaces(settings)).state_dict(), {}, keep=10)
    return folder
