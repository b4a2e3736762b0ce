"""The agent that the settings of a run describe: the built-in one, or another, with the built-in update, or another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from gymnasium import spaces

from hilt.algos.tables import OffPolicyAlgorithm
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.hil.config import Hil, check, reinforces
from hilt.hil.environment import Spaces
from hilt.hil.make_agent import make_agent
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.policies.agent.step_agent import StepAgent

PLACE = Spaces(spaces.Dict({"state": spaces.Box(-1, 1, (3,), np.float32)}), spaces.Box(-1, 1, (2,), np.float32))
SMALL: dict[str, Any] = {"hidden": [8], "encoder": EncoderConfig(kind="none")}


class Still(StepAgent):
    """It does as little as an agent may."""

    def __init__(self, speed: float):
        self.proprio, self._speed = ["state"], speed

    @classmethod
    def make(
        cls, observation_space: Any, action_space: Any, config: AgentConfig | None = None, *rest: Any, **more: Any
    ) -> Still:
        assert config is not None
        return cls(**config.options)

    def sample_actions(self, observations: Mapping[str, Any], seed: int | None = None, argmax: bool = False) -> Any:
        return np.full(2, self._speed, np.float32)

    def update(self, batch: Any, networks_to_update: Any = None, details: bool = False) -> Any:
        return self, {}

    def acting_state(self, slow: bool = False) -> Any:
        return {}

    def load_acting_state(self, state: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Counting(OffPolicyAlgorithm):
    """It learns nothing, and has a network of its own."""

    def __init__(self, first: int = 0):
        self._first = first

    def setup(self, networks: Any, width: int, actions: int, seed: int) -> None:
        self.own, self.made = torch.zeros(width + actions), self._first

    def update(
        self, networks: Any, batch: Any, settings: Any, generator: Any, which: Any, *rest: Any
    ) -> dict[str, float]:
        self.made += 1
        return {"made": float(self.made), "rows": float(len(batch.z)), "networks": float(len(which))}

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own, "made": self.made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own, self.made = state["own"].clone(), int(state["made"])


def named(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def batch() -> dict[str, Any]:
    seen = {"state": np.zeros((4, 3), np.float32)}
    numbers = {
        "actions": np.zeros((4, 2), np.float32),
        "rewards": np.ones(4, np.float32),
        "masks": np.ones(4, np.float32),
    }
    return {"observations": seen, "next_observations": seen, **numbers}


def test_kind_and_options_name_another_agent():
    config = Hil(agent=AgentConfig(kind=named(Still), options={"speed": 0.5}))
    check(config)
    agent = make_agent(config, PLACE)
    assert isinstance(agent, Still) and agent.sample_actions({}).tolist() == [0.5, 0.5]
    assert (agent.critics, agent.image_paths, agent.frozen) == (frozenset(), (), False)
    for refused in (
        lambda: agent.imitate({}),
        lambda: agent.fit_proprio({}),
        agent.begin_anew,
        lambda: agent.states({}),
    ):
        with pytest.raises(ConfigError, match=r"Still .*"):
            refused()
    with pytest.raises(ConfigError, match="Still has an update of its own: leave algorithm=Counting out"):
        make_agent(Hil(agent=config.agent, algorithm=named(Counting)), PLACE)
    with pytest.raises(ConfigError, match=r"expected a subclass of hilt\.policies\.agent\.step_agent\.StepAgent"):
        make_agent(Hil(agent=AgentConfig(kind=named(Counting))), PLACE)


def test_another_algorithm_is_made_with_its_options_and_checkpointed():
    config = Hil(agent=AgentConfig(**SMALL), algorithm=named(Counting), algorithm_options={"first": 5})
    check(config)
    agent = make_agent(config, PLACE)
    assert isinstance(agent, Agent) and reinforces(config) and agent.squashed
    assert agent.update(batch())[1] == {"made": 6, "rows": 4, "networks": 3}
    assert isinstance(agent.algorithm, Counting)
    agent.algorithm.own += 1
    other = make_agent(config, PLACE)
    assert isinstance(other, Agent) and isinstance(other.algorithm, Counting)
    other.load_state_dict(agent.state_dict())
    assert other.algorithm.made == 6 and other.algorithm.own.tolist() == [1] * 5
    other.begin_anew()
    assert other.algorithm.made == 5 and other.updates == 0
    with pytest.raises(
        ConfigError, match=r"cannot be made with algorithm_options=\{'last': 1\}: .*unexpected keyword argument 'last'"
    ):
        make_agent(Hil(agent=AgentConfig(**SMALL), algorithm=named(Counting), algorithm_options={"last": 1}), PLACE)


def test_the_built_in_algorithms_are_listed_beside_others():
    assert "algorithm" not in make_agent(Hil(agent=AgentConfig(**SMALL)), PLACE).state_dict(), (
        "checkpoints are as they were"
    )
    with pytest.raises(
        UnknownNameError,
        match=r"no algorithm named 'rlpb'; did you mean 'rlpd'\? Known: bc, filtered, hg-dagger, .*rl",
    ):
        check(Hil(algorithm="rlpb"))
