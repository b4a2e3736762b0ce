"""What imitating means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hilt.algos.imitation import grasp_margin_loss, imitation_loss
from hilt.core.errors import UnknownNameError


def test_nll_is_least_at_the_shown_action_and_knows_the_deviation() -> None:
    shown = torch.tanh(torch.tensor([[0.3, -0.4]]))
    losses = {
        name: imitation_loss("nll", torch.tensor([mean]), torch.full((1, 2), std), shown).item()
        for name, mean, std in [("there", [0.3, -0.4], 0.5), ("aside", [0.6, -0.4], 0.5), ("narrow", [0.3, -0.4], 0.1)]
    }
    assert losses["narrow"] < losses["there"] < losses["aside"]


def test_mse_is_of_the_action_and_not_of_what_it_is_the_tanh_of() -> None:
    mean, shown = torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.5]])
    loss = imitation_loss("mse", mean, torch.ones(1, 2), shown)
    np.testing.assert_allclose(loss, (torch.tanh(mean) - shown).square().mean(1))
    with pytest.raises(UnknownNameError, match="no imitation loss named 'l2'"):
        imitation_loss("l2", mean, mean, shown)


def test_the_shown_move_of_a_gripper_is_best_by_a_margin() -> None:
    q = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.95, 0.0], [0.0, 0.0, 1.0]])
    shown = torch.tensor([0, 0, 0])
    np.testing.assert_allclose(grasp_margin_loss(q, shown, 0.1), [0.0, 0.05, 1.1], atol=1e-6)


def test_the_loss_of_behavior_cloning_is_hil_serls() -> None:
    """Its `BCAgent` has `distrax.MultivariateNormalDiag(mean, std).log_prob(actions)`, without tanh and
    without a limit of the actions: -0.5 * sum(((a - mean) / std)^2) - sum(log std) - 0.5 * k * log(2 pi),
    here by numpy; the first row also by hand."""
    mean = np.array([[0.2, -0.5], [0.9, 0.0], [-3.0, 0.1]])
    std = np.array([[0.5, 2.0], [0.1, 1.0], [0.7, 1e-2]])
    actions = np.array([[1.0, -1.0], [1.0, 0.3], [-1.0, 0.1]])
    log_prob = -0.5 * (((actions - mean) / std) ** 2).sum(1) - np.log(std).sum(1) - np.log(2 * np.pi)
    loss = imitation_loss("nll", *(torch.from_numpy(part) for part in (mean, std, actions)), squashed=False)
    np.testing.assert_allclose(loss, -log_prob, rtol=1e-12)
    np.testing.assert_allclose(loss[0], 0.5 * (1.6**2 + 0.25**2) + 1.8378770664093453, rtol=1e-12)
    np.testing.assert_allclose(
        imitation_loss("mse", *(torch.from_numpy(part) for part in (mean, std, actions)), squashed=False),
        ((mean - actions) ** 2).mean(1),
    )


def test_actions_at_full_deflection_weigh_no_more_than_others_in_behavior_cloning() -> None:
    """A key is held in three of four steps. The plain Gaussian's likeliest mean is their
    mean; with tanh it would be beyond any other."""
    shown = torch.tensor([[1.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    found = {}
    for squashed in (False, True):
        mean, log_std = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
        descent = torch.optim.Adam([mean, log_std], 0.05)
        for _ in range(500):
            descent.zero_grad()
            imitation_loss("nll", mean.expand(4, 1), log_std.exp().expand(4, 1), shown, squashed).mean().backward()
            descent.step()
        found[squashed] = (torch.tanh(mean) if squashed else mean).item()
    assert abs(found[False] - 0.75) < 0.01 and found[True] > 0.99
