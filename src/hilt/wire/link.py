"""The actor's connection: a thread that sends what is inserted, until it is acknowledged.

It numbers what it sends, begins again where the learner acknowledged when something is lost,
makes a new connection when the learner falls silent, and sends less at a time when the network is
slow. The actor's own thread never waits for it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from hilt.core.errors import ClosedError, ConfigError, FormatError, HiltError, RefusedError
from hilt.replay.storage.lock import after_fork
from hilt.replay.transfer.queue import Parcel, QueuedDataStore
from hilt.wire.codec import decode, encode
from hilt.wire.config import TrainerConfig
from hilt.wire.keys import ClientKeys
from hilt.wire.remote import GRACE_S, no_answer
from hilt.wire.requests import copied, raise_error
from hilt.wire.sockets import EVERYTHING, JOIN_S, Bell, LeveledLogger, connect, context_for, keep_freed_memory

PING_S = 1.0
MIN_SILENCE_S = 3.0
"""Seconds of silence, or the client's timeout if that is longer, after which the
learner is asked on a new connection."""
MAX_BACKOFF = 20.0
"""How many times longer at most, on a network that turns out to be slow."""
SMALLEST_WINDOW, LARGEST_WINDOW = 256 << 10, 16 << 20
"""Bytes that are on their way at a time, per store."""
PARCEL_BYTES = 8 << 20
WORTH_SENDING = 2 << 20
"""Less than this goes at once only when nothing else is on its way."""
REFUSED_AGAIN_S = 10.0
TOO_LARGE_AGAIN_S = 5.0


@dataclass
class Cursor:
    """How far one store has been sent and acknowledged."""

    store: QueuedDataStore
    sent: int = -1
    process_safe: int = -1
    power_safe: int = -1
    promises_power: bool = False
    epoch: int = 0
    n: int = 0
    window: int = SMALLEST_WINDOW
    on_their_way: deque[tuple[int, int]] = field(default_factory=deque)
    """(last number, bytes) of messages that are not acknowledged."""
    wait_until: float = 0.0
    trouble: str = ""
    """Why the learner does not take more."""
    refused: int = 0
    refusal: str = ""
    """What was wrong with the last one that was refused."""
    marks: deque[tuple[int, float]] = field(default_factory=deque)
    """(number, when it was first seen), to know how long the oldest has been waiting."""

    def begin_again(self) -> None:
        """From what is acknowledged: the rest did not arrive in order."""
        self.sent, self.n = max(self.process_safe, self.store.stats()["acknowledged"]), 0
        self.epoch += 1
        self.on_their_way.clear()

    def acknowledged(self, process: int, power: int | None) -> None:
        self.process_safe = max(self.process_safe, process)
        self.sent = max(self.sent, self.process_safe)
        self.power_safe = max(self.power_safe, -1 if power is None else power)
        while self.on_their_way and self.on_their_way[0][0] <= process:
            self.on_their_way.popleft()
            self.window = min(LARGEST_WINDOW, self.window * 2)
        while self.marks and self.marks[0][0] <= process:
            self.marks.popleft()
        self.store.acknowledge(self.power_safe if self.promises_power else self.process_safe)

    def see(self, now: float) -> None:
        """Notes when the newest step appeared."""
        newest = self.store.latest_data_id()
        if newest > max(self.process_safe, self.marks[-1][0] if self.marks else -1) and len(self.marks) < 4096:
            self.marks.append((newest, now))


@dataclass
class _Asked:
    message: dict[str, Any]
    sent_at: float = 0.0
    """0 when the learner does not have it, as far as is known."""
    reply: dict[str, Any] | None = None


class Link:
    """Owns the socket to the learner."""

    def __init__(
        self,
        actor: str,
        host: str,
        config: TrainerConfig,
        keys: ClientKeys | None,
        stores: Mapping[str, QueuedDataStore],
        silence_s: float,
        logger: LeveledLogger = EVERYTHING,
    ):
        self._logger = logger
        self.actor, self.boot = actor, secrets.token_hex(8)
        self.address = "this process" if config.transport == "in-process" else f"{host}:{config.port_number}"
        self.cursors = {name: Cursor(store) for name, store in stores.items()}
        self.seen_version = -1
        self.refusal = ""
        """Why the learner does not let this client in; empty when it does."""
        self.trouble = ""
        """Why a queue cannot be read or written here."""
        self.reconnects = 0
        self.context = context_for(config)
        self._host, self._config, self._keys = host, config, keys
        self._silence_s = max(silence_s, MIN_SILENCE_S)
        self._backoff = 1.0
        self._changed = threading.Condition()
        self._instance: str | None = None
        self._numbers = itertools.count()
        self._open: set[int] = set()  # numbers whose answers may still be wanted
        self._asked: dict[int, _Asked] = {}
        self._bell = Bell()
        self._awake, self._caught_up = True, True
        self._stopping = threading.Event()
        keep_freed_memory()
        self._socket = connect(self.context, config, host, config.port_number, keys)
        for store in stores.values():
            store.on_insert = self._inserted
        after_fork(self, "_forked")
        self._thread = threading.Thread(target=self._run, name="hilt-wire-client", daemon=True)
        self._thread.start()

    # For the client's threads

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition on the learner's messages holds; returns False if it does not within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._stopping.is_set(), max(0.0, seconds)) and ready()

    @property
    def is_open(self) -> bool:
        return self._instance is not None

    def new_number(self) -> int:
        with self._changed:
            number = next(self._numbers)
            self._open.add(number)
            return number

    def ask(
        self, name: str, payload: object, seconds: float, number: int | None = None, grace: float = GRACE_S
    ) -> object:
        """The learner's answer to a request; asked again with the same number it is the same request."""
        if self._stopping.is_set():
            raise ClosedError("this client was stopped; make another one.")
        mine, unanswered = self.new_number() if number is None else number, False
        try:
            asked = self._question(mine, name, payload, float(seconds))
            self._awaken()
            unanswered = number is not None
            if not self.wait(lambda: asked.reply is not None, seconds + grace):
                raise self._unanswered(name, seconds)
            unanswered = False
        finally:
            if not unanswered:
                self.give_up(mine)
        assert asked.reply is not None
        if "error" in asked.reply:
            raise_error(asked.reply)
        return asked.reply.get("payload")

    def give_up(self, number: int) -> None:
        """Forgets a request whose reply is no longer awaited."""
        with self._changed:
            self._asked.pop(number, None)
            self._open.discard(number)

    def _question(self, number: int, name: str, payload: Any, seconds: float) -> _Asked:
        with self._changed:
            if (asked := self._asked.get(number)) is not None:
                asked.message["seconds"] = seconds
                return asked
        payload = copied(payload)  # asked again, it is what it was
        self._fits(encode({"payload": payload}), "Send less at a time.")
        with self._changed:
            message = {"kind": "request", "number": number, "type": name, "payload": payload, "seconds": seconds}
            return self._asked.setdefault(number, _Asked(message))

    def _fits(self, frames: Sequence[Any], cure: str) -> None:
        largest, most = max(memoryview(frame).nbytes for frame in frames), self._config.max_message_bytes
        if largest > most:
            raise ConfigError(f"{largest} bytes in one array, but max_message_bytes={most}. {cure}")

    def close(self) -> None:
        """Ends the thread. What was not acknowledged stays in the stores."""
        self._stopping.set()
        self._awaken()
        self._thread.join(JOIN_S)
        self._bell.close()
        for cursor in self.cursors.values():
            cursor.store.on_insert = None
        with self._changed:
            self._changed.notify_all()

    def _unanswered(self, name: str, seconds: float) -> Exception:
        if self._stopping.is_set():
            return ClosedError(f"{name}: this client was stopped before an answer came.")
        if self.refusal:
            return RefusedError(f"the learner at {self.address} refuses {self.actor!r}: {self.refusal}")
        return no_answer(name, seconds, self.address)

    def _inserted(self) -> None:
        if self._caught_up and not self._awake:  # else it looks at the stores anyway before it sleeps again
            self._awaken()

    def _forked(self) -> None:
        """In a forked process: its parent goes on sending."""
        self._changed, self._stopping = threading.Condition(), threading.Event()
        self._stopping.set()
        for cursor in self.cursors.values():
            cursor.store.on_insert = _not_here

    def _awaken(self) -> None:
        self._awake = True
        self._bell.ring()

    # The thread that owns the socket

    def _run(self) -> None:
        self._heard = self._pinged = self._greeted = time.monotonic()
        self._greeting_sent = False
        try:
            while not self._stopping.is_set():
                poller = zmq.Poller()
                poller.register(
                    self._socket, zmq.POLLIN if self._greeting_sent or self.is_open else zmq.POLLIN | zmq.POLLOUT
                )
                poller.register(self._bell.fileno(), zmq.POLLIN)
                if not self._awake:
                    poller.poll(self._pause_ms())
                self._sleep_soon()
                try:
                    self._turn()
                    self.trouble = ""
                except HiltError as error:  # of a queue on disk: closed, damaged, or without room
                    if str(error) != self.trouble:
                        self._logger.error("%s: %s", self.actor, error)
                    self.trouble = str(error)
                    self._stopping.wait(0.2)
        finally:
            if self.is_open:
                self._send({"kind": "bye"})
                self._socket.close(200)  # ms for the goodbye
            else:
                self._socket.close(0)

    def _turn(self) -> None:
        self._receive()
        self._look_after_the_connection()
        if self.is_open:
            self._send_requests()
            self._send_steps()

    def _sleep_soon(self) -> None:
        """From here on an insert wakes this thread again."""
        self._bell.quiet()
        self._awake = False

    def _pause_ms(self) -> int:
        waits = [cursor.wait_until - time.monotonic() for cursor in self.cursors.values() if cursor.wait_until]
        return max(1, int(1000 * min([0.2, *waits])))

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = decode(frames)
                self._heard = time.monotonic()
                with self._changed:
                    try:
                        self._take(message)
                    finally:
                        self._changed.notify_all()
            except (FormatError, AttributeError, KeyError, TypeError) as error:
                self._logger.warning("a message from %s that cannot be read was dropped: %s", self.address, error)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ack":
            if message["instance"] == self._instance:  # not a late word of the learner before this one
                self._acknowledged(message)
        elif kind == "welcome":
            self._welcome(message)
        elif kind == "reply":
            if (asked := self._asked.get(message["number"])) is not None:
                asked.reply = message
        elif kind == "unknown":
            if (asked := self._asked.get(message["number"])) is not None:
                asked.sent_at = 0.0
        elif kind == "refuse":
            if message["why"] != self.refusal:
                self._logger.error("the learner at %s refuses %s: %s", self.address, self.actor, message["why"])
            self.refusal, self._instance = message["why"], None
        elif kind == "stranger" and self.is_open:
            self._instance = None
            self._say_hello()

    def _welcome(self, message: dict[str, Any]) -> None:
        self.refusal, self._instance = "", message["instance"]
        for name, announced in message["stores"].items():
            cursor = self.cursors[name]
            cursor.promises_power = announced["promises_power"]
            if not announced["keeps"]:
                self._logger.warning(
                    "the learner at %s keeps %r only while it runs; give its store a path= to keep steps",
                    self.address,
                    name,
                )
            # of this learner: the one before it may have had more
            cursor.process_safe = cursor.store.stats()["acknowledged"]
            if "have" in announced:
                cursor.process_safe = min(announced["have"], cursor.store.last_of(announced["boot"]))
            cursor.begin_again()
            cursor.trouble, cursor.wait_until = "", 0.0
        for asked in self._asked.values():
            asked.sent_at = 0.0

    def _acknowledged(self, message: dict[str, Any]) -> None:
        cursor = self.cursors[message["store"]]
        for number, why in message.get("refused", ()):
            if number > cursor.process_safe:
                cursor.refused, cursor.refusal = cursor.refused + 1, why
                self._logger.error(
                    "the learner refused step %d for %r, which is lost: %s", number, message["store"], why
                )
        before = cursor.process_safe
        # of a boot before a power cut, the learner may have more than this queue
        last = cursor.store.last_of(message["boot"])
        cursor.acknowledged(min(message["process"], last), message["power"] and min(message["power"], last))
        if cursor.process_safe > before:
            self._backoff = 1.0
        if held := message.get("held"):
            if cursor.trouble != held and "rate limiter" not in held:
                self._logger.warning("the learner takes no steps for %r now: %s", message["store"], held)
            cursor.trouble, cursor.wait_until = held, time.monotonic() + float(message["retry"])
        elif cursor.process_safe > before:
            cursor.trouble = ""

    def _look_after_the_connection(self) -> None:
        now = time.monotonic()
        silence = self._silence_s * self._backoff
        if self.refusal:
            if now - self._greeted > REFUSED_AGAIN_S:
                self._connect_again(now)
        elif now - max(self._heard, self._greeted) > silence:
            self._backoff = min(MAX_BACKOFF, self._backoff * 1.5)
            for cursor in self.cursors.values():
                cursor.window = max(SMALLEST_WINDOW, cursor.window // 4)
            self._connect_again(now)
        elif not self.is_open and not self._greeting_sent:
            self._say_hello()
        elif self.is_open and now - self._pinged > PING_S:
            self._pinged = now
            self._send({"kind": "ping", **self._load(now)})

    def _connect_again(self, now: float) -> None:
        with self._changed:
            self._instance = None
            self._changed.notify_all()
        self.reconnects += 1
        self._socket.close(0)
        self._socket = connect(self.context, self._config, self._host, self._config.port_number, self._keys)
        self._greeted = now
        self._say_hello()

    def _say_hello(self) -> None:
        stores: dict[str, Any] = {}
        for name, cursor in self.cursors.items():
            parcel = cursor.store.parcel(cursor.store.stats()["acknowledged"], 1)
            fits = parcel is not None and parcel.nbytes < self._config.max_message_bytes // 4
            stores[name] = parcel and {
                "boot": parcel.boot,
                "first": parcel.first,
                "example": parcel.packed if fits else None,
            }
        hello = {"kind": "hello", "actor": self.actor, "boot": self.boot, "seen_version": self.seen_version}
        self._greeting_sent = self._send({**hello, "agreement": self._config.agreement(), "stores": stores}) > 0
        if self._greeting_sent:
            self._greeted = time.monotonic()

    def _send_requests(self) -> None:
        now = time.monotonic()
        with self._changed:
            due = [a for a in self._asked.values() if a.reply is None and now - a.sent_at > PING_S * self._backoff]
            oldest = min(self._open, default=0)
        for asked in due:
            # the learner replies if it does not know it
            again = {"again": True, "payload": None} if asked.sent_at else {}
            if self._send({**asked.message, "oldest": oldest, **again}):
                asked.sent_at = now

    def _send_steps(self) -> None:
        now, self._caught_up = time.monotonic(), True
        for name, cursor in self.cursors.items():
            cursor.see(now)
            if cursor.wait_until and now >= cursor.wait_until:
                cursor.wait_until = 0.0
                cursor.begin_again()
            if cursor.wait_until or not self._fill_window(name, cursor, now):
                self._caught_up = False  # what is inserted now waits for an acknowledgment or for its time

    def _fill_window(self, name: str, cursor: Cursor, now: float) -> bool:
        """Sends as much as may be on its way; returns whether that was all there is."""
        while (flying := sum(size for _, size in cursor.on_their_way)) < cursor.window:
            parcel = cursor.store.parcel(
                cursor.sent, min(PARCEL_BYTES, cursor.window - flying, self._config.max_message_bytes // 2)
            )
            if parcel is None:
                return True
            if cursor.on_their_way and parcel.nbytes < WORTH_SENDING:
                break  # more will have gathered when the next acknowledgment comes
            if not self._send_parcel(name, cursor, parcel, now):
                break
        return False

    def _send_parcel(self, name: str, cursor: Cursor, parcel: Parcel, now: float) -> bool:
        message = {
            "kind": "data",
            "store": name,
            "boot": parcel.boot,
            "first": parcel.first,
            "epoch": cursor.epoch,
            "n": cursor.n,
        }
        message |= {"packed": parcel.packed, "items": parcel.items, "instance": self._instance, **self._load(now)}
        try:
            frames = encode(message)
            self._fits(frames, "Give make_trainer_config a larger one on both sides.")
        except HiltError as error:
            if parcel.last > parcel.first and (one := cursor.store.parcel(parcel.first - 1, 1)) is not None:
                return self._send_parcel(name, cursor, one, now)
            if isinstance(error, ConfigError):  # with other settings it can be sent
                cursor.wait_until = now + TOO_LARGE_AGAIN_S
                if cursor.trouble != str(error):
                    self._logger.error("a step for %r cannot be sent: %s", name, error)
                cursor.trouble = str(error)
                return False
            frames = encode({**message, "packed": None, "items": None, "unsendable": f"it cannot be sent: {error}"})
        size = self._post(frames)
        if size:
            cursor.sent, cursor.n = parcel.last, cursor.n + 1
            cursor.on_their_way.append((parcel.last, size))
        return size > 0

    def _load(self, now: float) -> dict[str, Any]:
        waiting = [now - cursor.marks[0][1] for cursor in self.cursors.values() if cursor.marks]
        return {"depth": sum(len(cursor.store) for cursor in self.cursors.values()), "lag": max(waiting, default=0.0)}

    def _send(self, message: dict[str, Any]) -> int:
        """Bytes sent; 0 when there is no connection, or too much waits in it."""
        return self._post(encode({**message, "instance": self._instance}))

    def _post(self, frames: Sequence[Any]) -> int:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return 0
        return sum(memoryview(frame).nbytes for frame in frames)


def _not_here() -> None:
    raise ClosedError(
        "this process was forked from the one whose client sends these steps; make the queue and "
        "its client after the fork."
    )
