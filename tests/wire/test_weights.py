"""Weights: the newest wins, nobody is delayed, nothing piles up, and what was published is what arrives."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zmq

from hilt.core.errors import ClosedError, ConfigError, SchemaError
from hilt.wire import weights
from hilt.wire.codec import decode, encode
from hilt.wire.config import TrainerConfig
from hilt.wire.keys import ClientKeys, Gatekeeper, ServerKeys, new_keys
from hilt.wire.weights import Publisher, Subscriber
from tests.wire.processes import free_port
from tests.wire.proxy import Proxy

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Got:
    """A callback that keeps what it was given, and can be slow, stuck or broken."""

    def __init__(self, deed: Callable[[Any], object] = lambda payload: None):
        self.payloads: list[Any] = []
        self._deed = deed

    def __call__(self, payload: Any) -> None:
        self.payloads.append(payload)
        self._deed(payload)

    @property
    def marks(self) -> list[int]:
        return [payload["mark"] for payload in self.payloads]


class Side:
    """Makes publishers, subscribers and proxies, and closes them all."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self.config = TrainerConfig(broadcast_port=free_port())
        self.context: zmq.Context[Any] = zmq.Context()
        stack.callback(self.context.destroy, 0)
        self._contexts: dict[Publisher, zmq.Context[Any]] = {}

    def publisher(self) -> Publisher:
        context = self.context
        if self.config.transport == "tcp":
            context = zmq.Context()
            self._stack.callback(context.destroy, 0)
        publisher = Publisher(context, self.config, None)
        self._contexts[publisher] = context
        self._stack.callback(publisher.close)
        return publisher

    def stop(self, publisher: Publisher) -> None:
        publisher.close()
        self._contexts[publisher].term()  # when this is done the port is free

    def subscriber(self, got: Callable[[Any], object], name: str = "actor", port: int = 0, **more: Any) -> Subscriber:
        config = TrainerConfig(broadcast_port=port) if port else self.config
        subscriber = Subscriber(self.context, config, "127.0.0.1", None, name, f"boot-{name}", got, **more)
        self._stack.callback(subscriber.close)
        return subscriber

    def proxy(self) -> Proxy:
        proxy = Proxy(self.config.broadcast_port)
        self._stack.callback(proxy.close)
        return proxy

    def process(self, name: str) -> Process:
        process = Process(self.config.broadcast_port, name)
        self._stack.callback(process.kill)
        return process

    def by_hand(self, kind: int) -> zmq.Socket[bytes]:
        """The other side, word by word."""
        hand: zmq.Socket[bytes] = self.context.socket(kind)
        hand.set(zmq.RCVTIMEO, 1_000 * DEADLINE_S)
        address = f"tcp://127.0.0.1:{self.config.broadcast_port}"
        hand.connect(address) if kind == zmq.DEALER else hand.bind(address)
        return hand


class Process:
    """An actor that is a process, and tells each version it was given."""

    SOURCE = """
import sys, time, zmq
from hilt.wire.config import TrainerConfig
from hilt.wire.keys import ClientKeys, Gatekeeper, ServerKeys, new_keys
from hilt.wire.weights import Subscriber
port, name = int(sys.argv[1]), sys.argv[2]
def tell(payload):
    assert (payload["array"] == payload["mark"]).all()
    print(payload["mark"], flush=True)
Subscriber(zmq.Context(), TrainerConfig(broadcast_port=port), "127.0.0.1", None, name, name, tell)
time.sleep(600)
"""

    def __init__(self, port: int, name: str):
        command = [sys.executable, "-c", self.SOURCE, str(port), name]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.marks: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.marks.extend(int(line) for line in self._process.stdout)

    def stop(self) -> None:
        """Returns when every thread stands still, which on a busy machine takes a moment."""
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        until(lambda: all(") T " in stat.read_text() for stat in tasks.glob("*/stat")))

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def side() -> Iterator[Side]:
    with ExitStack() as stack:
        yield Side(stack)


