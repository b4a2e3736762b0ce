"""Rate limiters: who must wait, the actors that insert or the learner that samples.

The arithmetic is Reverb's. With ``i`` inserts, ``s`` samples and ``d`` deletes so far::

    can_sample(n)  iff  i - d >= min_size_to_sample   and  i * samples_per_insert - s - n >= min_diff
    can_insert(n)  iff  i + n - d <= min_size_to_sample  or  (i + n) * samples_per_insert - s <= max_diff

so ``i * samples_per_insert - s``, the *diff*, is how many samples the learner is behind, and it is kept within
``[min_diff, max_diff]`` once there are enough items. ``MinSize``, ``SampleToInsertRatio``, ``Queue`` and ``Stack`` only choose
the four numbers.

Every wait has a deadline, and its error says which of the two conditions failed and by how much. Those who wait for the same
thing are served in the order they came, so that a large batch is not starved by small ones.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Condition, Event
from typing import Any, SupportsIndex

from hilt.core.errors import ClosedError, ConfigError, DeadlineError

DEFAULT_TIMEOUT_S = 600.0
"""How long a wait lasts when no timeout is given, in seconds. There is no way to wait for ever."""

_LARGEST = sys.float_info.max
_PARAMETERS = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff")
_COUNTS = ("inserts", "samples", "deletes")

_log = logging.getLogger(__name__)

gives_up: ContextVar[Event | None] = ContextVar("gives_up", default=None)
"""Set by a thread that may be told to end while it waits: once the event is set, its waits end with `ClosedError`."""
_LOOK_S = 0.05
"""How often such a thread looks, in seconds."""


@dataclass
class Reservation:
    """Room that a limiter keeps for an insert under way."""

    stored: int
    """How many items the insert stored in the end."""


class RateLimiter:
    """Lets inserts and samples through, or makes them wait, by the rule at the top of this file.

    Safe to use from any number of threads. ``await_insert`` and ``await_sample`` count what they let through; whoever stores or
    draws an item after it was let through uses ``inserting`` and ``sampling`` instead, which count the item once that is done.

    Args:
        samples_per_insert: samples wanted for each insert; above 0.
        min_size_to_sample: items (inserts minus deletes) that must be there before anything is sampled; at least 1.
        min_diff: lowest diff that a sample may leave behind.
        max_diff: highest diff that an insert may leave behind; infinite is stored as the largest float, as in Reverb.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int, min_diff: float, max_diff: float):
        self.samples_per_insert = _number("samples_per_insert", samples_per_insert)
        self.min_size_to_sample = _integer("min_size_to_sample", min_size_to_sample)
        self.min_diff = max(_number("min_diff", min_diff), -_LARGEST)
        self.max_diff = min(_number("max_diff", max_diff), _LARGEST)
        if not 0 < self.samples_per_insert <= _LARGEST:
            raise ConfigError(f"samples_per_insert ({samples_per_insert}) must be > 0 and finite; give the samples wanted for each insert")
        if self.min_size_to_sample < 1:
            raise ConfigError(
                f"min_size_to_sample ({min_size_to_sample}) must be a positive integer; give 1 to sample as soon as an item is there"
            )
        if self.min_diff > self.max_diff:
            raise ConfigError(f"min_diff ({min_diff}) is above max_diff ({max_diff}), so nothing could go on; give them in rising order")
        self._inserts = self._samples = self._deletes = 0
        self._reserved = 0  # let through by inserting(), not stored yet
        self._drawing = 0  # let through by sampling(), not drawn yet
        self._closed = False
        self._changed = Condition()
        self._gates = {"insert": _Gate(), "sample": _Gate()}

    # -- asking ---------------------------------------------------------------------------------------------------------------

    def can_insert(self, n: int = 1) -> bool:
        """Whether ``n`` items could be inserted now."""
        n = _count(n)
        with self._changed:
            return self._may_insert(n)

    def can_sample(self, n: int = 1) -> bool:
        """Whether ``n`` items could be sampled now."""
        n = _count(n)
        with self._changed:
            return self._may_sample(n)

    # -- waiting --------------------------------------------------------------------------------------------------------------

    def await_insert(self, n: int = 1, timeout: float | None = None) -> None:
        """Wait until ``n`` items may be inserted, and count them, in one step.

        Raises `DeadlineError` after ``timeout`` seconds (None: `DEFAULT_TIMEOUT_S`; 0: do not wait) and `ClosedError` when the
        limiter is closed meanwhile. Neither counts anything.
        """
        with self.inserting(n, timeout):
            pass

    @contextmanager
    def inserting(self, n: int = 1, timeout: float | None = None) -> Iterator[Reservation]:
        """Wait as ``await_insert`` does; the block stores the items, and they are counted when it ends.

        Until then they take room from other inserts but let no sample through, so a sampler never looks for an item that is
        not there yet. A block that stores fewer than ``n`` says so in ``Reservation.stored``; when it raises, nothing is counted.
        """
        n = _count(n)
        with self._changed:
            self._wait("insert", n, timeout, self._may_insert)
            self._reserved += n
        reservation, stored = Reservation(n), 0
        try:
            yield reservation
            stored = reservation.stored
        finally:
            with self._changed:
                self._reserved -= n
                self._inserts += stored
                self._changed.notify_all()

    def await_sample(self, n: int = 1, timeout: float | None = None) -> None:
        """Wait until ``n`` items may be sampled, and count them, in one step. Errors as in ``await_insert``."""
        with self.sampling(n, timeout):
            pass

    @contextmanager
    def sampling(self, n: int = 1, timeout: float | None = None) -> Iterator[None]:
        """Wait as ``await_sample`` does; the block draws the items, and they are counted when it ends.

        Until then nobody else is let through on their account, neither to sample nor to insert. When the block raises, nothing
        is counted.
        """
        n = _count(n)
        with self._changed:
            self._wait("sample", n, timeout, self._may_sample)
            self._drawing += n
        drawn = 0
        try:
            yield
            drawn = n
        finally:
            with self._changed:
                self._drawing -= n
                self._samples += drawn
                self._changed.notify_all()

    # -- counting without waiting -----------------------------------------------------------------------------------------------

    def inserted(self, n: int = 1) -> None:
        """Count ``n`` inserts that did not ask, as when a log is opened that already holds items."""
        self._add(inserts=_count(n, least=0))

    def sampled(self, n: int = 1) -> None:
        """Count ``n`` samples that did not ask."""
        self._add(samples=_count(n, least=0))

    def deleted(self, n: int = 1) -> None:
        """Count ``n`` items that are gone: evicted, deleted, or sampled as often as they may be."""
        self._add(deletes=_count(n, least=0))

    def reset(self) -> None:
        """Forget all counts, as when the items are cleared; waits go on."""
        with self._changed:
            self._inserts = self._samples = self._deletes = 0
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everyone who waits with `ClosedError`, and refuse new waits. Counting goes on. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- telling --------------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Numbers for a dashboard.

        ``inserts``, ``samples``, ``deletes``: counts so far. ``size``: inserts - deletes. ``diff``: samples the learner is behind.
        For ``insert_`` and ``sample_``: ``waiting`` threads now; calls that were ``blocked`` at first; calls that met their
        deadline (``expired``); seconds spent waiting in all (``wait_s``, finished waits only).
        """
        with self._changed:
            numbers: dict[str, float] = {
                "inserts": self._inserts,
                "samples": self._samples,
                "deletes": self._deletes,
                "size": self._inserts - self._deletes,
                "diff": self._inserts * self.samples_per_insert - self._samples,
            }
            for kind, gate in self._gates.items():
                numbers |= {
                    f"{kind}_waiting": len(gate.queue),
                    f"{kind}_blocked": gate.blocked,
                    f"{kind}_expired": gate.expired,
                    f"{kind}_wait_s": gate.wait_s,
                }
            return numbers

    def state(self) -> dict[str, float]:
        """Parameters and counts, as JSON takes them."""
        with self._changed:
            parameters = {name: getattr(self, name) for name in _PARAMETERS}
            return parameters | {name: getattr(self, f"_{name}") for name in _COUNTS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the counts that ``state()`` gave.

        The parameters must be the same: counts kept at one ratio can block a limiter of another for a very long time.
        """
        missing = [name for name in _PARAMETERS + _COUNTS if name not in state]
        if missing:
            raise ConfigError(f"the limiter state lacks {', '.join(missing)}; give what state() returned")
        differing = [f"{name} {state[name]} (here {getattr(self, name)})" for name in _PARAMETERS if state[name] != getattr(self, name)]
        if differing:
            raise ConfigError(
                f"the limiter state was saved with {', '.join(differing)}; build the limiter with the saved values, "
                "or reset() it and count the items that are there with inserted()"
            )
        inserts, samples, deletes = (_count(state[name], least=0, name=name) for name in _COUNTS)
        with self._changed:
            self._inserts, self._samples, self._deletes = inserts, samples, deletes
            self._changed.notify_all()

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={getattr(self, name)}" for name in _PARAMETERS)
        return f"{type(self).__name__}({parameters}; {self._inserts} inserts, {self._samples} samples, {self._deletes} deletes)"

    # -- the rule, called with the lock held ------------------------------------------------------------------------------------

    def _may_insert(self, n: int) -> bool:
        after = self._inserts + self._reserved + n
        return after - self._deletes <= self.min_size_to_sample or after * self.samples_per_insert - self._samples <= self.max_diff

    def _may_sample(self, n: int) -> bool:
        enough = self._inserts - self._deletes >= self.min_size_to_sample
        return enough and self._inserts * self.samples_per_insert - self._samples - self._drawing - n >= self.min_diff

    def _add(self, inserts: int = 0, samples: int = 0, deletes: int = 0) -> None:
        with self._changed:
            self._inserts += inserts
            self._samples += samples
            self._deletes += deletes
            self._changed.notify_all()

    def _wait(self, kind: str, n: int, timeout: float | None, may: Callable[[int], bool]) -> None:
        """Return, with the lock held, when it is this caller's turn and ``may(n)``."""
        seconds = DEFAULT_TIMEOUT_S if timeout is None else _number("timeout", timeout)
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"timeout ({timeout}) must be 0 or more seconds and finite; None waits {DEFAULT_TIMEOUT_S:g} s")
        gate, given_up = self._gates[kind], gives_up.get()
        ticket = object()
        gate.queue.append(ticket)
        start = time.monotonic()
        blocked = False
        try:
            while True:
                if self._closed:
                    raise ClosedError(
                        f"the rate limiter was closed while {n} {_plural('item', n)} waited to {kind}; open the store again to go on"
                    )
                if given_up is not None and given_up.is_set():
                    raise ClosedError(f"whoever wanted to {kind} {n} {_plural('item', n)} was closed")
                if gate.queue[0] is ticket and may(n):
                    return
                gate.blocked += not blocked
                blocked = True
                left = start + seconds - time.monotonic()
                if left <= 0:
                    gate.expired += 1
                    raise DeadlineError(f"waited {time.monotonic() - start:.2f} s to {kind} {n}: {self._reason(kind, n, ticket)}")
                # The lock refuses to wait for centuries.
                self._changed.wait(min(left, DEFAULT_TIMEOUT_S if given_up is None else _LOOK_S))
        finally:
            gate.wait_s += (time.monotonic() - start) if blocked else 0.0
            gate.queue.remove(ticket)
            if gate.queue:
                self._changed.notify_all()  # the next in line may go on

    def _reason(self, kind: str, n: int, ticket: object) -> str:
        """What kept ``n`` inserts or samples from going on, and what would let them."""
        ahead = self._gates[kind].queue.index(ticket)
        if ahead:
            return f"{ahead} {_plural('call', ahead)} to {kind} came first and still {'wait' if ahead > 1 else 'waits'}; wait longer"
        size = self._inserts - self._deletes
        if kind == "sample" and size < self.min_size_to_sample:
            return f"{size} of {self.min_size_to_sample} items needed are there; insert more or lower min_size_to_sample"
        ratio = self.samples_per_insert
        inserts = self._inserts + (self._reserved if kind == "insert" else 0)
        samples = self._samples + (self._drawing if kind == "sample" else 0)
        diff = inserts * ratio - samples
        if kind == "sample":
            after = diff - n
            limit = f"below min_diff {self.min_diff:g}"
            cure = f"insert {math.ceil((self.min_diff - after) / ratio)} more or lower min_diff (a larger error_buffer)"
        else:
            after = diff + n * ratio
            limit = f"above max_diff {self.max_diff:g}"
            cure = f"sample {math.ceil(after - self.max_diff)} more or raise max_diff (a larger error_buffer)"
        if abs(after - diff) > self.max_diff - self.min_diff:
            cure = f"{n} at once do not fit between min_diff and max_diff: {kind} fewer at once or give a larger error_buffer"
        sums = f"{inserts} {_plural('insert', inserts)} × {ratio:g} - {samples} {_plural('sample', samples)} = {diff:g}"
        return f"{sums}, which {n} more {_plural(kind, n)} would make {after:g}, {limit}; {cure}"


