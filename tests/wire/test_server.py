"""The learner's end: what it takes, what it refuses and in which words; and that nothing anybody sends ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, DiskFullError, HiltError, RefusedError
from hilt.replay import Log, ReplayBufferDataStore
from hilt.replay.sampling.limiters import MinSize, Queue
from hilt.wire import TrainerServer, make_trainer_config
from hilt.wire.codec import encode
from hilt.wire.ingest import DataSink
from tests.wire.pair import FLUSH_MS, Pair, eventually, packed, said_in, scrape
from tests.wire.processes import free_port
from tests.wire.steps import ENV, make_buffer, transition


class Bare:
    """Somebody's own store."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def insert(self, step: Any) -> None:
        self.steps.append(step)


# Where it listens


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "192.168.1.5", "::"])
def test_beyond_loopback_without_keys(address: str):
    said = (
        f"listening on {address} without keys: anybody there could send steps or take the weights. "
        "Make keys with `hilt keys new"
    )
    with pytest.raises(ConfigError) as error:
        TrainerServer(make_trainer_config(free_port(), free_port(), bind_ip=address))
    assert said in str(error.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_needs_no_keys(address: str):
    with TrainerServer(make_trainer_config(free_port(), free_port(), bind_ip=address)) as server:
        server.start(threaded=True)


@pytest.mark.parametrize("taken", ["port_number", "broadcast_port", "metrics_port"])
def test_a_port_in_use(pair: Pair, taken: str):
    """It is named, and what was opened before is closed again."""
    ports = {"port_number": pair.ports[0], "broadcast_port": pair.ports[1], "metrics_port": free_port()}
    with socket.create_server(("127.0.0.1", ports[taken])):
        threads = threading.active_count()
        said = (
            rf"{ports[taken]}.*cannot listen.*\(Address already in use\).*Another program uses this port: "
            r"stop it.* choose another one"
        )
        with pytest.raises(ConfigError, match=said):
            TrainerServer(make_trainer_config(**ports))
        eventually(lambda: threading.active_count() <= threads, "the threads to end")
    TrainerServer(make_trainer_config(**ports)).stop()


def test_ports_are_free_again_after_the_end(pair: Pair):
    for _ in range(3):
        server = pair.server(stores={}, metrics_port=free_port())
        server.stop()
        server.stop()


def test_files_are_closed_after_the_end(pair: Pair):
    def one() -> None:
        server = pair.server(stores={}, metrics_port=free_port())
        pair.client(stores={}).stop()
        server.stop()

    one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "files to be closed")  # by threads of ZeroMQ


# Beginning and end


def test_twice_and_after_the_end(pair: Pair):
    server = pair.server()
    with pytest.raises(ConfigError, match="this server was started already"):
        server.start(threaded=True)
    server.stop()
    with pytest.raises(ClosedError, match="this server was stopped; make another one"):
        server.start(threaded=True)
    with pytest.raises(ClosedError, match="publish: the server is stopped"):
        server.publish_network({"w": np.zeros(2)})


def test_without_a_thread_it_serves_until_it_is_stopped(pair: Pair):
    server = pair.server(start=False)
    thread = threading.Thread(target=server.start)
    thread.start()
    client = pair.client(options={"wait_for_server": True})
    client.stop()
    server.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_server_and_client_leave_no_thread_behind(pair: Pair, caplog: pytest.LogCaptureFixture):
    """Also with a request that a rate limiter holds back, a sync that was begun, and weights that are awaited."""
    before = set(threading.enumerate())
    buffer = pair.buffer(durability="every episode")
    server = pair.server(stores={ENV: buffer}, metrics_port=free_port())
    server.register_sampler("limited", buffer.view.sampler(limiter=MinSize(50)))
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    client.start_async_update(interval=0.01)
    client.recv_network_callback(lambda weights: None)
    spool.insert(transition(1, 0, 0))
    assert client.update(FLUSH_MS)

    def ask() -> None:
        with pytest.raises(HiltError):
            client.sampler("limited").sample(4, timeout=600)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: server._requests._running == 1, "the request")
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert {
        "hilt-wire-server",
        "hilt-wire-client",
        "hilt-wire-update",
        "hilt-wire-metrics",
        "hilt-wire-hilt/sample",
    } <= names
    server.stop()
    client.stop()
    asking.join(60)
    eventually(lambda: not set(threading.enumerate()) - before, "every thread to end")
    assert "is left behind" not in said_in(caplog)


