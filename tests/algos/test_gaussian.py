"""The tanh-Gaussian: a density that sums to one, exact where tanh is flat."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hilt.algos.gaussian import log_prob_of, sample, sample_backward


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.8, 0.3), (-1.5, 0.6)])
def test_the_density_sums_to_one(mean: float, std: float) -> None:
    edges = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    middles = (edges[1:] + edges[:-1]) / 2
    density = log_prob_of(middles[:, None], torch.full((1,), mean).double(), torch.full((1,), std).double()).exp()
    assert (density.sum() * (edges[1] - edges[0])).item() == pytest.approx(1, abs=1e-3)


def test_a_sample_knows_its_own_probability() -> None:
    r = torch.Generator().manual_seed(0)
    mean, std = torch.randn(50, 3, generator=r).double(), torch.rand(50, 3, generator=r).double() + 0.1
    actions, log_prob = sample(mean, std, torch.randn(50, 3, generator=r).double())
    inside = (actions.abs() < 0.999).all(1)
    np.testing.assert_allclose(log_prob[inside], log_prob_of(actions, mean, std)[inside], rtol=1e-7)


def test_nothing_is_lost_where_tanh_is_flat() -> None:
    """1 - tanh(20)^2 is 0 even in float64; its logarithm is 2 log 2 - 40."""
    raw = torch.tensor([[20.0], [-20.0], [100.0]], requires_grad=True)
    _, log_prob = sample(raw, torch.ones(3, 1), torch.zeros(3, 1))
    normal = -0.5 * math.log(2 * math.pi)
    expected = [normal - (2 * math.log(2) - 2 * abs(u)) for u in (20.0, -20.0, 100.0)]
    np.testing.assert_allclose(log_prob.detach().numpy(), expected, rtol=1e-6)
    log_prob.sum().backward()
    assert raw.grad is not None and torch.isfinite(raw.grad).all()
    assert torch.isfinite(log_prob_of(torch.tensor([[1.0], [-1.0]]), torch.zeros(2, 1), torch.ones(2, 1))).all()


def test_gradients_are_those_of_autograd() -> None:
    r = torch.Generator().manual_seed(0)
    mean, std, noise, dactions = torch.randn(4, 50, 3, generator=r).double().unbind()
    std, dlog_prob = std.exp(), torch.tensor(0.7).double()
    mean.requires_grad_(), std.requires_grad_()
    actions, log_prob = sample(mean, std, noise)
    expected = torch.autograd.grad([actions, log_prob], [mean, std], [dactions, dlog_prob.expand(50)])
    found = sample_backward(actions.detach(), std.detach(), noise, dactions, dlog_prob)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
