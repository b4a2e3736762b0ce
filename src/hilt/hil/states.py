"""What the batches of a frozen encoder are made of, kept in memory, so that a batch
of n-step returns is a few index operations.

For each step there is ``z`` of its observation and of its next one, which is all that the networks see
(`Agent.states`), in one or several shifts of the images; its numbers; and the step that follows it. A step is taken in
when a batch first needs it, with all others that came since, and forgotten when its log forgets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from hilt.core.tree import Array, ArraySpec
from hilt.recording.recording_folder import SUMMED
from hilt.replay.key_ranges import OFFSET_BITS, Runs
from hilt.replay.sampling.assembly import chain
from hilt.replay.schema import Schema
from hilt.replay.snapshot import Snapshot
from hilt.replay.view import View

AT_ONCE, MANY = 256, 5_000
"""Frames that go through a frozen encoder in one call; and the number of new steps, as
after a restart, from which there is a message"""


class StateTable:
    """Steps by slot, a number that is given to another step when the one that had it is forgotten."""

    def __init__(self, width: int, columns: Mapping[str, Any], shifts: int = 1):
        self.before, self.after = (np.zeros((0, shifts, width), np.float32) for _ in range(2))
        """``z`` of the observation and of the next one in each shift of the images, ``[slot, shift, width]``"""
        self.following = np.zeros(0, np.int64)
        """The slot of the step that follows; -1 if none does"""
        self.follows = np.zeros(0, bool)
        """Whether its observation is the next observation of the step before it in its trajectory"""
        self.awaited = np.zeros(0, np.int64)
        """The key of the step that may still follow; -1 if none may, or if it is here"""
        self.columns = {path: np.zeros((0, *spec.shape), spec.dtype) for path, spec in columns.items()}
        """What a batch has as it is in the log"""
        self._free: list[int] = []
        self._given_back: list[int] = []  # not free yet: a batch that is being drawn may have them

    def take(self, count: int) -> list[int]:
        """Returns slots for this number of steps."""
        if len(self._free) < count:
            self._grow(count)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slot: int) -> None:
        self._given_back.append(slot)

    def windows(self, slots: Array, n: int) -> Array:
        """The slots of the `n` steps from each on, ``[B, n]``. Behind the last step
        that there is, its slot is repeated."""
        window = np.empty((n, len(slots)), np.int64)
        window[0] = slots
        for i in range(1, n):
            following = self.following.take(window[i - 1])
            window[i] = np.where(following >= 0, following, window[i - 1])
        return window.T

    def batch(
        self,
        windows: Array,
        discount: float,
        whole: Sequence[str] = (),
        draw: Callable[[int, int], Array] | None = None,
    ) -> dict[str, Array]:
        """Returns over the steps of these windows, as `hilt.replay.sampling.assembly.NStep` makes them, with the
        columns `whole` of all of them. From now on, slots that were given back may be taken by other steps. With
        several shifts, `draw(shifts, n)` draws `n` of their numbers; without it they are as the images are."""
        window = windows.T  # [n, B]
        slots, last = window[0], window[-1]
        inside = np.ones(window.shape, bool)
        np.not_equal(window[1:], window[:-1], out=inside[1:])
        _, shifts, width = self.before.shape
        z = np.empty((2, len(slots), width), np.float32)
        for kept, rows, out in ((self.before, slots, z[0]), (self.after, last, z[1])):
            if shifts > 1:
                rows = rows * shifts + (0 if draw is None else draw(shifts, len(rows)))
            # every slot is there; the other modes make a copy first
            kept.reshape(-1, width).take(rows, axis=0, out=out, mode="clip")
        batch = {"observations/z": z[0], "next_observations/z": z[1]}
        for path, column in self.columns.items():
            if path in SUMMED:
                discounts = discount ** np.arange(len(window))[:, np.newaxis]
                batch[path] = (np.where(inside, column.take(window), 0) * discounts).sum(axis=0).astype(column.dtype)
            elif path in whole:
                batch[path] = column.take(windows, axis=0)
            else:
                batch[path] = column.take(last if path == "terminated" else slots, axis=0)
        self._free += self._given_back
        self._given_back.clear()
        return {**batch, "n_steps": inside.sum(axis=0)}

    def _grow(self, least: int) -> None:
        have = len(self.following)
        size = max(have + least, have * 5 // 4)
        self.before, self.after = _extended(self.before, size), _extended(self.after, size)
        self.following, self.follows, self.awaited = (
            _extended(each, size) for each in (self.following, self.follows, self.awaited)
        )
        self.columns = {path: _extended(column, size) for path, column in self.columns.items()}
        self._free = [*self._free, *range(size - 1, have - 1, -1)]


class KeptSteps:
    """The steps of a view in a table, which may have those of other views too: an assembly of `hilt.replay.sampling`,
    which reads the log only where it has steps that the table lacks. What it gives of a step is ``window``, the slots
    of the `n` steps from it on: when a batch is drawn, from however many views, `StateTable.batch` makes all of it at
    once. `seen`: the paths of observations that the agent sees, of which `states` makes ``z`` in a shift."""

    added: ClassVar[tuple[str, ...]] = ("window",)

    def __init__(
        self,
        view: View,
        *,
        table: StateTable,
        seen: Sequence[str],
        states: Callable[[dict[str, Array], int], Any],
        n: int,
        notify: Callable[[str], None],
    ):
        self.table, self._n = table, n
        self._view, self._seen, self._states, self._notify = view, list(seen), states, notify
        self._slots: dict[int, int] = {}
        self._previous: dict[int, int] = {}  # the slot of the step that each one follows
        self._done = Runs()
        self._edits = 0  # the version of the log's edits that the table shows
        self.seconds = 0.0
        """Spent in the encoder so far"""

    def __len__(self) -> int:
        return len(self._slots)

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        return {"window": ArraySpec(np.dtype(np.int64), (n, self._n))}

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        """The windows of these steps; `columns` and `out` choose nothing here."""
        self._forget_edited()
        slots = self.find(keys)
        if slots.min() >= 0:
            window = self.table.windows(slots, self._n)
            awaited = self.table.awaited.take(window[:, :-1])
            if awaited.max(initial=-1) < 0 or not steps.exist(awaited[awaited >= 0]).any():
                return {"window": window}
        return {"window": self.table.windows(self.complete(steps, keys), self._n)}

    def find(self, keys: Array) -> Array:
        """Their slots; -1 for those that are not here."""
        return np.array([self._slots.get(key, -1) for key in keys.tolist()], np.int64)

    def complete(self, steps: Snapshot, keys: Array) -> Array:
        """The slots of these steps of a snapshot, after all that follow them, and all others that came, are here."""
        self.refresh()
        wanted = np.unique(chain(steps, keys, self._n)[0])
        gone = np.array([key for key in wanted.tolist() if key not in self._slots], np.int64)
        if len(gone):  # evicted since they were drawn; the next refresh forgets them
            self._add(steps, gone)
            self._done = self._done | _as_runs(gone)
        return self.find(keys)

    def refresh(self) -> None:
        """Takes in all steps that came since, and forgets those that are gone."""
        log = self._view.log
        with log.lock:
            reading, there = log.reading(), self._view.runs().copy()
        with reading as steps:
            for key in (self._done - there).keys().tolist():
                self._forget(key)
            new = (there - self._done).keys()
            if len(new) >= MANY:
                self._notify(f"the features of {len(new)} steps are made, which takes a while")
            for first in range(0, len(new), AT_ONCE):
                self._add(steps, new[first : first + AT_ONCE])
        self._done = there

    def _forget_edited(self) -> None:
        """Steps of episodes that people edited are read again, with their new values."""
        edits = self._view.log.facts.edits
        if self._edits == edits.version:
            return
        version, done = edits.version, self._done.keys()
        edited = np.isin(done >> OFFSET_BITS, edits.changed_since(self._edits))
        for key in done[edited].tolist():
            self._forget(key)
        self._done, self._edits = self._done - _as_runs(done[edited]), version

    def _add(self, steps: Snapshot, keys: Array) -> None:
        table, widths = self.table, steps.widths(keys)
        terminated, truncated = steps.fields(keys, ["terminated", "truncated"])
        slots = np.array(table.take(len(keys)))
        self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))
        for path, column in steps.gather(keys, list(table.columns)).items():
            table.columns[path][slots] = column
        table.follows[slots], table.following[slots] = steps.follows(keys), -1
        table.awaited[slots] = np.where(terminated | truncated, -1, keys + widths)
        table.after[slots] = self._made(steps, keys, "next_")
        earlier, later = self.find(keys - widths), self.find(keys + widths)
        same = table.follows[slots] & (earlier >= 0)  # it begins with what the step before ended with
        table.before[slots[same]] = table.after[earlier[same]]
        if not same.all():
            table.before[slots[~same]] = self._made(steps, keys[~same], "")
        for before, slot, behind in zip(earlier.tolist(), slots.tolist(), later.tolist(), strict=True):
            self._link(before, slot)
            self._link(slot, behind)

    def _link(self, slot: int, behind: int) -> None:
        """Links two steps that follow each other in their trajectory, if both are here."""
        table = self.table
        if slot >= 0 and behind >= 0 and table.awaited[slot] >= 0:
            table.awaited[slot] = -1
            if table.follows[behind]:
                table.following[slot] = behind
                self._previous[behind] = slot

    def _forget(self, key: int) -> None:
        slot = self._slots.pop(key)
        self._previous.pop(int(self.table.following[slot]), None)
        if (before := self._previous.pop(slot, None)) is not None:
            self.table.following[before], self.table.awaited[before] = -1, key  # it may come back, by an edit
        self.table.give_back(slot)

    def _made(self, steps: Snapshot, keys: Array, prefix: str) -> Array:
        columns = steps.gather(keys, [f"{prefix}observations/{path}" for path in self._seen])
        seen = {path: columns[f"{prefix}observations/{path}"] for path in self._seen}
        began = time.perf_counter()
        shifts = range(self.table.before.shape[1])
        made = np.stack([np.asarray(self._states(seen, shift), np.float32) for shift in shifts], axis=1)
        self.seconds += time.perf_counter() - began
        return made


def _extended(array: Array, size: int) -> Array:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def _as_runs(keys: Array) -> Runs:
    first = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 2) != 1)
    return Runs(keys[first], np.diff(first, append=len(keys)))
