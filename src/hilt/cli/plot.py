"""``hilt plot``: curves of one run or several, as PNG files and as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hilt.cli.show import PROGRESS
from hilt.observe.plots import SMOOTH, plot

app = typer.Typer(add_completion=False)


@app.command()
def draw(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that `hilt train` made.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the files go.", show_default="RUN/plots, or plots")
    ] = None,
    smooth: Annotated[
        int, typer.Option(metavar="N", help="The number of episodes or records that each point averages.", min=1)
    ] = SMOOTH,
) -> None:
    """Draw success, interventions, losses and rates over online steps (of sft: samples) and minutes. Runs that differ
    only by their seed become one curve with a band; others are named after the settings in which they differ."""
    with PROGRESS.phases() as report:
        made = plot(runs, out or (runs[0] / "plots" if len(runs) == 1 else Path("plots")), smooth, report)
    for path in made:
        typer.echo(str(path))
