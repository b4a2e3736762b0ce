"""RLinf's way from a rollout to the learner: the same batches as of steps, bit for
bit, and RLinf's own files besides."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.compat.rlinf import TrajectoryReplayBuffer
from hilt.compat.rlinf.rollout_experience import FOLDER, RolloutSender
from hilt.core.tree import flatten
from hilt.formats.rlinf_folder import read_index, write_index
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
    made = Learner(
        config(demo_path=[str(shown)], store=store, **changes), run, resume=True, env=spaces(True), wire=wire()
    )
    if store == "log":
        fill(made.experience.log, numbers, **PEOPLE)
    else:
        send(made.experience.channel, numbers)
        made.experience.take()
    return made


def same(a: Any, b: Any) -> bool:
    ours, theirs = flatten(a), flatten(b)
    return ours.keys() == theirs.keys() and all(
        np.asarray(ours[path]).dtype == np.asarray(theirs[path]).dtype and np.array_equal(ours[path], theirs[path])
        for path in ours
    )


@pytest.mark.parametrize(
    "changes", [{"n_step": 1}, FROZEN, {"replay_buffer_capacity": 12, "n_step": 2}], ids=["plain", "frozen", "small"]
)
def test_the_same_episodes_give_the_same_batches_and_the_same_curve(
    memory_path: Path, shown: Path, changes: dict[str, Any]
):
    log, rollouts = (
        learner(memory_path / store, shown, store, range(5), **changes) for store in ("log", "trajectories")
    )
    assert (
        log.experience.counts() == rollouts.experience.counts()
        and log.experience.total == rollouts.experience.total == 25
    )
    for n, part, images in ((16, "both", True), (7, "demo", False), (40, "both", False), (5, "demonstrations", False)):
        assert same(*(each.experience.sample(n, part, images) for each in (log, rollouts)))
    summaries = [each.run() for each in (log, rollouts)]
    assert summaries == [LearnerSummary("max_steps", 10, 25)] * 2
    agents = [load(memory_path / store, 10).agent for store in ("log", "trajectories")]
    assert same(*agents)
    curves = [
        [r["critic_loss"] for r in read_metrics(memory_path / store, ["update"])] for store in ("log", "trajectories")
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 2
    told = [read_metrics(memory_path / store, ["episode"]) for store in ("log", "trajectories")]
    assert [r["length"] for r in told[1]] == [5] * (2 if "replay_buffer_capacity" in changes else 5)
    own = {"time": 0, "elapsed_seconds": 0, "actor": ""}
    assert [r | own for r in told[0]] == [r | own for r in told[1]]


def test_stopped_and_resumed_it_goes_on_bit_for_bit(memory_path: Path, shown: Path):
    changes = {**FROZEN, "checkpoint_period": 6, "max_steps": 12}
    learner(memory_path / "whole", shown, "trajectories", range(5), **changes).run()
    cut = learner(memory_path / "cut", shown, "trajectories", range(5), **changes)
    assert cut.run(lambda: cut.update == 6).update == 6
    again = learner(memory_path / "cut", shown, "trajectories", **changes)
    assert again.experience.total == 25 and again.experience.counts() == {
        "log_steps": 25,
        "demo_steps": 15,
        "human_steps": 5,
    }
    again.run()
    assert same(load(memory_path / "whole", 12).agent, load(memory_path / "cut", 12).agent)
    assert [r["trajectory"] for r in read_metrics(memory_path / "cut", ["episode"])] == [0, 1, 2, 3, 4]
    third = learner(memory_path / "cut", shown, "trajectories", range(5, 6), **{**changes, "max_steps": 13})
    assert third.experience.total == 30
    third.run()
    assert list(read_index(memory_path / "cut" / FOLDER).entries) == list(range(6))


def test_rlinfs_folder_has_every_episode_as_it_was_sent(memory_path: Path, shown: Path):
    """Also those that were still to be written when a learner was killed, and those that the log has forgotten."""
    changes = {"replay_buffer_capacity": 15, "n_step": 3, "max_steps": 0}
    learner(memory_path / "run", shown, "trajectories", range(5), **changes).run()
    folder = memory_path / "run" / FOLDER
    index = read_index(folder)
    del index.entries[3], index.entries[4]
    write_index(folder, index)
    again = learner(memory_path / "run", shown, "trajectories", **changes)
    assert again.experience.counts()["log_steps"] == 15
    again.run()
    with contextlib.closing(TrajectoryReplayBuffer(sample_window_size=0)) as buffer:
        buffer.load_checkpoint(str(folder))
        assert len(buffer) == 5 and buffer.total_samples == 25
        batch = buffer.sample(25)
    steps = {
        tuple(step["observations"]["state"]["point"].tolist()): step
        for number in range(5)
        for step in episode(number, **PEOPLE)
    }
    for i, point in enumerate(batch["curr_obs"]["state"]["point"].tolist()):
        step = steps[tuple(point)]
        assert batch["rewards"][i, 0] == float(step["rewards"]) and batch["terminations"][i, 0] == bool(
            step["terminated"]
        )
        assert batch["next_obs"]["state"]["point"][i].tolist() == step["next_observations"]["state"]["point"].tolist()
        assert batch["intervene_flags"][i].all() == (step["source"] == 1 and not step["lost"])


def test_an_episode_of_another_task_is_left_out(memory_path: Path, shown: Path):
    made = learner(memory_path / "run", shown, "trajectories", max_steps=0)
    channel: Channel[Any] = Channel()
    send(channel, range(2))
    items = [channel.get(timeout=DEADLINE_S) for _ in range(2)]
    items[0]["trajectory"]["actions"] = items[0]["trajectory"]["actions"][..., :1]
    for item in (*items, {"actor": "arm", "trajectory": {}}):
        made.experience.channel.put(item)
    made.experience.take()
    assert made.experience.total == 5
    made.run()
    events = [r["event"] for r in read_metrics(memory_path / "run", ["event"])]
    assert sum("an episode of arm does not fit this run, and is left out" in event for event in events) == 2


def test_an_episode_that_is_handed_over_twice_counts_once(memory_path: Path, shown: Path):
    made = learner(memory_path / "run", shown, "trajectories", max_steps=0)
    channel: Channel[Any] = Channel()
    send(channel, range(2))
    items = [channel.get(timeout=DEADLINE_S) for _ in range(2)]
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
    with TrainerClient("arm", "127.0.0.1", made.server.config, wait_for_server=DEADLINE_S) as client:
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
