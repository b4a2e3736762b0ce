"""Gradients against central differences, along random directions through all the parameters of a module in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


def assert_gradients(module: nn.Module, scalar: Callable[[], Tensor], directions: int = 4, step: float = 1e-7) -> None:
    """`scalar()` is computed anew by the module at each call, with nothing else that is random."""
    weights = list(module.parameters())
    assert all(weight.dtype == torch.float64 for weight in weights)
    gradients = torch.autograd.grad(scalar(), weights, allow_unused=True, materialize_grads=True)
    assert any(gradient.any() for gradient in gradients)
    chance = torch.Generator().manual_seed(0)
    for _ in range(directions):
        ways = [torch.randn(weight.shape, generator=chance, dtype=torch.float64) for weight in weights]
        found = []
        for sign in (1, -2):  # there, and back beyond where it began
            with torch.no_grad():
                for weight, way in zip(weights, ways, strict=True):
                    weight += sign * step * way
                found.append(scalar().item())
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight += step * way
        slope = sum(float((gradient * way).sum()) for gradient, way in zip(gradients, ways, strict=True))
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-6)
