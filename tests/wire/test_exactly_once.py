"""Each way in which agentlace lost steps or delivered them twice, alone: here it does neither.

The numbers in the first tests are those of runs of the original: 7 sent, 2 arrived;
6 sent, none arrived; and `update` said True.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hilt.core.errors import DeadlineError
from hilt.replay import Log, Queue, QueuedDataStore
from hilt.replay.writer import EpisodeWriter
from hilt.wire import TrainerClient, TrainerServer, link, make_trainer_config
from tests.effort import rounds
from tests.wire.journal import wait_for
from tests.wire.processes import DEADLINE_S, Learner, free_port, kill_all
from tests.wire.proxy import DOWN, UP, Proxy
from tests.wire.steps import (
    ENV,
    INTERVENTION,
    LENGTH,
    STORES,
    Arrived,
    Told,
    check_log,
    check_pixels,
    make_buffer,
    transition,
    wanted_in,
)

FLUSH_MS = DEADLINE_S * 1000


class Bench:
    """A learner in this process, its ports, and actors that come and go."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port, self.broadcast = free_port(), free_port()
        self.told: dict[str, dict[tuple[int, int], Told]] = {store: {} for store in STORES}
        self.callbacks: list[tuple[str, int]] = []
        self._ending = ExitStack()
        self._learner: ExitStack | None = None

    def config(self, ports: Sequence[int] = ()) -> Any:
        return make_trainer_config(*(ports or (self.port, self.broadcast)))

    def start_learner(self, wrap: Callable[[Any], Any] = lambda buffer: buffer, **settings: Any) -> TrainerServer:
        self._learner = ExitStack()
        server = TrainerServer(
            self.config(), data_callback=lambda store, payload: self.callbacks.append((store, len(payload["data"])))
        )
        for store in STORES:
            buffer = make_buffer(self.folder / store, **settings)
            self._learner.callback(buffer.close)
            server.register_data_store(store, wrap(buffer))
        server.start(threaded=True)
        self._learner.callback(server.stop)
        return server

    def stop_learner(self) -> None:
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    @contextmanager
    def actor(
        self, number: int, life: int = 0, ports: Sequence[int] = (), name: str = "", already: int = 0, **spool: Any
    ) -> Iterator[BenchActor]:
        """An actor with two stores, in which some steps are `already` when it connects.

        `spool` goes to its spools; a path becomes one folder per store.
        """
        path = spool.pop("path", None)
        settings = {"capacity": 1000, **spool}
        spools = {store: QueuedDataStore(path=path / store if path else None, **settings) for store in STORES}
        actor = BenchActor(self, number, life, spools)
        actor.insert(already)
        actor.client = TrainerClient(
            name or f"actor-{number}", "127.0.0.1", self.config(ports), data_stores=spools, wait_for_server=True
        )
        try:
            yield actor
        finally:
            actor.client.stop()
            for each in spools.values():
                each.close()

    def check(self, disk: Sequence[int] = ()) -> dict[str, Arrived]:
        """Ends the learner; whatever was promised is in its logs exactly once."""
        self.stop_learner()
        return {store: check_log(self.folder / store, store, self.told[store], disk)[0] for store in STORES}


class BenchActor:
    client: TrainerClient

    def __init__(self, bench: Bench, number: int, life: int, spools: dict[str, QueuedDataStore]):
        self.number, self.life, self.spools = number, life, spools
        self._told = {store: bench.told[store].setdefault((number, life), Told()) for store in STORES}
        self._fresh = itertools.count()

    def insert(self, count: int) -> None:
        for n in itertools.islice(self._fresh, count):
            for store, spool in self.spools.items():
                if wanted_in(store, n):
                    self._told[store].begun = n
                    self._told[store].inserted[n] = spool.insert(transition(self.number, self.life, n))

    def flush(self, timeout_ms: int = FLUSH_MS) -> Any:
        done = self.client.update(timeout_ms=timeout_ms)
        self.look()
        return done

    def look(self) -> None:
        for store, known in self.client.stats()["stores"].items():
            self._told[store].acknowledged = max(self._told[store].acknowledged, known["process_safe"])

    def wait_empty(self) -> None:
        """Until nothing is kept: everything is power-safe at the learner."""
        wait_for(
            lambda: not any(len(spool) for spool in self.spools.values()), "power-safe acknowledgments", DEADLINE_S
        )


