"""``hilt data score``: which frames of a log are worth a label for a reward classifier."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hilt.classifier.frame_scores import FrameScores, score_frames
from hilt.cli.show import PROGRESS, heavy_module, shell, show_next, table
from hilt.core.threads import one_thread

MAX_SHOWN = 20


def score(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Logs, recordings or runs.", show_default=False)],
    classifier: Annotated[
        Path | None,
        typer.Option("--classifier", metavar="FOLDER", help="Of hilt train classifier.", show_default="none"),
    ] = None,
    frames: Annotated[int, typer.Option("--frames", metavar="N", help="The number of frames to judge.", min=1)] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all of them.")] = False,
) -> None:
    """List frames that are worth a label: those first of which a reward classifier is least certain.

    Frames with a frame label are left out. Without a classifier, frames are spread over the episodes: the last, the
    first, and some between. Label them with `hilt data label --frame`, or in the page of `hilt open`."""
    judge = None
    if classifier is not None:
        one_thread()
        heavy_module("torch", "hilt data score", "torch", then="hilt.classifier.reward")
        from hilt.classifier.reward import reward_function

        judge = reward_function(classifier)
    with PROGRESS.phases() as report:
        scores = score_frames(logs, judge, frames, report)
    if as_json:
        typer.echo(json.dumps(asdict(scores), indent=1))
    else:
        show_scores(scores)


def show_scores(scores: FrameScores) -> None:
    from rich.console import Console

    rows: list[list[object]] = [
        [
            frame.log,
            frame.trajectory,
            frame.step,
            "" if frame.probability is None else f"{frame.probability:.3f}",
            "" if frame.label is None else frame.label,
        ]
        for frame in scores.frames[:MAX_SHOWN]
    ]
    if rows:
        Console().print(table("log", "trajectory", "step", "p(success)", "label", rows=rows, right=[1, 2, 3, 4]))
    labels = ", ".join(f"{count:,} {name}" for name, count in scores.labeled.items())
    typer.echo(f"{scores.steps:,} frames of {scores.episodes:,} episodes; frame labels: {labels}")
    if scores.wide:
        typer.echo(
            f"{scores.wide:,} episodes with others side by side are left out: copy the log with hilt data convert"
        )
    if scores.frames:
        first = scores.frames[0]
        show_next(
            shell("hilt", "data", "label", first.log, first.trajectory, "--frame", "success", "--step", first.step)
        )