class MinSize(RateLimiter):
    """Samples wait until there are ``min_size_to_sample`` items; inserts never wait."""

    def __init__(self, min_size_to_sample: int):
        super().__init__(1.0, min_size_to_sample, min_diff=-_LARGEST, max_diff=_LARGEST)


class SampleToInsertRatio(RateLimiter):
    """Keeps the number of samples near ``samples_per_insert`` times the number of inserts.

    Args:
        samples_per_insert: how often each item is sampled on average while it is there; above 0.
        min_size_to_sample: items that must be there before anything is sampled; until then inserts never wait.
        error_buffer: how far samples may run from the ratio before someone waits. A number ``e`` gives the limits
            ``samples_per_insert * min_size_to_sample ± e``; a pair is (min_diff, max_diff) as it stands.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int, error_buffer: float | tuple[float, float]):
        ratio = _number("samples_per_insert", samples_per_insert)
        center = ratio * _integer("min_size_to_sample", min_size_to_sample)
        min_diff, max_diff = _limits(center, error_buffer)
        if ratio <= 0:
            raise ConfigError(f"samples_per_insert ({samples_per_insert}) must be > 0; give the samples wanted for each insert")
        if max_diff - min_diff < 2 * max(1.0, ratio):
            raise ConfigError(
                f"The size of error_buffer ({error_buffer}) must be >= max(1.0, samples_per_insert) = {max(1.0, ratio):g} as smaller "
                "values could completely block samples and/or insert calls; widen it"
            )
        if max_diff < center:
            _log.warning(
                "The range covered by error_buffer, up to %g, is below samples_per_insert * min_size_to_sample = %g. If the sampler "
                "cannot sample concurrently, this will result in a deadlock as soon as min_size_to_sample items have been inserted.",
                max_diff,
                center,
            )
        if min_diff > center:
            raise ConfigError(
                f"The range covered by error_buffer, from {min_diff:g}, is above samples_per_insert * min_size_to_sample = {center:g}. "
                "This will result in a deadlock as soon as min_size_to_sample items have been inserted; lower its first number"
            )
        super().__init__(ratio, min_size_to_sample, min_diff, max_diff)


class Queue(RateLimiter):
    """Each item is sampled once, and inserts wait while ``size`` items are there. For a Fifo sampler with max_times_sampled 1."""

    def __init__(self, size: int):
        if _integer("size", size) < 1:
            raise ConfigError(f"size ({size}) must be a positive integer; give the most items that may wait")
        super().__init__(1.0, 1, min_diff=0.0, max_diff=size)


class Stack(Queue):
    """`Queue`'s arithmetic, for a Lifo sampler."""


class _Gate:
    """Those who wait for one thing, in the order they came, and what waiting has cost."""

    def __init__(self) -> None:
        self.queue: deque[object] = deque()
        self.blocked = 0
        self.expired = 0
        self.wait_s = 0.0


def _limits(center: float, error_buffer: float | tuple[float, float]) -> tuple[float, float]:
    if not isinstance(error_buffer, (tuple, list)):
        margin = _number("error_buffer", error_buffer)
        return center - margin, center + margin
    if len(error_buffer) != 2:
        raise ConfigError(f"error_buffer ({error_buffer}) must be one number or a pair (min_diff, max_diff)")
    return _number("error_buffer[0]", error_buffer[0]), _number("error_buffer[1]", error_buffer[1])


def _plural(noun: str, n: int) -> str:
    return noun if n == 1 else f"{noun}s"


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} ({value!r}) must be a number") from error
    if math.isnan(number):
        raise ConfigError(f"{name} ({value!r}) must be a number, not NaN")
    return number


def _integer(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} ({value!r}) must be an integer") from error


def _count(n: SupportsIndex, least: int = 1, name: str = "n") -> int:
    number = _integer(name, n)
    if number < least:
        raise ConfigError(f"{name} ({n}) must be {least} or more items")
    return number
