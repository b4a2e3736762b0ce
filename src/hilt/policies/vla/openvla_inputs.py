"""A batch as OpenVLA's model reads it, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hilt.core.errors import MissingFieldError, SchemaError
from hilt.policies.base import Evaluation, Observation, Record, frozen_in, picture, text


@dataclass
class ModelInputs:
    """A batch on the device."""

    pixels: Tensor
    """[B, images, 3 for each vision transformer, H, W], normalized"""
    prompt: Tensor
    """int64 [B, L]"""
    length: Tensor
    """int64 [B]: tokens of each prompt"""
    proprio: Tensor | None = None
    """float32 [B, proprio_dim], normalized"""
    lengths: np.ndarray | None = None
    """`length` on the host, or None if every row fills its prompt, so that no mask is needed"""
    given: Tensor | None = None
    """int64 [B, slots]: the tokens of actions that are given (`OpenVLAConfig.max_delay`), and -1 in the other slots"""
    condition: Tensor | None = None
    """int64 [B]: of a policy that has an embedding of it"""


class SampledActions(NamedTuple):
    """The actions of a batch, as the policy's head gives them."""

    drawn: Tensor
    """[B, chunk, action_dim]: token ids, or normalized actions"""
    evaluation: Evaluation | None
    """None of an answer that is no draw: the L1 head's"""


def without_given(evaluation: Evaluation, record: Record) -> Evaluation:
    """Given actions were not drawn: their log-probability and entropy are 0."""
    if "frozen" not in record:
        return evaluation
    given = torch.from_numpy(frozen_in(record)).to(evaluation.log_prob.device)
    log_prob, entropy = (each.masked_fill(given, 0.0) for each in evaluation[:2])
    return Evaluation(log_prob, entropy, evaluation.value)


def observed_field(row: Observation, name: str, place: int) -> Any:
    """A field of an observation, which is named by its place in the batch if it lacks it."""
    if name not in row:
        raise MissingFieldError(
            f"observation {place} has no {name!r}, which this policy needs; it has {', '.join(sorted(row))}."
        )
    return row[name]


def observed_pictures(observations: Sequence[Observation], cameras: Sequence[str]) -> list[np.ndarray]:
    """The pictures of all cameras of the first observation, then those of the next."""
    rows = enumerate(observations)
    return [picture(observed_field(row, name, place), name, place) for place, row in rows for name in cameras]


def observed_words(observations: Sequence[Observation]) -> list[str]:
    """The instructions of observations."""
    return [text(observed_field(row, "instruction", place), place) for place, row in enumerate(observations)]


def observed_states(observations: Sequence[Observation], size: int) -> np.ndarray:
    """The states of observations, float32 [B, size]."""
    states = [np.asarray(observed_field(row, "state", place), np.float32) for place, row in enumerate(observations)]
    for place, state in enumerate(states):
        if state.shape != (size,):
            raise SchemaError(f"the state of observation {place} is {list(state.shape)}; expected is [{size}].")
    return np.stack(states)
