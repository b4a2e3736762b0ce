"""A small actor-critic beside a frozen vision-language-action policy: ``agent.kind=frozen_vla``.

It is the agent of RLPD, `hilt.policies.agent.agent.Agent`, but for two things. It sees what the frozen policy made of
an observation, its features and its actions, which are columns of the observation: the environment computes them once
for each frame (`hilt.hil.frozen`), so that an update costs what one of RLPD from numbers costs. And its numbers become
actions beside those of the policy: `hilt.algos.frozen.action_spaces`.

    z = [features, actions of the frozen policy, state]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hilt.algos.frozen.action_spaces import ActionSpace, EditSpace, NoiseSpace, ResidualSpace
from hilt.algos.tables import OffPolicyAlgorithm
from hilt.core.errors import ConfigError
from hilt.core.tree import ArraySpec, Tree, flatten
from hilt.policies.agent.actor_critic import Body, ProprioNormalizer
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.layout import fit
from hilt.policies.base import Observation
from hilt.policies.frozen.frozen_base import FrozenBase
from hilt.policies.frozen.frozen_config import (
    ACTIONS,
    FEATURES,
    STATE,
    base_hash,
    base_path,
    check_same_weights,
    frozen_options,
)
from hilt.policies.frozen.noise_decoder import NoiseDecoder
from hilt.replay.schema import spec_of_space

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from typing_extensions import Self


class FrozenAgent(Agent):
    """Actor and critics beside a frozen policy. `make` builds one from spaces that have the policy's columns."""

    def __init__(
        self,
        shapes: Mapping[str, ArraySpec],
        images: list[str],
        proprio: list[str],
        actions: int,
        config: AgentConfig,
        seed: int,
        squashed: bool = True,
    ):
        self.options, self.weights = frozen_options(config.options), base_hash(proprio)
        super().__init__(shapes, images, proprio, actions, config, seed, squashed)
        self.space = self._trained.space = self._make_space()

    @classmethod
    def make(
        cls,
        observation_space: Space,
        action_space: Space,
        config: AgentConfig | None = None,
        image_keys: Sequence[str] = (),
        proprio_keys: Sequence[str] = (),
        seed: int = 42,
        squashed: bool = True,
    ) -> Self:
        """An agent for spaces whose observations have the columns of the frozen policy."""
        config = config or AgentConfig(kind="frozen_vla")
        if config.encoder.kind != "none" or image_keys or proprio_keys:
            raise ConfigError(
                "agent.kind=frozen_vla sees what the frozen policy computes, and nothing else: give "
                "agent.encoder.kind=none, and leave image_keys and proprio_keys out."
            )
        spec = observation_space
        spec = spec if isinstance(spec, Mapping) else cast("Any", spec_of_space(spec, "observations"))
        known = flatten(cast("Any", spec))
        if not (weights := base_hash(known)):
            raise ConfigError(
                "the observations have no columns of a frozen policy: make the environment with "
                "hilt.hil.environment.make_env, which adds them."
            )
        paths = [base_path(weights, name) for name in (FEATURES, ACTIONS, STATE)]
        seen = fit(observation_space, action_space, config, (), [path for path in paths if path in known])
        ordered = [path for path in paths if path in seen.proprio]  # features first: see `_body`
        return cls(seen.shapes, [], ordered, seen.actions, config, seed, squashed)

    def chunks(
        self,
        observations: Tree,
        seed: int = 0,
        argmax: bool = True,
        draws: int = 1,
        rows: Sequence[Observation] | None = None,
    ) -> npt.NDArray[np.float32]:
        """The chunks that it decides for a batch of observations, `draws` for each. `rows`: the same by the policy's
        names, where the observations have the policy's columns alone."""
        return super().chunks(observations, seed, argmax, draws)

    def _decide(self, leaves: Mapping[str, Tensor], seed: int | None, argmax: bool) -> npt.NDArray[np.float32]:
        return self._with_others(super()._decide(leaves, seed, argmax), leaves)

    def _with_others(self, decided: npt.NDArray[np.float32], leaves: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
        """Numbers of an action that the agent does not move are those of the frozen policy."""
        if kept := [number for number in range(self.layout.actions) if number not in self.layout.moving]:
            decided[..., kept] = leaves[base_path(self.weights, ACTIONS)].float().cpu().numpy()[..., kept]
        return decided

    def update(
        self, batch: Mapping[str, object], networks_to_update: Iterable[str] | None = None, details: bool = False
    ) -> tuple[Agent, dict[str, float]]:
        """One gradient step of each network named, as for `Agent`, with what is left of the pull."""
        if (halved_after := self.options.pull_halved_after) and self.space is not None:
            self.space.fade(max(0, self.actor_updates - self.config.rlpd.critic_warmup), halved_after)
        return super().update(batch, networks_to_update, details)

    def _body(self) -> Body:
        config, sizes = self.config, self.inputs.sizes
        features = sizes[base_path(self.weights, FEATURES)]
        rest = sum(sizes.values()) - features
        return Body(features, rest, config.proprio_width, config.hidden, config.activation)

    def _make_space(self) -> ActionSpace:
        options = self.options
        if options.space == "edit":
            return EditSpace(self._places(), options.pull)
        if options.space == "noise":
            base = FrozenBase(options, self.config.chunk, self.config.device)
            check_same_weights(base.weights, self.weights, options.policy)
            width = self.inputs.sizes[base_path(self.weights, FEATURES)]
            decoder = NoiseDecoder(base, self.layout.moving)
            return NoiseSpace(self._places(), width, options.noise_bound, decoder, options.pull)
        return ResidualSpace(self._places(), options.bound, options.pull)

    def _places(self) -> list[int]:
        """Where in ``z`` those numbers of the frozen policy's actions are that the agent moves."""
        path, size = base_path(self.weights, ACTIONS), self.layout.actions
        steps = self.shapes[path].shape[0]
        if steps != self.config.chunk or self.shapes[path].shape[1:] != (size,):
            raise ConfigError(
                f"{path} is {self.shapes[path]}, and the agent takes [{self.config.chunk}, {size}] as agent.chunk="
                f"{self.config.chunk} says."
            )
        first = self.inputs.sizes[base_path(self.weights, FEATURES)]
        return [first + step * size + number for step in range(steps) for number in self.layout.moving]

    def fit_proprio(self, observations: Tree) -> None:
        """The actions of the frozen policy are not normalized: the agent's own stand beside them."""
        super().fit_proprio(observations)
        normal = cast(ProprioNormalizer, self.networks["proprio"])
        first, size = (self.inputs.sizes[base_path(self.weights, name)] for name in (FEATURES, ACTIONS))
        last = first + size
        with torch.no_grad():
            normal.mean[first:last], normal.scale[first:last] = 0.0, 1.0

    def use_algorithm(self, algorithm: OffPolicyAlgorithm) -> None:
        raise ConfigError(
            f"algorithm={type(algorithm).__name__} with agent.kind=frozen_vla: another algorithm takes the actor's "
            "numbers for actions. Give algorithm=rlpd."
        )

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "base_weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same_weights(str(state.get("base_weights", "")), self.weights, "this state")
        super().load_state_dict(state)