def test_a_tree_of_arrays_arrives_as_it_was(side: Side) -> None:
    got = Got()
    versions: list[int] = []
    subscriber = side.subscriber(got, on_version=versions.append)
    publisher = side.publisher()
    random = np.random.default_rng(0)
    tree = {
        "actor": {"kernel": random.normal(size=(300, 500)).astype(np.float32), "bias/0": np.arange(7.0)},
        "brain": random.normal(size=(1000, 3)).astype(ml_dtypes.bfloat16),
        "columns": np.asfortranarray(random.integers(0, 9, (40, 90))),
        "none": np.zeros((0, 3)),
        "step": 5,
        "list": [np.float32(2), "text", None],
    }
    assert publisher.publish(tree) == 1
    until(lambda: versions == [1])
    assert (publisher.version, subscriber.version) == (1, 1)
    [payload] = got.payloads
    for path in ("brain", "columns", "none"):
        assert payload[path].dtype == tree[path].dtype  # type: ignore[attr-defined]
        np.testing.assert_array_equal(payload[path], tree[path])  # type: ignore[arg-type]
    np.testing.assert_array_equal(payload["actor"]["kernel"], tree["actor"]["kernel"])  # type: ignore[index]
    np.testing.assert_array_equal(payload["actor"]["bias/0"], np.arange(7.0))
    assert (payload["step"], payload["list"]) == (5, [2, "text", None])
    assert not payload["actor"]["kernel"].flags.writeable
    assert payload["actor"]["kernel"].flags.aligned
    for odd in (None, 3, "text", np.arange(1000), [np.arange(1000)]):
        publisher.publish(odd)
        until(lambda: subscriber.version == publisher.version)
        np.testing.assert_array_equal(got.payloads[-1], odd)  # type: ignore[arg-type]


def test_the_last_of_many_fast_ones_arrives(side: Side) -> None:
    """Where PUB and SUB kept the oldest three of fifty."""
    got = Got(lambda payload: time.sleep(0.02))
    subscriber = side.subscriber(got)
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    until(lambda: got.payloads)
    for mark in range(2, 51):
        publisher.publish({"mark": mark, "array": np.full(10_000, mark)})
    until(lambda: subscriber.version == 50)
    assert got.marks[-1] == 50
    assert got.marks == sorted(set(got.marks))
    assert len(got.marks) < 50


def test_a_late_joiner_gets_the_newest_and_only_that(side: Side) -> None:
    publisher = side.publisher()
    for mark in range(1, 8):
        publisher.publish({"mark": mark})
    got = Got()
    subscriber = side.subscriber(got, "late")
    until(lambda: subscriber.version == 7)
    assert got.marks == [7]
    until(lambda: publisher.stats()["subscribers"][0]["version"] == 7)
    [row] = publisher.stats()["subscribers"]
    assert (row["name"], row["boot"]) == ("late", "boot-late")
    assert 0 <= row["seen_s"] < weights.LATELY_S


@pytest.mark.parametrize(
    ("seconds", "length"), [(2.5, 1_000), pytest.param(2.5, 5_000_000, marks=pytest.mark.long), (8.0, 5_000_000)]
)
def test_weights_stopped_subscriber_delays_no_other_and_gets_the_newest(
    side: Side, seconds: float, length: int
) -> None:
    """With an answer on its way that is small, or fills what the network holds, or
    lasts until the connection is given up."""
    publisher = side.publisher()
    stopped, other = side.process("stopped"), side.process("other")

    def publish(mark: int) -> None:
        publisher.publish({"mark": mark, "array": np.full(length, mark, np.int64)}, version=mark)

    publish(1)
    until(lambda: stopped.marks and other.marks)
    until(lambda: [row["version"] for row in publisher.stats()["subscribers"]] == [1, 1])
    stopped.stop()
    since = time.monotonic()
    for mark in range(2, 7):
        publish(mark)
        until(lambda: other.marks[-1] == mark)  # noqa: B023
    time.sleep(max(0, since + seconds - time.monotonic()))
    assert stopped.marks == [1]
    stopped.go_on()
    until(lambda: stopped.marks[-1] == 6)
    assert stopped.marks == [1, 6]
    publish(7)
    until(lambda: stopped.marks[-1] == other.marks[-1] == 7)
    assert other.marks == list(range(1, 8))


def test_a_stopped_learner_is_waited_for(side: Side) -> None:
    """Seen from the actor: silence, then another socket, then all is well."""
    publisher = side.publisher()
    proxy = side.proxy()
    got = Got()
    subscriber = side.subscriber(got, port=proxy.ports[0])
    publisher.publish({"mark": 1})
    until(lambda: subscriber.version == 1)
    proxy.stall()
    publisher.publish({"mark": 2})
    until(lambda: subscriber.stats()["sockets_renewed"])
    proxy.heal()
    until(lambda: subscriber.version == 2)
    assert got.marks == [1, 2]


