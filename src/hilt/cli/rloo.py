"""``hilt train rloo --config FILE``: a run of post-training from the YAML of an RLOO trainer of RIPT's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hilt.cli.show import heavy_module
from hilt.cli.train_options import Overrides, Resume, Run, Trust, plain
from hilt.core.errors import ConfigError, optional_module

app = typer.Typer(add_completion=False)


@app.command("train rloo")
def rloo_command(
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The trainer's YAML, as it stands.")
    ] = None,
    run: Run = None,
    resume: Resume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the settings and what would be started; start nothing.")
    ] = False,
    trusted: Trust = None,
) -> None:
    """RLOO over the tasks of a file, such as libero_spatial, one task at each rank at a time.
    Settings follow as KEY=VALUE: policy=FOLDER, placement.kind=processes placement.ranks=2. Stopped
    in any way, --resume goes on, bit for bit."""
    heavy_module("torch", "hilt train rloo", "torch")
    optional_module("gymnasium", "hilt train rloo", "sim")
    from hilt.cli.train_vla import run as run_all
    from hilt.core.config import build
    from hilt.recipes.ript_run import rloo

    words = list(overrides or [])
    if config is None and not resume:
        raise ConfigError("give --config FILE, the YAML of the trainer; or --run FOLDER --resume to go on with a run.")
    if config is None and run is None:
        raise ConfigError("which run goes on? Name its folder with --run FOLDER.")
    folder = run or Path("runs") / plain(f"rloo-{config.stem}" if config else "rloo")
    made = None if resume else build(rloo(config or ""), *words)
    from hilt.policies.registry import is_new

    new = made.policy if made is not None and is_new(made.policy) else ""
    also = [f"the policy is a new {new}, which has learned nothing: give policy=FOLDER for one that has"] if new else []
    run_all(made, folder, "rloo", words, resume, dry_run, also)
