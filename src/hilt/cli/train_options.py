"""What commands have in common: options of the command line, the name of a run's folder, and the exit code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hilt.core.trust import trust

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, such as batch_size=128.", show_default=False)
]
Run = Annotated[
    Path | None, typer.Option("--run", metavar="FOLDER", help="Where the run is kept.", show_default="runs/RECIPE")
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE",
        help="Code of this module may run although only a file names it; remembered for that file.",
        callback=lambda words: trust(*words or ()),
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder, with its settings.")]

FromLastGood = Annotated[
    bool,
    typer.Option("--from-last-good", help="Go on from the newest checkpoint before the alarm; nothing is deleted."),
]


def option_values(given: list[str] | None) -> dict[str, object]:
    """``NAME=VALUE``, where a value is a number, true, false or null, and text otherwise."""
    out: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r}: expected NAME=VALUE.")
        try:
            out[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            out[name.replace("-", "_")] = value
    return out


def go_back(run: Path, dry_run: bool = False) -> None:
    """Goes back to the last good checkpoint of a run, or shows what that would be."""
    from hilt.runs import last_good

    found = last_good.last_good(run) if dry_run else last_good.go_back(run)
    typer.echo(found.text)


def plain(text: str) -> str:
    """A text as the name of a file or folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")


def leave(stopped: list[int]) -> None:
    """Ends the command with the exit code of the first signal that stopped it, if one did."""
    sys.stdout.flush()
    if stopped:
        raise typer.Exit(128 + stopped[0])