@pytest.fixture
def bench(memory_path: Path) -> Iterator[Bench]:
    made = Bench(memory_path)
    yield made
    made.stop_learner()


def arrived_in(folder: Path) -> int:
    """How many steps a log holds now, seen from beside its writer."""
    try:
        with Log.open(folder, "r") as log:
            return len(log)
    except Exception:  # noqa: BLE001 - it may be in the middle of being made
        return 0


def test_two_actors_on_one_store(bench: Bench):
    bench.start_learner()
    with bench.actor(1) as first, bench.actor(2) as second:
        first.insert(5)
        assert first.flush()
        second.insert(2)
        assert second.flush()
    assert bench.check()[ENV].steps == 7


def test_two_actors_with_one_name_at_the_same_time(bench: Bench):
    bench.start_learner()
    with bench.actor(1, name="twin") as first, bench.actor(2, name="twin") as second:
        for _ in range(20):
            first.insert(3)
            second.insert(3)
        assert first.flush() and second.flush()
    found = bench.check()
    assert found[ENV].steps == 120
    assert len(found[ENV].boots) == 2


def test_an_actor_that_starts_again_begins_at_0_and_loses_nothing(bench: Bench):
    bench.start_learner()
    for life, count in enumerate((50, 6, 6)):
        with bench.actor(1, life) as actor:
            actor.insert(count)
            assert actor.flush()
    assert bench.check()[ENV].steps == 62


def test_an_actor_that_starts_again_sends_what_its_disk_kept(bench: Bench):
    """Nobody listens while it inserts; its next life brings everything."""
    bench.start_learner()
    with Proxy(bench.port, bench.broadcast) as proxy:
        with bench.actor(1, 0, proxy.ports, path=bench.folder / "spool") as actor:
            proxy.refuse()
            actor.insert(40)
            assert not actor.flush(300)
        proxy.heal()
        with bench.actor(1, 1, proxy.ports, path=bench.folder / "spool") as actor:
            actor.insert(10)
            assert actor.flush()
            actor.wait_empty()
        with bench.actor(1, 2, proxy.ports, path=bench.folder / "spool") as actor:
            assert actor.flush()
    assert bench.check(disk=[1])[ENV].steps == 50


def test_an_actor_that_starts_again_does_not_send_twice_what_it_did_not_know_had_arrived(bench: Bench):
    bench.start_learner()
    with Proxy(bench.port, bench.broadcast) as proxy:
        with bench.actor(1, 0, proxy.ports, path=bench.folder / "spool") as actor:
            actor.insert(10)
            assert actor.flush()
            proxy.stall(DOWN)
            actor.insert(30)
            wait_for(lambda: arrived_in(bench.folder / ENV) > 10, "the learner to get some", DEADLINE_S)
            assert not actor.flush(200)
        proxy.cut()
        proxy.heal()
        with bench.actor(1, 1, proxy.ports, path=bench.folder / "spool") as actor:
            actor.insert(5)
            assert actor.flush()
    assert bench.check(disk=[1])[ENV].steps == 45


def test_a_learner_that_starts_again_gets_nothing_twice(bench: Bench):
    bench.start_learner()
    with bench.actor(1) as actor:
        for _ in range(4):
            actor.insert(30)
            assert actor.flush()
            bench.stop_learner()
            actor.insert(10)
            assert not actor.flush(200)
            bench.start_learner()
        assert actor.flush()
    assert bench.check()[ENV].steps == 160


