"""Edits of episodes from the pages: labels, tags, marks, trimming and deletion, exactly as `hilt data` makes them."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hilt.app.error_words import PageError
from hilt.cli.data.edit_commands import FRAMES
from hilt.core.errors import ConfigError, LockedError, UnknownNameError
from hilt.formats.listing.episode_source import EpisodeSource
from hilt.formats.listing.log_episodes import LogEpisodes
from hilt.replay.edits import Edit, Edits
from hilt.replay.log import Log

WRITE_TIMEOUT_S = 60.0

ACTIONS: dict[str, Callable[[Edits, int, int, Mapping[str, Any]], Edit]] = {
    "success": lambda edits, number, first, given: edits.label(number, True),
    "failure": lambda edits, number, first, given: edits.label(number, False),
    "unknown": lambda edits, number, first, given: edits.label(number, None),
    "bad": lambda edits, number, first, given: edits.bad(number),
    "good": lambda edits, number, first, given: edits.bad(number, False),
    "tag": lambda edits, number, first, given: edits.tag(number, given["name"]),
    "untag": lambda edits, number, first, given: edits.untag(number, given["name"]),
    "mark": lambda edits, number, first, given: edits.mark(number, first + int(given["step"]), given["name"]),
    "unmark": lambda edits, number, first, given: edits.unmark(number, first + int(given["step"]), given["name"]),
    "frame": lambda edits, number, first, given: edits.label_frame(number, int(given["recorded"]), _frame(given)),
    "reward": lambda edits, number, first, given: edits.reward(number, first + int(given["step"]), _number(given)),
    "instruction": lambda edits, number, first, given: edits.instruction(number, given["text"]),
    "trim": lambda edits, number, first, given: edits.trim(
        number, first + int(given["first"]), first + int(given["last"])
    ),
    "show_all": lambda edits, number, first, given: edits.trim(number),
    "delete": lambda edits, number, first, given: edits.delete(number),
    "undo": lambda edits, number, first, given: edits.undo(given.get("edit")),
    "split": lambda edits, number, first, given: edits.split(number, str(given["name"])),
    "join": lambda edits, number, first, given: edits.join([number, int(given["other"])]),
}
"""What the pages can do. Steps are counted as the pages show them, where the first has the recorded number `first`."""

COPYING = ("split", "join")
"""Actions that add episodes to the log, which needs its one writer: no run may use it meanwhile."""
_COPYING = threading.Lock()
UNDO = re.compile(r"undo \d+ \((.*)\)", re.DOTALL)
"""The action of an undoing, with the action that it undoes."""


def _frame(given: Mapping[str, Any]) -> bool | None:
    if given["label"] not in FRAMES:
        raise UnknownNameError("label of a frame", str(given["label"]), FRAMES)
    return FRAMES[given["label"]]


def edit_episode(source: EpisodeSource, number: int, given: Mapping[str, object]) -> Edit:
    """Does the ``action`` that a page asks for, in the name of its ``author``. It is process-safe when this returns."""
    opened = edited_log(source)
    action = str(given.get("action", ""))
    if action not in ACTIONS:
        raise UnknownNameError("edit", action, ACTIONS)
    try:
        with contextlib.nullcontext(opened) if action not in COPYING else _writing(source.path) as log:
            edits = Edits(log, str(given.get("author", ""))[:100])
            made = ACTIONS[action](edits, number, source.first_step(number), given)
    except UnknownNameError:  # which is a KeyError too
        raise
    except KeyError as error:
        raise ConfigError(f"{action}: {error} is missing.") from None
    source.refresh()
    return made


def edited_log(source: EpisodeSource) -> Log:
    """The log of a source, whose episodes can be edited; those of another format cannot."""
    if not isinstance(source, LogEpisodes):
        raise PageError("error.not_edited", path=source.path, format=source.format)
    return source.log


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Log]:
    """A log, open for writing; the edits of several browsers wait for each other."""
    if not _COPYING.acquire(timeout=WRITE_TIMEOUT_S):
        raise PageError("error.copying", path=path, seconds=f"{WRITE_TIMEOUT_S:.0f}")
    try:
        try:
            opened = Log.open(path, "a")
        except LockedError as error:
            raise PageError("error.log_in_use", why=str(error).partition(". ")[0]) from None
        with opened:
            yield opened
    finally:
        _COPYING.release()


def _number(given: Mapping[str, Any]) -> float:
    try:
        return float(given["value"])
    except (TypeError, ValueError):
        raise PageError("error.reward", value=repr(given["value"])) from None


def shown_edit(edit: Edit) -> dict[str, object]:
    """An edit as plain values; what an undoing undoes is named by what it did, and not by its number."""
    action, undone = edit.action, ""
    while edit.undoes is not None and (match := UNDO.fullmatch(action)):
        action, undone = match[1], undone + "undo: "
    return {**asdict(edit), "action": undone + action}


def history_of(source: EpisodeSource, number: int) -> list[dict[str, object]]:
    """The edits of an episode as plain values, newest first."""
    if not isinstance(source, LogEpisodes):
        return []
    return [shown_edit(edit) for edit in reversed(Edits(source.log).history(number))]


def cut_away(source: EpisodeSource, number: int, lane: int, given: Mapping[str, Any]) -> list[str]:
    """What a person may not want to lose, and an edit is about to take away: steps with ``reward``, the ``end``."""
    if given.get("action") != "trim":
        return []
    columns, (first, last) = source.columns(number, lane), (int(given[name]) for name in ("first", "last"))

    def outside(name: str) -> bool:
        column = columns.get(name)
        return column is not None and bool(np.any(column[:first]) or np.any(column[last + 1 :]))

    lost = {"reward": outside("rewards"), "end": outside("terminated") or outside("truncated")}
    return [name for name, is_lost in lost.items() if is_lost]
