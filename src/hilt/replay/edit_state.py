"""What the edits of a log come to: facts, values and which steps are shown, of every trajectory that was edited."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import LockedError
from hilt.core.files import Files
from hilt.core.tree import Array
from hilt.replay.key_ranges import OFFSET_BITS, key_of
from hilt.replay.relabeled import RelabeledValues
from hilt.replay.storage.edit_journal import NAME, EditJournal

MIN_GONE = 1000
"""The file of edits is rewritten when more of them than this are of episodes that are gone, and they are the most"""
POLL_INTERVAL_S = 0.5
"""How often a process that samples looks for edits of others."""
_ALL = (0, 1 << OFFSET_BITS)


class ShownSteps:
    """The steps that are shown of trajectories that are not shown as a whole. It never changes."""

    def __init__(self, ranges: Mapping[int, tuple[int, int]]):
        self.ranges = dict(ranges)
        """Trajectory, first offset that is shown, and the offset behind the last one."""
        numbers = sorted(self.ranges)
        self._numbers = np.array(numbers, np.int64)
        self._first, self._stop = np.array([self.ranges[n] for n in numbers], np.int64).reshape(-1, 2).T

    def __bool__(self) -> bool:
        """Whether any step is not shown."""
        return bool(self.ranges)

    def hides(self, trajectory: int) -> bool:
        """Whether nothing of a trajectory is shown."""
        first, stop = self.ranges.get(trajectory, _ALL)
        return first >= stop

    def clip(self, keys: Array, steps: Array) -> tuple[Array, Array]:
        """Stretches of steps, given by their first keys and their lengths, without the steps that are not shown."""
        if not self.ranges or not len(keys):
            return keys, steps
        low, high = self._bounds(keys)
        first, stop = np.maximum(keys, low), np.minimum(keys + steps, high)
        some = first < stop
        return first[some], (stop - first)[some]

    def contain(self, keys: Array) -> Array:
        """Per key, whether the step is shown if it exists."""
        if not self.ranges:
            return np.ones(len(keys), bool)
        low, high = self._bounds(keys)
        return (keys >= low) & (keys < high)

    def _bounds(self, keys: Array) -> tuple[Array, Array]:
        """Per key, the first one of its trajectory that is shown, and the one behind the last."""
        numbers = keys >> OFFSET_BITS
        place = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        edited, base = self._numbers[place] == numbers, numbers << OFFSET_BITS
        return base + np.where(edited, self._first[place], 0), base + np.where(edited, self._stop[place], _ALL[1])


class EditState:
    """The edits of a log, newest last, and what they come to. An edit that was undone counts for nothing."""

    def __init__(self, folder: Path, files: Files):
        self.journal = EditJournal(folder, files)
        self.edits: dict[int, dict[str, Any]] = {}
        self.undone: set[int] = set()
        self.values = RelabeledValues(NAME)
        self.shown = ShownSteps({})
        self.moved: set[int] = set()
        """Trajectories that show other steps than before; the log takes them out of here."""
        self.version = 0
        self._changed_at: dict[int, int] = {}  # trajectory -> the version with which it changed
        self._of: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # trajectory -> (edit, what it changes)
        self._concerning: dict[int, list[int]] = {}  # trajectory -> the edits that are about it, undoings among them
        self._parts: list[int] = []  # edits that hide the copies of another one until that is made
        self._undos: dict[int, int] = {}  # edit -> the one that it undoes
        self._texts: dict[str, str] = {}
        self._placed: dict[int, list[tuple[str, int, int]]] = {}  # trajectory -> column, first key, count of its values
        self._next_look = 0.0

    def due(self) -> bool:
        """Whether the file has changed, for a process that asks often: it looks every `POLL_INTERVAL_S`."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + POLL_INTERVAL_S
        return self.journal.changed()

    def read_new(self) -> set[int]:
        """Takes in the edits that were made since; returns the trajectories that they change."""
        return self.take(self.journal.read_new()) if self.journal.changed() else set()

    def append(
        self, edit: dict[str, Any] | Callable[[], dict[str, Any] | None], durable: bool
    ) -> tuple[dict[str, Any] | None, set[int]]:
        """Appends an edit; returns it with its number, and the trajectories that it and others made since change. A
        function is called when all others are known and no more can be made, and may return None: no edit."""
        changed: set[int] = set()

        def make(new: list[dict[str, Any]]) -> dict[str, Any] | None:
            changed.update(self.take(new))
            return edit() if callable(edit) else edit

        made = self.journal.append(make, durable)
        return made, changed | (self.take([made]) if made is not None else set())

    def compact(self, live: Set[int], durable: bool) -> bool:
        """Removes the edits of trajectories that are gone for good, from the file too, once they are the most of many;
        returns whether it has looked. It is for the process that writes the log, which knows what is there. While
        others are editing nothing is done."""
        try:
            with self.journal.locked(timeout=0.0):
                if self.journal.changed():
                    return False
                gone = self._gone(live)
                if self.journal.corrupt or len(gone) <= MIN_GONE or 2 * len(gone) <= len(self.edits):
                    return True
                self.journal.leave_out(gone, durable)
        except LockedError:
            return False
        for number in gone:
            del self.edits[number]
            self._undos.pop(number, None)
        self.undone &= self.edits.keys()
        for trajectory in [one for one, known in self._concerning.items() if gone.issuperset(known)]:
            for known in (self._concerning, self._of, self._changed_at):
                known.pop(trajectory, None)
            for column, first, count in self._placed.pop(trajectory, []):
                self.values.take_out(column, first, count)
        return True

    def _gone(self, live: Set[int]) -> set[int]:
        """The edits of which no trajectory is there any more, but for the newest, after which others are numbered.
        Splits and joins stay: the numbers of copies that were never written are not to be given to others."""
        parts, newest = {*self._parts}, max(self.edits, default=0)

        def copies(edit: Mapping[str, Any]) -> bool:
            while edit:
                if "part" in edit or edit.get("undo") in parts:
                    return True
                edit = self.edits.get(edit.get("undo", 0), {})
            return False

        return {
            number
            for number, edit in self.edits.items()
            if number != newest and live.isdisjoint(self.trajectories(edit)) and not copies(edit)
        }

    def take(self, edits: list[dict[str, Any]]) -> set[int]:
        changed: set[int] = set()
        for edit in edits:
            if edit["edit"] in self.edits:
                continue
            number = edit["edit"]
            for name in ("action", "author"):  # few are different: each is kept once
                edit[name] = self._texts.setdefault(edit[name], edit[name])
            self.edits[number] = edit
            concerned = self.trajectories(edit)
            changed |= concerned
            for trajectory in concerned:
                self._concerning.setdefault(trajectory, []).append(number)
            for change in edit.get("changes", []):
                self._of.setdefault(change["trajectory"], []).append((number, change))
            if "undo" in edit:
                self._undos[number] = edit["undo"]
            if "part" in edit:
                self._parts.append(number)
        if not changed:
            return changed
        if any("undo" in edit for edit in edits):
            self.undone = self._find_undone()
        self.version += 1
        ranges = dict(self.shown.ranges)
        for trajectory in changed:
            self._changed_at[trajectory] = self.version
            self._renew(trajectory, ranges)
        if ranges != self.shown.ranges:
            self.shown = ShownSteps(ranges)
        return changed

    def trajectories(self, edit: Mapping[str, Any]) -> set[int]:
        """The trajectories that an edit is about; those of the edit that it undoes are among them."""
        out: set[int] = set()
        while edit:
            out |= {change["trajectory"] for change in edit.get("changes", [])}
            edit = self.edits.get(edit.get("undo", 0), {})
        return out

    def concerning(self, trajectory: int) -> list[dict[str, object]]:
        """The edits that are about a trajectory, oldest first."""
        return [self.edits[number] for number in self._concerning.get(trajectory, [])]

    def last_trajectory(self) -> int:
        """The highest number that an edit names, -1 if none does: it may be of copies that were not written."""
        return max(self._of, default=-1)

    def edited(self) -> Set[int]:
        """The trajectories that edits are about, those that were undone among them."""
        return self._of.keys()

    def withdrawn(self) -> set[int]:
        """The copies of splits and joins that were undone or never completed: they are no episodes of the log."""
        parts = (self.edits[number] for number in self._parts if number not in self.undone)
        return {change["trajectory"] for edit in parts for change in edit["changes"]}

    def changed_since(self, version: int) -> list[int]:
        """The trajectories that were edited after this version."""
        return [trajectory for trajectory, changed in self._changed_at.items() if changed > version]

    def changes_of(self, trajectory: int) -> list[dict[str, Any]]:
        """What the edits of a trajectory that count change, oldest first."""
        return [change for number, change in self._of.get(trajectory, []) if number not in self.undone]

    def about(self, trajectory: int, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """The facts about a trajectory: those that were recorded, as the edits change them."""
        out = dict(recorded)
        if trajectory not in self._of:
            return out
        for change in self.changes_of(trajectory):
            given = change.get("facts", {})
            out = {name: value for name, value in {**out, **given}.items() if name not in given or value is not None}
            if "tag" in change:
                name, there = change["tag"]
                out["tags"] = sorted({*out.get("tags", []), name} if there else {*out.get("tags", [])} - {name})
            if "mark" in change:
                name, step, there = change["mark"]
                marks = {known: {*steps} for known, steps in out.get("marks", {}).items()}
                (set.add if there else set.discard)(marks.setdefault(name, set()), step)
                out["marks"] = {known: sorted(steps) for known, steps in marks.items() if steps}
            out.update({name: change[name] for name in ("bad", "deleted") if name in change})
        empty = {"tags": [], "marks": {}, "bad": False, "deleted": False}
        return {name: value for name, value in out.items() if name not in empty or value != empty[name]}

    def renew_locks(self) -> None:
        """In a forked process."""
        self.values.renew_lock()
        self.journal.renew_locks()

    def _find_undone(self) -> set[int]:
        """An undoing can be undone too, so the newest ones decide first."""
        undone: set[int] = set()
        for number, other in sorted(self._undos.items(), reverse=True):
            if number not in undone:
                undone.add(other)
        return undone

    def _renew(self, trajectory: int, ranges: dict[int, tuple[int, int]]) -> None:
        """Works out the values and the range of a trajectory from its edits."""
        for column, first, count in self._placed.pop(trajectory, []):
            self.values.take_out(column, first, count)
        placed, shown, cut, hidden = [], _ALL, 0, {"bad": False, "deleted": False}
        for change in self.changes_of(trajectory):
            for column, offset, values in change.get("values", []):
                first = key_of(trajectory, offset)
                self.values.put(column, first, values)
                placed.append((column, first, len(values)))
            if "trim" in change:
                first, last, cut = change["trim"] or (0, _ALL[1] - 1, 0)
                shown = (first, last + 1)
            hidden |= {name: change[name] for name in hidden if name in change}
        if cut:  # the rows of the last step that is shown
            first = key_of(trajectory, shown[1] - cut)
            self.values.put("truncated", first, [True] * cut)
            placed.append(("truncated", first, cut))
        if placed:
            self._placed[trajectory] = placed
        before = ranges.pop(trajectory, _ALL)
        now = (0, 0) if any(hidden.values()) else shown
        if now != _ALL:
            ranges[trajectory] = now
        if now != before:
            self.moved.add(trajectory)
