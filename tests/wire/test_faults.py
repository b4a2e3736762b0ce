"""Four actors with two stores each and a learner, while processes are killed and
paused and the network is cut, stalled and slowed.

Two actors spool on disk: whatever they inserted arrives, though they are killed themselves. Two spool in memory:
whatever was acknowledged is there, though the learner is killed. Each exactly once, in order, pixel for pixel.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hilt.wire.keys import new_keys
from tests.effort import rounds
from tests.wire.journal import said, wait_for
from tests.wire.processes import DEADLINE_S, Actor, Learner, check_exactly_once, end_all, kill_all
from tests.wire.proxy import DOWN, UP, Proxy
from tests.wire.steps import STORES

FAULTS, FAULTS_WITH_KEYS = (int(number) for number in os.environ.get("HILT_FAULTS", rounds("14 10", "210 60")).split())
SEED = int(os.environ.get("HILT_FAULT_SEED", "0"))
ACTORS = 4


class Chaos:
    """Makes faults, and mends each after a while, so that several overlap."""

    def __init__(self, rng: random.Random, learner: Learner, actors: list[Actor], proxies: list[Proxy]):
        self._rng, self._learner, self._actors, self._proxies = rng, learner, actors, proxies
        self._mends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.counts: Counter[str] = Counter()
        self.history: list[str] = []
        self._began = time.monotonic()
        self._kinds: dict[str, tuple[float, Callable[[], str]]] = {
            "learner killed": (10, self._kill_learner),
            "learner paused": (8, self._pause_learner),
            "actor killed": (16, self._kill_actor),
            "actor paused": (12, self._pause_actor),
            "connections cut": (14, self._cut),
            "cut in the middle of a message": (16, self._cut_in_the_middle),
            "connections refused": (6, self._refuse),
            "network stalled": (10, self._stall),
            "network slow": (6, self._slow),
            "network delayed": (4, self._delay),
        }

    def run(self, faults: int) -> None:
        """Each kind once, then at random."""
        kinds = list(self._kinds)
        first = self._rng.sample(kinds, len(kinds))
        for kind in [*first, *self._rng.choices(kinds, [self._kinds[name][0] for name in kinds], k=faults)][:faults]:
            detail = self._kinds[kind][1]()
            self.counts[kind] += 1
            self.history.append(f"{time.monotonic() - self._began:.2f} {kind} {detail}")
            self.wait(self._rng.uniform(0.12, 0.32))
        self.wait(0, all_of_them=True)

    def wait(self, seconds: float, all_of_them: bool = False) -> None:
        """Mends what is due meanwhile."""
        end = time.monotonic() + seconds
        while self._mends and (all_of_them or self._mends[0][0] <= end):
            due, _, mend = heapq.heappop(self._mends)
            if not all_of_them:
                time.sleep(max(0.0, due - time.monotonic()))
            mend()
        time.sleep(max(0.0, end - time.monotonic()))

    def _later(self, shortest: float, longest: float, mend: Callable[[], None]) -> str:
        seconds = self._rng.uniform(shortest, longest)
        heapq.heappush(self._mends, (time.monotonic() + seconds, next(self._number), mend))
        return f"for {seconds:.2f} s"

    def _kill_learner(self) -> str:
        self._learner.child.kill()
        return self._later(0, 0.3, self._restart_learner)

    def _restart_learner(self) -> None:
        if not self._learner.child.alive():
            self._learner.restart()

    def _pause_learner(self) -> str:
        child = self._learner.child
        child.signal(signal.SIGSTOP)
        return self._later(0.05, 0.8, lambda: child.signal(signal.SIGCONT))

    def _kill_actor(self) -> str:
        actor = self._rng.choice(self._actors)
        actor.child.kill()
        return f"{actor.number} {self._later(0, 0.2, lambda: None if actor.child.alive() else actor.restart())}"

    def _pause_actor(self) -> str:
        actor = self._rng.choice(self._actors)
        child = actor.child
        child.signal(signal.SIGSTOP)
        return f"{actor.number} {self._later(0.05, 0.8, lambda: child.signal(signal.SIGCONT))}"

    def _cut(self) -> str:
        which = self._rng.choice([[0], [1], [2], [3], [0, 1, 2, 3]])
        return f"{which}: {[self._proxies[i].cut() for i in which]} connections"

    def _cut_in_the_middle(self) -> str:
        i, way, nbytes = (
            self._rng.randrange(ACTORS),
            self._rng.choice([UP, UP, DOWN]),
            self._rng.choice([1, 50, 700, 3000, 20_000]),
        )
        self._proxies[i].cut_after(self._rng.randrange(nbytes), way)
        return f"{i} {way}"

    def _refuse(self) -> str:
        i = self._rng.randrange(ACTORS)
        self._proxies[i].refuse()
        return f"{i} {self._later(0.1, 1.0, self._proxies[i].heal)}"

    def _stall(self) -> str:
        i, ways = self._rng.randrange(ACTORS), self._rng.choice([[], [UP], [DOWN]])
        self._proxies[i].stall(*ways)
        longest = 7.0 if self._rng.random() < 0.1 else 1.0  # long enough to be taken for a pulled cable
        return f"{i} {ways} {self._later(longest / 2, longest, self._proxies[i].heal)}"

    def _slow(self) -> str:
        i = self._rng.randrange(ACTORS)
        self._proxies[i].slow(self._rng.choice([5_000, 50_000]))
        return f"{i} {self._later(0.3, 1.5, self._proxies[i].heal)}"

    def _delay(self) -> str:
        i = self._rng.randrange(ACTORS)
        self._proxies[i].delay(self._rng.uniform(0.02, 0.3))
        return f"{i} {self._later(0.3, 1.5, self._proxies[i].heal)}"


def test_exactly_once_under_faults(memory_path: Path, counted: Callable[[str], None]):
    survive(memory_path, counted, FAULTS, [[]] * (1 + ACTORS))


def test_exactly_once_under_faults_with_curve_keys(memory_path: Path, counted: Callable[[str], None]):
    names = ["learner", *(f"actor-{number}" for number in range(ACTORS))]
    new_keys(memory_path / "keys", names)
    survive(
        memory_path,
        counted,
        FAULTS_WITH_KEYS,
        [["--keys", str(memory_path / "keys"), "--key-name", name] for name in names],
    )


def survive(folder: Path, counted: Callable[[str], None], faults: int, options: list[list[str]]) -> None:
    """`options` are those of the learner and of each actor."""
    rng = random.Random(SEED)
    learner = Learner(folder, *options[0])
    proxies = [Proxy(learner.port, learner.broadcast) for _ in range(ACTORS)]
    actors: list[Actor] = []
    chaos = Chaos(rng, learner, actors, proxies)
    try:
        learner.wait_ready()
        for number, proxy in enumerate(proxies):
            eager = ["--eager"] if number >= 2 else []
            actors.append(Actor(folder, number, proxy.ports, *options[1 + number], *eager, disk=number % 2 == 0))
        for actor in actors:
            wait_for(lambda actor=actor: actor.inserted() > 20, f"actor {actor.number}", DEADLINE_S)
        chaos.run(faults)
        heal(learner, actors, proxies)
        final = learner.published() + 1
        wait_for(lambda: learner.published() > final, "two more versions of the weights", DEADLINE_S)
        for actor in actors:
            wait_for(
                lambda actor=actor: actor.check_weights() >= final,
                f"actor {actor.number} to get the newest weights",
                DEADLINE_S,
            )
        end_all(actors, learner)
        found = check_exactly_once(learner, actors)
    except BaseException:
        counted(f"failed with seed {SEED}, HILT_FAULT_SEED={SEED} repeats the faults; so far {dict(chaos.counts)}")
        counted("the last faults: " + "; ".join(chaos.history[-12:]))
        raise
    finally:
        kill_all(learner.child, *(actor.child for actor in actors))
        for proxy in proxies:
            proxy.close()
    assert sum(chaos.counts.values()) == faults
    middle = sum(proxy.counts["cut in the middle"] for proxy in proxies)
    counted(f"seed {SEED}, {faults} faults: {dict(chaos.counts.most_common())}; {middle} cuts hit a message")
    lives = f"{learner.lives} lives of the learner, {[actor.lives for actor in actors]} of the actors"
    for store in STORES:
        arrived, counts = found[store]
        counted(f"{store}: {arrived.steps} steps exactly once, from {len(arrived.boots)} boots, {lives}; {counts}")
        assert counts["promised"] > faults / 4, "enough to mean something, also from actors on a busy machine"


def heal(learner: Learner, actors: list[Actor], proxies: list[Proxy]) -> None:
    """Everybody runs, and everything passes."""
    for proxy in proxies:
        proxy.heal()
    for part in (learner, *actors):
        if not part.child.alive():
            part.restart()
        part.child.signal(signal.SIGCONT)
    for part in (learner, *actors):
        part.check_errors()
    for actor in actors:
        wait_for(
            lambda actor=actor: said(actor.journal(), "connected"),
            f"actor {actor.number} to reach the learner",
            DEADLINE_S,
        )
        wait_for(
            lambda actor=actor: said(actor.journal(), "ack"),
            f"a step of actor {actor.number} to be acknowledged",
            DEADLINE_S,
        )
