"""``hilt data label``, ``tag``, ``trim``, ``cut``, ``join``, ``delete``, ``undo``, ``history``: edits of episodes."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hilt.cli.show import human_bytes, shell, show_next, table
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.progress import printable
from hilt.formats import located_log
from hilt.formats.listing.log_episodes import episodes_where
from hilt.replay.edits import Edit, Edits
from hilt.replay.log import Log

LogPath = Annotated[
    Path, typer.Argument(metavar="LOG", help="A log, or a recording or run, which has one.", show_default=False)
]
WHERE = (
    "Episodes with success=false, 'steps<20', 'return>=1', source=human, tag=grasp, bad=true, 'instruction~cup' or a "
    "fact; repeatable, or several in one text."
)
NUMBERS = "Numbers of trajectories, as hilt data inspect shows them: 3 or 3,7-9."
Numbers = Annotated[str, typer.Argument(metavar="NUMBERS", help=NUMBERS, show_default=False)]
Where = Annotated[list[str] | None, typer.Option("--where", metavar="CONDITION", help=WHERE, show_default=False)]
Author = Annotated[str, typer.Option("--author", help="Who edits.", show_default="the user's name")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
FACT = "--fact NAME=VALUE"
MAX_SHOWN = 8
FRAMES = {"success": True, "failure": False, "unknown": None}
"""What a person may say of a frame"""


def label(
    log: LogPath,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NUMBERS | COLUMN=VALUE",
            help=NUMBERS + " COLUMN=VALUE gives steps another value in a column of numbers: one for all of them, or a "
            "JSON list with one for each.",
            show_default=False,
        ),
    ] = None,
    where: Where = None,
    success: Annotated[
        bool | None, typer.Option("--success/--failure", help="Whether it succeeded.", show_default=False)
    ] = None,
    bad: Annotated[
        bool | None, typer.Option("--bad/--good", help="Bad episodes are in no view and no batch.", show_default=False)
    ] = None,
    reward: Annotated[
        float | None, typer.Option("--reward", help="The reward of the last step, or of --step.", show_default=False)
    ] = None,
    mark: Annotated[
        str, typer.Option("--mark", metavar="NAME", help="A mark at --step, such as grasp.", show_default=False)
    ] = "",
    unmark: Annotated[
        str, typer.Option("--unmark", metavar="NAME", help="Removes a mark at --step.", show_default=False)
    ] = "",
    frame: Annotated[
        str,
        typer.Option("--frame", metavar="LABEL", help="--step led to success, failure, unknown.", show_default=False),
    ] = "",
    step: Annotated[
        int | None,
        typer.Option("--step", help="For the four above; -1 is the last step.", show_default=False),
    ] = None,
    instruction: Annotated[
        str, typer.Option("--instruction", metavar="TEXT", help="Its instruction in words.", show_default=False)
    ] = "",
    facts: Annotated[
        list[str] | None,
        typer.Option("--fact", metavar="NAME=VALUE", help="Another fact; null removes it.", show_default=False),
    ] = None,
    first: Annotated[
        int | None, typer.Option("--first", help="The first step for COLUMN=VALUE.", min=0, show_default="0")
    ] = None,
    author: Author = "",
    dry_run: DryRun = False,
) -> None:
    """Label episodes: success or failure, bad, rewards, marks, the instruction, facts, values of steps.

    Nothing is rewritten: batches and conversions show the label, and `hilt data undo` takes it back. A run may use the
    log meanwhile."""
    numbers = ",".join(word for word in words or [] if "=" not in word)
    columns = parse_pairs([word for word in words or [] if "=" in word], "COLUMN=VALUE")
    labels = Labels(
        columns, first, success, bad, reward, mark, unmark, frame, step, instruction, parse_pairs(facts, FACT)
    )
    labels.check()
    with editing(log, numbers, where, author, dry_run) as (edits, chosen):
        show_made(log, list(labels.made(edits, chosen)), dry_run)


@dataclass(frozen=True)
class Labels:
    """What one command labels. Each label is an edit of its own."""

    columns: dict[str, Any]
    first: int | None
    success: bool | None
    bad: bool | None
    reward: float | None
    mark: str
    unmark: str
    frame: str
    step: int | None
    instruction: str
    facts: dict[str, Any]

    def check(self) -> None:
        if self.frame and self.frame not in FRAMES:
            raise typer.BadParameter(f"--frame {self.frame}: expected {', '.join(FRAMES)}.")
        marks = bool(self.mark or self.unmark or self.frame)
        if marks and self.step is None:
            raise typer.BadParameter("--mark, --unmark and --frame need the --step where it is.")
        if self.step is not None and self.reward is None and not marks:
            raise typer.BadParameter("--step is for --reward, --mark, --unmark and --frame: add one of them.")
        if self.first is not None and not self.columns:
            raise typer.BadParameter("--first is for COLUMN=VALUE, such as rewards=0: add it.")
        some = marks or self.columns or self.facts or self.instruction
        if not some and self.success is self.bad is self.reward is None:
            raise typer.BadParameter(
                "give a label: --success or --failure, --bad or --good, --reward, --mark, --frame, --instruction, "
                "--fact NAME=VALUE or COLUMN=VALUE, such as rewards=0."
            )

    def made(self, edits: Edits, chosen: list[int]) -> Iterator[Edit]:
        """Makes the edits."""
        for column, value in self.columns.items():
            with naming_fact(edits, chosen, column, value):
                yield edits.values(chosen, column, value, self.first or 0)
        if self.success is not None:
            yield edits.label(chosen, self.success, self.reward if self.step is None else None)
        if self.reward is not None and (self.success is None or self.step is not None):
            yield edits.reward(chosen, -1 if self.step is None else self.step, self.reward)
        if self.mark and self.step is not None:
            yield edits.mark(chosen, self.step, self.mark)
        if self.unmark and self.step is not None:
            yield edits.unmark(chosen, self.step, self.unmark)
        if self.frame and self.step is not None:
            yield edits.label_frame(chosen, self.step, FRAMES[self.frame])
        if self.instruction:
            yield edits.instruction(chosen, self.instruction)
        if self.facts:
            yield edits.facts(chosen, **self.facts)
        if self.bad is not None:
            yield edits.bad(chosen, self.bad)


def tag(
    log: LogPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.", show_default=False)],
    trajectories: Numbers = "",
    where: Where = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
    author: Author = "",
    dry_run: DryRun = False,
) -> None:
    """Give episodes a tag, by which they can be chosen: --where tag=NAME."""
    with editing(log, trajectories, where, author, dry_run) as (edits, chosen):
        show_made(log, [(edits.untag if remove else edits.tag)(chosen, name)], dry_run)


def trim(
    log: LogPath,
    trajectories: Numbers = "",
    where: Where = None,
    first: Annotated[
        int | None, typer.Option("--first", help="The first step to show.", min=0, show_default="the recorded one")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--last", help="The last step to show; -1 is the last now.", show_default="the recorded one"),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Show all recorded steps again.")] = False,
    author: Author = "",
    dry_run: DryRun = False,
) -> None:
    """Leave out steps at the head and the tail of episodes. Steps are counted from 0, in what was recorded."""
    if clear == (first is not None or last is not None):
        raise typer.BadParameter("give --first, --last or both; or --clear to show all steps again.")
    with editing(log, trajectories, where, author, dry_run) as (edits, chosen):
        show_made(log, [edits.trim(chosen, first, last)], dry_run)


def cut(
    log: LogPath,
    trajectory: Annotated[int, typer.Argument(metavar="NUMBER", help="The trajectory.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Cut before this step.", show_default=False)] = None,
    mark: Annotated[
        str, typer.Option("--mark", metavar="NAME", help="Cut before each step with this mark.", show_default=False)
    ] = "",
    author: Author = "",
    dry_run: DryRun = False,
) -> None:
    """Cut an episode into several, at a step or at marks. No run may use the log meanwhile."""
    if (step is None) == (not mark):
        raise typer.BadParameter("give either the --step before which it is cut, or the --mark.")
    with Log.open(located_log(log), "r" if dry_run else "a") as opened:
        at = mark if step is None else step
        show_made(log, [Edits(opened, author, dry_run).split(trajectory, at)], dry_run)


def join(
    log: LogPath,
    trajectories: Annotated[str, typer.Argument(metavar="NUMBERS", help=NUMBERS, show_default=False)],
    author: Author = "",
    dry_run: DryRun = False,
) -> None:
    """Make one episode of several, in the order given. No run may use the log meanwhile."""
    with Log.open(located_log(log), "r" if dry_run else "a") as opened:
        chosen = parse_numbers(trajectories, opened.trajectories())
        show_made(log, [Edits(opened, author, dry_run).join(chosen)], dry_run)


def delete(
    log: LogPath,
    trajectories: Numbers = "",
    where: Where = None,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Free their bytes; this cannot be undone, and no run may use the log.")
    ] = False,
    author: Author = "",
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --for-good: do not ask.")] = False,
) -> None:
    """Take episodes out of a log, as an edit that can be undone, or for good."""
    if yes and not for_good:
        raise typer.BadParameter("--yes is for --for-good; what is deleted without it can be undone.")
    if for_good:
        delete_for_good(log, trajectories, where, dry_run, yes)
        return
    with editing(log, trajectories, where, author, dry_run) as (edits, chosen):
        show_made(log, [edits.delete(chosen)], dry_run)


def undo(
    log: LogPath,
    numbers: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="EDIT", help="Numbers of edits, as hilt data history shows them.", show_default="the newest"
        ),
    ] = None,
    author: Author = "",
    dry_run: DryRun = False,
) -> None:
    """Undo edits. Undoing an undo does the edit again."""
    with Log.open(located_log(log), "r") as opened:
        edits = Edits(opened, author, dry_run)
        show_made(log, [edits.undo(number) for number in numbers] if numbers else [edits.undo()], dry_run)


def history(
    log: LogPath,
    trajectory: Annotated[
        int | None, typer.Argument(metavar="NUMBER", help="Only edits of this trajectory.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the edits of a log, or of one of its episodes: who did what, when, and what was undone."""
    with Log.open(located_log(log), "r") as opened:
        made = Edits(opened).history(trajectory)
    if as_json:
        typer.echo(json.dumps({"edits": [asdict(edit) for edit in made]}, indent=1))
    elif not made:
        typer.echo("no edits")
    else:
        from rich.console import Console

        rows: list[list[object]] = [
            [
                edit.number,
                edit.time[:19].replace("T", " "),
                edit.author,
                edit.action,
                listed(edit),
                "undone" * edit.undone,
            ]
            for edit in made
        ]
        Console().print(table("edit", "time (UTC)", "author", "what", "episodes", "", rows=rows, right=[0]))