@pytest.mark.parametrize("threaded", [True, False])
def test_stopped_by_its_own_callback(pair: Pair, threaded: bool):
    seen, waited = threading.Event(), list[float]()

    def enough(store: str, payload: Any) -> None:
        server._stopped.wait = waited.append
        server.stop()
        del server._stopped.wait
        seen.set()

    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer}, data_callback=enough, start=False)
    thread = threading.Thread(target=server.start, args=(threaded,))
    thread.start()
    spool = pair.spool()
    pair.client(stores={ENV: spool}, options={"timeout_ms": 500, "wait_for_server": True})
    spool.insert(transition(1, 0, 0))
    assert seen.wait(60) and not waited, "it does not wait for itself"
    thread.join(60)
    assert not thread.is_alive() and len(buffer) == 1
    eventually(lambda: socket.socket().connect_ex(("127.0.0.1", pair.ports[0])) != 0, "the port to be free")


def test_an_interrupt_ends_it_and_frees_what_it_had(tmp_path: Path):
    script = f"""
import sys
from hilt.wire import TrainerServer, make_trainer_config
from tests.wire.pair import *
server = TrainerServer(make_trainer_config({free_port()}, {free_port()}, metrics_port={free_port()}))
try:
    print("ready", flush=True)
    server.start()
except KeyboardInterrupt:
    server.stop()
    TrainerServer(server.config).stop()
    print("free", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert out == "free\n", err


# Stores


def test_stores_by_name(pair: Pair):
    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer})
    assert server.store_names() == {ENV}
    assert server.data_store(ENV) is buffer
    assert server.data_store("other") is None


def test_server_refuses_what_is_no_store(pair: Pair):
    server = pair.server(stores={}, start=False)
    with pytest.raises(ConfigError, match=r"env: a data store needs insert\(transition\), and dict has none"):
        server.register_data_store("env", {})
    for name in ("", 3):
        with pytest.raises(ConfigError, match=rf"the name of a data store is {name!r}; give a non-empty text"):
            server.register_data_store(name, Bare())  # type: ignore[arg-type]
    server.register_data_store("env", Bare())
    with pytest.raises(ConfigError, match="env: a data store of this name is registered already"):
        server.register_data_store("env", Bare())


def test_a_store_of_ones_own(pair: Pair):
    store = Bare()
    pair.server(stores={"mine": store})
    spool = pair.spool()
    client = pair.client(stores={"mine": spool})
    spool.batch_insert([{"n": n, "note": None} for n in range(3)])
    spool.insert(transition(1, 0, 7))
    spool.insert("what is not a mapping at all")
    done = client.update(FLUSH_MS)
    assert done and done.acknowledged == 5 and done.power_safe is False
    assert [step["n"] for step in store.steps[:3]] == [0, 1, 2]
    assert np.array_equal(store.steps[3]["observations"]["image"], transition(1, 0, 7)["observations"]["image"])
    assert store.steps[4] == "what is not a mapping at all"


def test_a_plain_log_is_a_store(pair: Pair):
    buffer = pair.buffer(None)
    with Log.create(pair.folder / "log", buffer.log.schema, durability="at most 10 ms") as log:
        server = pair.server(stores={"log": log})
        spool = pair.spool()
        client = pair.client(stores={"log": spool})
        for n in range(30):
            spool.insert(transition(1, 0, n))
        assert client.update(FLUSH_MS)
        assert np.array_equal(log.read(log.all().keys())["actions"][:, 0], np.arange(30))
        client.stop()
        server.stop()


def test_a_buffer_whose_insert_was_changed_is_asked_for_every_step(pair: Pair):
    """Whatever somebody does there happens to packed steps, too."""

    class Halved(ReplayBufferDataStore):
        def insert(self, transition: Any, *args: Any, **more: Any) -> int:
            return super().insert({**transition, "rewards": transition["rewards"] / 2}, *args, **more)

    plain = pair.buffer(None)
    halved = Halved.__new__(Halved)
    halved.__dict__.update(plain.__dict__)
    pair.server(stores={ENV: halved})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    for n in range(10):
        spool.insert(transition(4, 0, n))
    assert client.update(FLUSH_MS)
    batch = halved.log.read(halved.view.keys(), ["rewards"])
    assert batch["rewards"].tolist() == [(n + 1) / 2 for n in range(10)]
    assert len(halved.log.facts.origins()) == 2  # and who sent it is known all the same


def test_stores_may_come_while_it_runs(pair: Pair):
    server = pair.server(stores={})
    for i in range(50):
        server.register_data_store(f"s{i}", Bare())
        server.register_channel(f"c{i}", None)  # type: ignore[arg-type]
    spool = pair.spool()
    client = pair.client(stores={"s49": spool})
    spool.insert({"n": 1})
    assert client.update(FLUSH_MS)


# Handshakes


def test_settings_that_differ(pair: Pair):
    pair.server(request_types=["send-stats"], version="v1")
    with pytest.raises(RefusedError) as error:
        pair.client(request_types=["send-stats", "save"], version="v2")
    assert str(error.value) == (
        f"the learner at 127.0.0.1:{pair.ports[0]} refuses 'actor-1': the settings differ: version is 'v2' there "
        "and 'v1' at the learner; request_types is ['save', 'send-stats'] there and ['send-stats'] at the learner. "
        "Give both sides the same recipe and settings, and the same version of Hilt."
    )
    with pytest.raises(RefusedError, match="max_message_bytes is 100000 there and 1073741824 at the learner"):
        pair.client(version="v1", max_message_bytes=100_000)


def test_another_protocol(pair: Pair):
    pair.server()
    hand = pair.by_hand()
    hand.hello(pair.config(), agreement={**pair.config().agreement(), "protocol": 99})
    assert "protocol is 99 there and 1 at the learner" in hand.receive("refuse")["why"]


def test_an_unknown_store(pair: Pair):
    pair.server()
    with pytest.raises(RefusedError, match="no data store at the learner named 'actor_emv'; did you mean 'actor_env'"):
        pair.client(stores={"actor_emv": pair.spool()})


@pytest.mark.parametrize("kind", ["buffer", "log"])
def test_steps_that_do_not_fit_are_refused_at_the_door(pair: Pair, kind: str):
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer if kind == "buffer" else buffer.log})
    spool = pair.spool()
    bad = transition(1, 0, 0)
    del bad["observations"]["state"]
    spool.insert(bad)
    said = (
        r"the steps for 'actor_env' do not fit the learner's schema: observations/state: expected "
        r"float32 \(6,\), got nothing"
    )
    with pytest.raises(RefusedError, match=said):
        pair.client(stores={ENV: spool})
    assert len(spool) == 1


# Steps that do not fit


@pytest.mark.parametrize("kind", ["buffer", "log", "own"])
def test_server_refuses_a_bad_step_only_to_its_sender(pair: Pair, kind: str, caplog: pytest.LogCaptureFixture):
    buffer = pair.buffer()

    class Picky:
        def insert(self, step: Any) -> None:
            buffer.insert(step)

    pair.server(stores={ENV: {"buffer": buffer, "log": buffer.log, "own": Picky()}[kind]})
    first, second = pair.spool(), pair.spool()
    offender, other = pair.client("offender", {ENV: first}), pair.client("other", {ENV: second})
    for n in range(6):
        step = transition(1, 0, n)
        if n == 3:
            step["observations"] = {**step["observations"], "state": np.zeros(7, np.float32)}
        if n == 4:
            step["actions"] = np.array(["one", "two"])
        first.insert(step)
        second.insert(transition(2, 0, n))
    done = offender.update(FLUSH_MS)
    assert not done and (done.refused, done.waiting, done.acknowledged) == (2, 0, 4)
    assert done.problem == "2 steps were refused"
    said = said_in(caplog, logging.ERROR)
    assert (
        "refused step 3 for 'actor_env', which is lost: observations/state: expected float32 (6,), got float32 (7,)"
        in said
    )
    assert "refused step 4 for 'actor_env', which is lost: actions: expected float32 (2,), got <U3 (2,)" in said
    assert other.update(FLUSH_MS)
    assert len(buffer) == 10
    first.insert(transition(1, 0, 6))
    assert offender.update(FLUSH_MS), "what it refused is told once"
    eventually(lambda: not len(first) and not len(second), "all to be let go")


def test_an_insert_that_raises_anything(pair: Pair, caplog: pytest.LogCaptureFixture):
    class Brittle(Bare):
        def insert(self, step: Any) -> None:
            if step["n"] == 1:
                raise ZeroDivisionError("by 0")
            super().insert(step)

    store = Brittle()
    pair.server(stores={"mine": store})
    spool = pair.spool()
    client = pair.client(stores={"mine": spool})
    spool.batch_insert([{"n": n} for n in range(3)])
    assert client.update(FLUSH_MS).refused == 1
    assert [step["n"] for step in store.steps] == [0, 2]
    assert "refused step 1 for 'mine', which is lost: ZeroDivisionError: by 0" in said_in(caplog)


def test_a_data_callback_that_raises(pair: Pair, caplog: pytest.LogCaptureFixture):
    told: list[Any] = []

    def callback(store: str, payload: Any) -> None:
        told.append((store, len(payload["data"]), payload["last_id"]))
        raise RuntimeError("no")

    buffer = pair.buffer()
    pair.server(stores={ENV: buffer}, data_callback=callback)
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    for n in range(5):
        spool.insert(transition(1, 0, n))
        assert client.update(FLUSH_MS)
    eventually(lambda: len(told) == 5, "the last call")
    assert told == [(ENV, 1, n) for n in range(5)]
    assert len(buffer) == 5
    assert "data_callback failed on steps for actor_env" in said_in(caplog)


def test_server_goes_on_after_a_message_that_fails(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """A defect that one message meets must not end the learner for all actors. The message is dropped, and its sender
    says hello again: else it would wait for the acknowledgment for ever."""
    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    handle, failed = server._handle, threading.Event()

    def fail_once(frames: Any, message: Any) -> None:
        if message.get("kind") == "data" and not failed.is_set():
            failed.set()
            raise ZeroDivisionError("a defect")
        handle(frames, message)

    monkeypatch.setattr(server, "_handle", fail_once)
    for n in range(3):
        spool.insert(transition(1, 0, n))
    assert client.update(FLUSH_MS).acknowledged == 3
    assert failed.is_set() and len(buffer) == 3 and server.stats()["malformed"] == 1
    assert "a message was dropped" in said_in(caplog)


def test_server_answers_after_an_unexpected_error_and_the_steps_come_again(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    take, failed = DataSink.take, threading.Event()

    def fail_once(*given: Any, **named: Any) -> Any:
        outcome = take(*given, **named)  # the steps are stored, and then it fails: none may be stored twice
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError("a defect")
        return outcome

    monkeypatch.setattr(DataSink, "take", fail_once)
    for n in range(3):
        spool.insert(transition(1, 0, n))
    assert client.update(FLUSH_MS).acknowledged == 3
    assert failed.is_set() and len(buffer) == 3
    assert f"steps for {ENV} from" in said_in(caplog)


# When it cannot store


def test_a_full_disk(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Steps stay where they are, the sender is told why, and all arrive when there is room."""
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    spool.insert(transition(1, 0, 0))
    assert client.update(FLUSH_MS)
    from hilt.replay.storage.segment import Segment

    def full(*_: Any, **__: Any) -> Any:
        raise DiskFullError("the disk is full. Make room.")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "append", full)
        for n in range(1, 30):
            spool.insert(transition(1, 0, n))
        eventually(lambda: "the disk is full" in client.update(100).problem, "the learner's answer")
        done = client.update(1000)
        assert not done and done.waiting == 29 and done.refused == 0
        assert done.problem.endswith(
            "after 1 s and stay here: the learner cannot store it: the disk is full. Make room."
        )
    assert client.update(FLUSH_MS)
    assert len(buffer) == 30 and client.stats()["reconnects"] == 0


