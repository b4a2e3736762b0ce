"""Weights from the learner to its actors: numbered, and the newest wins.

An actor asks for what is newer than it has, and the learner answers as soon as there is such a thing. So
no actor ever has more than one reply in flight: a slow one delays no other, nothing accumulates for it,
and the next version that it gets is the newest.

An answer is a row of messages of moderate size, not a single large one: heartbeats pass between
them on a slow network, the actor sees that it goes on, and it copies what has come into memory
it already owns while the rest is still under way.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import zmq

from hilt.core.errors import ClosedError, ConfigError, FormatError
from hilt.wire import sockets
from hilt.wire.codec import decode, encode
from hilt.wire.config import TrainerConfig
from hilt.wire.flood_guard import close_port, open_port
from hilt.wire.sockets import EVERYTHING, Context, LeveledLogger

if TYPE_CHECKING:
    from hilt.wire.keys import ClientKeys, ServerKeys


ASK_S = 1.0
"""An actor repeats its question so often. It is also how the learner knows that it is there."""
SILENCE_S = 5.0
"""Seconds without any reply, though every request has one, after which an actor retries with a new socket."""
SILENCE_MOST_S = 20.0
LATE_S = 0.5
"""A thread that runs so much later than it meant to was stopped: what has come meanwhile may be old."""
LATELY_S = 30.0
CLOSE_S = 1.0
PART_BYTES = 1 << 20
MAX_PARTS = 450
"""Messages of one answer: the queue to an actor has room for twice as many."""
MAX_ACTORS = 1_024
MAX_TEXT = 256
MAX_VERSION, MAX_SEEN = (1 << 62) - 1, 1 << 48
ALIGNED = 64
KEPT_BLOCKS = 2
KEPT_BYTES = 256 << 20
"""Larger blocks go back to the system at once: there memory is dearer than the time to get it again."""


class Publisher:
    """The learner's side. One thread answers the actors; `publish` may be called from any other."""

    def __init__(
        self,
        context: Context,
        config: TrainerConfig,
        keys: ServerKeys | None = None,
        logger: LeveledLogger = EVERYTHING,
    ):
        self._config = config
        self._socket, self._door = open_port(context, config, config.broadcast_port, keys, logger)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # an actor that is gone is an error, and forgotten
        self.instance = secrets.token_hex(8)
        """Who numbered these versions: a restarted learner is another one, and its
        newest counts whatever its number."""
        self._blocks = _Blocks()
        self._newest: _Snapshot | None = None
        self._version = self._at_least = 0
        self.weights_bytes = 0
        """Size of the newest weights, as they are sent"""
        self._rows: dict[bytes, _Row] = {}
        self._published = self._answers = self._bytes_sent = self._malformed = 0
        self._publishing = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._bell = sockets.Bell()
        self._thread = threading.Thread(target=self._run, name="hilt-weights", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The number of the newest weights; 0 before the first."""
        return self._version

    def publish(self, payload: object, version: int | None = None) -> int:
        """Offer these weights to every actor; returns their version. The arrays may be changed as soon as this returns.

        `version` must be above the last one; None for the next number.
        """
        with self._publishing:
            if self._closed:
                raise ClosedError("publish: the server is stopped. Make another one to go on.")
            if version is None:
                version = max(self._version, self._at_least) + 1
            elif (
                isinstance(version, bool)
                or not isinstance(version, int | np.integer)
                or not self._version < version <= MAX_VERSION
            ):
                raise ConfigError(
                    f"version={version!r}: expected a whole number above {self._version}, the last one; leave "
                    "it out for the next number."
                )
            frames = [memoryview(frame).cast("B") for frame in encode({"payload": payload})]
            sizes = [frame.nbytes for frame in frames]
            self._refuse_too_large(sizes)
            # The old ones are not needed any more, and if none of their bytes are in transit their memory is reused.
            self._newest = None
            offsets, total = _places(sizes)
            block = self._blocks.take(total)
            for frame, offset, size in zip(frames, offsets, sizes, strict=True):
                _bytes(block[offset : offset + size])[:] = _bytes(frame)
            self._version, self.weights_bytes = int(version), sum(sizes)
            self._newest = _Snapshot(self.instance, self._version, sizes, block)
            self._published += 1
        self._bell.ring()
        return self._version

    def raise_to(self, version: int) -> None:
        """Number what comes above `version`: an actor has seen this one from a learner before this one."""
        with self._publishing:
            if version < MAX_SEEN:  # any client may send any number
                self._at_least = max(self._at_least, int(version))

    def stats(self) -> dict[str, Any]:
        """Counters, and under ``subscribers`` each actor seen lately: its ``version`` is
        0 while it has none from this learner."""
        now = time.monotonic()
        with self._lock:
            rows = list(self._rows.values())
            counters = {"answers": self._answers, "bytes_sent": self._bytes_sent, "malformed": self._malformed}
        subscribers = {  # an actor that came again has two rows for a while: the later one counts
            (row.name, row.boot): {
                "name": row.name,
                "boot": row.boot,
                "version": row.have if row.instance == self.instance else 0,
                "seen_s": now - row.seen,
            }
            for row in rows
            if now - row.seen < LATELY_S
        }
        counters["strangers"] = self._door.strangers
        return {
            "version": self._version,
            "published": self._published,
            **counters,
            "subscribers": list(subscribers.values()),
        }

    def close(self) -> None:
        """Stop answering; call it before the context ends. What is under way to an actor is cut off."""
        with self._publishing:
            self._closed = True
        self._bell.ring()
        self._thread.join(10 * CLOSE_S)
        self._newest = None

    def _refuse_too_large(self, sizes: list[int]) -> None:
        most = self._config.max_message_bytes
        if max(sizes) > most:
            raise ConfigError(
                f"publish: an array of {max(sizes)} bytes, but max_message_bytes={most}. "
                "Give make_trainer_config a larger one on both sides, or split the array."
            )
        if sum(sizes) > MAX_PARTS * most:
            raise ConfigError(
                f"publish: {sum(sizes)} bytes of weights, but max_message_bytes={most} allows {MAX_PARTS * most}. "
                "Give make_trainer_config a larger one on both sides."
            )

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.fileno(), zmq.POLLIN)
        poller.register(self._door.monitor, zmq.POLLIN)
        try:
            while not self._closed:
                happened = dict(poller.poll(100))
                self._door.tick()
                if self._bell.quiet():
                    for row in list(self._rows.values()):
                        self._answer(row)
                if self._socket in happened:
                    self._receive()
        except zmq.ContextTerminated:
            pass
        finally:
            close_port(self._socket, self._door)
            self._bell.close()

    def _receive(self) -> None:
        for _ in range(MAX_ACTORS):  # then a publish has its turn
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                row = self._row(identity.bytes, decode([frame.buffer for frame in frames]))
            except FormatError:
                with self._lock:
                    self._malformed += 1
                continue
            self._door.know(sockets.peer_address(frames[0]))
            if not self._answer(row):
                self._send(row, {"kind": "none", "seq": row.seq, "sent": row.answered})

    def _row(self, identity: bytes, message: Mapping[str, Any]) -> _Row:
        if _text(message, "kind") != "want":
            raise FormatError("weights: a message of an unknown kind.")
        have, seq = _number(message, "have"), _number(message, "seq")
        instance, name, boot = _text(message, "instance"), _text(message, "name"), _text(message, "boot")
        with self._lock:
            row = self._rows.pop(identity, None) or _Row(identity)
            if row.seq != seq:
                row.seq, row.answered = seq, False
            row.have, row.instance, row.name, row.boot, row.seen = have, instance, name, boot, time.monotonic()
            self._rows[identity] = row  # at the end: the first one is always the one not seen for longest
            if len(self._rows) > MAX_ACTORS:
                del self._rows[next(iter(self._rows))]
        return row

    def _answer(self, row: _Row) -> bool:
        """Send the newest to an actor that waits for it. Each question is answered once: a
        repeated one adds nothing to the queue."""
        newest = self._newest
        if newest is None or row.answered or (row.instance == self.instance and newest.version <= row.have):
            return False
        row.answered = True
        message = {"kind": "weights", "seq": row.seq, "instance": newest.instance, "version": newest.version}
        total = newest.block.nbytes
        step = min(max(PART_BYTES, -(-total // MAX_PARTS)), self._config.max_message_bytes)
        for offset in range(0, total, step):
            part = _bytes(newest.block[offset : offset + step])
            if not self._send(
                row, {**message, "offset": offset, "sizes": None if offset else newest.sizes, "data": part}
            ):
                return True
        with self._lock:
            self._answers += 1
            self._bytes_sent += total
        return True

    def _send(self, row: _Row, message: Mapping[str, Any]) -> bool:
        try:
            self._socket.send_multipart([row.identity, *encode(message)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            with self._lock:
                self._rows.pop(row.identity, None)  # gone, or it reads nothing; it begins anew when it asks again
            return False
        return True


class Subscriber:
    """The actor's side. One thread asks, and calls `callback(payload)` with the
    newest weights; arrays in it are read-only."""

    def __init__(
        self,
        context: Context,
        config: TrainerConfig,
        host: str,
        keys: ClientKeys | None,
        name: str,
        boot: str,
        callback: Callable[[Any], object],
        on_version: Callable[[int], object] | None = None,
        logger: LeveledLogger = EVERYTHING,
    ):
        """`on_version(version)` is called after the callback has returned, when the
        actor really acts with these weights."""
        self._logger = logger
        self._connect = partial(sockets.connect, context, config, host, config.broadcast_port, keys)
        self._where = "in-process" if config.transport == "in-process" else f"{host}:{config.broadcast_port}"
        self._largest = config.max_message_bytes
        self._name, self._boot = name, boot
        self._callback, self._on_version = callback, on_version
        self._version = self._received = self._bytes = self._failed = self._malformed = self._renewed = 0
        self._instance, self._have = "", 0  # the newest that came, whether the callback took it or not
        self._blocks = _Blocks()
        self._incoming: _Incoming | None = None
        self._held: _Incoming | None = None
        self._late = False
        self._seq = 0
        self._asked = False
        self._silence_timeout_s = SILENCE_S
        self._ask_at = self._heard = self._turn = time.monotonic()
        self._closing = self._calling = False
        self._lock = threading.Lock()
        self._bell = sockets.Bell()
        sockets.keep_freed_memory()
        self._socket = self._connect()
        self._thread = threading.Thread(target=self._run, name=f"hilt-weights-{name}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The version that the callback took last; 0 before the first."""
        return self._version

    def stats(self) -> dict[str, object]:
        return {
            "version": self._version,
            "instance": self._instance,
            "received": self._received,
            "bytes_received": self._bytes,
            "callback_errors": self._failed,
            "malformed": self._malformed,
            "sockets_renewed": self._renewed,
        }

    def close(self) -> None:
        """Ask for nothing more. A callback that is still running is not waited for
        beyond a second, and nothing follows it."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._calling:  # the thread is in the callback, and touches the socket no more
                self._socket.close(0)
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._logger.warning(
                    "%s: the callback for weights is still running after %g s; it is left behind.", self._name, CLOSE_S
                )

    def _run(self) -> None:
        try:
            while not self._closing:
                self._keep_asking()
                poller = zmq.Poller()
                poller.register(self._socket, zmq.POLLIN if self._asked else zmq.POLLIN | zmq.POLLOUT)
                poller.register(self._bell.fileno(), zmq.POLLIN)
                wait = self._ask_at - time.monotonic() if self._asked else ASK_S
                poller.poll(max(0, int(1_000 * wait) + 1))
                self._notice_delay()
                while not self._closing and (message := self._next()) is not None:
                    self._take(message)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)
            self._bell.close()

    def _keep_asking(self) -> None:
        now = time.monotonic()
        if now - self._heard > self._silence_timeout_s:
            if self._held is not None:  # no server can report a newer version
                self._deliver(self._held)
                return
            self._socket.close(0)
            self._socket = self._connect()
            self._silence_timeout_s = min(1.5 * self._silence_timeout_s, SILENCE_MOST_S)
            self._heard, self._asked = now, False
            self._renewed += 1
            self._logger.warning(
                "%s: nothing from the learner at %s; trying again with a new connection.", self._name, self._where
            )
        if self._asked and now < self._ask_at:
            return
        want = {
            "kind": "want",
            "seq": self._seq,
            "have": self._have,
            "instance": self._instance,
            "name": self._name,
            "boot": self._boot,
        }
        try:
            self._socket.send_multipart(encode(want), zmq.NOBLOCK)
        except zmq.Again:  # no connection yet
            self._asked = False
        else:
            self._asked, self._ask_at = True, now + ASK_S

    def _notice_delay(self) -> None:
        now = time.monotonic()
        if now - self._turn > ASK_S + LATE_S:
            self._late = True
        self._turn = now

    def _next(self) -> dict[str, Any] | None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            self._heard, self._silence_timeout_s = time.monotonic(), SILENCE_S
            try:
                return decode([frame.buffer for frame in frames])
            except FormatError:
                self._malformed += 1

    def _take(self, message: Mapping[str, Any]) -> None:
        try:
            kind, seq = _text(message, "kind"), _number(message, "seq")
            if seq != self._seq:
                return  # the rest of an answer to a question before this one
            if kind == "none":
                if message.get("sent"):  # yet it is not here: it was cut on its way
                    self._ask_anew()
                elif self._held is not None:
                    self._deliver(self._held)
            elif kind == "weights":
                self._take_part(message)
            else:
                raise FormatError("weights: a message of an unknown kind.")
        except FormatError:
            self._malformed += 1

    def _take_part(self, message: Mapping[str, Any]) -> None:
        instance, version, offset = _text(message, "instance"), _number(message, "version"), _number(message, "offset")
        data = message.get("data")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            raise FormatError("weights: a part without bytes.")
        if offset == 0:
            self._incoming = self._begin(instance, version, message.get("sizes"))
        incoming = self._incoming
        if incoming is None or (incoming.instance, incoming.version, incoming.got) != (instance, version, offset):
            return  # its beginning came over a connection that is gone; the whole will come again
        incoming.add(data)
        if not incoming.complete:
            return
        self._instance, self._have = instance, version
        self._received += 1
        self._bytes += incoming.got
        self._ask_anew()
        self._notice_delay()
        if self._late and self._held is None:
            # this process was stopped meanwhile: first ask whether it is still the newest
            self._held, self._late = incoming, False
        else:
            self._deliver(incoming)

    def _begin(self, instance: str, version: int, sizes: Any) -> _Incoming | None:
        if (
            not isinstance(sizes, list)
            or not sizes
            or not all(type(size) is int and 0 <= size <= self._largest for size in sizes)
        ):
            raise FormatError("weights: sizes that cannot be.")
        try:
            return _Incoming(instance, version, sizes, self._blocks.take(_places(sizes)[1]))
        except MemoryError:
            self._logger.error(
                "%s: no memory for %d bytes of weights, version %d left out.", self._name, sum(sizes), version
            )
            self._instance, self._have = instance, version
            self._ask_anew()
            return None

    def _ask_anew(self) -> None:
        self._seq += 1
        self._asked = False
        self._incoming = None

    def _deliver(self, incoming: _Incoming) -> None:
        self._held = None
        try:
            payload = decode(incoming.frames()).get("payload")
        except FormatError as error:
            self._malformed += 1
            self._logger.error(
                "%s: weights, version %d, are unreadable and left out: %s", self._name, incoming.version, error
            )
            return
        with self._lock:
            if self._closing:
                return
            self._calling = True
        try:
            self._callback(payload)
            self._version = incoming.version
            if self._on_version is not None:
                self._on_version(incoming.version)
        except Exception:  # broad: the callback is the user's, and the next weights may suit it
            self._failed += 1
            self._logger.exception(
                "%s: the callback for weights, version %d, failed; waiting for the next.", self._name, incoming.version
            )
        finally:
            with self._lock:
                self._calling = False
        self._turn = self._heard = time.monotonic()  # nothing was asked meanwhile, so nothing is late
        self._late = False


@dataclass
class _Row:
    """An actor as the learner knows it."""

    identity: bytes
    name: str = ""
    boot: str = ""
    instance: str = ""
    have: int = 0
    seq: int = -1
    answered: bool = False
    seen: float = 0.0


@dataclass
class _Snapshot:
    """Weights as they were when they were published."""

    instance: str
    version: int
    sizes: list[int]
    block: memoryview


@dataclass
class _Incoming:
    """Weights that are coming in."""

    instance: str
    version: int
    sizes: list[int]
    block: memoryview
    got: int = field(default=0, init=False)

    def add(self, data: npt.NDArray[np.uint8]) -> None:
        if data.size == 0 or self.got + data.size > self.block.nbytes:
            raise FormatError("weights: a part that does not fit.")
        _bytes(self.block[self.got : self.got + data.size])[:] = data
        self.got += data.size

    @property
    def complete(self) -> bool:
        return self.got == self.block.nbytes

    def frames(self) -> list[memoryview]:
        offsets, _ = _places(self.sizes)
        block = self.block.toreadonly()
        return [block[offset : offset + size] for offset, size in zip(offsets, self.sizes, strict=True)]


class _Blocks:
    """Memory that is used again when the last view of it is gone: to fill fresh pages takes several times as long."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray[Any, np.dtype[np.uint8]]] = deque(maxlen=KEPT_BLOCKS)

    def take(self, size: int) -> memoryview:
        while True:
            try:
                block = self._free.pop()
            except IndexError:
                block = np.empty(size, np.uint8)
            if block.size == size:
                break
        lease = block[:]
        if size <= KEPT_BYTES:
            weakref.finalize(lease, self._free.append, block).atexit = False
        return memoryview(lease)  # views of a memoryview keep the lease alive, those of an array only the block


def _places(sizes: list[int]) -> tuple[list[int], int]:
    """Where each frame lies in the block, and how long the block is."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return offsets, end


def _bytes(buffer: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(buffer, np.uint8)


def _number(message: Mapping[str, Any], key: str) -> int:
    value = message.get(key)
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise FormatError(f"weights: {key} is no number.")
    return value


def _text(message: Mapping[str, Any], key: str) -> str:
    value = message.get(key)
    if type(value) is not str or len(value) > MAX_TEXT:
        raise FormatError(f"weights: {key} is no text.")
    return value
