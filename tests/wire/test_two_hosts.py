"""A learner and an actor on two hosts, with keys, and a cable that is pulled while the robot goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.effort import rounds
from tests.wire.hosts import Hosts, why_not
from tests.wire.journal import said, wait_for
from tests.wire.processes import DEADLINE_S, Actor, Learner, check_exactly_once, end_all, kill_all
from tests.wire.steps import ENV

PULLED_S = float(os.environ.get("HILT_PULLED_SECONDS", rounds(8, 30)))
HERTZ = 20


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    made = Hosts("actor", "learner")
    yield made
    made.close()


def make_keys(folder: Path, *actors: str) -> dict[str, str]:
    """Makes keys, and gives each host only those that it needs. Returns the folders by name."""
    command = [
        sys.executable,
        "-c",
        "from hilt.cli import main; main()",
        "keys",
        "new",
        "learner",
        *actors,
        "--dir",
        str(folder / "all"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    needs = {"learner": ["learner.key", *(f"{name}.pub" for name in actors)]} | {
        name: [f"{name}.key", "learner.pub"] for name in actors
    }
    for name, files in needs.items():
        (folder / name).mkdir()
        for file in files:
            shutil.copy(folder / "all" / file, folder / name / file)  # with its mode
    return {name: str(folder / name) for name in needs}


def test_a_cable_is_pulled_and_plugged_in_again(hosts: Hosts, memory_path: Path, counted: Callable[[str], None]):
    keys = make_keys(memory_path / "keys", "actor-0", "actor-1")
    bound = ("--bind", hosts.address["learner"], "--keys", keys["learner"])
    learner = Learner(memory_path, *bound, port=5588, broadcast=5589, prefix=hosts.on("learner"))
    actors: list[Actor] = []
    try:
        learner.wait_ready()
        for number, disk in enumerate((True, False)):
            options = ("--host", hosts.address["learner"], "--hertz", HERTZ, "--keys", keys[f"actor-{number}"])
            actors.append(Actor(memory_path, number, (5588, 5589), *options, disk=disk, prefix=hosts.on("actor")))
        for actor in actors:
            wait_for(
                lambda actor=actor: actor.check_weights() and said(actor.journal(), "ack"),
                "steps and weights to pass",
                DEADLINE_S,
            )
        hosts.pull("actor")
        time.sleep(1)  # what was under way
        before = [(actor.inserted(), len(said(actor.journal(), "ack")), actor.check_weights()) for actor in actors]
        time.sleep(PULLED_S - 1)
        during = [(actor.inserted(), len(said(actor.journal(), "ack")), actor.check_weights()) for actor in actors]
        newest = learner.published()
        hosts.plug("actor")
        for actor, (inserted, acks, version), (later, acks_later, version_later) in zip(
            actors, before, during, strict=True
        ):
            assert later > inserted + PULLED_S, "the actor stood still while the cable was pulled"
            assert (acks, version) == (acks_later, version_later), "something passed through a pulled cable"
            assert newest > version
            wait_for(
                lambda actor=actor: actor.check_weights() >= newest,
                f"actor {actor.number} to get the newest weights",
                DEADLINE_S,
            )
        end_all(actors, learner)
        found = check_exactly_once(learner, actors)
    finally:
        kill_all(learner.child, *(actor.child for actor in actors))
    arrived, counts = found[ENV]
    assert all(len(arrived.order[actor.number, 0]) == len(set(arrived.order[actor.number, 0])) for actor in actors)
    held = sum(later - inserted for (inserted, *_), (later, *_) in zip(before, during, strict=True))
    counted(f"cable pulled for {PULLED_S:g} s: {held} inserts meanwhile; {arrived.steps} steps exactly once; {counts}")
