"""Commands that the app shows for a run, and starts."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hilt.app.check_page import CheckRunner
from hilt.app.run_commands import CommandRunner, RunCommand, commands_of, controller_of, resume_words
from hilt.app.run_library import RunSummary
from hilt.core.errors import ConfigError
from hilt.observe.metrics import Metrics
from hilt.replay.storage.lock import WriterLock
from tests.app.test_run_library import make_run, summary

HOLD = """
import sys, time
from pathlib import Path
from hilt.replay.storage.lock import WriterLock
with WriterLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_commands_fit_the_state_of_a_run(tmp_path: Path):
    run = make_run(tmp_path / "run")
    assert [one.text for one in commands_of(summary(run))] == [
        f"hilt train --run {run} --resume", f"hilt eval {run} --videos 3", f"hilt plot {run}",
    ]  # fmt: skip
    with WriterLock(run):
        assert [one.name for one in commands_of(summary(run))] == ["stop", "evaluate", "plot"]


def test_a_run_with_an_alarm_can_go_back_to_its_last_good_checkpoint(tmp_path: Path):
    run = make_run(tmp_path / "run")
    alarm = {"event": "alarm q_bound: Q is high.", "alarm": "q_bound", "alarm/q_bound": 1.0}
    with Metrics(run) as metrics:
        metrics.write("event", alarm, update=9, step=18)
    found = summary(run)
    assert found.alarms == ("q_bound",)
    [back] = [one for one in commands_of(found) if one.name == "go_back"]
    assert back.text == f"hilt train --run {run} --from-last-good" and back.confirm
    with Metrics(run) as metrics:
        metrics.write("event", {**alarm, "alarm/q_bound": 0.0}, update=10, step=18)
    assert "go_back" not in [one.name for one in commands_of(summary(run))]


def test_resume_takes_limits_and_nothing_else():
    run = RunSummary("a", Path("runs/a"), "a", kind="sft")
    assert resume_words(run, "max_steps=20") == ("hilt", "train", "sft", "max_steps=20", "--run", "runs/a", "--resume")
    for wrong in ("policy=module:attack", "--trust x", "max_steps", "max_steps=2;rm", "max_env_steps=3"):
        with pytest.raises(ConfigError, match="expected a limit and a number"):
            resume_words(run, wrong)


def test_stop_interrupts_the_process_that_holds_the_lock(tmp_path: Path):
    run = make_run(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert controller_of(run) == process.pid
        found = summary(run)
        CommandRunner().run(found, commands_of(found)[0])
        assert process.wait(60) in (1, -signal.SIGINT)
    with pytest.raises(ConfigError, match="not at work any more"):
        CommandRunner().run(summary(run), RunCommand("stop", ("kill", "-INT", str(os.getpid()))))


def test_started_command_shows_its_output_and_exit_code(tmp_path: Path):
    run, runner = summary(make_run(tmp_path / "run")), CommandRunner()
    runner.run(run, RunCommand("plot", ("hilt", "plot", str(tmp_path / "nothing"))))
    started, deadline = runner.started[run.id], time.monotonic() + 300
    started.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="is still running"):
        runner.run(run, RunCommand("plot", ("hilt", "plot", str(run.path))))
    started.process.send_signal(signal.SIGCONT)
    while started.code is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started.code == 1 and "is not a run" in "".join(started.lines())


def test_started_command_keeps_its_answer_apart_and_is_stopped(tmp_path: Path):
    runner = CommandRunner()
    started = runner.start("formats", ("hilt", "data", "formats"), apart=True)
    assert started.process.wait(300) == 0 and started.answer is not None
    assert "lerobot" in started.answer.read_text() and not started.lines()
    started = runner.start("open", ("hilt", "open", str(tmp_path), "--port", "0", "--no-browser"))
    deadline = time.monotonic() + 300
    while not started.lines() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "open http" in started.lines()[0]
    started.stop()
    assert started.process.wait(300) in (0, 130, -signal.SIGINT)
    started.stop()  # has no effect then


LOSES_AN_INTERRUPT = """
import os, signal, weakref

class Module: ...
def interrupt(reference): os.kill(os.getpid(), signal.SIGINT); [None for _ in range(1000)]

module = Module()
reference = weakref.ref(module, interrupt)
del module
"""


def test_started_command_is_stopped_while_python_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An exception in a callback, as Python's imports have them, is ignored: the command ran on."""
    (tmp_path / "sitecustomize.py").write_text(LOSES_AN_INTERRUPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    runner = CommandRunner()
    started = runner.start("formats", ("hilt", "data", "formats"))
    assert started.process.wait(300) == 130 and not started.lines()


def test_what_commands_printed_is_removed_with_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runners = [CommandRunner(), CheckRunner()]
    assert len(list(tmp_path.iterdir())) == 2
    del runners
    gc.collect()
    assert not list(tmp_path.iterdir())