def test_a_learner_killed_before_it_could_acknowledge(memory_path: Path):
    """It had stored the steps, nobody knew, and it was killed. The next one knows from the log."""
    bench, learner = Bench(memory_path), Learner(memory_path)
    bench.folder = learner.folder
    try:
        learner.wait_ready()
        with Proxy(learner.port, learner.broadcast) as proxy, bench.actor(1, 0, proxy.ports) as actor:
            actor.insert(20)
            assert actor.flush()
            proxy.stall(DOWN)
            actor.insert(40)
            wait_for(lambda: arrived_in(learner.folder / ENV) > 20, "the learner to get some", DEADLINE_S)
            actor.look()
            learner.child.kill()
            learner.restart()
            learner.wait_ready(2)
            proxy.cut()
            proxy.heal()
            assert actor.flush()
        learner.stop()
        assert bench.check()[ENV].steps == 60
    finally:
        kill_all(learner.child)


def test_acknowledgments_that_are_lost(bench: Bench):
    """The steps arrive, the answers do not. The learner says what it has when it is
    asked again, and nothing is stored again."""
    bench.start_learner()
    with Proxy(bench.port, bench.broadcast) as proxy, bench.actor(1, 0, proxy.ports) as actor:
        for _ in range(5):
            before = arrived_in(bench.folder / ENV)
            proxy.stall(DOWN)
            actor.insert(20)
            wait_for(
                lambda before=before: arrived_in(bench.folder / ENV) > before, "the learner to get some", DEADLINE_S
            )
            assert not actor.client.wait_acknowledged(ENV, before, timeout=0)
            proxy.cut()
            proxy.heal()
            assert actor.flush()
    assert bench.check()[ENV].steps == 100


def test_steps_that_the_learner_has_let_go_of_do_not_come_again(memory_path: Path):
    """They were stored, evicted to make room, and the learner was killed, before their sender knew any of it."""
    bench, learner = Bench(memory_path), Learner(memory_path, "--capacity", 60)
    bench.folder = learner.folder
    try:
        learner.wait_ready()
        with Proxy(learner.port, learner.broadcast) as proxy:
            proxy.stall_answers_after(25_000)  # more than a greeting, less than the steps
            with bench.actor(1, 0, proxy.ports, already=LENGTH) as unaware:
                wait_for(
                    lambda: arrived_in(learner.folder / ENV) == LENGTH, "the learner to get an episode", DEADLINE_S
                )
                with bench.actor(2, 0, (learner.port, learner.broadcast)) as other:
                    other.insert(20 * LENGTH)
                    assert other.flush()
                learner.child.kill()
                learner.restart()
                learner.wait_ready(2)
                assert not unaware.client.wait_acknowledged(ENV, 0, timeout=0)
                proxy.cut()
                proxy.heal()
                assert unaware.flush()
        learner.stop()
        found = Arrived(ENV)
        with Log.open(learner.folder / ENV) as log:
            found.look(log)
        assert found.order[1, 0] == []
        assert len(found.order[2, 0]) <= 60
    finally:
        kill_all(learner.child)


@pytest.mark.parametrize("way", [UP, DOWN])
def test_connections_that_end_in_the_middle_of_a_message(bench: Bench, way: str):
    bench.start_learner()
    with Proxy(bench.port, bench.broadcast) as proxy, bench.actor(1, 0, proxy.ports) as actor:
        sizes = (1, 9, 70, 500, 2000, 6000, 15_000) if way == UP else (1, 9, 70, 200, 500)
        for cuts, nbytes in enumerate(sizes[:: rounds(3, 1)], 1):
            proxy.cut_after(nbytes, way)
            actor.insert(15)
            wait_for(lambda cuts=cuts: proxy.counts["cut in the middle"] == cuts, f"{nbytes} bytes to pass", DEADLINE_S)
        assert actor.flush()
    assert bench.check()[ENV].steps == 15 * cuts


