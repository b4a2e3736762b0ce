"""Rate limiters: who must wait, the actors that insert or the learner that samples.

The arithmetic is Reverb's. With ``i`` inserts, ``s`` samples and ``d`` deletes so far::

    can_sample(n)  iff  i - d >= min_size_to_sample   and  i * samples_per_insert - s - n >= min_diff
    can_insert(n)  iff  i + n - d <= min_size_to_sample  or  (i + n) * samples_per_insert - s <= max_diff

so ``i * samples_per_insert - s``, the *diff*, is how many samples the learner is behind, and it is kept within
``[min_diff, max_diff]`` once there are enough items. ``MinSize``, ``SampleToInsertRatio``,
``Queue`` and ``Stack`` only choose the four numbers.

Every wait has a deadline, and its error says which of the two conditions failed and by how much. Those who wait for the
same thing are served in the order they came, so that a large batch is not starved by small ones.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import TYPE_CHECKING, Any, SupportsIndex

from hilt.core.errors import ClosedError, ConfigError, DeadlineError
from hilt.replay.storage.lock import after_fork

if TYPE_CHECKING:
    from hilt.replay.view import Selection

DEFAULT_TIMEOUT_S = 600.0
"""How long a wait lasts when no timeout is given, in seconds. There is no way to wait for ever."""

_LARGEST = sys.float_info.max
_PARAMETERS = ("samples_per_insert", "min_size_to_sample", "min_diff", "max_diff")

_log = logging.getLogger(__name__)

gives_up: ContextVar[Event | None] = ContextVar("gives_up", default=None)
"""Set by a thread that may be asked to end while it waits: once the event is set, its waits end with `ClosedError`."""
_LOOK_S = 0.05
"""How often such a thread looks, in seconds."""


@dataclass
class Reservation:
    """What a limiter let through, for the time it takes to store or draw it."""

    stored: int
    """How many items were stored, or drawn, in the end."""


@dataclass
class _Gate:
    """Those who insert, or those who sample."""

    pending: int = 0  # let through, not stored or drawn yet
    queue: list[object] = field(default_factory=list)  # who waits, in the order they came
    blocked: int = 0
    expired: int = 0
    wait_s: float = 0.0


class RateLimiter:
    """Lets inserts and samples through, or makes them wait, by the rule at the top of this file.

    Safe to use from any number of threads. ``await_insert`` and ``await_sample`` count what they let
    through; code that stores or draws an item after it was let through uses ``inserting`` and ``sampling``
    instead, which count the item once that is done.

    Args:
        samples_per_insert: samples wanted for each insert; above 0.
        min_size_to_sample: items (inserts minus deletes) that must be there before anything is sampled; at least 1.
        min_diff: lowest diff that a sample may leave behind.
        max_diff: highest diff that an insert may leave behind; infinite is stored as the largest float, as in Reverb.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int, min_diff: float, max_diff: float):
        self.samples_per_insert = _number("samples_per_insert", samples_per_insert)
        self.min_size_to_sample = _count(min_size_to_sample, 1, "min_size_to_sample")
        self.min_diff = max(_number("min_diff", min_diff), -_LARGEST)
        self.max_diff = min(_number("max_diff", max_diff), _LARGEST)
        if not 0 < self.samples_per_insert <= _LARGEST:
            raise ConfigError(
                f"samples_per_insert ({samples_per_insert}) must be > 0 and finite; give the "
                "samples wanted for each insert"
            )
        if self.min_diff > self.max_diff:
            raise ConfigError(
                f"min_diff ({min_diff}) is above max_diff ({max_diff}), so nothing could go on; "
                "give them in rising order"
            )
        self._counts = {"inserts": 0, "samples": 0, "deletes": 0}
        self._gates = {"insert": _Gate(), "sample": _Gate()}
        self._closed = False
        self.renew_locks()
        after_fork(self, "renew_locks")

    def renew_locks(self) -> None:
        """Also in a forked process."""
        self._changed = Condition()

    def can_insert(self, n: int = 1) -> bool:
        """Whether ``n`` items could be inserted now."""
        with self._changed:
            return self._may("insert", _count(n))

    def can_sample(self, n: int = 1) -> bool:
        """Whether ``n`` items could be sampled now."""
        with self._changed:
            return self._may("sample", _count(n))

    def await_insert(self, n: int = 1, timeout: float | None = None) -> None:
        """Wait until ``n`` items may be inserted, and count them, in one step.

        Raises `DeadlineError` after ``timeout`` seconds (None: `DEFAULT_TIMEOUT_S`; 0: do not wait) and `ClosedError`
        when the limiter is closed meanwhile; neither counts anything.
        """
        with self.inserting(n, timeout):
            pass

    def await_sample(self, n: int = 1, timeout: float | None = None) -> None:
        """Wait until ``n`` items may be sampled, and count them, in one step. Errors as in ``await_insert``."""
        with self.sampling(n, timeout):
            pass

    def inserting(self, n: int = 1, timeout: float | None = None) -> AbstractContextManager[Reservation]:
        """Wait as ``await_insert`` does; the block stores the items, and they are counted when it ends.

        Until then they take room from other inserts but let no sample through, so a sampler never looks for
        an item that is not there yet. A block that stores fewer than ``n`` says so in
        ``Reservation.stored``; when it raises, nothing is counted.
        """
        return self._through("insert", n, timeout)

    def sampling(self, n: int = 1, timeout: float | None = None) -> AbstractContextManager[Reservation]:
        """The same for a block that draws items: until it ends, no other call is admitted for the same items."""
        return self._through("sample", n, timeout)

    def inserted(self, n: int = 1) -> None:
        """Count ``n`` inserts that did not ask, as when a log is opened that already holds items."""
        self._add("inserts", n)

    def sampled(self, n: int = 1) -> None:
        """Count ``n`` samples that did not ask."""
        self._add("samples", n)

    def deleted(self, n: int = 1) -> None:
        """Count ``n`` items that are gone: evicted, deleted, or sampled as often as they may be."""
        self._add("deletes", n)

    def reset(self) -> None:
        """Forget all counts, as when the items are cleared; waits go on."""
        self._set(inserts=0, samples=0, deletes=0)

    def close(self) -> None:
        """Wake everyone who waits with `ClosedError`, and refuse new waits. Counting goes on. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stats(self) -> dict[str, float]:
        """Numbers for a dashboard.

        ``inserts``, ``samples``, ``deletes``: counts so far. ``size``: inserts - deletes. ``diff``: samples the learner
        is behind. For ``insert_`` and ``sample_``: ``waiting`` threads now; calls that were ``blocked`` at first; calls
        that met their deadline (``expired``); seconds spent waiting in all (``wait_s``, finished waits only).
        """
        with self._changed:
            inserts, samples, deletes = self._counts.values()
            numbers = {**self._counts, "size": inserts - deletes, "diff": inserts * self.samples_per_insert - samples}
            for kind, gate in self._gates.items():
                waits = {
                    "waiting": len(gate.queue),
                    "blocked": gate.blocked,
                    "expired": gate.expired,
                    "wait_s": gate.wait_s,
                }
                numbers |= {f"{kind}_{name}": value for name, value in waits.items()}
            return numbers

    def state(self) -> dict[str, float]:
        """Parameters and counts, as JSON takes them."""
        with self._changed:
            return {name: getattr(self, name) for name in _PARAMETERS} | self._counts

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the counts that ``state()`` gave.

        The parameters must be the same: counts kept at one ratio can block a limiter of another for a very long time.
        """
        own = self.state()
        if missing := [name for name in own if name not in state]:
            raise ConfigError(f"the limiter state lacks {', '.join(missing)}; give what state() returned")
        if differing := [
            f"{name} {state[name]} (here {own[name]})" for name in _PARAMETERS if state[name] != own[name]
        ]:
            raise ConfigError(
                f"the limiter state was saved with {', '.join(differing)}; build the limiter with the saved values, "
                "or reset() it and count the items that are there with inserted()"
            )
        self._set(**{name: _count(state[name], least=0, name=name) for name in self._counts})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.state().items())})"

    def _set(self, **counts: int) -> None:
        with self._changed:
            self._counts.update(counts)
            self._changed.notify_all()

    def _add(self, name: str, n: int) -> None:
        n = _count(n, least=0)
        with self._changed:
            self._counts[name] += n
            self._changed.notify_all()

    @contextmanager
    def _through(self, kind: str, n: int, timeout: float | None) -> Iterator[Reservation]:
        n, gate = _count(n), self._gates[kind]
        with self._changed:
            self._wait(kind, n, timeout)
            gate.pending += n
        reservation, done = Reservation(n), 0
        try:
            yield reservation
            done = reservation.stored
        finally:
            with self._changed:
                gate.pending -= n
                self._counts[f"{kind}s"] += done
                self._changed.notify_all()

    # Called with the lock held

    def _counted(self, kind: str) -> tuple[int, int, int]:
        """Inserts, samples and deletes, of which ``kind`` has those under way as well."""
        inserts, samples, deletes = self._counts.values()
        pending = self._gates[kind].pending
        return (inserts + pending, samples, deletes) if kind == "insert" else (inserts, samples + pending, deletes)

    def _may(self, kind: str, n: int) -> bool:
        i, s, d = self._counted(kind)
        if kind == "sample":
            return i - d >= self.min_size_to_sample and i * self.samples_per_insert - s - n >= self.min_diff
        return i + n - d <= self.min_size_to_sample or (i + n) * self.samples_per_insert - s <= self.max_diff

    def _wait(self, kind: str, n: int, timeout: float | None) -> None:
        """Return when it is this caller's turn and the rule lets ``n`` through."""
        seconds = DEFAULT_TIMEOUT_S if timeout is None else _number("timeout", timeout)
        if not 0 <= seconds < math.inf:
            raise ConfigError(
                f"timeout ({timeout}) must be 0 or more seconds and finite; None waits {DEFAULT_TIMEOUT_S:g} s"
            )
        gate, given_up, ticket = self._gates[kind], gives_up.get(), object()
        gate.queue.append(ticket)
        start, blocked = time.monotonic(), False
        try:
            while True:
                if self._closed:
                    raise ClosedError(
                        f"the rate limiter was closed while {_many(n, 'item')} waited to {kind}; "
                        "open the store again to go on"
                    )
                if given_up is not None and given_up.is_set():
                    raise ClosedError(f"the caller that waited to {kind} {_many(n, 'item')} was closed")
                if gate.queue[0] is ticket and self._may(kind, n):
                    return
                gate.blocked += not blocked
                blocked = True
                waited = time.monotonic() - start
                if waited >= seconds:
                    gate.expired += 1
                    raise DeadlineError(
                        f"waited {waited:.2f} s to {kind} {n}: {self._reason(kind, n, gate.queue.index(ticket))}"
                    )
                # The lock refuses to wait for centuries.
                self._changed.wait(min(seconds - waited, DEFAULT_TIMEOUT_S if given_up is None else _LOOK_S))
        finally:
            gate.wait_s += (time.monotonic() - start) if blocked else 0.0
            gate.queue.remove(ticket)
            if gate.queue:
                self._changed.notify_all()  # the next in line may go on

    def _reason(self, kind: str, n: int, ahead: int) -> str:
        """What kept ``n`` inserts or samples from going on, and what would let them."""
        if ahead:
            return (
                f"{_many(ahead, 'call')} to {kind} came first and still {'wait' if ahead > 1 else 'waits'}; wait longer"
            )
        i, s, d = self._counted(kind)
        ratio, low, high = self.samples_per_insert, self.min_diff, self.max_diff
        if kind == "sample" and i - d < self.min_size_to_sample:
            return (
                f"{i - d} of {self.min_size_to_sample} items needed are there; insert more or lower min_size_to_sample"
            )
        diff = i * ratio - s
        if kind == "sample":
            after, limit = diff - n, f"below min_diff {low:g}"
            cure = f"insert {math.ceil((low - after) / ratio)} more or lower min_diff (a larger error_buffer)"
        else:
            after, limit = diff + n * ratio, f"above max_diff {high:g}"
            cure = f"sample {math.ceil(after - high)} more or raise max_diff (a larger error_buffer)"
        if abs(after - diff) > high - low:
            cure = (
                f"{n} at once do not fit between min_diff and max_diff: {kind} fewer at once or "
                "give a larger error_buffer"
            )
        sums = f"{_many(i, 'insert')} × {ratio:g} - {_many(s, 'sample')} = {diff:g}"
        return f"{sums}, which {_many(n, f'more {kind}')} would make {after:g}, {limit}; {cure}"


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
        center = ratio * _count(min_size_to_sample, -sys.maxsize, "min_size_to_sample")
        if not isinstance(error_buffer, (tuple, list)):
            margin = _number("error_buffer", error_buffer)
            low, high = center - margin, center + margin
        elif len(error_buffer) == 2:
            low, high = _number("error_buffer[0]", error_buffer[0]), _number("error_buffer[1]", error_buffer[1])
        else:
            raise ConfigError(f"error_buffer ({error_buffer}) must be one number or a pair (min_diff, max_diff)")
        super().__init__(samples_per_insert, min_size_to_sample, low, high)
        if high - low < 2 * max(1.0, ratio):
            raise ConfigError(
                f"The size of error_buffer ({error_buffer}) must be >= max(1.0, samples_per_insert) = "
                f"{max(1.0, ratio):g} as smaller values could completely block samples and/or insert calls; widen it"
            )
        start = f"samples_per_insert * min_size_to_sample = {center:g}, where sampling begins"
        if high < center:
            _log.warning(
                "error_buffer, up to %g, is below %s: a deadlock unless samples are requested during inserts.",
                high,
                start,
            )
        if low > center:
            raise ConfigError(
                f"error_buffer, from {low:g}, is above {start}: nothing could ever be sampled; lower its first number"
            )


