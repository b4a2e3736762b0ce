"""How commands show things: sizes, tables, progress bars."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hilt.core.errors import optional_module
from hilt.core.progress import Move, Progress

if TYPE_CHECKING:
    from rich.table import Table


def human_bytes(size: float) -> str:
    """``98.4 kB``, as disks are sold: powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def table(*headers: str, rows: Sequence[Sequence[object]], title: str = "", right: Sequence[int] = ()) -> Table:
    """A plain table. Cells are texts: nothing in them is taken for a style."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title, "bold") if title else None, title_justify="left", box=None, pad_edge=False)
    for number, header in enumerate(headers):
        made.add_column(header, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


PROGRESS = Progress()
"""Of the command that this process runs"""


@contextlib.contextmanager
def progress_bar(title: str, unit: str = "", announce: bool = False) -> Iterator[Move]:
    """A phase of the command, moved by calling with (done, total): a bar in a terminal, a line every ten seconds elsewhere, the first of
    them at once if it is to be announced."""
    with PROGRESS.phase(title, unit=unit, announce=announce) as move:
        yield move


def heavy_module(name: str, purpose: str, extra: str, then: str = "") -> Any:
    """A module whose import may take many seconds, which is said before; what is lacking is told as by `optional_module`. `then`: a module
    of ours that brings others with it, for the same reason."""
    with PROGRESS.phase(f"importing {name}", announce=name not in sys.modules):
        found = optional_module(name, purpose, extra)
        if then:
            importlib.import_module(then)
    return found


CHECKING = "checking the settings and opening the task"
"""A phase of commands that begin a run"""
