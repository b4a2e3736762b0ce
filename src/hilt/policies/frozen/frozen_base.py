"""The policy that stays as it is: what it computes of observations, once for each, goes with them into the log."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core import hub
from hilt.core.errors import ConfigError, MissingFieldError, RequestError, SchemaError
from hilt.core.tree import Array
from hilt.policies.base import Observation, Policy
from hilt.policies.frozen.acted_noise import acted_noise
from hilt.policies.frozen.frozen_config import ACTIONS, FEATURES, STATE, FrozenOptions
from hilt.policies.io.weights_hash import weights_hash
from hilt.policies.registry import load_policy
from hilt.policies.vla.observation_adapters import columns, suite

AT_ONCE = 32
"""Observations that the policy reads together, at most"""


class FrozenBase:
    """A frozen policy, and how it sees and acts in a task. `chunk`: the number of its actions that are kept.
    `policy`: in the place of the one that the options name, which is loaded otherwise."""

    def __init__(self, options: FrozenOptions, chunk: int = 1, device: str = "cpu", policy: Policy | None = None):
        self.options, self.chunk = options, chunk
        self.suite = columns(options.columns) if options.columns else suite(options.suite)
        self.weights = weights_hash(hub.local(options.policy))
        """The hash of its weights"""
        self.policy = policy or _loaded(options.policy, self.weights, device, json.dumps(options.policy_options))
        self.acted = acted_noise(self)
        """What makes actions of noise where the policy acts; None: of no noise, or only in an update"""
        self.policy.keeps_context = self.policy.keeps_context or self.acted is not None
        if chunk > self.policy.chunk:
            raise ConfigError(
                f"agent.chunk={chunk}, and the policy in {options.policy} plans {self.policy.chunk} actions. Give "
                f"agent.chunk={self.policy.chunk} at most."
            )

    def columns(self, observations: Sequence[Observation], sampled: bool = False) -> dict[str, Array]:
        """Features [N, width], the first actions of each chunk as the task takes them [N, chunk, A], and the state
        [N, P] where there is one, of observations by the policy's names. `sampled`: with the draws of noise that the
        options ask for."""
        parts: dict[str, list[Array]] = {}
        count = math.ceil(len(observations) / AT_ONCE)
        # of about the same size: a pass of one row takes as long as one of several
        ends = [len(observations) * part // max(1, count) for part in range(count + 1)]
        for first, end in itertools.pairwise(ends):
            rows = observations[first:end]
            actions, record = self.policy.act(rows, sample=False)
            found = {
                FEATURES: record[FEATURES] if FEATURES in record else self.policy.features(rows).float().cpu().numpy(),
                ACTIONS: self.commands(actions),
            }
            if sampled and self.acted is not None and self.options.noise_samples:
                found |= self.acted.samples(rows)
            if all(STATE in row for row in rows):
                found[STATE] = np.stack([np.asarray(row[STATE], np.float32) for row in rows])
            for name, column in found.items():
                parts.setdefault(name, []).append(np.asarray(column, np.float32))
        return {name: np.concatenate(each) for name, each in parts.items()}

    def commands(self, actions: npt.ArrayLike) -> Array:
        """The first actions of chunks of the policy, as the task takes them."""
        found: Array = np.clip(self.suite.command(np.asarray(actions))[:, : self.chunk], -1, 1)
        return found

    def row(self, observation: Mapping[str, Any], instruction: str) -> Observation:
        """One observation of the environment, by the policy's names."""
        return self.suite.observe(observation, self.options.instruction or instruction)

    def rows(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> list[Observation]:
        """Observations ``{path: [N, ...]}`` by the policy's names, with the instruction of each."""
        views = self.suite.views(observations)
        return [
            {**{name: column[place] for name, column in views.items()}, "instruction": self.options.instruction or text}
            for place, text in enumerate(instructions)
        ]

    def of_one(self, observation: Mapping[str, Any], instruction: str) -> dict[str, Array]:
        """The columns of one observation of the environment."""
        found = self.columns([self.row(observation, instruction)], sampled=True)
        return {name: column[0] for name, column in found.items()}

    def of_many(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> dict[str, Array]:
        """The columns of all observations of an episode ``{path: [N, ...]}``, with the instruction of each."""
        return self.of_rows(self.rows(observations, instructions))

    def of_rows(self, rows: Sequence[Observation]) -> dict[str, Array]:
        """The columns of observations by the policy's names, which it does not see again."""
        found = self.columns(rows, sampled=True)
        self.policy.forget_context()
        return found

    def check(self, empty: Mapping[str, Any], actions: int, moving: Sequence[int] = ()) -> dict[str, Array]:
        """Refuses a policy that does not fit the task, by its answer to an observation of zeros, which is returned.
        `moving`: the numbers of an action that the agent moves; empty: all."""
        where = self.options.policy
        try:
            found = self.of_one(empty, "-")
        except (SchemaError, MissingFieldError, RequestError) as error:
            raise ConfigError(f"the policy in {where} does not fit the task: {error}") from error
        if found[ACTIONS].shape[-1] != actions:
            raise ConfigError(
                f"the policy in {where} gives actions of {found[ACTIONS].shape[-1]} numbers, and the task takes "
                f"{actions}."
            )
        signs = np.ones((2, actions), np.float32) * np.array([[0.75], [-0.75]], np.float32)
        up, down = np.asarray(self.suite.command(self.suite.taught(signs)))
        reached = [number for number in range(actions) if up[number] != down[number]]
        if lost := sorted(set(moving or range(actions)) - set(reached)):
            raise ConfigError(
                f"the policy in {where} does not move the numbers {lost} of an action, which is {actions} numbers of "
                f"the task. Give agent.action_indices={reached}: the others stay as the policy has them."
            )
        return found


@lru_cache(maxsize=2)
def _loaded(folder: str, weights: str, device: str, options: str) -> Policy:
    """Once in each process, while the folder has these weights."""
    policy: Policy = load_policy(folder, device=device, **json.loads(options))
    policy.eval()
    policy.requires_grad_(False)
    policy.keeps_features = True
    return policy
