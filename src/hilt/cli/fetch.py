"""``hilt fetch`` and ``hilt push``: the only commands that use the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hilt.cli import hub_transfer as transfer
from hilt.cli.show import PROGRESS
from hilt.core import hub
from hilt.core.errors import ConfigError, FormatError
from hilt.formats import detect

MAX_NAMED = 5
"""Files that are named one by one"""

fetching, pushing = (typer.Typer(add_completion=False) for _ in range(2))


@fetching.command()
def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="hf:org/name, hf:datasets/org/name; @REVISION after it if you like.")
    ],
) -> None:
    """Fetch a policy or a dataset, and show the name by which every other command finds it.

    Code and pickles stay where they are: weights come as safetensors. Every file is compared with the checksum that the
    Hub has of it. What was fetched before is checked again, without the network where the name has a commit.
    """
    with PROGRESS.phases() as report:
        found = transfer.fetch(name, report)
    PROGRESS.notify(f"{found.files} files, {found.size / 1e6:,.1f} MB, in {found.folder}")
    if found.left_out:
        PROGRESS.notify(f"left on the Hub, for they are not data that Hilt reads: {_named(found.left_out)}")
    use = "hilt data inspect" if hub.parse(name).kind == "dataset" else "hilt train vla_tabletop policy="
    PROGRESS.notify(f"use it as: {use}{' ' * (use[-1] != '=')}{found.name}")


@pushing.command()
def push(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="A policy's folder, or a dataset's.")
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="hf:org/name or hf:datasets/org/name; made if there is none.")
    ],
    public: Annotated[bool, typer.Option("--public", help="Everybody may read a repository that is made now.")] = False,
) -> None:
    """Push the data in a folder as one commit. A new repository is private."""
    _check_kind(folder, hub.parse(name))
    with PROGRESS.phases() as report:
        pushed = transfer.push(folder, name, public, report)
    if pushed.left_out:
        PROGRESS.notify(f"not pushed, for they are not data that hilt fetch takes: {_named(pushed.left_out)}")
    PROGRESS.notify(f"{pushed.files} files pushed as {pushed.name}\nelsewhere: hilt fetch {pushed.name}")


def _check_kind(folder: Path, name: hub.Name) -> None:
    """Rejects a dataset among the models: `hilt data` and the Hub's viewer look for it among the datasets."""
    if name.kind == "dataset":
        return
    try:
        found = detect(folder)
    except FormatError:
        return
    raise ConfigError(
        f"{folder} is a dataset ({found}), and {name} is a repository of a model: push it to hf:datasets/{name.repo}."
    )


def _named(paths: list[str]) -> str:
    """The first of them, and the number of the others."""
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return f"{', '.join(paths[:MAX_NAMED])}{more}"
