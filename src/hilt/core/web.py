"""What Hilt's servers share: of pages for a browser the guard against foreign pages and strangers, and the address to
open; the listening socket; and a server that runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import ipaddress
import os
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from hilt.core.errors import ConfigError, DeadlineError, optional_module

Served = TypeVar("Served", bound="ThreadedServer")

PAGE_SERVER = {
    "log_level": "warning",
    "timeout_graceful_shutdown": 1,
    "ws_max_size": 1 << 20,
    "ws_per_message_deflate": False,
}
"""Settings of uvicorn for a server of pages. Messages of its sockets are not compressed: pictures are small already,
and a compressor takes a quarter of a megabyte for each page that is open."""


class PageGuard:
    """Around a whole application: HTTP, NiceGUI's socket and our own routes.

    The Host must be this machine by its address or own name, or a name in somebody's DNS could lead a browser here. The
    Origin must be the Host, or any web page that the person has open could act in their name. Where there is a token it
    must be given: in the address once, which a cookie then replaces. The browser is told to load nothing from other
    machines, and to show the page in no other site.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        token: str,
        names: Iterable[str] = (),
        secure: bool = False,
        sign_in: Any | None = None,
    ):
        """`names`: further names of this server, such as that of a reverse proxy. `secure`: the address that people
        open begins with https. `sign_in`: an application for those who have no token, which may give them its
        cookie; without it they are refused."""
        self.app = app  # NiceGUI finds itself by this name
        own = socket.gethostname().lower()
        self._names = {"localhost", host.lower(), *map(str.lower, names)} | ({own, f"{own}.local"} if token else set())
        # a name of its own: other ports of this machine see it too
        self._token, self._cookie, self._secure, self._sign_in = token, cookie_name(token), secure, sign_in
        self._responses = optional_module("starlette.responses", "The page", "teleop", "nicegui")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token", "")
        if objection := self._objection(scope["type"], headers):
            await self._refuse(objection, scope, receive, send)
        elif not self._has_token(headers, given):
            if self._sign_in is not None and scope["type"] == "http":
                # with "no-referrer" a browser would send the form with the Origin null
                closed = _closed_to_others(send, headers.get("host", ""), "same-origin")
                await self._sign_in(scope, receive, closed)
            else:
                text = "This page needs its token: open the whole address that was printed, with ?token=."
                await self._refuse(text, scope, receive, send)
        elif given and self._token:
            # A page and not a redirection: after a link on another site, a strict cookie
            # would not be sent along with that one.
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            target = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
            response = self._responses.HTMLResponse(
                f'<meta http-equiv="refresh" content="0;url={html.escape(target, quote=True)}">'
            )
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", secure=self._secure)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, _closed_to_others(send, headers.get("host", "")))

    async def _refuse(self, text: str, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":  # closed before it is accepted, which servers answer with 403 and no warning
            await send({"type": "websocket.close", "code": 1008, "reason": text})
        else:
            await self._responses.PlainTextResponse(text, 403)(scope, receive, send)

    def _objection(self, kind: str, headers: dict[str, str]) -> str:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._known(host):
            return f"Host {host!r} is not this machine: open the address that was printed."
        if kind == "websocket" if origin is None else origin.partition("://")[2] != host:
            return f"Origin {origin!r} is not this page: open the address that was printed."
        return ""

    def _has_token(self, headers: dict[str, str], given: str) -> bool:
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        shown = given or cookies.get(self._cookie, "")
        return hmac.compare_digest(shown.encode(), self._token.encode()) or not self._token

    def _known(self, host: str) -> bool:
        try:
            name = host_name(host)
            return name in self._names or ipaddress.ip_address(name).is_loopback or self._token != ""
        except ValueError:
            return False


def _closed_to_others(send: Any, host: str, referrer: str = "no-referrer") -> Any:
    """No other site may show this page inside its own, where a click means something
    else; and the page loads nothing from other machines."""
    own = f"'self' 'unsafe-inline' 'unsafe-eval' data: blob: ws://{host} wss://{host}"
    added = [
        (b"x-frame-options", b"DENY"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", referrer.encode()),
    ]
    added.append((b"content-security-policy", f"default-src {own}; frame-ancestors 'none'".encode("latin-1")))

    async def closed(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return closed


def cookie_name(token: str) -> str:
    """The name of the cookie that has the token of a page."""
    return f"hilt-{token[:6]}"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """``localhost`` from ``localhost:5000``, ``::1`` from ``[::1]:5000``; nothing
    from a header that is not wholly such."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s\[\]:/@]+))(?::\d*)?", header)
    return (found[1] or found[2]).lower() if found else ""


def check_tls_files(certificate: Path | None, key: Path | None) -> None:
    """Refuses a certificate without its key, a key without its certificate, and files that are not there."""
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key belong together: give the files of both, or none of them.")
    for file in (certificate, key):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file}: there is no such file; expected a certificate and its key as PEM files.")


def own_address() -> str:
    """Returns the address of this machine in its network, or its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; an address reserved for documentation
        return str(probe.getsockname()[0])
    return socket.gethostname()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", 0)
        why = os.strerror(number) if number and number > 0 else error  # those of getaddrinfo are negative
        cure = "Give another port (0 takes a free one) or an address of this machine."
        raise ConfigError(f"{host} port {port}: cannot listen here ({why}). {cure}") from None


def page_address(host: str, port: int, token: str, scheme: str = "http", path: str = "") -> str:
    """Returns what to open in the browser."""
    if host in ("0.0.0.0", "::"):
        host = own_address()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{path}{f'?token={token}' if token else ''}"


class ThreadedServer(ABC):
    """A server of asyncio's: `serve` runs it in a loop of the caller's, `start` and `stop`, or ``with``, in a thread of
    this process."""

    title = "server"
    """What errors and the thread call it"""
    start_s, stop_s = 60.0, 10.0
    """Seconds within which it begins to serve, and within which it ends"""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None

    @abstractmethod
    async def serve_until(self, ending: asyncio.Event, ready: Callable[[], None]) -> None:
        """Serves until the event is set; calls `ready` when it has begun."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what was opened; may be called twice."""

    def __enter__(self: Served) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serves from a thread of this process, until `stop`."""
        ready, problems = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                asyncio.run(self.serve(ready.set))
            except Exception as error:
                if ready.is_set():  # it has served: nobody waits for this any more, so that the thread reports it
                    raise
                problems.append(error)
                ready.set()

        name = f"hilt-{self.title.replace(' ', '-')}"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        if not ready.wait(self.start_s):
            raise DeadlineError(f"the {self.title} did not begin to serve in {self.start_s:.0f} s.")
        if problems:
            raise problems[0]

    def stop(self) -> None:
        """Ends it, and closes it."""
        loop, ending, thread = self._loop, self._ending, self._thread
        if thread is not None and loop is not None and ending is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(ending.set)
            thread.join(self.stop_s)
        self.close()

    async def serve(self, ready: Callable[[], None] = lambda: None, signals: Sequence[int] = ()) -> None:
        """Serves until `stop`, or one of the signals."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        self._loop, self._ending = loop, ending
        for number in signals:
            loop.add_signal_handler(number, ending.set)
        try:
            await self.serve_until(ending, ready)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
