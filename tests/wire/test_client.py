"""The actor's end: what it says of every step, how long it waits, and that its
queue survives whatever the learner does."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    RefusedError,
    RequestError,
    SchemaError,
    UnknownNameError,
)
from hilt.replay import QueuedDataStore
from hilt.wire import TrainerClient, TrainerConfig, make_trainer_config
from tests.wire.pair import FLUSH_MS, Pair, eventually, said_in
from tests.wire.proxy import DOWN, Proxy
from tests.wire.steps import ENV, Arrived, transition

QUICK = {"timeout_ms": 200}

# The way there


@pytest.mark.parametrize("address", ["192.168.1.5", "learner.example.org", "10.0.0.1"])
def test_beyond_loopback_without_keys(address: str):
    with pytest.raises(ConfigError) as error:
        TrainerClient("a", address, make_trainer_config())
    assert str(error.value) == (
        f"connecting to {address} without keys: anybody there could send steps or take the weights. "
        "Make keys with `hilt keys new learner ACTOR`, and name their folder on both sides: "
        "wire.keys=keys; in Python, keys='keys'."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "name='': expected this actor's name, a text of at most 256 characters"),
        ({"name": "x" * 300}, "expected this actor's name"),
        ({"timeout_ms": 0}, "timeout_ms=0: expected milliseconds, above 0"),
        ({"data_stores": {"env": []}}, "env: an actor's data store is a QueuedDataStore, got list"),
        ({"server_ip": "127.0.0.1 "}, "connecting to 127.0.0.1  without keys"),
    ],
)
def test_arguments_that_cannot_work(pair: Pair, change: dict[str, Any], said: str):
    given = {"name": "a", "server_ip": "127.0.0.1", "config": pair.config(), **change}
    with pytest.raises(ConfigError, match=said):
        TrainerClient(**given)


def test_client_without_a_server(pair: Pair):
    """And nothing of the attempt is left behind."""
    with pytest.raises(DeadlineError) as error:
        pair.client(options=QUICK)
    assert str(error.value) == (
        f"connecting: no answer from the learner at 127.0.0.1:{pair.ports[0]} within 0.2 s. "
        "Nothing can be reached there (Connection refused). Check that it runs and that the network "
        "between lets its ports through."
    )
    gc.collect()
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(3):
        with pytest.raises(DeadlineError):
            pair.client(options=QUICK)
    gc.collect()
    eventually(lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))) <= before, "nothing to be left")


def test_waiting_for_the_server(pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.wire.client.TELL_EVERY_S", 0.1)
    said = f"no learner answers at 127.0.0.1:{pair.ports[0]} yet; still trying for"

    def begin() -> None:
        eventually(lambda: said in said_in(caplog), "the client to wait")
        pair.server()

    begun = threading.Thread(target=begin)
    begun.start()
    client = pair.client(options={"wait_for_server": True, "timeout_ms": 100})
    assert client.stats()["connected"] and said in said_in(caplog)
    begun.join()


def test_client_log_level_is_its_own(pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Another client, and the program that it is a part of, log as before."""
    monkeypatch.setattr("hilt.wire.client.TELL_EVERY_S", 0.0)
    quiet, level = (
        {"wait_for_server": 0.3, "timeout_ms": 100, "log_level": logging.ERROR},
        logging.getLogger("hilt.wire").level,
    )
    with pytest.raises(DeadlineError):
        pair.client(options=quiet)
    assert not caplog.records
    assert logging.getLogger("hilt.wire").level == level
    with pytest.raises(DeadlineError):
        pair.client(options={**quiet, "log_level": logging.WARNING})
    assert "no learner answers" in said_in(caplog)


def test_waiting_so_many_seconds(pair: Pair):
    with pytest.raises(DeadlineError, match=r"within 0.5 s"):
        pair.client(options={"wait_for_server": 0.5, "timeout_ms": 100})


