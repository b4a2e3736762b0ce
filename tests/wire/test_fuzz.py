"""Thousands of messages that nobody should send, to every port of one server, beside a client that works."""

from __future__ import annotations

import http.client
import logging
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.replay import Channel, Log, QueuedDataStore
from hilt.wire import TrainerClient, TrainerConfig, TrainerServer
from hilt.wire.keys import new_keys
from tests.effort import rounds
from tests.wire.fuzz import Captured, Lane, capturing, finish, fuzz_bytes, fuzz_http, fuzz_messages, in_lanes
from tests.wire.processes import free_port
from tests.wire.steps import ENV, Arrived, make_buffer, transition

JUNK = "junk"
MAX_MESSAGE_BYTES = 4 << 20
MAX_ADDRESSES = 8 << 30
GROWTH_BYTES = 24 << 20
"""How much more memory of its own the server may have after the messages than after its warm-up of a tenth as many: the
allocator settles at some 13 MB above, and stays there with twice and three times as many."""


def serve(config: TrainerConfig, folder: Path, pipe: Connection) -> None:
    """The server's process. `junk` forgets, for mutations of good steps are sometimes good steps."""
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # So that a number which asks for memory is an error in this process, not the end of everybody on this machine.
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
    logging.getLogger("hilt").addHandler(logging.NullHandler())  # a refusal is a line, and there are a hundred thousand
    logging.getLogger("hilt").propagate = False
    good, junk = make_buffer(folder / "good"), make_buffer(None, capacity=400, durability="never")
    with TrainerServer(config, request_callback=lambda kind, payload: {"kind": kind, "payload": payload}) as server:
        server.register_data_store(ENV, good)
        server.register_data_store(JUNK, junk)
        for name in ("fuzzed", "after"):
            server.register_channel(name, Channel(4))
        server.start(threaded=True)
        pipe.send("up")
        while not pipe.poll(0.2):
            server.publish_network({"w": np.full(2_000, 7, np.float32)})
        pipe.recv()
        stats = server.stats()
    good.close()
    junk.close()
    pipe.send(stats)


