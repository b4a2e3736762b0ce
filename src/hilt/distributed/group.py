"""The workers of a run, one for each rank, wherever they are: in this process, in
processes of this machine, or on a Ray cluster.

    group = open_group(Placement(kind="processes", ranks=2), "my.module:make_worker", ("an argument",))
    group.call("collect", 3)                     # at all ranks at once: [what rank 0 answered, what rank 1 answered]

A worker is a plain object; ``make_worker(*arguments, ranks=..., stop=...)`` makes it where it lives. An exception of a
worker arrives here as that exception, with the traceback of its place. Nothing waits for ever: a rank that dies or does
not answer in time is an error with its number, and when one fails, the others' waits for it end and are not reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from hilt.core import names, platform
from hilt.core.children import PipedProcess
from hilt.core.errors import RequestError
from hilt.core.signals import leave_to_parent
from hilt.distributed.placement import Placement
from hilt.distributed.remote_workers import (
    GRACE_SECONDS,
    Answer,
    CallProgress,
    Group,
    LostWorkerError,
    Remote,
    Stopped,
    Watch,
    WorkerHost,
    never,
    packed,
    unwatched,
)

__all__ = ["Here", "Placement", "Processes", "open_group"]


def open_group(
    placement: Placement,
    factory: str,
    arguments: Sequence[object] = (),
    *,
    device: str = "cpu",
    joined: bool = False,
    stop: Callable[[], bool] = never,
) -> Group:
    """The workers that a placement asks for. `joined`: a rank that is alone gets a
    torch.distributed group too, which FSDP needs.

    While they start, `stop` is called every `STOP_INTERVAL_S`; when it returns
    True, all of them end and `Stopped` is raised.
    """
    placement.check()
    if placement.kind == "here":
        return Here(factory, arguments, device, joined, stop)
    if placement.kind == "processes":
        return Processes(
            factory,
            arguments,
            placement,
            device,
            "hilt.distributed.shard" if joined else "hilt.distributed.ranks",
            stop,
        )
    from hilt.distributed.cluster import open_cluster  # Ray is an extra, and slow to import

    return open_cluster(placement, factory, arguments, device, stop)


class Here:
    """One worker, in this process. Its calls cannot be ended from outside, so they have no timeout but their own."""

    size = 1
    carried = 0

    def __init__(
        self,
        factory: str,
        arguments: Sequence[Any] = (),
        device: str = "cpu",
        joined: bool = False,
        stop: Callable[[], bool] = never,
    ):
        """The factory runs in the calling thread: a worker whose parts take long asks its
        `stop` between them, and raises `Stopped`."""
        self._made_from = (factory, arguments, device, joined)
        self._stopped, self._asked = False, stop
        self.watch: Watch = unwatched
        self.restart()

    def call(
        self, method: str, *arguments: Any, each: Sequence[object] | None = None, timeout: float | None = None
    ) -> list[Any]:
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


class Processes(Remote):
    """Workers in processes of this machine, joined by torch.distributed at a loopback
    port. They end with this process, however."""

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
                answers[rank] = Answer(
                    error=LostWorkerError(f"rank {rank} of {self.size} is gone: its process {how}.", rank)
                )
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


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(packed(value))


def _receive(pipe: Connection) -> Any:
    return ForkingPickler.loads(pipe.recv_bytes())


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit status {code}"
    memory = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"
