"""The robot server's HTTP: uvicorn, with bounds on the number of connections and on how long one may be idle."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hilt.robot.request_auth import LET_IN

if TYPE_CHECKING:
    from asyncio import Transport

MAX_CONNECTIONS, MAX_PER_ADDRESS = 256, 128
IDLE_S = 30.0
FIRST_S = 10.0  # until the first whole request of a connection


def web_server(app: object) -> EmbeddedServer:
    """A server of an ASGI application."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # X-Forwarded-For would let anybody be anybody
        server_header=False,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=1,
    )
    return EmbeddedServer(config)


class BoundedProtocol(H11Protocol):
    """A connection that is closed when there are too many, or when it is idle or dawdles: uvicorn waits for ever."""

    seen: Any = None

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        # or each answer waits 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_proven, self.used = False, self.loop.time()
        everybody = [c for c in self.connections if not c.transport.is_closing()]
        neighbors = [c for c in everybody if c.client[0] == self.client[0]]
        if len(neighbors) > MAX_PER_ADDRESS:
            self.make_room(neighbors)
        elif len(everybody) > MAX_CONNECTIONS:
            self.make_room(everybody)
        self.loop.call_later(FIRST_S, self.look_first)
        self.loop.call_later(IDLE_S, self.look)

    def make_room(self, crowd: list[BoundedProtocol]) -> None:
        """Closes the least valuable connection, so that many connections block no client: of those that have
        sent no request that was let in the oldest, then the one that was used longest ago. If all the others
        wait for their answers, it is this one."""
        others = [c for c in crowd if c is not self and not (c.proven() and c.is_busy())]
        worst = min(others, key=lambda c: (c.proven(), c.used), default=self)
        worst.transport.abort()

    def proven(self) -> bool:
        """Whether a request came by it that was let in, and was whole."""
        self.is_proven |= bool(self.scope and self.scope.get(LET_IN))
        return self.is_proven

    def is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.proven()
        self.used = self.loop.time()
        super().on_response_complete()

    def look_first(self) -> None:
        if not self.proven() and not self.transport.is_closing():
            self.transport.abort()

    def look(self) -> None:
        """Closes a connection that did nothing since the last look, begin a request or take an answer."""
        if self.transport.is_closing():
            return
        answered = self.cycle is None or self.cycle.response_complete
        if self.cycle is self.seen and (answered or self.transport.get_write_buffer_size()):
            self.transport.abort()
            return
        self.seen = self.cycle
        self.loop.call_later(IDLE_S, self.look)


class EmbeddedServer(uvicorn.Server):
    """A server that leaves signals to the process that it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