class Queue(RateLimiter):
    """Each item is sampled once, and inserts wait while ``size`` items are there.
    For a Fifo sampler with max_times_sampled 1."""

    def __init__(self, size: int):
        super().__init__(1.0, 1, min_diff=0.0, max_diff=_count(size, 1, "size"))


class Stack(Queue):
    """`Queue`'s arithmetic, for a Lifo sampler."""


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} ({value!r}) must be a number") from error
    if math.isnan(number):
        raise ConfigError(f"{name} ({value!r}) must be a number, not NaN")
    return number


def _count(n: SupportsIndex, least: int = 1, name: str = "n") -> int:
    try:
        number = operator.index(n)
    except TypeError as error:
        raise ConfigError(f"{name} ({n!r}) must be an integer") from error
    if number < least:
        raise ConfigError(f"{name} ({n}) must be {least} or more items")
    return number


@dataclass
class Limited:
    """A rate limiter that the writers of a log obey, its view, and how many steps of the view it has counted."""

    limiter: RateLimiter
    selection: Selection
    entered: int
    left: int

    def update(self) -> None:
        """Counts the steps that entered and left the view since the last update."""
        entered, left = self.selection.entered, self.selection.left
        if (entered, left) != (self.entered, self.left):
            self.limiter.inserted(max(0, entered - self.entered))
            self.limiter.deleted(max(0, left - self.left))
            self.entered, self.left = entered, left


