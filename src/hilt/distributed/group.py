"""The workers of a run, one for each rank, wherever they are: in this process, in processes of this machine, or on a Ray cluster.

    group = open_group(Placement(kind="processes", ranks=2), "my.module:make_worker", ("an argument",))
    group.call("collect", 3)                     # at all ranks at once: [what rank 0 answered, what rank 1 answered]

A worker is a plain object; ``make_worker(*arguments, ranks=..., stop=...)`` makes it where it lives. An exception of a worker arrives here
as that exception, with the traceback of its place. Nothing waits for ever: a rank that dies or does not answer in time is an error with
its number, and when one fails, the others' waits for it end and are not reported.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import io
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hilt.core import names, platform
from hilt.core.children import PipedProcess
from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError, RequestError
from hilt.core.signals import leave_to_parent
from hilt.core.threads import set_threads
from hilt.core.validate import Need, check, setting

KINDS = ("here", "processes", "ray")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
GRACE_SECONDS = 10.0
"""Seconds to wait for the error of a rank that another rank reports as lost, and for a worker to close"""

STOP_INTERVAL_S = 0.1
"""Seconds between two questions whether a run is to be stopped"""
REPORT_INTERVAL_S = 0.5
"""Seconds between two messages of a rank that tell how far a call is"""


_SEVERAL = Need("{here}kind=processes or ray", lambda c: c.kind != "here")
_RAY = Need("{here}kind=ray", lambda c: c.kind == "ray")


@dataclass
class Placement:
    """Where the ranks of a run are."""

    kind: str = setting("here", choices=KINDS, noun="kind of placement")
    """ "here": one rank, in this process; "processes": of this machine; "ray": actors on one or more machines"""
    ranks: int = setting(1, minimum=1)
    """Processes that train, each with simulators of its own"""
    rollout_ranks: int = setting(0, minimum=0, needs=_RAY)
    """Ray: the number of processes that only roll out, while the others only train; 0: each does both"""
    address: str = setting("", needs=_RAY)
    """Ray: of a running cluster, host:port or "auto"; empty: a new one, on this machine alone"""
    strategy: str = setting("PACK", choices=STRATEGIES, noun="strategy of placement", needs=_RAY)
    """Ray: PACK (as few machines as can be), SPREAD, STRICT_PACK (one machine) or STRICT_SPREAD (each rank on another machine)"""
    cpus: float = setting(1.0, minimum=0, needs=_RAY)
    """Ray: cores that are set aside for each rank and its simulators"""
    gpus: float = setting(0.0, minimum=0, needs=_RAY)
    """Ray: GPUs that are set aside for each rank that trains; rollout ranks get as many"""
    folder: str = setting("", needs=_RAY)
    """Ray: where a rank keeps its files on its own machine, such as /scratch/$USER, its variables as they are there; empty: in the run"""
    wait_seconds: float = setting(600.0, minimum=1, needs=_SEVERAL)
    """How long one rank waits for another"""
    call_seconds: float = setting(7200.0, minimum=1, needs=_SEVERAL)
    """How long the collection of a step, or its update, may take"""
    restarts: int = setting(3, minimum=0, needs=_SEVERAL)
    """How often, in one run, lost workers are started again, from the last checkpoint; 0: the first loss ends it"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "placement")

    def conflicts(self, here: str) -> Iterator[str]:
        if self.kind == "here" and self.ranks > 1:
            yield f"{here}ranks={self.ranks} needs {here}kind=processes or ray: in this process there is one."


_ENABLED = Need("{here}enabled=true", lambda c: c.enabled)