def test_a_slow_learner_is_waited_for_and_gets_nothing_twice(memory_path: Path):
    """Upstream took a timeout for success. Here `update` says what it knows, and the rest is said by the next one."""
    bench, learner = Bench(memory_path), Learner(memory_path)
    bench.folder = learner.folder
    try:
        learner.wait_ready()
        with Proxy(learner.port, learner.broadcast) as proxy, bench.actor(1, 0, proxy.ports) as actor:
            proxy.slow(40_000)
            actor.insert(60)
            done = actor.flush(50)
            assert not done
            assert done.waiting > 0
            proxy.slow(400_000)
            assert actor.flush()
        learner.stop()
        assert bench.check()[ENV].steps == 60
    finally:
        kill_all(learner.child)


def test_a_paused_learner(memory_path: Path):
    """Silent for longer than it takes to be thought dead."""

    bench, learner = Bench(memory_path), Learner(memory_path)
    bench.folder = learner.folder
    try:
        learner.wait_ready()
        with bench.actor(1, 0, (learner.port, learner.broadcast)) as actor:
            actor.insert(10)
            assert actor.flush()
            learner.child.signal(signal.SIGSTOP)
            actor.insert(20)
            assert not actor.flush(6_500)
            learner.child.signal(signal.SIGCONT)
            assert actor.flush()
        learner.stop()
        assert bench.check()[ENV].steps == 30
    finally:
        kill_all(learner.child)


def test_inserting_while_it_is_sent(bench: Bench):
    """Upstream asked for the newest number and for the data in two calls; what came between was sent twice."""
    bench.start_learner()
    with bench.actor(1) as actor:
        inserter = threading.Thread(target=lambda: [actor.insert(1) for _ in range(400)])
        inserter.start()
        while inserter.is_alive():
            assert actor.client.update(timeout_ms=FLUSH_MS)
        inserter.join()
        assert actor.flush()
    assert bench.check()[ENV].steps == 400


def test_update_promises_only_what_was_inserted_before(bench: Bench):
    bench.start_learner()
    with bench.actor(1) as actor:
        for _ in range(30):
            actor.insert(1)
            before = actor.spools[ENV].latest_data_id()
            assert actor.flush()
            assert actor.client.wait_acknowledged(ENV, before, timeout=0)
            assert arrived_in(bench.folder / ENV) >= before + 1


@pytest.mark.parametrize(("full", "arrive"), [("spill", range(200)), ("drop_oldest", range(150, 200))])
def test_a_full_spool(bench: Bench, full: str, arrive: range):
    """While there is no learner, more is inserted than memory may hold."""
    bench.start_learner()
    with bench.actor(1, capacity=50, full=full) as actor:
        bench.stop_learner()
        actor.insert(200)
        done = actor.flush(100)
        assert not done
        assert done.dropped == (150 + 18 if full == "drop_oldest" else 0)
        bench.start_learner()
        assert actor.flush()
    bench.stop_learner()
    found = Arrived(ENV)
    with Log.open(bench.folder / ENV) as log:
        found.look(log)
    assert found.order[1, 0] == list(arrive)


