"""SIGINT, SIGTERM and SIGHUP to runs of real processes: to the controller alone, to its group, to its
session, once and again, in each phase. Whatever gets them, the controller saves every finished training step,
says how many, ends all others, and --resume goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hilt import cli
from hilt.core.checksums import read_json
from hilt.observe.metrics import read_metrics
from hilt.runs import checkpoint
from hilt.vla import sft  # imported once, in the server that runs are forked from
from hilt.vla import train as post_train
from tests.cli.test_train_sft import COLUMNS, TINY
from tests.effort import need
from tests.forked import find_tests_in_fork_servers
from tests.sessions import members
from tests.vla.taught import write_log
from tests.vla.toy_signals import NOTES, PHASE, WAIT_S, pausing

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
TOY = (
    "tests.vla.toy_vla:config",
    "--trust",
    "tests",
    "tasks=[tests.vla.toy_vla:up]",
    "solved_steps=0",
    "validation.episodes=1",
)
TOY = (*TOY, "validation.period=1", "max_steps=1000000")
PLACED = {
    "here": (),
    "processes": ("placement.kind=processes", "placement.ranks=2"),
    "ray": ("placement.kind=ray", "placement.ranks=2"),
}

TUNING = {
    "prepare": (sft, "make_policy", 1),
    "learn": (sft.Training, "_learn", 2),
    "judge": (sft.Training, "_validate", 2),
}
"""Phases of supervised fine-tuning: the call that waits"""


class Case(NamedTuple):
    """One life of a run, and how it is ended."""

    phase: str
    target: str = "group"
    """"process": the controller alone; "group" and "session": all of their processes;
    "terminal": the controller's, which is closed"""
    number: int = TERM
    times: int = 1
    pool: int = 0
    """Processes of simulators of each rank"""


