"""RECAP's indicator and guidance: against a reference in float64, and on a bandit whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hilt.algos.offline.recap import guided, indicators, thresholds
from hilt.core.errors import ConfigError


def reference(advantages: list[float], tasks: list[str], human: list[bool], q: float) -> list[bool]:
    """Step by step, in float64, as the docstring has it."""
    out = []
    for a, task, person in zip(advantages, tasks, human, strict=True):
        others = sorted(x for x, t, h in zip(advantages, tasks, human, strict=True) if t == task and not h)
        if person:
            out.append(True)
            continue
        place = q * (len(others) - 1)
        low, high = others[math.floor(place)], others[math.ceil(place)]
        out.append(a > low + (high - low) * (place - math.floor(place)))
    return out


@pytest.mark.parametrize("quantile", [0.1, 0.3, 0.6, 0.95])
def test_indicators_are_those_of_the_reference(quantile: float):
    rng = np.random.default_rng(0)
    tasks = [str(t) for t in rng.choice(["easy", "hard", "shown"], 300)]
    human = (rng.random(300) < 0.2) | np.array([task == "shown" for task in tasks])
    advantages = rng.normal(size=300) + np.array([3.0 * (task == "easy") for task in tasks])
    limits = thresholds(torch.from_numpy(advantages), tasks, torch.from_numpy(human), quantile)
    assert limits.keys() == {"easy", "hard"} and limits["easy"] > limits["hard"] + 2
    found = indicators(torch.from_numpy(advantages), tasks, torch.from_numpy(human), limits)
    assert found.tolist() == reference(advantages.tolist(), tasks, human.tolist(), quantile)
    for task in ("easy", "hard"):  # as many of each, however hard it is
        mine = [bool(i) for i, t, h in zip(found, tasks, human, strict=True) if t == task and not h]
        assert np.mean(mine) == pytest.approx(1 - quantile, abs=0.02)


def test_what_is_outside_is_refused():
    one = torch.zeros(1)
    for wrong in (0.0, 1.0, -0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            thresholds(one, ["a"], one.bool(), wrong)
    with pytest.raises(ConfigError, match="must match"):
        thresholds(one, ["a", "b"], one.bool(), 0.5)


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0, 3.5])
def test_guided_logits_are_the_answer_of_a_bandit(weight: float):
    """Arms that were drawn with probability m and are good with p: conditioned on good, Bayes' rule gives m p / Z, and
    guidance m p^w / Z."""
    draws = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    good = torch.tensor([0.1, 0.4, 0.9, 0.2], dtype=torch.float64)
    conditioned = draws * good / (draws * good).sum()
    found = torch.softmax(guided(draws.log() + 7, conditioned.log() - 2, weight), -1)  # logits have no zero
    want = draws * good**weight
    torch.testing.assert_close(found, want / want.sum(), atol=1e-12, rtol=0)
    success = float((found * good).sum())
    assert success >= float((draws * good).sum()) - 1e-12


def test_a_bandit_learned_from_its_log_is_the_same():
    """A table of logits, without and with the condition, fitted to what was drawn, with the condition left out of some:
    conditioned it is Bayes' answer, and guided it is better."""
    rng = torch.Generator().manual_seed(0)
    draws, good = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.4, 0.9, 0.2])
    arms = torch.multinomial(draws, 20_000, replacement=True, generator=rng)
    reward = (torch.rand(len(arms), generator=rng) < good[arms]).float()
    advantage = reward - reward.mean()
    nobody = torch.zeros(len(arms), dtype=torch.bool)
    limits = thresholds(advantage, ["pull"] * len(arms), nobody, 0.5)
    positive = indicators(advantage, ["pull"] * len(arms), nobody, limits)
    assert torch.equal(positive, reward > 0)
    dropped = torch.rand(len(arms), generator=rng) < 0.3
    row = torch.where(dropped, 2, positive.long())  # negative, positive, no condition
    counts = torch.zeros(3, 4).index_put_((row, arms), torch.ones(len(arms)), accumulate=True)
    table = (counts / counts.sum(-1, keepdim=True)).log()  # the maximum of the likelihood
    want = draws * good / (draws * good).sum()
    torch.testing.assert_close(table[1].exp(), want, atol=0.02, rtol=0)
    worth = [float(torch.softmax(guided(table[2], table[1], w), -1) @ good) for w in (0.0, 1.0, 3.0)]
    assert worth[0] < worth[1] - 0.2 and worth[1] < worth[2] - 0.1
    assert worth[0] == pytest.approx(float(draws @ good), abs=0.02)


def test_guided_means_are_those_of_the_product_of_gaussians():
    """p_u^(1 - w) p_c^w of two normal laws with the same deviation, on a grid."""
    grid = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    for weight in (0.5, 1.0, 2.5):
        log = (1 - weight) * -0.5 * ((grid - 0.3) / 0.7) ** 2 + weight * -0.5 * ((grid - 1.1) / 0.7) ** 2
        mean = float((torch.softmax(log, -1) * grid).sum())
        found = guided(torch.tensor(0.3, dtype=torch.float64), torch.tensor(1.1, dtype=torch.float64), weight)
        assert mean == pytest.approx(float(found), abs=1e-9)