@pytest.mark.parametrize(
    "durability",
    ["every step", "every episode", "at most 10 ms", "never"],
)
def test_spools_empty_whatever_the_durability(bench: Bench, durability: str):
    """With two actors in the middle of episodes, always."""
    bench.start_learner(durability=durability)
    with bench.actor(1) as first, bench.actor(2) as second:
        second.insert(LENGTH // 2)
        for _ in range(3 * LENGTH):
            first.insert(1)
            second.insert(1)
        assert first.flush() and second.flush()
        first.wait_empty()
        second.wait_empty()
    bench.check()


def test_a_rate_limiter_holds_steps_back(bench: Bench):
    """It says no in the middle of what is on its way, again and again: nothing is
    skipped, and the actor is told why it waits."""
    buffers: list[Any] = []
    bench.start_learner(lambda buffer: buffers.append(buffer) or buffer)
    sampler = buffers[0].log.all().sampler(limiter=Queue(8), seed=0)
    with bench.actor(1) as actor:
        actor.insert(100)
        wait_for(lambda: "a rate limiter holds it back" in actor.flush(100).problem, "the reason", DEADLINE_S)
        assert not actor.flush(0)
        for _ in range(23):
            check_pixels(sampler.sample(4, timeout=DEADLINE_S))
        assert actor.flush()
    assert bench.check()[ENV].steps == 100


def test_a_rate_limiter_holds_back_the_first_of_several_messages(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """It opens again while those after the first are still on their way: they do not overtake it."""
    monkeypatch.setattr(link, "WORTH_SENDING", 1)  # as with large images: many messages are on their way at a time
    buffers: list[Any] = []
    server = bench.start_learner(lambda buffer: buffers.append(buffer) or buffer)
    with Proxy(bench.port, bench.broadcast) as proxy, bench.actor(1, 0, proxy.ports, capacity=10_000) as actor:
        actor.insert(200)
        assert actor.flush()
        proxy.refuse()
        actor.insert(800)
        sampler = buffers[0].log.all().sampler(limiter=Queue(100), seed=0)
        proxy.heal()
        flushed = threading.Event()

        def learn() -> None:
            while not flushed.is_set():
                with contextlib.suppress(DeadlineError):
                    sampler.sample(3, timeout=0.05)
                time.sleep(0.001)

        learner = threading.Thread(target=learn)
        learner.start()
        try:
            assert actor.flush()
        finally:
            flushed.set()
            learner.join()
        assert server.stats()["held"] > 0
    assert bench.check()[ENV].steps == 1000


@pytest.mark.parametrize("always", [False, True])
def test_an_unexpected_error_in_the_middle_of_a_block(bench: Bench, monkeypatch: pytest.MonkeyPatch, always: bool):
    """Some of it is stored. The rest comes again, and only the rest, though an earlier connection of the actor is
    remembered; and one by one, also if the error comes each time."""
    bench.start_learner()
    with Proxy(bench.port, bench.broadcast) as proxy, bench.actor(1, 0, proxy.ports) as actor:
        actor.insert(10)
        assert actor.flush()
        proxy.cut()
        actor.insert(10)
        assert actor.flush()
        proxy.refuse()
        actor.insert(3 * LENGTH)  # a block of several episodes
        append_block, calls = EpisodeWriter.append_block, []

        def fail(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2 or (always and len(calls) > 2):
                raise RuntimeError("unexpected")
            return append_block(*arguments)

        monkeypatch.setattr(EpisodeWriter, "append_block", fail)
        proxy.heal()
        assert actor.flush()
        actor.wait_empty()
        assert len(calls) > 1
    assert bench.check()[ENV].steps == 20 + 3 * LENGTH


def test_steps_of_an_earlier_life_wait_for_power_safety_too(bench: Bench):
    """What the next life sends after them says nothing about them."""

    def unsynced(buffer: Any) -> Any:
        buffer.log.sync = lambda: None
        return buffer

    bench.start_learner(unsynced, durability="at most 3600000 ms")
    with Proxy(bench.port, bench.broadcast) as proxy:
        with bench.actor(1, 0, proxy.ports, path=bench.folder / "spool") as actor:
            proxy.refuse()
            actor.insert(5)
        proxy.heal()
        with bench.actor(1, 1, proxy.ports, path=bench.folder / "spool") as actor:
            actor.insert(1)
            assert actor.flush()
            assert actor.spools[ENV].stats()["acknowledged"] == -1
            assert len(actor.spools[ENV]) == 6


def test_a_store_that_both_actors_share_keeps_interventions_apart(bench: Bench):
    bench.start_learner()
    with bench.actor(1) as first, bench.actor(2) as second:
        for actor in (first, second, first, second):
            actor.insert(27)
            assert actor.flush()
    found = bench.check()
    assert (found[ENV].steps, found[INTERVENTION].steps) == (108, 36)


def test_data_callback_gets_every_step_once(bench: Bench):
    bench.start_learner()
    with Proxy(bench.port, bench.broadcast) as proxy, bench.actor(1, 0, proxy.ports) as actor:
        for _ in range(6):
            actor.insert(10)
            proxy.cut()
        assert actor.flush()
    bench.check()
    assert sum(count for store, count in bench.callbacks if store == ENV) == 60