def test_a_restarted_learner_is_followed_whatever_its_numbers(side: Side) -> None:
    got = Got()
    subscriber = side.subscriber(got)
    first = side.publisher()
    first.publish({"mark": 10}, version=70)
    until(lambda: subscriber.version == 70)
    side.stop(first)
    second = side.publisher()
    second.publish({"mark": 11})
    until(lambda: subscriber.version == 1)
    second.publish({"mark": 12})
    until(lambda: subscriber.version == 2)
    assert got.marks == [10, 11, 12]
    assert subscriber.stats()["instance"] == second.instance != first.instance


def test_an_actor_of_the_learner_before_counts_as_having_nothing(side: Side) -> None:
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    hand = side.by_hand(zmq.DEALER)
    hand.send_multipart(encode(want(have=70, instance="another")))
    assert decode(hand.recv_multipart())["version"] == 1
    assert [row["version"] for row in publisher.stats()["subscribers"]] == [0]


def test_numbers_go_on_above_what_an_actor_has_seen(side: Side) -> None:
    publisher = side.publisher()
    publisher.raise_to(41)
    assert publisher.version == 0
    assert publisher.publish({}) == 42
    publisher.raise_to(7)
    assert publisher.publish({}) == 43
    assert publisher.publish({}, version=np.int64(50)) == 50  # type: ignore[arg-type]
    assert publisher.publish({}) == 51


def test_a_number_of_ones_own_needs_only_be_above_this_learners_last(side: Side) -> None:
    """A learner that goes on from an old checkpoint numbers by its steps; actors have seen higher ones."""
    publisher = side.publisher()
    publisher.raise_to(1_500)
    assert publisher.publish({}, version=1_000) == 1_000
    assert publisher.publish({}) == 1_501


def test_weights_are_copied_and_memory_in_use_is_not_reused(side: Side) -> None:
    """Three actors keep what they got; each kept array must still be what was published under its number."""
    publisher = side.publisher()
    actors = [Got(), Got(lambda payload: time.sleep(0.01)), Got()]
    subscribers = [side.subscriber(got, f"actor-{i}") for i, got in enumerate(actors)]
    array = np.zeros(50_000)
    for mark in range(1, 101):
        array[:] = mark
        publisher.publish({"mark": mark, "array": array})
        array[:] = -1
        for got in actors:
            del got.payloads[: max(0, len(got.payloads) - 5)]
        time.sleep(0.002)
    until(lambda: [subscriber.version for subscriber in subscribers] == [100] * 3)
    for got in actors:
        assert 0 < len(got.payloads) <= 6 + 100
        for payload in got.payloads:
            assert (payload["array"] == payload["mark"]).all()


def test_weights_in_process_open_no_port(side: Side) -> None:
    side.config = TrainerConfig(broadcast_port=side.config.broadcast_port, transport="in-process")
    got = Got()
    subscriber = side.subscriber(got)
    publisher = side.publisher()
    array = np.arange(500_000)
    publisher.publish({"mark": 1, "array": array})
    array[:] = 0
    until(lambda: subscriber.version == 1)
    np.testing.assert_array_equal(got.payloads[0]["array"], np.arange(500_000))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", side.config.broadcast_port)) != 0
    for mark in range(2, 30):
        publisher.publish({"mark": mark})
    until(lambda: subscriber.version == 29)
    publisher.close()
    another = side.publisher()
    another.publish({"mark": 30})
    until(lambda: got.marks[-1] == 30)


def test_with_keys_those_on_the_list_get_them(side: Side, tmp_path: Path) -> None:
    new_keys(tmp_path / "keys", ["learner", "actor"])
    new_keys(tmp_path / "strangers", ["learner", "stranger"])
    (tmp_path / "strangers/learner.pub").write_bytes((tmp_path / "keys/learner.pub").read_bytes())
    keys = ServerKeys.load(tmp_path / "keys")
    gatekeeper = Gatekeeper(side.context, keys)
    publisher = Publisher(side.context, side.config, keys)
    ours, theirs = Got(), Got()
    outside: zmq.Context[Any] = zmq.Context()
    subscribers = [
        Subscriber(outside, side.config, "127.0.0.1", ClientKeys.load(tmp_path / folder), folder, "boot", got)
        for folder, got in (("keys", ours), ("strangers", theirs))
    ]
    try:
        publisher.publish({"mark": 1, "array": np.arange(500_000)})
        until(lambda: ours.payloads and gatekeeper.refused)
        np.testing.assert_array_equal(ours.payloads[0]["array"], np.arange(500_000))
        assert theirs.payloads == []
        assert [row["name"] for row in publisher.stats()["subscribers"]] == ["keys"]
    finally:
        for closing in (*subscribers, publisher, gatekeeper):
            closing.close()
        outside.destroy(0)


