"""Categorical critics against formulas in numpy, float64, and on a chain whose values are known."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hilt.algos import rlpd
from hilt.algos.adam import Adam
from hilt.algos.config import CriticConfig, Rlpd, value_range
from hilt.algos.value_heads import (
    C51Head,
    CategoricalHead,
    CriticHead,
    HlGaussHead,
    ScalarHead,
    critic_head,
    disagreement,
)
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.validate import check
from hilt.policies.agent.actor_critic import ActorNetwork, Body, Critics, Temperature
from hilt.replay.tensors import generator
from tests.algos.test_rlpd import BASE, batch, networks, numbers

torch.set_num_threads(1)
HEADS: dict[str, CriticHead] = {
    "scalar": ScalarHead(),
    "c51": C51Head(-1.0, 2.0, 7),
    "hl_gauss": HlGaussHead(-1.0, 2.0, 13, 0.75),
}
CATEGORICAL = ["c51", "hl_gauss"]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def projected(p: np.ndarray, moved: np.ndarray, low: float, high: float) -> np.ndarray:
    """C51's projection as the paper has it, one value after the other."""
    k = len(p)
    width, target = (high - low) / (k - 1), np.zeros(k)
    for share, value in zip(p, moved, strict=True):
        place = (min(max(value, low), high) - low) / width
        below, above = math.floor(place), math.ceil(place)
        if below == above:
            target[below] += share
        else:
            target[below] += share * (above - place)
            target[above] += share * (place - below)
    return target


def histogram(y: float, low: float, high: float, bins: int, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """The bins of a Gaussian around y, and their middles; by the error function of the standard library."""
    margin = math.ceil(3 * sigma)
    width = (high - low) / (bins - 2 * margin)
    edges = [low + (i - margin) * width for i in range(bins + 1)]
    cdf = [0.5 * (1 + math.erf((e - min(max(y, low), high)) / (math.sqrt(2) * sigma * width))) for e in edges]
    whole = cdf[-1] - cdf[0]
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(edges)])
    return np.array([(b - a) / whole for a, b in itertools.pairwise(cdf)]), middles


def outputs(head: CriticHead, rows: int = 6, members: int = 3) -> torch.Tensor:
    return torch.randn(members, rows, len(head.bias), generator=generator(4), dtype=torch.float64)


def test_c51_equals_the_projection_of_the_paper() -> None:
    head = HEADS["c51"]
    next_out, r = outputs(head), np.random.default_rng(1)
    rewards, masks = r.normal(size=6), np.array([1, 1, 0, 1, 0, 1.0])
    found = head.target(
        next_out, lambda value: torch.tensor(rewards) + torch.where(torch.tensor(masks) > 0, 0.8 * value, 0.0)
    )
    p, values = softmax(next_out.numpy()), np.linspace(-1, 2, 7)
    for row in range(6):
        least = (p[:, row] @ values).argmin()
        expected = projected(p[least, row], rewards[row] + 0.8 * masks[row] * values, -1, 2)
        np.testing.assert_allclose(found[row].numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(1).numpy(), 1, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 0.75, 1.5])
def test_hl_gauss_equals_the_gaussian_in_bins_and_keeps_its_mean(sigma: float) -> None:
    head = HlGaussHead(-1.0, 2.0, 31, sigma)
    y = torch.linspace(-1.5, 2.5, 17, dtype=torch.float64)  # some beyond the range
    found = head.histogram(y)
    for row, value in enumerate(y.tolist()):
        expected, middles = histogram(value, -1.0, 2.0, 31, sigma)
        np.testing.assert_allclose(found[row].numpy(), expected, atol=1e-12)
        np.testing.assert_allclose(head.centers.numpy(), middles, atol=1e-12)
    # also at the ends of the range, where a Gaussian that is cut off would be a bin off
    np.testing.assert_allclose(head.mean(found).numpy(), y.clamp(-1, 2).numpy(), atol=0.02 * head.width)


@pytest.mark.parametrize("name", HEADS)
def test_values_losses_and_gradients_equal_autograd(name: str) -> None:
    head = HEADS[name]
    out = outputs(head).requires_grad_()
    target = head.target(outputs(head).flip(1), lambda value: 0.3 + 0.9 * value)
    if name == "scalar":
        q, losses = out[..., 0], (out[..., 0] - target).square()
    else:
        q = (torch.softmax(out, -1) * torch.tensor(head.centers.tolist(), dtype=torch.float64)).sum(-1)
        losses = -(target * torch.softmax(out, -1).log()).sum(-1)
    found, dout = head.loss(out.detach(), target)
    torch.testing.assert_close(head.values(out.detach()), q.detach())
    torch.testing.assert_close(found, losses.detach())
    torch.testing.assert_close(dout, torch.autograd.grad(losses.sum(), out, retain_graph=True)[0])
    dq = torch.randn(q.shape, generator=generator(7), dtype=torch.float64)
    torch.testing.assert_close(head.values_backward(out.detach(), dq), torch.autograd.grad(q, out, dq)[0])


