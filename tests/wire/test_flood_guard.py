"""A flood of strangers costs a few percent of a core, ends no connection, and keeps no actor out for long."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from hilt.core import platform
from hilt.core.errors import ConfigError
from hilt.wire.config import TrainerConfig
from hilt.wire.flood_guard import LIMIT, MAX_KNOWN, FloodGuard
from hilt.wire.keys import ClientKeys, Gatekeeper, ServerKeys, new_keys
from hilt.wire.sockets import Socket, listen, router

needs_filters = pytest.mark.skipif(not platform.SOCKET_FILTERS, reason="the portable form has no packet filter")

ODD_ADDRESSES = 0x80000001  # a draw for the half that is heard


class Place:
    """A listening socket with its door, moved by hand, in this thread."""

    def __init__(self, host: str = "127.0.0.1"):
        self.context = zmq.Context()
        self.socket: Socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.IPV6, 1)
        self.door = FloodGuard(self.socket, "port 1")
        self.port = self.socket.bind_to_random_port(f"tcp://{host}")

    def until(self, holds: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            self.door.monitor.poll(10)
            self.door.tick()
            while self.socket.poll(0):
                self.socket.send_multipart(self.socket.recv_multipart())

    def client(self) -> Socket:
        client: Socket = self.context.socket(zmq.DEALER)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        return client

    def hears(self, source: str, to: str = "127.0.0.1", seconds: float = 0.3) -> bool:
        """Whether a request to connect from this address is answered."""
        try:
            socket.create_connection((to, self.port), timeout=seconds, source_address=(source, 0)).close()
        except TimeoutError:
            return False
        return True

    def knock(self, times: int, to: str = "127.0.0.1") -> None:
        for _ in range(times):
            socket.create_connection((to, self.port), timeout=60).close()

    def knock_until_it_shuts(self, to: str = "127.0.0.1") -> None:
        closings = self.door.closings
        self.door._counted_from = 1e12  # however long a busy machine takes for so many, it counts as one second
        self.knock(LIMIT, to)
        self.until(lambda: self.door.closings > closings)

    def shut(self, half: int = 1) -> None:
        """Closes the door for a minute; 1 has it hear no half of loopback."""
        self.door._random = Drawn(half)  # type: ignore[assignment]
        self.knock_until_it_shuts()
        self.until(lambda: self.door._points() >= LIMIT)


class Drawn:
    """Stands for a random generator."""

    def __init__(self, half: int):
        self.half = half

    def uniform(self, *_: float) -> float:
        return 60.0

    def getrandbits(self, _: int) -> int:
        return self.half


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.door.close()
    made.context.destroy(0)


def test_flood_guard_closes_and_opens_and_logs_once(place: Place, caplog: pytest.LogCaptureFixture):
    client = place.client()
    client.send(b"before")
    place.until(lambda: bool(client.poll(0)))
    assert client.recv() == b"before"
    with caplog.at_level(logging.WARNING, "hilt.wire"):
        for n in (1, 2):
            place.knock_until_it_shuts()
            assert place.door.closings == n
            client.send(b"while it is closed")
            place.until(lambda: bool(client.poll(0)))
            assert client.recv() == b"while it is closed"
            place.until(lambda: place.door.is_open)
    assert place.door.strangers == 2 * LIMIT
    assert [record.getMessage() for record in caplog.records] == [
        f"port 1: {LIMIT} connections came without a valid key or in another protocol; during such a "
        "flood, new ones may have to wait a few seconds. Look for a scanner, or for an actor that "
        "tries with the wrong keys."
    ]


def test_a_few_strangers_do_not_close_it(place: Place):
    place.knock(LIMIT // 2)
    place.until(lambda: place.door.strangers == LIMIT // 2)
    assert place.door.closings == 0 and place.hears("127.0.0.1")


def test_many_actors_at_once_are_not_strangers(place: Place, caplog: pytest.LogCaptureFixture):
    place.door._random = Drawn(1)  # type: ignore[assignment]  # if it closed for strangers, it would be for a minute
    clients = [place.client() for _ in range(2 * LIMIT)]
    for client in clients:
        client.send(b"hello")
    place.until(lambda: all(client.poll(0) for client in clients))
    place.until(lambda: place.door.is_open)
    assert caplog.text == ""


@needs_filters
def test_known_addresses_are_heard_while_it_is_closed(place: Place):
    for address in ("127.0.0.9", "::ffff:127.0.0.10", "[fe80::1%eth0]", "nonsense", "", None):
        place.door.know(address)
    place.shut()
    assert place.hears("127.0.0.9") and place.hears("127.0.0.10")
    assert not place.hears("127.0.0.1") and not place.hears("127.0.0.11")


@needs_filters
def test_one_half_of_the_others_is_heard_until_strangers_are_in_it(place: Place):
    place.door.know("127.0.0.10")
    place.shut(ODD_ADDRESSES)
    assert place.hears("127.0.0.10") and place.hears("127.0.0.11") and not place.hears("127.0.0.12")
    place.knock(LIMIT // 3)
    place.until(lambda: not place.door._some_are_heard)
    assert not any(place.hears(f"127.0.0.{i}") for i in (1, 10, 11, 12))
    assert not place.door.is_open and place.door.closings == 1


@needs_filters
def test_the_known_are_bounded_and_the_latest_are_kept(place: Place):
    for i in range(3 * MAX_KNOWN):
        place.door.know("127.0.0.1")
        place.door.know(f"127.0.1.{i}")
    assert len(place.door._known) == MAX_KNOWN
    place.shut()
    assert place.hears("127.0.0.1") and place.hears(f"127.0.1.{3 * MAX_KNOWN - 1}") and not place.hears("127.0.1.1")


@needs_filters
@pytest.mark.parametrize("host", ["*", "[::1]"])
def test_ipv6_and_wildcards(host: str):
    try:
        place = Place(host)
        socket.create_connection(("::1", place.port), timeout=60).close()
    except (OSError, zmq.ZMQError) as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENODEV):
            pytest.skip("no IPv6 here")
        raise
    try:
        for known in (False, True):
            if known:
                place.door.know("::1")
            place.door._random = Drawn(2)  # type: ignore[assignment]  # | 1: 3, whose half has neither ::1 nor 127.0.0.1
            place.knock_until_it_shuts("::1")
            assert place.hears("::1", "::1") is known
            if host == "*":
                assert not place.hears("127.0.0.1")
            place.door._closed_at = -1e9
            place.until(lambda: place.door.is_open)
            assert place.hears("::1", "::1")
    finally:
        place.door.close()
        place.context.destroy(0)


def test_without_filters_it_only_counts(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "_ATTACH_FILTER", 9_999)  # as in a sandbox that knows no such option
    place.shut()
    assert place.hears("127.0.0.1")


@needs_filters
def test_closing_it_leaves_the_socket_as_it_was(place: Place):
    place.shut()
    assert not place.hears("127.0.0.1")
    place.door.close()
    place.door.close()
    assert place.hears("127.0.0.1")


def test_flood_guard_must_exist_before_the_listener(place: Place):
    with pytest.raises(ConfigError, match=r"the socket is bound already\. Make the door first, then bind"):
        FloodGuard(place.socket)


# --- a real flood, against a server with keys in a process of its own ---


def serve_for_a_flood(keys: Path, pipe: Connection) -> None:
    config = TrainerConfig(bind_ip="127.0.0.1", keys=str(keys))
    context, mine = zmq.Context(), ServerKeys.load(keys)
    gatekeeper = Gatekeeper(context, mine)
    server = router(context, config, mine)
    door = FloodGuard(server)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listen(server, config, port)
    pipe.send(port)
    poller = zmq.Poller()
    for readable in (server, door.monitor, pipe.fileno()):
        poller.register(readable, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(100))
        while server.poll(0):
            server.send_multipart(server.recv_multipart())
        door.tick()
        if pipe.fileno() in ready:
            if pipe.recv() == "end":
                break
            pipe.send((time.process_time(), resident_bytes(), door.strangers, door.closings))
    door.close()
    server.close(0)
    gatekeeper.close()
    context.destroy(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Flood:
    """Strangers from 127.0.0.1: in turn one that only connects, one that says hello for
    another server's key, one that talks HTTP."""

    GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + os.urandom(32) + bytes(7) + b"\x01" + os.urandom(80)

    def __init__(self, port: int, per_second: int):
        self.address, self.per_second = ("127.0.0.1", port), per_second
        self.sent = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(60)

    def _run(self) -> None:
        begun, open_ones = time.monotonic(), deque[tuple[float, socket.socket]]()
        while not self._end.wait(0.003):
            now = time.monotonic()
            for _ in range(int((now - begun) * self.per_second) - self.sent):
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(self.address)
                with suppress(OSError):  # not let in, which is the point
                    stranger.send((b"", self.GREETING + self.HELLO, b"GET / HTTP/1.1\r\n\r\n")[self.sent % 3])
                self.sent += 1
                open_ones.append((now, stranger))
            while open_ones and now - open_ones[0][0] > 0.3:
                open_ones.popleft()[1].close()
        for _, stranger in open_ones:
            stranger.close()


