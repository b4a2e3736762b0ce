"""``hilt data delete`` and ``hilt data relabel``: a log's trajectories taken out, or given other values and facts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hilt.cli.show import human_bytes
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.formats import located_log
from hilt.replay.log import Log
from hilt.replay.maintenance.summary import success_of

LogPath = Annotated[
    Path, typer.Argument(metavar="LOG", help="A log, or a recording or run, which has one.", show_default=False)
]
NUMBERS = "Numbers of trajectories, as hilt data inspect shows them: 3 or 3,7-9."
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def delete(
    log: LogPath,
    trajectories: Annotated[str, typer.Argument(metavar="NUMBERS", help=NUMBERS, show_default=False)] = "",
    failures: Annotated[
        bool, typer.Option("--failures", help="All trajectories that are known to have failed.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Take trajectories out of a log, for good. Bytes are freed when nothing else of their segment is wanted."""
    if bool(trajectories) == failures:
        raise typer.BadParameter("give the NUMBERS of trajectories, or --failures.")
    with Log.open(located_log(log), "r" if dry_run else "a") as opened:
        if failures:
            chosen = [number for number in opened.trajectories() if success_of(opened, number) is False]
        else:
            chosen = parse_numbers(trajectories, opened.trajectories())
        steps, bytes_before = sum(len(opened.trajectory_keys(number)) for number in chosen), opened.live_bytes
        what = f"{len(chosen):,} of {len(opened.trajectories()):,} trajectories, {steps:,} of {len(opened):,} steps"
        if dry_run or not chosen:
            typer.echo(
                f"would delete {what}" if chosen else "no trajectory is known to have failed; nothing was deleted"
            )
            return
        confirm(f"delete {what}, for good?", yes)
        for number in chosen:
            opened.delete(number)
        freed = max(0, bytes_before - opened.live_bytes)
        typer.echo(f"deleted {what}; {human_bytes(freed)} are free, {len(opened):,} steps are left")


def relabel(
    log: LogPath,
    trajectories: Annotated[str, typer.Argument(metavar="NUMBERS", help=NUMBERS, show_default=False)],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COLUMN=VALUE...",
            help="One value for all steps, or a JSON list with one for each.",
            show_default=False,
        ),
    ] = None,
    facts: Annotated[
        list[str] | None,
        typer.Option("--fact", metavar="NAME=VALUE", help="A fact of each, such as success=false.", show_default=False),
    ] = None,
    first: Annotated[
        int, typer.Option("--first", help="The step from which values count; those before keep theirs.", min=0)
    ] = 0,
    dry_run: DryRun = False,
) -> None:
    """Give steps of trajectories other values in a column of numbers, such as rewards=0, or trajectories other facts, such as success.

    Nothing is rewritten: readers and samplers see the newest label, and the log keeps the rows as they were recorded."""
    if not values and not facts:
        raise typer.BadParameter(
            "give COLUMN=VALUE, such as rewards=0, or --fact NAME=VALUE, such as --fact success=false."
        )
    columns, known = parse_pairs(values, "COLUMN=VALUE"), parse_pairs(facts, "--fact NAME=VALUE")
    with Log.open(located_log(log), "r" if dry_run else "a") as opened:
        chosen = parse_numbers(trajectories, opened.trajectories())
        jobs = [
            (number, column, spread(opened, number, column, value, first))
            for number in chosen
            for column, value in columns.items()
        ]
        changes = [f"{column} of {len(given):,} steps of trajectory {number}" for number, column, given in jobs]
        changes += [
            f"{name}={json.dumps(value)} of trajectory {number}" for number in chosen for name, value in known.items()
        ]
        for line in changes:
            typer.echo(("would set " if dry_run else "sets ") + line)
        if dry_run:
            return
        for number, column, given in jobs:
            opened.relabel(number, column, given, first=first)
        for number in chosen if known else []:
            opened.annotate(number, **known)


def spread(log: Log, trajectory: int, column: str, value: Any, first: int) -> Any:
    """The values of the steps from `first` on: one for each of them, from a list or from one value."""
    if column not in log.schema.layout.inline:
        if column == "success" or column in log.facts.about(trajectory):
            raise ConfigError(
                f"{column} is a fact of a trajectory, and no column of its steps: --fact {column}={json.dumps(value)}."
            )
        raise UnknownNameError("column of numbers", column, log.schema.layout.inline)
    steps, spec = len(log.trajectory_keys(trajectory)), log.schema.columns[column]
    try:
        given = np.asarray(value, spec.dtype)
    except (TypeError, ValueError):
        raise ConfigError(f"{column}={value!r}: expected {spec}, or a list of these, one for each step.") from None
    if first >= steps:
        raise ConfigError(f"--first {first}: trajectory {trajectory} has {steps} steps, counted from 0.")
    if given.shape == spec.shape:
        return np.broadcast_to(given, (steps - first, *spec.shape)).copy()
    if given.shape[1:] != spec.shape or len(given) > steps - first:
        expected = f"expected one value or up to {steps - first}, of shape {spec.shape}"
        raise ConfigError(
            f"{column}: {expected}, for the steps of trajectory {trajectory} from {first} on; got an array of {given.shape}."
        )
    return given


def parse_numbers(text: str, known: list[int]) -> list[int]:
    """``3,7-9``, each of which must be there."""
    out: dict[int, None] = {}
    for part in text.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())) or int(match[2] or match[1]) < int(match[1]):
            raise typer.BadParameter(f"{text!r}: expected numbers of trajectories and ranges, such as 3,7-9.")
        first, last = int(match[1]), int(match[2] or match[1])
        if absent := sorted({first, last} - set(known)):
            raise UnknownNameError("trajectory", str(absent[0]), map(str, known[-5:]))
        out |= dict.fromkeys(number for number in known if first <= number <= last)
    return list(out)


def parse_pairs(given: list[str] | None, expected: str) -> dict[str, Any]:
    """Values are JSON, or else text."""
    out: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r}: expected {expected}.")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


def confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask: add --yes, or check with --dry-run first.")
    typer.confirm(question, abort=True)