def test_a_closed_log(pair: Pair):
    """A learner that closes its buffer first goes on answering, and says why it takes nothing."""
    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool}, options={"timeout_ms": 300})
    spool.insert(transition(1, 0, 0))
    assert client.update(FLUSH_MS)
    buffer.close()
    spool.insert(transition(1, 0, 1))
    said = "stay here: the learner cannot store it: "
    eventually(lambda: said in client.update(100).problem, "the learner's answer")
    assert "this log is closed; open it again." in client.update(500).problem
    client.stop()  # says goodbye, and its episode cannot be ended
    hand = pair.by_hand()
    hand.hello(pair.config(), actor="actor-1", stores={ENV: {"boot": spool.boot, "first": 0, "example": None}})
    assert (
        "it cannot store steps: " in (why := hand.receive("refuse")["why"])
        and "this log is closed; open it again." in why
    )
    assert len(spool) == 1
    server.stop()


def test_a_rate_limiter_pushes_back(pair: Pair):
    buffer = pair.buffer()
    sampler = buffer.view.sampler("fifo", limiter=Queue(10), max_times_sampled=1)
    pair.server(stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    for n in range(35):
        spool.insert(transition(1, 0, n))
    said = "stay here: a rate limiter holds it back: waited"
    eventually(lambda: said in (done := client.update(100)).problem and done.waiting == 25, "the learner's answer")
    assert len(buffer) == 10
    seen = []
    while len(seen) < 35:
        seen += sampler.sample(5, ["actions"], timeout=60)["actions"][:, 0].tolist()
    assert seen == list(range(35))
    assert client.update(FLUSH_MS)


# What nobody should send

ODD: list[Any] = [None, True, -1, 1 << 63, 1.5, float("nan"), "x", "x" * 10_000, b"x", [], [1, [2]], {}, {"a": 1}]
ODD += [np.zeros(3), np.zeros((2, 0))]


def odd_hellos(config: Any) -> list[dict[str, Any]]:
    hellos: list[dict[str, Any]] = [
        {name: odd} for name in ("actor", "boot", "seen_version", "agreement", "stores", "kind") for odd in ODD
    ]
    hellos += [{"stores": {ENV: odd}} for odd in ODD]
    hellos += [{"stores": {ENV: {"boot": odd, "first": 0, "example": None}}} for odd in ODD]
    hellos += [{"stores": {ENV: {"boot": "b", "first": odd, "example": None}}} for odd in ODD]
    hellos += [{"stores": {ENV: {"boot": "b", "first": 0, "example": odd}}} for odd in ODD]
    hellos += [{"agreement": {**config.agreement(), name: odd}} for name in config.agreement() for odd in ODD]
    hellos += [{"stores": {odd: None}} for odd in ("", "x" * 10_000)]
    return hellos


def odd_blocks() -> list[Any]:
    good = packed(*range(5))
    blocks: list[Any] = list(ODD)
    for part in good:
        blocks += [{**good, part: odd} for odd in ODD]
        for name in good[part]:
            blocks += [{**good, part: {**good[part], name: odd}} for odd in ODD]
            value = good[part][name]
            others = [
                value[:-1],
                value.reshape(-1),
                value.astype("S"),
                value[None],
                value.astype(complex),
                value.astype("M8[s]"),
            ]
            blocks += [{**good, part: {**good[part], name: other}} for other in others]
    many = np.zeros(1_000_000, bool)
    blocks.append({"columns": {"dones": many}, "frames": {}, "numbers": {}})
    blocks.append(
        {
            "columns": {"a": np.zeros(5), "a/b": np.zeros(5), "/": np.zeros(5), "": np.zeros(5)},
            "frames": {},
            "numbers": {},
        }
    )
    blocks.append(
        {"columns": {"dones": np.zeros((5, 2), bool), "masks": np.zeros((5, 3))}, "frames": {}, "numbers": {}}
    )
    for odd in ({"source": np.full(5, 200, np.uint8)}, {"policy_version": np.array(["a"] * 5)}):
        blocks.append({**good, "columns": {**good["columns"], **odd}})
    return blocks


@pytest.mark.parametrize("kind", ["buffer", "log", "own"])
def test_server_survives_any_message(pair: Pair, kind: str, caplog: pytest.LogCaptureFixture):
    """Every field as everything it should not be. Nobody gets an error for it, and an honest client is served on."""
    buffer, own = pair.buffer(), Bare()
    server = pair.server(
        stores={ENV: {"buffer": buffer, "log": buffer.log, "own": own}[kind]}, request_callback=lambda *_: {}
    )
    hand, config = pair.by_hand(), pair.config()
    for frames in (
        [],
        [b""],
        [b"\x00" * 40],
        encode({"kind": "hello"})[:1],
        [b"HILT"],
        [b"HILT\x01"],
        [b"HILT\x01\xc1"],
    ):
        if frames:
            hand.send_frames(*[bytes(frame) for frame in frames])
    for changes in odd_hellos(config):
        hand.hello(config, **changes)
    hand.enter(config)
    data = {"kind": "data", "store": ENV, "boot": "b", "depth": 0, "lag": 0.0, "items": None}
    epoch = 0
    for name in ("store", "boot", "first", "epoch", "n", "depth", "lag", "items", "instance", "kind", "packed"):
        for odd in ODD:
            epoch += 1
            hand.send(**{**data, "first": 0, "epoch": epoch, "n": 0, "packed": packed(0, 1), name: odd})
    for block in odd_blocks():
        epoch += 1
        hand.send(**{**data, "first": 100, "epoch": epoch, "n": 0, "packed": block})
    for name in ("number", "oldest", "type", "seconds", "payload", "again"):
        for odd in ODD:
            hand.send(
                **{
                    "kind": "request",
                    "number": 1,
                    "oldest": 0,
                    "type": "send-stats",
                    "seconds": 1.0,
                    "payload": {},
                    name: odd,
                }
            )
    for kind_of in ("hilt/sample", "hilt/priorities", "hilt/size", "hilt/put", "hilt/get"):
        for i, odd in enumerate(ODD):
            hand.send(kind="request", number=1000 + i, oldest=0, type=kind_of, seconds=0.0, payload=odd)
    hand.send(kind="bye")
    hand.send(kind="bye")
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    for n in range(3):
        spool.insert(transition(9, 0, n))
    done = client.update(FLUSH_MS)
    assert done and done.acknowledged == 3
    if kind == "own":
        assert [step["actions"][0] for step in own.steps[-3:]] == [0, 1, 2]
    else:
        states = buffer.log.read(buffer.log.all().keys(), ["observations/state"])["observations"]["state"]
        assert (states[:, 0] == 9).sum() == 3
    assert server.stats()["malformed"] > 100
    assert "Traceback" not in caplog.text.replace("failed on step", "")


def test_server_does_not_skip_unreadable_messages(pair: Pair):
    """A message of steps that makes no sense is answered; what is sent after it
    does not count until its sender begins again."""
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer})
    hand = pair.by_hand()
    hand.enter(pair.config(), stores={ENV: None})
    data = {"kind": "data", "store": ENV, "boot": "b", "depth": 0, "lag": 0.0, "items": None}
    hand.send(**data, first=0, epoch=0, n=0, packed={"columns": {}, "frames": {}, "numbers": {}})
    assert "a block of steps has columns of different lengths or none" in hand.receive("ack")["held"]
    hand.send(**data, first=5, epoch=0, n=1, packed=packed(5, 6))
    hand.send(**data, first=0, epoch=1, n=0, packed=packed(0, 1))
    assert hand.receive("ack")["process"] == 1
    assert len(buffer) == 2


