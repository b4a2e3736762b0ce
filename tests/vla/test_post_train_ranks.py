"""Post-training on two ranks, as processes of this machine: one task each, the same
weights, and a rank that is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.observe.metrics import read_metrics
from hilt.replay import Log
from hilt.vla.train import begin_run, resume_run, train
from tests.vla.test_train import MEASURED
from tests.vla.toy_vla import DOWN, UP, config, weights

pytestmark = pytest.mark.peers  # three pairs of processes, each of which imports torch

TWO = (
    "placement.kind=processes",
    "placement.ranks=2",
    "placement.wait_seconds=60",
    "checkpoint_period=1",
    "max_steps=3",
)


def started(run: Path, *changes: Any, **more: Any) -> Any:
    settings = config(*TWO, *changes)
    begin_run(run, "", settings)
    return train(settings, run, **more)


def tasks(run: Path, rank: int) -> set[str]:
    with Log.open(run / "rollouts" / f"rank-{rank}", "r") as log:
        return {str(log.facts.about(trajectory)["task"]) for trajectory in log.trajectories()}


def told(run: Path) -> list[dict[str, Any]]:
    return [{n: v for n, v in one.items() if n not in MEASURED} for one in read_metrics(run, ["update"])]


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    known = [name for name in ours if "trajectory" not in name and "log_end" not in name]
    return set(ours) == set(theirs) and all(np.array_equal(ours[name], theirs[name]) for name in known)


def test_a_task_each_and_on_after_a_rank_was_killed_or_all_were_stopped(tmp_path: Path):
    whole, killed, parts = tmp_path / "whole", tmp_path / "killed", tmp_path / "parts"
    assert started(whole).reason == "max_steps"
    assert tasks(whole, 0) == {UP} and tasks(whole, 1) == {DOWN}
    record = next(one for one in read_metrics(whole, ["update"]) if "used_episodes" in one)
    assert record["used_episodes"] == record["trajectories"] == 32, "both ranks' together"

    said: list[str] = []

    def kill() -> None:
        while not (killed / "checkpoints" / "1").exists():
            time.sleep(0.01)
        for child in multiprocessing.active_children():
            if child.name == "hilt-rank-1" and child.pid:
                os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert started(killed, notify=said.append).reason == "max_steps"
    thread.join(60)
    assert any(
        "rank 1 of 2 is gone: its process was killed by SIGKILL" in line and "started again" in line for line in said
    )
    assert same(whole, killed) and told(whole) == told(killed)

    assert started(parts, stop=lambda: (parts / "checkpoints" / "1").exists()).reason == "stopped"
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("hilt-rank")]
    assert train(resume_run(parts, "", []), parts).reason == "max_steps"
    assert same(whole, parts) and told(whole) == told(parts)


def test_with_another_number_of_ranks_what_was_learned_goes_on(tmp_path: Path):
    run, said = tmp_path / "run", list[str]()
    started(run, "max_steps=1")
    here = ["placement.kind=here", "placement.ranks=1", "placement.wait_seconds=600"]
    one = resume_run(run, "", [*here, "max_steps=2"])
    assert train(one, run, notify=said.append).step == 2
    assert any(
        "had 2 ranks that collect and has 1 now: what was learned goes on, collecting begins anew" in line
        for line in said
    )