def test_a_network_slower_than_every_patience_delivers(side: Side) -> None:
    """Eight seconds for one answer: longer than heartbeats and the actor itself bear silence."""
    publisher = side.publisher()
    proxy = side.proxy()
    proxy.slow(500_000)
    got = Got()
    publisher.publish({"mark": 1, "array": np.ones(500_000)})
    subscriber = side.subscriber(got, port=proxy.ports[0])
    until(lambda: got.payloads)
    assert subscriber.stats()["sockets_renewed"] == 0
    assert publisher.stats()["answers"] == proxy.counts["connections"] == 1


def test_weights_interrupted_transfer_is_repeated_with_the_newest(side: Side) -> None:
    publisher = side.publisher()
    proxy = side.proxy()
    proxy.slow(1_000_000)  # all of it would take eight seconds
    got = Got()
    side.subscriber(got, port=proxy.ports[0])
    publisher.publish({"mark": 1, "array": np.ones(1_000_000)})
    until(lambda: proxy.counts["down"] > 200_000)
    publisher.publish({"mark": 2, "array": np.ones(1_000_000)})
    proxy.cut()
    proxy.heal()
    until(lambda: got.payloads)
    assert got.marks == [2]


def test_a_thousand_publishes_leave_memory_as_it_was(side: Side) -> None:
    publisher = side.publisher()
    got = Got()
    subscriber = side.subscriber(lambda payload: None)
    side.subscriber(lambda payload: time.sleep(0.05), "slow")
    array = np.ones(250_000, np.float32)

    def publish(times: int) -> int:
        for _ in range(times):
            publisher.publish({"array": array})
            if publisher.version % 10 == 0:
                until(lambda: subscriber.version == publisher.version)
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = publish(100)
    assert publish(1_000) - before < 30 << 20  # a gigabyte went through
    assert got.payloads == []


def test_weights_blocks_are_reused_without_references() -> None:
    blocks = weights._Blocks()

    def address(view: memoryview) -> int:
        return np.frombuffer(view, np.uint8).ctypes.data

    first = blocks.take(10_000)
    where = address(first)
    part = np.frombuffer(first[100:200], np.uint8)[10:20]
    del first
    other = blocks.take(10_000)
    assert address(other) != where
    del part
    assert address(blocks.take(10_000)) == where
    assert len(blocks.take(20_000)) == 20_000  # what does not fit is let go
    assert len(blocks._free) <= weights.KEPT_BLOCKS


def test_large_blocks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "KEPT_BYTES", 1_000)
    blocks = weights._Blocks()
    blocks.take(1_001)
    assert not blocks._free
    blocks.take(1_000)
    assert blocks._free


# What is refused, and said


@pytest.mark.parametrize("version", [3, 2, 0, -1, True, 4.0, "4", 1 << 63])
def test_a_version_must_be_above_the_last(side: Side, version: Any) -> None:
    publisher = side.publisher()
    publisher.publish({}, version=3)
    text = re.escape(
        f"version={version!r}: expected a whole number above 3, the last one; leave it out for the next number."
    )
    with pytest.raises(ConfigError, match=f"^{text}$"):
        publisher.publish({}, version=version)
    assert publisher.version == 3


def test_weights_that_cannot_be_sent_do_not_replace_the_newest(side: Side) -> None:
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    with pytest.raises(SchemaError, match=r"^payload/actor/net: "):
        publisher.publish({"actor": {"net": object()}})
    side.config = TrainerConfig(broadcast_port=side.config.broadcast_port, max_message_bytes=1 << 16)
    got = Got()
    subscriber = side.subscriber(got)
    until(lambda: subscriber.version == 1)
    assert publisher.publish({"mark": 2}) == 2