def test_sessions_and_senders_do_not_pile_up(pair: Pair):
    """Whoever comes under ever new names, on one connection or on many, leaves nothing behind."""
    from hilt.wire import server as module

    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer})
    hand, config = pair.by_hand(), pair.config()
    for i in range(300):
        hand.hello(config, actor=f"a{i}", boot=f"b{i}", stores={ENV: {"boot": f"b{i}", "first": 0, "example": None}})
    hand.enter(config, stores={ENV: {"boot": "b", "first": 0, "example": None}})
    for i in range(300):
        hand.send(
            kind="data", store=ENV, boot=f"c{i}", first=0, epoch=i, n=0, packed=packed(0), items=None, depth=0, lag=0.0
        )
    for _ in range(300):
        hand.receive("ack")
    assert len(server._sessions) == 1
    assert len(server._sinks[ENV]._streams) <= module.STREAMS + 1
    hand.send(kind="bye")
    eventually(lambda: not server._sinks[ENV]._streams, "all to be forgotten")


def test_server_without_power_safety_accumulates_nothing(pair: Pair):
    """As in the buffers of most scripts, which live in a temporary folder."""
    server = pair.server(stores={ENV: pair.buffer(None, durability="never")})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    for n in range(20):
        spool.insert(transition(1, 0, n))
        assert client.update(FLUSH_MS)
    (stream,) = server._sinks[ENV]._streams.values()
    assert len(stream._awaiting) <= 1 and not stream.refusals


