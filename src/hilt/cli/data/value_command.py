"""``hilt train value`` and ``hilt data value``: how episodes will end, learned from all that was logged, and written
into logs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hilt.cli.show import PROGRESS, alarm_rows, heavy_module, shell, show_next, table
from hilt.core.signals import stop_signals
from hilt.core.threads import one_thread

app = typer.Typer(add_completion=False)
DATA = "Logs, recordings and runs with successes and failures; and settings, such as steps=300."
FEW = 5
"""Held-out episodes of an outcome below which no figure means much"""


@app.command("train value")
def train(
    data: Annotated[
        list[str] | None, typer.Argument(metavar="DATA... KEY=VALUE...", help=DATA, show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the model is to be.")] = Path("value"),
    settings: Annotated[
        bool, typer.Option("--settings", help="Show all settings and what they mean; train nothing.")
    ] = False,
) -> None:
    """Train a value model on all episodes, judge it on initial states that it has not seen, and write value, advantage
    and progress of every step into the logs. With actions=N it is a value of chunks, by which a policy can choose among
    several (hilt eval RUN --best-of 8 --verifier FOLDER). The same command continues after an interruption."""
    from rich.console import Console

    from hilt.core.config import build, describe
    from hilt.value.value_config import ValueConfig

    words = data or []
    changes = [word for word in words if "=" in word and not Path(word).exists()]
    config = build(ValueConfig(), *changes)
    if settings:
        rows = [[key, getattr(config, key), meaning] for key, _, _, meaning in describe(ValueConfig)]
        Console().print(table("setting", "value", "meaning", rows=rows))
        return
    one_thread()
    heavy_module("torch", "hilt train value", "torch", then="hilt.value.value_training")
    from hilt.value.value_episodes import ValueEpisodes
    from hilt.value.value_facts import write_estimates
    from hilt.value.value_training import train_value

    paths = [word for word in words if word not in changes]
    with PROGRESS.phases() as report, stop_signals() as stopped, ValueEpisodes(paths, report) as episodes:
        typer.echo(_summary(episodes))
        model = train_value(episodes, config, out, report, stopped, PROGRESS.notify)
        if model is None:
            report("")
            typer.echo(f"stopped; {shell('hilt', 'train', 'value', *words, '--out', out)} goes on from here")
            raise typer.Exit(128 + stopped[0])
        written = None if config.actions else write_estimates(model, episodes, report=report)
    show(model.metadata)
    if written is None:
        typer.echo(f"\n{out / 'report.png'}: look at it. Nothing was written into the logs: the values are of chunks.")
        show_next(shell("hilt", "eval", "RUN", "--best-of", 8, "--verifier", out))
        return
    typer.echo(f"\n{out / 'report.png'}: look at it. {_written(written)}")
    show_next(shell("hilt", "open", paths[0], out))


def value(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Logs, recordings or runs.", show_default=False)],
    model: Annotated[Path, typer.Option("--model", metavar="FOLDER", help="Of hilt train value.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write value, advantage and progress of every step into logs, by a trained value model.

    Episodes that have them, of this model, are left as they are. `hilt data undo` takes them back; filter by them with
    `--where`, such as `--where "advantage_percentile>=70"`."""
    one_thread()
    heavy_module("torch", "hilt data value", "torch", then="hilt.value.value_facts")
    from hilt.value.value_episodes import ValueEpisodes
    from hilt.value.value_facts import write_estimates
    from hilt.value.value_model import load_value_model

    with PROGRESS.phases() as report:
        loaded = load_value_model(model)
        with ValueEpisodes(logs, report) as episodes:
            passed = dict(episodes.passed_over)
            written = write_estimates(loaded, episodes, report=report)
    if as_json:
        typer.echo(json.dumps({"model": loaded.id, **asdict(written), "passed_over": passed}, indent=1))
        return
    typer.echo(_written(written))
    if passed:
        typer.echo(f"passed over: {'; '.join(f'{count} {why}' for why, count in passed.items())}")


