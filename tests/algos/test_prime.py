"""PRIME beside the slow reference in float64: its rewards, its advantages, and the gradients of both policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.algos import prime
from hilt.algos.config import GROUPED, Batching, Optimizer, PolicyGradient, Prime
from hilt.core.errors import ConfigError
from hilt.vla.update import ProcessReward, Updater
from tests.algos import pg_reference as slow
from tests.vla.toy_policy import CHUNK, DIM, Plain, Toy, collected, episodes, others

MADE = [{**e, "success": i % 3 == 1} for i, e in enumerate(episodes([3, 1, 2, 2, 3, 1]))]
GROUPS = [e["group"] for e in MADE]
JUDGE = 3
"""The seed of the reward policy's first weights"""


def numbers(toy: Toy) -> slow.Params:
    return {name: p.detach().numpy().copy() for name, p in toy.named_parameters()}


def same(ours: slow.Params, theirs: slow.Params, tolerance: float = 1e-6) -> bool:
    return all(np.allclose(ours[name], theirs[name], rtol=0, atol=tolerance) for name in theirs)


def updated(
    algorithm: PolicyGradient, process: Prime, reference: Any = "frozen", rate: float = 0.1
) -> tuple[Plain, Plain, dict[str, float]]:
    actor, judge = Plain(Toy()), Plain(Toy(seed=JUDGE), rate)
    kept = others()[1] if reference == "frozen" else None
    return actor, judge, Updater(algorithm, actor, process=ProcessReward(process, judge, kept)).update(*collected(MADE))


@st.composite
def cases(draw: st.DrawFn) -> Any:
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    made = PolicyGradient(draw(st.sampled_from(GROUPED)), draw(st.sampled_from([1.0, 0.9])))
    process = Prime(
        coefficient=1.0,
        beta=draw(st.sampled_from([0.05, 0.7])),
        granularity=draw(st.sampled_from(["chunk", "token", "whole"])),
        scale=draw(st.sampled_from(["batch", "none"])),
    )
    numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
    ratios = [
        {
            (t, c, d): draw(numbers)
            for t in range(n)
            for c in range(1 if t == n - 1 and i % 2 else CHUNK)
            for d in range(DIM)
        }
        for i, n in enumerate(lengths)
    ]
    return made, process, ratios, [draw(st.integers(0, 1)) for _ in lengths]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_advantages_as_the_reference(case: Any):
    made, process, ratios, groups = case
    longest = 1 + max(t for q in ratios for t, _, _ in q)
    apart, mask = (torch.zeros(len(ratios), longest, CHUNK, DIM, dtype=torch.float64) for _ in range(2))
    apart += 7.0  # what was never carried out counts for nothing
    for i, q in enumerate(ratios):
        for place, x in q.items():
            apart[(i, *place)], mask[(i, *place)] = x, 1
    sums = prime.rewards(apart.flatten(2), mask.flatten(2) > 0, process.granularity)
    earned = prime.scaled(sums, process, prime.largest_return(sums))
    found = prime.advantages(earned, torch.tensor(groups), made.discount, made.estimator == "rloo")
    ours = found.value.expand(-1, -1, CHUNK * DIM).unflatten(2, (CHUNK, DIM))
    there = found.mask.expand(-1, -1, CHUNK * DIM).unflatten(2, (CHUNK, DIM))
    for i, worth in enumerate(slow.process_advantages(made, process, ratios, groups)):
        assert [float(ours[(i, *place)]) for place in worth] == pytest.approx(list(worth.values()), abs=1e-9)
        assert all(there[(i, *place)] for place in worth)


