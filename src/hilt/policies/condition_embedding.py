"""A learned embedding as the condition of a policy: which actions are wanted, good ones, bad ones, or nothing is said.

It is added to the token of the state, so that a policy that makes little of words, or whose words were never trained
with it, has a place of its own for the condition:

    token = state_token(o) + e[c],  c = 0 nothing is said, 1 good, 2 bad

It is a parameter of the policy by the name `CONDITIONED`, trained in full beside adapters, and kept out of the policy's
own files, which stay as they were published: `hilt.policies.conditioned` writes it beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hilt.core.errors import ConfigError
from hilt.policies.base import CONDITION, Observation, Policy, Record
from hilt.policies.io.lora import CONDITIONED

NONE, GOOD, BAD = 0, 1, 2
"""The numbers of the conditions in observations and records, as `CONDITION`"""
STD = 0.02
"""The deviation of the embeddings of good and bad before anything is learned; that of nothing begins at 0"""


class ConditionEmbedding(nn.Module):
    """The three embeddings."""

    def __init__(self, width: int):
        super().__init__()
        drawn = torch.randn(3, width, generator=torch.Generator().manual_seed(0)) * STD
        drawn[NONE] = 0
        self.weight = nn.Parameter(drawn)

    def forward(self, token: Tensor, conditions: Tensor) -> Tensor:
        """Tokens [B, width] with the embeddings of their conditions, int64 [B]."""
        return token + self.weight[conditions].to(token.dtype)


def embedding_of(policy: nn.Module) -> ConditionEmbedding | None:
    """The embedding of a policy, if it has one."""
    found = policy._modules.get(CONDITIONED)
    return found if isinstance(found, ConditionEmbedding) else None


def add_embedding(policy: Policy) -> ConditionEmbedding:
    """The embedding of a policy, which is made if it has none."""
    if (there := embedding_of(policy)) is not None:
        return there
    if not policy.state_token_width:
        raise ConfigError(
            f"condition=embedding: this {type(policy).__name__} has no token of the state to which an embedding could "
            "be added (small_vla, SmolVLA, pi0, and OpenVLA-OFT with proprioception have one). Give condition=words."
        )
    made: ConditionEmbedding = ConditionEmbedding(policy.state_token_width).to(policy.device)
    setattr(policy, CONDITIONED, made)
    return made


def remove_embedding(policy: nn.Module) -> None:
    """Takes the embedding off a policy, if it has one."""
    if embedding_of(policy) is not None:
        delattr(policy, CONDITIONED)


def condition_field(policy: nn.Module, observations: Sequence[Observation]) -> Record:
    """The field of a record with the conditions of observations, int64 [B]; none if the policy has no embedding."""
    if embedding_of(policy) is None:
        return {}
    return {CONDITION: np.array([row.get(CONDITION, NONE) for row in observations], np.int64)}


def conditioned_token(policy: nn.Module, token: Tensor, conditions: Tensor | None) -> Tensor:
    """The token of the state [B, width], with the embeddings of its conditions if the policy has some."""
    embedding = embedding_of(policy)
    return token if embedding is None or conditions is None else embedding(token, conditions)