@dataclass
class Sharding:
    """How a rank holds what it trains. With FSDP2 each has a part of every weight, gradient and moment."""

    enabled: bool = False
    """Shard over all ranks (with one rank there is nothing to divide, but offloading works)"""
    precision: str = setting("float32", choices=("float32", "bfloat16"), needs=_ENABLED)
    """In which the units are gathered and compute: float32 or bfloat16. Their parts, sums of gradients and moments stay as they are"""
    units: list[str] = setting(factory=list, needs=_ENABLED)
    """Classes of modules that are gathered one after the other, such as LlamaDecoderLayer; empty: all weights at once"""
    offload_parameters: bool = setting(False, needs=_ENABLED)
    """The parts lie on the CPU and are copied when they are needed; gradients and moments are then there too"""
    offload_gradients: bool = setting(False, needs=_ENABLED)
    """Gradients go to the CPU after each backward pass, and are summed there"""
    offload_optimizer: bool = setting(False, needs=_ENABLED)
    """Adam's moments lie on the CPU, and come to the device one weight at a time"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "sharding")

    def conflicts(self, here: str) -> Iterator[str]:
        if self.precision != "float32" and not self.units:
            yield f"{here}precision={self.precision} is that of units: give {here}units=[LlamaDecoderLayer], or leave it out."


class LostWorkerError(HiltError, RuntimeError):
    """Raised when the process of a rank has ended, or does not answer."""

    def __init__(self, message: str, rank: int = -1):
        super().__init__(message)
        self.rank = rank


class Stopped(Exception):
    """Raised where somebody stopped the start of the workers, or what they were doing: it is made again when the run goes on."""


class LateWorkerError(LostWorkerError, DeadlineError):
    """Raised when a rank did not answer a call before its deadline."""


class WorkerTraceback(Exception):
    """Where an exception of a worker happened: its cause, as Python prints it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Answer(NamedTuple):
    """What a rank answers to a call."""

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
    """All workers of a run. A worker that has a `report` may call it as `hilt.core.progress.Report`; `watch` receives it here."""

    size: int
    watch: Watch

    @property
    def carried(self) -> int:
        """Bytes of arrays and text that went through this process so far, in arguments and answers."""

    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None, timeout: float | None = None) -> list[Any]:
        """Calls a method of all workers at once: the answers, by rank. `each` has one more argument for each rank, its own."""

    def stop(self) -> None:
        """Tells workers that are in a call to come to an end: what they have as `stop` returns True from now on."""

    def restart(self) -> None:
        """All workers anew, as the factory makes them. What they had learned is theirs to load again."""

    def close(self) -> None:
        """Ends all of them; no process stays."""


def never() -> bool:
    """Never asks to stop."""
    return False


def open_group(
    placement: Placement,
    factory: str,
    arguments: Sequence[Any] = (),
    *,
    device: str = "cpu",
    joined: bool = False,
    stop: Callable[[], bool] = never,
) -> Group:
    """The workers that a placement asks for. `joined`: a rank that is alone gets a torch.distributed group too, which FSDP needs.

    While they start, `stop` is called every `STOP_INTERVAL_S`; when it returns True, all of them end and `Stopped` is raised.
    """
    placement.check()
    if placement.kind == "here":
        return Here(factory, arguments, device, joined, stop)
    if placement.kind == "processes":
        return Processes(factory, arguments, placement, device, "hilt.distributed.shard" if joined else "hilt.distributed.ranks", stop)
    from hilt.distributed.cluster import open_cluster  # Ray is an extra, and slow to import

    return open_cluster(placement, factory, arguments, device, stop)


def rank_folder(placement: Placement, run: Path, rank: int) -> Path:
    """Where a rank keeps its files: in the run, or in a folder of its own machine, whose variables are read there."""
    if not placement.folder:
        return run
    folder = os.path.expandvars(placement.folder)
    if "$" in folder:
        raise ConfigError(f"placement.folder={placement.folder}: rank {rank}'s machine does not have this variable; set it there.")
    return Path(folder).absolute() / run.name