@pytest.mark.parametrize("passes", [64, 1])
@pytest.mark.parametrize("reference", ["frozen", "policy"])
def test_the_reward_policy_goes_down_the_cross_entropy_of_outcomes(passes: int, reference: str):
    """Also where the chunks of an episode are in several passes; against a frozen
    reference, or the policy that acted."""
    process = Prime(coefficient=1.0, beta=0.4, reference=reference)
    _, judge, figures = updated(PolicyGradient(batch=Batching(chunks_per_pass=passes)), process, reference)
    kept = numbers(others()[1 if reference == "frozen" else 0])
    first = numbers(Toy(seed=JUDGE))

    def loss(params: slow.Params) -> float:
        return slow.outcome_loss(0.4, params, kept, MADE)

    assert len(judge.seen) == 1 and same(judge.seen[0], {"weight": slow.gradient(loss, first)["weight"]})
    assert figures["prime_loss"] == pytest.approx(loss(first), abs=1e-6)
    right = [(sum(slow.log_ratios(first, kept, e).values()) > 0) == e["success"] for e in MADE]
    assert figures["prime_accuracy"] == pytest.approx(np.mean(right))


def test_every_step_of_the_reward_policy_has_the_weights_of_then():
    batch = Batching(trajectories_per_step=3, shuffle=False)
    _, judge, _ = updated(PolicyGradient(batch=batch), Prime(coefficient=1.0, beta=0.4))
    params, kept = numbers(Toy(seed=JUDGE)), numbers(others()[1])
    for part, seen in zip((MADE[:3], MADE[3:]), judge.seen, strict=True):
        expected = slow.gradient(lambda p, part=part: slow.outcome_loss(0.4, p, kept, part), params)  # type: ignore[misc]
        assert same(seen, {"weight": expected["weight"]})
        params = {name: value - 0.1 * seen[name] for name, value in params.items()}


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("granularity", ["chunk", "token", "whole"])
@pytest.mark.parametrize("update", ["after", "before"])
def test_the_gradient_of_the_policy_with_process_rewards(estimator: str, granularity: str, update: str):
    made = PolicyGradient(estimator, discount=0.9)
    process = Prime(coefficient=0.7, beta=0.4, granularity=granularity, update=update, scale="none")
    actor, judge, _ = updated(made, process)
    params, kept = numbers(Toy(seed=JUDGE)), numbers(others()[1])
    if update == "before":
        params = {name: value - 0.1 * judge.seen[0][name] for name, value in params.items()}
    ratios = [slow.log_ratios(params, kept, e) for e in MADE]
    rewards = [list(map(float, e["rewards"])) for e in MADE]
    outcome, returns = slow.advantages(made, rewards, GROUPS, rewards, [0.0] * len(MADE))
    added = slow.process_advantages(made, process, ratios, GROUPS)
    worth: Any = [
        {place: outcome[i][place[0]] + 0.7 * x for place, x in terms.items()} for i, terms in enumerate(added)
    ]
    chosen = list(zip(MADE, worth, returns, strict=True))
    expected = slow.gradient(
        lambda p: slow.loss(made, {n: v.tolist() for n, v in p.items()}, chosen, 0.0), numbers(Toy())
    )
    assert same(actor.seen[0], expected)
    without = Plain(Toy())
    Updater(made, without).update(*collected(MADE))
    assert not same(actor.seen[0], without.seen[0], 1e-4), "the process reward counts"


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_without_groups_it_is_a_part_of_each_chunks_reward(estimator: str):
    made, process = (
        PolicyGradient(estimator),
        Prime(coefficient=0.7, update="none", scale="none", beta=0.4, policy="folder"),
    )
    actor, judge, figures = updated(made, process)
    kept, first = numbers(others()[1]), numbers(Toy(seed=JUDGE))
    rewards = []
    for e in MADE:
        rewards.append(e["rewards"].copy())
        for (t, _, _), x in slow.log_ratios(first, kept, e).items():
            rewards[-1][t] += 0.7 * 0.4 * x
    dense = [{**e, "rewards": r} for e, r in zip(MADE, rewards, strict=True)]
    plain = Plain(Toy())
    Updater(made, plain).update(*collected(dense))
    assert same(actor.seen[0], plain.seen[0]) and not judge.seen and "prime_loss" not in figures
    assert figures["prime_reward"] == pytest.approx(
        np.mean([(r - e["rewards"]).sum() for r, e in zip(rewards, MADE, strict=True)]), abs=1e-6
    )
    assert figures["score"] == pytest.approx(np.mean([e["rewards"].sum() for e in MADE])), (
        "the score is of the rewards that were given"
    )


