"""The tensors of an agent by name: how they are found, copied, and taken over, all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hilt.core.errors import MissingFieldError, SchemaError
from hilt.replay.tensors import as_tensor


def found(tree: Mapping[str, Any], name: str) -> Any:
    if name not in tree:
        raise MissingFieldError(
            f"{name}: no such field in what the agent was given, which has {', '.join(map(str, tree)) or 'nothing'}."
        )
    return tree[name]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}


def load(known: Mapping[str, Tensor], given: Mapping[str, Any], what: str) -> None:
    """Copy values into tensors, all or none."""
    different = sorted(set(known) ^ set(given)) or [
        key for key, tensor in known.items() if tuple(tensor.shape) != tuple(given[key].shape)
    ]
    if different:
        raise SchemaError(
            f"{what} of another agent: {different[0]!r} differs. Use the settings and the version of Hilt that made it."
        )
    with torch.no_grad():
        for key, tensor in known.items():
            tensor.copy_(as_tensor(given[key], key))


def check_range(ours: Mapping[str, float], state: Mapping[str, Any]) -> None:
    """Refuses critics whose outputs mean values of another range, of which the weights tell nothing."""
    theirs = {key: state[key] for key in ("lowest_value", "highest_value") if key in state}
    if theirs != ours:
        words = [" to ".join(f"{value:g}" for value in each.values()) or "one number" for each in (theirs, ours)]
        raise SchemaError(
            f"the critics of this state have values from {words[0]}, and this agent's from {words[1]}. Give "
            "agent.critic (head, value_range, reward_range), agent.rlpd.target_range and discount as they were."
        )
