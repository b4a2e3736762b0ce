"""Distributional values against a slow reference in float64, which shares no code with them; shaping on a table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilt.algos.value_distribution import (
    ValueSupport,
    auc,
    calibration_error,
    loss,
    reliability,
    shaped,
)
from hilt.core.errors import ConfigError

SUPPORTS = [
    ValueSupport(horizon=50),
    ValueSupport(horizon=7, bins=11, failure_penalty=0.25),
    ValueSupport(horizon=50, returns="discounted", discount=0.97),
]


def reference_values(s: ValueSupport) -> list[float]:
    low, high = (-1.0, 0.0) if s.returns == "steps" else (s.discount**s.horizon, 1.0)
    first = -1 - s.failure_penalty if s.returns == "steps" else 0.0
    return [first, *(low + (high - low) * i / (s.bins - 2) for i in range(s.bins - 1))]


def reference_return(s: ValueSupport, left: int) -> float:
    left = min(left, s.horizon)
    return -left / s.horizon if s.returns == "steps" else s.discount**left


def normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def reference_target(s: ValueSupport, success: bool, left: int, kind: str, smoothing: float) -> list[float]:
    if not success:
        return [1.0] + [0.0] * (s.bins - 1)
    z, g = reference_values(s)[1:], reference_return(s, left)
    w = z[1] - z[0]
    if kind == "two_hot":
        return [0.0, *(max(0.0, 1 - abs(g - each) / w) for each in z)]
    mass = [normal((each + w / 2 - g) / (smoothing * w)) - normal((each - w / 2 - g) / (smoothing * w)) for each in z]
    return [0.0, *(each / sum(mass) for each in mass)]


@pytest.mark.parametrize("kind", ["two_hot", "hl_gauss"])
@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_targets_equal_the_reference(support: ValueSupport, kind: str):
    left = torch.tensor([0, 1, 3, 6, 49, 50, 500, 2])
    success = torch.tensor([True] * 7 + [False])
    found = support.targets(success, left, kind, 0.75).double().numpy()
    want = [reference_target(support, bool(s), int(n), kind, 0.75) for s, n in zip(success, left, strict=True)]
    np.testing.assert_allclose(found, want, atol=1e-6)
    if kind == "two_hot":  # it has the return as its mean, exactly
        means = found @ np.array(reference_values(support))
        want_means = [reference_return(support, int(n)) for n in left[:-1]] + [support.failure]
        np.testing.assert_allclose(means, want_means, atol=1e-6)
    # a target of another return is far away: the comparison above can fail
    assert np.abs(found[0] - want[3]).max() > 0.1


@pytest.mark.parametrize("support", SUPPORTS, ids=str)
def test_value_success_steps_and_loss_equal_the_reference(support: ValueSupport):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, support.bins)) * 3
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    z = np.array(reference_values(support))
    given = torch.from_numpy(logits)
    np.testing.assert_allclose(support.value(given).numpy(), p @ z, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(support.success(given).numpy(), 1 - p[:, 0], rtol=1e-9)
    mean = (p[:, 1:] @ z[1:]) / (1 - p[:, 0])
    steps = -mean * support.horizon if support.returns == "steps" else np.log(mean) / np.log(support.discount)
    np.testing.assert_allclose(support.steps_left(given).numpy(), steps, rtol=1e-9)
    target = support.targets(torch.tensor([True, True, False, True, False]), torch.tensor([1, 2, 3, 4, 5]))
    want = -(target.double().numpy() * np.log(p)).sum(1).mean()
    assert float(loss(given, target.double())) == pytest.approx(want, rel=1e-9)


@given(
    st.lists(st.floats(-2, 1), min_size=1, max_size=12),
    st.sampled_from([True, False, None]),
    st.integers(1, 15),
    st.sampled_from(SUPPORTS),
)
def test_advantages_equal_the_reference(values: list[float], success: bool | None, steps: int, support: ValueSupport):
    length, want = len(values), []
    ends = {True: 0.0 if support.returns == "steps" else 1.0, False: reference_values(support)[0], None: values[-1]}
    outcome = ends[success]
    r = -1 / support.horizon if support.returns == "steps" else 0.0
    g = 1.0 if support.returns == "steps" else support.discount
    for t in range(length):
        m = min(steps, length - t)
        beyond = values[t + m] if t + m < length else outcome
        want.append(sum(g**k * r for k in range(m)) + g**m * beyond - values[t])
    found = support.advantages(torch.tensor(values, dtype=torch.float64), success, steps)
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-9, atol=1e-9)


def test_a_perfect_value_has_no_advantage():
    """Values that are the returns of what happens leave nothing to be better or worse than expected."""
    support = ValueSupport(horizon=20)
    values = support.returns_of(torch.arange(12, 0, -1))
    assert support.advantages(values, True, 5).abs().max() < 1e-12
    assert support.advantages(values, False, 5)[-5:].max() < -1  # a failure that nothing announced


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_auc_counts_pairs(rows: list[tuple[int, bool]]):
    scores, truth = torch.tensor([float(s) for s, _ in rows]), torch.tensor([t for _, t in rows])
    pairs = [(a > b) + 0.5 * (a == b) for a, yes in rows if yes for b, other in rows if not other]
    found = auc(scores, truth)
    assert found is None if not pairs else found == pytest.approx(sum(pairs) / len(pairs))


def test_calibration_error_of_known_predictions():
    probability = torch.tensor([0.05, 0.05, 0.95, 0.95, 0.95, 0.95])
    truth = torch.tensor([False, False, True, True, True, False])
    groups = reliability(probability, truth)
    assert [group.count for group in groups] == [2, 4]
    assert calibration_error(probability, truth) == pytest.approx((2 * 0.05 + 4 * 0.2) / 6, abs=1e-6)
    assert calibration_error(torch.tensor([0.0, 1.0]), torch.tensor([False, True])) == 0


def optimal(rewards: np.ndarray, following: np.ndarray, ends: np.ndarray, discount: float) -> np.ndarray:
    """Q [states, actions] of a table, by value iteration."""
    q = np.zeros_like(rewards)
    for _ in range(300):
        q = rewards + discount * np.where(ends, 0.0, q.max(1)[following])
    return q


@given(st.integers(0, 10_000))
def test_shaping_leaves_the_optimal_policy_of_a_table_unchanged(seed: int):
    rng, states, actions, discount = np.random.default_rng(seed), 6, 3, 0.9
    following, ends = rng.integers(0, states, (states, actions)), rng.random((states, actions)) < 0.2
    rewards, potential = rng.normal(size=(states, actions)), rng.normal(size=states) * 3
    flat = shaped(
        torch.from_numpy(rewards).flatten(),
        torch.from_numpy(np.repeat(potential, actions)),
        torch.from_numpy(potential[following]).flatten(),
        torch.from_numpy(ends).flatten(),
        discount,
    )
    plain = optimal(rewards, following, ends, discount)
    with_shaping = optimal(flat.numpy().reshape(states, actions), following, ends, discount)
    # Q' = Q - V: the same for every action of a state, so the order of actions stays
    np.testing.assert_allclose(with_shaping, plain - potential[:, None], atol=1e-8)
    unshaped_end = rewards + discount * potential[following] - potential[:, None]  # the end's potential counts: wrong
    if ends.any() and np.abs(potential[following][ends]).max() > 1e-3:
        assert np.abs(optimal(unshaped_end, following, ends, discount) - plain + potential[:, None]).max() > 1e-6


def test_supports_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="discounted returns need one between 0 and 1"):
        ValueSupport(horizon=5, returns="discounted")
    with pytest.raises(ConfigError, match="bins from 3"):
        ValueSupport(horizon=5, bins=2)
    with pytest.raises(ConfigError, match="expected one of hl_gauss, two_hot"):
        ValueSupport(horizon=5).targets(torch.tensor([True]), torch.tensor([1]), "one_hot")