def test_an_array_beyond_the_limit_is_refused_where_it_is_published(side: Side) -> None:
    side.config = TrainerConfig(broadcast_port=side.config.broadcast_port, max_message_bytes=1 << 16)
    publisher = side.publisher()
    with pytest.raises(
        ConfigError,
        match=r"^publish: an array of 65537 bytes, but max_message_bytes=65536. "
        r"Give make_trainer_config a larger one on both sides, or split the array\.$",
    ):
        publisher.publish(np.zeros((1 << 16) + 1, np.uint8))
    with pytest.raises(
        ConfigError,
        match=r"^publish: 32\d{6} bytes of weights, but max_message_bytes=65536 allows 29491200. "
        r"Give make_trainer_config a larger one on both sides\.$",
    ):
        publisher.publish([np.zeros(1 << 16, np.uint8)] * 500)
    got = Got()
    side.subscriber(got)
    publisher.publish({"mark": 1, "arrays": [np.full(1 << 16, i % 200, np.uint8) for i in range(400)]})
    until(lambda: got.payloads)
    assert [int(array[-1]) for array in got.payloads[0]["arrays"]] == [i % 200 for i in range(400)]


def test_after_close_nothing_is_published(side: Side) -> None:
    publisher = side.publisher()
    publisher.close()
    publisher.close()
    with pytest.raises(ClosedError, match=r"^publish: the server is stopped\. Make another one to go on\.$"):
        publisher.publish({})


def test_weights_port_in_use_is_an_error(side: Side) -> None:
    side.publisher()
    with pytest.raises(ConfigError, match=r"cannot listen here .* Another program uses this port"):
        side.publisher()


