"""Requests with deadlines, each carried out at most once.

A client numbers its requests and asks again when an answer does not come. The server keeps an answer until the client
acknowledges it, so repeating a request never repeats the work.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hilt.core import errors
from hilt.core.errors import FormatError, HiltError, RequestError, SchemaError, UnknownNameError
from hilt.replay.sampling.limiters import gives_up
from hilt.wire.codec import decode, encode
from hilt.wire.sockets import EVERYTHING, LeveledLogger

Handler = Callable[[Any, float], Any]
"""Takes the payload and how many seconds there are; returns the answer."""
AT_ONCE = 64
"""Requests that are being carried out; one more is refused."""
CLIENTS = 256
ANSWERS = 64
"""Answers that are kept for one client."""
LONGEST_S = 3_600.0


class Requests:
    """Executes requests in separate threads, so that a slow one does not delay others."""

    def __init__(
        self,
        types: Sequence[str],
        callback: Callable[[str, Any], Any] | None,
        handlers: Mapping[str, Handler],
        answer: Callable[[bytes, dict[str, Any]], None],
        logger: LeveledLogger = EVERYTHING,
    ):
        self._logger = logger
        self._types, self._callback, self._handlers, self._answer = types, callback, handlers, answer
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._lock = threading.Lock()
        self._running = 0
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def take(self, sender: bytes, boot: str, message: Mapping[str, object]) -> None:
        """Answers a request from memory, or begins to carry it out."""
        number, oldest, name, seconds = (message.get(key) for key in ("number", "oldest", "type", "seconds"))
        if type(number) is not int or type(oldest) is not int or type(name) is not str or type(seconds) is not float:
            raise FormatError("a request without a number, a type and a deadline.")
        with self._lock:
            client = self._clients.setdefault(boot, _Client())
            self._clients.move_to_end(boot)
            while len(self._clients) > CLIENTS:
                self._clients.popitem(last=False)
            known = client.look(number, oldest, sender)
            if known == "new" and message.get("again") is True:
                # the question itself did not arrive, or was asked of another learner
                known = {"kind": "unknown", "number": number}
            elif known == "new" and self._running >= AT_ONCE:
                known = {
                    "kind": "reply",
                    "number": number,
                    "error": f"{AT_ONCE} requests are being carried out already; ask again later.",
                }
            elif known == "new":
                client.begin(number, sender)
                self._running += 1
        if isinstance(known, dict):
            self._answer(sender, known)
        elif known == "new":
            until = time.monotonic() + min(seconds, LONGEST_S)
            arguments = (client, number, name, message.get("payload"), until)
            thread = threading.Thread(
                target=self._carry_out, args=arguments, name=f"hilt-wire-{name[:40]}", daemon=True
            )
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def forget(self, boot: str) -> None:
        """Forgets a client that has disconnected, and its replies."""
        with self._lock:
            self._clients.pop(boot, None)

    def close(self) -> None:
        """Answers nothing more. Requests that a rate limiter holds back end now."""
        self._closed.set()

    def wait(self, seconds: float) -> None:
        """Waits until the requests that are being carried out have ended, except the one whose callback calls this."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
                if thread.is_alive():
                    self._logger.warning(
                        "a request is still running after %g s (%s); it is left behind.", seconds, thread.name
                    )

    def _carry_out(self, client: _Client, number: int, name: str, payload: Any, until: float) -> None:
        gives_up.set(self._closed)
        reply: dict[str, Any] = {"kind": "reply", "number": number}
        try:
            reply["payload"] = self._call(name, payload, until - time.monotonic())
        except HiltError as error:
            reply |= {"error": str(error), "error_kind": type(error).__name__}
        except Exception as error:  # broad: the callback is the user's; its error goes to the client that asked
            self._logger.exception("the request %r failed", name)
            reply |= {"error": f"{name}: {type(error).__name__}: {error}", "error_kind": "RequestError"}
        with self._lock:
            self._running -= 1
            sender = client.done(number, reply)
        if sender is not None and not self._closed.is_set():
            self._answer(sender, reply)

    def _call(self, name: str, payload: Any, seconds: float) -> Any:
        if name in self._handlers:
            return self._handlers[name](payload, seconds)
        if name not in self._types:
            raise UnknownNameError("request type", name, self._types)
        if self._callback is None:
            return {}
        answer = self._callback(name, payload)
        try:
            return copied(answer)  # the learner may go on to change its arrays
        except SchemaError as error:
            raise RequestError(f"{name}: the learner's answer cannot be sent: {error}") from None


class _Client:
    """The requests of one client: being carried out, or answered and not confirmed."""

    def __init__(self) -> None:
        self._running: dict[int, bytes] = {}
        self._answers: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._oldest = 0

    def look(self, number: int, oldest: int, sender: bytes) -> dict[str, Any] | str:
        """An answer that is known, or ``running``, ``new``, or ``old`` for one that was confirmed before."""
        if oldest > self._oldest:
            self._oldest = oldest
            for answered in [n for n in self._answers if n < oldest]:
                del self._answers[answered]
        if number in self._answers:
            return self._answers[number]
        if number in self._running:
            self._running[number] = sender  # it may have come back on another connection
            return "running"
        return "old" if number < self._oldest else "new"

    def begin(self, number: int, sender: bytes) -> None:
        self._running[number] = sender

    def done(self, number: int, reply: dict[str, Any]) -> bytes | None:
        sender = self._running.pop(number, None)
        if number >= self._oldest:
            self._answers[number] = reply
            while len(self._answers) > ANSWERS:
                self._answers.popitem(last=False)
        return sender


def copied(payload: object) -> object:
    """A payload as it arrives, sharing no memory with the one that was given; what
    cannot be sent is an error with its path."""
    return decode([bytes(frame) for frame in encode({"payload": payload})])["payload"]


def raise_error(reply: Mapping[str, object]) -> None:
    """At the client: raises what a request failed with, as the same kind of error where it is one of ours."""
    text = str(reply["error"])
    kind = getattr(errors, str(reply.get("error_kind", "")), None)
    if isinstance(kind, type) and issubclass(kind, HiltError) and "__init__" not in vars(kind):
        raise kind(text)
    raise RequestError(text)