def test_one_queue_has_one_way_out(pair: Pair):
    """Sent by two, its steps would arrive twice or be let go too early."""
    pair.server(stores={"a": pair.buffer("a"), "b": pair.buffer("b")})
    spool = pair.spool()
    with pytest.raises(ConfigError, match="b: this queue is sent already, under another name or by another client"):
        pair.client(stores={"a": pair.spool(), "b": spool, "c": spool})
    first = pair.client(stores={"a": spool})
    with pytest.raises(
        ConfigError, match="a: this queue is sent already, under another name or by another client; give each its own"
    ):
        pair.client("other", {"a": spool})
    first.stop()
    pair.client(stores={"a": spool})


def test_agentlaces_way_to_name_a_store(pair: Pair):
    buffer = pair.buffer()
    pair.server(stores={"arm": buffer})
    spool = pair.spool()
    with TrainerClient("arm", "127.0.0.1", pair.config(), spool, wait_for_server=True) as client:
        spool.insert(transition(1, 0, 0))
        assert client.update(FLUSH_MS)
    assert len(buffer) == 1


# What update says


def test_update_reports_success(pair: Pair):
    pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    done = client.update()
    assert done and (done.acknowledged, done.waiting, done.refused, done.dropped, done.problem) == (0, 0, 0, 0, "")
    for n in range(3):
        spool.insert(transition(1, 0, n))
    done = client.update(FLUSH_MS)
    assert done and done.acknowledged == 3
    eventually(lambda: client.update().power_safe, "the disk")
    assert client.wait_acknowledged(ENV, 2, power=True, timeout=0)
    assert not client.wait_acknowledged(ENV, 3, timeout=0)


def test_the_learner_is_gone(pair: Pair):
    server = pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool}, options=QUICK)
    server.stop()
    spool.insert(transition(1, 0, 0))
    eventually(
        lambda: "no learner answers" in client.update(50).problem or not client.stats()["connected"], "it to be noticed"
    )
    done = client.update(100)
    assert not done and done.waiting == 1
    assert (
        done.problem
        == f"1 steps are not acknowledged after 0.1 s and stay here: no learner answers at 127.0.0.1:{pair.ports[0]}"
    )


def test_the_learner_is_slow(pair: Pair):
    pair.server()
    with Proxy(*pair.ports) as proxy:
        spool = pair.spool()
        client = pair.client(
            stores={ENV: spool}, port_number=proxy.ports[0], broadcast_port=proxy.ports[1], options=QUICK
        )
        proxy.stall()
        spool.insert(transition(1, 0, 0))
        done = client.update(100)
        assert done.problem == "1 steps are not acknowledged after 0.1 s and stay here: it is slower than they come"
        proxy.heal()
        assert client.update(FLUSH_MS)


def test_update_reports_dropped_steps_once(pair: Pair):
    server = pair.server()
    spool = pair.spool(3, full="drop_oldest")
    with Proxy(*pair.ports) as proxy:
        client = pair.client(
            stores={ENV: spool}, port_number=proxy.ports[0], broadcast_port=proxy.ports[1], options=QUICK
        )
        proxy.stall()
        for n in range(8):
            spool.insert(transition(1, 0, n))
        done = client.update(100)
        assert done.dropped == 5 and done.waiting == 3
        assert done.problem.startswith("5 steps were dropped; 3 steps are not acknowledged after 0.1 s and stay here")
        proxy.heal()
        done = client.update(FLUSH_MS)
        assert done and done.dropped == 0
        assert done.acknowledged >= 3 and server.stats()["received"] >= 3


def test_update_does_not_wait_for_later_steps(pair: Pair):
    """`update` is about what was inserted before it, however much comes meanwhile."""
    pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    ended = threading.Event()

    def insert() -> None:
        n = 0
        while not ended.is_set():
            spool.insert(transition(1, 0, n))
            n += 1
            time.sleep(0.001)

    thread = threading.Thread(target=insert)
    thread.start()
    for _ in range(20):
        assert client.update(FLUSH_MS)
    ended.set()
    thread.join()


def test_background_updates_log_problems(pair: Pair, caplog: pytest.LogCaptureFixture):
    server = pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool}, options=QUICK)
    client.start_async_update(interval=0.05)
    client.start_async_update(interval=0.05)
    server.stop()
    spool.insert(transition(1, 0, 0))
    eventually(
        lambda: "actor-1: 1 steps are not acknowledged after 0.2 s and stay here" in said_in(caplog), "a warning"
    )
    assert sum(thread.name == "hilt-wire-update" for thread in threading.enumerate()) == 1
    client.stop()
    eventually(lambda: all(thread.name != "hilt-wire-update" for thread in threading.enumerate()), "the thread to end")


