"""The encoder of steps: every way of a step into memory, onto the wire and into a log goes through this file.

Small columns lie side by side. Large ones (images) are frames, of which each is kept once: `link_frames` compares
an observation in full with what the step before ended with. `PackedSteps` are steps in memory, as a queue keeps
them; a slice of them is what goes over the wire, and a `PackedBlock` at the other end. A `StepEncoder` turns the
steps of one trajectory into rows and new frames of a segment, whether they come one by one, as a packed block
(`BlockSteps`) or as a whole trajectory (`TrajectorySteps`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from hilt.core.checksums import checksum
from hilt.core.errors import FormatError, SchemaError
from hilt.core.tree import Array, Spec, equal, unflatten
from hilt.replay.key_ranges import key_of
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import FOLLOWS, INLINE_BYTES, REFERENCE, FrameColumn, Schema, check_sources, mate
from hilt.replay.storage.segment import AHEAD_BYTES, NewFrames, Reference, Segment

BLOCK_BYTES = 4 << 20
BLOCK_STEPS = 256
MAX_STEPS = 1 << 16
"""Steps in a block that was received, at most."""
T = TypeVar("T")


def link_frames(
    put: Callable[[Array], T], now: Array, after: Array | None, before: Sequence[T] | None, stack: int = 0
) -> tuple[Sequence[T], Sequence[T]]:
    """The frames that a step begins with and those that it ends with, in one column; `put` takes those that are new.

    `before` are the frames that the step before ended with, where this one begins with the same. A stack moves by one
    frame: frame i of the next one may be frame i + 1 of this one.
    """
    begins = before if before is not None else [put(frame) for frame in now] if stack else [put(now)]
    if after is None:
        return begins, ()
    if not stack:
        return begins, [put(after)]
    ends: list[T] = []
    for i in range(stack):
        moved = i + 1 < stack and equal(np.ascontiguousarray(after[i]), np.ascontiguousarray(now[i + 1]))
        ends.append(begins[i + 1] if moved else put(after[i]))
    return begins, ends


# Into rows and frames of a segment


class Tail(NamedTuple):
    """What the last step of a trajectory ended with."""

    state: list[bytes]
    """The small columns of its next observation."""
    frames: dict[str, Sequence[Reference]]
    """Its frames by column, as far as they lie in the segment that is being written."""


class EncodedSteps(NamedTuple):
    """Consecutive steps of one trajectory, as a segment takes them and an index enters them."""

    key: int
    """Of the first of them."""
    steps: int
    """How many they are."""
    rows: bytearray | Array
    """The bytes of their rows."""
    frames: Mapping[str, Sequence[Array]]
    """By column, the frames that are new with them."""
    origin: int
    width: int
    sequence: int
    """Of the last of them."""
    sources: int
    """A bit for each source that acted."""
    ended: bool
    tail: Tail | None = None

    @classmethod
    def of(cls, rows: Array, frames: Mapping[str, Sequence[Array]], tail: Tail | None = None) -> EncodedSteps:
        """From an array of rows, and the frames that are new with them."""
        head, last = rows[0], rows[-1]
        return cls(
            key_of(int(head["#trajectory"]), int(head["#offset"])),
            len(rows),
            rows.view(np.uint8).reshape(-1),
            frames,
            int(head["#origin"]),
            int(head["#width"]),
            int(last["#sequence"]),
            int(np.bitwise_or.reduce(1 << rows["source"].astype(np.int64))),
            bool(last["terminated"] or last["truncated"]),
            tail,
        )


class ManySteps(Protocol):
    """Consecutive steps of one trajectory, from which a `StepEncoder` makes rows."""

    def column(self, path: str) -> Array:
        """``[n, ...]`` values of a small column."""

    def follows(self, first: int, stop: int) -> Array:
        """Returns which of these steps may go on where the step before ended, by what is not a frame."""

    def link(
        self, column: FrameColumn, first: int, stop: int, segment: Segment, known: Sequence[Reference] | None
    ) -> tuple[Sequence[Array], dict[str, Array], Array | bool]:
        """The new frames of a column, the references of each step by path, and which steps begin with what the one
        before ended with. `known` is what the step before `first` ended with, where `first` begins with the same."""

    def state(self, step: int, paths: Sequence[str]) -> list[bytes] | None:
        """Small columns of one step, where the trajectory may go on after it."""


class StepEncoder:
    """Encodes the steps of one trajectory, in order: its rows as they lie on disk,
    and the frames that are new with them."""

    def __init__(self, schema: Schema, trajectory: int, origin: int, width: int = 1):
        self.trajectory, self.origin, self.width = trajectory, origin, width
        self.steps = 0
        """How many steps were committed."""
        layout = self._layout = schema.layout
        order = {path: i for i, path in enumerate(schema.columns)}
        self._inline = [(order[path], plain) for path, plain in zip(layout.inline, layout.plain, strict=True)]
        self._ends = order["terminated"], order["truncated"]
        self._source = order["source"]
        self._next_state = [after for now, after in layout.pairs if now in layout.inline]
        self._state_pairs = [(order[now], order[after]) for now, after in layout.pairs if now in layout.inline]
        self._frames = [
            (c, order[c.columns[0]], order[c.columns[1]] if len(c.columns) > 1 else None) for c in layout.frames
        ]
        self._tail: Tail | None = None

    def continues(self, leaves: Sequence[Array], stored: Callable[[FrameColumn, int], Array]) -> bool:
        """Whether a step begins with the observation that the last one ended with. `stored`
        gives a frame of the segment by number."""
        if self._tail is None:
            return False
        for (now, _), before in zip(self._state_pairs, self._tail.state, strict=True):
            if leaves[now].tobytes() != before:
                return False
        # Where the schema has no next observations, a gap cannot be recognized.
        return all(
            self._is_tail(column, leaves[now], stored) for column, now, after in self._frames if after is not None
        )

    def step(self, leaves: Sequence[Array], follows: bool, sequence: int, segment: Segment) -> EncodedSteps:
        """One step: the path that must be fast. `follows`: it begins where the last one ended. See `Layout.row`."""
        fields: list[Any] = [self.trajectory, sequence, self.steps, self.origin, 1, FOLLOWS if follows else 0]
        fields += [leaves[place] if plain else leaves[place].tobytes() for place, plain in self._inline]
        known = self._tail.frames if follows and self._tail is not None else {}
        new: dict[str, Sequence[Array]] = {}
        tail: dict[str, Sequence[Reference]] = {}
        for column, now, after in self._frames:
            fresh = new[column.name] = NewFrames(segment.frames[column.name])
            following = None if after is None else leaves[after]
            begins, ends = link_frames(fresh.put, leaves[now], following, known.get(column.name), column.stack)
            for reference in (*begins, *ends):
                fields += reference
            if after is not None:
                tail[column.name] = ends
        row = bytearray(self._layout.packed.size)
        self._layout.packed.pack_into(row, 0, *fields)
        terminated, truncated = self._ends
        ended = bool(leaves[terminated] or leaves[truncated])
        sources = 1 << int(leaves[self._source])
        state = [leaves[after].tobytes() for _, after in self._state_pairs]
        key = key_of(self.trajectory, self.steps)
        return EncodedSteps(key, 1, row, new, self.origin, 1, sequence, sources, ended, Tail(state, tail))

    def many(
        self, steps: ManySteps, first: int, stop: int, follows: bool, sequence: int | Array, segment: Segment
    ) -> EncodedSteps:
        """The steps ``[first, stop)`` at once; `follows`: the first of them begins with the
        observation that the last one ended with."""
        count = stop - first
        rows = np.zeros(count, self._layout.row)
        rows["#trajectory"], rows["#origin"], rows["#width"] = self.trajectory, self.origin, self.width
        rows["#sequence"], rows["#offset"] = sequence, np.arange(self.steps, self.steps + count)
        for path in self._layout.inline:
            rows[path] = steps.column(path)[first:stop]
        known = self._tail.frames if follows and self._tail is not None else {}
        goes_on = steps.follows(first, stop)
        new: dict[str, Sequence[Array]] = {}
        tail: dict[str, Sequence[Reference]] = {}
        for column in self._layout.frames:
            new[column.name], references, same = steps.link(column, first, stop, segment, known.get(column.name))
            goes_on = goes_on & same
            for path, of_steps in references.items():
                rows[path] = of_steps.reshape(count, column.stack) if column.stack else of_steps
            if len(column.columns) > 1:
                tail[column.name] = references[column.columns[1]][-max(1, column.stack) :].tolist()
        goes_on[0] |= follows
        rows["#flags"][goes_on] = FOLLOWS
        state = steps.state(stop - 1, self._next_state)
        return EncodedSteps.of(rows, new, None if state is None else Tail(state, tail))

    def advance(self, committed: EncodedSteps) -> None:
        """These steps are in the segment: the next ones go on after them."""
        self.steps += committed.steps
        self._tail = committed.tail

    def leave_segment(self) -> None:
        """The next step goes into another segment and stores its observation there again."""
        if self._tail is not None:
            self._tail = Tail(self._tail.state, {})

    def _is_tail(self, column: FrameColumn, observation: Array, stored: Callable[[FrameColumn, int], Array]) -> bool:
        assert self._tail is not None
        known = self._tail.frames.get(column.name)
        if known is None:
            return False
        for frame, (number, _) in zip(observation if column.stack else [observation], known, strict=True):
            if not equal(np.ascontiguousarray(frame).reshape(-1).view(np.uint8), stored(column, number)):
                return False
        return True


class TrajectorySteps:
    """A whole ``[T, B, ...]`` trajectory, whose steps lie T-major."""

    def __init__(self, schema: Schema, leaves: Sequence[Array], shape: tuple[int, int]):
        self._layout, (length, self.width) = schema.layout, shape
        self.count = length * self.width
        self._columns = {
            path: leaf.reshape(self.count, *leaf.shape[2:]) for path, leaf in zip(schema.columns, leaves, strict=True)
        }

    def column(self, path: str) -> Array:
        return self._columns[path]

    def follows(self, first: int, stop: int) -> Array:
        ended = (self._columns["terminated"] | self._columns["truncated"]).astype(bool)
        follows = np.zeros(stop - first, bool)
        begin = max(first, self.width)
        follows[begin - first :] = ~ended[begin - self.width : stop - self.width]
        for pair in self._layout.pairs:
            if pair[0] not in self._layout.frame_of:
                follows &= self._same(pair, first, stop)
        return follows

    def link(
        self, column: FrameColumn, first: int, stop: int, segment: Segment, known: Sequence[Reference] | None
    ) -> tuple[Sequence[Array], dict[str, Array], Array | bool]:
        """Frames are written to the segment as they are found to be new, while they are in the processor's cache."""
        fresh = NewFrames(segment.frames[column.name])
        now, after = self._columns[column.columns[0]], self._columns[column.columns[-1]]
        paired = len(column.columns) > 1
        follows = np.ones(stop - first, bool)
        begins: list[Sequence[Reference]] = []
        ends: list[Sequence[Reference]] = []
        portion = max(1, AHEAD_BYTES // (column.nbytes * max(1, column.stack)))
        for start in range(first, stop, portion):
            end = min(stop, start + portion)
            if paired:
                follows[start - first : end - first] = self._same(column.columns, start, end)
            for i, same in zip(range(start, end), follows[start - first : end - first].tolist(), strict=True):
                before = i - first - self.width
                known = ends[before] if paired and same and before >= 0 else None
                linked = link_frames(fresh.put, now[i], after[i] if paired else None, known, column.stack)
                begins.append(linked[0])
                ends.append(linked[1])
            segment.write_ahead(column, fresh)
        return (
            fresh,
            {path: _as_column(found) for path, found in zip(column.columns, (begins, ends), strict=False)},
            follows,
        )

    def state(self, step: int, paths: Sequence[str]) -> None:
        return None

    def _same(self, pair: Sequence[str], first: int, stop: int) -> Array:
        """Returns which steps begin with what the step before ended with."""
        now, after = (self._columns[path] for path in pair)
        same, begin = np.zeros(stop - first, bool), max(first, self.width)
        if begin < stop:
            same[begin - first :] = same_rows(now[begin:stop], after[begin - self.width : stop - self.width])
        return same


class BlockSteps:
    """A packed block as a schema has it: frames are known by their numbers, and nothing is compared."""

    def __init__(self, schema: Schema, columns: Mapping[str, Any], count: int):
        self._layout, self._columns, self.count = schema.layout, columns, count
        self._in_order = [(columns[path], spec.shape) for path, spec in schema.columns.items()]
        self.ended = np.asarray(columns["terminated"] | columns["truncated"], bool)

    @classmethod
    def checked(cls, schema: Schema, block: PackedBlock) -> BlockSteps | None:
        """None when a single step must be looked at: something does not fit, or is stored as stacks of frames."""
        if not block.steps or any(column.stack > 1 for column in schema.layout.frames):
            return None
        found: dict[str, Any] = {**block.columns, **block.images}
        for path, value in schema.complete({}).items():
            found.setdefault(path, np.broadcast_to(value, (block.steps,)))
        if found.keys() != set(schema.columns):
            return None
        try:
            for path, spec in schema.columns.items():
                is_frame, image = path in schema.layout.frame_of, isinstance(found[path], tuple)
                values, numbers = found[path] if image else (found[path], np.arange(block.steps))
                values = spec.check_column(path, values)
                found[path] = (values, numbers) if is_frame else values[numbers] if image else values
            check_sources(found["source"])
        except SchemaError:
            return None
        return cls(schema, found, block.steps)

    def runs(self) -> list[tuple[int, int]]:
        """Stretches of steps of which each goes on where the one before it ended."""
        joined = ~self.ended[:-1]
        for now, after in self._layout.pairs:
            if now in self._layout.frame_of:
                same = (self._columns[now][0] is self._columns[after][0]) & (
                    self._columns[now][1][1:] == self._columns[after][1][:-1]
                )
            else:
                same = same_rows(self._columns[now][1:], self._columns[after][:-1])
            joined = joined & same
        cuts = np.flatnonzero(~joined) + 1
        return list(zip([0, *cuts.tolist()], [*cuts.tolist(), self.count], strict=True))

    def leaves(self, step: int) -> list[Array]:
        """One step, as `StepEncoder.continues` takes it."""
        return [
            leaf[0][leaf[1][step]].reshape(shape) if isinstance(leaf, tuple) else np.asarray(leaf[step])
            for leaf, shape in self._in_order
        ]

    def state(self, step: int, paths: Sequence[str]) -> list[bytes]:
        return [self._columns[path][step].tobytes() for path in paths]

    def column(self, path: str) -> Array:
        found: Array = self._columns[path]
        return found

    def follows(self, first: int, stop: int) -> Array:
        """All but the first, of a stretch of `runs`."""
        return np.arange(first, stop) > first

    def link(
        self, column: FrameColumn, first: int, stop: int, segment: Segment, known: Sequence[Reference] | None
    ) -> tuple[Sequence[Array], dict[str, Array], Array | bool]:
        stream, _ = self._columns[column.columns[0]]
        numbers = {path: self._columns[path][1][first:stop] for path in column.columns}
        if len(column.columns) > 1 and self._columns[column.columns[1]][0] is not stream:  # cast, or packed elsewhere
            other, of_step = self._columns[column.columns[1]]
            numbers[column.columns[1]] = of_step[first:stop] + len(stream)
            stream = np.concatenate([stream, other])
        used = np.unique(np.concatenate(list(numbers.values())))
        is_new = used != numbers[column.columns[0]][0] if known is not None else np.ones(len(used), bool)
        flat, new = np.ascontiguousarray(stream).reshape(len(stream), -1).view(np.uint8), used[is_new]
        together = len(new) and new[-1] - new[0] == len(new) - 1
        frames: Any = flat[new[0] : new[-1] + 1] if together else flat[new]
        references = np.zeros(len(used), REFERENCE)
        references["frame"][is_new] = segment.frames[column.name] + np.arange(len(new))
        references["crc"][is_new] = [checksum(frame) for frame in frames]
        if known is not None:
            references[~is_new] = known[0]
        return frames, {path: references[np.searchsorted(used, of_step)] for path, of_step in numbers.items()}, True


def _as_column(references: Sequence[Sequence[Reference]]) -> Array:
    """References of many steps, one after the other."""
    return np.array([reference for of_step in references for reference in of_step], REFERENCE)


def same_rows(a: Array, b: Array) -> Array:
    """Per row, whether two arrays hold the same bytes."""
    rows = len(a)
    if not rows or (a.ctypes.data, a.strides, a.shape, a.dtype) == (b.ctypes.data, b.strides, b.shape, b.dtype):
        return np.ones(rows, bool)  # one array, seen twice
    a, b = (
        np.ascontiguousarray(a).reshape(rows, -1).view(np.uint8),
        np.ascontiguousarray(b).reshape(rows, -1).view(np.uint8),
    )
    word: Any = next(kind for size, kind in ((8, np.uint64), (4, np.uint32), (1, np.uint8)) if a.shape[1] % size == 0)
    a, b = a.view(word), b.view(word)
    chunk = max(1, (1 << 20) // max(1, a.shape[1]))  # the comparison stays in the processor's cache
    return np.concatenate([(a[i : i + chunk] == b[i : i + chunk]).all(axis=1) for i in range(0, rows, chunk)])


# In memory and on the wire


class PackedSteps:
    """A block in memory with room for some steps of one layout. Rows are only ever
    added, so that a slice stays what it was."""

    def __init__(self, spec: Spec, pool: BufferPool):
        self.spec = spec
        self.count = 0
        large = [path for path, leaf in spec.items() if leaf.nbytes >= INLINE_BYTES]
        pairs = {path: mate(path) for path in large if mate(path) in large and spec[mate(path)] == spec[path]}
        nexts = set(pairs.values())
        step_bytes = sum(leaf.nbytes for path, leaf in spec.items() if path not in nexts)
        self.room = max(1, min(BLOCK_STEPS, BLOCK_BYTES // max(1, step_bytes)))
        place = {path: i for i, path in enumerate(spec)}
        self._columns = {
            path: np.empty((self.room, *leaf.shape), leaf.dtype) for path, leaf in spec.items() if path not in large
        }
        self._small = [(place[path], column) for path, column in self._columns.items()]
        self._streams = [
            _FrameMemory(spec, path, pairs.get(path), place, self.room, pool) for path in large if path not in nexts
        ]
        self.nbytes = sum(column.nbytes for column in self._columns.values()) + sum(
            stream.frames.nbytes for stream in self._streams
        )

    @property
    def full(self) -> bool:
        return self.count >= self.room or any(stream.full for stream in self._streams)

    def append(self, leaves: list[Array]) -> None:
        """Takes a copy of one step, given as its leaves in the order of the spec."""
        for place, column in self._small:
            column[self.count] = leaves[place]
        for stream in self._streams:
            stream.append(self.count, leaves)
        self.count += 1

    def slice(self, start: int, stop: int) -> dict[str, object]:
        """Some of the steps as plain arrays, without a copy; `PackedBlock` reads them."""
        frames, numbers = {}, {}
        for stream in self._streams:
            first, last = stream.span(start, stop)
            frames[stream.path] = stream.frames[first:last]
            numbers.update({path: of_step[start:stop] - first for path, of_step in stream.numbers.items()})
        return {
            "columns": {path: column[start:stop] for path, column in self._columns.items()},
            "frames": frames,
            "numbers": numbers,
        }

    def steps(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Copies of some of the steps, as they were given."""
        return [
            unflatten({path: value.copy() for path, value in step.items()})
            for step in PackedBlock(self.slice(start, stop))
        ]


class _FrameMemory:
    """The frames of one image column, and of its next observation if it has one."""

    def __init__(self, spec: Spec, path: str, after: str | None, place: Mapping[str, int], room: int, pool: BufferPool):
        leaf = spec[path]
        self.path = path
        self._now, self._after = place[path], None if after is None else place[after]
        self.frames = pool.empty((room + (room // 4 + 1 if after else 0), *leaf.shape), leaf.dtype)
        self.numbers = {p: np.empty(room, np.int64) for p in (path, after) if p is not None}
        self._begins, self._ends = self.numbers[path], self.numbers.get(after or "")
        self._tail: Sequence[int] = ()
        self._stored = 0

    @property
    def full(self) -> bool:
        return self._stored + (1 if self._after is None else 2) > len(self.frames)

    def append(self, row: int, leaves: list[Array]) -> None:
        now = leaves[self._now]
        before = self._tail if self._tail and equal(now, self.frames[self._tail[0]]) else None
        begins, self._tail = link_frames(self._put, now, None if self._after is None else leaves[self._after], before)
        self._begins[row] = begins[0]
        if self._ends is not None:
            self._ends[row] = self._tail[0]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The frames that some rows refer to: the numbers never fall from row to row."""
        last = self._begins if self._ends is None else self._ends
        return int(self._begins[start]), int(last[stop - 1]) + 1

    def _put(self, frame: Array) -> int:
        self.frames[self._stored] = frame
        self._stored += 1
        return self._stored - 1


class PackedBlock:
    """A slice of packed steps, read with suspicion: what does not fit together is a `FormatError`."""

    def __init__(self, packed: Mapping[str, Any]):
        if not isinstance(packed, Mapping):
            raise FormatError(
                f"a block of steps is a {type(packed).__name__}; it was not made by this version of Hilt."
            )
        columns, frames, numbers = _mapping(packed, "columns"), _mapping(packed, "frames"), _mapping(packed, "numbers")
        arrays = [*columns.values(), *numbers.values()]
        lengths = {len(value) if isinstance(value, np.ndarray) and value.ndim else -1 for value in arrays}
        if len(lengths) != 1 or -1 in lengths:
            raise FormatError(
                "a block of steps has columns of different lengths or none; it was not made by this version of Hilt."
            )
        self.steps = lengths.pop()
        if self.steps > MAX_STEPS:
            raise FormatError(f"a block of {self.steps} steps; at most {MAX_STEPS} are read at a time.")
        self.columns = dict(columns)
        """``[n, ...]`` per small column."""
        self.images: dict[str, tuple[Array, Array]] = {}
        """Per image column its frames, and ``[n]`` which of them each step has."""
        for path, of_step in numbers.items():
            stream = frames.get(path, frames.get(_owner(path)))
            if not isinstance(stream, np.ndarray) or not stream.ndim or of_step.dtype.kind != "i" or of_step.ndim != 1:
                raise FormatError(f"{path}: a block of steps refers to frames that it does not have.")
            if len(of_step) and (of_step.min() < 0 or of_step.max() >= len(stream)):
                raise FormatError(f"{path}: a block of steps refers to frames that it does not have.")
            self.images[path] = stream, of_step

    def with_columns(self, columns: Mapping[str, Array]) -> PackedBlock:
        """The same steps with other small columns."""
        other = copy.copy(self)
        other.columns = dict(columns)
        return other

    def without(self, first: int) -> PackedBlock:
        """The steps from `first` on."""
        other = self.with_columns({path: column[first:] for path, column in self.columns.items()})
        other.images = {path: (stream, of_step[first:]) for path, (stream, of_step) in self.images.items()}
        other.steps -= first
        return other

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The steps, each as leaves by path, which are views."""
        images = {path: (stream, of_step.tolist()) for path, (stream, of_step) in self.images.items()}
        for i in range(self.steps):
            step = {path: column[i] for path, column in self.columns.items()}
            for path, (stream, of_step) in images.items():
                step[path] = stream[of_step[i]]
            yield step


def _mapping(packed: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = packed.get(name)
    if not isinstance(found, Mapping):
        raise FormatError(f"a block of steps has no {name}; it was not made by this version of Hilt.")
    return found


def _owner(path: str) -> str:
    """The observation column whose frames a next observation shares."""
    return next(
        (now for now in (path.replace("next_", "", 1), path.replace("next_", "curr_", 1)) if mate(now) == path), ""
    )
