"""Processes that Hilt starts do not run what lies in the current folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hilt
from hilt.core import children
from hilt.core.signals import leave_to_parent

SOURCE = Path(hilt.__file__).parent
POISON = (
    "random",
    "secrets",
    "json",
    "runpy",
    "multiprocessing",
    "logging",
    "typer",
    "signal",
    "struct",
    "socket",
    "types",
    "enum",
)
START = """
import sys
from hilt.core import children
children.HAS_SAFE_PATH = {safe}
if __name__ == "__main__":
    context = children.process_context("{method}")
    process = context.Process(target=print, args=("started",))
    process.start()
    process.join(120)
    sys.exit(process.exitcode)
"""


@pytest.fixture
def downloaded(tmp_path: Path) -> Iterator[Path]:
    """A folder whose modules have the names of others; each leaves a file behind when it is run."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in POISON:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nraise SystemExit(99)\n")
    yield folder
    assert not (tmp_path / "was_run").exists()


@pytest.fixture(params=["as here", "without -P"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without -P":
        monkeypatch.setattr(children, "HAS_SAFE_PATH", False)


@pytest.mark.usefixtures("_both_ways")
def test_modules_and_code_are_run_without_the_current_folder(downloaded: Path):
    def said(command: list[str]) -> str:
        done = subprocess.run(command, cwd=downloaded, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said(children.run_module("hilt", "--version")) == f"hilt {hilt.__version__}\n"
    assert (
        said(children.run_code("import json, random, sys; print(json.dumps(sys.argv[1:]))", "a", "b")) == '["a", "b"]\n'
    )
    usage = subprocess.run(
        children.run_module("hilt.recording.film"), cwd=downloaded, capture_output=True, text=True, timeout=120
    )
    assert "main() missing 3 required positional arguments" in usage.stderr  # it got as far as its own arguments


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("safe", [children.HAS_SAFE_PATH, False])
def test_processes_of_multiprocessing_too(method: str, safe: bool, downloaded: Path, tmp_path: Path):
    script = tmp_path / "script.py"  # beside the folder: its own place is on its path, as it should be
    script.write_text(START.format(method=method, safe=safe))
    done = subprocess.run([sys.executable, script], cwd=downloaded, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_hilt_as_a_module_takes_nothing_from_the_current_folder(downloaded: Path):
    """`python -m` itself has the folder on its path until our first line."""
    for name in ("runpy", "types", "enum", "signal", "struct", "socket", "logging"):
        (downloaded / f"{name}.py").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "hilt", "--version"], cwd=downloaded, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_every_process_is_started_that_way():
    """Nothing else in the package names the interpreter or takes a context of multiprocessing."""
    found = [
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        for match in re.finditer(r"sys\.executable|\bget_context\(|multiprocessing\.(Process|Pool)\b", path.read_text())
        if path.name != "children.py"
    ]
    assert found == []


BLOCKED = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True); "


@pytest.mark.parametrize("leaves_signals", [True, False])
def test_child_process_begins_with_signals_blocked_if_it_leaves_them_to_its_parent(leaves_signals: bool):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = children.ChildProcess(children.run_code(BLOCKED), leaves_signals, stdout=subprocess.PIPE, text=True)
    said = child.communicate(timeout=120)[0]
    assert ("SIGTERM" in said) == leaves_signals and child.end() == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_child_process_is_killed_when_it_does_not_end_in_time():
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    )
    child = children.ChildProcess(children.run_code(code), stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n" and not child.ends_within(0) and not child.ends_within(-1)
    child.terminate()
    assert child.end(0.1) == -signal.SIGKILL and child.ends_within(0) and child.end() == -signal.SIGKILL
    child.stdout.close()


def test_child_process_has_an_empty_input():
    child = children.ChildProcess(
        children.run_code("import sys; print(len(sys.stdin.read()))"), stdout=subprocess.PIPE, text=True
    )
    assert child.communicate(timeout=120)[0] == "0\n"


def _answer(pipe: Any, factor: int) -> None:
    leave_to_parent()
    while number := pipe.recv():
        pipe.send(factor * number)
    raise SystemExit(3)


def test_piped_process_answers_and_ends_with_its_code_or_is_killed():
    first, second = (children.PipedProcess(_answer, 7, name="hilt-test") for _ in range(2))
    for process in (first, second):
        process.pipe.send(6)
        assert process.pipe.poll(120) and process.pipe.recv() == 42
    os.kill(first.pid, signal.SIGTERM)  # which is left to the parent
    first.pipe.send(0)
    assert first.exit_code(120) == 3 and not first.is_alive() and second.is_alive() and second.exit_code(0) is None
    for process in (first, second):
        process.end()
        assert process.pipe.closed
    assert second.exit_code(0) == -signal.SIGKILL


def test_final_error_is_the_one_with_which_an_output_ends():
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1', "    x", "ValueError: no", "more of it"]
    final_error = children.final_error
    assert final_error(["12:00:00 begins", *trace]) == "ValueError: no"
    assert final_error([*trace, "12:00:00 begins"]) == final_error([]) == final_error(["all is well"]) == ""
    assert final_error([*trace, "error: the arm is away.", "Switch it on."]) == "the arm is away."
