"""Strangers cost next to nothing: a port that many of them knock at hears no more of them for a second.

A refused CURVE handshake costs the server 0.2 to 0.6 ms, so a thousand of them per second would take half a
core. A `FloodGuard` counts the connections that were accepted and completed no handshake. When there are too
many, it has the kernel drop further requests to connect, by a filter on the listening socket, and lets them
through again a second later. Connections that exist are not touched. (Unbinding instead would end every
connection: ZeroMQ sessions belong to their listener.)

Who can still get in meanwhile: addresses that proved to be ours, and a half of all others, drawn anew each time, so
that an actor from an address of its own soon finds itself in the half without the flood. If unknown clients are among
those, too, no connection is accepted for the rest
of that second. An actor at the very address that the flood comes from has a part in the moments when the door is open.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import random
import struct
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import zmq

from hilt.core.errors import ConfigError
from hilt.core.platform import filter_listener
from hilt.wire.config import TrainerConfig
from hilt.wire.sockets import EVERYTHING, Context, LeveledLogger, Socket, listen, router

if TYPE_CHECKING:
    from hilt.wire.keys import ServerKeys

LIMIT = 120
"""The guard closes at this number of points within a second: 1 for a connection without a
handshake, `UNLISTED` if it gets as far as its key."""
UNLISTED = 4
MAX_KNOWN = 64
QUIET_SECONDS = 60.0

_EVENTS = zmq.Event.LISTENING | zmq.Event.ACCEPTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH
_number = itertools.count()


class FloodGuard:
    """Watches a socket's listener. Make it before `bind`, and call `tick` from the thread that owns the socket, when
    `monitor` is readable and about ten times a second besides."""

    def __init__(self, socket: Socket, name: str = "port", logger: LeveledLogger = EVERYTHING):
        if socket.last_endpoint:
            raise ConfigError("Door: the socket is bound already. Make the door first, then bind.")
        self.strangers = 0
        """Connections that completed no handshake; those that the kernel dropped are not among them."""
        self.closings = 0
        self._name, self._logger = name, logger
        self._random = random.Random()
        self._socket = socket
        self._listeners: list[int] = []
        self._known: dict[_Address, None] = {}
        self._accepted = self._succeeded = self._unlisted = 0  # since the door last opened, or for a second
        self._price = 1
        self._counted_from = time.monotonic()
        self._closed_at: float | None = None
        self._seconds_per_limit = 1.0
        self._some_are_heard = False  # while it is closed
        self._points_when_closed = 0
        self._warned_at: float | None = None
        self._strangers_when_warned = 0
        address = f"inproc://hilt-door-{next(_number)}"
        socket.monitor(address, _EVENTS)
        self.monitor: Socket = socket.context.socket(zmq.PAIR)
        self.monitor.set(zmq.LINGER, 0)
        self.monitor.set(zmq.RCVHWM, 100_000)  # where this is full, ZeroMQ's own thread would wait for us
        self.monitor.connect(address)

    @property
    def is_open(self) -> bool:
        return self._closed_at is None

    def know(self, address: str | None) -> None:
        """This address is one of ours (`frame.get("Peer-Address")` of an accepted
        hello): it is heard while others are not."""
        if address and (parsed := _parsed(address)) is not None:
            self._known.pop(parsed, None)
            self._known[parsed] = None
            if len(self._known) > MAX_KNOWN:
                self._known.pop(next(iter(self._known)))

    def tick(self) -> None:
        """Counts what happened since the last call, and closes or opens. Cheap when nothing happened."""
        self._read_events()
        now = time.monotonic()
        points = self._points()
        if self._closed_at is None:
            if points >= LIMIT:
                self._close(now, points)
            elif now - self._counted_from >= 1:
                self._count_anew(now)
        elif points < LIMIT:  # many came at once, and they were ours
            self._open(now)
        elif now - self._closed_at >= self._seconds_per_limit * points / LIMIT:
            # late ones, too: this number per second on average
            self._warn(now)
            self._open(now)
        elif self._some_are_heard and points - self._points_when_closed >= LIMIT // 3:
            self._some_are_heard = False
            self._set_filter(_filter((), None))

    def close(self) -> None:
        """Stops watching. Call it before the socket is closed."""
        if not self.monitor.closed:
            if not self.is_open:
                self._set_filter(None)
            self._socket.disable_monitor()
            self.monitor.close(0)

    def _read_events(self) -> None:
        try:
            while True:
                frames = self.monitor.recv_multipart(zmq.NOBLOCK)
                event, value = struct.unpack("=Hi", frames[0])
                if event == zmq.Event.ACCEPTED:
                    self._accepted += 1
                elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._succeeded += 1
                elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                    self._unlisted += 1
                elif event == zmq.Event.LISTENING:
                    self._listeners.append(value)
        except zmq.Again:
            return

    def _points(self) -> int:
        bad = self._accepted - self._succeeded
        return UNLISTED * bad if self._price == UNLISTED else bad + (UNLISTED - 1) * self._unlisted

    def _close(self, now: float, points: int) -> None:
        self.closings += 1
        self._closed_at = now
        # a client that tries at a steady interval must not always be early
        self._seconds_per_limit = self._random.uniform(0.5, 1.5)
        self._points_when_closed = points
        self._some_are_heard = True
        self._set_filter(_filter(self._known, half=self._random.getrandbits(32) | 1))

    def _open(self, now: float) -> None:
        self._closed_at = None
        self._set_filter(None)
        self._count_anew(now)

    def _count_anew(self, now: float) -> None:
        bad = max(0, self._accepted - self._succeeded)
        self.strangers += bad
        # Keys are looked at late: where most of the last ones had one, the next ones are counted so when they come.
        self._price = UNLISTED if 2 * self._unlisted > bad else 1
        self._accepted = self._succeeded = self._unlisted = 0
        self._counted_from = now

    def _set_filter(self, program: bytes | None) -> None:
        for descriptor in self._listeners:  # they are ZeroMQ's
            try:
                filter_listener(descriptor, program)
            except OSError as error:
                # a kernel or a sandbox without filters: strangers are refused as before, at their price
                self._logger.debug("%s: no filter on the listening socket: %s", self._name, error)

    def _warn(self, now: float) -> None:
        """Logs a warning when a flood begins, and once a minute while it lasts."""
        if self._warned_at is None or now - self._warned_at >= QUIET_SECONDS:
            strangers = self.strangers + self._accepted - self._succeeded
            self._logger.warning(
                "%s: %d connections came without a valid key or in another protocol; during such a "
                "flood, new ones may have to wait a few seconds. Look for a scanner, or for an actor that "
                "tries with the wrong keys.",
                self._name,
                strangers - self._strangers_when_warned,
            )
            self._warned_at = now
            self._strangers_when_warned = strangers


def open_port(
    context: Context,
    config: TrainerConfig,
    port: int,
    keys: ServerKeys | None,
    logger: LeveledLogger = EVERYTHING,
) -> tuple[Socket, FloodGuard]:
    """A ROUTER socket that listens on a port of the config, behind its door."""
    socket = router(context, config, keys)
    door = FloodGuard(socket, f"port {port}", logger)
    try:
        listen(socket, config, port)
    except ConfigError:
        close_port(socket, door)
        raise
    return socket, door


def close_port(socket: Socket, door: FloodGuard) -> None:
    """Ends both. The port, or the name within this process, is free when it returns."""
    with contextlib.suppress(zmq.ZMQError):  # the context may be gone, or it never came to listen
        door.close()
        # else a name is free only some time after its socket was closed
        socket.unbind(socket.get_string(zmq.LAST_ENDPOINT))
    socket.close(0)


# --- the filter: a program for the kernel's oldest packet machine, which sees the
# TCP header at 0 and the IP header at _IP ---

_Address = tuple[int, ...]
"""The 32-bit words of an address: one for IPv4, four for IPv6."""
_Step = tuple[int, int, int, int]
"""What to do, how many steps to skip if so and if not, a number."""
_IP = 0x100000000 - 0x100000  # SKF_NET_OFF
_LOAD_BYTE, _LOAD_WORD, _AND, _MULTIPLY, _SHIFT_RIGHT, _IF_EQUAL, _GOTO, _RETURN = (
    0x30,
    0x20,
    0x54,
    0x24,
    0x74,
    0x15,
    0x05,
    0x06,
)
_PASS, _DROP = 0xFFFFFFFF, 0


def _parsed(address: str) -> _Address | None:
    try:
        parsed = ipaddress.ip_address(address.split("%")[0].strip("[]"))
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped  # on a listener for both, the packet is an IPv4 packet
    return struct.unpack(f">{len(parsed.packed) // 4}I", parsed.packed)


def _filter(heard: Iterable[_Address], half: int | None) -> bytes:
    """Drops requests to connect (SYN without ACK) but those from the given addresses and, with
    an odd number for `half`, from one half of all others. It passes all else, for the
    connections that are accepted meanwhile inherit it."""
    heard = list(heard)
    version4 = [
        *(step for address in heard if len(address) == 1 for step in _compare(address, source_at=12)),
        *_halve(half, 12),
    ]
    version6 = [
        *(step for address in heard if len(address) == 4 for step in _compare(address, source_at=8)),
        *_halve(half, 20),
    ]
    program: list[_Step] = [
        (_LOAD_BYTE, 0, 0, 13), (_AND, 0, 0, 0x12), (_IF_EQUAL, 1, 0, 0x02), (_RETURN, 0, 0, _PASS),
        (_LOAD_BYTE, 0, 0, _IP), (_AND, 0, 0, 0xF0), (_IF_EQUAL, 1, 0, 0x40), (_GOTO, 0, 0, len(version4)),
        *version4, *version6,
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *step) for step in program)


def _compare(address: _Address, source_at: int) -> Iterator[_Step]:
    for i, word in enumerate(address):
        yield _LOAD_WORD, 0, 0, _IP + source_at + 4 * i
        yield _IF_EQUAL, 0, 2 * (len(address) - i) - 1, word  # if not, to the end of this comparison
    yield _RETURN, 0, 0, _PASS


def _halve(half: int | None, word_at: int) -> Iterator[_Step]:
    if half is not None:
        yield _LOAD_WORD, 0, 0, _IP + word_at
        yield _MULTIPLY, 0, 0, half
        yield _SHIFT_RIGHT, 0, 0, 31
        yield _IF_EQUAL, 0, 1, 1
        yield _RETURN, 0, 0, _PASS
    yield _RETURN, 0, 0, _DROP
