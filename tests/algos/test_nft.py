"""Negative-aware fine-tuning of flows: beside a slow reference in float64, where its minimum is known, on a bandit that
ratios solve too, and in a run that never computes a log-probability."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hilt.algos.config import Batching, Nft, Optimizer, PolicyGradient
from hilt.algos.tables import FlowLoss, policy_loss
from hilt.core.errors import ConfigError, MissingFieldError
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.policies.base import Evaluation, Policy, Record, select
from hilt.policies.vla import flow
from hilt.policies.vla.small_vla import SmallVLA
from hilt.vla.episode import RolloutEpisode, Start
from hilt.vla.update import Updater
from tests.vla.test_train import logged, resumed, started, told
from tests.vla.toy_vla import config, weights


def nft(**settings: Any) -> PolicyGradient:
    return PolicyGradient(loss="nft", nft=Nft(**settings))


def loss_of(settings: PolicyGradient) -> FlowLoss:
    found = policy_loss(settings.loss)
    assert isinstance(found, FlowLoss)
    return found


# --- the formula ---


def slowly(
    settings: PolicyGradient, error: Any, held: Any, old: Any, times: Any, advantage: Any, mask: Any, place: Any
) -> float:
    """The loss of one number by the formula, in plain numbers. `held`: the errors of what has no gradient."""
    r, c, d = place
    most, beta, total = settings.nft.max_advantage, settings.nft.beta, 0.0
    optimal = 0.5 + 0.5 * max(-1.0, min(1.0, advantage[r] / most))
    for k in range(len(times[r])):
        for share, mine, theirs in ((optimal, beta, 1 - beta), (1 - optimal, -beta, 1 + beta)):
            there = [place for place in itertools.product(range(2), range(2)) if mask[r][place[0]][place[1]]]
            sizes = [abs(mine * held[r][k][i][j] + theirs * old[r][k][i][j]) for i, j in there]
            square = (mine * error[r][k][c][d] + theirs * old[r][k][c][d]) ** 2
            if settings.nft.weighting == "adaptive":  # of the predicted action: its error is t times that of velocity
                t = times[r][k]
                square = t * t * square / (t * sum(sizes) / len(sizes))
            total += share * square * most / beta / len(times[r])
    return total


@pytest.mark.parametrize("weighting", ["adaptive", "uniform"])
def test_loss_and_gradient_equal_a_slow_reference(weighting: str):
    draws = np.random.default_rng(0)
    error, old = (draws.normal(size=(3, 2, 2, 2)) for _ in range(2))
    times, advantage = draws.uniform(0.1, 1, (3, 2)), np.array([0.7, -3.0, 0.2])  # the second is clipped
    mask = np.ones((3, 2, 2), bool)
    mask[2, 1] = False
    settings = nft(beta=0.6, max_advantage=1.5, weighting=weighting)
    now = torch.from_numpy(error).requires_grad_()
    given = [torch.from_numpy(each) for each in (old, times, advantage, mask)]
    each, shown = loss_of(settings).flow_terms(now, *given, settings)
    places = [tuple(place) for place in np.argwhere(mask)]
    told = (old.tolist(), times.tolist(), advantage.tolist(), mask.tolist())
    wanted = [slowly(settings, error.tolist(), error.tolist(), *told, place) for place in places]
    assert [float(each.detach()[place]) for place in places] == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(each[torch.from_numpy(mask)].sum(), now)
    for r, k, c, d in itertools.product(range(3), range(2), range(2), range(2)):
        sides = []
        for step in (1e-6, -1e-6):
            moved = error.copy()
            moved[r, k, c, d] += step
            sides.append(slowly(settings, moved.tolist(), error.tolist(), *told, (r, c, d)) if mask[r, c, d] else 0.0)
        assert float(gradient[r, k, c, d]) == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-6)
    assert list(shown) == loss_of(settings).figures(settings)
    assert shown["optimality"][:, 0, 0].tolist() == pytest.approx([0.5 + 0.35 / 1.5, 0.0, 0.5 + 0.1 / 1.5])


def test_its_minimum_is_the_velocity_of_the_improved_policy():
    """Actions of N(0, 1) with their own value as advantage. Given x and t they are N(m, s^2), and the velocity that is
    best everywhere is less than the old one by s^2 / (t c beta)."""
    t, x, settings = 0.4, 0.9, nft(beta=0.5, max_advantage=40.0, weighting="uniform")
    scale = t**2 + (1 - t) ** 2
    mean, deviation = (1 - t) * x / scale, t / scale**0.5
    points, shares = np.polynomial.hermite_e.hermegauss(20)
    actions, share = mean + deviation * points, torch.from_numpy(shares / shares.sum())
    old = (x - mean) / t  # the mean of the velocities that lead from x to the actions
    best = old - deviation**2 / (t * 40.0 * 0.5)
    velocity = torch.tensor(best, dtype=torch.float64, requires_grad=True)
    target, rows = torch.from_numpy((x - actions) / t), (len(actions), 1, 1, 1)
    given = [(old - target).view(rows), torch.full((rows[0], 1), t), torch.from_numpy(actions)]
    each, _ = loss_of(settings).flow_terms(
        (velocity - target).view(rows), *given, torch.ones(rows[0], 1, 1, dtype=torch.bool), settings
    )
    (gradient,) = torch.autograd.grad((share * each[:, 0, 0]).sum(), velocity)
    assert abs(float(gradient)) < 1e-10 < deviation**2


# --- a bandit ---


class Line(Policy):
    """A flow of one number, at first of N(0, 1): its exact velocity, and a layer that has learned nothing."""

    chunk, action_dim, keeps_answers = 1, 1, True
    how = flow.Flow("sde", steps=5)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = torch.nn.Linear(17, 32), torch.nn.Linear(32, 1)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)
        self.evaluated = 0

    def field(self, x: torch.Tensor, times: torch.Tensor) -> flow.FlowStep:
        t, flat = times[:, None], x.flatten(1)
        known = (2 * t - 1) / (t**2 + (1 - t) ** 2) * flat
        seen = torch.cat([flat, flow.embed_times(times, 16)], 1)
        return flow.FlowStep((known + self.out(torch.tanh(self.hidden(seen)))).view_as(x))

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        with torch.no_grad():
            drawn = flow.draw(self.field, (len(observations), 1, 1), self.how, torch.ones(len(observations)), generator)
        record = {"chain": drawn.chain, "step": drawn.step, "log_prob": drawn.log_prob, "answer": drawn.actions}
        return drawn.actions.numpy(), {name: each.numpy() for name, each in record.items()}

    def evaluate(self, record: Record) -> Evaluation:
        self.evaluated += 1
        chain, step = torch.from_numpy(record["chain"]), torch.from_numpy(record["step"])
        found = flow.evaluate(self.field, chain, step, self.how, torch.ones(len(chain)))
        return Evaluation(found.log_prob, found.entropy, None)

    def flow_error(self, record: Record, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return flow.velocity_errors(self.field, torch.from_numpy(record["answer"]), noise, times, None)

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        raise NotImplementedError


def episodes_of(record: Record, update: int) -> list[RolloutEpisode]:
    one, nothing = np.ones(1, np.int32), np.zeros(1, np.float32)
    return [
        RolloutEpisode(
            Start("line", "train", 0, 0, update, i), select(record, [i]), one, nothing, True, 1, False, 0, b""
        )
        for i in range(len(record["log_prob"]))
    ]


def learned(settings: PolicyGradient, updates: int = 40, rows: int = 32) -> tuple[Line, np.ndarray]:
    """The policy, and actions of it, after learning that an action is worth the less the further it is from 1."""
    policy, generator = Line(), torch.Generator().manual_seed(1)
    updater = Updater(settings, DataParallelOptimizer(policy, Optimizer(learning_rate=1e-2, weight_decay=0.0)))
    for update in range(updates):
        actions, record = policy.act([{}] * rows, generator=generator)
        earned = [np.float64([-((action[0, 0] - 1) ** 2)]) for action in actions]
        updater.update(episodes_of(record, update), earned)
    return policy, policy.act([{}] * 256, generator=generator)[0][:, 0, 0]


@pytest.mark.parametrize("loss", ["nft", "clipped"])
def test_a_bandit_moves_to_the_best_action_as_with_ratios(loss: str):
    """Four steps for each update, the later ones with velocities, or ratios, of the policy before the first."""
    batch = Batching(trajectories_per_step=16)
    policy, actions = learned(PolicyGradient(loss=loss, epochs=2, batch=batch))
    assert abs(actions.mean() - 1) < 0.35 and np.mean((actions - 1) ** 2) < 0.7, "at first 0, and 2"
    assert bool(policy.evaluated) == (loss == "clipped")


def test_without_the_answers_of_the_flow_it_says_so():
    _, record = Line().act([{}] * 2, generator=torch.Generator().manual_seed(0))
    del record["answer"]
    updater = Updater(nft(), DataParallelOptimizer(Line(), Optimizer(learning_rate=1e-2)))
    with pytest.raises(MissingFieldError, match="keeps_answers=True before it acts"):
        updater.update(episodes_of(record, 0), [np.zeros(1), np.ones(1)])


# --- in a run ---


def flowing(*changes: str, head: str = "flow") -> Any:
    made = config("algorithm.loss=nft", *changes)
    made.policy_options = {"width": 16, "depth": 1, "heads": 2, "keypoints": 2, "chunk": 2, "head": head}
    return made


def test_a_run_goes_on_bit_for_bit_without_a_log_probability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*given: Any) -> Any:
        raise AssertionError("log-probabilities were computed")

    monkeypatch.setattr(SmallVLA, "evaluate", never)
    monkeypatch.setattr("tests.vla.test_train.config", flowing)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    quiet = ("validation.before=false", "validation.period=0", "validation.after=false", "checkpoint_period=1")
    assert started(whole, "max_steps=2", *quiet).reason == "max_steps"
    started(parts, "max_steps=1", *quiet)
    assert resumed(parts, "max_steps=2").reason == "max_steps"
    found = weights(whole)
    assert all((each == found[name]).all() for name, each in weights(parts).items())
    assert told(whole) == told(parts) and logged(whole) == logged(parts)
    update = [each for each in told(whole) if "flow_error" in each][-1]
    assert update["flow_error"] > 0 and update["velocity_change"] > 0 and "ppo_kl" not in update
    with pytest.raises(ConfigError, match="were recorded with the answers of a flow"):
        resumed(parts, "max_steps=3", "algorithm.loss=clipped")


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_heads_without_a_flow_are_refused(head: str):
    with pytest.raises(ConfigError, match=r"loss=nft learns the velocity of a flow.* policy_options\.head=flow"):
        flowing(head=head).check()
    flowing().check()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("algorithm.ratio=chunk", r"algorithm\.ratio=chunk with algorithm\.loss=nft: this loss has no log-prob"),
        ("algorithm.recompute_log_prob=true", r"Leave recompute_log_prob out, or give algorithm\.loss=clipped"),
        ("algorithm.kl.where=reward", r"algorithm\.kl\.where=reward with algorithm\.loss=nft"),
        ("algorithm.entropy=0.1", r"algorithm\.entropy=0\.1 with algorithm\.loss=nft"),
        ("algorithm.estimator=gae", r"estimator=gae with algorithm\.loss=nft: a critic learns in the passes"),
        ("algorithm.clip_low=0.1", r"clip_low=0\.1 would do nothing"),
        ("prime.coefficient=0.5", "prime.coefficient with algorithm.loss=nft"),
        ("collect.drawn_share=0.5", r"drawn_share=0\.5 with algorithm\.loss=nft, which learns from every answer"),
    ],
)
def test_settings_of_log_probabilities_are_refused(change: str, says: str):
    with pytest.raises(ConfigError, match=says):
        flowing(change).check()
    with pytest.raises(ConfigError, match=r"nft\.beta=0\.5 would do nothing: it needs algorithm\.loss=nft"):
        PolicyGradient(nft=Nft(beta=0.5)).check()
