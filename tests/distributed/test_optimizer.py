"""A module that is trained: AdamW beside one by hand, clips, schedules, and what no
rank has a gradient for is left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hilt.algos.config import Optimizer
from hilt.core.errors import ConfigError, MissingFieldError
from hilt.distributed import optimizer as data_parallel
from hilt.distributed.optimizer import DataParallelOptimizer, learning_rate
from hilt.distributed.ranks import Alone


class Two(nn.Module):
    """The second layer begins to learn later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(-1, 1, 5) + shift) for shift in (0.0, 0.5))

    def loss(self, late: bool) -> torch.Tensor:
        return self.first.square().sum() + (self.second.pow(3).sum() if late else 0.0)


def trained(steps: int = 6, **settings: Any) -> tuple[Two, DataParallelOptimizer, list[dict[str, float]]]:
    module = Two()
    ours = DataParallelOptimizer(module, Optimizer(learning_rate=0.1, **settings))
    figures = []
    for step in range(steps):
        ours.backward(module.loss(step >= 2) / 2)  # in two passes
        ours.backward(module.loss(step >= 2) / 2)
        figures.append(ours.step((step + 1) / steps))
    return module, ours, figures


@pytest.mark.parametrize("settings", [{}, {"betas": [0.5, 0.9], "weight_decay": 0.3}, {"gradient_clip": 0.0}], ids=str)
def test_adamw_by_hand(settings: dict[str, Any]):
    """Where the second layer has no gradient it is not even decayed, and it counts its steps from its own first one."""
    module, _, figures = trained(**settings)
    made = Optimizer(learning_rate=0.1, **settings)
    (b1, b2), clip = made.betas, made.gradient_clip or math.inf
    first, second = (p.detach().double() for p in Two().parameters())
    kept = [[first, 0.0, 0.0, 0], [second, 0.0, 0.0, 0]]
    for step in range(6):
        gradients = [2 * kept[0][0]] + ([3 * kept[1][0] ** 2] if step >= 2 else [])
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        assert figures[step] == pytest.approx({"gradient_norm": norm, "learning_rate": 0.1}, rel=1e-5)
        for one, gradient in zip(kept, gradients, strict=False):
            g, n = gradient * min(1.0, clip / norm), one[3] + 1
            m, v = b1 * one[1] + (1 - b1) * g, b2 * one[2] + (1 - b2) * g**2
            moved = one[0] * (1 - 0.1 * made.weight_decay) - 0.1 * m / (1 - b1**n) / (
                torch.sqrt(v / (1 - b2**n)) + 1e-8
            )
            one[:] = [moved, m, v, n]
    assert all(torch.allclose(p.double(), one[0], atol=1e-5) for p, one in zip(module.parameters(), kept, strict=True))


def test_each_setting_moves_it_otherwise():
    usual = torch.cat(list(trained()[0].parameters()))
    for change in (
        {"betas": [0.5, 0.999]},
        {"weight_decay": 0.5},
        {"gradient_clip": 0.0},
        {"warmup_ratio": 0.5},
        {"schedule": "cosine"},
    ):
        assert not torch.allclose(torch.cat(list(trained(**change)[0].parameters())), usual, atol=1e-5), change