@pytest.mark.parametrize("name", CATEGORICAL)
def test_updates_with_a_categorical_head_equal_the_formula(name: str) -> None:
    """One update of critics and actor, beside autograd of the plain formula with numpy's targets."""
    head, settings = HEADS[name], replace(BASE, backup_entropy=True, reward_bias=-0.2, actor_q="min")
    nets = networks(settings, bias=head.bias)
    nets.head = head
    rows = replace(batch(0), n_steps=torch.tensor([1, 2, 3, 3, 2, 1]), demo=None)
    draws = generator(0)
    next_noise, noise = (torch.randn(6, 2, generator=draws, dtype=torch.float64) for _ in range(2))
    mean, std = (part.detach() for part in nets.actor(rows.next_z))
    u = mean + std * next_noise
    log_prob = torch.distributions.Normal(mean, std).log_prob(u) - (1 - torch.tanh(u) ** 2).log()
    n, r = rows.n_steps.numpy(), rows.rewards.numpy()
    earned = r - 0.2 * np.array([sum(0.9**i for i in range(k)) for k in n])
    factor, paid = rows.masks.numpy() * 0.9**n, 0.3 * log_prob.sum(1).numpy()
    p = softmax(nets.target_critic(rows.target_z, torch.tanh(u)).detach().numpy())
    centers = head.centers.numpy()
    least = (p @ centers).argmin(0)
    targets = []
    for row in range(6):
        if name == "c51":
            moved = earned[row] + factor[row] * (centers - paid[row])
            targets.append(projected(p[least[row], row], moved, -1, 2))
        else:
            y = earned[row] + factor[row] * ((p[least[row], row] @ centers) - paid[row])
            targets.append(histogram(y, -1.0, 2.0, 13, 0.75)[0])
    twin = copy.deepcopy(nets)
    log_p = torch.log_softmax(twin.critic(rows.z, rows.actions), -1)
    loss = -(torch.tensor(np.array(targets)) * log_p).sum(-1).mean()
    gradients = torch.autograd.grad(loss, list(twin.critic.parameters()))
    mean, std = twin.actor(rows.z)
    u = mean + std * noise
    entropy = torch.distributions.Normal(mean, std).log_prob(u) - (1 - torch.tanh(u) ** 2).log()
    q = torch.softmax(twin.critic(rows.z, torch.tanh(u)), -1) @ head.centers
    actor_loss = (0.3 * entropy.sum(1) - q.amin(0)).mean()
    actor_gradients = torch.autograd.grad(actor_loss, list(twin.actor.parameters()))
    info = rlpd.update(nets, rows, settings, generator(0), frozenset({"critic", "actor"}), 0, -1.0)
    assert info["critic_loss"] == pytest.approx(loss.item()) and info["actor_loss"] == pytest.approx(actor_loss.item())
    for part, found in (("critic", gradients), ("actor", actor_gradients)):
        parameters = list(getattr(twin, part).parameters())
        Adam(parameters, settings.learning_rate).step(found)
        for ours, theirs in zip(getattr(nets, part).parameters(), parameters, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


def chain_values(name: str, length: int = 5, updates: int = 400) -> torch.Tensor:
    """Q of each state of a chain, learned: one step leads to the next state, the last one to a reward of 1 and the end.
    What is behind the end is not a number."""
    settings = Rlpd(discount=0.8, tau=0.1, learning_rate=1e-2)
    head = critic_head(CriticConfig(head=name, bins=41, value_range=None if name == "scalar" else [0.0, 1.0]), settings)
    body, draws = Body(length, 0, 0, [32], "relu"), generator(0)
    parts = {"actor": ActorNetwork(body, 1, draws), "critic": Critics(body, 1, draws, 2, head.bias)}
    parts["temperature"] = Temperature(0.1)
    optimizers = {part: Adam(net.parameters(), settings.learning_rate) for part, net in parts.items()}
    nets = rlpd.Networks(**parts, target_critic=copy.deepcopy(parts["critic"]), optimizers=optimizers, head=head)
    states = torch.eye(length).repeat(4, 1)
    after = torch.cat([torch.eye(length)[1:], torch.full((1, length), float("nan"))]).repeat(4, 1)
    ended = (torch.arange(length) == length - 1).float().repeat(4)
    for _ in range(updates):
        actions = torch.rand(len(states), 1, generator=draws) * 2 - 1
        rows = rlpd.Transitions(states, after, after, actions, rewards=ended, masks=1 - ended)
        rlpd.update(nets, rows, settings, draws, frozenset({"critic"}), 0, -1.0)
    return head.values(nets.critic.run(torch.eye(length), torch.zeros(length, 1), learns=False).out).mean(0)


@pytest.mark.parametrize("name", HEADS)
def test_values_of_a_chain_are_learned(name: str) -> None:
    known = torch.tensor([0.8**4, 0.8**3, 0.8**2, 0.8, 1.0])
    torch.testing.assert_close(chain_values(name), known, atol=0.05, rtol=0)


@pytest.mark.parametrize("name", CATEGORICAL)
def test_a_categorical_critic_begins_at_zero_and_reports_clipped_targets(name: str) -> None:
    head = HEADS[name]
    assert isinstance(head, CategoricalHead)
    assert abs(head.values(torch.tensor(head.bias)[None, None]).item()) < 0.1 * 3.0
    out = outputs(head)
    assert head.figures(out, lambda value: value)["target_clipped"].mean() == 0
    assert head.figures(out, lambda value: value + 9)["target_clipped"].mean() == 1


def test_the_range_follows_from_rewards_and_discount() -> None:
    rlpd_of = Rlpd(discount=0.9)
    for rewards, expected in (((0, 1), (0, 10)), ((-1, 1), (-10, 10)), ((-2, -1), (-20, -1)), ((1, 2), (1, 20))):
        critic = CriticConfig(head="c51", reward_range=[float(bound) for bound in rewards])
        assert value_range(critic, rlpd_of) == pytest.approx(expected)
    critic = CriticConfig(head="c51", reward_range=[0.0, 1.0])
    assert value_range(critic, replace(rlpd_of, reward_bias=-1.0)) == pytest.approx((-10, 0))
    assert value_range(critic, replace(rlpd_of, target_range=[0.0, 1.0])) == (0, 1)
    assert value_range(replace(critic, value_range=[-3.0, 3.0]), replace(rlpd_of, backup_entropy=True)) == (-3, 3)
    for bad, settings, message in (
        (CriticConfig(head="c51"), rlpd_of, r"agent.critic.head=c51: .* not known. Give agent.critic.reward_range"),
        (critic, replace(rlpd_of, discount=1.0), "discount=1 rewards from 0 to 1 add up to anything"),
        (critic, replace(rlpd_of, backup_entropy=True), "backup_entropy=true adds entropy, which has no bound"),
    ):
        with pytest.raises(ConfigError, match=message):
            value_range(bad, settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CriticConfig(head="hl_gauss", bins=6), "critic.bins=6: critic.sigma=0.75 needs more than 6 bins"),
        (CriticConfig(head="c51", value_range=[1.0, 0.0]), "in ascending order"),
        (CriticConfig(reset_period=100, reset_hold=100), "reset_hold=100 is not less than critic.reset_period=100"),
        (CriticConfig(bins=51), "critic.bins=51 would do nothing: it needs critic.head=hl_gauss or c51"),
    ],
)
def test_critic_settings_that_cannot_work_are_refused(config: CriticConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config, "critic")


