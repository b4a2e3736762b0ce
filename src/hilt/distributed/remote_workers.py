"""Workers in other processes: calls and answers, errors that name the rank, and what is
independent of how the processes are started."""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import io
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

from hilt.core import names, platform
from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError, RequestError
from hilt.core.threads import set_threads

GRACE_SECONDS = 10.0
"""Seconds to wait for the error of a rank that another rank reports as lost, and for a worker to close"""

STOP_INTERVAL_S = 0.1
"""Seconds between two questions whether a run is to be stopped"""
REPORT_INTERVAL_S = 0.5
"""Seconds between two messages of a rank that tell how far a call is"""


class LostWorkerError(HiltError, RuntimeError):
    """Raised when the process of a rank has ended, or does not answer."""

    def __init__(self, message: str, rank: int = -1):
        super().__init__(message)
        self.rank = rank


class Stopped(Exception):
    """Raised where somebody stopped the start of the workers, or what they were
    doing: it is made again when the run goes on."""


class LateWorkerError(LostWorkerError, DeadlineError):
    """Raised when a rank did not answer a call before its deadline."""


class WorkerTraceback(Exception):
    """The traceback of a worker's exception as text, attached to it as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Answer(NamedTuple):
    """The answer of a rank to a call."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""


class CallProgress(NamedTuple):
    """How far a rank is within a call: what a worker's `report` was given."""

    phase: str
    done: int = 0
    total: int = 0
    note: str = ""


Watch = Callable[[int, CallProgress], None]
"""Called at intervals with the rank and the progress of a call"""


def unwatched(rank: int, standing: CallProgress) -> None:
    """Ignores progress."""


