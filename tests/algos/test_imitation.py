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
