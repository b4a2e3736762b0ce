"""The head, the losses and the thresholds, against numbers made another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from hilt.algos.classifier import (
    LOWEST,
    Classifier,
    accuracy,
    balanced,
    curve,
    loss,
    majority,
    probabilities,
    recommended,
)


class Pass(nn.Module):
    """An encoder whose features are given."""

    def forward(self, images: dict[str, torch.Tensor], generator: torch.Generator | None = None) -> torch.Tensor:
        return images["features"]


def made(classes: int = 2, dropout: float = 0.1) -> Classifier:
    model, draws = Classifier(Pass(), 3, classes, hidden=8, dropout=dropout), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    return model


def test_the_head_is_upstreams():
    """Dense, LayerNorm, relu, Dense, in float64 with numpy."""
    model, x = made(classes=3), np.random.default_rng(0).normal(size=(5, 3))
    w = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    hidden = x @ w["dense.weight"].T + w["dense.bias"]
    hidden = (hidden - hidden.mean(-1, keepdims=True)) / np.sqrt(hidden.var(-1, keepdims=True) + 1e-6)
    expected = np.maximum(hidden * w["norm.weight"] + w["norm.bias"], 0) @ w["out.weight"].T + w["out.bias"]
    found = model({"features": torch.from_numpy(x).float()}).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert made(classes=2).out.weight.shape == (1, 8)


def test_dropout_is_drawn_from_the_generator_that_is_given_and_only_then():
    model, x = made(), {"features": torch.ones(4, 3)}
    same = [model(x, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*same) and torch.equal(model(x), model(x))
    assert not torch.equal(same[0], model(x, torch.Generator().manual_seed(2)))
    assert torch.equal(made(dropout=0.0)(x), made(dropout=0.0)(x, torch.Generator().manual_seed(1)))


def test_losses_and_probabilities_are_the_formulas():
    logits, labels = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1, 0, 0])
    p = [1 / (1 + math.exp(-z)) for z in (2.0, -1.0, 0.5)]
    assert float(loss(logits, labels)) == pytest.approx(
        -(math.log(p[0]) + math.log(1 - p[1]) + math.log(1 - p[2])) / 3, abs=1e-6
    )
    np.testing.assert_allclose(probabilities(logits), [[1 - x, x] for x in p], atol=1e-6)
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    p3 = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities(logits), p3, atol=1e-6)
    assert float(loss(logits, torch.tensor([1, 0]))) == pytest.approx(
        -(math.log(p3[0, 1]) + math.log(p3[1, 0])) / 2, abs=1e-6
    )


def test_a_batch_has_as_many_frames_of_each_class_however_rare():
    labels = torch.tensor([0] * 95 + [1] * 4 + [2])
    places = balanced(labels, 3, 32, torch.Generator().manual_seed(0))
    assert torch.bincount(labels[places]).tolist() == [11, 11, 10]
    assert torch.bincount(labels[balanced(labels, 2, 128, torch.Generator())]).tolist() == [64, 64]
    assert len({*places[:11].tolist()}) > 5  # all of a class are drawn from


def test_precision_and_recall_counted_by_hand():
    success, truth = torch.tensor([0.1, 0.4, 0.6, 0.9]), torch.tensor([False, True, False, True])
    low, middle, high, top = curve(success, truth, [0.05, 0.5, 0.7, 0.95])
    assert (low.precision, low.recall, low.false_successes) == (0.5, 1.0, 2)
    assert (middle.precision, middle.recall, middle.false_successes) == (0.5, 0.5, 1)
    assert (high.precision, high.recall, high.false_successes) == (1.0, 0.5, 0)
    assert (top.precision, top.recall, top.score) == (None, 0.0, 0.0), "of nothing there is no share"
    assert high.score == pytest.approx(1.25 * 1.0 * 0.5 / (0.25 * 1.0 + 0.5))  # F0.5
    probability = torch.stack([1 - success, success], -1)
    assert accuracy(probability, truth.long()) == 0.5 and majority(torch.tensor([0, 0, 1, 0])) == 0.75


def test_the_recommended_threshold_prefers_precision_and_the_middle_of_what_is_as_good():
    apart = curve(torch.tensor([0.1] * 9 + [0.99] * 9), torch.tensor([False] * 9 + [True] * 9))
    assert 0.7 < recommended(apart).threshold < 0.8  # everything from .11 to .99 separates them; never below LOWEST
    # One failure at .80 among successes at .70 and .90: to lose as many successes is better than to let it pass
    mixed = curve(
        torch.tensor([0.2] * 20 + [0.8] * 4 + [0.7] * 2 + [0.9] * 18), torch.tensor([False] * 24 + [True] * 20)
    )
    assert 0.8 < recommended(mixed).threshold <= 0.9
    assert recommended(curve(torch.tensor([0.3, 0.1]), torch.tensor([True, False]))).threshold >= LOWEST
