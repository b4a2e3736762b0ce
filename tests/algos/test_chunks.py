"""Chunks of actions in an update of RLPD, beside the formula in numpy and autograd."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from hilt.algos import chunks, rlpd
from hilt.algos.adam import Adam
from hilt.algos.config import Rlpd
from hilt.algos.value_heads import C51Head, ScalarHead
from hilt.core.errors import ConfigError
from hilt.core.validate import check
from hilt.policies.agent.actor_critic import Body, Critics
from hilt.policies.agent.residual_critics import ResidualCritics
from hilt.replay.tensors import generator
from tests.algos.test_rlpd import BASE, FEATURES, B, batch, networks

STEPS = torch.tensor([2, 1, 1, 2, 2, 1])
"""Of chunks of two actions, of one number each; the rows with the masks 0 are the second and the fifth"""


def test_which_actions_were_executed_and_which_rows_count() -> None:
    masks = torch.tensor([1.0, 0, 1, 1, 0, 1])
    taken = chunks.executed(STEPS, 2)
    assert taken.tolist() == [[True, True], [True, False], [True, False], [True, True], [True, True], [True, False]]
    # of one action only: the second row ended there, the third and the last were cut short
    assert chunks.valid(STEPS, masks, 2).tolist() == [1, 1, 0, 1, 1, 0]
    source = torch.tensor([[0, 0], [1, 1], [1, 0], [1, 0], [0, 1], [0, 0]])
    shown = chunks.uninterrupted(taken, source)
    assert shown.tolist() == [[True, True], [True, False], [True, False], [True, False], [True, False], [True, False]]
    thrice = chunks.uninterrupted(torch.ones(1, 3, dtype=torch.bool), torch.tensor([[1, 0, 1]]))
    assert thrice.tolist() == [[True, False, False]], "what follows the policy's part is not the same take-over"


def test_what_was_not_executed_is_drawn_uniformly() -> None:
    actions = torch.full((4000, 6), 0.5)
    taken = chunks.executed(torch.full((4000,), 2), 3)
    filled = chunks.filled(actions, taken, generator(0))
    assert (filled[:, :4] == 0.5).all()
    drawn = filled[:, 4:]
    assert drawn.abs().max() <= 1 and abs(drawn.mean()) < 0.05 and abs(drawn.var() - 1 / 3) < 0.02


@pytest.mark.parametrize("kind", ["nll", "mse"])
def test_imitation_of_chunks_averages_over_the_counted_actions(kind: str) -> None:
    r = np.random.default_rng(0)
    mean, actions = r.normal(size=(3, 6)), r.uniform(-0.9, 0.9, (3, 6))
    std = r.uniform(0.5, 1, (3, 6))
    counted = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    u = np.arctanh(actions)
    nll = 0.5 * ((u - mean) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi) + np.log(1 - actions**2)
    each = nll.reshape(3, 3, 2).sum(2) if kind == "nll" else ((np.tanh(mean) - actions) ** 2).reshape(3, 3, 2).mean(2)
    expected = [each[row][counted[row]].mean() for row in range(3)]
    given = [torch.tensor(part) for part in (mean, std, actions, counted)]
    found = chunks.chunk_imitation_loss(kind, *given)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("actor_q", ["mean", "min"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_best_of_several_is_that_of_the_critics(actor_q: str, residual: bool) -> None:
    head = C51Head(-1.0, 1.0, 5) if residual else ScalarHead()
    body = Body(FEATURES, 0, 0, [4], "tanh")
    critic = (
        ResidualCritics(body, 2, generator(1), 3, "bro", 6, 1, head.bias)
        if residual
        else Critics(body, 2, generator(1), 3, head.bias)
    )
    z, actions = torch.randn(B, FEATURES, generator=generator(2)), torch.randn(7, B, 2, generator=generator(3))
    found = chunks.best_of(critic, head, z, actions, actor_q)
    for row in range(B):
        q = torch.stack([head.values(critic.run(z[row : row + 1], actions[j, row : row + 1]).out) for j in range(7)])
        q = q.squeeze(-1).mean(1) if actor_q == "mean" else q.squeeze(-1).amin(1)
        assert torch.equal(found[row], actions[q.argmax(), row])


def chunked(demo: bool = True) -> rlpd.Transitions:
    """Rows of two actions with one number each."""
    rows = replace(batch(0), n_steps=STEPS)
    taken = chunks.executed(STEPS, 2)
    valid = chunks.valid(STEPS, rows.masks, 2)
    return replace(rows, valid=valid, taken=taken, shown=taken, demo=rows.demo if demo else None)


def test_an_update_of_chunks_equals_the_formula() -> None:
    """Rows that were cut short count for nothing, the backup is over the executed steps, and the best of four next
    chunks is judged by the target networks."""
    settings = replace(BASE, samples=4, imitation_weight=0.7)
    nets, rows, draws = networks(settings), chunked(), generator(0)
    next_noise = torch.randn(B, 2, generator=draws, dtype=torch.float64)
    noise = torch.randn(B, 2, generator=draws, dtype=torch.float64)
    choices = torch.randn(4, B, 2, generator=draws, dtype=torch.float64)
    twin = copy.deepcopy(nets)
    mean, std = (part.detach() for part in twin.actor(rows.next_z))
    candidates = torch.tanh(mean + std * choices)
    judged = torch.stack([twin.critic(rows.next_z, each).mean(0) for each in candidates])
    best = torch.stack([candidates[judged[:, row].argmax(), row] for row in range(B)])
    next_q = twin.target_critic(rows.target_z, best).amin(0).detach()
    y = rows.rewards + rows.masks * 0.9**STEPS * next_q
    kept = torch.tensor([0, 1, 3, 4])  # the others were cut short
    loss = (twin.critic(rows.z, rows.actions) - y)[:, kept].square().mean()
    gradients = torch.autograd.grad(loss, list(twin.critic.parameters()))
    mean, std = twin.actor(rows.z)
    u = mean + std * noise
    entropy = torch.distributions.Normal(mean, std).log_prob(u) - (1 - torch.tanh(u) ** 2).log()
    raw = torch.atanh(rows.actions)
    nll = -torch.distributions.Normal(mean, std).log_prob(raw) + (1 - rows.actions**2).log()
    cloned = torch.stack([nll[row, : int(STEPS[row])].mean() for row in (2, 4, 5)]).mean()
    soft = (0.3 * entropy.sum(1) - twin.critic(rows.z, torch.tanh(u)).mean(0)).mean()
    actor_gradients = torch.autograd.grad(soft + 0.7 * cloned, list(twin.actor.parameters()))
    info = rlpd.update(nets, rows, settings, generator(0), frozenset({"critic", "actor", "temperature"}), 0, -1.0)
    assert info["critic_loss"] == pytest.approx(loss.item())
    assert info["imitation_loss"] == pytest.approx(cloned.item())
    mean, std = (part.detach() for part in twin.actor(rows.next_z))
    u = mean + std * next_noise
    log_prob = (torch.distributions.Normal(mean, std).log_prob(u) - (1 - torch.tanh(u) ** 2).log()).sum(1)
    assert info["temperature_loss"] == pytest.approx(0.3 * (1 - log_prob.mean().item())), "of actions as they are drawn"
    for part, found in (("critic", gradients), ("actor", actor_gradients)):
        parameters = list(getattr(twin, part).parameters())
        Adam(parameters, settings.learning_rate).step(found)
        for ours, theirs in zip(getattr(nets, part).parameters(), parameters, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


def test_a_behavior_policy_imitates_everything_and_nothing_else_moves_it() -> None:
    settings = replace(BASE, samples=4, actor="behavior", imitation_loss="mse")
    nets, rows = networks(settings), chunked(demo=False)
    twin = copy.deepcopy(nets)
    errors = (torch.tanh(twin.actor(rows.z)[0]) - rows.actions).square()
    loss = torch.stack([errors[row, : int(STEPS[row])].mean() for row in range(B)]).mean()
    found = torch.autograd.grad(loss, list(twin.actor.parameters()))
    info = rlpd.update(nets, rows, settings, generator(0), frozenset({"critic", "actor", "temperature"}), 0, -1.0)
    assert info["imitation_loss"] == info["actor_loss"] == pytest.approx(loss.item())
    assert info["temperature"] == pytest.approx(0.3), "it has nothing to steer"
    Adam(list(twin.actor.parameters()), settings.learning_rate).step(found)
    for ours, theirs in zip(nets.actor.parameters(), twin.actor.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Rlpd(actor="behavior"), r"rlpd.actor=behavior with rlpd.samples=1: the policy would only imitate\. Give"),
        (Rlpd(samples=2, backup_entropy=True), r"backup_entropy=true with rlpd.samples=2: the best of several"),
        (Rlpd(samples=2, actor="behavior", temperature=1.0), r"rlpd.temperature=1.0 would do nothing: it needs"),
    ],
)
def test_settings_of_the_choice_that_cannot_work_are_refused(settings: Rlpd, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(settings, "rlpd")


def test_the_spread_of_drawn_chunks_is_their_deviation():
    drawn = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.1, 0.0])
    want = np.sqrt(np.mean([np.var(drawn[:, t, a].double().numpy(), ddof=1) for t in range(4) for a in range(3)]))
    assert chunks.spread(drawn) == pytest.approx(want, rel=1e-12)
    assert chunks.spread(drawn[:1].expand(5, -1, -1)) == 0 and chunks.spread(3 * drawn) == pytest.approx(3 * want)