class Limiters:
    """The rate limiters that the writers of a log obey. Each counts the steps of one view."""

    def __init__(self) -> None:
        self._limited: list[Limited] = []

    def add(self, limiter: RateLimiter, selection: Selection) -> None:
        """Writers obey this limiter from now on."""
        if any(limited.limiter is limiter or limited.selection is selection for limited in self._limited):
            raise ConfigError(
                "this limiter, or this view, is another sampler's already; make a new limiter and a new view for each."
            )
        limiter.inserted(len(selection.current()))
        self._limited.append(Limited(limiter, selection, selection.entered, selection.left))

    def inserting(self, steps: int, timeout: float | None) -> AbstractContextManager[object]:
        """Waits until every limiter admits this number of steps. They are counted by `update`, once they are there."""
        if not self._limited:
            return _NO_LIMITER
        stack = ExitStack()
        try:
            for limited in self._limited:
                stack.enter_context(limited.limiter.inserting(steps, timeout)).stored = 0
        except BaseException:
            stack.close()
            raise
        return stack

    def update(self) -> None:
        """Counts the steps that entered and left each view since the last update."""
        for limited in self._limited:
            limited.update()

    def close(self) -> None:
        """Wakes everyone who waits."""
        for limited in self._limited:
            limited.limiter.close()


_NO_LIMITER = nullcontext()
