"""Who may ask the robot server: holders of a token beyond this machine, never a web
page, and one controller at a time."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hilt.core.errors import ConfigError
from hilt.core.files import read
from hilt.core.web import host_name, is_loopback
from hilt.robot.routes import Refusal

LET_IN = "hilt.let_in"
"""The key in the scope of a request that was authorized and is whole"""
SHORTEST_TOKEN = 16
MAKE_TOKEN = "(umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > robot.token)"


class RequestAuth:
    """Identifies the client of a request by its address and headers."""

    def __init__(self, host: str, tokens: Mapping[str, str]):
        self._loopback, self._tokens = is_loopback(host), dict(tokens)
        if not self._loopback and not tokens:
            raise ConfigError(
                f"host {host} is reached from other machines, and every client that reaches the server can move "
                f"the arm: make a token with {MAKE_TOKEN}, and give --token robot.token."
            )

    def who(self, scope: Mapping[str, Any]) -> str:
        """The asker: an address, and the token's name where there are tokens."""
        headers = dict(scope["headers"])
        if b"origin" in headers or b"sec-fetch-site" in headers:
            raise Refusal(403, "this request comes from a web page; a page may not move the arm.")
        # A page's own name can be made to lead to this machine (DNS rebinding), but then its name is in the request.
        if self._loopback and not is_loopback(host_name(headers.get(b"host", b"").decode("latin-1"))):
            given = headers.get(b"host", b"").decode("latin-1")
            raise Refusal(403, f"Host: expected localhost or a loopback address, got {given[:60]!r}.")
        address = scope["client"][0] if scope.get("client") else "unknown"
        if not self._tokens:
            return address
        scheme, _, given_token = headers.get(b"authorization", b"").partition(b" ")
        names = [name for name, token in self._tokens.items() if hmac.compare_digest(token.encode(), given_token)]
        if not names or scheme.lower() != b"bearer":
            raise Refusal(401, "expected the header 'Authorization: Bearer TOKEN' with a token of this server.")
        return f"{names[0]}@{address}"


class Lease:
    """One controller at a time: a client that sends commands has the arm until it has been silent for a heartbeat.

    A command that has not been answered yet is no silence, however short the heartbeat
    is and however late this process looks at it.
    """

    def __init__(self, arm: int, seconds: float):
        self._arm, self._seconds = arm, seconds
        self._holder, self._until = "", 0.0
        self._unanswered = 0

    def holder(self) -> str | None:
        return self._holder if self._unanswered or time.monotonic() < self._until else None

    @contextlib.contextmanager
    def command(self, who: str) -> Iterator[None]:
        """From when a command came until it is answered."""
        self.take(who)
        self._unanswered += 1
        try:
            yield
        finally:
            self._unanswered -= 1
            self._until = time.monotonic() + self._seconds

    def take(self, who: str) -> None:
        holder = self.holder()
        if holder not in (None, who):
            left = self._seconds if self._unanswered else self._until - time.monotonic()
            raise Refusal(
                423,
                f"arm {self._arm} is controlled by {holder}, for {left:.2f} s more at least; "
                f"{who} may have it after that.",
            )
        self._holder, self._until = who, time.monotonic() + self._seconds


def read_tokens(paths: Sequence[str | os.PathLike[str]]) -> dict[str, str]:
    """Each file is one token, and its name is the name of its client."""
    tokens: dict[str, str] = {}
    for path in map(Path, paths):
        token = read(path).decode("ascii", "replace").strip()
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path}: others can read this token; expected mode 0600: chmod 600 {path}")
        if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"{path}: expected one token of {SHORTEST_TOKEN} characters or more; make one with {MAKE_TOKEN}"
            )
        if path.stem in tokens:
            raise ConfigError(
                f"{path}: there are two tokens of the name {path.stem!r}; expected a name for each controller."
            )
        tokens[path.stem] = token
    return tokens


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve at {host}:{port}: {error}. Choose another --port or --host.") from error
