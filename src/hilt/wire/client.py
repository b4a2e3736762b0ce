"""The actor's side: what is inserted is sent by itself, weights come in, requests are asked.

Example:

    spool = QueuedDataStore(50_000, path="spool")
    client = TrainerClient("actor-1", "192.168.1.5", make_trainer_config(keys="keys"), data_stores={"actor_env": spool})
    client.recv_network_callback(lambda params: agent.load(params))
    spool.insert(transition)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, RefusedError, UnknownNameError
from hilt.replay.transfer.queue import QueuedDataStore
from hilt.wire.config import TrainerConfig
from hilt.wire.keys import ClientKeys
from hilt.wire.link import Link
from hilt.wire.probe import ProbeResult, probe
from hilt.wire.remote import RemoteChannel, RemoteSampler, no_answer
from hilt.wire.sockets import JOIN_S, LeveledLogger, require_keys
from hilt.wire.weights import Subscriber

MAX_TEXT = 256
LONGEST_WAIT_S = 3_600.0
"""How long `wait_for_server=True` waits."""
TELL_EVERY_S = 10.0
PROBE_AFTER_S = 1.0
_LOOK = "Look at what it printed last; Ctrl-C ends this."


@dataclass(frozen=True)
class Update:
    """What really happened. True when every step is acknowledged, and none was
    refused or dropped since the last update."""

    acknowledged: int
    """Steps that the learner's process has safely, since this client began."""
    waiting: int
    """Steps that are not acknowledged yet."""
    power_safe: bool
    """Whether all of them would survive a power cut at the learner."""
    refused: int
    """The number of steps that the learner refused since the last update; the reasons are in the log."""
    dropped: int
    """Steps that a full queue dropped since the last update."""
    problem: str
    """Why, in a sentence; empty when there is none."""

    def __bool__(self) -> bool:
        return not (self.waiting or self.refused or self.dropped)


