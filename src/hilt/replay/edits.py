"""Edits of a log's episodes: labels, rewards, marks, tags, trimming and deletion, each with its author and time.

    edits = Edits(Log.open("runs/pick/log", "r"), author="ann")
    edits.label(3, success=False)
    edits.trim(4, first=12, last=80)
    edits.undo(edits.bad([5, 6]).number)

An edit is appended to a file of the log, and the recorded steps stay as they are: it can be undone, and so can its
undoing. Views, batches and conversions show what the edits come to. Any number of processes may edit a log, also while
another one writes to it; no edit is lost, and each is process-safe when its call returns.
"""

from __future__ import annotations

import datetime
import getpass
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.trajectory import ESTIMATES, INSTRUCTION
from hilt.replay.facts import plain_facts
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.recut import (
    ACTOR,
    cut_steps,
    facts_of_estimates,
    facts_of_joined,
    facts_of_piece,
    joined,
    piece,
    read_columns,
)

SUCCESS_COLUMNS = ("success", "succeed")
"""Columns of steps that tell the success of an episode, at its last step; a label changes them too."""
FRAME_LABELS: dict[bool | None, str] = {True: "success frame", False: "failure frame", None: "unknown frame"}
"""The names of the marks by which `Edits.label_frame` labels what a step led to."""
MAX_NAME_CHARACTERS = 100
ADD_TIMEOUT_S = 60.0
"""How long a rate limiter of the log may hold back the copies of `Edits.split` and `Edits.join`."""
_OFFSET = (1 << OFFSET_BITS) - 1
_OWN_FACTS = ("tags", "marks", "bad", "deleted")


@dataclass(frozen=True)
class Edit:
    """One edit, as the history shows it."""

    number: int
    """Counted from 1; 0 of a dry run"""
    time: str
    """In UTC, ``2026-11-17T06:30:00.123Z``"""
    author: str
    action: str
    """What was done, in words: ``label success``, ``trim 12 to 80``, ..."""
    episodes: tuple[int, ...]
    undoes: int | None
    """The number of the edit that this one undoes."""
    undone: bool
    """Whether it does not count any more."""