class Group(Protocol):
    """All workers of a run. A worker that has a `report` may call it as
    `hilt.core.progress.Report`; `watch` receives it here."""

    size: int
    watch: Watch

    @property
    def carried(self) -> int:
        """Bytes of arrays and text that went through this process so far, in arguments and answers."""

    def call(
        self, method: str, *arguments: Any, each: Sequence[object] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Calls a method of all workers at once: the answers, by rank. `each` has one
        more argument for each rank, its own."""

    def stop(self) -> None:
        """Tells workers that are in a call to come to an end: what they have as `stop` returns True from now on."""

    def restart(self) -> None:
        """All workers anew, as the factory makes them. What they had learned is theirs to load again."""

    def close(self) -> None:
        """Ends all of them; no process stays."""


def never() -> bool:
    """Never asks to stop."""
    return False


class WorkerHost:
    """Where a worker sits in a process of its own: makes it, calls it, and turns what it raises into an answer."""

    def __init__(self, rank: int, size: int, stop: Callable[[], bool], tell: Callable[[CallProgress], None]):
        """`tell`: how far a call is, at most every `REPORT_INTERVAL_S`."""
        self._rank, self._size, self._stop, self._tell = rank, size, stop, tell
        self._ranks: Any = None
        self._reported_at = 0.0
        self.worker: Any = None

    def open(
        self, factory: str, arguments: Sequence[object], address: str, wait_seconds: float, device: str, **further: Any
    ) -> Answer:
        """Joins the other ranks, if there is an address where they meet, and makes the worker."""

        def make() -> None:
            set_threads(max(1, platform.usable_cpus() // self._size))
            import torch

            from hilt.distributed.ranks import Unjoined, join

            if device == "cuda":  # each rank of a machine has its own
                torch.cuda.set_device(self._rank % torch.cuda.device_count())
            if address:
                self._ranks = join(address, self._rank, self._size, timeout_seconds=wait_seconds, device=device)
            ranks = self._ranks or Unjoined(self._rank, self._size)
            self.worker = names.load_own(factory)(*arguments, ranks=ranks, stop=self._stop, **further)
            if hasattr(self.worker, "report"):
                self.worker.report = self._report

        return self._attempt("open", make)

    def _report(self, *given: Any, **named: Any) -> None:
        if (now := time.monotonic()) - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            self._tell(CallProgress(*given, **named))

    def do(self, method: str, arguments: Sequence[object]) -> Answer:
        """The worker's answer. With an error this rank leaves the others, whose waits for it end now."""
        if method == "close" and not hasattr(self.worker, "close"):
            return Answer()
        return self._attempt(method, lambda: getattr(self.worker, method)(*arguments))

    def _attempt(self, method: str, function: Callable[[], Any]) -> Answer:
        try:
            return Answer(function())
        except Exception as error:  # noqa: BLE001  # broad: raised in the process that made the call
            if self._ranks is not None:
                error = self._ranks.fail(method, error)
            place = (
                f"rank {self._rank} of {self._size}, in {method}(), process {os.getpid()} on {os.uname().nodename}:\n"
            )
            trace = place + traceback.format_exc().rstrip()
            # its frames would hold the group's connections open
            error.__cause__ = error.__context__ = error.__traceback__ = None
            return Answer(error=portable(error), trace=trace)


class Remote(ABC):
    """Workers in separate processes: the part that is independent of how they are started."""

    def __init__(self, size: int, call_seconds: float, asked: Callable[[], bool] = never):
        """`asked`: whether somebody asks to stop, which ends a start."""
        self.size, self.carried, self._call_seconds, self._asked = size, 0, call_seconds, asked
        self.watch: Watch = unwatched
        self._over = "it is not open yet"
        atexit.register(self._end)  # before multiprocessing waits for them

    def call(
        self, method: str, *arguments: Any, each: Sequence[object] | None = None, timeout: float | None = None
    ) -> list[Any]:
        self.begin(method, *arguments, each=each)
        return self.finish(method, timeout)

    def begin(self, method: str, *arguments: Any, each: Sequence[object] | None = None) -> None:
        """Begins a call of all workers; `finish` waits for their answers."""
        if each is not None and len(each) != self.size:
            raise ConfigError(f"{method}(): each has {len(each)} arguments for {self.size} ranks; give one for each.")
        if self._over:
            raise ClosedError(
                f"{method}() was called of a group whose end it was that {self._over}; restart() it, or open a new one."
            )
        for rank in range(self.size):
            given = (*arguments, each[rank]) if each is not None else arguments
            self.carried += size_of(given)
            self._send(rank, method, given)

    def finish(self, method: str, timeout: float | None = None) -> list[Any]:
        """The answers to the call that was begun, by rank."""
        return self._answers(method, self._call_seconds if timeout is None else timeout)

    def restart(self) -> None:
        self._end()
        self._over = "it could not be started"
        try:
            self._answers("open", self._begin(), self._asked)
        except BaseException:
            self._end()
            raise
        self._over = ""

    def close(self) -> None:
        if not self._over:
            with contextlib.suppress(Exception):  # the results are not needed any more
                self.call("close", timeout=GRACE_SECONDS)
        self._end()
        atexit.unregister(self._end)
        self._over = self._over or "it was closed"

    def _answers(self, method: str, timeout: float, stop: Callable[[], bool] | None = None) -> list[Any]:
        """Waits for all. The exception of a worker is raised immediately; the report of a rank that lost another one is
        only raised if that one reports nothing.
        With `stop`, which is asked meanwhile, the wait may end by `Stopped`."""
        from hilt.distributed.ranks import LostRankError  # it brings torch

        answers: dict[int, Any] = {}
        consequence: Answer | None = None
        pending, end = set(range(self.size)), time.monotonic() + timeout
        while pending and (left := end - time.monotonic()) > 0:
            if stop is not None and stop():
                raise Stopped
            for rank, answer in self._ready(pending, min(left, STOP_INTERVAL_S) if stop is not None else left).items():
                pending.discard(rank)
                if answer.error is None:
                    answers[rank] = answer.value
                    self.carried += size_of(answer.value)
                elif isinstance(answer.error, LostRankError):
                    consequence = consequence or answer
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                else:
                    self._fail(answer)
        if consequence:
            self._fail(consequence)
        if pending:
            who = " and ".join(f"rank {rank}" for rank in sorted(pending))
            self._fail(
                Answer(error=LateWorkerError(f"{who} did not answer {method}() within {timeout:g} s.", min(pending)))
            )
        return [answers[rank] for rank in range(self.size)]

    def _fail(self, answer: Answer) -> None:
        assert answer.error is not None
        self._over = f"{type(answer.error).__name__}: {answer.error}"
        raise answer.error from (WorkerTraceback(answer.trace) if answer.trace else None)

    @abstractmethod
    def _begin(self) -> float:
        """Starts all; each answers as if it had been called. How many seconds that may take."""

    @abstractmethod
    def _send(self, rank: int, method: str, arguments: Sequence[Any]) -> None: ...

    @abstractmethod
    def _ready(self, ranks: Iterable[int], seconds: float) -> dict[int, Answer]:
        """Some answers of these ranks, as soon as there is one; a rank that is gone
        answers with a `LostWorkerError`."""

    @abstractmethod
    def _end(self) -> None:
        """Ends all that is left of them."""

    @abstractmethod
    def stop(self) -> None: ...


def portable(error: Exception) -> Exception:
    """Returns the exception itself if it can be pickled; otherwise its type and text."""
    try:
        ForkingPickler.loads(packed(error))
    except Exception:  # noqa: BLE001  # broad: an exception of the user is copied by code of the user
        return RequestError(f"{type(error).__name__}: {error}")
    return error


def size_of(value: object) -> int:
    """Bytes of the arrays, tensors and text in a tree."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(each) for item in value.items() for each in item)
    if isinstance(value, (list, tuple, set)):
        return sum(map(size_of, value))
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    return sum(map(size_of, vars(value).values())) if hasattr(value, "__dataclass_fields__") else 8


def packed(value: object) -> bytes:
    """Multiprocessing's own form, but tensors by value: torch would leave them in memory that goes with the sender."""
    file = io.BytesIO()
    pickler = ForkingPickler(file, 5)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(value)
    return file.getvalue()
