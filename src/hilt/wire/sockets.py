"""ZeroMQ sockets as both sides use them: bounded, keyed beyond loopback, and never lingering."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import zmq

from hilt.core.errors import ConfigError
from hilt.core.platform import wake_descriptors
from hilt.core.web import is_loopback
from hilt.wire.config import TrainerConfig

if TYPE_CHECKING:
    from hilt.wire.keys import ClientKeys, ServerKeys

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
logger = logging.getLogger("hilt.wire")
HEARTBEAT_MS = 1_000
SILENCE_MS = 5_000
"""Seconds of silence after which a peer counts as disconnected: a pulled cable sends no message."""
DRAIN_BYTES = 4_096
JOIN_S = 10.0
"""How long a server or client that is closed waits for a thread of its own, in seconds."""


class LeveledLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """The logger ``hilt.wire`` as one server or client uses it: it drops records below a level of its own.

    The level of ``hilt.wire`` itself belongs to the application, and is left as it is.
    """

    def __init__(self, level: int = logging.NOTSET):
        super().__init__(logger, {})
        self._level = level

    def isEnabledFor(self, level: int) -> bool:
        return level >= self._level and super().isEnabledFor(level)


EVERYTHING = LeveledLogger()
"""Drops no record."""


def context_for(config: TrainerConfig) -> Context:
    """The in-process transport needs one context for both sides; others have one each."""
    return zmq.Context.instance() if config.transport == "in-process" else zmq.Context()


def router(context: Context, config: TrainerConfig, keys: ServerKeys | None) -> Socket:
    """The learner's end, before it listens."""
    socket = _socket(context, zmq.ROUTER, config)
    if keys is not None:
        keys.secure(socket)
    return socket


def listen(socket: Socket, config: TrainerConfig, port: int) -> None:
    try:
        socket.bind(bind_address(config, port))
    except zmq.ZMQError as error:
        cure = (
            "Another program uses this port: stop it, or choose another one."
            if error.errno == errno.EADDRINUSE
            else "Check bind_ip."
        )
        raise ConfigError(
            f"{bind_address(config, port)}: cannot listen here ({os.strerror(error.errno or 0)}). {cure}"
        ) from None


def connect(context: Context, config: TrainerConfig, host: str, port: int, keys: ClientKeys | None) -> Socket:
    """A DEALER socket to a server. It tries again by itself, at growing intervals."""
    socket = _socket(context, zmq.DEALER, config)
    socket.set(zmq.CONNECT_TIMEOUT, 1_000)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 1_000)  # often enough to get in while strangers flood the port
    socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a server that is not there
    if keys is not None:
        keys.secure(socket)
    address = f"inproc://hilt-{port}" if config.transport == "in-process" else f"tcp://{_bracketed(host)}:{port}"
    try:
        socket.connect(address)
    except zmq.ZMQError:
        socket.close(0)
        raise ConfigError(
            f"server_ip={host!r}: expected the learner's address, such as 192.168.1.5 or its host name."
        ) from None
    return socket


class Bell:
    """Wakes a thread that waits in poll."""

    def __init__(self) -> None:
        self._waits, self._rings = wake_descriptors()
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._waits

    def ring(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it rang so often that there is no room for once more
                    os.write(self._rings, (1).to_bytes(8, sys.byteorder))

    def quiet(self) -> bool:
        """Whether it rang since the last call."""
        rang = False
        with contextlib.suppress(BlockingIOError):
            more = True
            while more:
                more = len(os.read(self._waits, DRAIN_BYTES)) == DRAIN_BYTES
                rang = True
        return rang

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                for descriptor in {self._waits, self._rings}:
                    os.close(descriptor)


def keep_freed_memory() -> None:
    """Messages come in memory that zmq asks of malloc and gives back, which is fresh
    each time if malloc hands it on to the system.

    glibc learns what it had better keep from the largest block that was freed; this
    one is never touched, and costs nothing.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)


def peer_address(frame: zmq.Frame) -> str:
    """Where a message came from; empty for a thread of this process."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def bind_address(config: TrainerConfig, port: int) -> str:
    if config.transport == "in-process":
        return f"inproc://hilt-{port}"
    host = config.bind_ip or ("*" if config.keys is not None else "127.0.0.1")
    return f"tcp://{_bracketed(host)}:{port}"


def require_keys(config: TrainerConfig, host: str | None, doing: str) -> None:
    """Refuses to leave this machine without keys."""
    if config.transport == "tcp" and config.keys is None and host is not None and not is_loopback(host):
        raise ConfigError(
            f"{doing} {host} without keys: anybody there could send steps or take the weights. "
            "Make keys with `hilt keys new learner ACTOR`, and name their folder on both sides: "
            "wire.keys=keys; in Python, keys='keys'."
        )


def _socket(context: Context, kind: int, config: TrainerConfig) -> Socket:
    socket: Socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, config.max_message_bytes)
    socket.set(zmq.SNDHWM, 1_000)
    socket.set(zmq.RCVHWM, 1_000)
    if config.transport == "tcp":
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.set(zmq.HEARTBEAT_TTL, SILENCE_MS)
        socket.set(zmq.HANDSHAKE_IVL, SILENCE_MS)
    return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
