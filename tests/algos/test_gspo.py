"""Answers of two numbers, whose ratio is one, normalized by their length: the gradient in closed form, and the answer
that is found, also from draws of earlier versions."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from hilt.algos.config import PolicyGradient
from hilt.algos.surrogate import importance, terms
from hilt.algos.tables import policy_loss
from hilt.core.errors import ConfigError

REWARDS = torch.tensor([[0.2, 0.0, 0.4], [0.1, 0.3, 0.0], [0.0, 0.5, 1.0]], dtype=torch.float64)
"""Of the first and the second number of an answer"""
SETTINGS = PolicyGradient(loss="gspo", ratio="chunk", clip_low=0.003, clip_high=0.004)


def numbers(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of both numbers of all nine answers, [9, 1, 2]; the first is drawn, then the second."""
    first, second = logits[0].log_softmax(0), logits[1:].log_softmax(1)
    return torch.stack([first[:, None].expand(3, 3).flatten(), second.flatten()], dim=1)[:, None]


def gradient(now: torch.Tensor, old: torch.Tensor, drawn: torch.Tensor, recompute: bool) -> torch.Tensor:
    """Of the expected loss at `now` over answers of the policy `drawn`. `recompute`: ratios begin with `old`."""
    logits, there = now.clone().requires_grad_(), torch.ones(9, 1, 2, dtype=torch.bool)
    new, before, behavior = (terms(numbers(each), there, "chunk", mean=True)[0] for each in (logits, old, drawn))
    probability = numbers(drawn).sum((1, 2)).exp()
    worth = REWARDS.flatten() - (probability * REWARDS.flatten()).sum()
    weight = importance(before, behavior).clamp(max=2.0) if recompute else 1.0
    each, _ = policy_loss("gspo").terms(new - (before if recompute else behavior), worth, SETTINGS)
    (found,) = torch.autograd.grad((probability * weight * each).sum(), logits)
    return found


def test_a_first_step_has_the_gradient_of_the_expected_reward_over_the_length():
    logits = torch.tensor([[0.2, -0.4, 0.1], [0.0, 0.3, 0.5], [0.1, 0.0, -0.2], [1.0, 0.0, 0.2]], dtype=torch.float64)
    now = logits.clone().requires_grad_()
    expected = (numbers(now).sum((1, 2)).exp() * REWARDS.flatten()).sum()
    (true,) = torch.autograd.grad(-expected, now)
    for recompute in (False, True):
        assert torch.allclose(gradient(logits, logits, logits, recompute), true / 2, atol=1e-12)


@pytest.mark.parametrize(("versions", "recompute"), [(0, False), (1, False), (4, True)])
def test_the_best_answer_is_found_from_draws_of_earlier_versions(versions: int, recompute: bool):
    made = [torch.zeros(4, 3, dtype=torch.float64)]
    made[0][0] = torch.tensor([1.0, 0.0, -1.0])  # the first number of the best answer is the rarest
    for step in range(150):
        drawn, now = made[max(0, step - versions)], made[-1]
        for _ in range(2):  # the second step has ratios that the clip may decide
            now = now - 2.0 * gradient(now, made[-1], drawn, recompute)
        made.append(now)
    assert numbers(made[-1]).sum((1, 2)).exp()[8] > 0.85


def test_answers_of_a_policy_far_away_have_a_gradient_only_if_ratios_begin_anew():
    """Good answers have become likelier since they were drawn, bad ones less likely, all by more than the bounds."""
    drawn = torch.zeros(4, 3, dtype=torch.float64)
    now = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 1, 0], [0, 1, 2]], dtype=torch.float64)
    carried, anew = (gradient(now, now, drawn, recompute) for recompute in (False, True))
    assert (carried == 0).all() and anew[0, 2] < -0.01


def test_a_chunk_is_clipped_as_a_whole_and_what_was_not_carried_out_has_no_length():
    there = torch.tensor([[[True, True], [True, False]]])
    log_ratio, counted = terms(torch.tensor([[[0.5, -0.3], [-0.17, 9.0]]]), there, "chunk", mean=True)
    assert log_ratio.tolist() == pytest.approx([0.01]) and counted.tolist() == [True]
    loss, shown = policy_loss("gspo").terms(log_ratio, torch.tensor([1.0]), SETTINGS)
    assert loss.tolist() == pytest.approx([-1.004]) and shown["clip_fraction"].tolist() == [1.0]


def test_a_ratio_of_single_numbers_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.loss=gspo with algorithm\.ratio=token.* Give algorithm\.ratio"):
        PolicyGradient(loss="gspo").check()
    with pytest.raises(ConfigError, match=r"dual_clip=3\.0 would do nothing"):
        PolicyGradient(loss="gspo", ratio="chunk", dual_clip=3.0).check()
    SETTINGS.check()
