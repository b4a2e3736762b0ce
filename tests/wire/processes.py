"""Actors and a learner as real processes, to be killed, paused and started again, and the proxies between them.

They are forked from a server that has imported everything, so that starting one takes milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.wire import actor_main, learner_main
from tests.wire.journal import said, wait_for
from tests.wire.steps import STORES, Arrived, Life, check_log

DEADLINE_S = 120
PORTS, WORKERS = (15_000, 32_000), 8
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.replay.writers", "tests.wire.processes"])


class Child:
    """A process of ours, seen from outside."""

    def __init__(
        self, main: Callable[[Sequence[str]], None], words: Sequence[Any], output: Path, prefix: Sequence[str] = ()
    ):
        """With a `prefix`, a command such as ``ip netns exec NAME``, it is started anew, by that command."""
        text = [str(word) for word in words]
        self.output, self._popen, self._process = output, None, None
        if prefix:
            with output.open("ab") as file:
                command = [*prefix, sys.executable, "-m", main.__module__, *text]
                self._popen = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
            self.pid = self._popen.pid
        else:
            self._process = _context.Process(target=_run, args=(main, text, str(output)), daemon=True)
            self._process.start()
            assert self._process.pid is not None
            self.pid = self._process.pid

    def alive(self) -> bool:
        return self._popen.poll() is None if self._popen else bool(self._process and self._process.is_alive())

    def signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.join()

    def terminate(self) -> None:
        """Asks it to stop; whoever is paused goes on first."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def join(self, seconds: float = DEADLINE_S) -> int | None:
        if self._popen:
            return self._popen.wait(seconds)
        assert self._process is not None
        self._process.join(seconds)
        assert self._process.exitcode is not None, (
            f"the process does not end within {seconds:g} s; its output is in {self.output}"
        )
        return self._process.exitcode

    def memory_bytes(self) -> int:
        """What it holds for itself: not the files it has mapped."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon in /proc")


def _run(main: Callable[[Sequence[str]], None], words: Sequence[str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(words)


class Learner:
    """A learner on one folder and two ports, over all its lives."""

    def __init__(self, folder: Path, *options: Any, port: int = 0, broadcast: int = 0, prefix: Sequence[str] = ()):
        self.folder, self.journal = folder / "learner", folder / "learner.journal"
        self.port, self.broadcast = port or free_port(), broadcast or free_port()
        self._options, self._prefix, self._output = options, prefix, folder / "learner.output"
        self.lives = 0
        self.child = self._start()

    def _start(self) -> Child:
        words = [
            "--folder",
            self.folder,
            "--port",
            self.port,
            "--broadcast",
            self.broadcast,
            "--journal",
            self.journal,
            *self._options,
        ]
        self.lives += 1
        return Child(learner_main.main, words, self._output, self._prefix)

    def restart(self) -> None:
        self.child = self._start()

    def wait_ready(self, lives: int = 1) -> None:
        wait_for(
            lambda: len(said(self.journal, "ready")) >= lives or said(self.journal, "error"), "the learner", DEADLINE_S
        )
        self.check_errors()

    def check_errors(self) -> None:
        errors = said(self.journal, "error")
        assert not errors, f"the learner failed: {' '.join(errors[0][1:])}"

    def published(self) -> int:
        return max((int(line[1]) for line in said(self.journal, "published")), default=0)

    def stop(self) -> None:
        self.child.terminate()
        assert self.child.join() == 0, f"the learner ended badly; its output is in {self._output}"
        self.check_errors()


class Actor:
    """An actor, over all its lives."""

    def __init__(
        self, folder: Path, number: int, ports: Sequence[int], *options: Any, disk: bool, prefix: Sequence[str] = ()
    ):
        self.number, self.disk, self._folder, self._ports = number, disk, folder, ports
        self._options, self._prefix, self._output = options, prefix, folder / f"actor-{number}.output"
        self.lives = 0
        self.child = self._start()

    def _start(self) -> Child:
        self.lives += 1
        words: list[Any] = [
            "--number",
            self.number,
            "--life",
            self.lives - 1,
            "--port",
            self._ports[0],
            "--broadcast",
            self._ports[1],
        ]
        words += ["--journal", self.journal(self.lives - 1), *self._options]
        if self.disk:
            words += ["--spool", self._folder / f"spool-{self.number}"]
        return Child(actor_main.main, words, self._output, self._prefix)

    def restart(self) -> None:
        self.child = self._start()

    def journal(self, life: int | None = None) -> Path:
        return self._folder / f"actor-{self.number}.{self.lives - 1 if life is None else life}.journal"

    def journals(self) -> dict[Life, Path]:
        return {(self.number, life): self.journal(life) for life in range(self.lives)}

    def inserted(self) -> int:
        """By the process that runs now."""
        return len(said(self.journal(), "insert"))

    def check_errors(self) -> None:
        for path in self.journals().values():
            errors = said(path, "error")
            assert not errors, f"{path.name}: {' '.join(errors[0][1:])}"

    def check_weights(self) -> int:
        """Every version that arrived was whole, and newer than those before. Returns the last one."""
        last = 0
        for path in self.journals().values():
            seen = said(path, "weights")
            assert all(line[2] == "whole" for line in seen), (
                f"{path.name}: {next(line for line in seen if line[2] != 'whole')}"
            )
            versions = [int(line[1]) for line in seen]
            assert versions == sorted(set(versions)), f"{path.name}: weights went back: {versions}"
            last = versions[-1] if versions else 0
        return last

    def finish(self) -> None:
        """Waits until it has flushed and ended by itself, having been told to terminate."""
        code = self.child.join(DEADLINE_S + 30)
        self.check_errors()
        unflushed = said(self.journal(), "unflushed")
        assert not unflushed, f"actor {self.number} could not flush: {' '.join(unflushed[0][1:])}"
        assert code == 0 and said(self.journal(), "flushed"), (
            f"actor {self.number} ended with {code}; its output is in {self._output}"
        )


def end_all(actors: Sequence[Actor], learner: Learner) -> None:
    """Lets actors flush, then ends everybody."""
    for actor in actors:
        actor.child.terminate()
    for actor in actors:
        actor.finish()
    learner.stop()


def kill_all(*children: Child) -> None:
    for child in children:
        with contextlib.suppress(OSError, AssertionError, subprocess.TimeoutExpired):
            child.kill()


def check_exactly_once(learner: Learner, actors: Sequence[Actor]) -> dict[str, tuple[Arrived, dict[str, int]]]:
    """Compares the learner's logs with the journals of all actors."""
    journals = {life: path for actor in actors for life, path in actor.journals().items()}
    told = actor_main.told_by(journals)
    disk = [actor.number for actor in actors if actor.disk]
    found = {}
    for store in STORES:
        arrived, counts = check_log(learner.folder / store, store, told[store], disk)
        found[store] = (arrived, dict(counts))
    return found


def free_port() -> int:
    """Below the ports that the system gives to outgoing connections: one of those could take it while the learner is
    down. Never one that this process was given before, nor one of another process that runs tests: it is bound later,
    and until then nothing else says that it is taken."""
    return free_ports_in_a_row(1)


def free_ports_in_a_row(count: int) -> int:
    """The first of so many."""
    while True:
        ports = [_next_port() for _ in range(count)]
        if ports[-1] == ports[0] + count - 1 and not any(map(_is_taken, ports)):
            return ports[0]


def _is_taken(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return False
    return True


def _next_port() -> int:
    """Each worker of pytest-xdist has its own, from one by chance on: other runs of the tests begin elsewhere."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    each = (PORTS[1] - PORTS[0]) // WORKERS
    place = _places.setdefault(os.getpid(), random.SystemRandom().randrange(each))
    _places[os.getpid()] = (place + 1) % each
    return PORTS[0] + worker * each + place


_places: dict[int, int] = {}
"""By process: one that is forked has its own"""
