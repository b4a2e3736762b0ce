"""The layers of a calibration: what is counted of them is what they compute."""

from __future__ import annotations

import pytest
import torch

from hilt.policies.cost.calibration_layers import RANK, layer_counts, make_layer, trained_parameters
from hilt.policies.cost.op_counts import OpCounts

WIDTH, ROWS, TOKENS = 64, 2, 8
MIDDLE = 172


def products(counts: OpCounts) -> int:
    return sum(cost.flops * times for cost, times in counts.ops.items() if cost.kind == "product")


def counts_of(kind: str, training: bool = False) -> OpCounts:
    return layer_counts(kind, WIDTH, ROWS, TOKENS, torch.float32, training)


def test_products_of_each_layer_are_those_of_its_sizes():
    each = 2 * ROWS * TOKENS
    assert products(counts_of("plain")) == each * WIDTH * WIDTH * (3 + 1 + 4 + 4)
    gated = each * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE)
    assert products(counts_of("gated")) == gated
    adapters = each * RANK * (4 * 2 * WIDTH + 3 * (WIDTH + MIDDLE))
    assert products(counts_of("adapted")) == gated + adapters


@pytest.mark.parametrize("kind", ["plain", "gated", "adapted"])
def test_layers_run_and_are_learned(kind: str):
    torch.manual_seed(0)
    layer, x = make_layer(kind, WIDTH), torch.randn(ROWS, TOKENS, WIDTH)
    assert layer(x).shape == x.shape and torch.equal(layer(x), layer(x))
    gradients = torch.autograd.grad(layer(x).square().sum(), trained_parameters(layer))
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    assert counts_of(kind, training=True).calls > 2 * counts_of(kind).calls


def test_only_adapters_are_trained():
    layer = make_layer("adapted", WIDTH)
    assert sum(each.numel() for each in trained_parameters(layer)) == RANK * (4 * 2 * WIDTH + 3 * (WIDTH + MIDDLE))
    sizes = 1024, ROWS, TOKENS, torch.float32
    frozen, learned = (products(layer_counts(kind, *sizes, training=True)) for kind in ("adapted", "gated"))
    assert frozen < learned, "no gradient of the weights"


def test_tokens_turn_with_their_places():
    """Without rotary positions, attention would not see in which order tokens are."""
    torch.manual_seed(0)
    layer, x = make_layer("gated", WIDTH), torch.randn(1, TOKENS, WIDTH)
    assert not torch.allclose(layer(x.flip(1)).flip(1), layer(x), atol=1e-4)
