"""Many environments in flight, in worker processes that stay: `Pool`.

A slot is a place for one episode. ``start`` and ``step`` ask something of a slot and return at once, ``collect`` waits
for the answers; so the simulators of one half of the slots work while a policy thinks about the other half. A step
carries out a whole chunk of actions and observes once, at its end.

Slot ``i`` belongs to worker ``i % workers``, which processes the requests of its slots in order. The content of a
message is small: the frames of a slot lie in memory that both processes see, written there once by the worker and never
copied again. Environments are made in the worker by `hilt.envs.task.make`, and kept for the episodes that follow.

A worker that dies, or does not answer within its deadline, is started anew when its answer is collected. The
episodes that it had are lost: their answers carry its own traceback. A worker ends with the process that
started it, however that ended, and even when it hangs itself. ``workers=0`` does everything in the caller's
process with the same results, but without supervision.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypedDict

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from hilt.core import errors, platform
from hilt.core.children import ChildProcess, run_code
from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError
from hilt.core.tree import Array
from hilt.core.validate import check_values
from hilt.envs.simulators import OUTPUT_BYTES, Frames, Simulators
from hilt.envs.task import factory_names

CLOSE_S = 5.0
"""Seconds that workers have to close their environments before they are killed"""
ABORT_S = 2.0
"""Seconds that a hanging worker has to print its traceback"""
BEGIN = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; from "
    "hilt.envs.simulators import work; work(given)"
)
"""The program of a worker, with the caller's module path"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}
"""For BLAS and for Mesa's software renderer: threads of many workers would only stand in each other's way"""
ASKED_WRONGLY = ("ConfigError", "UnknownNameError", "MissingPackageError", "StorageError")
"""Errors at the beginning of an episode that no other try would mend: `Pool.collect` raises them"""