# Metrics


def test_metrics_at_the_real_endpoint(pair: Pair):
    port = free_port()
    buffer = pair.buffer()
    server = pair.server(stores={ENV: buffer}, metrics_port=port)
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    got = threading.Event()
    client.recv_network_callback(lambda _: got.set())
    assert server.publish_network({"w": np.ones(3)}) == 1
    assert got.wait(60)
    eventually(lambda: client.policy_version == 1, "the version")
    for n in range(4):
        spool.insert(transition(1, 0, n))
    assert client.update(FLUSH_MS)
    found = scrape(port)
    of = '{actor="actor-1",store="actor_env"}'
    assert found[f"hilt_wire_steps_received_total{of}"] == 4
    assert found['hilt_wire_actor_version{actor="actor-1"}'] == 1
    assert found['hilt_wire_staleness_versions{actor="actor-1"}'] == 0
    assert found["hilt_wire_policy_version"] == 1
    assert found["hilt_wire_bytes_received_total"] > 4 * 24 * 24 * 3
    assert found["hilt_wire_bytes_sent_total"] > 0
    assert {"hilt_wire_messages_malformed_total", "hilt_wire_clients_refused_total"} <= set(found)
    assert buffer.log.read(buffer.view.keys(), ["policy_version"])["policy_version"].tolist() == [1] * 4
    spool.policy_version = 0  # as if it had been made before
    server.publish_network({"w": np.ones(3)}, version=7)
    spool.insert({**transition(1, 0, 4), "policy_version": 3})
    spool.insert({**transition(1, 0, 5), "actions": np.zeros(9)})
    assert client.update(FLUSH_MS).refused == 1
    found = scrape(port)
    assert found['hilt_wire_staleness_versions{actor="actor-1"}'] == 4
    assert found[f"hilt_wire_steps_refused_total{of}"] == 1
    hand = pair.by_hand()
    hand.enter(pair.config(metrics_port=None), actor="twice")
    two = packed(0, 1, policy_version=5)
    for epoch in range(2):
        hand.send(
            kind="data", store=ENV, boot="b", first=0, epoch=epoch, n=0, packed=two, items=None, depth=17, lag=2.5
        )
        hand.receive("ack")
    found = scrape(port)
    assert found['hilt_wire_steps_duplicate_total{actor="twice",store="actor_env"}'] == 2
    assert found['hilt_wire_queue_depth{actor="twice"}'] == 17
    assert found['hilt_wire_lag_seconds{actor="twice"}'] == 2.5
    again = pair.by_hand()
    again.enter(pair.config(metrics_port=None), actor="twice")
    hand.send(kind="bye")
    again.send(kind="ping", depth=3, lag=0.5)
    again.receive("pong")
    assert scrape(port)['hilt_wire_actor_version{actor="twice"}'] == 5  # its other connection is still there
    again.send(kind="bye")
    eventually(lambda: 'hilt_wire_queue_depth{actor="twice"}' not in scrape(port), "a gone actor to disappear")