class Here:
    """One worker, in this process. Its calls cannot be ended from outside, so they have no timeout but their own."""

    size = 1
    carried = 0

    def __init__(
        self, factory: str, arguments: Sequence[Any] = (), device: str = "cpu", joined: bool = False, stop: Callable[[], bool] = never
    ):
        """The factory runs in the calling thread: a worker whose parts take long asks its `stop` between them, and raises `Stopped`."""
        self._made_from = (factory, arguments, device, joined)
        self._stopped, self._asked = False, stop
        self.watch: Watch = unwatched
        self.restart()

    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None, timeout: float | None = None) -> list[Any]:
        return [getattr(self.worker, method)(*arguments, *(each or ()))]

    def stop(self) -> None:
        self._stopped = True

    def restart(self) -> None:
        from hilt.distributed.ranks import Alone, Ranks, host_meeting, join

        factory, arguments, device, joined = self._made_from
        ranks: Ranks = Alone()
        if joined:
            self.close()
            self._meeting, address = host_meeting()
            self._joined = ranks = join(address, 0, 1, device=device)
        self._stopped = False
        try:
            self.worker = names.load_own(factory)(*arguments, ranks=ranks, stop=lambda: self._stopped or self._asked())
            if self._asked():
                raise Stopped
        except BaseException:
            self.close()
            raise
        if hasattr(self.worker, "report"):
            self.worker.report = lambda *given, **named: self.watch(0, CallProgress(*given, **named))

    def close(self) -> None:
        if hasattr(self, "worker") and hasattr(self.worker, "close"):
            self.worker.close()
        if hasattr(self, "_joined"):
            self._joined.leave("it was closed")


class WorkerHost:
    """Where a worker sits in a process of its own: makes it, calls it, and turns what it raises into an answer."""

    def __init__(self, rank: int, size: int, stop: Callable[[], bool], tell: Callable[[CallProgress], None]):
        """`tell`: how far a call is, at most every `REPORT_INTERVAL_S`."""
        self._rank, self._size, self._stop, self._tell = rank, size, stop, tell
        self._ranks: Any = None
        self._reported_at = 0.0
        self.worker: Any = None

    def open(self, factory: str, arguments: Sequence[Any], address: str, wait_seconds: float, device: str, **further: Any) -> Answer:
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

    def do(self, method: str, arguments: Sequence[Any]) -> Answer:
        """The worker's answer. With an error this rank leaves the others, whose waits for it end now."""
        if method == "close" and not hasattr(self.worker, "close"):
            return Answer()
        return self._attempt(method, lambda: getattr(self.worker, method)(*arguments))

    def _attempt(self, method: str, function: Callable[[], Any]) -> Answer:
        try:
            return Answer(function())
        except Exception as error:  # noqa: BLE001  # it is raised where the call was made
            if self._ranks is not None:
                error = self._ranks.fail(method, error)
            place = f"rank {self._rank} of {self._size}, in {method}(), process {os.getpid()} on {os.uname().nodename}:\n"
            trace = place + traceback.format_exc().rstrip()
            error.__cause__ = error.__context__ = error.__traceback__ = None  # its frames would hold the group's connections open
            return Answer(error=portable(error), trace=trace)


