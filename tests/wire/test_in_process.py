"""A learner and its actors as threads of one process: the same names, the same promises, and no port."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, DeadlineError
from hilt.replay import Channel
from tests.wire.pair import FLUSH_MS, Pair, eventually, said_in
from tests.wire.steps import ENV, INTERVENTION, Arrived, transition

INSIDE = {"transport": "in-process"}


def listening() -> set[str]:
    """The TCP ports that this process listens on, as the kernel sees them."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1])
    return found


def test_in_process_transport(pair: Pair):
    before = listening()
    buffers = {ENV: pair.buffer("a"), INTERVENTION: pair.buffer("b")}
    server = pair.server(stores=buffers, request_callback=lambda _, payload: {"got": payload["x"]}, **INSIDE)
    spools = {ENV: pair.spool(), INTERVENTION: pair.spool(5)}
    client = pair.client(stores=spools, **INSIDE)
    weights: list[Any] = []
    client.recv_network_callback(lambda params: weights.append(params["w"].copy()))
    assert server.publish_network({"w": np.arange(5.0)}) == 1
    eventually(lambda: client.policy_version == 1, "the weights")
    for n in range(200):
        for spool in spools.values():
            spool.insert(transition(1, 0, n))
    done = client.update(FLUSH_MS)
    assert done and done.acknowledged == 400
    assert np.array_equal(weights[0], np.arange(5.0))
    assert client.request("send-stats", {"x": 3}, FLUSH_MS) == {"got": 3}
    for name, buffer in buffers.items():
        arrived = Arrived(name)
        arrived.look(buffer.log)
        assert arrived.order == {(1, 0): list(range(200))}
    assert set(buffers[ENV].log.read(buffers[ENV].view.keys(), ["policy_version"])["policy_version"].tolist()) == {1}
    batch = client.sampler(ENV, seed=1).sample(8)
    assert np.array_equal(batch["actions"], buffers[ENV].view.sampler(seed=1).sample(8)["actions"])
    assert listening() <= before
    eventually(lambda: client.update().power_safe, "the disk")


def test_several_actors(pair: Pair):
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer}, **INSIDE)
    spools = [pair.spool() for _ in range(4)]
    clients = [pair.client(f"actor-{i}", {ENV: spool}, **INSIDE) for i, spool in enumerate(spools)]

    def act(i: int) -> None:
        for n in range(50):
            spools[i].insert(transition(i, 0, n))

    threads = [threading.Thread(target=act, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(client.update(FLUSH_MS) for client in clients)
    arrived = Arrived(ENV)
    arrived.look(buffer.log)
    assert arrived.order == {(i, 0): list(range(50)) for i in range(4)}


def test_in_process_steps_are_copied(pair: Pair):
    """Though both sides have the same memory."""
    kept: list[Any] = []
    server = pair.server(stores={}, request_callback=lambda _, payload: kept.append(payload["x"]) or {}, **INSIDE)
    channel: Channel[Any] = Channel(0, "c")
    server.register_channel("c", channel)
    client = pair.client(stores={}, **INSIDE)
    x = np.zeros(5000)
    client.request("send-stats", {"x": x})
    client.channel("c").put({"x": x})
    x[:] = 1
    assert not kept[0].any() and not channel.get(timeout=0)["x"].any()


def test_the_learner_may_be_replaced(pair: Pair):
    """Steps wait meanwhile, and nothing arrives twice."""
    spool = pair.spool()
    first = pair.server(stores={ENV: pair.buffer()}, **INSIDE)
    client = pair.client(stores={ENV: spool}, options={"timeout_ms": 300}, **INSIDE)
    for n in range(5):
        spool.insert(transition(1, 0, n))
    assert client.update(FLUSH_MS)
    first.stop()
    first.data_store(ENV).close()
    for n in range(5, 10):
        spool.insert(transition(1, 0, n))
    assert not client.update(100)
    buffer = pair.buffer()
    pair.server(stores={ENV: buffer}, **INSIDE)
    assert client.update(FLUSH_MS)
    assert buffer.log.read(buffer.view.keys(), ["actions"])["actions"][:, 0].tolist() == list(range(10))


def test_two_learners_need_two_names(pair: Pair):
    pair.server(stores={}, **INSIDE)
    with pytest.raises(ConfigError, match=r"inproc://hilt-\d+: cannot listen here \(Address already in use\)"):
        pair.server(stores={}, **INSIDE)


def test_in_process_without_a_server(pair: Pair, caplog: pytest.LogCaptureFixture):
    with pytest.raises(DeadlineError, match="connecting: no answer from the learner at this process within"):
        pair.client(options={"timeout_ms": 200}, **INSIDE)
    server = pair.server(stores={ENV: pair.buffer(None)}, **INSIDE)
    pair.client(**INSIDE)
    assert (
        "the learner at this process keeps 'actor_env' only while it runs; give its store a path= to keep steps"
        in said_in(caplog)
    )
    server.stop()
    pair.server(stores={}, **INSIDE)  # its name is free again