def test_an_unknown_critic_head_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no critic head named 'c52'; did you mean 'c51'"):
        check(CriticConfig(head="c52"))


def test_what_is_behind_the_end_does_not_matter_for_a_distribution() -> None:
    for name in CATEGORICAL:
        nets, rows = networks(BASE, bias=HEADS[name].bias), batch(0)
        nets.head = HEADS[name]
        rows.target_z[rows.masks == 0] = float("nan")
        rlpd.update(nets, rows, BASE, generator(0), frozenset({"critic"}), 0, -1.0)
        assert all(np.isfinite(value).all() for value in numbers(nets.critic).values())


@pytest.mark.parametrize("critics", [2, 5])
def test_disagreement_equals_the_formula(critics: int) -> None:
    q = torch.randn(critics, 7, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    critic = SimpleNamespace(run=lambda z, actions, learns: SimpleNamespace(out=q))
    found = disagreement(critic, ScalarHead(), torch.zeros(7, 1), torch.zeros(7, 1))
    rows = [[float(q[i, row]) for i in range(critics)] for row in range(7)]
    means = [sum(row) / critics for row in rows]
    spread = [sum((each - m) ** 2 for each in row) / (critics - 1) for row, m in zip(rows, means, strict=True)]
    assert found == pytest.approx(sum(each**0.5 for each in spread) / 7, rel=1e-9)