def test_a_failing_callback_is_logged_and_the_next_weights_come(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    def fail(payload: Any) -> None:
        if payload["mark"] == 1:
            raise KeyError("no such layer")

    got = Got(fail)
    versions: list[int] = []
    subscriber = side.subscriber(got, on_version=versions.append)
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    until(lambda: subscriber.stats()["callback_errors"] == 1)
    assert subscriber.version == 0
    publisher.publish({"mark": 2})
    until(lambda: subscriber.version == 2)
    assert got.marks == [1, 2]  # the one that failed is not given again
    assert versions == [2]
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == "actor: the callback for weights, version 1, failed; waiting for the next."
    assert "no such layer" in caplog.text
    assert "Traceback" in caplog.text


def test_close_leaves_a_stuck_callback_behind(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    got = Got(lambda payload: go_on.wait(DEADLINE_S))
    subscriber = side.subscriber(got)
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    until(lambda: got.payloads)
    publisher.publish({"mark": 2})
    subscriber.close()
    subscriber.close()
    publisher.close()
    assert caplog.messages == ["actor: the callback for weights is still running after 1 s; it is left behind."]
    assert threading.Thread.is_alive(subscriber._thread)
    ended = threading.Thread(target=side.context.term, daemon=True)  # hangs if a socket were left open
    ended.start()
    ended.join(DEADLINE_S)
    assert not ended.is_alive()
    go_on.set()
    subscriber._thread.join(DEADLINE_S)
    assert got.marks == [1]
    assert "Exception" not in caplog.text


def test_a_callback_may_close_its_own_subscriber(side: Side) -> None:
    made: list[Subscriber] = []
    got = Got(lambda payload: made[0].close())
    made.append(side.subscriber(got))
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    until(lambda: got.payloads)
    made[0]._thread.join(DEADLINE_S)
    assert not made[0]._thread.is_alive()


# The other side by hand: what no program of ours says


def want(**other: Any) -> dict[str, Any]:
    return {"kind": "want", "seq": 1, "have": 0, "instance": "", "name": "hand", "boot": "b", **other}


def test_a_repeated_question_is_answered_once(side: Side) -> None:
    publisher = side.publisher()
    hand = side.by_hand(zmq.DEALER)
    hand.send_multipart(encode(want()))
    assert decode(hand.recv_multipart()) == {"kind": "none", "seq": 1, "sent": False}
    publisher.publish({"mark": 1})
    answer = decode(hand.recv_multipart())
    assert (answer["kind"], answer["seq"], answer["version"], answer["instance"]) == (
        "weights",
        1,
        1,
        publisher.instance,
    )
    publisher.publish({"mark": 2})
    for _ in range(3):
        hand.send_multipart(encode(want()))
        assert decode(hand.recv_multipart()) == {"kind": "none", "seq": 1, "sent": True}
    hand.send_multipart(encode(want(seq=2, have=1, instance=publisher.instance)))
    assert decode(hand.recv_multipart())["version"] == 2
    hand.send_multipart(encode(want(seq=3, have=2, instance=publisher.instance)))
    assert decode(hand.recv_multipart()) == {"kind": "none", "seq": 3, "sent": False}
    assert publisher.stats()["answers"] == 2
    assert publisher.stats()["bytes_sent"] > 0


MALFORMED: Sequence[list[bytes]] = [
    [b""],
    [b"\xff" * 100],
    [bytes(encode(want())[0])[:-1]],
    [bytes(encode(want())[0]), b"more"],
    *(
        [bytes(frame) for frame in encode(message)]
        for message in (
            {},
            {"kind": "give"},
            want(kind=["want"]),
            want(have=-1),
            want(have=True),
            want(have=1 << 63),
            want(seq=None),
            want(name=3),
            want(name="n" * 257),
            want(boot=b"b"),
            want(instance=None),
        )
    ),
]


def test_the_learner_counts_and_drops_what_is_malformed(side: Side) -> None:
    publisher = side.publisher()
    publisher.publish({"mark": 1})
    hand = side.by_hand(zmq.DEALER)
    for frames in MALFORMED:
        hand.send_multipart(frames)
    hand.send_multipart(encode(want()))
    assert decode(hand.recv_multipart())["version"] == 1
    assert publisher.stats()["malformed"] == len(MALFORMED)
    assert len(publisher.stats()["subscribers"]) == 1


def test_the_table_of_actors_is_bounded(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_ACTORS", 4)
    publisher = side.publisher()
    hands = [side.by_hand(zmq.DEALER) for _ in range(10)]
    for i, hand in enumerate(hands):
        hand.send_multipart(encode(want(name=f"hand-{i}")))
        hand.recv_multipart()
    assert [row["name"] for row in publisher.stats()["subscribers"]] == ["hand-6", "hand-7", "hand-8", "hand-9"]
    publisher.publish({"mark": 1})
    assert decode(hands[9].recv_multipart())["version"] == 1
    hands[0].send_multipart(encode(want(name="hand-0")))  # forgotten, not shut out
    assert decode(hands[0].recv_multipart())["version"] == 1


def test_an_actor_that_is_gone_is_forgotten(side: Side) -> None:
    publisher = side.publisher()
    hand = side.by_hand(zmq.DEALER)
    hand.send_multipart(encode(want()))
    hand.recv_multipart()
    hand.close(0)
    time.sleep(0.3)  # or an answer is sent before it is known
    until(lambda: publisher.publish({}) and not publisher.stats()["subscribers"])


class Hand:
    """A learner by hand: reads questions, and answers as it likes."""

    def __init__(self, side: Side):
        self._socket = side.by_hand(zmq.ROUTER)
        self._identity = b""

    def read(self) -> dict[str, Any]:
        self._identity, *frames = self._socket.recv_multipart()
        return decode(frames)

    def say(self, **message: Any) -> None:
        self._socket.send_multipart([self._identity, *encode(message)])

    def raw(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._identity, *frames])


def answer(seq: int, version: int, payload: Any, **other: Any) -> dict[str, Any]:
    frames = encode({"payload": payload})
    sizes = [memoryview(frame).nbytes for frame in frames]
    offsets, total = weights._places(sizes)
    block = np.zeros(total, np.uint8)
    for offset, frame in zip(offsets, frames, strict=True):
        block[offset : offset + len(frame)] = np.frombuffer(frame, np.uint8)
    whole = {
        "kind": "weights",
        "seq": seq,
        "instance": "hand",
        "version": version,
        "offset": 0,
        "sizes": sizes,
        "data": block,
    }
    return {**whole, **other}


def test_the_actor_counts_and_drops_what_is_malformed(side: Side) -> None:
    got = Got()
    subscriber = side.subscriber(got)
    hand = Hand(side)
    seq = hand.read()["seq"]
    good = answer(seq, 1, {"mark": 1})
    bad: list[dict[str, Any]] = [
        {},
        {"kind": "give", "seq": seq},
        {"kind": "none"},
        {**good, "data": None},
        {**good, "data": good["data"].astype(np.float32)},
        {**good, "data": good["data"].reshape(1, -1)},
        {**good, "data": good["data"][:0]},
        {**good, "data": np.zeros(10_000, np.uint8)},
        {**good, "version": -1},
        {**good, "offset": "0"},
        {**good, "instance": 4},
        *({**good, "sizes": sizes} for sizes in (None, [], [-1], [True], ["1"], [(1 << 30) + 1], {"0": 1})),
    ]
    hand.raw(b"")
    hand.raw(b"\xff" * 50, b"")
    for message in bad:
        hand.say(**message)
    hand.say(**{**good, "seq": seq + 7})  # an answer to no question of this one
    hand.say(**{**good, "offset": 64})  # the middle without a beginning
    hand.say(**good)
    until(lambda: subscriber.version == 1)
    assert subscriber.stats()["malformed"] == 2 + len(bad)
    assert got.marks == [1]


def test_weights_truncated_reply_is_requested_again(side: Side) -> None:
    got = Got()
    subscriber = side.subscriber(got)
    hand = Hand(side)
    seq = hand.read()["seq"]
    payload = {"mark": 1, "array": np.arange(1_000)}
    whole = answer(seq, 1, payload)
    hand.say(**{**whole, "data": whole["data"][:100]})
    hand.say(kind="none", seq=seq, sent=True)
    while (again := hand.read()["seq"]) == seq:
        pass
    hand.say(**{**whole, "offset": 100, "sizes": None, "data": whole["data"][100:]})  # the rest of the old one
    hand.say(**answer(again, 2, {"mark": 2}))
    until(lambda: subscriber.version == 2)
    assert got.marks == [2]


def test_weights_that_cannot_be_read_are_left_out(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    got = Got()
    subscriber = side.subscriber(got)
    hand = Hand(side)
    seq = hand.read()["seq"]
    whole = answer(seq, 1, {"mark": 1})
    hand.say(**{**whole, "data": np.full(whole["data"].size, 255, np.uint8)})
    while (asked := hand.read())["seq"] == seq:
        pass
    assert asked["have"] == 1  # or it would come again and again
    hand.say(**answer(asked["seq"], 2, {"mark": 2}))
    until(lambda: subscriber.version == 2)
    assert caplog.messages[0].startswith(
        "actor: weights, version 1, are unreadable and left out: the message begins with"
    )
    assert subscriber.stats()["malformed"] == 1


def test_weights_without_room_are_left_out(
    side: Side, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = weights._Blocks.take

    def refuse(blocks: weights._Blocks, size: int) -> memoryview:
        if size > 1_000:
            raise MemoryError
        return take(blocks, size)

    monkeypatch.setattr(weights._Blocks, "take", refuse)
    got = Got()
    subscriber = side.subscriber(got)
    hand = Hand(side)
    seq = hand.read()["seq"]
    hand.say(**answer(seq, 1, np.zeros(2_000, np.uint8)))
    while (asked := hand.read())["seq"] == seq:
        pass
    hand.say(**answer(asked["seq"], 2, {"mark": 2}))
    until(lambda: subscriber.version == 2)
    assert re.fullmatch(r"actor: no memory for 20\d\d bytes of weights, version 1 left out\.", caplog.messages[0])


def test_weights_silence_opens_a_new_socket_and_logs(
    side: Side, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SILENCE_S", 0.2)
    monkeypatch.setattr(weights, "ASK_S", 0.05)
    caplog.set_level(logging.WARNING, "hilt.wire")
    got = Got()
    subscriber = side.subscriber(got)
    until(lambda: subscriber.stats()["sockets_renewed"] >= 3)
    where = f"127.0.0.1:{side.config.broadcast_port}"
    assert set(caplog.messages) == {f"actor: nothing from the learner at {where}; trying again with a new connection."}
    side.publisher().publish({"mark": 1})
    until(lambda: subscriber.version == 1)
    assert subscriber._silence_timeout_s == 0.2


def test_weights_received_while_stopped_are_delivered(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SILENCE_S", 0.5)
    got = Got()
    subscriber = side.subscriber(got)
    hand = Hand(side)
    seq = hand.read()["seq"]
    subscriber._late = True
    hand.say(**answer(seq, 1, {"mark": 1}))
    while (asked := hand.read())["seq"] == seq:
        pass
    assert (asked["have"], asked["instance"]) == (1, "hand")
    until(lambda: subscriber.version == 1)  # without another word
    assert got.marks == [1]