class Life:
    """`hilt WORDS` in a process of its own session, which waits in a phase until it is told to go on."""

    def __init__(self, fork: Any, folder: Path, words: tuple[str, ...], phase: str, terminal: bool = False):
        self.notes, self.output = folder / f"notes-{len(list(folder.glob('notes-*')))}", folder / "output"
        self.notes.mkdir()
        self.master, slave = pty.openpty() if terminal else (-1, -1)
        name = os.ttyname(slave) if terminal else str(self.output)
        self.process = fork.Process(target=become, args=(words, name, self.notes, phase))
        self.process.start()
        self.pid = self.process.pid
        if terminal:
            self.wait(lambda: (self.notes / "there").exists(), "its terminal")
            os.close(slave)
            threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        with suppress(OSError), self.output.open("ab") as output:
            while shown := os.read(self.master, 1 << 16):
                output.write(shown)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not ready():
            assert self.process.is_alive(), f"it ended before {what}: {self.said()}"
            assert time.monotonic() < deadline, f"{what} took too long: {self.said()}"
            time.sleep(0.02)

    def send(self, case: Case) -> None:
        """Whatever the case says, when the phase is reached."""
        self.wait(lambda: (self.notes / "there").exists() and (self.notes / "paused").exists(), case.phase)
        # while ranks start, the first one may end the run before the second is sent
        with contextlib.suppress(ProcessLookupError):
            self._signal(case)
            if case.times > 1:  # two that are pending together are one: again until the second was handled
                time.sleep(1.0)
                self._signal(case)
                deadline = time.monotonic() + WAIT_S
                while case.phase != "start" and "kill -KILL" not in self.said() and time.monotonic() < deadline:
                    time.sleep(0.5)
                    self._signal(case)
            time.sleep(0.3)
        (self.notes / "go").touch()

    def _signal(self, case: Case) -> None:
        if case.target == "terminal":
            os.close(self.master)
        elif case.target == "process":
            os.kill(self.pid, case.number)
        else:
            for pid in members(self.pid) if case.target == "session" else [-self.pid]:
                os.kill(pid, case.number)

    def end(self) -> int:
        """Its exit status; nothing of its session is left."""
        self.process.join(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while left := members(self.pid):
            assert time.monotonic() < deadline, f"left behind: {left}: {self.said()}"
            time.sleep(0.02)
        assert self.process.exitcode is not None, self.said()
        return int(self.process.exitcode)

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


@contextlib.contextmanager
def ended(life: Life) -> Iterator[Life]:
    """Nothing of its session outlives a test that fails."""
    try:
        yield life
    finally:
        for pid in members(life.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def become(words: tuple[str, ...], output: str, notes: Path, phase: str) -> None:
    """In the new process: what `hilt` would have, and then `hilt`."""
    os.setsid()
    opened = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    if os.isatty(opened):
        fcntl.ioctl(opened, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(opened, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    (notes / "there").touch()
    own = forkserver.ForkServer()  # not the one that this process comes from, which is in another session
    forkserver._forkserver = own
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
        setattr(forkserver, name, getattr(own, name))
    # each rank makes an optimizer, which imports it
    forkserver.set_forkserver_preload = lambda modules: own.set_forkserver_preload([*modules, "torch._dynamo"])
    find_tests_in_fork_servers()
    os.environ |= {PHASE: phase, NOTES: str(notes), "OMP_NUM_THREADS": "1"}
    post_train.WORKER = "tests.vla.toy_signals:make_worker"
    if phase == "save":
        checkpoint.save = pausing(checkpoint.save, 1)
    elif phase in TUNING:
        place, name, call = TUNING[phase]
        setattr(place, name, pausing(getattr(place, name), call))
    sys.argv = ["hilt", *words]
    cli.main()


def steps_of(run: Path) -> int:
    """Training steps that were finished, as the metrics tell."""
    return (
        max((record["update"] for record in read_metrics(run, ["update"])), default=0)
        if (run / "metrics.jsonl").exists()
        else 0
    )


def check(life: Life, run: Path, case: Case, code: int, words: str = r"it was stopped: (\d+) training steps") -> int:
    """The checkpoint has every finished step, the line and run.json say so, the exit status names the first signal."""
    expected = HUP if case.target == "terminal" else case.number
    assert code == 128 + expected, f"{case}: {life.said()}"
    steps = max(checkpoint.numbers(run), default=0)
    assert steps == steps_of(run), f"{case}: {life.said()}"
    if case.target != "terminal":
        assert [int(found) for found in re.findall(words, life.said())][-1] == steps, f"{case}: {life.said()}"
    for word in ("Traceback", "is gone", "lost", "error"):
        assert word not in life.said(), f"{case}: {life.said()}"
    if case.times == 1 or case.phase != "start":
        assert ("kill -KILL" in life.said()) == (case.times > 1), f"{case}: {life.said()}"
    life.output.unlink(missing_ok=True)
    return steps


def lives(fork: Any, folder: Path, words: tuple[str, ...], cases: list[Case]) -> Path:
    """Each case is a life of the same run: it begins, or goes on where the one before was stopped."""
    run, before = folder / "run", 0
    for number, case in enumerate(cases):
        period = f"checkpoint_period={before + 1 if case.phase == 'save' else 1000}"
        given = ("train", "--run", str(run), *(("--resume",) if number else words), period, f"pool.workers={case.pool}")
        with ended(Life(fork, folder, given, case.phase, case.target == "terminal")) as life:
            life.send(case)
            steps = check(life, run, case, life.end())
        assert steps >= before + (case.phase != "start"), f"{case}: {steps} after {before}"
        assert read_json(run / "run.json")["ended"]["step"] == steps
        assert (run / "policy" / "config.json").is_file() == bool(steps), "of the first training step on"
        before = steps
    return run


@pytest.mark.timeout(900)
def test_a_signal_in_each_phase_of_a_run_in_one_process(fork: Any, memory_path: Path):
    cases = [
        Case("start", "process"),
        Case("collect", pool=1),
        Case("validate", "session", INT),
        Case("update", "terminal"),
    ]
    lives(fork, memory_path, TOY, cases)


@pytest.mark.timeout(900)
def test_a_signal_to_all_ranks_loses_no_training_step_and_they_end_when_the_controller_is_killed(
    fork: Any, memory_path: Path
):
    cases = [Case("collect"), Case("save", "session", times=2)]
    run = lives(fork, memory_path, (*TOY, *PLACED["processes"]), cases)
    with ended(Life(fork, memory_path, ("train", "--run", str(run), "--resume"), "update")) as last:
        last.wait(lambda: (last.notes / "paused").exists(), "update")
        assert len(members(last.pid)) >= 4, "the controller, the fork server and two ranks"
        os.kill(last.pid, signal.SIGKILL)
        assert last.end() == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("number", [TERM, INT, HUP])
@pytest.mark.parametrize("times", [1, 2])
def test_each_signal_to_each_target_in_each_phase(fork: Any, memory_path: Path, kind: str, number: int, times: int):
    need(*["ray"] * (kind == "ray"))
    phases, targets = ["start", "collect", "update", "validate", "save"], ["process", "group", "session"]
    cases = [Case(phase, target, number, times, pool=1) for phase in phases for target in targets]
    if kind == "ray":  # whose start takes up to a minute: over the three signals, each phase has each target once
        turn = [TERM, INT, HUP].index(number)
        cases = [Case(phase, targets[(place + turn) % 3], number, times, pool=1) for place, phase in enumerate(phases)]
    lives(fork, memory_path, (*TOY, *PLACED[kind]), cases)


def tuned(fork: Any, folder: Path, cases: list[Case]) -> None:
    """`lives` of supervised fine-tuning."""
    log, run, before = write_log(folder / "log", [(6, "go", True)] * 4), folder / "run", 0
    for number, case in enumerate(cases):
        words = (
            ("--resume",)
            if number
            else (str(log), COLUMNS, *TINY, "validation_period=2", "max_steps=100000", "patience=100000")
        )
        given = ("train", "sft", "--run", str(run), *words)
        with ended(Life(fork, folder, given, case.phase, case.target == "terminal")) as life:
            life.send(case)
            code, said = life.end(), life.said()
        steps = max(checkpoint.numbers(run), default=0)
        expected = HUP if case.target == "terminal" else case.number
        assert code == 128 + expected and "Traceback" not in said, f"{case}: {said}"
        assert steps >= before + (case.phase != "prepare"), f"{case}: {steps} after {before}: {said}"
        if case.target != "terminal":
            assert f"{steps:,} steps" in said and ("kill -KILL" in said) == (case.times > 1), f"{case}: {said}"
        life.output.unlink(missing_ok=True)
        before = steps


@pytest.mark.timeout(900)
def test_a_signal_in_each_phase_of_supervised_fine_tuning(fork: Any, memory_path: Path):
    tuned(fork, memory_path, [Case("learn"), Case("judge", "session", INT, 2), Case("save", "process", HUP, 2)])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_each_signal_to_each_target_in_each_phase_of_supervised_fine_tuning(fork: Any, memory_path: Path, number: int):
    targets = ["process", "group", "session"]
    cases = [
        Case(phase, target, number, times) for phase in (*TUNING, "save") for target in targets for times in (1, 2)
    ]
    tuned(fork, memory_path, [*cases, *[Case(phase, "terminal") for phase in (*TUNING, "save")] * (number == HUP)])
