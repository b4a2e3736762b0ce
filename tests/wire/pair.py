"""A learner and its clients in this process; and somebody who speaks the protocol
by hand, to say what a client never would."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from hilt.replay import QueuedDataStore
from hilt.wire import TrainerClient, TrainerConfig, TrainerServer, make_trainer_config
from hilt.wire.codec import decode, encode
from tests.wire.journal import wait_for
from tests.wire.processes import free_port
from tests.wire.steps import ENV, make_buffer, transition

SECONDS = 120
FLUSH_MS = 1000 * SECONDS


class Pair:
    """What was made ends with it, the latest first."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ports = (free_port(), free_port())
        self._ending = ExitStack()
        self._serves = False  # whether a client may count on an answer, however busy the machine is

    def close(self) -> None:
        self._ending.close()

    def config(self, **settings: Any) -> TrainerConfig:
        given = {"port_number": self.ports[0], "broadcast_port": self.ports[1], **settings}
        return make_trainer_config(**given)

    def buffer(self, path: str | None = "env", **settings: Any) -> Any:
        made = make_buffer(self.folder / path if path else None, **settings)
        self._ending.callback(made.close)
        return made

    def server(
        self,
        *,
        stores: dict[str, Any] | None = None,
        data_callback: Callable[..., Any] | None = None,
        request_callback: Callable[..., Any] | None = None,
        start: bool = True,
        **settings: Any,
    ) -> TrainerServer:
        made = TrainerServer(self.config(**settings), data_callback, request_callback)
        self._ending.callback(made.stop)
        for name, store in ({ENV: self.buffer()} if stores is None else stores).items():
            made.register_data_store(name, store)
        if start:
            made.start(threaded=True)
            self._serves = True
        return made

    def spool(self, capacity: int = 1000, **options: Any) -> QueuedDataStore:
        made = QueuedDataStore(capacity, **options)
        self._ending.callback(made.close)
        return made

    def client(
        self, name: str = "actor-1", stores: dict[str, Any] | None = None, *, options: Any = None, **settings: Any
    ) -> TrainerClient:
        """With one new queue for `ENV` unless told otherwise; `options` are those of
        the client, `settings` of the config."""
        given = {ENV: self.spool()} if stores is None else stores
        how = {"timeout_ms": 5000, "wait_for_server": SECONDS if self._serves else False, **(options or {})}
        made = TrainerClient(name, "127.0.0.1", self.config(**settings), data_stores=given, **how)
        self._ending.callback(made.stop)
        return made

    def by_hand(self, port: int | None = None) -> ByHand:
        made = ByHand(self.ports[0] if port is None else port)
        self._ending.callback(made.close)
        return made


class ByHand:
    """A client's socket, and no client."""

    def __init__(self, port: int):
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.instance: Any = None

    def send(self, **message: Any) -> None:
        self._socket.send_multipart(encode({"instance": self.instance, **message}))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def receive(self, kind: str, seconds: float = SECONDS) -> dict[str, Any]:
        """The next message of this kind; others are passed over."""
        while True:
            assert self._socket.poll(1000 * seconds), f"no {kind} within {seconds:g} s"
            message = decode(self._socket.recv_multipart())
            if message["kind"] == kind:
                return message

    def hello(self, config: TrainerConfig, **changes: Any) -> None:
        agreement = config.agreement()
        said = {"kind": "hello", "actor": "hand", "boot": "b", "seen_version": -1, "agreement": agreement, "stores": {}}
        self.send(**{**said, **changes})

    def enter(self, config: TrainerConfig, **changes: Any) -> dict[str, Any]:
        self.hello(config, **changes)
        welcome = self.receive("welcome")
        self.instance = welcome["instance"]
        return welcome

    def close(self) -> None:
        self._context.destroy(0)


def packed(*numbers: int, **changes: Any) -> dict[str, Any]:
    """A block of known transitions, as a client packs it."""
    queue = QueuedDataStore(1000)
    for n in numbers:
        queue.insert({**transition(1, 0, n), **changes})
    parcel = queue.parcel(-1)
    assert parcel is not None and parcel.packed is not None and parcel.last == len(numbers) - 1
    return parcel.packed


def scrape(port: int) -> dict[str, float]:
    """What Prometheus would read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")
    }


def said_in(caplog: Any, level: int = logging.WARNING) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= level)


def eventually(condition: Callable[[], object], what: str) -> None:
    wait_for(condition, what, SECONDS)