class TrainerClient:
    """An actor's end of the wire.

    `wait_for_server` may be True (up to an hour, with a line in the log now and then) or a number of seconds; else the
    learner must answer within `timeout_ms`. Later it may come and go: steps wait in their stores meanwhile.

    Of what this client logs under ``hilt.wire``, records below `log_level` are dropped.
    """

    def __init__(
        self,
        name: str,
        server_ip: str,
        config: TrainerConfig,
        data_store: QueuedDataStore | None = None,
        data_stores: Mapping[str, QueuedDataStore] | None = None,
        log_level: int = logging.NOTSET,
        wait_for_server: bool | float = False,
        timeout_ms: float = 800,
    ):
        self._logger = LeveledLogger(log_level)
        if not timeout_ms > 0:
            raise ConfigError(f"timeout_ms={timeout_ms!r}: expected milliseconds, above 0.")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT:
            raise ConfigError(f"name={name!r}: expected this actor's name, a text of at most {MAX_TEXT} characters.")
        require_keys(config, server_ip, "connecting to")
        stores = dict(data_stores or {}) | ({name: data_store} if data_store is not None else {})
        for store_name, store in stores.items():
            if not isinstance(store, QueuedDataStore):
                raise ConfigError(
                    f"{store_name}: an actor's data store is a QueuedDataStore, got {type(store).__name__}."
                )
            if store.on_insert is not None or sum(store is other for other in stores.values()) > 1:
                raise ConfigError(
                    f"{store_name}: this queue is sent already, under another name or by another "
                    "client; give each its own."
                )
        self.name, self.config, self.timeout_s = name, config, timeout_ms / 1e3
        self._host, self._stores = server_ip, stores
        self._keys = ClientKeys.load(config.keys, config.key_name) if config.keys is not None else None
        self._link = Link(name, server_ip, config, self._keys, stores, self.timeout_s, self._logger)
        self._subscriber: Subscriber | None = None
        self._on_version: Callable[[int], Any] | None = None
        self._updater: threading.Thread | None = None
        self._stopped = threading.Event()
        self._reported = dict.fromkeys(("refused", "dropped"), 0)
        self._before = {name: store.stats() for name, store in stores.items()}
        self._next_request = 0.0
        self._turns = threading.Lock()
        self._channels: dict[str, RemoteChannel] = {}
        try:
            self._wait_for_server(
                LONGEST_WAIT_S if wait_for_server is True else max(self.timeout_s, float(wait_for_server))
            )
        except BaseException:
            self._end()
            raise

    # Steps

    @property
    def data_stores(self) -> Mapping[str, QueuedDataStore]:
        """The queues that this client sends, by name."""
        return self._stores

    def update(self, timeout_ms: float | None = None) -> Update:
        """Waits until all steps inserted before are acknowledged, up to
        `timeout_ms` (default: the client's timeout)."""
        return self._flush(self.timeout_s if timeout_ms is None else timeout_ms / 1e3, self._reported)

    def start_async_update(self, interval: float = 10) -> None:
        """Steps are sent automatically; this checks every `interval` seconds whether
        they arrive, and logs a warning if not."""
        if self._updater is None:
            self._updater = threading.Thread(target=self._watch, args=(interval,), name="hilt-wire-update", daemon=True)
            self._updater.start()

    def wait_acknowledged(self, store: str, number: int, power: bool = False, timeout: float | None = None) -> bool:
        """Returns whether the step with this number is process-safe (or power-safe) at
        the learner within `timeout` seconds."""
        cursor = self._link.cursors[store]
        return self._link.wait(
            lambda: (cursor.power_safe if power else cursor.process_safe) >= number,
            self.timeout_s if timeout is None else timeout,
        )

    # Requests

    def request(self, type: str, payload: object, timeout_ms: float | None = None) -> Any:
        """The answer of the learner's `request_callback`; None, and a line in the log, when none came in time.

        An error that the callback raised is a `RequestError` here. A request is carried out at most once.
        """
        if type not in self.config.request_types:
            raise UnknownNameError("request type", type, self.config.request_types)
        seconds = self.timeout_s if timeout_ms is None else timeout_ms / 1e3
        number = self._link.new_number()
        try:
            self._take_turn(seconds)
            return self._link.ask(type, payload, seconds, number, grace=0.0)
        except (DeadlineError, RefusedError) as error:
            self._logger.warning("%s", error)
            return None
        finally:
            self._link.give_up(number)

    def sampler(
        self,
        name: str,
        how: str = "uniform",
        *,
        sources: Sequence[str] | None = None,
        last: int | None = None,
        successes: bool = False,
        **options: Any,
    ) -> RemoteSampler:
        """Batches from a view of the learner's store `name`, or from a sampler that it registered under this name.

        `sources`, `last` (trajectories) and `successes` select as `Log.by_source`, `View.last` and `Log.successes` do;
        `options` are those of `View.sampler`.
        """
        selection = {
            "how": how,
            "sources": list(sources or ()),
            "last": last,
            "successes": successes,
            "options": options,
        }
        return RemoteSampler(self._link.ask, name, selection)

    def channel(self, name: str) -> RemoteChannel:
        """A channel that the learner registered under this name."""
        return self._channels.setdefault(name, RemoteChannel(self._link.ask, self._link.new_number, name))

    # Weights

    def recv_network_callback(
        self, callback: Callable[[Any], object], on_version: Callable[[int], object] | None = None
    ) -> None:
        """Calls this with the newest weights whenever there are newer ones, in a thread of its own. Steps that are
        inserted after it returns carry their version, with which `on_version` is called next, in the same thread."""
        if self._stopped.is_set():
            raise ClosedError("this client was stopped; make another one.")
        if self._subscriber is not None:
            raise ConfigError("this client has a callback for weights already; make one function that does both.")
        self._on_version = on_version
        self._subscriber = Subscriber(
            self._link.context,
            self.config,
            self._host,
            self._keys,
            self.name,
            self._link.boot,
            callback,
            self._acts_with,
            self._logger,
        )

    @property
    def policy_version(self) -> int | None:
        """The version of the weights that the callback got last."""
        return self._subscriber.version if self._subscriber is not None else None

    # The end, and how things are

    def stop(self) -> None:
        """Waits a moment for steps in transit, and ends. A queue without a path loses steps that are
        not acknowledged, and logs their number."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._link.is_open and self.update().waiting == 0:
            # until they are power-safe, too
            self._link.wait(lambda: not any(map(len, self._stores.values())), self.timeout_s)
        if self._subscriber is not None:
            self._subscriber.close()
        self._end()
        if self._updater is not None:
            self._updater.join(JOIN_S)
        for name, store in self._stores.items():
            if len(store):
                self._logger.warning(
                    "stopped with %d steps for %r that the learner has not acknowledged", len(store), name
                )

    def _end(self) -> None:
        self._link.close()
        if self.config.transport == "tcp":
            self._link.context.destroy(0)

    def stats(self) -> dict[str, Any]:
        stores = {
            name: {
                **cursor.store.stats(),
                **{key: getattr(cursor, key) for key in ("process_safe", "power_safe", "refused", "refusal")},
            }
            for name, cursor in self._link.cursors.items()
        }
        link = {"connected": self._link.is_open, "refusal": self._link.refusal, "reconnects": self._link.reconnects}
        return {**link, "policy_version": self.policy_version, "stores": stores}

    def __enter__(self) -> TrainerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Inside

    def _wait_for_server(self, seconds: float) -> None:
        deadline, address, wait = time.monotonic() + seconds, self._link.address, min(PROBE_AFTER_S, TELL_EVERY_S)
        while not self._link.wait(
            lambda: self._link.is_open or bool(self._link.refusal), min(wait, deadline - time.monotonic())
        ):
            found = self._probe()
            if found.final:
                raise RefusedError(f"no learner at {address} lets {self.name!r} in: {found.reason}.")
            if time.monotonic() >= deadline:
                raise no_answer("connecting", seconds, address, found.reason)
            if wait == TELL_EVERY_S:
                rest, why = deadline - time.monotonic(), f"{found.reason}. " if found.reason else ""
                self._logger.warning(
                    "no learner answers at %s yet; still trying for %.0f s. %sIs it running? %s",
                    address,
                    rest,
                    why,
                    _LOOK,
                )
            wait = TELL_EVERY_S
        if self._link.refusal:
            raise RefusedError(f"the learner at {self._link.address} refuses {self.name!r}: {self._link.refusal}")

    def _probe(self) -> ProbeResult:
        """Returns why there is no reply."""
        if self.config.transport == "in-process":
            return ProbeResult("")
        return probe(self._host, self.config.port_number, self._keys is not None)

    def _flush(self, seconds: float, reported: dict[str, int]) -> Update:
        """`reported`: the counts that this caller has already received, and which are not returned again."""
        targets = {name: store.latest_data_id() for name, store in self._stores.items()}
        cursors = self._link.cursors

        def safe() -> bool:
            return all(
                cursors[name].process_safe >= target or not self._waiting(name, target)
                for name, target in targets.items()
            )

        self._link.wait(safe, seconds)
        waiting = sum(self._waiting(name, target) for name, target in targets.items())
        taken, now = (
            self._taken(),
            {"refused": sum(cursor.refused for cursor in cursors.values()), "dropped": self._grown("dropped")},
        )
        since = {what: now[what] - reported[what] for what in now}
        reported.update(now)
        return Update(
            acknowledged=taken - sum(now.values()) - sum(self._waiting(name) for name in self._stores),
            waiting=waiting,
            power_safe=all(cursor.power_safe >= targets[name] for name, cursor in cursors.items()),
            problem=self._problem(waiting, seconds, since),
            **since,
        )

    def _waiting(self, name: str, target: int | None = None) -> int:
        """Steps, up to a number, that are kept here and not acknowledged."""
        cursor, stats = self._link.cursors[name], self._stores[name].stats()
        newer = 0 if target is None else stats["latest"] - target
        unsafe = stats["latest"] - max(cursor.process_safe, stats["acknowledged"])
        return max(0, min(unsafe, stats["kept"]) - newer)

    def _taken(self) -> int:
        """Steps that this client was given: found in the stores, or inserted since."""
        return sum(before["kept"] for before in self._before.values()) + self._grown("inserted")

    def _grown(self, what: str) -> int:
        return sum(store.stats()[what] - self._before[name][what] for name, store in self._stores.items())

    def _problem(self, waiting: int, seconds: float, since: Mapping[str, int]) -> str:
        parts = [f"{count} steps were {what}" for what, count in since.items() if count]
        if waiting:
            troubles = [cursor.trouble for cursor in self._link.cursors.values() if cursor.trouble]
            why = self._link.refusal or self._link.trouble or (troubles[0] if troubles else "")
            why = why or (
                "it is slower than they come" if self._link.is_open else f"no learner answers at {self._link.address}"
            )
            parts.append(f"{waiting} steps are not acknowledged after {seconds:g} s and stay here: {why}")
        return "; ".join(parts)

    def _watch(self, interval: float) -> None:
        reported = dict(self._reported)
        while not self._stopped.wait(interval):
            if not (done := self._flush(self.timeout_s, reported)):
                self._logger.warning("%s: %s", self.name, done.problem)

    def _take_turn(self, seconds: float) -> None:
        if self.config.rate_limit is None:
            return
        with self._turns:
            now = time.monotonic()
            turn = max(now, self._next_request)
            if turn - now > seconds:
                raise DeadlineError(
                    f"rate_limit={self.config.rate_limit:g} per second: the next request may go in {turn - now:.1f} s."
                )
            self._next_request = turn + 1 / self.config.rate_limit
        time.sleep(turn - now)

    def _acts_with(self, version: int) -> None:
        self._link.seen_version = max(self._link.seen_version, version)
        for store in self._stores.values():
            store.policy_version = version
        if self._on_version is not None:
            self._on_version(version)
