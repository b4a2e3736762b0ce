"""``hilt train simplevla KEY=VALUE ...``: a run from the command line of SimpleVLA-RL."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from hilt.cli.show import heavy_module
from hilt.cli.train_options import Resume, Run, Trust
from hilt.core.errors import ConfigError, optional_module

app = typer.Typer(add_completion=False)
WORDS = "Its keys, such as data.n_samples=8; with hilt. before them, settings of ours, such as hilt.pool.workers=4."


@app.command("train simplevla")
def simplevla_command(
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE ...", help=WORDS, show_default=False)] = None,
    run: Run = None,
    resume: Resume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the settings and what would be started; start nothing.")
    ] = False,
    trusted: Trust = None,
) -> None:
    """What stands behind `python -m verl.trainer.main_ppo` there stands behind `hilt train simplevla` here:
    docs/simplevla.md has every key. Stopped in any way, --resume goes on, bit for bit."""
    heavy_module("torch", "hilt train simplevla", "torch")
    optional_module("gymnasium", "hilt train simplevla", "sim")
    from hilt.cli.train_vla import run as run_all
    from hilt.recipes.simplevla_run import simplevla

    if not words:
        if not resume or run is None:
            raise ConfigError(
                "give the keys of SimpleVLA-RL, such as data.task_suite_name=libero_10; or --run "
                "FOLDER --resume to go on."
            )
        run_all(None, run, "simplevla", (), resume, dry_run)
        return
    command = simplevla(words, here=True)
    for name, value in command.environment.items():
        os.environ.setdefault(name, value)
    overrides = [asdict(command.config)] if resume else []
    run_all(command.config, run or command.folder, "simplevla", overrides, resume, dry_run, command.lines)
