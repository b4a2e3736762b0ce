"""HTTP to a robot server, with a deadline for every request: the client's half of
the contract of HIL-SERL's robot server."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from hilt.core.errors import ConfigError, DeadlineError, EmergencyStopError, RefusedError, RequestError

_REFUSED = (401, 403, 409, 423)  # no token, the wrong one, another controller
_ESTOP = 412  # the emergency stop is latched
_GONE = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
_BODY_LIMIT_BYTES = 64 << 20


class RobotClient:
    """One kept-alive connection, for one thread. ``post`` gives JSON as an object,
    text as a string, anything else as bytes."""

    def __init__(self, url: str, token: str = "", request_seconds: float = 2.0):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"the robot server's address is {url!r}; something like http://127.0.0.1:5000 was expected."
            )
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url, self._path, self.request_seconds = url.rstrip("/"), parts.path.rstrip("/"), request_seconds
        self._connection = kind(parts.hostname, parts.port, timeout=request_seconds)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def post(self, route: str, body: object = None, seconds: float | None = None, missing_ok: bool = False) -> Any:
        """The reply to a POST. What takes longer than `seconds` raises, and so does
        a refusal, with the server's own words.

        With `missing_ok`, the reply of a server that has no such route is None.
        """
        seconds = self.request_seconds if seconds is None else seconds
        where = f"{self.url}/{route}"
        data = b"" if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        try:
            status, kind, reply = self._exchanged(route, data, headers, time.monotonic() + seconds)
        except TimeoutError:
            raise DeadlineError(
                f"{where}: no reply within {seconds:g} s. Is the robot server busy, or the network slow?"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RefusedError(
                f"{where}: no robot server answers ({why}). Start one: hilt serve-robot; or correct the address."
            ) from error
        if status == 404 and missing_ok:
            return None
        if status != 200:
            sentence = _sentence(reply) + (" Set token_file in the arm's settings." if status == 401 else "")
            kind_of_error = RefusedError if status in _REFUSED else RequestError
            raise (EmergencyStopError if status == _ESTOP else kind_of_error)(
                f"{where}: refused with status {status}: {sentence}"
            )
        try:
            return (
                json.loads(reply)
                if kind == "application/json"
                else reply.decode()
                if kind.startswith("text/")
                else reply
            )
        except ValueError as error:
            raise RequestError(f"{where}: the reply is not {kind} ({error}). Is it a robot server?") from error

    def close(self) -> None:
        self._connection.close()

    def _exchanged(self, route: str, data: bytes, headers: dict[str, str], deadline: float) -> tuple[int, str, bytes]:
        reused = self._connection.sock is not None
        try:
            return self._exchange(route, data, headers, deadline)
        except _GONE:
            if not reused:
                raise
        # the server had closed an idle connection: that is not an error, and every command may be sent twice
        return self._exchange(route, data, headers, deadline)

    def _exchange(self, route: str, data: bytes, headers: dict[str, str], deadline: float) -> tuple[int, str, bytes]:
        try:
            self._allow(deadline)
            self._connection.request("POST", f"{self._path}/{route}", data, headers)
            self._allow(deadline)
            response = self._connection.getresponse()
            pieces, size = [], 0
            # a time-out of the socket is for one piece: the deadline is for all of them
            while piece := response.read1(1 << 20):
                pieces.append(piece)
                size += len(piece)
                if size > _BODY_LIMIT_BYTES:
                    raise http.client.HTTPException(f"a reply of more than {_BODY_LIMIT_BYTES:,} bytes")
                self._allow(deadline)
            response.close()  # all of it was read: the connection is free for the next request
        except BaseException:  # Ctrl-C too: a reply that comes late must not be taken for the next one
            self.close()
            raise
        return response.status, response.headers.get_content_type(), b"".join(pieces)

    def _allow(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.timeout = left
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)


def _sentence(reply: bytes) -> str:
    """Returns the message of a refusal, which is text or JSON with an ``error``."""
    text = reply.decode(errors="replace").strip()
    try:
        message = json.loads(text)
    except ValueError:
        message = text
    if isinstance(message, dict):
        message = message.get("error") or message.get("detail") or text
    return str(message)[:500] or "without a reason"
