"""Critics of residual blocks, and what an agent does with the settings of its critics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hilt.algos.config import CriticConfig
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.validate import check
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.residual_critics import ResidualCritics
from hilt.replay.tensors import generator
from tests.policies.agents import batch, config, spaces
from tests.policies.test_mlp import FEATURES, A, body, random, stir


def norm(x: torch.Tensor, part: Any) -> torch.Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    return (x - mean) / (var + 1e-6).sqrt() * part.scale + part.shift


def linear(x: torch.Tensor, part: Any) -> torch.Tensor:
    return torch.einsum("ebi,eio->ebo", x, part.weight) + part.bias


@pytest.mark.parametrize("kind", ["simba", "bro"])
def test_residual_critics_follow_the_formula_and_have_its_gradients(kind: str) -> None:
    critics = stir(ResidualCritics(body([4], proprio=2), A, generator(1), 3, kind, 6, 2, bias=(0.1, 0.2)))
    z, actions, dout = random(7, FEATURES + 2), random(7, A), random(3, 7, 2)
    s = torch.cat([critics.inputs(z), actions], 1).expand(3, -1, -1)
    if kind == "simba":
        first, *blocks, last_norm, last = critics.body
        x = linear(s, first)
        for block in blocks:
            x = x + linear(F.relu(linear(norm(x, block.norm), block.first)), block.second)
        x = norm(x, last_norm)
    else:
        first, first_norm, _, *blocks, last = critics.body
        x = F.relu(norm(linear(s, first), first_norm))
        for block in blocks:
            middle = F.relu(norm(linear(x, block.first), block.first_norm))
            x = x + norm(linear(middle, block.second), block.second_norm)
    expected = linear(x, last)
    assert critics.of_states(z) is None
    tape = critics.run(z, actions)
    torch.testing.assert_close(tape.out, expected)
    trained = list(critics.parameters())
    theirs = torch.autograd.grad(expected, trained, dout)
    torch.testing.assert_close(critics.gradients(tape, dout, trained, again=True), list(theirs))
    judged = critics.judge(z, actions)
    moved = actions.clone().requires_grad_()
    expected = critics(z, moved)
    torch.testing.assert_close(critics.action_gradients(judged, dout), torch.autograd.grad(expected, moved, dout)[0])
    assert not critics.run(z, actions, learns=False).out.requires_grad
    assert {id(matrix) for matrix in critics.matrices()} == {id(p) for p in trained if p.ndim == 3 and p.shape[1] > 1}


RANGE = {"value_range": [0.0, 1.0]}


def made(critic: dict[str, Any], **rlpd: Any) -> Agent:
    settings = replace(config(**rlpd), critic=CriticConfig(**critic))
    check(settings, "agent")
    return Agent.make(*spaces(), settings, seed=0)


def learned(agent: Agent, updates: int = 3) -> list[Any]:
    for seed in range(updates):
        agent.update(batch(seed), details=True)
    weights = [value.detach().numpy().copy() for value in agent.networks["critic"].parameters()]
    return [agent.sample_actions(batch(9)["observations"], argmax=True), *weights]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"head": "c51", **RANGE},
        {"head": "hl_gauss", **RANGE},
        {"head": "c51", **RANGE, "bins": 31},
        {"head": "c51", "value_range": [0.0, 2.0]},
        {"head": "c51", "reward_range": [0.0, 1.0]},
        {"head": "hl_gauss", **RANGE, "sigma": 2.0},
        {"network": "simba", "width": 8},
        {"network": "bro", "width": 8},
        {"network": "bro", "depth": 1},
        {"weight_decay": 0.5},
        {"reset_period": 2, "reset_hold": 1},
        {"reset_period": 2, "reset_hold": 0},
    ],
    ids=str,
)
def test_a_setting_of_the_critics_changes_what_is_learned(change: dict[str, Any]) -> None:
    last = list(change)[-1]
    base = {key: value for key, value in change.items() if key != last}  # all but the last
    if last in ("value_range", "reward_range"):
        base = {"head": "c51", **RANGE} if change[last] != [0.0, 1.0] else {}
    if last == "reset_hold":
        base = {"reset_period": 2, "reset_hold": 1 - change[last]}
    if last == "width":
        base = {"network": change["network"], "width": 9}
    results = [learned(made(given)) for given in (base, change)]
    assert not same(*results)


def test_weight_decay_is_for_matrices_of_the_critics_alone() -> None:
    agent = made({"weight_decay": 0.1}, learning_rate=0.5)
    before = {key: value.clone() for key, value in agent.networks["critic"].state_dict().items()}
    optimizer = agent.optimizers["critic"]
    optimizer.step([torch.zeros_like(parameter) for parameter in optimizer.parameters])
    for key, value in agent.networks["critic"].state_dict().items():
        expected = before[key] * 0.95 if key.startswith("weights.") else before[key]
        torch.testing.assert_close(value, expected)


def test_after_a_reset_the_critics_begin_anew_and_the_actor_waits() -> None:
    agent, plain = made({"reset_period": 3, "reset_hold": 2}), made({})
    for seed in range(3):
        agent.update(batch(seed))
        plain.update(batch(seed))
    assert same(learned(agent, 0), learned(plain, 0)), "nothing changes before the first reset"
    held = agent.networks["actor"].state_dict()["mlp.out.weight"].clone()
    learnt = agent.networks["critic"].weights[0].detach().clone()
    agent.update(batch(3))
    assert not torch.allclose(agent.networks["critic"].weights[0], learnt, atol=0.05)
    first = agent.optimizers["critic"].tensors()["steps"]
    assert sorted(set(first.tolist())) == [1, 4], "the encoder, which the same optimizer trains, has had four"
    assert agent.update(batch(4), {"actor"}) == (agent, {}) and agent.updates == 5
    assert torch.equal(agent.networks["actor"].state_dict()["mlp.out.weight"], held)
    twin = made({"reset_period": 3, "reset_hold": 2})
    twin.load_state_dict(agent.state_dict())
    for seed in (5, 6):  # at 6, the next reset: a resumed agent draws the same critics
        info = agent.update(batch(seed))[1]
        assert twin.update(batch(seed))[1] == info
        assert ("actor_loss" in info) == (seed == 5)
    assert same(learned(agent, 0), learned(twin, 0))


def test_a_state_of_another_value_range_is_refused() -> None:
    agent = made({"head": "c51", **RANGE})
    for other in ({"head": "c51", "value_range": [0.0, 2.0]}, {}):
        with pytest.raises(SchemaError, match=r"critics of this state have values from 0 to 1, and this agent's from"):
            made(other).load_state_dict(agent.state_dict())
    made({"head": "c51", **RANGE}).load_state_dict(agent.state_dict())


def test_categorical_critics_need_a_range() -> None:
    with pytest.raises(ConfigError, match=r"agent.critic.head=c51: the range of its values is not known\. Give"):
        made({"head": "c51"})
    made({"head": "c51"}, target_range=[0.0, 1.0])
