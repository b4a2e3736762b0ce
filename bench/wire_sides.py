"""The processes of the wire's benchmark: learner, actor, subscriber, and bare sockets for the machine's limits.

Times are `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from bench.sides import serve
from bench.workloads import W1, own_memory, steps_of

STORE = "w1"
Array = npt.NDArray[Any]


class Stranger:
    """Connects again and again, and is never let in."""

    def flood(self, kind: str, port: int, server_key: str, per_second: int, seconds: float) -> float:
        """How many attempts per second were made."""
        context, mine, begun, made = zmq.Context(), zmq.curve_keypair(), time.monotonic(), 0
        context.set(zmq.MAX_SOCKETS, 4_096)
        open_ones: list[Any] = []
        while (now := time.monotonic()) - begun < seconds:
            if made >= (now - begun) * per_second:
                time.sleep(0.001)
                continue
            made += 1
            if kind == "connects only":
                stranger: Any = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
            else:
                stranger = context.socket(zmq.DEALER)
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.RECONNECT_IVL, -1)
                stranger.curve_publickey, stranger.curve_secretkey = mine
                stranger.curve_serverkey = server_key.encode() if kind == "unlisted key" else zmq.curve_keypair()[0]
                stranger.connect(f"tcp://127.0.0.1:{port}")
            open_ones.append(stranger)
            if len(open_ones) > 300:
                open_ones.pop(0).close()
        for stranger in open_ones:
            stranger.close()
        context.destroy(0)
        return made / (time.monotonic() - begun)

    def close(self) -> None:
        """Nothing is open between floods."""


class Learner:
    """A `TrainerServer` with a log of W1."""

    def start(
        self, ports: list[int], path: str, capacity: int | None = None, pool: int = W1.pool, keys: str | None = None
    ) -> None:
        from hilt.replay import Log, Schema
        from hilt.wire import TrainerServer, make_trainer_config

        self._work = W1(pool=pool)
        schema = Schema.of(steps_of(self._work.columns(0))[0])
        self._log = Log.create(path, schema, durability="at most 10 ms", capacity_steps=capacity)
        self._server = TrainerServer(make_trainer_config(*ports, keys=keys, bind_ip="127.0.0.1"))
        self._server.register_data_store(STORE, self._log)
        self._server.start(threaded=True)
        self._network = Network()

    def check(self, sent: list[int] | None = None) -> int:
        """How many steps are held: each exactly once, in order, and a sample of them with every pixel.

        `sent` are the episodes that were sent and must all be there; without it some may have been evicted.
        """
        view = self._log.all()
        held = self._log.read(view.keys(), ["observations/state"])["observations"]["state"][:, :2].astype(int)
        steps: dict[int, list[int]] = {}
        for episode, t in held.tolist():
            steps.setdefault(episode, []).append(t)
        for episode, found in steps.items():
            expected = list(range(found[0], found[0] + len(found))) if sent is None else list(range(self._work.episode))
            assert found == expected, f"episode {episode}: a step is missing, twice or out of order: {found}"
        assert sent is None or sorted(steps) == sorted(sent), (
            f"episodes {sorted(steps)} are in the log, {sorted(sent)} were sent"
        )
        self._work.check(view.sampler(seed=0).sample(64))
        return len(held)

    def received(self) -> int:
        return int(self._server.stats()["received"])

    def publish(self, version: int) -> float:
        """When the call of `publish_network` began."""
        self._network.stamp(version)
        start = time.monotonic()
        self._server.publish_network(self._network.tree)
        return start

    def close(self) -> None:
        self._server.stop()
        self._log.close()


class Actor:
    """A `TrainerClient` with a spool."""

    def start(
        self,
        ports: list[int],
        name: str,
        path: str | None = None,
        capacity: int = 50_000,
        pool: int = W1.pool,
        keys: str | None = None,
    ) -> None:
        from hilt.replay import QueuedDataStore
        from hilt.wire import TrainerClient, make_trainer_config

        self._work = W1(pool=pool)
        self._spool = QueuedDataStore(capacity) if path is None else QueuedDataStore(capacity, path=path)
        config = make_trainer_config(*ports, keys=keys)
        self._client = TrainerClient(name, "127.0.0.1", config, data_stores={STORE: self._spool}, wait_for_server=True)

    def prepare(self, episodes: list[int], own: bool = False) -> None:
        """The transitions of these episodes, in memory before the clock starts.

        A next observation is the same array as the observation of the next transition, as in
        an actor's loop; with `own` it is a copy.
        """
        columns = [self._work.columns(e) for e in episodes]
        self._ready = [step for c in columns for step in steps_of(own_memory(c) if own else c)]

    def stream(self) -> dict[str, float]:
        """From the first insert until all are acknowledged, process-safe and power-safe."""
        ready, insert = self._ready, self._spool.insert
        cpu, start = time.process_time(), time.monotonic()
        for step in ready:
            number = insert(step)
        done = self._client.update(timeout_ms=100_000)
        end, cpu = time.monotonic(), time.process_time() - cpu
        assert done, f"not all were acknowledged: {done}"
        self._wait(number, power=True)
        return {"start": start, "end": end, "power": time.monotonic(), "cpu": cpu}

    def latency(self, power: bool) -> list[float]:
        """Seconds from each insert to its acknowledgment, one at a time."""
        found = []
        for step in self._ready:
            start = time.monotonic()
            self._wait(self._spool.insert(step), power)
            found.append(time.monotonic() - start)
        return found

    def pace(self, hz: float, start: float, seconds: float, first: int) -> list[float]:
        """The lag of each step, inserted at a fixed rate. It runs from when the step was due,
        so that no wait hides the next one's."""
        lags: list[float] = []
        ready: list[Any] = []
        episode = first
        for i in range(int(hz * seconds)):
            due = start + i / hz
            if not ready:
                ready, episode = steps_of(self._work.columns(episode))[::-1], episode + 1
            time.sleep(max(0.0, due - time.monotonic()))
            self._wait(self._spool.insert(ready.pop()), power=False)
            lags.append(time.monotonic() - due)
        return lags

    def _wait(self, number: int, power: bool) -> None:
        assert self._client.wait_acknowledged(STORE, number, power=power, timeout=60.0), (
            f"no acknowledgment of {number} within 60 s"
        )

    def close(self) -> None:
        self._client.stop()
        self._spool.close()


