"""Connections to a policy server: a websocket in openpi's protocol, or the keyed wire of learner and actors.

A link connects and returns the server's metadata, sends one map and returns the map that answers it, each with a
deadline on `time.monotonic`. What an answer means is for `hilt.serving.remote_policy`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hilt.core.errors import (
    ConfigError,
    DeadlineError,
    FormatError,
    HiltError,
    RefusedError,
    RequestError,
    optional_module,
)
from hilt.serving.array_messages import pack, unpack
from hilt.wire import TrainerClient, TrainerConfig

PURPOSE, EXTRA = "a policy behind ws://", "serve"
WEBSOCKETS, WIRE = ("ws", "wss"), "hilt"
RETRY_S, CLOSE_S = 0.1, 1.0
PING_S, PONG_S = 0.02, 1.0
"""Seconds between two signs of life that a control loop waits for, and for the answer to one"""
MAX_ANSWER_BYTES = 16 << 20
ACT, METADATA = "act", "policy-metadata"
"""Requests on the wire"""


class ServerAbsentError(RefusedError):
    """Raised when no policy server is reached; it may be there a moment later."""


class BrokenLinkError(HiltError):
    """Raised when a connection broke before the answer came: the request may be sent again."""


class PolicyLink(ABC):
    """One connection, which may be opened again after it was closed."""

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url, timeout_s
        self._heard = -math.inf  # when the last question was sent that the server has answered
        self._pings: threading.Thread | None = None
        self._ended = threading.Event()

    @abstractmethod
    def connect(self, deadline: float) -> object:
        """Opens the connection, and returns the server's metadata."""

    @abstractmethod
    def ask(self, message: Mapping[str, object], deadline: float) -> object:
        """Returns the answer to a request; an error of the server is a `RequestError`."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known without asking."""

    @abstractmethod
    def ping(self) -> bool:
        """Whether the server answers, `PONG_S` seconds at most; also while another thread waits in `ask`."""

    def is_alive(self, within_s: float) -> bool:
        """Whether the server has given a sign of life within this time; returns at once, for a control loop that asks
        in each of its steps."""
        if self._pings is None:
            self._ended.clear()
            self._pings = threading.Thread(target=self._watch, name="hilt-server-pings", daemon=True)
            self._pings.start()
        return self.is_open() and time.monotonic() - self._heard < within_s

    def _watch(self) -> None:
        """Runs in a thread, for as long as somebody wants to know: a control loop would wait in a full socket."""
        while not self._ended.wait(PING_S):
            sent = time.monotonic()
            if self.is_open() and self.ping():
                self._heard = max(self._heard, sent)

    def end(self) -> None:
        """Closes the connection and ends what watches it; both come back when they are used again."""
        self._ended.set()
        if self._pings is not None:
            self._pings.join(PONG_S + CLOSE_S)
            self._pings = None
        self.close()

    def late(self) -> DeadlineError:
        return DeadlineError(f"{self.url} did not answer within {self.timeout_s:g} s.")


