"""Four inserters and four samplers on one store, with eviction going on: every
field of every step that is drawn is checked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, UnknownNameError
from hilt.replay import Log, RateLimiter
from hilt.replay.writer import RunningEpisodes
from tests.effort import rounds
from tests.replay.known_steps import IMAGE, SEGMENT_BYTES, SPACING, columns, length, make_log, same, trajectory
from tests.replay.toy_steps import new_log, observation, step

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

BATCH = 24
DEADLINE_S = 120


def check_steps(batch: Any) -> int:
    """Every field of every element is what its seed and time say."""
    seed, t = batch["policy_version"], batch["actions"][:, 0].astype(np.int64)
    same(dict(batch), {**columns(seed, t), "shape": batch["shape"]}, batch.steps)
    return len(seed)


def check_sequences(batch: Any) -> int:
    """The same, and each window goes on step by step in one episode; where it ends, there is nothing but zeros."""
    mask = batch["mask"]
    seed, t = batch["policy_version"], batch["actions"][:, :, 0].astype(np.int64)
    assert mask[:, 0].all() and (mask[:, :-1] >= mask[:, 1:]).all()
    inside = {name: value for name, value in columns(seed, t).items()} | {"shape": batch["shape"]}
    assert (np.where(mask, seed, seed[:, :1]) == seed[:, :1]).all()
    assert (np.where(mask, t - np.arange(mask.shape[1]), t[:, :1]) == t[:, :1]).all()
    assert not batch["terminated"][:, :-1][mask[:, 1:]].any()
    for name, wanted in inside.items():
        parts = (
            [(batch[name], wanted)] if not isinstance(wanted, dict) else [(batch[name][k], wanted[k]) for k in wanted]
        )
        for got, right in parts:
            assert np.array_equal(got[mask], np.asarray(right)[mask]), name
            assert not got[~mask].any(), name
    return int(mask.sum())


def check_returns(batch: Any) -> int:
    """n-step returns at discount 0.9: sums, bootstraps and the observation that they lead to."""
    seed, t, taken = batch["policy_version"], batch["actions"][:, 0].astype(np.int64), batch["n_steps"]
    first, last = columns(seed, t), columns(seed, t + taken - 1)
    assert ((taken >= 1) & (taken <= 3)).all()
    terms = [np.where(k < taken, 0.9**k * columns(seed, t + k)["rewards"], 0) for k in range(3)]
    assert np.allclose(batch["rewards"], sum(terms))
    assert np.allclose(batch["discounts"], np.where(last["terminated"], 0, 0.9**taken))
    wanted = {**first, **{name: last[name] for name in ("next_observations", "terminated", "truncated")}}
    own = {name: value for name, value in batch.items() if name not in ("rewards", "discounts", "n_steps")}
    same(own, {**{k: v for k, v in wanted.items() if k != "rewards"}, "shape": batch["shape"]}, batch.steps)
    return len(seed)


class Bench:
    """Threads that work until they are told to stop; the first error of any of them stops all."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.counts: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def work(self, name: str, turn: Callable[[int], int]) -> None:
        """Calls `turn(0)`, `turn(1)`, ... and adds up what they return."""
        self.counts[name] = 0

        def run() -> None:
            number = 0
            while not self.stop.is_set():
                try:
                    self.counts[name] += turn(number)
                except BaseException as error:  # noqa: BLE001  # raised by the test
                    if not (self.stop.is_set() and isinstance(error, ClosedError)):
                        self.errors.append(error)
                    self.stop.set()
                number += 1

        self._threads.append(threading.Thread(target=run, name=name))

    def run(
        self, seconds: float, enough: Callable[[], bool] = lambda: True, wake: Callable[[], None] = lambda: None
    ) -> None:
        """For some seconds, and until there was enough of it: on a busy machine that takes longer."""
        for thread in self._threads:
            thread.start()
        self.stop.wait(seconds)
        end = time.monotonic() + DEADLINE_S
        while not (self.stop.wait(0.02) or (min(self.counts.values()) > 0 and enough())):
            assert time.monotonic() < end, self.counts
        self.stop.set()
        wake()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} does not end"
        if self.errors:
            raise self.errors[0]


def inserter_of_steps(log: Log, who: int) -> Callable[[int], int]:
    """Episodes step by step, two at a time; every third one has a gap, every fourth is not ended by its last step."""

    def turn(number: int) -> int:
        seeds = [SPACING * (4 * (2 * number + i) + who) for i in range(2)]
        episodes = [log.episode(actor=f"actor {who}.{i}") for i in range(2)]
        appended = 0
        for t in range(max(map(length, seeds))):
            for episode, seed in zip(episodes, seeds, strict=True):
                gap, early = number % 3 == 0 and t == 2, number % 4 == 0 and t == length(seed) - 1
                if t < length(seed) and not gap and not early:
                    episode.append(columns(seed, t))
                    appended += 1
        for episode in episodes:
            episode.end()
        return appended

    return turn


def inserter_of_trajectories(log: Log, who: int) -> Callable[[int], int]:
    """Whole trajectories; now and then one of the log's is deleted."""

    def turn(number: int) -> int:
        steps, width = 1 + number % 13, 1 + number % 4
        log.add(trajectory(SPACING * (4 * number + who), steps, width))
        if number % 7 == 0:
            with contextlib.suppress(UnknownNameError, ConfigError):  # evicted meanwhile, or still running
                log.delete(log.trajectories()[number % 5])
        return steps * width

    return turn


