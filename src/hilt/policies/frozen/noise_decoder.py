"""The flow of a frozen policy from a given initial noise to actions, with gradients: for DSRL's noise space, where the
flow follows from the policy's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hilt.core.errors import ConfigError
from hilt.policies.vla.heads import FlowHead
from hilt.policies.vla.small_vla import SmallVLA

if TYPE_CHECKING:
    from hilt.policies.frozen.frozen_base import FrozenBase


class NoiseDecoder:
    """The first `chunk` actions that a flow gives for features ``[N, width]`` and the noise ``[N, chunk * numbers]`` of
    the numbers `moving` of these. All other noise is 0, as it is where the policy takes its most likely actions."""

    def __init__(self, base: FrozenBase, moving: Sequence[int]):
        policy = base.policy
        if refusal := flow_refusal(base):
            raise ConfigError(refusal)
        assert isinstance(policy, SmallVLA)
        self._policy, self._head, self._chunk, self._moving = policy, policy.action_head, base.chunk, list(moving)

    def __call__(self, features: Tensor, noise: Tensor) -> Tensor:
        """Actions ``[N, chunk * numbers]``, from -1 to 1."""
        policy, rows = self._policy, len(features)
        start = noise.new_zeros(rows, policy.chunk, policy.action_dim)
        start[:, : self._chunk, self._moving] = noise.view(rows, self._chunk, -1)
        heat = features.new_ones(rows)
        actions = policy.as_actions(self._head.draw(features, heat, None, sample=False, start=start).actions)
        return actions.clamp(-1, 1)[:, : self._chunk, self._moving].flatten(1)


def flow_refusal(base: FrozenBase) -> str:
    """Says why the flow of a policy cannot be followed in an update; empty if it can."""
    policy, where = base.policy, base.options.policy
    if not isinstance(policy, SmallVLA) or not isinstance(policy.action_head, FlowHead):
        return (
            f"agent.options.noise_gradient=flow: the policy in {where} does not compute its actions by a flow from its "
            "features and noise. Give a small_vla with policy_options.head=flow, or noise_gradient=critic."
        )
    if policy.knots is not None:
        return (
            f"agent.options.noise_gradient=flow gives each action noise of its own, and the policy in {where} has "
            f"policy_options.knots={policy.knots.count}. Give a policy without knots, or noise_gradient=critic."
        )
    tried = np.linspace(-1, 1, 2 * policy.action_dim, dtype=np.float32).reshape(2, -1)
    commands = np.asarray(base.suite.command(tried))
    if commands.shape != tried.shape or not np.array_equal(commands, tried):
        return (
            "agent.options.noise_gradient=flow needs a task that takes the policy's actions as they are, and "
            f"{base.options.suite or 'these columns'} changes them. Give noise_gradient=critic."
        )
    return ""
