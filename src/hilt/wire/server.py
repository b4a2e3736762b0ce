"""The learner's side: steps arrive exactly once, weights go out, requests are answered.

    server = TrainerServer(make_trainer_config(), request_callback=answer)
    server.register_data_store("actor_env", replay_buffer)
    server.start(threaded=True)
    server.publish_network(params)

One thread owns the socket. It never waits: a store that is held back by a rate limiter or by a full disk takes nothing,
and the steps stay where they are, with their senders.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import zmq
from prometheus_client import CollectorRegistry

from hilt.core.errors import ClosedError, ConfigError, FormatError, HiltError, StorageError, UnknownNameError
from hilt.replay.log import Log
from hilt.replay.sampling.sampler import Sampler
from hilt.replay.transfer.channel import Channel
from hilt.wire.codec import decode, encode
from hilt.wire.config import TrainerConfig
from hilt.wire.flood_guard import close_port, open_port
from hilt.wire.ingest import TROUBLE_RETRY_S, DataSink, IngestOutcome, Stream
from hilt.wire.keys import Gatekeeper, ServerKeys
from hilt.wire.remote import Samplers, channel_requests
from hilt.wire.requests import Requests
from hilt.wire.sockets import JOIN_S, Bell, LeveledLogger, context_for, keep_freed_memory, peer_address, require_keys
from hilt.wire.weights import Publisher
from hilt.wire.wire_metrics import Counter, Gauge, serve

SESSIONS = 1_024
"""Connections that are remembered; the one that was silent longest is forgotten first."""
SILENT_S = 600.0
"""Seconds of silence after which a client counts as disconnected: its running requests are ended."""
CALLBACK_S = 1.0
"""How long a server that is stopped waits for requests that are being carried out, in seconds."""
MAX_TEXT, MAX_NUMBER = 256, 1 << 62
"""What names, boots, sequences and versions in messages may be at most."""
STREAMS = 64
"""Stores and boots that one connection is known to send for; the oldest is forgotten first."""
AT_ONCE = 32
"""Messages that are taken in a row before the rest gets its turn."""
SYNC_POLL_MS = 5
"""How long news from the disk may wait: a sender that hears of power-safety a little later loses nothing."""
IDLE_POLL_MS = 250


class TrainerServer:
    """A learner's end of the wire. `data_callback(store_name, {"data": ..., "last_id": ...})` is called with steps that
    were stored; `request_callback(type, payload)` answers custom requests. Both run beside the learner's own thread.
    Of what this server logs under ``hilt.wire``, records below `log_level` are dropped."""

    def __init__(
        self,
        config: TrainerConfig,
        data_callback: Callable[[str, dict[str, Any]], Any] | None = None,
        request_callback: Callable[[str, Any], Any] | None = None,
        log_level: int = logging.NOTSET,
    ):
        self._logger = LeveledLogger(log_level)
        require_keys(config, config.bind_ip, "listening on")
        self.config, self.metrics = config, CollectorRegistry(auto_describe=True)
        self.instance = secrets.token_hex(8)
        """Tells this learner from the one before it."""
        self._data_callback = data_callback
        self._keys = ServerKeys.load(config.keys, config.key_name) if config.keys is not None else None
        self._context = context_for(config)
        self._gatekeeper = Gatekeeper(self._context, self._keys, self._logger) if self._keys is not None else None
        self._sinks: dict[str, DataSink] = {}
        self._channels: dict[str, Channel[Any]] = {}
        self._sessions: dict[bytes, _Session] = {}
        self._counters = _Counters(self.metrics)
        self._stopping, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._serving: int | None = None  # the thread that does
        self._bell = Bell()
        self._replies: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._samplers = Samplers(self._sinks)
        handlers = {**self._samplers.handlers(), **channel_requests(self._channels)}
        self._requests = Requests(config.request_types, request_callback, handlers, self._answer, self._logger)
        with ExitStack() as undo:
            undo.callback(self._context_gone)
            self._socket, self._door = open_port(self._context, config, config.port_number, self._keys, self._logger)
            undo.callback(close_port, self._socket, self._door)
            self._publisher = Publisher(self._context, config, self._keys, self._logger)
            undo.callback(self._publisher.close)
            self._endpoint = serve(self.metrics, config.metrics_port) if config.metrics_port is not None else None
            undo.pop_all()
        self._counters.count_strangers(lambda: self._door.strangers + self._publisher.stats()["strangers"])
        keep_freed_memory()

    # What a learner calls

    def register_data_store(self, name: str, data_store: object) -> None:
        """Steps that actors send under this name go into this store: a replay buffer, a `Log`, or anything with
        ``insert(transition)``. One that keeps a log knows after a restart what it has of whom."""
        if not name or not isinstance(name, str):
            raise ConfigError(f"the name of a data store is {name!r}; give a non-empty text.")
        if not callable(getattr(data_store, "insert", None)) and not isinstance(data_store, Log):
            raise ConfigError(
                f"{name}: a data store needs insert(transition), and {type(data_store).__name__} has none."
            )
        if name in self._sinks:
            raise ConfigError(f"{name}: a data store of this name is registered already; choose another name.")
        sink = DataSink(name, data_store, self._logger)
        if sink.log is not None and len(sink.log):  # no version shall mean two sets of weights
            versions = sink.log.read(sink.log.all().keys(), ["policy_version"])["policy_version"]
            self._publisher.raise_to(int(versions.max()))
        self._sinks[name] = sink

    def register_sampler(self, name: str, sampler: Sampler) -> None:
        """Clients may draw from this very sampler with ``client.sampler(name)``."""
        self._samplers.register(name, sampler)

    def register_channel(self, name: str, channel: Channel[Any]) -> None:
        """Clients may put into and get from this channel with ``client.channel(name)``."""
        self._channels[name] = channel

    def data_store(self, name: str) -> object:
        """A registered store; None when there is none of this name."""
        return self._sinks[name].store if name in self._sinks else None

    def store_names(self) -> set[str]:
        return set(self._sinks)

    def publish_network(self, payload: object, version: int | None = None) -> int:
        """Gives actors new weights, as nested arrays; returns their version, which is above every one before it.

        The arrays may be changed as soon as this returns. An actor that is busy gets the newest ones when it is ready,
        never an older one after a newer one.
        """
        published = self._publisher.publish(payload, version)
        self._counters.version.set(published)
        return published

    @property
    def weights_bytes(self) -> int:
        """Size of the weights that were published last, as they are sent to each actor."""
        return self._publisher.weights_bytes

    def start(self, threaded: bool = False) -> None:
        """Begins to serve: in a thread, or here until `stop` is called from elsewhere."""
        if self._stopping.is_set():
            raise ClosedError("this server was stopped; make another one.")
        if self._thread is not None:
            raise ConfigError("this server was started already.")
        self._thread = threading.Thread(target=self._run, name="hilt-wire-server", daemon=True)
        if threaded:
            self._thread.start()
        else:
            self._run()

    def stop(self) -> None:
        """Ends serving and frees the ports. What was not acknowledged stays with its senders. Called by one of its own
        callbacks, it ends when that returns."""
        if self._thread is None and not self._stopping.is_set():
            self._end()
        self._stopping.set()
        self._bell.ring()
        if self._thread is not None and self._serving != threading.get_ident():
            self._stopped.wait(JOIN_S)
            if self._thread.is_alive():
                self._thread.join(JOIN_S)
            self._requests.wait(CALLBACK_S)
            for sink in self._sinks.values():
                sink.wait(JOIN_S)

    def stats(self) -> dict[str, Any]:
        """Counters so far, and what is known of each actor."""
        now = time.monotonic()
        actors = {
            f"{session.actor}/{session.boot[:6]}": {
                "silent_s": round(now - session.heard, 1),
                "depth": session.depth,
                "lag_s": session.lag,
            }
            for session in list(self._sessions.values())
        }
        return {**self._counters.totals(), "weights": self._publisher.stats(), "actors": actors}

    def __enter__(self) -> TrainerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The thread that owns the socket

    def _run(self) -> None:
        self._serving = threading.get_ident()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.fileno(), zmq.POLLIN)
        poller.register(self._door.monitor, zmq.POLLIN)
        tidy_at = 0.0
        try:
            while not self._stopping.is_set():
                awaiting = any(sink.awaits_sync for sink in list(self._sinks.values()))
                poller.poll(SYNC_POLL_MS if awaiting else IDLE_POLL_MS)
                self._take_messages()
                self._send_replies()
                self._tell_power_safe()
                self._door.tick()
                if time.monotonic() > tidy_at:
                    tidy_at = time.monotonic() + 5
                    self._forget_silent()
        finally:
            self._stopping.set()
            self._end()
            self._stopped.set()

    def _take_messages(self) -> None:
        for _ in range(AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._counters.bytes_received.add(sum(len(frame) for frame in frames))
            try:
                self._handle(frames, decode(frames[1:]))
            except FormatError as error:
                self._counters.malformed.add(1)
                self._logger.debug("a message that cannot be read was dropped: %s", error)
            except Exception:  # broad: one message must not end the service for all other clients
                self._counters.malformed.add(1)
                self._logger.exception("a message was dropped")
                if (sender := frames[0].bytes) in self._sessions:
                    self._forget(sender)  # it says hello again, and sends again what was not acknowledged
            if self._stopping.is_set():
                return

    def _handle(self, frames: list[zmq.Frame], message: dict[str, Any]) -> None:
        sender, kind = frames[0].bytes, _field(message, "kind", str)
        session = self._sessions.get(sender)
        if kind == "hello":
            if self._hello(sender, message):
                self._door.know(peer_address(frames[1]))
        elif session is None or _field(message, "instance", str) != self.instance:
            # it spoke to the learner before this one
            self._send(sender, {"kind": "stranger", "instance": self.instance})
        elif kind == "data":
            session.hears(message)
            self._data(sender, session, message)
        elif kind == "ping":
            session.hears(message)
            self._counters.hears(session)
            self._send(sender, {"kind": "pong"})
            if session.depth:  # it still keeps some: perhaps an acknowledgment did not arrive
                self._acknowledge_all(sender, session)
        elif kind == "request":
            session.hears({})
            self._requests.take(sender, session.boot, message)
        elif kind == "bye":
            self._forget(sender)
            self._requests.forget(session.boot)
        else:
            raise FormatError(f"a message of kind {kind[:40]!r} is not known.")

    def _hello(self, sender: bytes, message: dict[str, Any]) -> bool:
        session = _Session(_field(message, "actor", str), _field(message, "boot", str))
        version = _field(message, "seen_version", int)
        stores: dict[str, dict[str, Any]] = {}
        try:
            why = self._refusal(message)
            for name, asked in message["stores"].items() if not why else ():
                sink = self._sinks[name]
                stores[name] = {"keeps": sink.keeps, "promises_power": sink.promises_power}
                if asked is not None:
                    stream = self._stream(session, sink, asked)
                    stores[name] |= {"boot": stream.boot, "have": stream.process_safe}
        except (ClosedError, StorageError) as error:  # of a log
            why = f"it cannot store steps: {error}"
        if why:
            self._counters.refused_clients.add(1)
            self._send(sender, {"kind": "refuse", "why": why})
            return False
        self._publisher.raise_to(version)
        before = self._sessions.pop(sender, None)
        while len(self._sessions) >= SESSIONS:
            self._forget(min(self._sessions, key=lambda known: self._sessions[known].heard))
        self._sessions[sender] = session
        if before is not None:
            self._let_go(before)
        self._send(sender, {"kind": "welcome", "instance": self.instance, "stores": stores})
        self._acknowledge_all(sender, session)
        return True

    def _stream(self, session: _Session, sink: DataSink, message: Mapping[str, Any]) -> Stream:
        """Who sends the steps of a message, and what is known of that."""
        boot, first = _field(message, "boot", str), _field(message, "first", int)
        if (sink.name, boot) not in session.streams:
            while len(session.streams) >= STREAMS:
                self._let_go(session, next(iter(session.streams)))
            session.streams[sink.name, boot] = sink.stream(session.actor, boot, first)
        return session.streams[sink.name, boot]

    def _refusal(self, message: dict[str, Any]) -> str:
        """Returns the differences from the settings of a connecting client; empty if it is accepted."""
        ours, theirs = self.config.agreement(), _field(message, "agreement", dict)
        differ = [name for name, mine in ours.items() if repr(theirs.get(name)) != repr(mine)]
        if differ:
            differences = "; ".join(
                f"{name} is {repr(theirs.get(name))[:200]} there and {ours[name]!r} at the learner" for name in differ
            )
            return (
                f"the settings differ: {differences}. Give both sides the same recipe and settings, and "
                "the same version of Hilt."
            )
        for name, asked in _field(message, "stores", dict).items():
            if name not in self._sinks:
                return str(UnknownNameError("data store at the learner", name[:100], self._sinks))
            if asked is not None and not isinstance(asked, dict):
                raise FormatError(f"a hello has {str(asked)[:40]!r} for the store {name}.")
            if asked is not None and (why := self._sinks[name].misfit(asked.get("example"))):
                return f"the steps for {name!r} do not fit the learner's schema: {why}"
        return ""

    def _data(self, sender: bytes, session: _Session, message: dict[str, Any]) -> None:
        name, lost = _field(message, "store", str), message.get("unsendable")
        if name not in self._sinks:
            raise FormatError(f"steps for {name[:40]!r}, which is not registered.")
        if not session.in_step(name, _field(message, "epoch", int), _field(message, "n", int)):
            return  # something before it was lost or held back: the sender begins again where it was acknowledged
        sink = self._sinks[name]
        stream = self._stream(session, sink, message)
        try:
            if isinstance(lost, str):
                outcome = sink.skip(stream, message["first"], lost[:1000])
            else:
                outcome = sink.take(stream, message, collect=self._data_callback is not None)
        except FormatError as error:
            self._counters.malformed.add(1)
            outcome = IngestOutcome(held=f"the learner cannot read it: {error}", retry=TROUBLE_RETRY_S)
        except Exception as error:  # broad: the sender must be answered, so that it sends the steps again
            self._logger.exception("steps for %s from %s could not be taken", name, session.actor)
            for other in self._sessions.values():
                if other.streams.get((name, stream.boot)) is stream:
                    self._let_go(other, (name, stream.boot))  # what is stored of it is known from the log
            outcome = IngestOutcome(held=f"the learner failed on it: {error}", retry=TROUBLE_RETRY_S)
        if outcome.held:
            session.out_of_step(name)
        self._counters.took(session, name, outcome)
        self._acknowledge(sender, sink, stream, refused=outcome.refused, held=outcome.held, retry=outcome.retry)
        if outcome.transitions:
            self._call_back(sink, stream, outcome.transitions)

    def _acknowledge_all(self, sender: bytes, session: _Session) -> None:
        for (name, _), stream in session.streams.items():
            self._acknowledge(sender, self._sinks[name], stream)

    def _acknowledge(self, sender: bytes, sink: DataSink, stream: Stream, **more: Any) -> None:
        power = stream.power_safe if sink.promises_power else None
        safe = {"boot": stream.boot, "process": stream.process_safe, "power": power}
        self._send(sender, {"kind": "ack", "instance": self.instance, "store": sink.name, **safe, **more})

    def _call_back(self, sink: DataSink, stream: Stream, transitions: list[Any]) -> None:
        assert self._data_callback is not None
        try:
            self._data_callback(sink.name, {"data": transitions, "last_id": stream.process_safe})
        except Exception:  # broad: the callback is the user's, and the steps are stored
            self._logger.exception("data_callback failed on steps for %s", sink.name)

    def _tell_power_safe(self) -> None:
        for sink in list(self._sinks.values()):
            for stream in sink.tell_synced():
                for sender, session in self._sessions.items():
                    if session.streams.get((sink.name, stream.boot)) is stream:
                        self._acknowledge(sender, sink, stream)

    def _answer(self, sender: bytes, reply: dict[str, Any]) -> None:
        """Called by the threads that answer requests."""
        self._replies.append((sender, reply))
        self._bell.ring()

    def _send_replies(self) -> None:
        if self._bell.quiet():
            while self._replies:
                self._send(*self._replies.popleft())

    def _send(self, receiver: bytes, message: Mapping[str, Any]) -> None:
        try:
            frames = encode(message)
            largest, most = max(memoryview(frame).nbytes for frame in frames), self.config.max_message_bytes
            if largest > most:
                raise ConfigError(
                    f"the answer has {largest} bytes in one array, but "
                    f"max_message_bytes={most}. Ask for less at a time."
                )
        except HiltError as error:  # a reply that cannot be sent is an error of the callback that made it
            frames = encode({"kind": "reply", "number": message.get("number", -1), "error": str(error)})
        self._counters.bytes_sent.add(sum(memoryview(frame).nbytes for frame in frames))
        try:
            self._socket.send_multipart([receiver, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._logger.debug("an answer was dropped: its receiver does not take any; it will ask again")

    def _forget_silent(self) -> None:
        old = time.monotonic() - SILENT_S
        for sender in [sender for sender, session in self._sessions.items() if session.heard < old]:
            self._forget(sender)

    def _forget(self, sender: bytes) -> None:
        """Forgets a client that is gone."""
        session = self._sessions.pop(sender)
        self._let_go(session)
        if all(other.actor != session.actor for other in self._sessions.values()):
            self._counters.gone(session)

    def _let_go(self, session: _Session, *names: tuple[str, str]) -> None:
        """Ends the episodes of these streams, or of all, unless their sender is connected in another way, too."""
        gone = {name: session.streams.pop(name) for name in names or list(session.streams)}
        in_use = {stream for other in self._sessions.values() for stream in other.streams.values()}
        for (name, boot), stream in gone.items():
            if stream not in in_use:
                self._sinks[name].forget(session.actor, boot)

    # Beginning and end

    def _end(self) -> None:
        close_port(self._socket, self._door)
        self._requests.close()
        self._publisher.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._context_gone()
        self._bell.close()

    def _context_gone(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        if self.config.transport == "tcp":
            self._context.destroy(0)


class _Session:
    """One connection of one client."""

    def __init__(self, actor: str, boot: str):
        self.actor, self.boot = actor, boot
        self.streams: dict[tuple[str, str], Stream] = {}
        self.heard = time.monotonic()
        self.depth, self.lag, self.version = 0, 0.0, -1
        self._expected: dict[str, tuple[int, int]] = {}

    def hears(self, message: Mapping[str, object]) -> None:
        self.heard = time.monotonic()
        if "depth" in message:
            self.depth, self.lag = _field(message, "depth", int), float(_field(message, "lag", float))

    def in_step(self, store: str, epoch: int, n: int) -> bool:
        """Whether this message follows the one before it. An epoch begins wherever the client was acknowledged."""
        at, expected = self._expected.get(store, (-1, 0))
        if not (n == 0 if epoch > at else (epoch, n) == (at, expected)):
            return False
        self._expected[store] = (epoch, n + 1)
        return True

    def out_of_step(self, store: str) -> None:
        """Nothing more counts in this epoch."""
        epoch, _ = self._expected[store]
        self._expected[store] = (epoch, -1)


class _Counters:
    """The counters and gauges of a server that Prometheus reads."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry
        of = ("actor", "store")
        self.received = Counter(registry, "hilt_wire_steps_received_total", "Steps that were stored.", of)
        self.duplicate = Counter(
            registry, "hilt_wire_steps_duplicate_total", "Steps that came again and were passed over.", of
        )
        self.refused = Counter(
            registry, "hilt_wire_steps_refused_total", "Steps that were refused because they do not fit the schema.", of
        )
        self.held = Counter(
            registry, "hilt_wire_messages_held_total", "Messages that a limiter or a full disk held back.", of
        )
        self.malformed = Counter(registry, "hilt_wire_messages_malformed_total", "Messages that could not be read.")
        self.refused_clients = Counter(
            registry, "hilt_wire_clients_refused_total", "Handshakes refused because something differs."
        )
        self.bytes_received = Counter(registry, "hilt_wire_bytes_received_total", "Bytes received on the data port.")
        self.bytes_sent = Counter(registry, "hilt_wire_bytes_sent_total", "Bytes sent on the data port.")
        self.version = Gauge(registry, "hilt_wire_policy_version", "The newest version of the weights.")
        self.actor_version = Gauge(
            registry, "hilt_wire_actor_version", "The version that made an actor's last step.", ("actor",)
        )
        self.staleness = Gauge(
            registry, "hilt_wire_staleness_versions", "How many versions behind an actor's last step was.", ("actor",)
        )
        self.depth = Gauge(registry, "hilt_wire_queue_depth", "Steps that wait at an actor.", ("actor",))
        self.lag = Gauge(registry, "hilt_wire_lag_seconds", "How long the oldest of them has been waiting.", ("actor",))
        self._of_actor = (self.actor_version, self.staleness, self.depth, self.lag)

    def count_strangers(self, count: Callable[[], float]) -> None:
        help_text = "Connections to the data and weights ports that completed no handshake."
        Counter(self._registry, "hilt_wire_strangers_total", help_text, read=count)

    def took(self, session: _Session, store: str, outcome: IngestOutcome) -> None:
        labels = {"actor": session.actor, "store": store}
        self.received.add(outcome.stored, **labels)
        if outcome.duplicates:
            self.duplicate.add(outcome.duplicates, **labels)
        if outcome.refused:
            self.refused.add(len(outcome.refused), **labels)
        if outcome.held:
            self.held.add(1, **labels)
        if outcome.version is not None:
            session.version = outcome.version
            self.actor_version.set(outcome.version, actor=session.actor)
            self.staleness.set(max(0, self.version.value() - outcome.version), actor=session.actor)
        self.hears(session)

    def hears(self, session: _Session) -> None:
        self.depth.set(session.depth, actor=session.actor)
        self.lag.set(session.lag, actor=session.actor)

    def gone(self, session: _Session) -> None:
        for gauge in self._of_actor:
            gauge.remove(actor=session.actor)

    def totals(self) -> dict[str, float]:
        names = (
            "received",
            "duplicate",
            "refused",
            "held",
            "malformed",
            "refused_clients",
            "bytes_received",
            "bytes_sent",
        )
        return {name: getattr(self, name).total() for name in names}


def _field(message: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of a message, which anybody may have sent."""
    value: Any = message.get(name)
    fits = type(value) is kind
    if not fits or (kind is str and len(value) > MAX_TEXT) or (kind is int and not -1 <= value < MAX_NUMBER):
        raise FormatError(f"a message has {name}={str(value)[:40]!r} where a {kind.__name__} belongs.")
    return value
