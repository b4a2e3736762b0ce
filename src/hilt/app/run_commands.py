"""What can be done with a run: commands that the app shows, and runs when a button is pressed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hilt.app.error_words import PageError
from hilt.app.run_library import RunSummary, tail
from hilt.core.children import ChildProcess, run_module
from hilt.core.signals import held_back
from hilt.runs.folder import COMMANDS

LIMITS = {
    "hil": ("max_steps", "max_env_steps", "max_seconds"),
    "vla": ("max_steps", "max_seconds"),
    "sft": ("max_steps",),
}
"""Settings that a button may give to a run that is resumed"""
VIDEOS = "3"
LAST_LINES = 12


@dataclass(frozen=True)
class RunCommand:
    """A command for a run; its name is the word ``command.NAME`` of the catalog."""

    name: str
    words: tuple[str, ...]
    confirm: bool = False
    """Whether the person is asked first"""

    @property
    def text(self) -> str:
        """The command as it is typed in a terminal."""
        return shlex.join(self.words)


def commands_of(run: RunSummary) -> list[RunCommand]:
    """The commands that make sense for a run as it is now."""
    found: list[RunCommand] = []
    if run.remote:  # what is followed of another machine can be looked at, and nothing else
        return found
    if run.writer:
        if pid := controller_of(run.path):
            found.append(RunCommand("stop", ("kill", "-INT", str(pid)), confirm=True))
    elif run.kind in COMMANDS and run.metadata:
        found.append(RunCommand("resume", resume_words(run), confirm=True))
        if run.alarms:
            found.append(RunCommand("go_back", (*resume_words(run)[:-1], "--from-last-good"), confirm=True))
    if run.metadata:
        found.append(evaluate_command(run))
    found.append(RunCommand("plot", ("hilt", "plot", str(run.path))))
    return found


def evaluate_command(run: RunSummary) -> RunCommand:
    """The command that evaluates a run and makes videos."""
    return RunCommand("evaluate", ("hilt", "eval", str(run.path), "--videos", VIDEOS))


def resume_words(run: RunSummary, limits: str = "") -> tuple[str, ...]:
    """The command that resumes a run, with other limits such as ``max_steps=2000``."""
    known, given = LIMITS.get(run.kind, ()), limits.split()
    for word in given:
        key, _, value = word.partition("=")
        if key not in known or not re.fullmatch(r"\d+(\.\d+)?", value):
            raise PageError("error.limit", given=word, known=", ".join(f"{name}=N" for name in known))
    train = ("hilt", "train", "sft") if run.kind == "sft" else ("hilt", "train")
    return (*train, *given, "--run", str(run.path), "--resume")


def controller_of(run: Path) -> int:
    """The process on this machine that ends the run in order when it is interrupted; 0 if it is not known.

    The lock names the process that learns. Where `hilt train` has started it, signals are left to that one.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads((run / "writer.lock").read_bytes())
        if holder["host"] != socket.gethostname():
            return 0
        pid = int(holder["pid"])
        parent = _ps("ppid=", pid)
        return int(parent) if re.search(r"hilt\S* (train|demo)\b", _ps("args=", int(parent))) else pid
    return 0


def _ps(column: str, pid: int) -> str:
    done = subprocess.run(["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip()


@dataclass
class StartedCommand:
    """A command that the app has started."""

    text: str
    process: ChildProcess
    output: Path
    answer: Path | None = None
    """What it prints on its standard output, where that is kept apart"""
    began: float = field(default_factory=time.time)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def lines(self) -> list[str]:
        """The last lines that it printed."""
        return tail(self.output, LAST_LINES)

    def stop(self) -> None:
        """Asks it to end, as Ctrl-C does."""
        if self.code is None:
            self.process.send_signal(signal.SIGINT)


class CommandRunner:
    """Starts commands of `hilt`, one at a time for each run or other key. They go on when the app ends."""

    def __init__(self) -> None:
        self.started: dict[str, StartedCommand] = {}
        """The newest of each run, by its id, or by another key"""
        self._folder = Path(tempfile.mkdtemp(prefix="hilt-open-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._lock = threading.Lock()

    def run(self, run: RunSummary, command: RunCommand) -> None:
        """Starts a command for a run, or sends the signal that it sends."""
        if command.name == "stop":
            if command not in commands_of(run):
                raise PageError("error.not_at_work", run=run.name)
            os.kill(int(command.words[-1]), signal.SIGINT)
            return
        self.start(run.id, command.words)

    def start(self, key: str, words: Sequence[str], apart: bool = False) -> StartedCommand:
        """Starts a command of `hilt`. `apart`: its standard output is an answer, and kept apart from what else it
        prints."""
        with self._lock:
            before = self.started.get(key)
            if before is not None and before.code is None:
                raise PageError("error.still_running", command=before.text)
            output, answer = self._folder / f"{key}.txt", self._folder / f"{key}.json" if apart else None
            process = _start(words[1:], output, answer)
            self.started[key] = StartedCommand(shlex.join(words), process, output, answer)
            return self.started[key]


def _start(words: Sequence[str], output: Path, answer: Path | None) -> ChildProcess:
    with (
        output.open("wb") as out,
        contextlib.nullcontext(out) if answer is None else answer.open("wb") as first,
        held_back(),  # until it remembers interrupts: Python can lose one while it starts
    ):
        return ChildProcess(
            run_module("hilt", *words), leaves_signals=False, stdout=first, stderr=out, start_new_session=True
        )
