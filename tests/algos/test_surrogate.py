"""What the golden numbers and the slow reference do not reach: ratios that
overflow, the low-variance divergence, no rows at all."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from hilt.algos.kl import divergence
from hilt.algos.surrogate import importance, surrogate, terms, weights
from hilt.core.errors import UnknownNameError


def test_a_ratio_that_would_overflow_stays_a_number():
    change = torch.tensor([500.0, -500.0], requires_grad=True)
    found = surrogate(change, torch.tensor([-1.0, 1.0]), 0.2, 0.28, 3.0)
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([3.0, 0.0], abs=1e-6) and found.dual_clipped.tolist() == [1.0, 0.0]
    assert change.grad is not None and change.grad.isfinite().all()


def test_numbers_under_the_mask_count_for_nothing():
    log_prob = torch.tensor([[[-1.0, -2.0], [torch.nan, -torch.inf]]])
    mask = torch.tensor([[[True, True], [False, False]]])
    found = {level: [x.tolist() for x in terms(log_prob, mask, level)] for level in ("action", "chunk")}
    assert found == {"action": [[[-3.0, 0.0]], [[True, False]]], "chunk": [[-3.0], [True]]}


REWARDS = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)
"""Of the arms of a bandit"""


def decoupled_gradient(logits: torch.Tensor, drawn: torch.Tensor, cap: float) -> torch.Tensor:
    """Of the expected loss of one update at `logits`, with arms that were drawn with the probabilities `drawn`."""
    now = logits.clone().requires_grad_()
    old, probability = logits.log_softmax(0), drawn.double()
    advantage = REWARDS - (probability * REWARDS).sum()
    weight = importance(old, probability.log()).clamp(max=cap)
    loss = weight * surrogate(now.log_softmax(0) - old, advantage, 0.2, 0.28).loss
    (gradient,) = torch.autograd.grad((probability * loss).sum(), now)
    return gradient


def test_a_stale_bandit_has_the_gradient_of_its_expected_reward():
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64)
    drawn = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    now = logits.clone().requires_grad_()
    (true,) = torch.autograd.grad(-(now.softmax(0) * REWARDS).sum(), now)
    assert torch.allclose(decoupled_gradient(logits, drawn, cap=100.0), true, atol=1e-12)
    ratio = (logits.softmax(0) / drawn).max()
    assert ratio > 2
    truncated = decoupled_gradient(logits, drawn, cap=2.0)
    assert not torch.allclose(truncated, true, atol=1e-2) and torch.dot(truncated, true) > 0


@pytest.mark.parametrize("versions", [0, 1, 4])
def test_a_bandit_finds_the_best_arm_from_draws_of_earlier_versions(versions: int):
    made = [torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)]  # the best arm is the rarest
    for step in range(300):
        drawn = made[max(0, step - versions)].softmax(0)
        made.append(made[-1] - 0.5 * decoupled_gradient(made[-1], drawn, cap=2.0))
    assert made[-1].softmax(0)[2] > 0.95


def test_the_low_variance_divergence_is_never_negative():
    p = torch.linspace(-3, 0, 30, dtype=torch.float64).requires_grad_()
    found = divergence(p, torch.tensor(-1.0, dtype=torch.float64), "low_var_kl")
    found.sum().backward()
    assert (found >= 0).all() and p.grad is not None and ((p.grad > 0) == (p > -1)).all()
    with pytest.raises(UnknownNameError, match="low_var_kl"):
        divergence(p, p, "k3")


def test_in_a_loss_mse_has_the_gradient_of_the_divergence_and_low_var_kl_that_of_the_other_one():
    """Of all values that a categorical can draw, each as often as it does: the mean
    over endless draws, without their noise."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.5, -0.5, 0.0], dtype=torch.float64), 0)
    log_prob = torch.log_softmax(logits, 0)
    often, there = log_prob.exp().detach(), reference.exp()
    reverse, forward = (log_prob.exp() * (log_prob - reference)).sum(), (there * (reference - log_prob)).sum()

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    found = {
        name: gradient((often * divergence(log_prob, reference, name)).sum()) for name in ("kl", "mse", "low_var_kl")
    }
    assert torch.allclose(found["mse"], gradient(reverse)) and torch.allclose(found["low_var_kl"], gradient(forward))
    assert found["kl"].abs().max() < 1e-12 and not torch.allclose(found["mse"], found["low_var_kl"], atol=0.1)


def test_no_rows():
    assert weights("trajectory_mean", torch.zeros(0), torch.zeros(0, dtype=torch.int64), 5, 2, 1).shape == (0,)
