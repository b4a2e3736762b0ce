"""The columns of a frozen policy in observations: of an environment as it goes on, and of episodes that were recorded
without them.

    observations/base_policy/HASH/features    float32 [width]
    observations/base_policy/HASH/actions     float32 [agent.chunk, A], as the task takes them, from -1 to 1
    observations/base_policy/HASH/state       float32 [P], if the policy looks at a state
    observations/base_policy/HASH/noise...    of an agent with a critic of noise: `hilt.policies.frozen.acted_noise`

HASH is that of the policy's weights, so that a log says what its columns were computed with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from hilt.core.errors import ConfigError
from hilt.core.trajectory import INSTRUCTION, texts_of
from hilt.core.tree import Array, flatten, unflatten
from hilt.envs.env_protocol import Env
from hilt.formats.episodes import Episode
from hilt.hil.config import Hil
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import ACTIONS, BASE_POLICY, base_hash, check_same_weights, frozen_options
from hilt.policies.io.weights_hash import weights_hash
from hilt.teleop.intervene import attribute

TREES = ("observations", "next_observations")


def open_base(config: Hil) -> FrozenBase:
    """The frozen policy of a run."""
    agent = config.agent
    options = frozen_options({"suite": config.task, **agent.options})
    return FrozenBase(options, agent.chunk, agent.device)


def weights_of(config: Hil) -> str:
    """The hash of the weights of the frozen policy of a run, which is not loaded for it."""
    from hilt.core import hub

    return weights_hash(hub.local(frozen_options({"suite": config.task, **config.agent.options}).policy))


class BaseObservations(gymnasium.ObservationWrapper):
    """Adds to each observation what the frozen policy makes of it, once."""

    episode_state: tuple[str, ...] = ()

    def __init__(self, env: Env, base: FrozenBase, moving: Sequence[int] = ()):
        """`moving`: the numbers of an action that the agent moves; empty: all."""
        super().__init__(env)
        self._base = base
        space = env.observation_space
        if not isinstance(space, Dict):
            raise ConfigError(f"expected observations by name (a Dict space), got {space}.")
        found = base.check(_zeros(space), int(np.prod(env.action_space.shape or ())), moving)
        limits = {name: 1.0 if name == ACTIONS else np.inf for name in found}
        boxes = {
            name: Box(-limits[name], limits[name], column.shape, np.float32) for name, column in sorted(found.items())
        }
        self.observation_space = Dict({**space.spaces, BASE_POLICY: Dict({base.weights: Dict(boxes)})})

    def observation(self, observation: Any) -> Any:
        instruction = str(attribute(self.env, "instruction", "") or "")
        if not instruction and not self._base.options.instruction:
            raise ConfigError("the task does not say what is to be done: give agent.options.instruction=TEXT.")
        found = self._base.of_one(observation, instruction)
        return {**observation, BASE_POLICY: {self._base.weights: found}}


class BaseColumns:
    """Adds the columns of the frozen policy to episodes that were recorded without them. Those of other weights are
    refused."""

    def __init__(self, base: FrozenBase, instructions: Sequence[str] = ()):
        self._base, self._instructions = base, instructions

    def __call__(self, episode: Episode, path: str) -> Episode:
        found = base_hash(flatten(episode.columns))
        check_same_weights(found, self._base.weights, path)
        acted = self._base.acted
        if found and (acted is None or acted.sampled(episode.columns[TREES[0]][BASE_POLICY][found])):
            return episode
        texts = texts_of(episode.facts.get(INSTRUCTION, ""), len(episode))
        texts = [text or (self._instructions[0] if len(self._instructions) == 1 else "") for text in texts]
        if not all(texts) and not self._base.options.instruction:
            raise ConfigError(
                f"{path}: an episode has no instruction, with which the frozen policy would be asked. Give "
                "agent.options.instruction=TEXT."
            )
        now, after = (episode.columns[name] for name in TREES)
        made = self._frames(now, after, texts)
        columns = {
            name: {**episode.columns[name], BASE_POLICY: {self._base.weights: each}}
            for name, each in zip(TREES, made, strict=True)
        }
        return replace(episode, columns={**episode.columns, **columns})

    def _frames(
        self, now: Mapping[str, Any], after: Mapping[str, Any], texts: Sequence[str]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the columns of the observations and of the next ones; a frame that is both is computed once, and all
        frames are asked about together."""
        ours, theirs = flatten(now), flatten(after)
        same = np.ones(len(texts), bool)
        same[-1] = False
        for path, column in ours.items():
            equal = np.asarray(theirs[path][:-1] == column[1:])
            same[:-1] &= equal.all(axis=tuple(range(1, equal.ndim)))
        (apart,) = np.nonzero(~same)
        others = unflatten({path: np.asarray(column)[apart] for path, column in theirs.items()})
        of_others = self._base.rows(others, [texts[place] for place in apart.tolist()])
        found = self._base.of_rows([*self._base.rows(now, texts), *of_others])
        first = {name: column[: len(texts)] for name, column in found.items()}
        next_columns = {name: np.roll(column, -1, axis=0) for name, column in first.items()}
        for name, column in found.items():
            next_columns[name][apart] = column[len(texts) :]
        return first, next_columns


def _zeros(space: Any) -> Any:
    if isinstance(space, Dict):
        return {name: _zeros(each) for name, each in space.spaces.items()}
    return np.zeros(space.shape, space.dtype)
