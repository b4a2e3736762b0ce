"""What tests counted is printed at the end of the run, passed or not: how often a writer was killed, and where."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_COUNTED = pytest.StashKey[list[str]]()


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line in the summary of the run."""
    lines = request.config.stash.setdefault(_COUNTED, [])
    return lambda line: lines.append(f"{request.node.name}: {line}")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of syncs cost nothing there, and a killed process leaves the same bytes."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="hilt-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if lines := terminalreporter.config.stash.get(_COUNTED, []):
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.write_line(line)
