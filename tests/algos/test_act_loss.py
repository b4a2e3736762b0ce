"""The loss of ACT beside a reference in numpy (float64, one number after the other) and torch's own distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from hilt.algos.offline.act_loss import act_loss, prior_kl, style
from hilt.core.errors import SchemaError

ROWS, CHUNK, DIM, LATENT, BETA = 4, 3, 2, 5, 0.7
LENGTHS = (3, 1, 2, 0)
"""Actions of each row that were shown; the last row has none"""


def drawn() -> dict[str, Any]:
    random = np.random.default_rng(0)
    mask = np.arange(CHUNK) < np.array(LENGTHS)[:, None]
    return {
        "predicted": random.normal(size=(ROWS, CHUNK, DIM)),
        "shown": random.normal(size=(ROWS, CHUNK, DIM)),
        "mask": mask,
        "mean": random.normal(size=(ROWS, LATENT)),
        "log_variance": random.normal(size=(ROWS, LATENT)),
    }


def reference(predicted: Any, shown: Any, mask: Any, mean: Any, log_variance: Any, beta: float) -> tuple[float, ...]:
    errors, kl = [], 0.0
    for row in range(len(predicted)):
        for step in range(CHUNK):
            if mask[row, step]:
                errors += [abs(predicted[row, step, n] - shown[row, step, n]) for n in range(DIM)]
        divergence = 0.0
        for j in range(LATENT):  # log(1 / std) + (std^2 + mean^2) / 2 - 1/2, between two Gaussians
            std = math.sqrt(math.exp(log_variance[row, j]))
            divergence += math.log(1 / std) + (std**2 + mean[row, j] ** 2) / 2 - 0.5
        kl += divergence * sum(mask[row]) / mask.sum()
    return sum(errors) / len(errors) + beta * kl, sum(errors) / len(errors), kl


def tensors(numbers: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in numbers.items()}


def test_loss_equals_the_reference_in_float64():
    numbers = drawn()
    found = act_loss(**tensors(numbers), beta=BETA)
    np.testing.assert_allclose([float(part) for part in found], reference(**numbers, beta=BETA), rtol=1e-14)


def test_kl_is_torchs_and_0_at_the_prior():
    numbers = tensors(drawn())
    law = Normal(numbers["mean"], (numbers["log_variance"] / 2).exp())
    torch.testing.assert_close(
        prior_kl(numbers["mean"], numbers["log_variance"]), kl_divergence(law, Normal(0.0, 1.0)).sum(-1)
    )
    assert not prior_kl(torch.zeros(2, 3), torch.zeros(2, 3)).any()


def test_gradient_equals_differences_of_the_reference():
    numbers = drawn()
    given = tensors(numbers)
    for name in ("predicted", "mean", "log_variance"):
        given[name].requires_grad_()
    act_loss(**given, beta=BETA).loss.backward()
    for name in ("predicted", "mean", "log_variance"):
        gradient, step = given[name].grad, 1e-6
        assert gradient is not None
        for place in np.ndindex(*numbers[name].shape):
            sides = []
            for sign in (1, -1):
                moved = {**numbers, name: numbers[name].copy()}
                moved[name][place] += sign * step
                sides.append(reference(**moved, beta=BETA)[0])
            assert float(gradient[place]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-8)


def test_what_was_not_shown_does_not_count():
    numbers = tensors(drawn())
    before = act_loss(**numbers, beta=BETA).loss
    numbers["shown"][~numbers["mask"]] = math.nan
    numbers["predicted"].requires_grad_()
    after = act_loss(**numbers, beta=BETA).loss
    after.backward()
    gradient = numbers["predicted"].grad
    assert torch.equal(before, after.detach()) and gradient is not None and torch.isfinite(gradient).all()
    assert not gradient[~numbers["mask"]].any()


def test_parts_of_a_batch_add_up_to_the_whole():
    numbers = tensors(drawn())
    whole = act_loss(**numbers, beta=BETA).loss
    parts = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        part = {name: array[rows] for name, array in numbers.items()}
        parts += act_loss(**part, beta=BETA).loss * part["mask"].sum() / numbers["mask"].sum()
    torch.testing.assert_close(parts, whole)


def test_style_has_the_moments_of_the_posterior():
    mean, log_variance = torch.tensor([[0.5, -1.0]]), torch.tensor([[0.0, math.log(0.04)]])
    noise = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0))
    z = style(mean, log_variance, noise)
    torch.testing.assert_close(z.mean(0), mean[0], atol=0.03, rtol=0)
    torch.testing.assert_close(z.std(0), torch.tensor([1.0, 0.2]), atol=0.02, rtol=0)
    assert torch.equal(style(mean, log_variance, torch.zeros(1, 2)), mean)


def test_shapes_that_do_not_fit_are_named():
    numbers = tensors(drawn())
    numbers["mask"] = numbers["mask"][:, :2]
    with pytest.raises(SchemaError, match=r"with a mask of \[4, 2\], .* expected \[B, k, A\] twice, \[B, k\]"):
        act_loss(**numbers, beta=1.0)