@needs_filters
def test_a_flood(tmp_path: Path, counted: Callable[[str], None]):
    new_keys(tmp_path, ["learner", "arm"])
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_for_a_flood, args=(tmp_path, theirs), daemon=True
    )
    process.start()
    context = zmq.Context()
    try:
        assert ours.poll(60)
        port = ours.recv()

        def actor(source: str) -> Socket:
            client: Socket = context.socket(zmq.DEALER)
            client.set(zmq.CONNECT_TIMEOUT, 500)
            client.set(zmq.RECONNECT_IVL_MAX, 500)
            ClientKeys.load(tmp_path, "arm").secure(client)
            client.connect(f"tcp://{source}:0;127.0.0.1:{port}")
            return client

        def cost() -> tuple[float, int, int, int]:
            ours.send("cost")
            assert ours.poll(60)
            return ours.recv()

        established = actor("127.0.0.1")
        exchanged = 0

        def exchange() -> None:
            nonlocal exchanged
            established.send(b"%d" % exchanged)
            assert established.poll(30_000) and established.recv() == b"%d" % exchanged
            exchanged += 1

        exchange()
        with Flood(port, per_second=500) as flood:
            while cost()[3] < 2:  # it has closed, opened and closed: all that is allocated once is there
                exchange()
            cpu, memory, strangers, closings = cost()
            begun, sent = time.monotonic(), flood.sent
            newcomers = [actor("127.0.0.1"), actor("127.0.0.2"), actor("127.0.0.3")]
            for newcomer in newcomers:
                newcomer.send(b"hello")
            deadline = begun + 120
            while time.monotonic() < begun + 5 or not all(newcomer.poll(0) for newcomer in newcomers):
                assert time.monotonic() < deadline, "no way in for a newcomer"
                exchange()
                time.sleep(0.01)
            after, seconds = cost(), time.monotonic() - begun
        share = (after[0] - cpu) / seconds
        counted(
            f"{(flood.sent - sent) / seconds:.0f} strangers per second for {seconds:.0f} s, "
            f"{after[2] - strangers} of them heard, door closed {after[3] - closings} times: "
            f"{100 * share:.1f}% of a core, {(after[1] - memory) / 1e6:+.1f} MB; {exchanged} exchanges of an "
            "established connection meanwhile"
        )
        assert share < 0.25
        assert after[1] - memory < 8 << 20
        ours.send("end")
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        context.destroy(0)