class Beginning(Protocol):
    """Where an episode begins: `hilt.vla.episode.Start` is one."""

    @property
    def task(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def state(self) -> int: ...
    @property
    def seed(self) -> int: ...


class TaskDescription(TypedDict, total=False):
    """The description of a task by a worker of the pool."""

    instruction: str
    step_limit: int
    initial_states: dict[str, int]
    """The number of initial states of each split"""
    states_of_train: dict[str, int]
    """How many states of a split are of the split train, too; not of every task"""
    action_dim: int


class EpisodePool(Protocol):
    """What collects episodes: it has slots, each of which carries on one episode at a time. `Pool` is one."""

    @property
    def slots(self) -> int: ...
    def start(self, slot: int, beginning: Beginning) -> None: ...
    def step(self, slot: int, actions: npt.ArrayLike) -> None: ...
    def collect(self, slots: Sequence[int]) -> list[Reply]: ...
    def describe(self, task: str) -> TaskDescription: ...


@dataclass(frozen=True)
class Reply:
    """The result of one start or step."""

    slot: int
    observation: Any
    """As the environment gives it. Its arrays are read-only, and valid until the slot is
    asked again: copy what is kept. {} when lost"""
    instruction: str
    rewards: Array
    """float32 [executed]"""
    executed: int
    """How many actions of the chunk were carried out: none after the one that ended the episode"""
    terminated: bool
    truncated: bool
    success: bool | None
    """None if the environment does not report success"""
    error: str = ""
    """When the episode is lost: the traceback of where it happened. The slot can be started again."""


class Pool:
    """`slots` episodes in flight in `workers` processes; see the module. Not for use by several threads at once.

    ``envs_per_worker`` limits the environments that a worker keeps, which may be large (LIBERO: 1.45 GB each);
    0: one for each of its slots. ``start_s`` and ``step_s`` are deadlines, ``start_s`` with the making of
    process and environment. A worker that fails more than ``restarts`` times without an episode that ends
    between them is not started again: that is an error.
    """

    def __init__(
        self,
        workers: int,
        slots: int,
        *,
        task_options: Mapping[str, Any] | None = None,
        envs_per_worker: int = 0,
        start_s: float = 120.0,
        step_s: float = 60.0,
        restarts: int = 3,
    ):
        check_values(minimum=0, workers=workers, restarts=restarts, envs_per_worker=envs_per_worker)
        check_values(minimum=1, slots=slots)
        check_values(above=0, start_s=start_s, step_s=step_s)
        processes = min(workers, slots)
        most = -(-slots // max(processes, 1))
        if envs_per_worker and envs_per_worker < most:
            raise ConfigError(
                f"envs_per_worker={envs_per_worker}: a worker has {most} slots, so it needs as many; or give 0."
            )
        self.slots = slots
        self.counts = {"episodes": 0, "lost": 0, "restarts": 0}
        """Episodes that were begun, those of them that were lost, and restarts of workers"""
        self._start_s, self._step_s, self._restarts = start_s, step_s, restarts
        self._about: dict[str, TaskDescription] = {}
        self._factories = factory_names()
        config = {"factories": self._factories, "options": _plain(task_options or {}), "envs": envs_per_worker or most}
        config["deadline"] = max(start_s, step_s) + ABORT_S + CLOSE_S  # of a worker without a supervisor
        self._slots = [_Slot(number) for number in range(slots + 1)]  # the last is for `describe`
        copies = {} if processes else {slot.number: Frames(os.dup(slot.frames.descriptor)) for slot in self._slots}
        self._here = None if processes else Simulators(config, copies)
        self._workers = [_Worker(number, config, self._slots[number:-1:processes]) for number in range(processes)]
        if processes:
            self._slots[-1].worker = self._workers[0]
        self._close = weakref.finalize(self, _close_all, self._workers)
        for worker in self._workers:
            worker.start()

    def start(self, slot: int, beginning: Beginning) -> None:
        """Begin an episode; the one that the slot had is given up."""
        one = self._free(slot)
        place = {
            "task": beginning.task,
            "split": beginning.split,
            "state": int(beginning.state),
            "seed": int(beginning.seed),
        }
        self._ask(one, {"slot": slot, **place})
        one.running, one.lost = True, ""
        self.counts["episodes"] += 1

    def step(self, slot: int, actions: npt.ArrayLike) -> None:
        """Carry out ``[n, ...]`` actions, one after the other, in the environment's
        own units, until the episode ends."""
        one, given = self._free(slot), np.ascontiguousarray(actions)
        if given.ndim < 1 or not len(given) or given.dtype.kind not in "biuf":
            raise ConfigError(
                f"actions {given.dtype} {given.shape} for slot {slot}: expected numbers [n, "
                "...], one row for each action."
            )
        if not one.running:
            raise ConfigError(f"slot {slot} has no episode, or its episode is over: start one.")
        if one.lost:
            one.asked, one.answer = {}, {"slot": slot, "error": one.lost}
        else:
            self._ask(one, {"slot": slot, "actions": given.tobytes(), "dtype": given.dtype.str, "shape": given.shape})

    def collect(self, slots: Sequence[int], timeout: float | None = None) -> list[Reply]:
        """The answers of exactly these slots, in this order; each was asked something.

        Every wait ends by the deadlines of start and step; `timeout` is for callers that cannot wait that long.
        """
        awaited = [self._slot(number) for number in slots]
        if idle := [slot.number for slot in awaited if slot.asked is None]:
            raise ConfigError(f"slot {idle[0]} was asked nothing, so it has no answer: start or step it first.")
        if len({slot.number for slot in awaited}) < len(awaited):
            raise ConfigError(f"slots {list(slots)}: a slot has one answer, so name it once.")
        self._await(awaited, None if timeout is None else time.monotonic() + timeout)
        # all of them first: one answer may be an error that is raised
        taken = [(slot, *slot.take()) for slot in awaited]
        return [self._reply(*each) for each in taken]

    def busy(self, slots: Sequence[int]) -> bool:
        """Whether a worker is not done yet with what one of these slots was asked. Nothing is waited for."""
        asked = [slot for slot in map(self._slot, slots) if slot.asked is not None]
        while waiting := {
            slot.worker.pipe: slot.worker for slot in asked if slot.answer is None and slot.worker is not None
        }:
            ready = wait(list(waiting), 0)
            for pipe in ready:
                self._receive(waiting[pipe])  # type: ignore[index]
            if not ready:
                return True
        return False

    def describe(self, task: str) -> TaskDescription:
        """Returns ``instruction``, ``step_limit``, ``initial_states`` and ``action_dim`` of a
        task, which a worker creates for that."""
        if task not in self._about:
            self._open()
            slot = self._slots[-1]
            self._ask(slot, {"slot": slot.number, "task": task, "describe": True})
            self._await([slot], None)
            _, answer = slot.take()
            if "error" in answer:
                raise _revived(answer) or HiltError(f"{task} could not be made:\n{answer['error']}")
            self._about[task] = answer["about"]
        return self._about[task].copy()

    def close(self) -> None:
        """Ends the workers; they close their environments first."""
        if self._here is not None:
            self._here.close()
        self._close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _open(self) -> None:
        if not self._close.alive:
            raise ClosedError("the pool is closed; make another one.")

    def _slot(self, number: int) -> _Slot:
        self._open()
        if not 0 <= number < self.slots:
            raise ConfigError(f"slot {number}: this pool has the slots 0 to {self.slots - 1}.")
        return self._slots[number]

    def _free(self, number: int) -> _Slot:
        slot = self._slot(number)
        if slot.asked is not None:
            raise ConfigError(f"slot {number} has an answer that was not collected: collect([{number}]) first.")
        if slot.worker is not None and not slot.worker.queue and slot.worker.is_dead():
            self._restart(slot.worker, "died", hangs=False)
        return slot

    def _ask(self, slot: _Slot, asked: dict[str, Any]) -> None:
        prefix = asked.get("task", "").partition("/")[0]
        if self._here is None and self._factories.get(prefix, "") is None:
            cure = f"register({prefix!r}, 'package.module:factory') before the pool is made, or give workers=0"
            raise ConfigError(f"{asked['task']}: a worker process cannot import what makes it; {cure}.")
        slot.asked = asked
        if self._here is not None:
            slot.answer = self._here.answer(asked)
            return
        assert slot.worker is not None
        slot.worker.ask(asked)

    def _await(self, awaited: Sequence[_Slot], deadline: float | None) -> None:
        while waiting := [slot for slot in awaited if slot.answer is None]:
            workers = {slot.worker.pipe: slot.worker for slot in waiting if slot.worker is not None}
            now = time.monotonic()
            due = min(self._due(worker) for worker in workers.values())
            ready = wait(list(workers), max(0.0, (due if deadline is None else min(due, deadline)) - now))
            for pipe in ready:
                self._receive(workers[pipe])  # type: ignore[index]
            if ready:
                continue
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(
                    f"slots {[slot.number for slot in waiting]} have not answered in time; their workers go on."
                )
            for worker in [worker for worker in workers.values() if self._due(worker) <= time.monotonic()]:
                self._restart(worker, f"did not answer within {self._due(worker) - worker.since:g} s", hangs=True)

    def _due(self, worker: _Worker) -> float:
        """When the worker must have answered what it does now."""
        return worker.since + (self._step_s if "actions" in worker.queue[0] else self._start_s)

    def _receive(self, worker: _Worker) -> None:
        try:
            answer = msgpack.unpackb(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._restart(worker, "died", hangs=False)
            return
        worker.queue.popleft()
        worker.since = time.monotonic()
        if answer.get("terminated") or answer.get("truncated"):
            worker.failures = 0
        self._slots[answer["slot"]].answer = answer

    def _restart(self, worker: _Worker, why: str, hangs: bool) -> None:
        """The episodes of a worker are lost with it; what it had not begun yet is asked of the next process."""
        doing, *later = worker.queue or [{}]
        code, output = worker.stop(hangs)
        self.counts["restarts"] += 1
        worker.failures += 1
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        error = (
            f"worker {worker.number} {why} ({how}) while it did {_words(doing)}; its last "
            f"output:\n{output or '(nothing)'}"
        )
        if worker.failures > self._restarts:
            self.close()
            raise HiltError(
                f"{worker.failures} failures of a worker without an episode that ended between them. The last: {error}"
            )
        worker.start()
        begun = [asked for asked in later if "actions" not in asked]
        waiting = {asked["slot"] for asked in begun}
        for slot in worker.slots:
            over = slot.answer is not None and any(slot.answer.get(key) for key in ("terminated", "truncated", "error"))
            if slot.running and not over and not slot.lost and slot.number not in waiting:
                slot.lost = error
                self.counts["lost"] += 1
                if slot.asked is not None and slot.answer is None:
                    slot.answer = {"slot": slot.number, "error": error}
        if "describe" in doing:
            self._slots[-1].answer = {"slot": self.slots, "error": error}
        for asked in begun:
            worker.ask(asked)

    def _reply(self, slot: _Slot, asked: dict[str, Any], answer: dict[str, Any]) -> Reply:
        if error := answer.get("error", ""):
            slot.running = False
            self.counts["lost"] += not slot.lost
            if "task" in asked and (wrong := _revived(answer)):
                raise wrong
            return Reply(slot.number, {}, "", np.zeros(0, np.float32), 0, False, False, False, error)
        rewards = np.frombuffer(answer["rewards"], np.float32)
        ends = bool(answer["terminated"]), bool(answer["truncated"])
        slot.running = not any(ends)
        seen = slot.frames.read(answer["layout"])
        return Reply(slot.number, seen, answer["instruction"], rewards, len(rewards), *ends, answer["success"])


@dataclass
class _Slot:
    """What the caller's process knows of a slot."""

    number: int
    frames: Frames = field(default_factory=lambda: Frames(platform.anonymous_file("hilt-frames")))
    worker: _Worker | None = None
    asked: dict[str, Any] | None = None
    """What it was asked, until its answer is collected"""
    answer: dict[str, Any] | None = None
    running: bool = False
    """Whether it has an episode that is not over"""
    lost: str = ""
    """Why that episode cannot continue, to be returned by the next request"""

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self.asked is not None and self.answer is not None
        taken = self.asked, self.answer
        self.asked = self.answer = None
        return taken


class _Worker:
    """One process, as the caller's process sees it."""

    pipe: Connection

    def __init__(self, number: int, config: dict[str, Any], slots: Sequence[_Slot]):
        self.number, self.slots = number, slots
        self.queue: deque[dict[str, Any]] = deque()
        """What it was asked and has not answered; it does the first of these"""
        self.since = 0.0
        self.failures = 0
        self._config = config
        self._process: ChildProcess | None = None
        for slot in slots:
            slot.worker = self

    def start(self) -> None:
        self.pipe, theirs = platform.message_pipe()
        alive, self._alive = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        frames = {slot.number: slot.frames.descriptor for slot in self.slots}
        config = {**self._config, "pipe": theirs.fileno(), "alive": alive, "frames": frames, "path": sys.path}
        self._process = ChildProcess(
            run_code(BEGIN, json.dumps(config)),
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno(), alive, *frames.values()],
            env={**ONE_THREAD, **os.environ},
        )
        theirs.close()
        os.close(alive)
        self.queue.clear()

    def ask(self, asked: dict[str, Any]) -> None:
        if not self.queue:
            self.since = time.monotonic()
        self.queue.append(asked)
        # its death is noticed when its reply is awaited
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(msgpack.packb(asked))

    def is_dead(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def stop(self, hangs: bool) -> tuple[int, str]:
        """(how it ended, what it printed last). One that hangs is asked where, by a signal that kills it."""
        assert self._process is not None
        if hangs:
            self._process.send_signal(signal.SIGABRT)
        code = self._process.end(ABORT_S)
        size = os.fstat(self._output.fileno()).st_size
        output = (
            os.pread(self._output.fileno(), OUTPUT_BYTES, max(0, size - OUTPUT_BYTES)).decode(errors="replace").strip()
        )
        self._release()
        return code, output

    def _release(self) -> None:
        self._process = None
        self.pipe.close()
        os.close(self._alive)
        self._output.close()

    def hang_up(self) -> None:
        """It closes its environments and ends."""
        if self._process is not None:
            self.pipe.close()

    def end(self, deadline: float) -> None:
        if self._process is None:
            return
        self._process.end(deadline - time.monotonic())
        self._release()


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.hang_up()
    deadline = time.monotonic() + CLOSE_S
    for worker in workers:
        worker.end(deadline)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as a worker gets them, also where there are none."""
    try:
        return dict(json.loads(json.dumps(dict(options))))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task_options: {error}; a worker process gets plain values: numbers, texts, lists and dictionaries."
        ) from None


def _revived(answer: Mapping[str, Any]) -> Exception | None:
    """The error of a worker, where no other try would mend it."""
    if (kind := answer.get("kind")) not in ASKED_WRONGLY:
        return None
    raised: type[Exception] = getattr(errors, kind)
    error = raised.__new__(raised)  # without its own __init__, whose arguments are not known here
    Exception.__init__(error, answer["text"])
    error.__cause__ = HiltError(f"in a worker of the pool:\n{answer['error']}")
    return error


def _words(asked: Mapping[str, Any]) -> str:
    if not asked:
        return "nothing"
    if "actions" in asked:
        return f"a step of slot {asked['slot']}"
    return (
        f"the making of {asked['task']}"
        if "describe" in asked
        else f"the start of {asked['task']} ({asked['split']} {asked['state']})"
    )