def delete_for_good(log: Path, trajectories: str, where: list[str] | None, dry_run: bool, yes: bool) -> None:
    with Log.open(located_log(log), "r" if dry_run else "a") as opened:
        chosen, every = choose(opened, trajectories, where), opened.trajectories(hidden=True)
        steps = sum(len(opened.trajectory_keys(number, hidden=True)) for number in chosen)
        what = f"{len(chosen):,} of {len(every):,} trajectories, {steps:,} of {len(opened):,} steps"
        if dry_run:
            typer.echo(f"would delete {what}, for good")
            return
        bytes_before = opened.live_bytes
        confirm(f"delete {what}, for good?", yes)
        for number in chosen:
            opened.delete(number)
        freed = max(0, bytes_before - opened.live_bytes)
        typer.echo(f"deleted {what}; {human_bytes(freed)} are free, {len(opened):,} steps are left")


@contextlib.contextmanager
def editing(
    log: Path, numbers: str, where: list[str] | None, author: str, dry_run: bool
) -> Iterator[tuple[Edits, list[int]]]:
    """The edits of a log, and the episodes that were chosen."""
    with Log.open(located_log(log), "r") as opened:
        yield Edits(opened, author, dry_run), choose(opened, numbers, where)


def choose(log: Log, numbers: str, where: list[str] | None) -> list[int]:
    """The episodes that are named by number or by conditions."""
    if bool(numbers) == bool(where):
        raise typer.BadParameter("give either the NUMBERS of trajectories, or --where CONDITION.")
    if numbers:
        return parse_numbers(numbers, log.trajectories(hidden=True))
    if not (chosen := episodes_where(log, where or [])):
        typer.echo(f"no episode has {' and '.join(where or [])}; nothing was changed")
        raise typer.Exit
    return chosen


@contextlib.contextmanager
def naming_fact(edits: Edits, chosen: list[int], column: str, value: object) -> Iterator[None]:
    """Where a column is not known and a fact of that name is, the error names the option."""
    try:
        yield
    except UnknownNameError:
        if column == "success" or any(column in edits.log.facts.about(number) for number in chosen):
            raise ConfigError(
                f"{column} is a fact of a trajectory, and no column of its steps: --fact {column}={json.dumps(value)}."
            ) from None
        raise


def show_made(log: Path, made: list[Edit], dry_run: bool) -> None:
    for edit in made:
        count = f"{len(edit.episodes):,} episode{'s' * (len(edit.episodes) != 1)} ({listed(edit)})"
        typer.echo(printable(f"{'would be' if dry_run else f'edit {edit.number}'}: {edit.action}: {count}"))
    if not dry_run:
        show_next(shell("hilt", "data", "undo", log, *(edit.number for edit in reversed(made))))


def listed(edit: Edit) -> str:
    shown = ", ".join(map(str, edit.episodes[:MAX_SHOWN]))
    return f"{shown}, ..." if len(edit.episodes) > MAX_SHOWN else shown


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


def parse_pairs(given: list[str] | None, expected: str) -> dict[str, object]:
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
