"""Where steps arrive: a data store behind the server, which takes every step once and knows when it is safe."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hilt.core.errors import (
    ClosedError,
    DeadlineError,
    FormatError,
    HiltError,
    LockedError,
    ReadOnlyError,
    SchemaError,
    StorageError,
)
from hilt.core.tree import Tree, unflatten
from hilt.replay.log import Log
from hilt.replay.step_encoder import PackedBlock
from hilt.replay.transfer.delivered import DeliveredSequence, received_by
from hilt.replay.writer import RunningEpisodes
from hilt.wire.sockets import EVERYTHING, LeveledLogger

LIMITER_RETRY_S = 0.05
TROUBLE_RETRY_S = 1.0
REFUSALS_KEPT = 256
WORTH_A_BLOCK = 4
"""Fewer steps are stored sooner one by one."""
LONGEST_WAIT_S = 0.5
"""Seconds after which process-safe steps are made power-safe."""
STREAMS_KEPT = 4_096
"""Of a store without a log: what came from more senders than these is forgotten, the oldest first."""


@dataclass
class IngestOutcome:
    """What became of one message of steps."""

    stored: int = 0
    duplicates: int = 0
    refused: list[tuple[int, str]] = field(default_factory=list)
    """(number, why): never stored, and not to be sent again."""
    held: str = ""
    """Why the rest was not taken; it is to be sent again after `retry` seconds."""
    retry: float = 0.0
    version: int | None = None
    """The policy version of the last step, if it has one."""
    transitions: list[Any] = field(default_factory=list)
    """What was stored, for those who asked to see it."""


class Stream:
    """The steps of one sender into one store."""

    def __init__(
        self, actor: str, boot: str, received: DeliveredSequence, power_safe: int = -1, promises_power: bool = True
    ):
        self.actor, self.boot, self.received, self.power_safe = actor, boot, received, power_safe
        self._promises_power = promises_power
        # (the log's count of steps, number) of what is process-safe only
        self._awaiting: deque[tuple[int, int]] = deque()
        self.refusals: dict[int, str] = {}

    @property
    def process_safe(self) -> int:
        return self.received.high

    def note(self, number: int, appended: int) -> None:
        self.received.note(number)
        if not self._promises_power:
            return
        if self._awaiting and self._awaiting[-1][0] == appended:
            self._awaiting.pop()
        # with those that survived a power cut beyond a gap, which is closed now
        self._awaiting.append((appended, self.received.high))

    def synced(self, count: int) -> bool:
        """Notes the number of steps of the log that are power-safe now; returns
        whether that is news for this sender."""
        before = self.power_safe
        while self._awaiting and self._awaiting[0][0] <= count:
            self.power_safe = self._awaiting.popleft()[1]
        return self.power_safe > before

    @property
    def awaits_sync(self) -> bool:
        return bool(self._awaiting)

    def refuse(self, number: int, why: str) -> None:
        if len(self.refusals) >= REFUSALS_KEPT:
            self.refusals.pop(next(iter(self.refusals)))
        self.refusals[number] = why


class DataSink:
    """One registered data store."""

    def __init__(self, name: str, store: Any, logger: LeveledLogger = EVERYTHING):
        self.name, self.store, self._logger = name, store, logger
        self.log: Log | None = store if isinstance(store, Log) else _log_of(store)
        self._insert = _inserter(store, name)
        self._streams: dict[tuple[str, str], Stream] = {}
        self._asked_at = time.monotonic()
        self._syncing: threading.Thread | None = None

    @property
    def promises_power(self) -> bool:
        """Whether steps become power-safe by themselves here."""
        return self.log is not None and self.log.durability.words != "never"

    @property
    def keeps(self) -> bool:
        """Whether steps are still here when the learner comes back."""
        return self.log is not None and not self.log.temporary

    def stream(self, actor: str, boot: str, first: int) -> Stream:
        """What is known of a sender whose oldest step is number `first`."""
        name = (actor, boot)
        if name not in self._streams:
            received, power_safe = (
                DeliveredSequence(first - 1),
                -1,
            )  # what is below `first` may be another boot's, and on its way to the disk
            if self.log is not None:
                received = received_by(self.log, actor, boot, self.name, first)
                if self.promises_power and received.high >= first:
                    self.log.sync()  # found on disk, perhaps written by a process that was killed
                    power_safe = received.high
            elif len(self._streams) >= STREAMS_KEPT:
                self._streams.pop(next(iter(self._streams)))
            self._streams[name] = Stream(actor, boot, received, power_safe, self.promises_power)
        return self._streams[name]

    def misfit(self, example: Mapping[str, object] | None) -> str:
        """What is wrong with a packed example of what a client is going to send; empty when it fits."""
        check = getattr(self.store, "check", None)
        if example is None or check is None or self.log is None:
            return ""
        try:
            for step in _steps(PackedBlock(example)):
                check(step, True) if isinstance(self.store, Log) else check(step)
        except SchemaError as error:
            return str(error)
        return ""

    def take(self, stream: Stream, message: Mapping[str, Any], collect: bool = False) -> IngestOutcome:
        """Stores the steps of a message, in order, as far as it goes."""
        outcome, first, packed = IngestOutcome(), message["first"], message.get("packed")
        steps: Any = message.get("items")
        if first < 0 or (packed is None and not isinstance(steps, list)):
            raise FormatError("a message of steps has none in it.")
        if packed is not None:
            block = PackedBlock(packed)
            self._take_block(stream, first, block, outcome)
            if outcome.stored == block.steps and not collect:
                return outcome
            steps = _steps(block)
        in_block = range(stream.received.high + 1 - outcome.stored, stream.received.high + 1)
        for number, step in enumerate(steps, first):
            new = number in in_block
            if not new and number in stream.received:
                outcome.duplicates += 1
                if number in stream.refusals:
                    outcome.refused.append((number, stream.refusals[number]))
            elif not new:
                before = outcome.stored
                if not self._take_one(stream, number, step, outcome):
                    break
                new = outcome.stored > before
            if new and collect:
                outcome.transitions.append(step)
        return outcome

    def skip(self, stream: Stream, number: int, why: str) -> IngestOutcome:
        """Skips a step that its sender cannot send: it is refused, so that those after it can be acknowledged."""
        outcome = IngestOutcome()
        if number not in stream.received:
            self._refuse(stream, number, why, outcome)
        return outcome

    def _take_block(self, stream: Stream, first: int, block: PackedBlock, outcome: IngestOutcome) -> None:
        """Stores the new steps of a block at once, if the store can do that; the others are taken one by one."""
        known = max(0, stream.received.high + 1 - first)
        insert_block = getattr(self._insert, "block", None)
        if insert_block is None or block.steps - known < WORTH_A_BLOCK or stream.received.has_gaps:
            return
        assert self.log is not None
        try:
            outcome.stored = insert_block(
                block.without(known) if known else block, stream.actor, stream.boot, first + known
            )
        except Exception:  # broad: the store may be any object; one by one, each error has its answer
            self._logger.exception("%s: a block of %s was not stored as a whole", self.name, stream.actor)
            stream.received = received_by(self.log, stream.actor, stream.boot, self.name, first)
            stream.note(stream.received.high, self.log.appended)
        if outcome.stored:
            stream.note(first + known + outcome.stored - 1, self.log.appended)
            if (versions := block.columns.get("policy_version")) is not None:
                outcome.version = int(versions[known + outcome.stored - 1])

    def _take_one(self, stream: Stream, number: int, step: Any, outcome: IngestOutcome) -> bool:
        before = self.log.appended if self.log is not None else 0
        try:
            self._insert(step, stream.actor, stream.boot, number)
        except DeadlineError as error:
            outcome.held, outcome.retry = f"a rate limiter holds it back: {error}", LIMITER_RETRY_S
            return False
        except (ClosedError, LockedError, ReadOnlyError, StorageError) as error:
            if self.log is None or self.log.appended == before:  # else it is stored, and only its sync failed
                outcome.held, outcome.retry = f"the learner cannot store it: {error}", TROUBLE_RETRY_S
                return False
        except HiltError as error:
            self._refuse(stream, number, str(error), outcome)
            return True
        except Exception as error:  # broad: the store may be any object; the sender gets its error
            self._logger.exception("%s: its insert failed on step %d of %s", self.name, number, stream.actor)
            self._refuse(stream, number, f"{type(error).__name__}: {error}", outcome)
            return True
        stream.note(number, self.log.appended if self.log is not None else 0)
        outcome.stored += 1
        if isinstance(step, Mapping) and isinstance(version := step.get("policy_version"), (int, np.integer)):
            outcome.version = int(version)
        return True

    def _refuse(self, stream: Stream, number: int, why: str, outcome: IngestOutcome) -> None:
        stream.refuse(number, why)
        stream.note(number, self.log.appended if self.log is not None else 0)
        outcome.refused.append((number, why))

    def tell_synced(self) -> list[Stream]:
        """The senders to whom it is news that their steps are power-safe."""
        if not self.promises_power or self.log is None:
            return []
        count = self.log.synced
        synced = [stream for stream in self._streams.values() if stream.awaits_sync and stream.synced(count)]
        if synced or not self.awaits_sync:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > LONGEST_WAIT_S:
            self._asked_at = time.monotonic() + TROUBLE_RETRY_S
            self._syncing = threading.Thread(target=self._sync, args=(self.log,), name="hilt-wire-sync", daemon=True)
            self._syncing.start()
        return synced

    def wait(self, seconds: float) -> None:
        """Waits until a sync that was begun has ended."""
        if self._syncing is not None:
            self._syncing.join(seconds)

    def _sync(self, log: Log) -> None:
        """Sooner than the log itself would, which may wait for the end of an episode:
        the senders keep everything until then."""
        try:
            log.sync()
        except HiltError as error:  # the next append reports it to its sender
            self._logger.warning("%s: cannot be made power-safe: %s", self.name, error)

    @property
    def awaits_sync(self) -> bool:
        return self.promises_power and any(stream.awaits_sync for stream in self._streams.values())

    def forget(self, actor: str, boot: str) -> None:
        """This sender is gone: what it left running is ended. What came from it is known from the log."""
        if (
            self.log is not None
            and self._streams.pop((actor, boot), None) is not None
            and hasattr(self._insert, "forget")
        ):
            try:
                self._insert.forget(actor, boot)
            except HiltError as error:
                self._logger.warning("%s: what %s left running could not be ended: %s", self.name, actor, error)


def _steps(block: PackedBlock) -> list[Any]:
    try:
        return [unflatten(step) for step in block]
    except SchemaError as error:
        raise FormatError(str(error)) from None


def _log_of(store: Any) -> Log | None:
    log = getattr(store, "log", None)
    return log if isinstance(log, Log) else None


def _inserter(store: Any, name: str) -> Callable[[Any, str, str, int], Any]:
    if isinstance(store, Log):
        return _IntoLog(store, name)
    parameters = inspect.signature(store.insert).parameters
    if isinstance(store, SenderStore) and (
        "boot" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ):
        return _IntoBuffer(store, name) if store.takes_blocks else _OneByOne(store, name)
    return lambda step, actor, boot, number: store.insert(step)


@runtime_checkable
class SenderStore(Protocol):
    """A store that keeps the steps of several senders apart, as the replay buffers of `hilt.compat.serl` do."""

    takes_blocks: bool
    """Whether blocks may be inserted whole: not where `insert` is overridden, so that it sees every step"""

    def insert(
        self, step: object, actor: str, sequence: int, timeout: float | None, *, boot: str, store: str
    ) -> object: ...
    def insert_block(
        self, block: PackedBlock, actor: str, sequence: int, timeout: float | None, *, boot: str, store: str
    ) -> int: ...
    def forget(self, actor: str, boot: str, store: str) -> None: ...


class _OneByOne:
    """Steps of every sender into a replay buffer whose insert is somebody's own, so that it sees every step."""

    def __init__(self, buffer: SenderStore, name: str):
        self._buffer, self._name = buffer, name

    def __call__(self, step: Tree, actor: str, boot: str, number: int) -> None:
        self._buffer.insert(step, actor, number, 0, boot=boot, store=self._name)

    def forget(self, actor: str, boot: str) -> None:
        self._buffer.forget(actor, boot, self._name)


class _IntoBuffer(_OneByOne):
    """Steps of every sender into one of our replay buffers."""

    def block(self, block: PackedBlock, actor: str, boot: str, number: int) -> int:
        return self._buffer.insert_block(block, actor, number, 0, boot=boot, store=self._name)


class _IntoLog:
    """Steps of every sender into a plain log."""

    def __init__(self, log: Log, name: str):
        self._log, self._name, self._chains = log, name, RunningEpisodes(log)

    def __call__(self, step: Tree, actor: str, boot: str, number: int) -> None:
        self._chains.insert((actor, boot, self._name), self._log.check(step, cast=True), number, 0)

    def block(self, block: PackedBlock, actor: str, boot: str, number: int) -> int:
        return len(self._chains.insert_block((actor, boot, self._name), block, number, 0))

    def forget(self, actor: str, boot: str) -> None:
        self._chains.forget((actor, boot, self._name))
