"""RLinf's way from a rollout to a batch: the same batches as from the log, bit for bit, and the same learner."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.compat.rlinf.rollout_experience import RolloutSender
from hilt.core.errors import ConfigError
from hilt.core.tree import flatten
from hilt.hil.learner import Learner, LearnerSummary
from hilt.observe.metrics import read_metrics
from hilt.replay import Channel
from hilt.runs.checkpoint import load
from hilt.wire import TrainerClient
from tests.hil.toy_run import IMAGES, config, demonstrations, episode, fill, spaces, wire

torch.set_num_threads(1)
DEADLINE_S = 120
PEOPLE: dict[str, Any] = {"images": True, "human": (1, 2), "lost": (2,)}
FROZEN = {"agent": {"encoder": {**IMAGES, "pretrain_updates": 2, "pretrain_batch": 8}}, "n_step": 3}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demonstrations(tmp_path_factory.mktemp("demonstrations") / "shown", range(50, 52), images=True)


class Client:
    """What `RolloutSender` needs of one: a channel."""

    def __init__(self, channel: Channel[Any]):
        self.channel = lambda name: channel


def send(channel: Channel[Any], numbers: range, people: dict[str, Any] = PEOPLE) -> None:
    sender = RolloutSender(Client(channel), "arm")
    for number in numbers:
        for step in episode(number, **people):
            sender.insert(step)
    assert sender.close(DEADLINE_S) == 0


def learner(run: Path, shown: Path, store: str, numbers: range = range(0), **changes: Any) -> Learner:
    made = Learner(config(demo_path=[str(shown)], store=store, **changes), run, resume=True, env=spaces(True), wire=wire())
    people = PEOPLE if "replay_buffer_capacity" not in changes else {"images": True}  # whose steps stay here when their episode goes
    if store == "log":
        fill(made.experience.log, numbers, **people)
    else:
        send(made.experience.channel, numbers, people)
        made.experience.take()
    return made


def same(a: Any, b: Any) -> bool:
    ours, theirs = flatten(a), flatten(b)
    return ours.keys() == theirs.keys() and all(
        np.asarray(ours[path]).dtype == np.asarray(theirs[path]).dtype and np.array_equal(ours[path], theirs[path]) for path in ours
    )


@pytest.mark.parametrize("changes", [{"n_step": 1}, FROZEN, {"replay_buffer_capacity": 12, "n_step": 2}], ids=["plain", "frozen", "small"])
def test_the_same_episodes_give_the_same_batches_and_the_same_curve(memory_path: Path, shown: Path, changes: dict[str, Any]):
    log, rollouts = (learner(memory_path / store, shown, store, range(5), **changes) for store in ("log", "trajectories"))
    assert log.experience.counts() == rollouts.experience.counts() and log.experience.total == rollouts.experience.total == 25
    for n, part, images in ((16, "both", True), (7, "demo", False), (40, "both", False), (5, "demonstrations", False)):
        assert same(*(each.experience.sample(n, part, images) for each in (log, rollouts)))
    summaries = [each.run() for each in (log, rollouts)]
    assert summaries == [LearnerSummary("max_steps", 10, 25)] * 2
    agents = [load(memory_path / store, 10).agent for store in ("log", "trajectories")]
    assert same(*agents)
    curves = [[r["critic_loss"] for r in read_metrics(memory_path / store, ["update"])] for store in ("log", "trajectories")]
    assert curves[0] == curves[1] and len(curves[0]) == 2
    told = [read_metrics(memory_path / store, ["episode"]) for store in ("log", "trajectories")]
    assert [r["length"] for r in told[1]] == [5] * 5
    if "replay_buffer_capacity" not in changes:
        own = {"time": 0, "elapsed_seconds": 0, "actor": ""}
        assert [r | own for r in told[0]] == [r | own for r in told[1]]


def test_stopped_and_resumed_it_goes_on_bit_for_bit(memory_path: Path, shown: Path):
    changes = {**FROZEN, "checkpoint_period": 6, "max_steps": 12}
    learner(memory_path / "whole", shown, "trajectories", range(5), **changes).run()
    cut = learner(memory_path / "cut", shown, "trajectories", range(5), **changes)
    assert cut.run(lambda: cut.update == 6).update == 6
    again = learner(memory_path / "cut", shown, "trajectories", **changes)
    assert again.experience.total == 25 and again.experience.counts() == {"log_steps": 25, "demo_steps": 15, "human_steps": 5}
    again.run()
    assert same(load(memory_path / "whole", 12).agent, load(memory_path / "cut", 12).agent)
    assert [r["trajectory"] for r in read_metrics(memory_path / "cut", ["episode"])] == [0, 1, 2, 3, 4]
    third = learner(memory_path / "cut", shown, "trajectories", range(5, 6), **{**changes, "max_steps": 13})
    assert third.experience.total == 30 and len(third.experience.online) == 6
    third.run()
    fourth = learner(memory_path / "cut", shown, "trajectories", **{**changes, "max_steps": 14})
    assert len(fourth.experience.online) == 6  # those that were loaded stay in the folder's index, too
    fourth.run()


def test_an_episode_that_is_handed_over_twice_counts_once(memory_path: Path, shown: Path):
    made = learner(memory_path / "run", shown, "trajectories", max_steps=0)
    channel: Channel[Any] = Channel()
    send(channel, range(2))
    items = [channel.get(timeout=1) for _ in range(2)]
    for item in (*items, items[0]):
        made.experience.channel.put(item)
    made.experience.take()
    assert made.experience.total == 10
    send(made.experience.channel, range(2, 3), {"images": True, "length": 1})  # as short as one can be
    made.experience.take()
    assert made.experience.total == 11
    made.run()


def test_over_the_wire(memory_path: Path, shown: Path):
    made = learner(memory_path / "run", shown, "trajectories", training_starts=10, max_steps=5)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    with TrainerClient("arm", "127.0.0.1", made.server.config, wait_for_server=10) as client:
        sender = RolloutSender(client, "arm")
        for number in range(2):
            for step in episode(number, **PEOPLE):
                sender.insert(step)
        sender.insert(next(episode(7, **PEOPLE)))
        deadline = time.monotonic() + DEADLINE_S
        while made.update < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sender.close(1.0) == 1  # one that did not end
    thread.join(DEADLINE_S)
    assert made.update == 5 and made.experience.total == 10
    assert [r["actor"] for r in read_metrics(memory_path / "run", ["episode"])] == ["arm", "arm"]


def test_what_cannot_be_is_refused(memory_path: Path, shown: Path):
    learner(memory_path / "run", shown, "trajectories", range(1), max_steps=0).run()
    with pytest.raises(ConfigError, match=r"rewards summed with .*'n_step': 1.*, and this run has .*'n_step': 2"):
        learner(memory_path / "run", shown, "trajectories", n_step=2)
    with pytest.raises(ConfigError, match="buffer_period=5 would do nothing: it needs store=log"):
        learner(memory_path / "other", shown, "trajectories", buffer_period=5)
