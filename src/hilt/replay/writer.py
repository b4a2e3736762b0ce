"""Turning steps into rows and frames.

An `EpisodeWriter` takes the single steps of one running episode; `TrajectoryRows` takes a whole ``[T, B, ...]`` one. Both
find out which observation is the frame that the step before ended with, by comparing in full, and store it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hilt.core.checksums import checksum
from hilt.core.errors import ClosedError
from hilt.core.tree import Array, Tree, equal
from hilt.replay.schema import FOLLOWS, REFERENCE, FrameColumn, Layout
from hilt.replay.settings import as_sequence
from hilt.replay.storage.segment import AHEAD_BYTES, NewFrames, Segment

if TYPE_CHECKING:
    from hilt.replay.catalog import Lane
    from hilt.replay.log import Log


Reference = tuple[int, int]
"""A frame's number in its segment, and its checksum."""


class EncodedStep(NamedTuple):
    """A step on its way into a segment."""

    row: bytearray
    frames: dict[str, list[Array]]
    """By column, the frames that are new with this step."""
    tail: dict[str, list[Reference]]
    """By column, the frames that it ends with."""
    sequence: int
    source: int
    ended: bool


class EpisodeWriter:
    """One running episode of a log. Append its steps in order, then `end` it; a context manager ends it by itself."""

    def __init__(self, log: Log, lane: Lane, trajectory: int, origin: int):
        self.trajectory = trajectory
        """The number of this trajectory in its log."""
        self.steps = 0
        """How many steps were appended."""
        self.steps_in_lane = 0
        """How many of them lie in the segment that is being written."""
        self.place = -1
        self.place_version = -1
        self.lane: Lane | None = lane
        self.origin = origin
        self._log = log
        layout = log.schema.layout
        self._frames = layout.frames
        self._row = layout.packed
        order = {path: i for i, path in enumerate(log.schema.columns)}
        self._inline = [(order[path], plain) for path, plain in zip(layout.inline, layout.plain, strict=True)]
        self._ends = order["terminated"], order["truncated"]
        self._source = order["source"]
        self._state_pairs = [(order[a], order[b]) for a, b in layout.pairs if a in layout.inline]
        self._frame_places = [tuple(order[p] for p in c.columns) for c in layout.frames]
        self._tail_state: list[bytes] | None = None
        self._tail: dict[str, list[Reference]] = {}  # the next frames of the last step, by column

    def append(self, step: Tree, sequence: int = -1, timeout: float | None = None) -> int:
        """Stores one step and returns its key. Process-safe when it returns; see `Log.durability` for more.

        `timeout` is how long a rate limiter may hold the step back, in seconds.
        """
        if self._log.closed:
            self._log.require_writable()
        leaves, sequence = self._log.check(step), as_sequence(sequence)
        with self._log.inserting(1, timeout):  # what the last step ended with is known here, also where threads share an episode
            return self._log.commit_step(self, leaves, self.continues(leaves), sequence)

    def end(self) -> None:
        """Nothing more will come; with durability 'every episode' all of it is power-safe when this returns."""
        if self.lane is not None:
            self._log.end_episode(self)

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # For the log

    def continues(self, leaves: Sequence[Array]) -> bool:
        """Whether this step begins with the observation that the last one ended with."""
        if self._tail_state is None or self.lane is None:
            return False
        for (now, _), before in zip(self._state_pairs, self._tail_state, strict=True):
            if leaves[now].tobytes() != before:
                return False
        for column, places in zip(self._frames, self._frame_places, strict=True):
            if len(places) > 1 and not self._is_tail(column, leaves[places[0]]):
                return False
        return True  # also where the schema has no next observations: then nothing says that there is a gap

    def encode(self, leaves: Sequence[Array], follows: bool, sequence: int) -> EncodedStep:
        """The row of a step as it lies on disk, and the frames that are new with it. See `Layout.row`."""
        fields: list[Any] = [self.trajectory, sequence, self.steps, self.origin, 1, FOLLOWS if follows else 0]
        fields += [leaves[place] if plain else leaves[place].tobytes() for place, plain in self._inline]
        new: dict[str, list[Array]] = {}
        tail: dict[str, list[Reference]] = {}
        segment = self.lane_for_append().segment
        for column, places in zip(self._frames, self._frame_places, strict=True):
            base = segment.frames[column.name]
            fresh: list[Array] = []
            now = self._tail.get(column.name) if follows and len(places) > 1 else None
            if now is None:
                now = _store(column, leaves[places[0]], base, fresh)
            for reference in now:
                fields += reference
            if len(places) > 1:
                after = tail[column.name] = _store_next(column, leaves[places[0]], leaves[places[1]], now, base, fresh)
                for reference in after:
                    fields += reference
            new[column.name] = fresh
        row = bytearray(self._row.size)
        self._row.pack_into(row, 0, *fields)
        terminated, truncated = self._ends
        ended = bool(leaves[terminated] or leaves[truncated])
        return EncodedStep(row, new, tail, sequence, int(leaves[self._source]), ended)

    def committed(self, leaves: Sequence[Array], step: EncodedStep) -> None:
        """Remembers what the step ended with."""
        self.steps += 1
        self.steps_in_lane += 1
        self._tail_state = [leaves[after].tobytes() for _, after in self._state_pairs]
        self._tail = step.tail

    def committed_many(self, count: int, last: Sequence[Array], tail: dict[str, list[Reference]]) -> None:
        """The same of a block of steps that ends with this one."""
        self.steps += count
        self.steps_in_lane += count
        self._tail_state = [last[after].tobytes() for _, after in self._state_pairs]
        self._tail = tail

    def tail_of(self, column: str) -> list[Reference] | None:
        """The frames of one column that the last step ended with, as far as they lie in the segment that is being written."""
        return self._tail.get(column)

    def lane_for_append(self) -> Lane:
        if self.lane is None:
            raise ClosedError(f"trajectory {self.trajectory} has ended; begin another one with log.episode().")
        return self.lane

    def move_to(self, lane: Lane) -> None:
        """The next step goes into another segment and stores its observation there again."""
        self.lane, self.steps_in_lane, self._tail = lane, 0, {}

    def _is_tail(self, column: FrameColumn, observation: Array) -> bool:
        refs = self._tail.get(column.name)
        assert self.lane is not None
        if refs is None:
            return False
        for frame, (number, _) in zip(observation if column.stack else [observation], refs, strict=True):
            stored = self._log.stored_frame(self.lane, column, number)
            if not equal(np.ascontiguousarray(frame).reshape(-1).view(np.uint8), stored):
                return False
        return True


