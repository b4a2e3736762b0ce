"""Processes that Hilt starts do not run what lies in the current folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hilt
from hilt.core import children

SOURCE = Path(hilt.__file__).parent
POISON = ("random", "secrets", "json", "runpy", "multiprocessing", "logging", "typer", "signal", "struct", "socket", "types", "enum")
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
    assert said(children.run_code("import json, random, sys; print(json.dumps(sys.argv[1:]))", "a", "b")) == '["a", "b"]\n'
    usage = subprocess.run(children.run_module("hilt.recording.film"), cwd=downloaded, capture_output=True, text=True, timeout=120)
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
    done = subprocess.run([sys.executable, "-m", "hilt", "--version"], cwd=downloaded, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_process_is_started_that_way():
    """Nothing else in the package names the interpreter or takes a context of multiprocessing."""
    found = [
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        for match in re.finditer(r"sys\.executable|get_context\(|multiprocessing\.(Process|Pool)\b", path.read_text())
        if path.name != "children.py"
    ]
    assert found == []