def test_background_updates_do_not_change_what_update_reports(pair: Pair, caplog: pytest.LogCaptureFixture):
    pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    client.start_async_update(interval=0.01)
    spool.insert(transition(1, 0, 0))
    spool.insert({**transition(1, 0, 1), "actions": np.zeros(9, np.float32)})
    eventually(lambda: "actor-1: 1 steps were refused" in said_in(caplog), "a warning")
    assert client.update(FLUSH_MS).refused == 1
    assert client.update(FLUSH_MS)


# Steps that are odd


def test_step_that_cannot_be_sent_is_refused_and_the_rest_continues(pair: Pair, caplog: pytest.LogCaptureFixture):
    class Own:
        steps: list[Any] = []  # noqa: RUF012 - one test, one list

        def insert(self, step: Any) -> None:
            self.steps.append(step["n"])

    pair.server(stores={"own": Own()})
    spool = pair.spool()
    client = pair.client(stores={"own": spool})
    with Proxy(*pair.ports):
        for n in range(6):
            spool.insert({"n": n, "what": object()} if n in (1, 4) else {"n": n, "what": None})
        done = client.update(FLUSH_MS)
    assert not done and done.refused == 2 and done.acknowledged == 4
    assert Own.steps == [0, 2, 3, 5]
    said = said_in(caplog, logging.ERROR)
    assert "refused step 1 for 'own', which is lost: it cannot be sent: items/0/what: a value of type object" in said
    spool.insert({"n": 6, "what": None})
    assert client.update(FLUSH_MS)


def test_a_step_larger_than_a_message_may_be(pair: Pair, caplog: pytest.LogCaptureFixture):
    """It waits for other settings, and says so; it is not lost, and the connection
    is not cut for it again and again."""
    pair.server(max_message_bytes=1 << 16, stores={"own": Bare()})
    spool = pair.spool()
    client = pair.client(stores={"own": spool}, max_message_bytes=1 << 16, options=QUICK)
    spool.insert({"small": np.zeros(10)})
    assert client.update(FLUSH_MS)
    spool.insert({"large": np.zeros(1 << 16, np.uint8)[:, None] + np.zeros(2, np.uint8)})
    said = "stay here: 131072 bytes in one array, but max_message_bytes=65536. Give make_trainer_config"
    eventually(lambda: said in (done := client.update(100)).problem and not done, "it to be tried")
    assert "a step for 'own' cannot be sent: 131072 bytes in one array" in said_in(caplog)
    assert client.stats()["reconnects"] == 0
    with pytest.raises(
        ConfigError, match=r"131072 bytes in one array, but max_message_bytes=65536. Send less at a time"
    ):
        client.request("send-stats", {"x": np.zeros(131072, np.uint8)})


def test_many_steps_go_through_small_messages(pair: Pair):
    buffer = pair.buffer()
    pair.server(max_message_bytes=1 << 16, stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool}, max_message_bytes=1 << 16)
    for n in range(300):
        spool.insert(transition(1, 0, n))
    assert client.update(FLUSH_MS)
    assert len(buffer) == 300 and client.stats()["reconnects"] == 0


def test_arrays_beside_odd_values_are_copied_too(pair: Pair):
    store = Bare()
    pair.server(stores={"own": store})
    spool = pair.spool()
    client = pair.client(stores={"own": spool})
    picture = np.zeros(2000, np.uint8)
    for n in range(4):
        picture[:] = n
        spool.insert({"picture": picture, "note": None})
    assert client.update(FLUSH_MS)
    assert [int(step["picture"][7]) for step in store.steps] == [0, 1, 2, 3]


class Bare:
    def __init__(self) -> None:
        self.steps: list[Any] = []

    def insert(self, step: Any) -> None:
        self.steps.append(step)


