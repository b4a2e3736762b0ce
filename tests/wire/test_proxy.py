"""The bad network of the other tests does what it says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.wire.journal import wait_for
from tests.wire.proxy import DEADLINE_S, DOWN, UP, Proxy


class Echo:
    """A server that sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(end,), daemon=True).start()

    def _answer(self, end: socket.socket) -> None:
        with end:
            try:
                while piece := end.recv(1 << 16):
                    self.heard += piece
                    end.sendall(piece)
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as made:
        yield made


def call(proxy: Proxy, timeout: float = DEADLINE_S) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.ports[0]), timeout=timeout)


def receive(end: socket.socket, nbytes: int) -> bytes:
    got = b""
    while len(got) < nbytes and (piece := end.recv(nbytes - len(got))):
        got += piece
    return got


def test_passes_everything_in_order(proxy: Proxy):
    data = bytes(range(256)) * 8000
    with call(proxy) as end:
        threading.Thread(target=end.sendall, args=(data,), daemon=True).start()
        assert receive(end, len(data)) == data
        # it is counted afterwards
        wait_for(lambda: proxy.counts[DOWN] >= len(data), "what has arrived to be counted", DEADLINE_S)
    assert proxy.counts[UP] == proxy.counts[DOWN] == len(data)


def test_cut_ends_connections_and_takes_new_ones(proxy: Proxy):
    with call(proxy) as end:
        end.sendall(b"a")
        assert receive(end, 1) == b"a"
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with call(proxy) as end:
        end.sendall(b"b")
        assert receive(end, 1) == b"b"


def test_refuse_and_heal(proxy: Proxy):
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        call(proxy)
    proxy.heal()
    with call(proxy) as end:
        end.sendall(b"c")
        assert receive(end, 1) == b"c"


def test_a_server_that_is_not_there(echo: Echo, proxy: Proxy):
    with socket.create_server(("127.0.0.1", 0)) as free, Proxy(free.getsockname()[1]) as nowhere:
        free.close()
        with pytest.raises(ConnectionResetError), call(nowhere) as end:
            end.recv(1)
        assert nowhere.counts["refused"] == 1


@pytest.mark.parametrize("way", [UP, DOWN])
def test_stall_holds_and_loses_nothing(echo: Echo, proxy: Proxy, way: str):
    proxy.stall(way)
    with call(proxy, timeout=0.2) as end:
        end.sendall(b"held")
        with pytest.raises(TimeoutError):
            end.recv(1)
        wait_for(lambda: echo.heard == (b"" if way == UP else b"held"), "the server to hear it, or not", DEADLINE_S)
        proxy.heal()
        end.settimeout(DEADLINE_S)
        assert receive(end, 4) == b"held"


def test_answers_stall_after_so_many_bytes(echo: Echo, proxy: Proxy):
    proxy.stall_answers_after(10)
    with call(proxy) as end:
        end.sendall(b"x" * 10)
        assert receive(end, 10) == b"x" * 10
        end.sendall(b"y")
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(1)
        wait_for(lambda: echo.heard == b"x" * 10 + b"y", "the server to hear it", DEADLINE_S)


def test_cut_in_the_middle_of_a_message(echo: Echo, proxy: Proxy):
    proxy.cut_after(10)
    with call(proxy) as end:
        end.sendall(b"x" * 25)
        with pytest.raises(ConnectionResetError):
            receive(end, 25)
    assert len(echo.heard) <= 10  # a reset may overtake what was sent
    assert proxy.counts[UP] == 10 and proxy.counts["cut in the middle"] == 1


def test_after_a_cut_in_the_middle_what_waited_in_the_proxy_is_not_sent(proxy: Proxy):
    """Else bytes would be missing in the middle of a stream, which no network does."""
    data = bytes(range(256)) * 4096  # many pieces, which wait for their delay together
    proxy.delay(0.3)
    with call(proxy) as end:
        proxy.cut_after(100_000)
        with contextlib.suppress(ConnectionError):
            end.sendall(data)
        with contextlib.suppress(ConnectionError):
            while end.recv(1 << 16):
                pass
    assert proxy.counts["cut in the middle"] == 1 and proxy.counts[UP] == 100_000


def test_slow_and_delay_take_at_least_their_time(proxy: Proxy):
    data = b"y" * 30_000
    with call(proxy) as end:
        for change, least in ((lambda: proxy.slow(100_000), 0.25), (lambda: proxy.delay(0.2), 0.4)):
            proxy.heal()
            change()
            began = time.monotonic()
            end.sendall(data)
            assert receive(end, len(data)) == data
            assert time.monotonic() - began >= least * 0.9
