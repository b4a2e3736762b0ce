"""One edit of many episodes: what the list does with all that are selected, and the commands that do the same.

A selection may have episodes of several logs, such as the rollouts of every rank of a run. Each log gets one edit, and
the page undoes these together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hilt.app.episodes.episode_edits import edited_log
from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.app.episodes.export_command import MAX_CHARACTERS, numbers_by_source, ranges
from hilt.app.error_words import PageError
from hilt.cli.show import shell
from hilt.core.errors import HiltError, UnknownNameError
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.replay.edits import Edit, Edits


@dataclass(frozen=True)
class BulkAction:
    """Something that can be done with many episodes at once."""

    make: Callable[[Edits, list[int], str], Edit]
    """It gets the numbers of the episodes, and the name that was given."""
    command: str
    """The command of ``hilt data``."""
    option: tuple[str, ...] = ()


BULK_ACTIONS = {
    "success": BulkAction(lambda edits, numbers, name: edits.label(numbers, True), "label", ("--success",)),
    "failure": BulkAction(lambda edits, numbers, name: edits.label(numbers, False), "label", ("--failure",)),
    "unknown": BulkAction(lambda edits, numbers, name: edits.label(numbers, None), "label", ("--fact", "success=null")),
    "bad": BulkAction(lambda edits, numbers, name: edits.bad(numbers), "label", ("--bad",)),
    "good": BulkAction(lambda edits, numbers, name: edits.bad(numbers, False), "label", ("--good",)),
    "tag": BulkAction(lambda edits, numbers, name: edits.tag(numbers, name), "tag"),
    "delete": BulkAction(lambda edits, numbers, name: edits.delete(numbers), "delete"),
}


@dataclass(frozen=True)
class BulkResult:
    """What was done, and why not all of it, where something failed."""

    edits: list[dict[str, Any]]
    """The edit of each log: its ``source``, and its number as ``edit``."""
    action: str
    count: int
    error: str = ""


def edit_many(index: EpisodeIndex, episodes: Mapping[str, Sequence[int]], given: Mapping[str, object]) -> BulkResult:
    """Does one ``action`` with episodes, given by the keys of their sources. Each edit is process-safe when this
    returns. Where a log cannot be edited, those before it were, and the result says so."""
    action, name, author = (str(given.get(key, "")) for key in ("action", "name", "author"))
    if action not in BULK_ACTIONS:
        raise UnknownNameError("edit of many episodes", action, BULK_ACTIONS)
    made: list[dict[str, Any]] = []
    count, said = 0, action
    for key, numbers in numbers_by_source(index, episodes):
        source = index.source(key)
        try:
            edit = BULK_ACTIONS[action].make(Edits(edited_log(source), author[:100]), numbers, name)
        except (HiltError, OSError) as error:
            if not made:
                raise
            return BulkResult(made, said, count, f"{source.path}: {error}")
        source.refresh()
        made.append({"source": key, "edit": edit.number})
        count, said = count + len(edit.episodes), edit.action
    return BulkResult(made, said, count)


def undo_many(index: EpisodeIndex, edits: Iterable[Mapping[str, Any]], author: str = "") -> BulkResult:
    """Undoes what `edit_many` has done. Where one edit cannot be undone, the others are."""
    made: list[dict[str, Any]] = []
    problems, count, said = [], 0, "undo"
    for one in edits:
        source = index.source(str(one["source"]))
        try:
            edit = Edits(edited_log(source), author[:100]).undo(int(one["edit"]))
        except (HiltError, OSError) as error:
            problems.append(f"{source.path}: {error}")
            continue
        source.refresh()
        made.append({"source": source.key, "edit": edit.number})
        count, said = count + len(edit.episodes), edit.action
    return BulkResult(made, said, count, " ".join(problems))


def bulk_commands(
    index: EpisodeIndex, episodes: Mapping[str, Sequence[int]], where: str | None = None, tag: str = ""
) -> list[str]:
    """The commands that do what the list can do with these episodes, for each log. With `where`, they are all that this
    filter admits, and the commands have it instead of the numbers."""
    out = []
    for key, numbers in numbers_by_source(index, episodes):
        path = index.source(key).path
        edited_log(index.source(key))
        if where is None:
            chosen: tuple[str, ...] = (ranges(numbers),)
            if len(chosen[0]) > MAX_CHARACTERS:
                raise PageError("error.edit_numbers", count=f"{len(numbers):,}")
        else:
            chosen = ("--where", str(EpisodeFilter.parse(where).without("group")) or "steps>0")
        for action in BULK_ACTIONS.values():
            name = (tag or "chosen",) if action.command == "tag" else ()
            out.append(shell("hilt", "data", action.command, path, *name, *chosen, *action.option))
    return out


def selected_ids(index: EpisodeIndex, chosen: EpisodeFilter) -> list[str]:
    """Names all episodes that a filter admits as the list does: ``source:number:lane``."""
    rows, keys = index.rows_of(index.select(chosen)), [source.key for source in index.sources]
    columns = (rows[name].tolist() for name in ("group", "number", "lane"))
    return [f"{keys[group]}:{number}:{lane}" for group, number, lane in zip(*columns, strict=True)]