class Edits:
    """Edits the episodes of a log, each named by the number of its trajectory. A method takes one episode or several,
    and makes one edit of them, which is undone as a whole. Steps are counted from the recorded beginning of the
    episode, whatever is trimmed; -1 is the last step that is shown. With `dry_run`, edits are checked and returned, and
    nothing is written."""

    def __init__(self, log: Log, author: str = "", dry_run: bool = False):
        self.log, self._author, self._dry_run = log, author or _user(), dry_run

    # What an episode is

    def label(
        self, episode: int | Sequence[int], success: bool | None, reward: float | None = None, *, author: str = ""
    ) -> Edit:
        """Success, failure, or unknown (None). Columns ``success`` and ``succeed`` of its steps follow. With `reward`,
        the last step that is shown gets this reward."""

        def change(number: int) -> dict[str, Any]:
            values = [] if success is None else self._success_values(number, bool(success))
            if reward is not None:
                values.append(self._at_step(number, -1, "rewards", reward))
            return {"facts": {"success": None if success is None else bool(success)}, "values": values}

        word = {True: "success", False: "failure", None: "unknown"}[None if success is None else bool(success)]
        return self._make(f"label {word}" + ("" if reward is None else f", reward {reward:g}"), episode, change, author)

    def bad(self, episode: int | Sequence[int], bad: bool = True, *, author: str = "") -> Edit:
        """A bad episode is in no view, batch or conversion, until it is marked as good again."""
        return self._make("mark as bad" if bad else "mark as good", episode, lambda _: {"bad": bad}, author)

    def instruction(self, episode: int | Sequence[int], text: str, *, author: str = "") -> Edit:
        """The instruction of the episode, in words."""
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"instruction {text!r}: expected a text that is not empty.")
        return self._make(f"instruction {text!r}", episode, lambda _: {"facts": {INSTRUCTION: text}}, author)

    def facts(self, episode: int | Sequence[int], *, author: str = "", **facts: Any) -> Edit:
        """Other facts about the episode; None removes one."""
        if not facts or (own := [name for name in _OWN_FACTS if name in facts]):
            got = f"{own[0]!r}, which has a method of its own" if facts else "none"
            raise ConfigError(f"facts: expected names and values, such as reviewed=True, got {got}.")
        plain = plain_facts(facts)
        words = ", ".join(f"{name}={value!r}" for name, value in plain.items())
        return self._make(f"fact {words}", episode, lambda _: {"facts": plain}, author)

    def tag(self, episode: int | Sequence[int], name: str, *, author: str = "") -> Edit:
        """Adds a tag."""
        return self._make(f"tag {name}", episode, lambda _: {"tag": [_checked_name(name), True]}, author)

    def untag(self, episode: int | Sequence[int], name: str, *, author: str = "") -> Edit:
        """Removes a tag."""
        for number in _numbers(episode):
            if name not in (tags := self.log.facts.about(number).get("tags", [])):
                raise UnknownNameError(f"tag of trajectory {number}", name, tags)
        return self._make(f"untag {name}", episode, lambda _: {"tag": [name, False]}, author)

    # Steps of it

    def reward(self, episode: int | Sequence[int], step: int, value: float, *, author: str = "") -> Edit:
        """The reward of one step."""
        return self._make(
            f"reward {value:g} at step {step}",
            episode,
            lambda number: {"values": [self._at_step(number, step, "rewards", value)]},
            author,
        )

    def values(
        self, episode: int | Sequence[int], column: str, values: object, first: int = 0, *, author: str = ""
    ) -> Edit:
        """New values in a column of numbers: one value for all steps from `first` on, or one for each of some of them,
        ``[steps, ...]``."""

        def change(number: int) -> dict[str, Any]:
            offset = self._step(number, first) * self._width(number)
            given = self._spread(number, column, values, offset)
            return {"values": [[column, offset, self.log.check_values(number, column, given, offset).tolist()]]}

        return self._make(f"{column} from step {first} on", episode, change, author)

    def mark(self, episode: int | Sequence[int], step: int, name: str, *, author: str = "") -> Edit:
        """A mark with a name, such as ``grasp``, at a step. A name may stand at several steps."""
        if name in FRAME_LABELS.values():
            raise ConfigError(f"mark {name!r}: this name is kept for frame labels, such as --frame success --step 12.")
        return self._make(
            f"mark {name} at step {step}",
            episode,
            lambda number: {"mark": [_checked_name(name), self._step(number, step), True]},
            author,
        )

    def label_frame(self, episode: int | Sequence[int], step: int, success: bool | None, *, author: str = "") -> Edit:
        """Whether what a step led to, its next observation, is a success: a label for reward classifiers. None leaves
        the frame out of their training. It is kept as a mark, and takes the place of an earlier one."""
        chosen = None if success is None else bool(success)

        def change(number: int) -> list[dict[str, Any]]:
            if (width := self._width(number)) > 1:
                raise ConfigError(
                    f"trajectory {number} has {width} rows side by side, and a frame label is about one of them: copy "
                    f"the log first, which makes each an episode: hilt data convert {self.log.path} COPY"
                )
            found = self._step(number, step)
            return [{"mark": [name, found, value is chosen]} for value, name in FRAME_LABELS.items()]

        word = FRAME_LABELS[chosen].partition(" ")[0]
        return self._make(f"frame label {word} at step {step}", episode, change, author)

    def unmark(self, episode: int | Sequence[int], step: int, name: str, *, author: str = "") -> Edit:
        """Removes a mark."""
        for number in _numbers(episode):
            marks = self.log.facts.about(number).get("marks", {})
            if self._step(number, step) not in marks.get(name, []):
                raise UnknownNameError(f"mark at step {step} of trajectory {number}", name, marks)
        return self._make(
            f"unmark {name} at step {step}",
            episode,
            lambda number: {"mark": [name, self._step(number, step), False]},
            author,
        )

    def trim(
        self, episode: int | Sequence[int], first: int | None = None, last: int | None = None, *, author: str = ""
    ) -> Edit:
        """Only the steps from `first` to `last` are shown, both included; None for the recorded ones. The last one
        counts as truncated if others followed it. Without both, all of it is shown again."""

        def change(number: int) -> dict[str, Any]:
            if first is None and last is None:
                return {"trim": None}
            width, steps = self._width(number), self.log.trajectory_keys(number, hidden=True) & _OFFSET
            begin = int(steps[0]) // width if first is None else self._step(number, first)
            end = int(steps[-1]) // width if last is None else self._step(number, last)
            if begin > end:
                raise ConfigError(f"trim {first} to {last}: expected a first step that is not behind the last one.")
            stop = end * width + width - 1
            return {"trim": [begin * width, _OFFSET if last is None else stop, width if stop < steps[-1] else 0]}

        ends = f"{'the beginning' if first is None else first} to {'the end' if last is None else last}"
        return self._make("show all steps" if first is last is None else f"trim {ends}", episode, change, author)

    def delete(self, episode: int | Sequence[int], *, author: str = "") -> Edit:
        """The episode is in no view and no list any more. Its bytes stay, so that this can be undone; `Log.delete` is
        for good."""
        return self._make("delete", episode, lambda _: {"deleted": True}, author)

    def estimates(self, found: Mapping[int, Mapping[str, Any]], *, author: str = "") -> Edit | None:
        """What a value model found about each step of episodes, as `facts_of_estimates` takes it, in one edit. Episodes
        that have the same already, of this model and with this outcome, are left out, also if another process writes
        them at this moment; None: all have."""
        known = set(self.log.trajectories(hidden=True))
        if missing := [number for number in found if number not in known]:
            raise UnknownNameError("trajectory", str(missing[0]), map(str, sorted(known)[-5:]))
        models = sorted({str(one["model"]) for one in found.values()})

        def make() -> dict[str, Any] | None:
            new = [n for n in sorted(found) if not _is_same(self.log.facts.about(n).get(ESTIMATES), found[n])]
            changes = [{"trajectory": n, "facts": plain_facts(facts_of_estimates(found[n]))} for n in new]
            return (
                self._signed({"action": f"value model {', '.join(models)}", "changes": changes}, author)
                if new
                else None
            )

        with self.log.lock:
            if self._dry_run:
                made = make()
                return None if made is None else self._as_edit({"edit": 0, **made})
            written = self.log.edit(make)
            return None if written is None else self._as_edit(written)

    # Episodes made of others

    def split(self, episode: int, at: int | str, *, author: str = "") -> Edit:
        """Cuts an episode before a step, or before every step that has a mark of this name. The pieces are new episodes
        of the log, which must be open for writing; undoing this shows the episode again instead of them."""
        with self.log.lock:
            facts, keys, width = self.log.facts.about(episode), self.log.trajectory_keys(episode), self._width(episode)
            first, length = int(keys[0] & _OFFSET) // width, len(keys) // width
            cuts = {self._step(episode, step) - first for step in cut_steps(facts, at)}
            inside = sorted(cut for cut in cuts if 0 < cut < length)
            if not inside:
                span = f"{first + 1} to {first + length - 1}"
                raise ConfigError(f"split at {at!r}: expected a step from {span} of trajectory {episode}.")
            columns = read_columns(self.log, keys, width)
            pieces = [
                (piece(columns, a, b), facts_of_piece(facts, first + a, first + b, b == length))
                for a, b in pairwise([0, *inside, length])
            ]
            return self._replace(f"split at {at}", [episode], pieces, author)

    def join(self, episodes: Sequence[int], *, author: str = "") -> Edit:
        """Makes one episode of several, in this order. It is a new one of the log, which must be open for writing;
        undoing this shows the episodes again instead of it."""
        numbers = [int(number) for number in episodes]
        if len(set(numbers)) != len(numbers) or len(numbers) < 2:
            raise ConfigError(f"join {numbers}: expected two or more episodes, each once.")
        with self.log.lock:
            widths = {self._width(number) for number in numbers}
            if len(widths) > 1:
                raise ConfigError(f"join {numbers}: expected episodes with as many rows side by side, got {widths}.")
            (width,), keys = widths, [self.log.trajectory_keys(number) for number in numbers]
            lengths, parts = [len(k) // width for k in keys], [read_columns(self.log, k, width) for k in keys]
            facts = []
            for number, own, length in zip(numbers, keys, lengths, strict=True):
                first = int(own[0] & _OFFSET) // width
                facts.append(facts_of_piece(self.log.facts.about(number), first, first + length, last=True))
            whole = facts_of_joined(facts, lengths)
            return self._replace(f"join {', '.join(map(str, numbers))}", numbers, [(joined(parts), whole)], author)

    # What was edited

    def undo(self, number: int | None = None, *, author: str = "") -> Edit:
        """Undoes an edit, or the newest one that counts. Undoing an edit of this kind does it again."""
        self.log.refresh()
        state = self.log.facts.edits
        if number is None:
            counting = [n for n, edit in state.edits.items() if n not in state.undone and _is_edit(edit)]
            if not counting:
                raise ConfigError(f"{self.log.path}: there is no edit to undo.")
            number = max(counting)
        if number not in state.edits or "part" in state.edits[number]:
            raise UnknownNameError("edit", str(number), map(str, sorted(state.edits)[-5:]))
        if number in state.undone:
            raise ConfigError(f"edit {number} is undone already; see: hilt data history {self.log.path}")
        return self._append({"action": f"undo {number} ({state.edits[number]['action']})", "undo": int(number)}, author)

    def history(self, episode: int | None = None) -> list[Edit]:
        """All edits, or those of one episode, oldest first."""
        self.log.refresh()
        state = self.log.facts.edits
        edits = state.edits.values() if episode is None else state.concerning(episode)
        return [self._as_edit(edit) for edit in sorted(edits, key=lambda one: one["edit"]) if "part" not in edit]

    # Inside

    def _make(
        self,
        action: str,
        episode: int | Sequence[int],
        change: Callable[[int], dict[str, Any] | list[dict[str, Any]]],
        author: str,
    ) -> Edit:
        numbers = _numbers(episode)
        with self.log.lock:
            known = set(self.log.trajectories(hidden=True))
            for number in numbers:
                if number not in known:
                    raise UnknownNameError("trajectory", str(number), map(str, sorted(known)[-5:]))
            made = ((number, change(number)) for number in numbers)
            changes = [
                {"trajectory": number, **one}
                for number, parts in made
                for one in (parts if isinstance(parts, list) else [parts])
            ]
            return self._append({"action": action, "changes": changes}, author)

    def _replace(
        self, action: str, old: list[int], new: list[tuple[dict[str, Any], dict[str, Any]]], author: str
    ) -> Edit:
        """Episodes take the place of others, in one edit. Until it is made, an edit that only this one undoes hides
        them, so that a process that is killed meanwhile changes nothing."""
        if any(self.log.index.entries["open"][place] for n in old for place in self.log.index.places_of(n)):
            raise ConfigError(f"{action}: an episode is still running; end it before.")
        shown = [{"trajectory": number, "deleted": True} for number in old]
        if self._dry_run:
            return self._append({"action": action, "changes": shown}, author)
        self.log.require_writable()
        numbers = [self.log.catalog.next_trajectory + i for i in range(len(new))]
        hidden = [{"trajectory": number, "deleted": True} for number in numbers]
        part = self._append({"action": f"{action}: copies", "part": True, "changes": hidden}, author)
        try:
            for columns, facts in new:
                self.log.add(columns, actor=ACTOR, facts=facts, timeout=ADD_TIMEOUT_S)
        finally:
            while self.log.catalog.next_trajectory <= numbers[-1]:  # of copies that failed: nothing else is hidden
                self.log.catalog.take_trajectory()
        return self._append({"action": action, "undo": part.number, "changes": shown}, author)

    def _append(self, edit: dict[str, Any], author: str) -> Edit:
        signed = self._signed(edit, author)
        made = {"edit": 0, **signed} if self._dry_run else self.log.edit(signed)
        assert made is not None  # only a function may decide against an edit
        return self._as_edit(made)

    def _signed(self, edit: dict[str, Any], author: str) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        return {**edit, "author": author or self._author, "time": now.replace("+00:00", "Z")}

    def _as_edit(self, edit: dict[str, Any]) -> Edit:
        state = self.log.facts.edits
        return Edit(
            edit["edit"],
            edit["time"],
            edit["author"],
            edit["action"],
            tuple(sorted(state.trajectories(edit))),
            None if _is_edit(edit) else edit.get("undo"),
            edit["edit"] in state.undone,
        )

    def _width(self, number: int) -> int:
        with self.log.lock:
            places = self.log.index.places_of(number)
            if not places:
                raise UnknownNameError("trajectory", str(number), [])
            return int(self.log.index.entries["width"][places[0]])

    def _step(self, number: int, step: int) -> int:
        """A step of an episode, counted from its recorded beginning; below 0 from the end of what is shown."""
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
            raise ConfigError(f"step {step!r}: expected a whole number.")
        width, steps = self._width(number), self.log.trajectory_keys(number, hidden=True) & _OFFSET
        first, last = int(steps[0]) // width, int(steps[-1]) // width
        found = int(step) if step >= 0 else self._last_shown(number, last, width) + 1 + int(step)
        if not first <= found <= last:
            raise SchemaError(f"trajectory {number} has the steps {first} to {last}, and step {step} was given.")
        return found

    def _last_shown(self, number: int, last: int, width: int) -> int:
        trims = [change["trim"] for change in self.log.facts.edits.changes_of(number) if "trim" in change]
        return last if not trims or trims[-1] is None else min(last, trims[-1][1] // width)

    def _at_step(self, number: int, step: int, column: str, value: Any) -> list[Any]:
        """One value for a step, as a change of values: all that run side by side in it get the same."""
        width, found = self._width(number), self._step(number, step)
        checked = self.log.check_values(number, column, np.array([value] * width), found * width)
        return [column, found * width, checked.tolist()]

    def _spread(self, number: int, column: str, values: Any, offset: int) -> Any:
        """The values of the steps from an offset on: one for each of them, from a list or from one value."""
        if column not in self.log.schema.layout.inline:
            raise UnknownNameError("column of numbers", column, self.log.schema.layout.inline)
        spec, left = self.log.schema.columns[column], int(self.log.trajectory_keys(number, hidden=True)[-1]) & _OFFSET
        left += 1 - offset
        try:
            given = np.asarray(values, spec.dtype)
        except (TypeError, ValueError):
            raise ConfigError(f"{column}={values!r}: expected {spec}, or a list of these, one for each step.") from None
        if given.shape == spec.shape:
            return np.broadcast_to(given, (left, *spec.shape)).copy()
        if given.shape[1:] != spec.shape or len(given) > left:
            raise ConfigError(
                f"{column}: expected one value or up to {left}, of shape {spec.shape}, for the steps of trajectory "
                f"{number} from {offset} on; got an array of {given.shape}."
            )
        return given

    def _success_values(self, number: int, success: bool) -> list[Any]:
        columns = [
            name
            for name in SUCCESS_COLUMNS
            if name in self.log.schema.layout.inline and self.log.schema.columns[name].dtype == bool
        ]
        if success:
            return [self._at_step(number, -1, name, True) for name in columns]
        steps = self.log.trajectory_keys(number, hidden=True) & _OFFSET
        return [[name, int(steps[0]), [False] * int(steps[-1] - steps[0] + 1)] for name in columns]


def frame_labels(facts: Mapping[str, Any]) -> dict[int, bool | None]:
    """The frame labels of an episode by step, from the facts about it: success, failure, or None for unknown."""
    marks = facts.get("marks", {})
    return {int(step): value for value, name in FRAME_LABELS.items() for step in marks.get(name, ())}


def _is_same(known: Any, found: Mapping[str, Any]) -> bool:
    """Whether estimates are known already: of the same model, for the same steps, with the same outcome."""
    if not isinstance(known, Mapping) or len(known.get("value", ())) != len(found["value"]):
        return False
    return all(known.get(name) == found.get(name) for name in ("model", "first", "success"))


def _is_edit(edit: dict[str, Any]) -> bool:
    """Whether it changes something by itself: not an undoing, and not a part of another edit."""
    return "changes" in edit and "part" not in edit


def _numbers(episode: int | Sequence[int]) -> list[int]:
    numbers = [episode] if isinstance(episode, (int, np.integer)) else list(episode)
    if not numbers:
        raise ConfigError("expected the number of an episode or several, got none.")
    return sorted({int(number) for number in numbers})


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"{name!r}: expected a name of 1 to {MAX_NAME_CHARACTERS} printable characters.")
    return name


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user has no name here, as in some containers
        return "unknown"
