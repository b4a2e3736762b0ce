"""The processes of a session."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def members(session: int) -> list[int]:
    """The processes of a session that still do something."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
            found += [int(path.parent.name)] if int(sid) == session and state not in "ZX" else []
    return found
