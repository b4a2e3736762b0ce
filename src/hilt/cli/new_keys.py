"""``hilt keys``: make the keys by which a learner and its actors know each other, and see which are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hilt.cli.show import table
from hilt.wire.keys import LEARNER, list_keys, new_keys

app = typer.Typer(add_completion=False, no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--dir", help="The folder of the keys.")]


@app.callback()
def keys() -> None:
    """Make the keys by which a learner and its actors know each other, and see which are here."""


@app.command("new")
def make_keys(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help=f"{LEARNER!r} and the actors' names.", show_default=False)
    ],
    folder: Folder = Path("keys"),
) -> None:
    """Make a pair of keys for each name. Nothing is overwritten."""
    paths = new_keys(folder, names)
    for path in paths:
        kind = "secret, mode 0600" if path.suffix == ".key" else "public"
        typer.echo(f"made {path} ({kind})")
    typer.echo("")
    actors = [name for name in names if name != LEARNER]
    publics = ", ".join(f"{name}.pub" for name in actors) or "every actor's .pub"
    typer.echo(
        f"The learner's machine needs {f'{LEARNER}.key and ' * (LEARNER in names)}{publics} in its folder of keys."
    )
    for name in actors or ["ACTOR"]:
        typer.echo(f"The machine of {name} needs {name}.key and {LEARNER}.pub.")
    typer.echo(
        "Copy the files with scp -p, which keeps their modes: a .key file must have mode 0600 (chmod "
        "600) and be nowhere else."
    )
    typer.echo(
        f"Then give wire.keys={folder} to hilt learner and hilt actor (in Python, "
        f"keys={str(folder)!r} to make_trainer_config)."
    )


@app.command("list")
def show_keys(folder: Folder = Path("keys")) -> None:
    """Show the names in a folder of keys, which of them are secret, and their fingerprints."""
    from rich.console import Console

    found, problems = list_keys(folder)
    rows = [(key.name, "public" if key.secret is None else "secret and public", key.fingerprint) for key in found]
    if rows:
        Console().print(table("name", "here", "fingerprint", rows=rows))
    elif not problems:
        typer.echo(f"{folder}: no keys. Make them with: hilt keys new {LEARNER} ACTOR")
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