def sampler_of(log: Log, kind: str) -> Callable[[int], int]:
    if kind == "uniform":
        uniform = log.all().sampler(seed=1)
        return lambda _: check_steps(uniform.sample(BATCH))
    if kind == "prioritized":
        prioritized, rng = log.all().sampler("prioritized", seed=2), np.random.default_rng(0)

        def turn(_: int) -> int:
            batch = prioritized.sample(BATCH)
            prioritized.update_priorities(batch.steps, rng.random(BATCH))
            return check_steps(batch)

        return turn
    if kind == "sequences":
        sequences = (log.by_source("policy", "human") | log.last(50)).sampler(sequence_length=4, seed=3)
        return lambda _: check_sequences(sequences.sample(BATCH // 4))
    returns = log.all().sampler(replace=False, n_step=3, discount=0.9, seed=4)
    return lambda _: check_returns(returns.sample(BATCH))


def run(log: Log, seconds: float, enough: Callable[[], bool] = lambda: True) -> Bench:
    log.add(trajectory(0, 12, 4))
    bench = Bench()
    for who, make in enumerate(
        [inserter_of_steps, inserter_of_steps, inserter_of_trajectories, inserter_of_trajectories]
    ):
        bench.work(f"inserter {who}", make(log, who))
    for kind in ("uniform", "prioritized", "sequences", "returns"):
        bench.work(kind, sampler_of(log, kind))
    bench.run(seconds, enough)
    stats = log.stats()
    assert stats["inserted"] == 48 + sum(n for name, n in bench.counts.items() if name.startswith("inserter"))
    assert stats["steps"] <= log.settings["capacity_steps"]
    check_steps_left(log)
    return bench


def check_steps_left(log: Log) -> None:
    keys = log.all().keys()
    assert len(keys) == len(log)
    sampler = log.all().sampler(replace=False, seed=0)
    for _ in range(len(keys) // BATCH):
        check_steps(sampler.sample(BATCH))
    assert log.damage() == []


def test_writers_and_samplers_side_by_side(tmp_path: Path, counted: Callable[[str], None]):
    with make_log(tmp_path / "log", capacity_steps=1500, durability="never", segment_bytes=4 * SEGMENT_BYTES) as log:

        def enough() -> bool:
            return log.stats()["evicted"] > 1000 and log.stats()["segments_deleted"] > 20

        bench = run(log, rounds(1.0, 30.0), enough)
        stats = log.stats()
        counts = ", ".join(f"{name} {n}" for name, n in bench.counts.items())
        counted(
            f"{counts}; evicted {stats['evicted']}, segments deleted {stats['segments_deleted']}, "
            f"trajectories {stats['trajectories']}"
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": {IMAGE: "zlib"}},
        {"cache_bytes": 4_000_000},
        {"capacity_bytes": 3_000_000, "segment_bytes": 4 * SEGMENT_BYTES},
        {"durability": "at most 5 ms", "segment_bytes": 8 * SEGMENT_BYTES},
    ],
    ids=["compressed", "bounded map", "by bytes", "synced"],
)
def test_writers_and_samplers_side_by_side_with(
    tmp_path: Path, settings: dict[str, Any], counted: Callable[[str], None]
):
    with make_log(tmp_path / "log", **{"capacity_steps": 1000, "durability": "never", **settings}) as log:
        bench = run(log, rounds(0.3, 5.0))
        counted(", ".join(f"{name} {n}" for name, n in bench.counts.items()))


def test_limited(tmp_path: Path):
    """A limiter between two writers and two samplers: the ratio holds at every moment, and nobody waits for ever."""
    with make_log(tmp_path / "log", capacity_steps=500, durability="never") as log:
        limiter = RateLimiter(4.0, 20, min_diff=-400, max_diff=800)
        sampler = log.all().sampler(limiter=limiter, seed=0)
        bench = Bench()

        def sample(_: int) -> int:
            batch = sampler.sample(BATCH, timeout=60)
            diff = limiter.stats()["diff"]
            assert -400 <= diff <= 800
            return check_steps(batch)

        for who in range(2):
            bench.work(f"inserter {who}", inserter_of_steps(log, who))
            bench.work(f"sampler {who}", sample)
        bench.run(rounds(0.3, 5.0), lambda: log.stats()["inserted"] > 40 and log.stats()["sampled"] > 40, limiter.close)
        stats, counts = log.stats(), limiter.stats()
        assert (counts["inserts"], counts["samples"], counts["size"]) == (
            stats["inserted"],
            stats["sampled"],
            stats["steps"],
        )


@pytest.mark.parametrize("chained", [False, True])
def test_threads_that_share_an_episode_store_their_own_images(tmp_path: Path, chained: bool):
    """Whatever the order in which their steps arrive, each comes back as it was given."""
    count, threads = 300, 3
    log = new_log(tmp_path)
    episode, chains = log.episode(), RunningEpisodes(log)
    keys: dict[int, int] = {}

    def work(thread: int) -> None:
        for i in range(count):
            number = 1000 * thread + i
            if chained:
                keys[number] = chains.insert(("arm", "", ""), log.check(step(number)), number, None)
            else:
                keys[number] = episode.append(step(number))

    running = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(120)
    numbers = sorted(keys)
    batch = log.read([keys[number] for number in numbers])
    for i, number in enumerate(numbers):
        assert batch["rewards"][i] == number
        for at, observations in ((number, batch["observations"]), (number + 1, batch["next_observations"])):
            assert (observations["image"][i] == observation(at)["image"]).all(), (number, at)
    assert len(numbers) == count * threads
    log.close()
