"""A network that can be made bad while it is used: a TCP proxy between actors and a learner.

    proxy = Proxy(learner_port, weights_port)
    client connects to proxy.ports
    proxy.cut(); proxy.stall(); proxy.slow(10_000); proxy.heal()

It runs in a thread of its own. What it was told holds for the connections there are
and for those to come, until `heal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.wire.processes import free_port

DEADLINE_S = 120
UP, DOWN = "up", "down"
"""From actor to learner, and back."""
_PIECE = 1 << 16
_WAITING = 32
"""Pieces that wait in the proxy, each way, before it stops reading."""
T = TypeVar("T")


class Proxy:
    """Listens on one port of its own for each target port on `host`."""

    def __init__(self, *targets: int, host: str = "127.0.0.1"):
        self._host, self._targets = host, targets
        self.counts: Counter[str] = Counter()
        """Bytes each way, connections made, refused and cut."""
        self._links: set[_Link] = set()
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._stalled: frozenset[str] = frozenset()
        self._bytes_per_second = 0.0
        self._delay = 0.0
        self._left: dict[str, int] = {}  # bytes before a cut, per way
        self._deaf_after = -1  # bytes up before nothing passes down
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.ports = [free_port() for _ in targets]
        self._run(self._listen())

    # What can go wrong

    def heal(self) -> None:
        """Everything passes, at once, as it comes."""

        async def change() -> None:
            self._stalled, self._bytes_per_second, self._delay, self._left, self._deaf_after = (
                frozenset(),
                0.0,
                0.0,
                {},
                -1,
            )
            self._changed.set()
            await self._listen()

        self._run(change())

    def cut(self) -> int:
        """Ends every connection with a reset; new ones are taken. Returns how many there were."""

        async def change() -> int:
            return self._cut()

        return self._run(change())

    def refuse(self) -> None:
        """Cuts, and nobody listens any more."""

        async def change() -> None:
            self._deafen()
            self._cut()

        self._run(change())

    def stall(self, *ways: str) -> None:
        """Connections are taken and stay, but nothing passes, in these directions (both by default)."""

        async def change() -> None:
            self._stalled = frozenset(ways or (UP, DOWN))
            self._changed.set()

        self._run(change())

    def stall_answers_after(self, nbytes: int) -> None:
        """When so many more bytes have gone up, nothing passes down: a question is
        answered, what is told is not acknowledged."""

        async def change() -> None:
            self._deaf_after = self.counts[UP] + nbytes

        self._run(change())

    def slow(self, bytes_per_second: float) -> None:
        """So many bytes per second pass, each way and on each connection."""

        async def change() -> None:
            self._bytes_per_second = bytes_per_second

        self._run(change())

    def delay(self, seconds: float) -> None:
        """Every byte arrives so much later, each way."""

        async def change() -> None:
            self._delay = seconds

        self._run(change())

    def cut_after(self, nbytes: int, way: str = UP) -> None:
        """Cuts when so many more bytes have passed: in the middle of a message, if the number is chosen so."""

        async def change() -> None:
            self._left[way] = nbytes

        self._run(change())

    def close(self) -> None:
        async def end() -> None:
            self._deafen()
            self._cut()

        if self._thread.is_alive():
            self._run(end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE_S)
            self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the proxy's thread

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(DEADLINE_S)

    async def _listen(self) -> None:
        if self._listeners:
            return
        for place, target in enumerate(self._targets):
            listener = socket.create_server((self._host, self.ports[place]), backlog=64)
            listener.setblocking(False)
            self.ports[place] = listener.getsockname()[1]
            self._listeners.append(listener)
            self._accepting.append(self._loop.create_task(self._accept(listener, target)))

    def _deafen(self) -> None:
        for task in self._accepting:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._accepting, self._listeners = [], []

    async def _accept(self, listener: socket.socket, target: int) -> None:
        while True:
            near, _ = await self._loop.sock_accept(listener)
            self._loop.create_task(self._connect(near, target))

    async def _connect(self, near: socket.socket, target: int) -> None:
        far = socket.socket()
        far.setblocking(False)
        try:
            await self._loop.sock_connect(far, (self._host, target))
        except OSError:
            self.counts["refused"] += 1
            _reset(near)
            _reset(far)
            return
        self.counts["connections"] += 1
        link = _Link(self, near, far)
        self._links.add(link)
        await link.run()
        self._links.discard(link)

    def _cut(self) -> int:
        links, self._links = self._links, set()
        for link in links:
            link.cut()
        self.counts["cut"] += len(links)
        return len(links)

    async def pass_through(self, way: str, piece: bytes, send: Callable[[bytes], Coroutine[Any, Any, None]]) -> bool:
        """Sends a piece as the network is now. False: it was cut in the middle, and nothing may follow.
        Whoever sends has to heed that: its task is not canceled before it waits for something, and what waits
        in the proxy already can be sent without."""
        while piece:
            while way in self._stalled:
                self._changed.clear()
                await self._changed.wait()
            rate = self._bytes_per_second
            part = piece[: max(1, int(rate / 20))] if rate else piece
            left = self._left.get(way)
            if left is not None:
                part = part[:left]
                self._left[way] = left - len(part)
            if way == UP and 0 <= self._deaf_after < self.counts[UP] + len(part):
                self._stalled |= {DOWN}
            if part:
                await send(part)
            self.counts[way] += len(part)
            piece = piece[len(part) :]
            if left is not None and left == len(part):
                self._left.pop(way, None)
                self.counts["cut in the middle"] += 1
                self._cut()
                return False
            if rate:
                await asyncio.sleep(len(part) / rate)
        return True

    @property
    def latency(self) -> float:
        return self._delay


class _Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket):
        self._proxy, self._near, self._far = proxy, near, far
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self) -> None:
        """Until one side is gone, and what it had sent has been passed on."""
        for way, source, sink in ((UP, self._near, self._far), (DOWN, self._far, self._near)):
            waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING)
            self._tasks.append(self._loop.create_task(self._take(source, waiting)))
            self._tasks.append(self._loop.create_task(self._give(way, sink, waiting)))
        await asyncio.wait(self._tasks[1::2], return_when=asyncio.FIRST_COMPLETED)
        self.cut()

    async def _take(self, source: socket.socket, waiting: asyncio.Queue[tuple[float, bytes]]) -> None:
        piece = b"first"
        while piece:
            try:
                piece = await self._loop.sock_recv(source, _PIECE)
            except OSError:
                piece = b""
            await waiting.put((self._loop.time() + self._proxy.latency, piece))

    async def _give(self, way: str, sink: socket.socket, waiting: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, piece = await waiting.get()
            if (early := due - self._loop.time()) > 0:
                await asyncio.sleep(early)
            if not piece:
                return
            try:
                if not await self._proxy.pass_through(way, piece, lambda part: self._loop.sock_sendall(sink, part)):
                    return
            except OSError:
                return

    def cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        for end in (self._near, self._far):
            # after the tasks have let go of it: its number may be given to the next connection
            self._loop.call_soon(_reset, end)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
