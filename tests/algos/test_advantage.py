"""Advantages beside the slow reference, on episodes of any lengths in groups of any sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.algos.advantage import advantages, whiten
from hilt.algos.config import GROUPED, PolicyGradient
from hilt.core.errors import ConfigError
from tests.algos import pg_reference as slow

NUMBER = st.floats(-2, 2).map(lambda x: round(x, 3))


@st.composite
def rollouts(draw: st.DrawFn) -> Any:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = [[draw(NUMBER) for _ in range(2 * length)] for length in lengths]
    groups = [draw(st.integers(0, 2)) for _ in lengths]
    kind = draw(st.sampled_from([*GROUPED, "reinforce_plus_plus", "remax", "gae"]))
    made = PolicyGradient(
        kind, draw(st.sampled_from([1.0, 0.9, 0.5])), lam=draw(st.sampled_from([1.0, 0.3])) if kind == "gae" else 1.0
    )
    how = draw(st.sampled_from(["auto", "none", "batch"] + ["group"] * (kind in GROUPED)))
    paid = [[draw(NUMBER) for _ in range(length)] for length in lengths] if draw(st.booleans()) else None
    return dataclasses.replace(made, normalize=how), lengths, numbers, groups, [draw(NUMBER) for _ in lengths], paid


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


@given(rollouts())
@settings(max_examples=60, deadline=None)
def test_as_the_reference(rollout: Any):
    made, lengths, numbers, groups, baselines, paid = rollout
    rewards, values = (
        [row[:n] for n, row in zip(lengths, numbers, strict=True)],
        [row[n:] for n, row in zip(lengths, numbers, strict=True)],
    )
    worth, returns = slow.advantages(made, rewards, groups, values, baselines, paid)
    mask = padded([[1.0] * n for n in lengths])
    beyond = 7 * (1 - mask)  # what lies after the end counts for nothing
    given_ = (
        padded(rewards) + beyond,
        mask.bool(),
        torch.tensor(groups),
        padded(values) + beyond,
        torch.tensor(baselines).double(),
    )
    ours, theirs = advantages(made, *given_, penalty=None if paid is None else padded(paid) + beyond)
    assert torch.allclose(ours, padded(worth), atol=1e-6) and torch.allclose(theirs, padded(returns), atol=1e-6)


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("same", [0.0, 1.0])
def test_a_group_that_ended_alike_is_compared_by_what_it_paid_and_no_more(estimator: str, same: float):
    """With a divergence of a thousandth each advantage has that size; a group with
    a success and a failure is as without it."""
    made, group = PolicyGradient(estimator, normalize="group"), torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([[same], [same], [same], [0.0], [1.0], [0.0]], dtype=torch.float64)
    paid = torch.tensor([[1e-3], [2e-3], [0.0], [1e-3], [2e-3], [0.0]], dtype=torch.float64)
    mask = torch.ones(6, 1)
    ours, plain = (advantages(made, rewards, mask, group, penalty=each)[0] for each in (paid, None))
    assert 0 < ours[:3].abs().max() < 2e-3 and plain[:3].abs().max() < 1e-9
    assert (ours[3:] - plain[3:]).abs().max() < 2e-3 and plain[4] > 1


def test_whitened_over_all_ranks():
    """`total` adds what the others have; here as if they had the same once more."""
    x, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    twice = whiten(x, mask, lambda tensor: tensor.mul_(2))
    assert torch.allclose(twice[:, :2], whiten(torch.tensor([[1.0, 2.0, 1.0, 2.0]]), torch.ones(1, 4))[:, :2])
    assert whiten(torch.tensor([[3.0]]), torch.ones(1, 1)).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("kind", "says"), [("gae", "give the policy a value head"), ("remax", "the score of a greedy episode")]
)
def test_without_what_it_needs(kind: str, says: str):
    with pytest.raises(ConfigError, match=says):
        advantages(PolicyGradient(kind), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1))
