"""How commands show things: sizes, tables, progress bars."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

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


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal, moved by calling with (done, total). Elsewhere than on a terminal it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