class Remote(ABC):
    """Workers in separate processes: the part that is independent of how they are started."""

    def __init__(self, size: int, call_seconds: float, asked: Callable[[], bool] = never):
        """`asked`: whether somebody asks to stop, which ends a start."""
        self.size, self.carried, self._call_seconds, self._asked = size, 0, call_seconds, asked
        self.watch: Watch = unwatched
        self._over = "it is not open yet"
        atexit.register(self._end)  # before multiprocessing waits for them

    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None, timeout: float | None = None) -> list[Any]:
        if each is not None and len(each) != self.size:
            raise ConfigError(f"{method}(): each has {len(each)} arguments for {self.size} ranks; give one for each.")
        if self._over:
            raise ClosedError(f"{method}() was called of a group whose end it was that {self._over}; restart() it, or open a new one.")
        for rank in range(self.size):
            given = (*arguments, each[rank]) if each is not None else arguments
            self.carried += size_of(given)
            self._send(rank, method, given)
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
        """Waits for all. The exception of a worker is raised immediately; the report of a rank that lost another one is only raised if
        that one reports nothing.
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
            self._fail(Answer(error=LateWorkerError(f"{who} did not answer {method}() within {timeout:g} s.", min(pending))))
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
        """Some answers of these ranks, as soon as there is one; a rank that is gone answers with a `LostWorkerError`."""

    @abstractmethod
    def _end(self) -> None:
        """Ends all that is left of them."""

    @abstractmethod
    def stop(self) -> None: ...


class Processes(Remote):
    """Workers in processes of this machine, joined by torch.distributed at a loopback port. They end with this process, however."""

    def __init__(
        self,
        factory: str,
        arguments: Sequence[Any],
        placement: Placement,
        device: str = "cpu",
        preload: str = "hilt.distributed.ranks",
        stop: Callable[[], bool] = never,
    ):
        super().__init__(placement.ranks, placement.call_seconds, stop)
        self._made_from, self._preload = (factory, arguments, placement.wait_seconds, device), preload
        self._processes: list[PipedProcess] = []
        self._lives: list[Connection] = []
        self.restart()

    def stop(self) -> None:
        for life in self._lives:
            with contextlib.suppress(OSError):
                life.send_bytes(b"stop")

    def _begin(self) -> float:
        from hilt.distributed.ranks import host_meeting

        factory, arguments, wait_seconds, device = self._made_from
        self._meeting, address = host_meeting()
        opening = factory, arguments, address, wait_seconds, device
        for rank in range(self.size):
            life, watched = Pipe()
            process = PipedProcess(
                _serve,
                rank,
                self.size,
                watched,
                opening,
                name=f"hilt-rank-{rank}",
                start_method=platform.START_METHOD,
                daemon=False,  # it has children of its own: simulators
                preload=self._preload,  # torch, imported once for all of them
            )
            watched.close()
            self._processes.append(process)
            self._lives.append(life)
        return wait_seconds + self._call_seconds

    def _send(self, rank: int, method: str, arguments: Sequence[Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which its reply will show
            _send(self._processes[rank].pipe, (method, arguments))

    def _ready(self, ranks: Iterable[int], seconds: float) -> dict[int, Answer]:
        answers, by_rank = {}, {rank: self._processes[rank].pipe for rank in ranks}
        there = wait(by_rank.values(), seconds)
        for rank in [rank for rank, pipe in by_rank.items() if pipe in there]:
            try:
                answer = _receive(by_rank[rank])
                if isinstance(answer, CallProgress):
                    self.watch(rank, answer)
                else:
                    answers[rank] = answer
            except (EOFError, OSError):
                how = _how_it_ended(self._processes[rank].exit_code(GRACE_SECONDS))
                answers[rank] = Answer(error=LostWorkerError(f"rank {rank} of {self.size} is gone: its process {how}.", rank))
        return answers

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.end()
        for life in self._lives:
            life.close()
        self._processes, self._lives = [], []


def _serve(pipe: Connection, rank: int, size: int, life: Connection, opening: tuple[Any, ...]) -> None:
    """The life of a worker's process: it makes the worker, answers calls, and ends when its parent does."""
    leave_to_parent()
    stopped = threading.Event()

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            while life.recv_bytes():
                stopped.set()
        os._exit(1)  # also out of a call that will not end

    threading.Thread(target=watch, name="hilt-life", daemon=True).start()
    seat = WorkerHost(rank, size, stopped.is_set, partial(_send, pipe))
    _send(pipe, seat.open(*opening)._replace(value=None))
    while True:
        method, arguments = _receive(pipe)
        answer = seat.do(method, arguments)
        try:
            _send(pipe, answer)
        except (TypeError, AttributeError, ValueError) as error:  # Python's errors for objects that cannot be pickled
            _send(pipe, Answer(error=RequestError(f"what {method}() answered at rank {rank} cannot be sent: {error}")))


def portable(error: Exception) -> Exception:
    """Returns the exception itself if it can be pickled; otherwise its type and text."""
    try:
        ForkingPickler.loads(_packed(error))
    except Exception:  # noqa: BLE001  # whatever its own code does when it is copied
        return RequestError(f"{type(error).__name__}: {error}")
    return error


def size_of(value: Any) -> int:
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


def _packed(value: Any) -> bytes:
    """Multiprocessing's own form, but tensors by value: torch would leave them in memory that goes with the sender."""
    file = io.BytesIO()
    pickler = ForkingPickler(file, 5)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(value)
    return file.getvalue()


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(_packed(value))


def _receive(pipe: Connection) -> Any:
    return ForkingPickler.loads(pipe.recv_bytes())


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit status {code}"
    memory = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"
