"""Processes that write to a log, in order to be killed.

They are forked from a server that has imported everything, so that starting one takes milliseconds. Each reports over a
pipe what a call promised, as soon as the call has returned.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.files import DISK, Files
from hilt.replay import Log
from tests.replay.known_steps import IMAGE, SPACING, columns, length, make_log, trajectory

DEADLINE_S = 120
NEVER = 0
"""As the number of the call before which a writer waits to be killed."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.replay.writers"])


class Writer:
    """One writing process, seen from outside."""

    def __init__(self, target: Callable[..., None], *arguments: Any):
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.reports: list[Any] = []

    def listen(self, seconds: float, *until: str) -> None:
        """Takes in reports for so long, or until one of these kinds came."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.pipe.poll(left):
            try:
                self.reports.append(self.pipe.recv())
            except (EOFError, ConnectionResetError):
                return
            if self.reports[-1][0] in until:
                return

    def kill(self) -> None:
        """SIGKILL, and whatever the process had reported before."""
        self._process.kill()
        ended = self.join()
        assert ended in (0, -signal.SIGKILL), f"the writing process ended by itself, with {ended}"
        while self.pipe.poll():
            try:
                self.reports.append(self.pipe.recv())
            except (EOFError, ConnectionResetError):
                break
        self.pipe.close()

    def join(self) -> int | None:
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, "the writing process does not end"
        return self._process.exitcode

    def failures(self) -> list[str]:
        return [report[1] for report in self.reports if report[0] == "failed"]


def write_forever(pipe: Connection, folder: Path, first_seed: int, seed: int) -> None:
    """Appends steps of two running episodes, trajectories and facts, in random order, until it is killed."""
    try:
        rng = np.random.default_rng(seed)
        log = Log.open(folder)
        pipe.send(("opened",))
        fresh = iter(range(first_seed, first_seed + 10**9, SPACING))
        running: dict[str, Any] = {}
        last = -1
        while True:
            what = rng.choice(["left", "right", "trajectory", "fact"], p=[0.4, 0.4, 0.1, 0.1])
            if what == "fact" and last >= 0:
                value = time.monotonic()
                log.annotate(last, tag=value)
                pipe.send(("fact", last, value))
            elif what == "trajectory":
                episode, (steps, width) = next(fresh), rng.integers(1, 5, size=2).tolist()
                last = log.add(trajectory(episode, steps, width), actor="batch")
                pipe.send(("trajectory", last, episode, steps, width))
            elif what != "fact":
                if what not in running:
                    running[what] = (log.episode(actor=what), next(fresh))
                episode, number = running[what]
                t = episode.steps
                key = episode.append(columns(number, t))
                last = episode.trajectory
                pipe.send(("step", key, number, t))
                if t == length(number) - 1:
                    del running[what]
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


def add_forever(pipe: Connection, folder: Path, first_seed: int, seed: int) -> None:
    """Adds whole trajectories, until it is killed."""
    try:
        rng = np.random.default_rng(seed)
        log = Log.open(folder)
        pipe.send(("opened",))
        for episode in range(first_seed, first_seed + 10**9, SPACING):
            steps, width = rng.integers(1, 5, size=2).tolist()
            pipe.send(("trajectory", log.add(trajectory(episode, steps, width)), episode, steps, width))
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


class Announcing(Files):
    """Counts system calls, says before one of them which it is, and waits there to
    be killed. A write is made in two halves.

    So the process is killed right before that call, or in the middle of that write.
    """

    def __init__(self, pipe: Connection, stop_at: int):
        self._pipe, self._stop_at, self._lock = pipe, stop_at, threading.Lock()
        self.calls: list[str] = []
        self.armed = False

    def _say(self, call: str, about: Path | int) -> None:
        if self.armed:
            with self._lock:
                name = Path(os.readlink(f"/proc/self/fd/{about}")).name if isinstance(about, int) else about.name
                self.calls.append(f"{call} {name}")
                if len(self.calls) == self._stop_at:
                    self._pipe.send(("call", self.calls[-1]))
                    time.sleep(DEADLINE_S)

    def create(self, path: Path) -> int:
        self._say("create", path)
        return super().create(path)

    def write(self, fd: int, data: Any, offset: int) -> None:
        if not self.armed:
            super().write(fd, data, offset)
            return
        raw = bytes(memoryview(data).cast("B"))
        self._say("write", fd)
        super().write(fd, raw[: len(raw) // 2], offset)
        self._say("second half of write", fd)
        super().write(fd, raw[len(raw) // 2 :], offset + len(raw) // 2)

    def write_all(self, fd: int, buffers: Sequence[Any], offset: int) -> None:
        if not self.armed:
            super().write_all(fd, buffers, offset)
            return
        self.write(fd, b"".join(bytes(memoryview(b).cast("B")) for b in buffers), offset)

    def truncate(self, fd: int, size: int) -> None:
        self._say("truncate", fd)
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._say("sync", fd)
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._say("sync folder", path)
        super().sync_folder(path)

    def make_folder(self, path: Path) -> None:
        if not path.exists():
            self._say("make folder", path)
        super().make_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._say("rename to", target)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        if self.armed and path.is_dir():
            for inner in sorted(path.iterdir()):
                self.remove(inner)
        if path.exists():
            self._say("remove", path)
        super().remove(path)


def write_once(pipe: Connection, folder: Path, place: str, stop_at: int) -> None:
    """Does what leads to one commit, then that commit up to one of its system calls."""
    try:
        files = Announcing(pipe, stop_at)
        PLACES[place](_Reporter(pipe, files), folder)
        files.armed = False
        pipe.send(("done", files.calls))
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


class _Reporter:
    """Writes to a log and reports each promise."""

    def __init__(self, pipe: Connection, files: Announcing):
        self.pipe, self.files = pipe, files

    def open(self, folder: Path, **changes: Any) -> Log:
        return Log.open(folder, files=self.files, **changes)

    def steps(self, episode: Any, seed: int, count: int) -> None:
        for _ in range(count):
            t = episode.steps
            self.pipe.send(("step", episode.append(columns(seed, t)), seed, t))

    def add(self, log: Log, seed: int, steps: int, width: int) -> int:
        number = log.add(trajectory(seed, steps, width))
        self.pipe.send(("trajectory", number, seed, steps, width))
        return number


LONG = SPACING * 10
"""The seed of an episode of 14 steps: longer than a segment."""


def _a_step(do: _Reporter, folder: Path) -> None:
    episode = do.open(folder).episode(actor="a")
    do.steps(episode, LONG, 3)
    do.files.armed = True
    do.steps(episode, LONG, 1)


def _a_step_power_safe(do: _Reporter, folder: Path) -> None:
    episode = do.open(folder, durability="every step").episode(actor="a")
    do.steps(episode, LONG, 3)
    do.files.armed = True
    do.steps(episode, LONG, 1)


def _the_first_step(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    log.active_segments.acquire()
    do.files.armed = True
    do.steps(log.episode(actor="new"), LONG, 1)


def _the_last_step(do: _Reporter, folder: Path) -> None:
    episode = do.open(folder).episode(actor="a")
    do.steps(episode, 0, length(0) - 1)
    do.files.armed = True
    do.steps(episode, 0, 1)


def _a_trajectory(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    do.files.armed = True
    do.add(log, SPACING, 4, 2)


def _a_trajectory_over_segments(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    do.files.armed = True
    do.add(log, SPACING, 10, 3)


def _a_full_segment(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    episode = log.episode(actor="a")
    while log.active_segments.has_room(episode._active):
        do.steps(episode, LONG, 1)
    do.files.armed = True
    do.steps(episode, LONG, 1)


def _compression(do: _Reporter, folder: Path) -> None:
    log = do.open(folder, compression={IMAGE: "zlib"})
    do.add(log, SPACING, 4, 2)
    do.files.armed = True
    do.add(log, 2 * SPACING, 4, 2)
    log.compress()


def _eviction(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    for i in range(2, 12):
        do.add(log, i * SPACING, 4, 2)
    log.settings["capacity_steps"] = len(log)
    do.files.armed = True
    do.add(log, SPACING, 4, 2)


def _deletion(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    numbers = [do.add(log, i * SPACING, 4, 3) for i in range(1, 4)]
    do.files.armed = True
    do.pipe.send(("deleting", numbers[1]))
    log.delete(numbers[1])
    do.pipe.send(("deleted", numbers[1]))


def _a_fact(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    number = do.add(log, SPACING, 4, 2)
    do.files.armed = True
    log.annotate(number, tag=1)
    do.pipe.send(("fact", number, 1))


def _facts_with_a_trajectory(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    do.files.armed = True
    number = log.add(trajectory(SPACING, 4, 2), actor="who", facts={"tag": 1})
    do.pipe.send(("trajectory", number, SPACING, 4, 2))
    do.pipe.send(("fact", number, 1))


def _closing(do: _Reporter, folder: Path) -> None:
    log = do.open(folder)
    do.steps(log.episode(actor="a"), LONG, 3)
    do.files.armed = True
    log.close()


def _opening(do: _Reporter, folder: Path) -> None:
    """The log has a torn tail in every file, and leftovers: `torn` in the tests makes them."""
    do.files.armed = True
    do.open(folder, capacity_steps=10**6)


def _mending(do: _Reporter, folder: Path) -> None:
    """One segment has lost its header, another its seal, a third its rows: `spoil` in the tests makes it so."""
    do.files.armed = True
    do.open(folder)


def _compaction(do: _Reporter, folder: Path) -> None:
    """Most facts, or most edits, are about a trajectory that was deleted."""
    do.files.armed = True
    do.open(folder)


def _creation(do: _Reporter, folder: Path) -> None:
    do.files.armed = True
    log = make_log(folder / "inner" / "log", do.files)
    do.add(log, SPACING, 2, 2)


PLACES: dict[str, Callable[[_Reporter, Path], None]] = {
    "append a step": _a_step,
    "append a step, power-safe": _a_step_power_safe,
    "append the first step of a segment": _the_first_step,
    "append the last step of an episode": _the_last_step,
    "add a trajectory": _a_trajectory,
    "add a trajectory longer than a segment": _a_trajectory_over_segments,
    "seal a full segment and begin another": _a_full_segment,
    "compress a segment": _compression,
    "evict a trajectory and its segment": _eviction,
    "delete a trajectory": _deletion,
    "annotate": _a_fact,
    "add a trajectory with facts": _facts_with_a_trajectory,
    "close": _closing,
    "open after a crash": _opening,
    "open a damaged log": _mending,
    "open a log with many old facts": _compaction,
    "open a log with many old edits": _compaction,
    "create a log": _creation,
}

__all__ = ["DISK", "PLACES", "Announcing", "Writer", "write_forever", "write_once"]