class Server:
    """Its process, from outside."""

    def __init__(self, folder: Path, keys: Path | None):
        ports = [free_port() for _ in range(3)]
        self.folder = folder
        self.config = TrainerConfig(
            *ports[:2], ["send-stats"], keys=None if keys is None else str(keys), bind_ip="127.0.0.1",
            metrics_port=ports[2], max_message_bytes=MAX_MESSAGE_BYTES,
        )  # fmt: skip
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(self.config, folder, theirs), daemon=True)
        self.process.start()
        assert self.pipe.poll(60) and self.pipe.recv() == "up", self.output()

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text()[-3_000:] if path.exists() else ""

    def own_memory(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def metrics(self) -> str:
        assert self.config.metrics_port is not None
        connection = http.client.HTTPConnection("127.0.0.1", self.config.metrics_port, timeout=60)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()

    def end(self) -> dict[str, Any]:
        self.pipe.send("end")
        assert self.pipe.poll(60), self.output()
        stats = self.pipe.recv()
        self.process.join(60)
        assert self.process.exitcode == 0, self.output()
        return stats


@contextmanager
def client(server: Server, name: str, **stores: QueuedDataStore) -> Iterator[TrainerClient]:
    made = TrainerClient(name, "127.0.0.1", server.config, data_stores=stores, wait_for_server=60, timeout_ms=20_000)
    try:
        yield made
    finally:
        made.stop()


def use_everything(server: Server, captured: Captured, channel: str) -> None:
    """One of everything that a client can send, each answered."""
    spool = QueuedDataStore(10_000)
    with client(server, "template", **{JUNK: spool}) as one:
        for n in range(60):
            spool.insert(transition(9, 0, n))
            if n % 10 == 9:
                assert one.update(60_000)
        one.recv_network_callback(lambda payload: None)
        for n in range(3):
            assert one.request("send-stats", {"n": n, "array": np.zeros(1_000)}) is not None
            sampler = one.sampler(JUNK, "prioritized", seed=n)
            batch = sampler.sample(4)
            assert len(sampler) > 0
            sampler.update_priorities(batch.steps, np.ones(4))
            one.channel(channel).put({"item": n})
            one.channel(channel).get(timeout=60)
        deadline = time.monotonic() + 60
        while not {"want:", "ping:"} <= set(captured.templates):
            assert time.monotonic() < deadline, sorted(captured.templates)
            time.sleep(0.05)
    assert {"hello:", "data:", "bye:", "request:send-stats", "request:hilt/sample", "request:hilt/get"} <= set(
        captured.templates
    )


class GoodClient:
    """Inserts all the while."""

    def __init__(self, made: TrainerClient, spool: QueuedDataStore):
        self._made, self._spool = made, spool
        self.inserted = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.005):
            self._spool.insert(transition(0, 0, self.inserted))
            self.inserted += 1

    def end(self) -> None:
        self._end.set()
        self._thread.join(60)
        done = self._made.update(60_000)
        assert done, done


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("keyed", "messages"), [(False, rounds(1_600, 85_000)), (True, rounds(600, 15_000))], ids=["keyless", "with keys"]
)
def test_fuzz(keyed: bool, messages: int, tmp_path: Path, memory_path: Path, counted: Callable[[str], None]):
    keys = tmp_path / "keys" if keyed else None
    if keys is not None:
        new_keys(keys, ["learner", "arm"])
    server = Server(memory_path, keys)
    counts: Counter[str] = Counter()
    spool = QueuedDataStore(100_000)
    try:
        with (
            capturing(lambda message: message.get("store") == ENV or message.get("actor") == "good") as captured,
            client(server, "good", **{ENV: spool}) as one,
        ):
            captured.acknowledged = lambda: one._link.cursors[ENV].process_safe
            good = GoodClient(one, spool)
            use_everything(server, captured, "fuzzed")
            fuzz(server, captured, messages // 10, 1, counts)
            before = server.own_memory()
            counts.clear()
            fuzz(server, captured, messages, 2, counts)
            grown = server.own_memory() - before
            good.end()
            use_everything(server, captured, "after")  # every port serves a client that comes now
            assert server.metrics().count("# TYPE ") > 5
        assert server.process.is_alive(), server.output()
        stats = server.end()
    finally:
        server.process.kill()
    said = ", ".join(f"{count:,} {what}" for what, count in counts.most_common())
    counted(
        f"{counts.total():,} messages ({said}); the server's own memory {grown / 1e6:+.1f} MB, "
        f"{stats['malformed']:,.0f} malformed"
    )
    assert counts.total() - counts["(not heard)"] >= messages
    assert grown < GROWTH_BYTES
    arrived = Arrived(ENV)
    with Log.open(memory_path / "good") as log:
        arrived.look(log)
    assert arrived.order == {(0, 0): list(range(good.inserted))}


def fuzz(server: Server, captured: Captured, messages: int, seed: int, counts: Counter[str]) -> None:
    """So many messages in all, and an answer from each port after them."""
    assert server.config.metrics_port is not None
    per_lane = [Counter[str]() for _ in range(5)]
    data = [Lane(server.config, False, 10 * seed + i, per_lane[i]) for i in range(2)]
    asking = Lane(server.config, True, 10 * seed + 5, per_lane[2])
    raw = messages // 100 if server.config.keys is not None else messages // 4
    http_requests = messages // 50
    rest = messages - raw - http_requests
    try:
        finish(
            in_lanes(
                *(partial(fuzz_messages, lane, captured, rest // 3) for lane in data),
                partial(fuzz_messages, asking, captured, rest - 2 * (rest // 3)),
                partial(fuzz_bytes, server.config, captured, raw, 10 * seed + 6, per_lane[3]),
                partial(fuzz_http, server.config.metrics_port, http_requests, 10 * seed + 7, per_lane[4]),
            ),
            seconds=240,
        )
    except AssertionError as error:
        raise AssertionError(f"{error}; the server said: {server.output()}") from error
    finally:
        for lane in (*data, asking):
            lane.close()
        for one in per_lane:
            counts.update(one)
    server.metrics()
