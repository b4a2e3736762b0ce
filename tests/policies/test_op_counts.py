"""The operations of a call, beside what its shapes say."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hilt.policies.cost.op_counts import OpCounts, counted


def kinds(counts: OpCounts) -> dict[str, int]:
    found: dict[str, int] = {}
    for cost, times in counts.ops.items():
        found[cost.kind] = found.get(cost.kind, 0) + times * cost.flops
    return found


def counts_of(make: Any, call: Any, training: bool = False) -> OpCounts:
    return counted(make, call, training=training)


def test_products_are_counted_forward_and_backward():
    def call(layer: Any) -> torch.Tensor:
        made: torch.Tensor = layer(torch.zeros(3, 5))
        return made

    once = 2 * 3 * 5 * 7
    assert counts_of(lambda: nn.Linear(5, 7), call).flops == once
    # the gradient of the weights; the input needs none
    assert counts_of(lambda: nn.Linear(5, 7), call, training=True).flops == 2 * once
    deep = counts_of(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), call, training=True)
    assert deep.flops == 2 * 3 * 5 * 5 * (2 + 2 + 1)


def test_convolutions_and_attention_are_counted():
    def look(layer: Any) -> torch.Tensor:
        made: torch.Tensor = layer(torch.zeros(2, 3, 8, 8))
        return made

    once = 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert kinds(counts_of(lambda: nn.Conv2d(3, 4, 3, padding=1), look))["convolution"] == once
    assert kinds(counts_of(lambda: nn.Conv2d(3, 4, 3, padding=1), look, training=True))["convolution"] == 2 * once

    def attend(layer: Any) -> torch.Tensor:
        x = layer(torch.zeros(2, 4, 10, 6))
        return F.scaled_dot_product_attention(x, x, x)

    forward = 4 * (2 * 4 * 10 * 6) * 10
    assert kinds(counts_of(lambda: nn.Linear(6, 6), attend))["attention"] == forward
    assert kinds(counts_of(lambda: nn.Linear(6, 6), attend, training=True))["attention"] == forward + 2.5 * forward


def test_bytes_are_those_that_are_read_and_written_and_views_are_free():
    def call(layer: Any) -> torch.Tensor:
        x = layer.weight.view(20)
        return torch.exp(x + x)

    counts = counts_of(lambda: nn.Linear(5, 4), call)
    sizes = {cost.kind: cost.nbytes for cost in counts.ops}
    assert sizes == {"view": 0, "plain": 3 * 80, "hard": 2 * 80} and counts.calls == 3
    assert [cost.kind for cost in counts.order] == ["view", "plain", "hard"]


def test_operations_in_place_are_of_their_kind():
    def call(layer: Any) -> torch.Tensor:
        made: torch.Tensor = layer(torch.zeros(3, 5)).addmm_(torch.zeros(3, 2), torch.zeros(2, 7)).sigmoid_()
        return made

    counts = counts_of(lambda: nn.Linear(5, 7), call)
    assert kinds(counts)["product"] == 2 * 3 * 5 * 7 + 2 * 3 * 2 * 7
    assert sum(times for cost, times in counts.ops.items() if cost.kind == "hard") == 1


def test_answers_as_arrays_are_zeros():
    def call(layer: Any) -> None:
        answers.append(layer(torch.zeros(3, 5)).numpy())

    answers: list[Any] = []
    counts_of(lambda: nn.Linear(5, 7), call)
    assert answers[0].shape == (3, 7) and not answers[0].any()
