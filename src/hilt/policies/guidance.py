"""Guidance by a condition: a policy acts as its condition says, and away from what it would do without it.

The formula is in `hilt.algos.offline.recap`: on the logits of tokens, the mean of Gaussians, the velocity of flows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hilt.core.errors import ConfigError
from hilt.policies.base import Observation, Policy, Record
from hilt.policies.vla import flow
from hilt.policies.vla.flow_policy import FlowPolicy
from hilt.policies.vla.openvla import OpenVLAOFT
from hilt.policies.vla.small_vla import SmallVLA


def check_guidance(policy: Policy, weight: float) -> None:
    """Raises where a policy cannot be guided."""
    is_tokens = isinstance(policy, OpenVLAOFT) and policy.config.head == "tokens"
    if weight != 1 and not is_tokens and not isinstance(policy, SmallVLA | FlowPolicy):
        raise ConfigError(
            f"guidance={weight:g}: this {type(policy).__name__} cannot be guided; small_vla, pi0, pi0.5, SmolVLA and "
            "OpenVLA-OFT with tokens can. Give guidance=1: it acts by its condition alone."
        )


def act_guided(
    policy: Policy,
    observations: Sequence[Observation],
    unconditioned: Sequence[Observation],
    weight: float,
    **options: Any,
) -> tuple[np.ndarray, Record]:
    """What `act` of the policy gives of observations with a condition, guided by the same ones without. `options`: of
    `act`. The log-probabilities of the record are those of the guided policy."""
    check_guidance(policy, weight)
    with torch.no_grad(), _guiding(policy, unconditioned, weight):
        return policy.act(observations, **options)


@contextlib.contextmanager
def _guiding(policy: Policy, unconditioned: Sequence[Observation], weight: float) -> Iterator[None]:
    if isinstance(policy, SmallVLA):
        with policy.action_head.guided(policy.features(unconditioned), weight):
            yield
        return
    if isinstance(policy, OpenVLAOFT):
        with policy.guided(unconditioned, weight):
            yield
        return
    assert isinstance(policy, FlowPolicy)
    without = policy.field_of(unconditioned)
    policy.guide = lambda field: flow.away_from(without, field, weight)
    try:
        yield
    finally:
        policy.guide = None