def open_link(url: str, key: str, timeout_s: float) -> PolicyLink:
    """The link for an address, not connected yet. `key`: for a websocket the key itself, for the wire its folder."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme in WEBSOCKETS and parts.hostname and port != 0:
        return WebsocketLink(url, key, timeout_s)
    if parts.scheme == WIRE and parts.hostname and port:
        return WireLink(url, parts.hostname, port, key, timeout_s)
    raise ConfigError(f"policy {url!r}: expected ws://HOST:PORT, wss://HOST:PORT, or hilt://HOST:PORT for keys.")


class WebsocketLink(PolicyLink):
    """openpi's protocol, which `hilt serve-policy` speaks as well."""

    def __init__(self, url: str, key: str, timeout_s: float):
        super().__init__(url, timeout_s)
        self._client = optional_module("websockets.sync.client", PURPOSE, EXTRA)
        self._errors = optional_module("websockets.exceptions", PURPOSE, EXTRA)
        self._headers = {"Authorization": f"Api-Key {key}"} if key else None
        self._stack = contextlib.ExitStack()
        self._socket: Any = None

    def connect(self, deadline: float) -> object:
        self.close()
        limits = {"compression": None, "max_size": MAX_ANSWER_BYTES, "close_timeout": CLOSE_S}
        stack = contextlib.ExitStack()
        try:
            opening = self._client.connect(
                self.url,
                additional_headers=self._headers,
                open_timeout=_left(deadline),
                ping_interval=None,  # a model that is compiled may be silent, and each answer has its timeout
                **limits,
            )
            self._socket, self._stack = stack.enter_context(opening), stack
            message = self._socket.recv(_left(deadline))
        except TimeoutError:
            self.close()
            raise DeadlineError(f"{self.url}: no policy server answered within {self.timeout_s:g} s.") from None
        except self._errors.InvalidStatus as error:
            text = bytes(error.response.body or b"").decode("utf-8", "replace").strip().split("\n")[0][:200]
            kind = ServerAbsentError if error.response.status_code == 503 else RefusedError
            raise kind(f"{self.url} refused the connection: {error.response.status_code} {text}") from None
        except ssl.SSLError as error:
            raise RefusedError(
                f"{self.url}: TLS failed ({error}). Trust its certificate with SSL_CERT_FILE=FILE."
            ) from None
        except (OSError, self._errors.WebSocketException) as error:
            self.close()
            reason = str(error).split("\n")[0] or type(error).__name__
            raise ServerAbsentError(
                f"{self.url}: no policy server is reached ({reason}). Start one: hilt serve-policy FOLDER."
            ) from None
        self._heard = time.monotonic()
        with contextlib.suppress(FormatError):
            return unpack(message) if isinstance(message, bytes) else None
        return None

    def is_open(self) -> bool:
        connection = self._socket
        return connection is not None and connection.protocol.state.name == "OPEN"

    def ping(self) -> bool:
        connection = self._socket
        with contextlib.suppress(OSError, self._errors.WebSocketException):
            return connection is not None and bool(connection.ping().wait(PONG_S))
        return False

    def ask(self, message: Mapping[str, object], deadline: float) -> object:
        data = pack(message)
        try:
            self._socket.send(data)
            answer = self._socket.recv(_left(deadline))
        except TimeoutError:
            self.close()  # its answer may come later, and would be taken for the next one
            raise self.late() from None
        except self._errors.ConnectionClosed as error:
            self.close()
            if error.rcvd is not None and error.rcvd.code == 1009:
                raise RequestError(
                    f"{self.url}: an observation of {len(data):,} bytes is larger than the server takes; send "
                    "smaller pictures."
                ) from None
            raise BrokenLinkError(str(error)) from None
        if isinstance(answer, str):
            lines = [line.strip() for line in answer.splitlines() if line.strip()]  # openpi's server sends a traceback
            raise RequestError(f"{self.url}: {lines[-1] if lines else 'an error without words'}")
        return unpack(answer)

    def close(self) -> None:
        stack, self._stack, self._socket = self._stack, contextlib.ExitStack(), None
        self._heard = -math.inf
        with contextlib.suppress(OSError, self._errors.WebSocketException):
            stack.close()


class WireLink(PolicyLink):
    """The wire of learner and actors, with its keys: a request is carried out once, and asked again where its answer is
    lost. It comes back by itself after the server was gone."""

    def __init__(self, url: str, host: str, port: int, keys: str, timeout_s: float):
        super().__init__(url, timeout_s)
        self._host, self._config = host, wire_config(port, keys)
        self._client: TrainerClient | None = None

    def connect(self, deadline: float) -> object:
        self.close()
        name = f"{socket.gethostname()}-{os.getpid()}"
        timeout_ms = 1e3 * _left(deadline)
        try:
            self._client = TrainerClient(
                name, self._host, self._config, timeout_ms=timeout_ms, log_level=logging.CRITICAL
            )
        except (DeadlineError, RefusedError) as error:
            raise RefusedError(f"{self.url}: {error}") from None
        metadata = self._asked(METADATA, {}, deadline)
        self._heard = time.monotonic()
        return metadata

    def ask(self, message: Mapping[str, object], deadline: float) -> object:
        return self._asked(ACT, dict(message), deadline)

    def _asked(self, kind: str, payload: dict[str, Any], deadline: float) -> Any:
        assert self._client is not None
        try:
            answer = self._client.request(kind, payload, timeout_ms=1e3 * _left(deadline))
        except HiltError as error:
            raise RequestError(f"{self.url}: {error}") from None
        if answer is None:
            raise self.late()
        return answer

    def is_open(self) -> bool:
        client = self._client
        return client is not None and bool(client.stats()["connected"])

    def ping(self) -> bool:
        client = self._client
        with contextlib.suppress(HiltError):  # it was closed meanwhile, or does too much at once
            return client is not None and client.request(METADATA, {}, timeout_ms=1e3 * PONG_S) is not None
        return False

    def close(self) -> None:
        client, self._client = self._client, None
        self._heard = -math.inf
        if client is not None:
            client.stop()


def wire_config(port: int, keys: str, bind_ip: str | None = None) -> TrainerConfig:
    """What both sides of a policy's wire agree on; the next port is taken, too. `keys`: a folder; empty: none."""
    if not 0 < port < 65535:
        raise ConfigError(f"port {port} of the wire: expected 1 to 65534; the next one is taken, too.")
    return TrainerConfig(
        port, port + 1, (ACT, METADATA), bind_ip=bind_ip, keys=keys or None, max_message_bytes=MAX_ANSWER_BYTES
    )


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
