"""``hilt train classifier``: frames of success and failure become a reward that any recipe can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hilt.cli.show import PROGRESS, alarm_rows, heavy_module, shell, show_next, table
from hilt.core.signals import stop_signals
from hilt.core.threads import one_thread

app = typer.Typer(add_completion=False)
DATA = (
    "Recordings of hilt record --classifier, logs, HIL-SERL's classifier_data or pickles of it; and "
    "settings, such as steps=150."
)
USELESS = """Do not use it as a reward: on frames that it has not seen, it finds success no better than chance.
Look at mistakes.png for wrong labels, record more frames of both kinds with: hilt record TASK --classifier
and train again with: hilt train classifier DATA... --out {out}-2"""
LOW_RECALL = 0.5
"""Share of the successes that are found; below it a policy is rarely rewarded"""
FEW = 3
"""Held-out initial states below which no figure means much"""


@app.command("train classifier")
def classifier(
    data: Annotated[
        list[str] | None, typer.Argument(metavar="DATA... KEY=VALUE...", help=DATA, show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the classifier is to be.")] = Path(
        "classifier"
    ),
    settings: Annotated[
        bool, typer.Option("--settings", help="Show all settings and what they mean; train nothing.")
    ] = False,
) -> None:
    """Train a reward classifier, and judge it on frames of other episodes and
    initial states. In a recipe: classifier=FOLDER."""
    from rich.console import Console

    from hilt.core.config import build, describe

    one_thread()
    heavy_module("torch", "hilt train classifier", "torch", then="hilt.classifier.reward")
    from hilt.classifier.frames import class_count, read_frames
    from hilt.classifier.reward import ClassifierConfig, check_free, save, train

    words = data or []
    changes = [word for word in words if "=" in word and not Path(word).exists()]
    config = build(ClassifierConfig(), *changes)
    if settings:
        rows = [[key, getattr(config, key), meaning] for key, _, _, meaning in describe(ClassifierConfig)]
        Console().print(table("setting", "value", "meaning", rows=rows))
        return
    check_free(out)
    with PROGRESS.phases() as report, stop_signals(second_ends=True) as stopped:

        def watch(step: int, loss: float, right: float) -> None:
            if stopped:  # nothing is written
                raise typer.Exit(128 + stopped[0])
            report("training", step, config.steps, f"loss {loss:.3f}, {right:.0%} of its batch right")
            if step == config.steps:
                report("judging it on the frames that were held out")

        clips = read_frames([word for word in words if word not in changes], report)
        report("")
        typer.echo(
            f"{sum(map(len, clips)):,} frames of {len(clips)} episode{'s' * (len(clips) != 1)}, "
            f"{class_count(clips)} classes"
        )
        trained = train(clips, config, watch, PROGRESS.notify)
    save(out, trained)
    show(trained.metadata)
    typer.echo(f"\n{out / 'thresholds.png'}, {out / 'mistakes.png'}: look at both")
    if is_useful(trained.metadata):
        show_next(shell("hilt", "train", _recipe([word for word in words if word not in changes]), f"classifier={out}"))
    else:
        typer.echo(USELESS.format(out=out))


def _recipe(data: list[str]) -> str:
    """Our recipe of the task that the recordings are of, or a placeholder for one of the user's."""
    from hilt.core.checksums import read_json
    from hilt.recipes import recipe_of

    tasks = {str(read_json(file).get("task", "")) for path in data if (file := Path(path) / "recording.json").is_file()}
    return (recipe_of(min(tasks)) if len(tasks) == 1 else "") or "RECIPE"


def is_useful(metadata: dict[str, Any]) -> bool:
    """Whether it tells success from failure on held-out frames."""
    return not any(alarm["name"] == "ranking" for alarm in metadata["training"]["alarms"])


def show(metadata: dict[str, Any]) -> None:
    """What is known of a classifier, as a table."""
    from rich.console import Console

    held, learned = metadata["held_out"], metadata["training"]
    near = "; ".join(
        f"{name}: {held[key]['false_successes']} of {held[key]['frames']}"
        for key, name in (("just_before_success", "just before a success"), ("failed_attempts", "failed attempts"))
    )
    rows = [
        ["looks at", ", ".join(f"{name} ({shape[0]} x {shape[1]})" for name, shape in metadata["image_keys"].items())],
        ["trained on", f"{_size(learned)}; loss {learned['loss']:.3f} at the end, {learned['seconds']:.0f} s"],
        ["held out", f"{_size(held)}, by {held['by']}"],
        ["accuracy", f"{held['accuracy']:.1%} held out; always the most frequent class: {held['majority']:.1%}"],
        ["threshold", f"{metadata['threshold']:g}: {metadata['why']}"],
        ["at it", f"{held['accuracy_at_threshold']:.1%} right, {_precision(held)}, recall {held['recall']:.1%}"],
        ["near misses called success", near],
    ]
    if held["by"] == "episode":
        rows.append(
            [
                "CAUTION",
                "too few initial states to hold some out: episodes on both sides began alike. Record from more of them",
            ]
        )
    if held["initial_states"] < FEW or not held["failed_attempts"]["frames"]:
        lack = (
            f"frames of {held['initial_states']} initial states, {held['failed_attempts']['frames']} "
            "of them of failed attempts"
        )
        rows.append(
            ["CAUTION", f"judged on {lack}: that proves little. Record {4 * FEW} episodes or more, failures among them"]
        )
    rows += alarm_rows(learned)
    if is_useful(metadata) and held["recall"] < LOW_RECALL:
        rows.append(["CAUTION", f"it misses {1 - held['recall']:.0%} of the successes: a policy is rarely rewarded"])
    Console().print(table("", "", rows=rows))


def _precision(held: dict[str, Any]) -> str:
    return (
        "precision undefined (no frame is called a success)"
        if held["precision"] is None
        else f"precision {held['precision']:.1%}"
    )


def _size(side: dict[str, Any]) -> str:
    per_class = ", ".join(f"{count:,} of class {number}" for number, count in enumerate(side["of_class"]))
    return (
        f"{side['frames']:,} frames ({per_class}) of {side['episodes']} episodes from "
        f"{side['initial_states']} initial states"
    )