class TrajectoryRows:
    """The rows of a whole trajectory, encoded in pieces that each fit into a segment."""

    def __init__(self, layout: Layout, leaves: Mapping[str, Array], shape: tuple[int, int], numbers: Mapping[str, int]):
        self._layout, self._leaves, (self._length, self._width) = layout, leaves, shape
        self.steps = self._length * self._width
        self._numbers = numbers

    def piece(self, first: int, stop: int, segment: Segment) -> tuple[Array, dict[str, NewFrames]]:
        """The rows ``[first, stop)`` and their frames, which are written to the segment as they are found to be new."""
        rows = np.zeros(stop - first, self._layout.row)
        rows["#trajectory"], rows["#origin"], rows["#width"] = self._numbers["trajectory"], self._numbers["origin"], self._width
        rows["#sequence"], rows["#offset"] = self._numbers["sequence"], np.arange(first, stop)
        for path in self._layout.inline:
            rows[path] = self._flat(path)[first:stop]
        frames = {c.name: NewFrames() for c in self._layout.frames}
        follows = self._goes_on(first, stop)
        for column in self._layout.frames:
            follows &= self._store_column(column, rows, first, stop, segment, frames[column.name])
        rows["#flags"] = np.where(follows, FOLLOWS, 0)
        return rows, frames

    def _store_column(self, column: FrameColumn, rows: Array, first: int, stop: int, segment: Segment, fresh: NewFrames) -> Array:
        """Fills in the references of one column; returns which steps begin with the frame that the step before ended with."""
        base = segment.frames[column.name]
        paths = [column.columns[0], column.columns[-1]]
        now, after = (self._flat(path) for path in paths)
        follows = np.ones(stop - first, bool)
        refs: list[list[Reference]] = []
        next_refs: list[list[Reference]] = []
        portion = max(1, AHEAD_BYTES // (column.nbytes * max(1, column.stack)))
        for start in range(first, stop, portion):
            end = min(stop, start + portion)
            if len(column.columns) == 1:
                refs += [_store(column, now[i], base, fresh) for i in range(start, end)]
            else:
                same = follows[start - first : end - first] = self._same(column.columns, start, end)
                for i, is_same in zip(range(start, end), same.tolist(), strict=True):
                    before = i - first - self._width
                    refs.append(next_refs[before] if is_same and before >= 0 else _store(column, now[i], base, fresh))
                    next_refs.append(_store_next(column, now[i], after[i], refs[-1], base, fresh))
            segment.write_ahead(column, fresh)
        for path, found in zip(column.columns, (refs, next_refs), strict=False):
            rows[path] = _as_column(column, found)
        return follows

    def _goes_on(self, first: int, stop: int) -> Array:
        """Returns the steps that may go on where the step before ended, by their small columns."""
        ended = (self._flat("terminated") | self._flat("truncated")).astype(bool)
        follows = np.zeros(stop - first, bool)
        begin = max(first, self._width)
        follows[begin - first :] = ~ended[begin - self._width : stop - self._width]
        for pair in self._layout.pairs:
            if pair[0] not in self._layout.frame_of:
                follows &= self._same(pair, first, stop)
        return follows

    def _same(self, pair: Sequence[str], first: int, stop: int) -> Array:
        """Returns the steps that begin with what the step before ended with."""
        now, after = (self._flat(path) for path in pair)
        same, begin = np.zeros(stop - first, bool), max(first, self._width)
        if begin < stop:
            same[begin - first :] = same_rows(now[begin:stop], after[begin - self._width : stop - self._width])
        return same

    def _flat(self, path: str) -> Array:
        leaf = self._leaves[path]
        return leaf.reshape(self.steps, *leaf.shape[2:])


def _store(column: FrameColumn, value: Array, base: int, fresh: list[Array]) -> list[Reference]:
    """Puts the frames of one column of a step behind those that are fresh, whose numbers begin at `base`."""
    return [_store_one(frame, base, fresh) for frame in (value if column.stack else [value])]


def _store_next(column: FrameColumn, now: Array, after: Array, refs: list[Reference], base: int, fresh: list[Array]) -> list[Reference]:
    """Does what `_store` does for the next observation of the one that lies at `refs`."""
    if not column.stack:
        return _store(column, after, base, fresh)
    out = []
    for i in range(column.stack):  # a stack moves by one: its frame i is frame i + 1 of the stack before
        if i + 1 < column.stack and equal(np.ascontiguousarray(after[i]), np.ascontiguousarray(now[i + 1])):
            out.append(refs[i + 1])
        else:
            out.append(_store_one(after[i], base, fresh))
    return out


def _store_one(frame: Array, base: int, fresh: list[Array]) -> Reference:
    flat = np.ascontiguousarray(frame).reshape(-1).view(np.uint8)
    fresh.append(flat)
    return base + len(fresh) - 1, checksum(flat)


def _as_column(column: FrameColumn, refs: list[list[Reference]]) -> Array:
    """References of many steps, ``[n]`` or ``[n, stack]``."""
    flat = np.array([reference for of_step in refs for reference in of_step], REFERENCE)
    return flat.reshape(len(refs), column.stack) if column.stack else flat


def same_rows(a: Array, b: Array) -> Array:
    """Per row, whether two arrays hold the same bytes."""
    rows = len(a)
    if not rows or (a.ctypes.data, a.strides, a.shape, a.dtype) == (b.ctypes.data, b.strides, b.shape, b.dtype):
        return np.ones(rows, bool)  # one array, seen twice
    a, b = np.ascontiguousarray(a).reshape(rows, -1).view(np.uint8), np.ascontiguousarray(b).reshape(rows, -1).view(np.uint8)
    word: Any = next(kind for size, kind in ((8, np.uint64), (4, np.uint32), (1, np.uint8)) if a.shape[1] % size == 0)
    a, b = a.view(word), b.view(word)
    chunk = max(1, (1 << 20) // max(1, a.shape[1]))  # the comparison stays in the processor's cache
    return np.concatenate([(a[i : i + chunk] == b[i : i + chunk]).all(axis=1) for i in range(0, rows, chunk)])
