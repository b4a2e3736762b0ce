"""A policy that answers with chunks, where one action at a time is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hilt.core.errors import ConfigError
from hilt.policies.base import Policy
from hilt.policies.vla.observation_adapters import Suite


class ChunkAgent:
    """Evaluates the policy once for each chunk, and returns its actions one by one. `execute`: the number of actions of each chunk, 0: all;
    then the policy looks again."""

    def __init__(self, policy: Policy, suite: Suite, instruction: str, execute: int = 0):
        if not 0 <= execute <= policy.chunk:
            raise ConfigError(
                f"execute={execute}: this policy answers with {policy.chunk} actions; give 1 to {policy.chunk}, or 0 for all."
            )
        self._policy, self._suite, self._instruction = policy, suite, instruction
        self._execute = execute or policy.chunk
        self._left: list[np.ndarray] = []

    def begin(self) -> None:
        """An episode begins: what is left of the last chunk was of another."""
        self._left = []

    def sample_actions(self, observation: Any, *, seed: int = 0, argmax: bool = False) -> np.ndarray:
        if not self._left:
            draws = torch.Generator().manual_seed(seed)
            actions, _ = self._policy.act(
                [self._suite.observe(observation, self._instruction)], sample=not argmax, generator=draws
            )
            self._left = list(self._suite.command(actions[0])[: self._execute])
        return self._left.pop(0)