def show(metadata: dict[str, Any]) -> None:
    """What is known of a value model, as a table."""
    from rich.console import Console

    held, learned = metadata["held_out"], metadata["training"]
    cameras = [f"{name} ({size[0]} x {size[1]})" for name, size in metadata["inputs"]["cameras"].items()]
    seen = [
        *cameras,
        *(["the state"] if metadata["inputs"]["state"] else []),
        *(["words"] if metadata["words"] else []),
    ]
    if metadata["features"]:
        seen = [f"features of {metadata['settings']['policy']} ({metadata['features']['weights']})"]
    if chunk := metadata["inputs"].get("chunk"):
        seen.append(f"the next {chunk['actions']} actions")
    best = f"weights of step {learned['best_step']} of {learned['steps']}"
    rows = [
        ["model", metadata["id"]],
        ["looks at", ", ".join(seen)],
        ["tasks", ", ".join(f"{t or 'unnamed'} ({i['successes']}/{i['episodes']})" for t, i in _some_tasks(metadata))],
        ["trained on", f"{_size(learned)}; {best}, {learned['seconds']:.0f} s"],
        ["chosen by", f"{_size(learned['validation'])}; loss {learned['validation_loss']:.3f}"],
        ["held out", f"{_size(held)}, by {held['by']}"],
    ]
    for after in held["after"]:
        low, high = after["interval"]
        within = f", {after['auc_within_tasks']:.3f} within tasks" if after["auc_within_tasks"] is not None else ""
        rows.append(
            [
                f"after {after['share']:.0%}",
                f"AUC {after['auc']:.3f} (95% interval {low:.3f} to {high:.3f}){within}, calibration error "
                f"{after['calibration_error']:.3f}",
            ]
        )
    rows.append(["calibration error", f"{held['calibration_error']:.3f} of all three together"])
    rows += _chunks(held.get("chunks"))
    if held["by"] == "episode":
        rows.append(["CAUTION", "too few initial states to hold some out: episodes on both sides began alike"])
    if min(held["successes"], held["episodes"] - held["successes"]) < FEW:
        lack = f"{held['successes']} successes and {held['episodes'] - held['successes']} failures"
        rows.append(["CAUTION", f"judged on {lack}: that proves little. Give more episodes"])
    if len(metadata["tasks"]) == 1:
        rows.append(["note", "one task only: the words are not looked at, and episodes of other tasks are refused"])
    rows += alarm_rows(learned)
    Console().print(table("", "", rows=rows))


def _chunks(found: dict[str, float] | None) -> list[list[str]]:
    """Whether a value of chunks tells one from another."""
    if found is None:
        return []
    text = f"loss {found['loss']:.3f} with those that were executed, {found['loss_of_other_chunks']:.3f} with others"
    rows = [["chunks", f"{text}; {found['steps']:,} held-out steps"]]
    if found["loss_of_other_chunks"] <= found["loss"]:
        rows.append(["CAUTION", "it tells no chunk from another: choosing by it is choosing at random"])
    return rows


def _some_tasks(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(metadata["tasks"].items())[:8]


def _summary(episodes: Any) -> str:
    known = [episode for episode in episodes if episode.success is not None]
    successes, people = sum(bool(e.success) for e in known), sum(e.human for e in episodes)
    text = (
        f"{len(episodes):,} episodes, {sum(map(len, episodes)):,} steps: {successes:,} succeeded, "
        f"{len(known) - successes:,} failed, a person acted in {people:,}"
    )
    if len(known) < len(episodes):
        text += f"; of {len(episodes) - len(known):,} the outcome is not known, and nothing is learned from these"
    lost = "; ".join(f"{count:,} {why}" for why, count in episodes.passed_over.items())
    return text + (f"; passed over: {lost}" if lost else "")


def _written(written: Any) -> str:
    had = f"; {written.known:,} had them already" if written.known else ""
    return f"Values of {written.episodes:,} episodes were written into their logs{had}."


def _size(side: dict[str, Any]) -> str:
    return (
        f"{side['frames']:,} steps of {side['episodes']} episodes ({side['successes']} successes) from "
        f"{side['initial_states']} initial states"
    )