class Network:
    """50,000,000 bytes of float32 in 25 arrays; the version is written into each."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        layers = {f"layer_{i}": {"kernel": (1000, 1024), "bias": (1000,)} for i in range(12)}
        shapes: dict[str, Any] = {**layers, "head": {"kernel": (200, 1000)}}
        self.tree = {name: {k: rng.random(s, np.float32) for k, s in parts.items()} for name, parts in shapes.items()}
        self.leaves: list[Array] = [leaf for parts in self.tree.values() for leaf in parts.values()]
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)

    def stamp(self, version: int) -> None:
        for leaf in self.leaves:
            leaf.flat[0] = leaf.flat[-1] = version


class Subscriber:
    """A `TrainerClient` that acts with the weights it got last."""

    def start(self, ports: list[int], name: str) -> None:
        from hilt.wire import TrainerClient, make_trainer_config

        self._expected = Network()
        self._got: tuple[float, Any] = (0.0, None)
        self._arrived = threading.Semaphore(0)
        self._client = TrainerClient(name, "127.0.0.1", make_trainer_config(*ports), wait_for_server=True)
        self._client.recv_network_callback(self._take)

    def _take(self, tree: Any) -> None:
        self._got = time.monotonic(), tree
        self._arrived.release()

    def expect(self, version: int) -> float:
        """Returns the time at which the callback had this version. It waits until every number has been compared."""
        deadline = time.monotonic() + 60
        self._expected.stamp(version)
        while self._arrived.acquire(timeout=max(0.0, deadline - time.monotonic())):
            at, tree = self._got
            got = [leaf for parts in tree.values() for leaf in parts.values()]
            if int(got[0].flat[0]) == version:
                assert all(map(np.array_equal, got, self._expected.leaves)), (
                    f"version {version} arrived with other numbers"
                )
                return at
        raise AssertionError(f"version {version} did not arrive within 60 s")

    def close(self) -> None:
        self._client.stop()


class Socket:
    """Bare ZeroMQ with one frame per message: what the machine can carry."""

    def bind(self, kind: str) -> int:
        self._context = zmq.Context()
        self._socket = self._context.socket(getattr(zmq, kind))
        return self._socket.bind_to_random_port("tcp://127.0.0.1")

    def connect(self, kind: str, ports: list[int]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(getattr(zmq, kind))
        for port in ports:
            self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, nbytes: int, count: int) -> float:
        """Sends `count` messages and returns the time at which the first one began."""
        # Larger than the processor's cache together, as the frames of a transition are.
        data = np.random.default_rng(0).integers(0, 255, max(nbytes, 64 << 20), np.uint8)
        parts = [data[i : i + nbytes] for i in range(0, len(data) - nbytes + 1, nbytes)]
        start = time.monotonic()
        for i in range(count):
            self._socket.send(parts[i % len(parts)], copy=False)
        return start

    def receive(self, nbytes: int, count: int) -> float:
        """Receives `count` messages and returns the time at which the last one had arrived."""
        for _ in range(count):
            frame = self._socket.recv(copy=False)
            assert len(frame) == nbytes, f"{len(frame)} bytes came, {nbytes} were sent"
        return time.monotonic()

    def answer(self, count: int) -> None:
        for _ in range(count):
            self._socket.recv(copy=False)
            self._socket.send(b"12345678")

    def round_trips(self, nbytes: int, count: int) -> list[float]:
        data, found = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8), []
        for _ in range(count):
            start = time.monotonic()
            self._socket.send(data, copy=False)
            self._socket.recv()
            found.append(time.monotonic() - start)
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


if __name__ == "__main__":
    serve({"learner": Learner, "actor": Actor, "subscriber": Subscriber, "socket": Socket, "stranger": Stranger})
