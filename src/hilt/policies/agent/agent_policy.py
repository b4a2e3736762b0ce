"""The agent of a run with a person as a policy that acts, so that what runs or wraps a policy, such as the best of
several chunks, takes it, too.

    policy = AgentPolicy(load_agent("runs/mine"))
    actions, _ = policy.act([{**observation, "instruction": "pick the cube"}] * 8, generator=generator)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from hilt.core.errors import ConfigError
from hilt.core.tree import flatten, unflatten
from hilt.policies.agent.step_agent import StepAgent
from hilt.policies.base import Evaluation, Observation, Policy, Prefix, Record, check_prefix, check_temperature

INSTRUCTION = "instruction"


class AgentPolicy(Policy):
    """Answers observations of the agent's environment, each with its ``instruction`` besides, with the agent's chunks
    of the environment's actions. What is seen in several rows one after the other that are the same object is encoded
    once."""

    has_log_prob = False

    def __init__(self, agent: StepAgent):
        super().__init__()
        self.agent = agent
        self.chunk, self.action_dim = agent.chunk, agent.layout.actions

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        """There is no record: the agent learns from the steps of its run."""
        check_temperature(temperature, sample)
        check_prefix(self, prefix, len(observations), sample)
        if sample and temperature != 1:
            raise ConfigError(
                f"a temperature of {temperature:g}: an agent draws from the distribution that it has learned. Leave "
                "the temperature out."
            )
        if sample and generator is None:
            raise ConfigError("chance needs a generator: give one (torch.Generator, on the CPU), or sample=False.")
        seed = int(torch.randint(2**31, (), generator=generator)) if sample else 0
        rows, draws = drawn_rows(observations)
        leaves = [flatten({name: leaf for name, leaf in row.items() if name != INSTRUCTION}) for row in rows]
        seen = unflatten({path: np.stack([np.asarray(row[path]) for row in leaves]) for path in leaves[0]})
        self.agent.begin(str(observations[0].get(INSTRUCTION, "")))
        return self.agent.chunks(seen, seed, argmax=not sample, draws=draws), {}

    def evaluate(self, record: Record) -> Evaluation:
        raise ConfigError("evaluate(): the agent of a run with a person acts here. It learns in its run.")

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: Generator | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        raise ConfigError("supervised_loss(): the agent of a run with a person acts here. It learns in its run.")


def drawn_rows(observations: Sequence[Observation]) -> tuple[Sequence[Observation], int]:
    """The rows without repetitions, and how often each is repeated, one after the other; where that is not the same
    number for all, the rows as they are, and 1."""
    first = [place for place, row in enumerate(observations) if place == 0 or row is not observations[place - 1]]
    draws = len(observations) // max(1, len(first))
    if draws == 1 or first != list(range(0, len(observations), draws)):
        return observations, 1
    return [observations[place] for place in first], draws