def test_a_queue_that_is_closed_first(pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The wrong order at the end: it is said, and nothing hangs."""
    pair.server()
    with Proxy(*pair.ports) as proxy:
        spool = QueuedDataStore(4, path=tmp_path / "spool")
        client = pair.client(
            stores={ENV: spool}, port_number=proxy.ports[0], broadcast_port=proxy.ports[1], options=QUICK
        )
        proxy.stall()
        for n in range(30):
            spool.insert(transition(1, 0, n))
        spool.close()
        proxy.heal()
        eventually(lambda: "closed" in client.update(50).problem or not client.update(50).waiting, "an answer")
        assert "closed" in said_in(caplog, logging.ERROR)
        assert client.stats()["connected"]
        client.stop()
    again = QueuedDataStore(4, path=tmp_path / "spool")
    with pair.client(stores={ENV: again}) as client:
        assert client.update(FLUSH_MS)
    again.close()


def test_arrived_steps_leave_the_queue_at_the_next_connection(pair: Pair, tmp_path: Path):
    """Also when nothing new is inserted: the learner says what it has."""
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer})
    with Proxy(*pair.ports) as proxy:
        ports = {"port_number": proxy.ports[0], "broadcast_port": proxy.ports[1]}
        spool = QueuedDataStore(100, path=tmp_path / "spool")
        client = pair.client(stores={ENV: spool}, options=QUICK, **ports)
        proxy.stall(DOWN)
        spool.insert(transition(1, 0, 0))
        eventually(lambda: len(buffer) == 1, "the step")
        client.stop()
        spool.close()
    again = pair.spool(100, path=tmp_path / "spool")
    assert len(again) == 1
    client = pair.client(stores={ENV: again})
    assert client.update(FLUSH_MS)
    eventually(lambda: not len(again), "it to be let go")
    assert len(buffer) == 1


def test_an_actor_whose_disk_forgot_its_newest_steps(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After a power cut at the actor the learner has more of its boot than it has itself. Its next steps have the same
    numbers and another boot: they are not taken for those."""
    buffer = pair.buffer(durability="at most 3600000 ms")
    monkeypatch.setattr(buffer.log, "sync", lambda: None)  # so that the actor keeps everything
    pair.server(stores={ENV: buffer})
    spool = QueuedDataStore(100, path=tmp_path / "spool")
    client = pair.client(stores={ENV: spool}, options=QUICK)
    for n in range(10):
        spool.insert(transition(1, 0, n))
        if n == 4:
            shutil.copytree(tmp_path / "spool", tmp_path / "forgot")
    assert client.update(FLUSH_MS)
    client.stop()
    spool.close()
    again = pair.spool(100, path=tmp_path / "forgot")
    assert len(again) == 5
    for n in range(3):
        assert again.insert(transition(1, 1, n)) == 5 + n
    client = pair.client(stores={ENV: again}, options=QUICK)
    done = client.update(FLUSH_MS)
    assert done and done.acknowledged == 8
    arrived = Arrived(ENV)
    arrived.look(buffer.log)
    assert arrived.order == {(1, 0): list(range(10)), (1, 1): [0, 1, 2]}


def test_a_lost_acknowledgment_comes_again(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Without a new connection and without a new step."""
    server = pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    spool.insert(transition(1, 0, 0))
    assert client.update(FLUSH_MS)
    eventually(lambda: not len(spool), "the first")
    send, lost = server._send, []

    def drop(receiver: bytes, message: Any) -> None:
        if message["kind"] == "ack" and len(lost) < 3:
            lost.append(message)
        else:
            send(receiver, message)

    monkeypatch.setattr(server, "_send", drop)
    spool.insert(transition(1, 0, 1))
    assert client.update(FLUSH_MS)
    eventually(lambda: not len(spool), "the second")
    assert lost and client.stats()["reconnects"] == 0


# Requests


def test_answers(pair: Pair):
    def answer(type: str, payload: Any) -> Any:
        if type == "fail":
            raise ValueError(f"cannot {payload['what']}")
        if type == "schema":
            raise SchemaError("actions: expected two")
        if type == "odd":
            return {"it": object()}
        return {"type": type, "sum": payload["x"].sum(), "back": payload["x"] * 2}

    types = ["send-stats", "fail", "odd", "schema"]
    pair.server(request_callback=answer, request_types=types)
    client = pair.client(request_types=types)
    got = client.request("send-stats", {"x": np.arange(1000.0)}, FLUSH_MS)
    assert got["type"] == "send-stats" and got["sum"] == 499500 and np.array_equal(got["back"], 2 * np.arange(1000.0))
    with pytest.raises(RequestError, match="fail: ValueError: cannot jump"):
        client.request("fail", {"what": "jump"}, FLUSH_MS)
    with pytest.raises(SchemaError, match="actions: expected two"):
        client.request("schema", {}, FLUSH_MS)
    with pytest.raises(
        RequestError, match="odd: the learner's answer cannot be sent: payload/it: a value of type object"
    ):
        client.request("odd", {}, FLUSH_MS)
    with pytest.raises(UnknownNameError, match="no request type named 'send-stat'; did you mean 'send-stats'"):
        client.request("send-stat", {})
    with pytest.raises(SchemaError, match="payload/what: a value of type object"):
        client.request("send-stats", {"what": object()})
    assert not client._link._asked and not client._link._open


def test_without_a_callback_the_answer_is_empty(pair: Pair):
    pair.server()
    assert pair.client().request("send-stats", {"a": 1}, FLUSH_MS) == {}


def test_an_answer_is_what_it_was(pair: Pair):
    """The learner changes its array right after it gave it as an answer."""
    array = np.zeros(1000)
    server = pair.server(request_callback=lambda *_: {"a": array})
    answer = server._requests._answer

    def change_first(sender: bytes, reply: Any) -> None:
        array[:] = 9.0
        answer(sender, reply)

    server._requests._answer = change_first
    assert (pair.client().request("send-stats", {}, timeout_ms=FLUSH_MS)["a"] == 0).all()


def test_no_answer_in_time(pair: Pair, caplog: pytest.LogCaptureFixture):
    done = threading.Event()
    pair.server(request_callback=lambda *_: done.wait(600))
    client = pair.client()
    assert client.request("send-stats", {}, timeout_ms=100) is None  # the deadline is the caller's: `done` comes later
    assert "send-stats: no answer from the learner at 127.0.0.1" in said_in(caplog)
    assert not client._link._asked and not client._link._open
    done.set()
    assert client.request("send-stats", {}, timeout_ms=FLUSH_MS) is True


def test_a_request_is_carried_out_once_when_its_answer_is_lost(pair: Pair):
    calls: list[Any] = []

    def answer(type: str, payload: Any) -> Any:
        calls.append(payload["i"])
        return {"i": payload["i"]}

    pair.server(request_callback=answer)
    with Proxy(*pair.ports) as proxy:
        client = pair.client(port_number=proxy.ports[0], broadcast_port=proxy.ports[1])
        for i in range(3):
            proxy.stall(DOWN)
            got: list[Any] = []
            thread = threading.Thread(
                target=lambda i=i, got=got: got.append(client.request("send-stats", {"i": i}, timeout_ms=FLUSH_MS))
            )
            thread.start()
            eventually(lambda i=i: len(calls) > i, "the callback")
            proxy.cut()
            proxy.heal()
            thread.join(60)
            assert got == [{"i": i}]
    assert calls == [0, 1, 2]


def test_a_large_question_is_not_sent_again_and_again(pair: Pair):
    server = pair.server(request_callback=lambda *_: time.sleep(2.5))
    client = pair.client()
    client.request("send-stats", {"x": np.zeros(4_000_000, np.uint8)}, timeout_ms=FLUSH_MS)
    assert server.stats()["bytes_received"] < 6e6


def test_a_question_that_did_not_arrive_is_asked_again(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    server = pair.server(request_callback=lambda *_: {"ok": 1})
    client = pair.client()
    take, dropped = server._requests.take, []

    def drop(sender: bytes, boot: str, message: Any) -> None:
        if not dropped:
            dropped.append(message)
        else:
            take(sender, boot, message)

    monkeypatch.setattr(server._requests, "take", drop)
    assert client.request("send-stats", {}, timeout_ms=FLUSH_MS) == {"ok": 1}


def test_many_threads_ask_at_once(pair: Pair):
    """Numbers are taken in one order and sent in another: none is thought to be old."""
    pair.server(request_callback=lambda _, payload: payload)
    client = pair.client()
    wrong: list[Any] = []

    def ask(first: int) -> None:
        for i in range(first, first + 25):
            if client.request("send-stats", {"i": i}, timeout_ms=FLUSH_MS) != {"i": i}:
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_number_that_waits_for_its_turn_is_not_old(pair: Pair):
    pair.server(request_callback=lambda _, payload: payload)
    client = pair.client()
    number = client._link.new_number()
    assert client.request("send-stats", {"i": 1}, FLUSH_MS) == {"i": 1}
    assert client._link.ask("send-stats", {"i": 0}, 60.0, number) == {"i": 0}


def test_client_with_too_many_requests(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.wire.requests.AT_ONCE", 1)
    go = threading.Event()
    server = pair.server(request_callback=lambda *_: go.wait(60))
    client = pair.client()
    thread = threading.Thread(target=client.request, args=("send-stats", {}, FLUSH_MS))
    thread.start()
    eventually(lambda: server._requests._running == 1, "the first")
    with pytest.raises(RequestError, match="1 requests are being carried out already; ask again later"):
        client.request("send-stats", {}, FLUSH_MS)
    go.set()
    thread.join(60)
    eventually(lambda: server._requests._running == 0, "the end")
    assert client.request("send-stats", {}, FLUSH_MS) is True


def test_answers_do_not_pile_up(pair: Pair):
    server = pair.server(request_callback=lambda *_: {"x": np.zeros(1000)})
    client = pair.client()
    for _ in range(200):
        client.request("send-stats", {})
    (known,) = server._requests._clients.values()
    assert len(known._answers) <= 2 and not known._running
    client.stop()
    eventually(lambda: not server._requests._clients, "all to be forgotten")


def test_the_rate_of_requests(pair: Pair, caplog: pytest.LogCaptureFixture):
    calls: list[float] = []
    pair.server(request_callback=lambda *_: calls.append(time.monotonic()) or {}, rate_limit=1)
    client = pair.client(rate_limit=1)
    began = time.monotonic()
    for _ in range(2):
        assert client.request("send-stats", {}, FLUSH_MS) == {}
    assert len(calls) == 2 and calls[-1] - began >= 1
    eventually(
        lambda: (
            client.request("send-stats", {}, timeout_ms=1) is None
            and "rate_limit=1 per second: the next request may go in" in said_in(caplog)
        ),
        "a request that comes too early",
    )


def test_a_learner_that_refuses_later(pair: Pair, caplog: pytest.LogCaptureFixture):
    server = pair.server(version="1")
    spool = pair.spool()
    client = pair.client(version="1", stores={ENV: spool}, options=QUICK)
    server.stop()
    pair.server(version="2", stores={ENV: pair.buffer("other")})
    spool.insert(transition(1, 0, 0))
    eventually(lambda: "version is '1' there and '2' at the learner" in client.update(100).problem, "the refusal")
    assert client.request("send-stats", {}, 100) is None
    with pytest.raises(RefusedError, match=r"refuses 'actor-1': the settings differ: version is '1' there"):
        client.sampler(ENV).sample(1, timeout=0.0)


# The end


def test_stopping_with_leftovers(pair: Pair, caplog: pytest.LogCaptureFixture):
    server = pair.server()
    spool = pair.spool()
    client = pair.client(stores={ENV: spool}, options=QUICK)
    server.stop()
    for n in range(3):
        spool.insert(transition(1, 0, n))
    client.stop()
    client.stop()
    assert "stopped with 3 steps for 'actor_env' that the learner has not acknowledged" in said_in(caplog)
    assert len(spool) == 3
    for use in (
        lambda: client.request("send-stats", {}),
        lambda: client.sampler(ENV).sample(1),
        lambda: client.recv_network_callback(print),
    ):
        with pytest.raises(ClosedError, match="this client was stopped; make another one"):
            use()
    assert not client.update(10)
    buffer = pair.buffer("next")
    pair.server(stores={ENV: buffer})
    with pair.client(stores={ENV: spool}) as again:  # the queue is as it was
        assert again.update(FLUSH_MS)
    assert len(buffer) == 3


def test_stopping_while_somebody_waits(pair: Pair):
    asked, go = threading.Event(), threading.Event()
    pair.server(request_callback=lambda *_: asked.set() or go.wait(60))
    client = pair.client()
    said: list[str] = []

    def ask() -> None:
        try:
            client.request("send-stats", {}, FLUSH_MS)
        except ClosedError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(60)
    client.stop()
    thread.join(60)
    go.set()
    assert said == ["send-stats: this client was stopped before an answer came."]


def test_two_callbacks_for_weights(pair: Pair):
    pair.server()
    client = pair.client()
    client.recv_network_callback(lambda _: None)
    with pytest.raises(
        ConfigError, match="this client has a callback for weights already; make one function that does both"
    ):
        client.recv_network_callback(lambda _: None)


def _child(client: TrainerClient, spool: QueuedDataStore, connection: Any) -> None:
    said = []
    for use in (lambda: spool.insert(transition(1, 0, 9)), lambda: client.request("send-stats", {}), client.update):
        try:
            said.append(str(use()))
        except ClosedError as error:
            said.append(str(error))
    client.stop()
    connection.send(said)


def test_a_forked_process(pair: Pair):
    """It has no thread that would send: it says so, and does not disturb its parent."""
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer})
    spool = pair.spool()
    client = pair.client(stores={ENV: spool})
    spool.insert(transition(1, 0, 0))
    assert client.update(FLUSH_MS)
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(client, spool, theirs))
    process.start()
    assert mine.poll(60)
    said = mine.recv()
    process.join(60)
    assert said[0].startswith(
        "this process was forked from the one whose client sends these steps; make the queue and its client after"
    )
    assert said[1] == "this client was stopped; make another one."
    spool.insert(transition(1, 0, 1))
    assert client.update(FLUSH_MS) and len(buffer) == 2


# Every setting


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transport": "udp"}, "no transport named 'udp'. Known: in-process, tcp"),
        ({"port_number": 0}, "port_number=0: expected a whole number from 1 to 65535"),
        ({"port_number": None}, "port_number=None: expected a whole number from 1 to 65535"),
        ({"broadcast_port": 70000}, "broadcast_port=70000: expected a whole number"),
        ({"metrics_port": -1}, "metrics_port=-1: expected a whole number"),
        (
            {"port_number": 5589},
            "port_number=5589, broadcast_port=5589, metrics_port=None: expected a port of its own for each",
        ),
        (
            {"rate_limit": 0},
            "rate_limit=0: expected a number above 0. It is in requests per second; None is any number",
        ),
        ({"rate_limit": float("nan")}, "rate_limit=nan: expected a number above 0"),
        ({"max_message_bytes": 1000}, "max_message_bytes=1000: expected a whole number of at least 65536"),
        ({"experimental_pipeline_port": 5590}, "experimental_pipeline_port: there is one way to send here"),
        (
            {"request_types": "send-stats"},
            r"request_types='send-stats': expected a list of names, such as \['send-stats'\]",
        ),
        ({"key_name": "arm"}, "key_name=arm would do nothing: it needs keys=FOLDER, in which it names a key"),
        (
            {"transport": "in-process", "keys": "keys"},
            "transport='in-process' opens no port: keys= and bind_ip= are for tcp",
        ),
        ({"transport": "in-process", "bind_ip": "127.0.0.1"}, "transport='in-process' opens no port"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str):
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        make_trainer_config(**settings)


def test_every_setting_is_shown_to_do_something():
    """Where: `port_number` .. in all of these tests; `keys`, `key_name`, `bind_ip` in
    test_keys and test_server; the others here."""
    shown = {
        "port_number",
        "broadcast_port",
        "request_types",
        "rate_limit",
        "version",
        "bind_ip",
        "keys",
        "key_name",
        "transport",
    }
    shown |= {"metrics_port", "max_message_bytes", "experimental_pipeline_port"}
    assert set(TrainerConfig.__dataclass_fields__) == shown
