"""How commands show things: sizes, tables, progress bars."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from hilt.core.errors import optional_module
from hilt.core.progress import Move, Progress, printable

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
    """A plain table. Cells are texts: nothing in them is taken for a style, nor steers the terminal. Where a terminal
    is too narrow, long sentences are wrapped rather than names and numbers."""
    from rich.table import Table
    from rich.text import Text

    cells = [[cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row] for row in rows]
    whole = _unwrapped([[header, *(row[number].plain for row in cells)] for number, header in enumerate(headers)])
    made = Table(title=Text(title, "bold") if title else None, title_justify="left", box=None, pad_edge=False)
    for number, header in enumerate(headers):
        made.add_column(
            header, justify="right" if number in right else "left", overflow="fold", no_wrap=number in whole
        )
    for row in cells:
        made.add_row(*row)
    return made


def _unwrapped(columns: Sequence[Sequence[str]]) -> set[int]:
    """The columns that keep their whole width: those that cannot be wrapped at words first, then the narrowest, as long
    as the longest word of each other column fits."""
    from rich.console import Console

    widths = [max(map(len, texts)) for texts in columns]
    words = [max(len(word) for text in texts for word in text.split() or [""]) for texts in columns]
    order = sorted(range(len(columns)), key=lambda number: (words[number] < widths[number], widths[number]))
    left = Console().width
    for place, number in enumerate(order):
        left -= widths[number] + 2
        if left < sum(words[other] + 2 for other in order[place + 1 :]) - 2:
            return set(order[:place])
    return set(order)


PROGRESS = Progress()
"""Of the command that this process runs"""


@contextlib.contextmanager
def progress_bar(title: str, unit: str = "", announce: bool = False) -> Iterator[Move]:
    """A phase of the command, moved by calling with (done, total): a bar in a terminal, a line every ten seconds
    elsewhere, the first of them at once if it is to be announced."""
    with PROGRESS.phase(title, unit=unit, announce=announce) as move:
        yield move


def heavy_module(name: str, purpose: str, extra: str, then: str = "") -> ModuleType:
    """Imports a module that may take many seconds, and prints a message first. A missing package is
    reported as by `optional_module`. `then`: a module
    of Hilt that imports more of them, imported under the same message."""
    with PROGRESS.phase(f"importing {name}", announce=name not in sys.modules):
        found = optional_module(name, purpose, extra)
        if then:
            importlib.import_module(then)
    return found


def show_next(*commands: str) -> None:
    """Prints the usual next steps, as commands that can be pasted."""
    typer.echo("\nnext:\n" + "\n".join(f"  {command}" for command in commands))


def alarm_rows(training: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a table for the alarms that a training raised."""
    return [["ALARM", f"step {one['step']:,}: {one['text'].removeprefix('alarm ')}"] for one in training["alarms"]]


def shell(*words: object) -> str:
    """Words as a shell needs them quoted."""
    return shlex.join(map(str, words))


CHECKING = "checking the settings and opening the task"
"""A phase of commands that begin a run"""