class Judged(nn.Module):
    """A policy with a value head, as far as an optimizer sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.value_head = nn.Linear(3, 3), nn.Linear(3, 1)

    def loss(self) -> torch.Tensor:
        return 100 * self.value_head(self.trunk(torch.ones(2, 3))).square().sum()


def moved(ours: DataParallelOptimizer, **named: Any) -> tuple[float, float, dict[str, float]]:
    """How far the trunk and the head went in the first step of AdamW, which is the learning rate; and the figures."""
    before = {name: p.detach().clone() for name, p in ours.trained.items()}
    ours.backward(ours.module.loss())  # type: ignore[operator]
    figures = ours.step(0.5, **named)
    far = {name: float((p.detach() - before[name]).abs().max()) for name, p in ours.trained.items()}
    return far["trunk.weight"], far["value_head.weight"], figures


def test_a_value_head_has_a_rate_a_clip_and_a_schedule_of_its_own():
    torch.manual_seed(0)
    usual, head = (
        Optimizer(learning_rate=0.001, weight_decay=0.0),
        Optimizer(learning_rate=0.1, gradient_clip=0.5, weight_decay=0.0),
    )
    trunk, value, figures = moved(DataParallelOptimizer(Judged(), usual, head=head))
    assert (trunk, value) == pytest.approx((0.001, 0.1), rel=1e-3)
    assert (
        figures["learning_rate"] == 0.001
        and figures["critic_learning_rate"] == 0.1
        and figures["critic_gradient_norm"] > 1
    )
    late = Optimizer(learning_rate=0.1, warmup_ratio=1.0, weight_decay=0.0)
    assert moved(DataParallelOptimizer(Judged(), usual, head=late))[:2] == pytest.approx((0.001, 0.05), rel=1e-3)
    assert moved(DataParallelOptimizer(Judged(), usual))[:2] == pytest.approx((0.001, 0.001), rel=1e-3), (
        "without: like the rest"
    )


@pytest.mark.parametrize("head", [None, Optimizer(learning_rate=0.1)])
def test_the_head_alone(head: Optimizer | None):
    ours = DataParallelOptimizer(Judged(), Optimizer(learning_rate=0.01), head=head)
    trunk, value, figures = moved(ours, head_only=True)
    assert trunk == 0 and value > 0 and len(figures) == 2
    assert moved(ours)[0] > 0
    again = DataParallelOptimizer(Judged(), Optimizer(learning_rate=0.01), head=head)
    again.load_state_dict(ours.state_dict())
    assert moved(ours)[2] == moved(again)[2] and all(
        torch.equal(ours.trained[name], again.trained[name]) for name in ours.trained
    )


def test_schedules():
    assert [learning_rate(Optimizer(learning_rate=0.5, warmup_ratio=0.5), p) for p in (0.1, 0.25, 0.5, 1.0)] == [
        0.1,
        0.25,
        0.5,
        0.5,
    ]
    fall = Optimizer(learning_rate=1.0, warmup_ratio=0.2, schedule="cosine", min_lr_ratio=0.1)
    assert [learning_rate(fall, p) for p in (0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.5, 1.0, 0.55, 0.1])


def test_goes_on_bit_for_bit():
    _, ours, _ = trained(4)
    module = Two()
    again = DataParallelOptimizer(module, Optimizer(learning_rate=0.1))
    again.load_state_dict(ours.state_dict())
    for each in (ours, again):
        each.backward(each.module.loss(True))  # type: ignore[operator]
        each.step(1.0)
    assert all(torch.equal(ours.trained[name], again.trained[name]) for name in ours.trained)
    state = ours.state_dict()
    del state["trained"]["second"]
    with pytest.raises(MissingFieldError, match="trained: second is in the checkpoint or in the module only"):
        again.load_state_dict(state)


class Doubled:
    """Another rank that has the same gradients, but for the parameters that this one has none for."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls = list[int]()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(tensor.numel())
        return tensor.fill_(1) if tensor.dtype == torch.int64 else tensor.mul_(2)


def test_gradients_of_ranks_add_up(monkeypatch: pytest.MonkeyPatch):
    """In few calls, the same ones whatever a rank has: zeros where it has no gradient."""
    monkeypatch.setattr(data_parallel, "BUCKET", 8)
    module, ranks = Two(), Doubled()
    ours = DataParallelOptimizer(module, Optimizer(learning_rate=0.1), ranks)  # type: ignore[arg-type]
    before = module.second.detach().clone()
    ours.backward(module.loss(False))
    assert ours.step(1.0)["gradient_norm"] == pytest.approx(4 * float(torch.linspace(-1, 1, 5).norm()))
    assert ranks.calls == [2, 5, 5]
    # it had zeros, so it is decayed as at the other rank
    assert torch.allclose(module.second, before * (1 - 0.1 * 0.01))


class Other(Alone):
    """A second rank whose gradient is what it is told to be."""

    size = 2

    def __init__(self, gradient: float):
        self.gradient = gradient

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.int64 else tensor.add_(self.gradient)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_at_any_rank_is_left_out_at_all(bad: float):
    """It ended the run for good, with an error."""
    kept = list[dict[str, torch.Tensor]]()
    for mine, theirs in ((bad, 0.0), (1.0, bad)):  # this rank's, and the other one's
        module = Two()
        ours = DataParallelOptimizer(module, Optimizer(learning_rate=0.1), Other(0.0))  # type: ignore[arg-type]
        ours.backward(module.loss(True))
        ours.step(1.0)
        before = {name: tensor.clone() for part in ours.state_dict().values() for name, tensor in part.items()}
        ours.ranks = Other(theirs)
        for times in (1, 2):
            ours.backward(mine * module.loss(True))
            assert not math.isfinite(ours.step(1.0)["gradient_norm"]) and ours.skipped_in_a_row == times
        after = {name: tensor for part in ours.state_dict().values() for name, tensor in part.items()}
        assert all(torch.equal(before[name], after[name]) for name in before), "weights and moments"
        ours.ranks = Other(0.0)
        ours.backward(module.loss(True))
        assert math.isfinite(ours.step(1.0)["gradient_norm"]) and ours.skipped_in_a_row == 0
        kept.append({name: p.detach().clone() for name, p in ours.trained.items()})
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_refused():
    module = Two()
    with pytest.raises(ConfigError, match="Two has no parameter that is trained"):
        DataParallelOptimizer(module.requires_grad_(False), Optimizer(learning_rate=0.1))
    with pytest.raises(
        ConfigError, match="learning_rate is none, which only a run's settings can choose: give a number"
    ):
        DataParallelOptimizer(module.requires_grad_(True), Optimizer())
    with pytest.raises(ConfigError, match="Two has no value_head that is trained, for which an optimizer was given"):
        DataParallelOptimizer(module, Optimizer(learning_rate=0.1), head=Optimizer(learning_rate=0.1))
