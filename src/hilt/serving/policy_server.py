"""A policy behind a websocket that speaks openpi's protocol.

    with PolicyServer(policy, port=8000) as server:
        ...

When a client connects, the server sends the metadata; then each message is an observation, and its answer a map with
``actions`` [chunk, action_dim]. An error is a text message of one sentence to the client that asked, whose connection
stays usable. ``GET /healthz`` and ``GET /metrics`` are answered at the same port. The thread of the server reads and
writes; `hilt.serving.batcher` calls the policy in another one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt import __version__
from hilt.core.errors import ConfigError, DeadlineError, FormatError, HiltError, optional_module
from hilt.core.validate import check, setting
from hilt.core.web import ThreadedServer, check_tls_files, host_name, is_loopback, listen, page_address
from hilt.policies.base import Policy
from hilt.robot.request_auth import read_tokens
from hilt.serving.array_messages import pack, unpack
from hilt.serving.batcher import BatchAnswer, Batcher, BatcherSettings
from hilt.serving.observation_names import PROTOCOL, read_request
from hilt.serving.serving_metrics import ServingMetrics

if TYPE_CHECKING:
    from asyncio import Transport

websocket_server = optional_module("websockets.asyncio.server", "a policy server", "serve")
websocket_errors = optional_module("websockets.exceptions", "a policy server", "serve")

ACTIVE_S = 1.0
"""Seconds after its last request for which batches wait for a client"""
OPEN_S, CLOSE_S, PING_S = 10.0, 1.0, 20.0
"""Seconds for a connection to open and to close, and between two signs of life of a client"""
MAKE_KEY = "(umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > policy.key)"

_log = logging.getLogger("hilt.serving")


@dataclass(frozen=True)
class ServerLimits:
    """What clients may cost."""

    max_connections: int = setting(64, minimum=1)
    """Clients at a time; one more is refused"""
    max_message_bytes: int = setting(16 << 20, minimum=1024)
    """Size of one observation; a connection with a larger one is closed"""
    answer_s: float = setting(60.0, above=0)
    """Seconds after which a request that has no answer is an error"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ServerAccess:
    """Where a server listens, and who may ask: on this machine everybody, beyond it only with a key or TLS."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Sequence[str | os.PathLike[str]] = ()
    """Files of keys, one of which a client must send; each has mode 0600"""
    certificate: Path | None = None
    key: Path | None = None
    """The key of the certificate (PEM)"""

    def tls(self) -> ssl.SSLContext | None:
        check_tls_files(self.certificate, self.key)
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{self.certificate}, {self.key}: expected a certificate and its key as PEM files ({error})."
            ) from None
        return context

    def check(self) -> None:
        if not is_loopback(self.host) and not self.keys and self.certificate is None:
            raise ConfigError(
                f"host {self.host} is reached from other machines, and everybody there could use the policy and read "
                f"what the cameras see: make a key with {MAKE_KEY}, and give --key-file policy.key; or give TLS with "
                "--certificate FILE --key FILE."
            )


class PolicyServer(ThreadedServer):
    """Serves one policy. `version`: of its weights, such as the training step that they are from."""

    title, start_s, stop_s = "policy server", 30.0, 10.0

    def __init__(
        self,
        policy: Policy,
        version: int = 0,
        *,
        access: ServerAccess | None = None,
        batching: BatcherSettings | None = None,
        limits: ServerLimits | None = None,
        sample: bool = False,
        name: str = "",
    ):
        """`sample`: whether actions are sampled for clients that do not say it; otherwise they are the likeliest ones.
        `name`: of the policy, for the metadata."""
        super().__init__()
        self._access, self._limits, self._sample = access or ServerAccess(), limits or ServerLimits(), sample
        self._access.check()
        self._keys, self._tls = read_tokens(self._access.keys), self._access.tls()
        self._fields, self._name = policy.observed_fields(), name or type(policy).__name__
        self._connections: dict[Any, float] = {}  # with the time of the last request
        self.metrics = ServingMetrics()
        self.metrics.show("connections", "Clients that are connected.", lambda: float(len(self._connections)))
        self._socket = listen(self._access.host, self._access.port)
        port = self._socket.getsockname()[1]
        self.url = page_address(self._access.host, port, "", "ws" if self._tls is None else "wss").rstrip("/")
        self.batcher = Batcher(policy, version, batching, clients=self._active_clients, metrics=self.metrics)

    def metadata(self) -> dict[str, object]:
        """What every client is sent first."""
        policy, fields = self.batcher.policy, self._fields
        seen = {} if fields is None else {**fields._asdict(), "cameras": list(fields.cameras)}
        return {
            "server": f"hilt {__version__}",
            "protocol": PROTOCOL,
            "policy": self._name,
            "version": self.batcher.version,
            "chunk": policy.chunk,
            "action_dim": policy.action_dim,
            "sample": self._sample,
            "takes_prefix": policy.takes_prefix,
            "max_delay": policy.max_delay,
            **seen,
        }

    # --- its life ---

    def close(self) -> None:
        """Frees the port and ends the batcher."""
        self._socket.close()
        self.batcher.close()

    async def serve_until(self, ending: asyncio.Event, ready: Callable[[], None]) -> None:
        options = {
            "compression": None,  # as openpi's: pictures on a fast network are sent sooner as they are
            "max_size": self._limits.max_message_bytes,
            "max_queue": 2,
            "open_timeout": OPEN_S,
            "close_timeout": CLOSE_S,
            "ping_interval": PING_S,
            "ping_timeout": PING_S,
            "server_header": None,
            # strangers who knock are counted, and not logged
            "logger": logging.Logger("hilt.serving.websockets", logging.CRITICAL),
        }
        started = websocket_server.serve(
            self._converse,
            sock=self._socket,
            ssl=self._tls,
            process_request=self._let_in,
            create_connection=self._bounded_connection(),
            **options,
        )
        async with started:
            ready()
            await ending.wait()

    # --- connections ---

    def _bounded_connection(self) -> Any:
        """A class of connections, of which those beyond twice the limit are closed before they have sent a byte."""
        open_ones, most = set[Any](), 2 * self._limits.max_connections
        connection: Any = websocket_server.ServerConnection

        class BoundedConnection(connection):
            def connection_made(self, transport: Transport) -> None:
                super().connection_made(transport)
                open_ones.add(self)
                if len(open_ones) > most:
                    transport.abort()

            def connection_lost(self, error: Exception | None) -> None:
                open_ones.discard(self)
                super().connection_lost(error)

        return BoundedConnection

    def _let_in(self, connection: Any, request: Any) -> Any:
        """Answers a request of HTTP; None: it becomes a websocket."""
        status, text = self._answered(request.path.partition("?")[0], request.headers)
        if status == 101:
            return None
        if status >= 400:
            self.metrics.refused.add(status=status)
        return connection.respond(status, text)

    def _answered(self, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        if "Origin" in headers or "Sec-Fetch-Site" in headers:
            return 403, "This request comes from a web page; a page may not use the policy.\n"
        given = headers.get("Host", "")
        # a page's own name can be made to lead to this machine (DNS rebinding), but then its name is in the request;
        # it has no key, and a reverse proxy in front of a server with keys has a name of its own
        if is_loopback(self._access.host) and not self._keys and not is_loopback(host_name(given)):
            return 403, f"Host: expected localhost or a loopback address, got {given[:60]!r}.\n"
        if path == "/healthz":
            return 200, "OK\n"
        if not self._has_key(headers.get("Authorization", "")):
            return 401, "Expected the header 'Authorization: Api-Key KEY' with a key of this server.\n"
        if path == "/metrics":
            return 200, self.metrics.page()
        if path != "/":
            return 404, "There are only / (a websocket), /healthz and /metrics here.\n"
        if len(self._connections) >= self._limits.max_connections:
            return 503, f"There are {len(self._connections)} clients already; expected fewer. Try again later.\n"
        return 101, ""

    def _has_key(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        if not self._keys:
            return True
        known = [hmac.compare_digest(key.encode(), given.strip().encode()) for key in self._keys.values()]
        return any(known) and scheme.lower() in ("api-key", "bearer")

    async def _converse(self, connection: Any) -> None:
        """One client: an answer for each of its messages, in order."""
        self._connections[connection] = -math.inf
        try:
            await connection.send(pack(self.metadata()))
            async for message in connection:
                self._connections[connection] = time.monotonic()
                await connection.send(await self._reply(message))
        except websocket_errors.ConnectionClosed:
            pass
        except Exception:
            _log.exception("a connection of the policy server failed")
            raise
        finally:
            del self._connections[connection]

    def _active_clients(self) -> int:
        """Clients that a batch may wait for: one that has been silent is not about to ask."""
        since = time.monotonic() - ACTIVE_S
        return sum(asked > since for asked in list(self._connections.values()))

    async def _reply(self, message: bytes | str) -> bytes | str:
        """The answer to one message: bytes, or as openpi's server does, a text for an error."""
        try:
            if isinstance(message, str):
                raise FormatError(f"a text of {len(message):,} characters is no request; expected msgpack in bytes.")
            found = asyncio.wrap_future(self._begin(unpack(message)))
            answer = await asyncio.wait_for(found, self._limits.answer_s)
        except asyncio.TimeoutError:
            return str(self._noted(self._late()))
        except HiltError as error:
            return str(self._noted(error))
        return pack(self._answer(answer))

    # --- what every way to the policy has in common ---

    def ask(self, message: object) -> dict[str, object]:
        """Answers one request, a map as it is in a message, from any thread; errors are raised."""
        try:
            found = self._begin(message)
            try:
                return self._answer(found.result(self._limits.answer_s))
            except FutureTimeoutError:
                found.cancel()
                raise self._late() from None
        except HiltError as error:
            raise self._noted(error) from None

    def _begin(self, message: Any) -> Future[BatchAnswer]:
        return self.batcher.submit(read_request(message, self._fields, self._sample))

    def _late(self) -> DeadlineError:
        seconds = self._limits.answer_s
        return DeadlineError(f"the policy did not answer within {seconds:g} s; ask again, or a server with less load.")

    def _noted(self, error: HiltError) -> HiltError:
        self.metrics.errors.add(kind=type(error).__name__)
        return error

    def _answer(self, answer: BatchAnswer) -> dict[str, Any]:
        self.metrics.answers.add()
        wait_ms, act_ms = 1000 * answer.wait_s, 1000 * answer.act_s
        return {
            "actions": answer.actions,
            "version": answer.version,
            "server_timing": {"infer_ms": wait_ms + act_ms, "wait_ms": wait_ms, "batch": answer.rows},
            "policy_timing": {"infer_ms": act_ms},
        }
