"""A bandit whose arms are weighted by truncated ratios: the gradient in closed form, and the arm that is found."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from hilt.algos.config import PolicyGradient
from hilt.algos.surrogate import importance
from hilt.algos.tables import policy_loss
from hilt.core.errors import ConfigError

REWARDS = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)


def gradient(now: torch.Tensor, old: torch.Tensor, drawn: torch.Tensor, limit: float, recompute: bool) -> torch.Tensor:
    """Of the expected loss at `now` over arms of the policy `drawn`. `recompute`: ratios begin with `old`."""
    logits, probability = now.clone().requires_grad_(), drawn.softmax(0)
    worth = REWARDS - (probability * REWARDS).sum()
    before = (old if recompute else drawn).log_softmax(0)
    weight = importance(before, drawn.log_softmax(0)).clamp(max=1 + limit)
    settings = PolicyGradient(loss="cispo", clip_high=limit)
    each, _ = policy_loss("cispo").terms(logits.log_softmax(0) - before, worth, settings)
    (found,) = torch.autograd.grad((probability * weight * each).sum(), logits)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stale_bandit_has_the_gradient_of_its_expected_reward(recompute: bool):
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64)
    drawn = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    now = logits.clone().requires_grad_()
    (true,) = torch.autograd.grad(-(now.softmax(0) * REWARDS).sum(), now)
    assert torch.allclose(gradient(logits, logits, drawn, 100.0, recompute), true, atol=1e-12)
    truncated = gradient(logits, logits, drawn, 0.5, recompute)
    assert not torch.allclose(truncated, true, atol=1e-2) and torch.dot(truncated, true) > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("versions", [0, 1, 4])
def test_the_best_arm_is_found_from_draws_of_earlier_versions(versions: int, recompute: bool):
    made = [torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)]  # the best arm is the rarest
    for step in range(200):
        drawn, now = made[max(0, step - versions)], made[-1]
        for _ in range(2):
            now = now - 0.5 * gradient(now, made[-1], drawn, 0.28, recompute)
        made.append(now)
    assert made[-1].softmax(0)[2] > 0.95


def test_a_truncated_term_still_has_a_gradient_where_the_clipped_surrogate_has_none():
    settings, worth = PolicyGradient(loss="cispo", clip_high=0.3), torch.tensor([2.0, 2.0, -1.0])
    found = {}
    for name in ("cispo", "clipped"):
        log_ratio = torch.tensor([1.0, -3.0, 500.0], requires_grad=True)
        loss, shown = policy_loss(name).terms(log_ratio, worth, settings)
        (found[name],) = torch.autograd.grad(loss.sum(), log_ratio)
        assert shown["clip_fraction"].tolist() == [1.0, 0.0, 1.0 if name == "cispo" else 0.0]
    assert found["cispo"].tolist() == pytest.approx([-2.6, -2 * torch.exp(torch.tensor(-3.0)).item(), 1.3])
    assert found["clipped"][0] == 0


def test_a_lower_bound_is_refused():
    with pytest.raises(ConfigError, match=r"clip_low=0.1 would do nothing: it needs another algorithm\.loss"):
        PolicyGradient(loss="cispo", clip_low=0.1).check()
