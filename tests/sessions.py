"""The processes of a session, and those that a process has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def members(session: int) -> list[int]:
    """The processes of a session that still do something."""
    return [pid for pid, _, sid in _running() if sid == session]


def children(process: int) -> list[int]:
    """The processes that a process has started, and that still do something."""
    return [pid for pid, parent, _ in _running() if parent == process]


def _running() -> Iterator[tuple[int, int, int]]:
    """Each process of the machine, its parent and its session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield int(path.parent.name), int(parent), int(session)
