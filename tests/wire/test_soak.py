"""Eight actors at 20 Hz for a long time, with a fault now and then: memory stays
flat, lag is stated, every step arrives exactly once.

An hour, or HILT_SOAK_SECONDS. The learner's buffers are bounded, so that old steps go; a reader
beside the learner checks every step before that.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.replay import Log
from hilt.replay.maintenance.repair import verify
from tests.wire.actor_main import told_by
from tests.wire.journal import said, wait_for
from tests.wire.processes import DEADLINE_S, Actor, Learner, end_all, kill_all
from tests.wire.proxy import Proxy
from tests.wire.steps import STORES, Arrived

SECONDS = float(os.environ.get("HILT_SOAK_SECONDS", "3600"))
SEED = int(os.environ.get("HILT_FAULT_SEED", "0"))
ACTORS, HERTZ = 8, 20
KILLED = (0, 1, 2)
"""Actors that are killed now and then; the others live from the beginning to the
end, so that their memory is comparable."""
CAPACITY = 12_000
"""Steps that a buffer keeps: a minute's worth and more."""
EVERY_S = 7.0
WARM_UP = 0.3
"""The part of the time after which memory must be flat."""
GROWTH_BYTES = 6 << 20

pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS * 1.5 + 300)]


class Audit:
    """Reads the learner's logs from beside it, and what it holds in memory."""

    def __init__(self, learner: Learner, actors: list[Actor]):
        self._learner, self._actors = learner, actors
        self.arrived = {store: Arrived(store) for store in STORES}
        self.memory: dict[str, list[tuple[float, int]]] = {}
        self._began = time.monotonic()

    def look(self) -> None:
        for store, arrived in self.arrived.items():
            with Log.open(self._learner.folder / store, "r") as log:
                arrived.look(log)

    def weigh(self) -> None:
        parts: list[tuple[str, Any]] = [("learner", self._learner)]
        parts += [(f"actor {actor.number}", actor) for actor in self._actors if actor.number not in KILLED]
        for name, part in parts:
            self.memory.setdefault(name, []).append((time.monotonic() - self._began, part.child.memory_bytes()))

    def growth(self, name: str) -> tuple[float, float]:
        """The median in the time after warming up, and how much more the last part of the time has."""
        values = [(at / SECONDS, nbytes) for at, nbytes in self.memory[name]]
        middle = statistics.median(nbytes for at, nbytes in values if WARM_UP <= at < WARM_UP + 0.2)
        end = statistics.median(nbytes for at, nbytes in values if at >= 0.85)
        return middle, end - middle


def test_hours_of_it(tmp_path: Path, counted: Callable[[str], None]):
    rng, faults = random.Random(SEED), Counter[str]()
    epoch = time.monotonic()
    learner = Learner(tmp_path, "--capacity", CAPACITY, "--publish", 1, "--epoch", epoch)
    proxies = [Proxy(learner.port, learner.broadcast) for _ in range(ACTORS)]
    actors: list[Actor] = []
    try:
        learner.wait_ready()
        for number, proxy in enumerate(proxies):
            options = ("--hertz", HERTZ, "--epoch", epoch)
            actors.append(Actor(tmp_path, number, proxy.ports, *options, disk=number % 2 == 0))
        for actor in actors:
            wait_for(lambda actor=actor: actor.inserted() > HERTZ, f"actor {actor.number}", DEADLINE_S)
        audit = Audit(learner, actors)
        end, next_fault = time.monotonic() + SECONDS, time.monotonic() + EVERY_S
        killed_learner = False
        while time.monotonic() < end:
            time.sleep(2)
            audit.look()
            audit.weigh()
            for part in (learner, *actors):
                part.check_errors()
                assert part.child.alive(), "a process ended by itself"
            if time.monotonic() >= next_fault:
                next_fault = time.monotonic() + rng.uniform(0.5, 1.5) * EVERY_S
                if not killed_learner and end - time.monotonic() < SECONDS * (1 - WARM_UP / 2):
                    killed_learner = True
                    faults["learner killed"] += 1
                    learner.child.kill()
                    learner.restart()
                    learner.wait_ready(2)
                else:
                    faults[disturb(rng, learner, actors, proxies)] += 1
        for proxy in proxies:
            proxy.heal()
        end_all(actors, learner)
        audit.look()
    except BaseException:
        counted(f"failed with seed {SEED} after {time.monotonic() - epoch:.0f} s; faults {dict(faults)}")
        raise
    finally:
        kill_all(learner.child, *(actor.child for actor in actors))
        for proxy in proxies:
            proxy.close()
    told = told_by({life: path for actor in actors for life, path in actor.journals().items()})
    for store in STORES:
        counts = audit.arrived[store].check(told[store], [actor.number for actor in actors if actor.disk])
        counted(
            f"{store}: {audit.arrived[store].steps} steps exactly once from "
            f"{len(audit.arrived[store].boots)} boots; {dict(counts)}"
        )
        report = verify(learner.folder / store)
        assert report.ok, "; ".join(str(finding) for finding in report.findings)
    lag = np.array([[float(value) for value in line[1:]] for line in said(learner.journal, "lag")])
    counted(f"{SECONDS:g} s, seed {SEED}, {sum(faults.values())} faults {dict(faults)}")
    usual = f"p50 {np.median(lag[:, 0]):.1f} ms, p99 {np.median(lag[:, 1]):.1f} ms (medians over quarters of a second)"
    counted(f"lag from insert to the callback: {usual}; with faults at most {lag[:, 2].max():.0f} ms")
    for name in audit.memory:
        middle, more = audit.growth(name)
        counted(f"{name}: {middle / 2**20:.1f} MiB after warming up, {more / 2**20:+.2f} MiB at the end")
    for name in audit.memory:
        assert audit.growth(name)[1] < GROWTH_BYTES, (
            f"the memory of {name} grows: {[nbytes >> 20 for _, nbytes in audit.memory[name]][::20]} MiB"
        )


def disturb(rng: random.Random, learner: Learner, actors: list[Actor], proxies: list[Proxy]) -> str:
    """One fault, mended before it returns."""
    kind = rng.choice(
        [
            "actor killed",
            "actor paused",
            "learner paused",
            "connections cut",
            "cut in the middle",
            "refused",
            "stalled",
            "slow",
        ]
    )
    number, seconds = rng.randrange(ACTORS), rng.uniform(0.1, 1.5)
    proxy = proxies[number]
    if kind == "actor killed":
        actor = actors[rng.choice(KILLED)]
        actor.child.kill()
        actor.restart()
        return kind
    if kind.endswith("paused"):
        child = learner.child if kind == "learner paused" else actors[number].child
        child.signal(signal.SIGSTOP)
        time.sleep(seconds)
        child.signal(signal.SIGCONT)
        return kind
    change: dict[str, Callable[[], object]] = {
        "connections cut": lambda: [each.cut() for each in proxies],
        "cut in the middle": lambda: proxy.cut_after(rng.randrange(5000)),
        "refused": proxy.refuse,
        "stalled": proxy.stall,
        "slow": lambda: proxy.slow(5_000),
    }
    change[kind]()
    time.sleep(seconds)
    proxy.heal()
    return kind