def test_whitened_together_with_the_outcome():
    made = PolicyGradient("rloo", normalize="batch")
    actor, _, figures = updated(made, Prime(coefficient=0.7, granularity="token"))
    assert 0.5 < figures["advantage_size"] < 1.5
    other, _, _ = updated(dataclasses.replace(made, normalize="none"), Prime(coefficient=0.7, granularity="token"))
    assert not same(actor.seen[0], other.seen[0], 1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"beta": 0.8},
        {"granularity": "token"},
        {"granularity": "whole"},
        {"scale": "none"},
        {"update": "before"},
        {"coefficient": 0.3},
    ],
)
def test_each_setting_changes_the_gradient(change: dict[str, Any]):
    plain = Prime(coefficient=0.7, scale=change.get("scale", "batch"))
    plain = dataclasses.replace(plain, scale="none" if "beta" in change else "batch")
    before, after = (
        updated(PolicyGradient(), each)[0].seen[0] for each in (plain, dataclasses.replace(plain, **change))
    )
    assert not same(before, after, 1e-6)


def test_a_reward_policy_that_is_its_reference_gives_nothing_and_learns():
    actor, judge = Plain(Toy()), Plain(Toy(), 1.0)
    updater = Updater(PolicyGradient(), actor, process=ProcessReward(Prime(coefficient=5.0, beta=0.5), judge, Toy()))
    losses = [updater.update(*collected(MADE)) for _ in range(60)]
    assert losses[0]["prime_reward"] == 0 and losses[0]["prime_loss"] == pytest.approx(np.log(2))
    assert losses[-1]["prime_loss"] < 0.3 and losses[-1]["prime_accuracy"] > 0.8, (
        "it tells the episodes apart by what was done in them"
    )


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"beta": 0.1}, r"prime.beta=0.1 would do nothing: it needs prime.coefficient above 0"),
        ({"policy": "folder"}, r"prime.policy=folder would do nothing: it needs prime.coefficient above 0"),
        (
            {"optimizer": Optimizer(learning_rate=1e-4)},
            r"prime.optimizer.learning_rate=0.0001 would do nothing: it needs prime",
        ),
        ({"coefficient": 1.0, "update": "none"}, "a reward policy that is its own reference: every reward would be 0"),
        (
            {"coefficient": 1.0, "update": "none", "policy": "a", "beta": 0.1},
            "beta=0.1 would do nothing: it needs prime.update",
        ),
        ({"coefficient": 1.0, "reference": "policy", "reference_policy": "a"}, "it needs prime.reference=frozen"),
        ({"coefficient": 1.0, "granularity": "step"}, "no granularity named 'step'"),
        ({"coefficient": -1.0}, "prime.coefficient=-1.0: expected a number of at least 0"),
    ],
)
def test_what_would_do_nothing_is_refused(given_: dict[str, Any], says: str):
    with pytest.raises((ConfigError, KeyError), match=says):
        Prime(**given_).check()


@pytest.mark.parametrize(
    ("algorithm", "granularity", "says"),
    [
        (PolicyGradient("remax"), "chunk", "a greedy episode, its baseline, gets no process reward. Take rloo"),
        (
            PolicyGradient("gae"),
            "token",
            "prime.granularity=token with algorithm.estimator=gae .* Give prime.granularity=chunk",
        ),
        (PolicyGradient(ratio="chunk"), "token", "need one of grpo, dr_grpo, rloo, and ratio=token"),
    ],
)
def test_what_does_not_go_together_is_refused(algorithm: PolicyGradient, granularity: str, says: str):
    with pytest.raises(ConfigError, match=says):
        updated(algorithm, Prime(coefficient=1.0, granularity=granularity))