def test_versions_go_on_above_those_in_the_log(pair: Pair):
    buffer = pair.buffer()
    buffer.insert({**transition(1, 0, 0), "policy_version": 41})
    buffer.close()
    server = pair.server(start=False)
    assert server.publish_network({"w": np.zeros(1)}) == 42  # also before it is started
    server.start(threaded=True)
    assert server.publish_network({"w": np.zeros(1)}) == 43


def test_a_client_cannot_use_up_the_versions(pair: Pair):
    server = pair.server()
    hand = pair.by_hand()
    hand.hello(pair.config(), seen_version=(1 << 63) - 1)
    hand.enter(pair.config(), seen_version=1000)
    assert [server.publish_network({"w": np.zeros(1)}) for _ in range(3)] == [1001, 1002, 1003]


def test_server_stats(pair: Pair):
    server = pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    spool.insert(transition(1, 0, 0))
    assert client.update(FLUSH_MS)
    stats = server.stats()
    assert stats["received"] == 1 and stats["refused"] == 0 and stats["weights"]["version"] == 0
    (name,) = stats["actors"]
    assert name.startswith("actor-1/")


def test_a_limiter_with_a_deadline_of_its_own_is_not_waited_for(pair: Pair):
    """The thread that serves everybody never waits."""
    buffer = make_buffer(None)
    buffer.view.sampler("fifo", limiter=Queue(1), max_times_sampled=1)
    buffer.insert(transition(1, 0, 0))
    with pytest.raises(DeadlineError):
        buffer.insert(transition(1, 0, 1), timeout=0)
    buffer.close()
