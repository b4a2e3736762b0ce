"""Agents that decide chunks of actions: what they execute, and what they learn on a chain whose values are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import Source
from hilt.core.tree import ArraySpec
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig, EncoderConfig, Rlpd
from hilt.replay import Log, Schema
from hilt.replay.sampling import NStep, Sampler
from tests.policies.agents import batch, config, observations, spaces

CHUNK = 3


def made(chunk: int = CHUNK, **rlpd: Any) -> Agent:
    return Agent.make(*spaces(), replace(config(**rlpd), chunk=chunk), seed=0)


def seen(seed: int) -> Any:
    one = observations(np.random.default_rng(seed), 1)
    return {
        "state": {name: value[0] for name, value in one["state"].items()},
        "images": {name: value[0] for name, value in one["images"].items()},
    }


def rows(seed: int, n: int = 8) -> dict[str, Any]:
    r = np.random.default_rng(seed)
    return batch(seed, n) | {
        "actions": r.uniform(-1, 1, (n, CHUNK, 7)).astype(np.float32),
        "n_steps": r.integers(1, CHUNK + 1, n),
        "source": np.tile(np.uint8([1, 1, 0]), (n, 1)),
    }


def test_a_chunk_is_executed_open_loop_and_dropped_by_whoever_else_acts() -> None:
    agent, twin = made(), made()
    agent.version = 4
    whole = twin.inputs.leaves(seen(0))
    chunk = twin._decide({path: leaf[None] for path, leaf in whole.items()}, 5, False)[0]
    assert chunk.shape == (CHUNK, 7)
    agent.begin()
    for place in range(CHUNK):  # whatever it sees meanwhile
        assert np.array_equal(agent.sample_actions(seen(place), seed=5), chunk[place])
        agent.version = 9  # weights that come in the middle of a chunk have not decided it
        columns = agent.acted(Source.POLICY, chunk[place])
        assert columns == {"chunk": 0, "chunk_index": place, "policy_version": 4}
    second = agent.sample_actions(seen(7), seed=5)
    assert agent.acted(Source.POLICY, second) == {"chunk": 1, "chunk_index": 0, "policy_version": 9}
    agent.sample_actions(seen(8), seed=5)
    assert agent.acted(Source.HUMAN, np.zeros(7)) == {"chunk": -1, "chunk_index": -1}
    assert np.array_equal(agent.sample_actions(seen(0), seed=5), chunk[0]), "it looks again"
    assert agent.acted(Source.POLICY, chunk[0])["chunk"] == 2
    agent.begin()
    assert np.array_equal(agent.sample_actions(seen(0), seed=5), chunk[0]), "another episode"
    assert agent.acted(Source.POLICY, chunk[0])["chunk"] == 0
    many = observations(np.random.default_rng(0), 4)
    assert agent.sample_actions(many, argmax=True).shape == (4, 7), "a batch: the first action of each"


def test_an_agent_without_chunks_has_no_columns_of_them() -> None:
    agent = made(1)
    agent.begin()
    assert agent.acted(Source.POLICY, np.zeros(7)) == {}


@pytest.mark.parametrize("change", [{"samples": 4}, {"samples": 4, "actor": "behavior"}], ids=str)
def test_samples_and_the_actor_change_what_is_done_and_learned(change: dict[str, Any]) -> None:
    base = {key: value for key, value in change.items() if key != list(change)[-1]}
    results = []
    for given in (base, change):
        agent = made(1, **given)
        acts = agent.sample_actions(batch(9)["observations"], seed=3)
        for seed in range(2):
            agent.update(batch(seed))
        results.append([acts, agent.sample_actions(batch(9)["observations"], argmax=True)])
    assert any(not np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_the_best_of_several_acts_and_an_actor_gets_the_critics() -> None:
    agent, other = made(samples=16), made(samples=16)
    agent.update(rows(0))
    state = agent.acting_state()
    assert any(name.startswith("critic.") for name in state)
    assert not any(name.startswith("critic.") for name in made().acting_state())
    many = observations(np.random.default_rng(0), 4)
    assert not np.array_equal(agent.sample_actions(many, argmax=True), other.sample_actions(many, argmax=True))
    other.load_acting_state(state)
    for options in ({"argmax": True}, {"seed": 3}):
        assert np.array_equal(agent.sample_actions(many, **options), other.sample_actions(many, **options))
    agent.update(rows(1))  # what acting keeps of the critics does not hinder updates


def test_updates_imitation_and_checkpoints_of_chunks() -> None:
    agent, twin = made(imitation_weight=1.0), made(imitation_weight=1.0)
    for seed in range(2):
        agent.update(rows(seed), details=True)
        agent.imitate(rows(seed), encoder=True)
    twin.load_state_dict(agent.state_dict())
    assert agent.update(rows(3))[1] == twin.update(rows(3))[1]
    assert agent.target_entropy == -CHUNK * 7 / 2
    with pytest.raises(SchemaError, match=r"actions: expected chunks \[B, 3, 7\], as agent.chunk=3 says, got \(8, 7\)"):
        agent.update(batch(0) | {"n_steps": np.ones(8, int)})


def test_a_learned_gripper_has_no_chunks() -> None:
    settings = replace(config("single-arm-learned-gripper"), chunk=2)
    with pytest.raises(ConfigError, match=r"agent.chunk=2 with agent.setup_mode=single-arm-learned-gripper: .* Give"):
        Agent.make(*spaces(), settings, seed=0)


PLACES, LIMIT, DISCOUNT = 4, 5, 0.8


def chain_log(path: Path, episodes: int = 80, takes_over: float = 0.0) -> Log:
    """A positive action leads to the next place, another one nowhere; behind the last place is a reward of 1 and the
    end; after five steps an episode is cut. `takes_over`: the share of the steps after the first in which a person
    begins to act, who always goes on to the next place."""
    number = ArraySpec(np.dtype(np.float32))
    at = {"at": ArraySpec(np.dtype(np.float32), (PLACES,))}
    columns = {"observations": at, "actions": ArraySpec(np.dtype(np.float32), (1,)), "rewards": number}
    flags = {name: ArraySpec(np.dtype(bool)) for name in ("terminated", "truncated")}
    columns |= {"next_observations": at, **flags, "source": ArraySpec(np.dtype(np.uint8))}
    log, rng, eye = Log.create(path, Schema.declare(columns)), np.random.default_rng(0), np.eye(PLACES + 1)
    for _ in range(episodes):
        running, place, human = log.episode(), int(rng.integers(PLACES)), False
        for t in range(LIMIT):
            action = rng.uniform(-1, 1, 1).astype(np.float32)
            human = human or bool(t and takes_over and rng.random() < takes_over)
            action = np.abs(action) if human else action
            after = place + int(action[0] > 0)
            ends = {"terminated": np.bool_(after == PLACES), "truncated": np.bool_(t == LIMIT - 1 and after < PLACES)}
            before, behind = ({"at": eye[p, :PLACES].astype(np.float32)} for p in (place, after))
            earned = np.float32(after == PLACES)
            step = {"observations": before, "actions": action, "rewards": earned, "next_observations": behind}
            running.append({**step, **ends, "source": np.uint8(Source.HUMAN if human else Source.POLICY)})
            place = after
            if place == PLACES:
                break
        running.end()
    return log


def known_value(place: int, chunk: tuple[int, int]) -> float:
    """The best return that begins with these two actions, 1 for a positive one."""
    for step, move in enumerate(chunk):
        place += move
        if place == PLACES:
            return DISCOUNT**step
    return DISCOUNT**2 * DISCOUNT ** (PLACES - 1 - place)


def test_values_of_chunks_on_a_chain_are_those_known(tmp_path: Path) -> None:
    """From random actions, with episodes that end in the middle of a chunk and episodes that a limit cuts there."""
    torch.set_num_threads(1)
    learning = Rlpd(discount=DISCOUNT, tau=0.05, learning_rate=3e-3, actor="behavior", samples=8, actor_q="min")
    settings = AgentConfig(encoder=EncoderConfig(kind="none"), proprio_width=0, hidden=[64], activation="relu", chunk=2)
    settings.rlpd = learning
    see = {"at": ArraySpec(np.dtype(np.float32), (PLACES,))}
    agent = Agent.make(see, ArraySpec(np.dtype(np.float32), (1,)), settings, seed=0)
    with chain_log(tmp_path / "log") as log:
        assembly = NStep(2, DISCOUNT, whole=("actions", "source"))
        sampler, short = Sampler(log.all(), assembly=assembly, seed=0), 0
        for _ in range(400):
            drawn = sampler.sample(64)
            masks = (~drawn["terminated"]).astype(np.float32)
            short += int(((drawn["n_steps"] < 2) & (masks == 1)).sum())
            agent.update({**drawn, "masks": masks})
    assert short > 500, "a time limit cut chunks, too"
    critic = agent.networks["critic"]
    for place in range(PLACES):
        for chunk in ((1, 1), (1, 0), (0, 1), (0, 0)):
            actions = torch.tensor([[0.6 if move else -0.6 for move in chunk]])
            q = critic(torch.eye(PLACES)[place : place + 1], actions).mean().item()
            assert q == pytest.approx(known_value(place, chunk), abs=0.08), (place, chunk)


def tabular_values(log: Log, n: int, limit_ends: bool = False, take_over_ends: bool = False) -> np.ndarray:
    """Q [place, move] by the mean of all n-step returns of the log, with the best next value behind them, until nothing
    changes. `limit_ends` and `take_over_ends` are wrong: a time limit, or a take-over, is taken for the end."""
    windows: list[tuple[int, int, float, int, int]] = []  # place, move, return, steps, place behind or -1
    for number in log.trajectories():
        steps = log.read(log.trajectory_keys(number))
        place, behind = (
            steps[name]["at"] @ np.arange(1, PLACES + 1) - 1 for name in ("observations", "next_observations")
        )
        moves = (steps["actions"][:, 0] > 0).astype(int)
        for t in range(len(moves)):
            taken = min(n, len(moves) - t)
            before = int((np.cumsum(steps["source"][t : t + taken] == Source.HUMAN) == 0).sum())
            cut = take_over_ends and 0 < before < taken
            taken = before if cut else taken
            last = t + taken - 1
            ended = steps["terminated"][last] or (limit_ends and steps["truncated"][last]) or cut
            found = sum(DISCOUNT**i * float(steps["rewards"][t + i]) for i in range(taken))
            windows.append((int(place[t]), moves[t], found, taken, -1 if ended else int(behind[last])))
    q = np.zeros((PLACES, 2))
    for _ in range(100):
        targets: dict[tuple[int, int], list[float]] = {}
        for at, move, found, taken, after in windows:
            value = 0.0 if after < 0 else float(q[after].max())
            targets.setdefault((at, move), []).append(found + DISCOUNT**taken * value)
        for (at, move), each in targets.items():
            q[at, move] = np.mean(each)
    return q


def test_values_of_single_actions_over_three_steps_on_a_chain_are_those_known(tmp_path: Path) -> None:
    """Returns go on through take-overs, and bootstrap where a time limit cuts an episode."""
    torch.set_num_threads(1)
    settings = AgentConfig(encoder=EncoderConfig(kind="none"), proprio_width=0, hidden=[64], activation="relu")
    settings.rlpd = Rlpd(discount=DISCOUNT, tau=0.05, learning_rate=3e-3, actor="behavior", samples=8, actor_q="min")
    see = {"at": ArraySpec(np.dtype(np.float32), (PLACES,))}
    agent = Agent.make(see, ArraySpec(np.dtype(np.float32), (1,)), settings, seed=0)
    with chain_log(tmp_path / "log", 120, takes_over=0.3) as log:
        known, wrong = tabular_values(log, 3), {}
        for name in ("limit_ends", "take_over_ends"):
            wrong[name] = tabular_values(log, 3, **{name: True})
        sampler, across = Sampler(log.all(), assembly=NStep(3, DISCOUNT), seed=0), 0
        for _ in range(400):
            drawn = sampler.sample(64)
            agent.update({**drawn, "masks": (~drawn["terminated"]).astype(np.float32)})
            across += int((drawn["truncated"] & (drawn["n_steps"] < 3)).sum())
    assert across > 500, "a time limit cut returns"
    critic = agent.networks["critic"]
    found = np.array(
        [
            [critic(torch.eye(PLACES)[p : p + 1], torch.tensor([[a]])).mean().item() for a in (-0.6, 0.6)]
            for p in range(PLACES)
        ]
    )
    np.testing.assert_allclose(found, known, atol=0.08)
    for name, other in wrong.items():
        assert np.abs(other - found).max() > 0.12, name
