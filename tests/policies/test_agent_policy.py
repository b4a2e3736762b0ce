"""The agent of a run with a person as a policy: it answers as the agent acts, and looks once at what it draws for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.agent_policy import AgentPolicy, drawn_rows
from hilt.policies.agent.layout import ActionLayout
from hilt.policies.base import Prefix
from tests.hil.test_make_agent import Still
from tests.policies.agents import MODES, config, observations, spaces

MODE = "single-arm-fixed-gripper"


def made(chunk: int = 1) -> Agent:
    return Agent.make(*spaces(MODES[MODE]), replace(config(MODE), chunk=chunk), seed=0)


def rows(count: int) -> list[dict[str, Any]]:
    seen = observations(np.random.default_rng(0), count)

    def one(tree: dict[str, Any], place: int) -> dict[str, Any]:
        return {
            name: one(value, place) if isinstance(value, dict) else value[place]  # a log's nested names
            for name, value in tree.items()
        }

    return [{**one(seen, place), "instruction": "lift it"} for place in range(count)]


def drawing(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("chunk", [1, 3])
def test_it_answers_as_the_agent_acts(chunk: int):
    agent, seen = made(chunk), rows(4)
    policy = AgentPolicy(agent)
    answers, record = policy.act(seen, sample=False)
    assert answers.shape == (4, chunk, 7) and answers.dtype == np.float32 and record == {}
    assert (policy.chunk, policy.action_dim) == (chunk, 7)
    other = made(chunk)
    for row, answer in zip(seen, answers, strict=True):
        other.begin()
        alone = [
            other.sample_actions({k: v for k, v in row.items() if k != "instruction"}, argmax=True) for _ in answer
        ]
        np.testing.assert_allclose(answer, alone, atol=1e-5)
    drawn = [policy.act(seen, generator=drawing(seed))[0] for seed in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], answers)


@pytest.mark.parametrize("samples", [1, 4])
def test_what_is_drawn_for_one_observation_is_seen_once(samples: int, monkeypatch: pytest.MonkeyPatch):
    agent, seen = made(2), rows(2)
    agent.config.rlpd.samples = samples
    policy, looks = AgentPolicy(agent), list[int]()
    encode = agent.encoder.forward

    def counted(leaves: dict[str, Any], *more: Any) -> Any:
        looks.append(len(leaves["images/front"]))
        return encode(leaves, *more)

    monkeypatch.setattr(agent.encoder, "forward", counted)
    repeated = [row for row in seen for _ in range(5)]
    once, _ = policy.act(repeated, generator=drawing())
    assert looks == [2]
    each, _ = policy.act([dict(row) for row in repeated], generator=drawing())
    assert looks == [2, 10]
    np.testing.assert_allclose(once, each, atol=1e-5)
    assert len(np.unique(once[:5, 0, 0])) == 5, "five draws"


def test_rows_that_are_repeated_unequally_are_left_as_they_are():
    a, b = {"x": 1}, {"x": 1}
    assert drawn_rows([a, a, b, b]) == ([a, b], 2) and drawn_rows([a]) == ([a], 1)
    for given in ([a, a, b], [a, b, a, b], [a, b, b, b]):
        assert drawn_rows(given) == (given, 1)


def test_another_agent_is_asked_for_an_action_of_each_observation():
    class Moving(Still):
        layout = ActionLayout(MODE, 2)

        def sample_actions(self, observations: Any, seed: int | None = None, argmax: bool = False) -> Any:
            noise = np.random.default_rng(seed).normal(size=(len(observations["state"]), 2))
            return (observations["state"][:, :2] + noise * (not argmax)).astype(np.float32)

    seen = [{"state": np.full(3, number, np.float32)} for number in (1, 2)]
    policy = AgentPolicy(Moving(0.0))
    np.testing.assert_array_equal(policy.act(seen, sample=False)[0], [[[1, 1]], [[2, 2]]])
    drawn = policy.act([row for row in seen for _ in range(200)], generator=drawing())[0]
    assert drawn.shape == (400, 1, 2) and np.abs(drawn[:200].mean(0) - 1).max() < 0.3 < drawn[:200].std()
    still = Still(0.5)
    still.layout = ActionLayout(MODE, 2)
    with pytest.raises(
        ConfigError, match=r"Still\.sample_actions gave an array of \[2\] for 3 observations; expected \[3"
    ):
        AgentPolicy(still).act([seen[0]] * 3, sample=False)


def test_what_it_cannot_do_is_refused():
    policy, seen = AgentPolicy(made(2)), rows(1)
    for refused, match in (
        (lambda: policy.act(seen, temperature=0.5, generator=drawing()), "a temperature of 0.5: an agent draws"),
        (lambda: policy.act(seen), "chance needs a generator"),
        (lambda: policy.evaluate({}), "It learns in its run"),
        (lambda: policy.supervised_loss(seen, np.zeros((1, 2, 7)), np.ones((1, 2))), "It learns in its run"),
        (
            lambda: policy.act(seen, sample=False, prefix=Prefix(np.zeros((1, 1, 7), np.float32), np.array([1]))),
            "this AgentPolicy cannot continue one",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            refused()
