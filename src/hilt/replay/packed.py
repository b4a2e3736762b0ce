"""Steps side by side in memory, every frame once: what an actor keeps until it is acknowledged, and what goes over the wire.

A block of steps has one array per small column, one per image column, and for each image of a step the number of its
frame. An observation that equals the next observation of the step before, compared in full, is that frame again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hilt.core.errors import FormatError
from hilt.core.tree import Array, Spec, equal, unflatten
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import INLINE_BYTES, mate

BLOCK_BYTES = 4 << 20
BLOCK_STEPS = 256
MAX_STEPS = 1 << 16
"""Of a block from elsewhere."""


class PackedSteps:
    """A block with room for some steps of one layout. Rows are only ever added, so that a slice stays what it was."""

    def __init__(self, spec: Spec, pool: BufferPool):
        self.spec = spec
        self.count = 0
        large = [path for path, leaf in spec.items() if leaf.nbytes >= INLINE_BYTES]
        pairs = {path: mate(path) for path in large if mate(path) in large and spec[mate(path)] == spec[path]}
        nexts = set(pairs.values())
        step_bytes = sum(leaf.nbytes for path, leaf in spec.items() if path not in nexts)
        self.room = max(1, min(BLOCK_STEPS, BLOCK_BYTES // max(1, step_bytes)))
        place = {path: i for i, path in enumerate(spec)}
        self._columns = {path: np.empty((self.room, *leaf.shape), leaf.dtype) for path, leaf in spec.items() if path not in large}
        self._small = [(place[path], column) for path, column in self._columns.items()]
        self._streams = [_Frames(spec, path, pairs.get(path), place, self.room, pool) for path in large if path not in nexts]
        self.nbytes = sum(column.nbytes for column in self._columns.values()) + sum(stream.frames.nbytes for stream in self._streams)

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

    def slice(self, start: int, stop: int) -> dict[str, Any]:
        """Some of the steps as plain arrays, without a copy; `PackedBlock` reads them."""
        frames, numbers = {}, {}
        for stream in self._streams:
            first, last = stream.span(start, stop)
            frames[stream.path] = stream.frames[first:last]
            numbers.update({path: of_step[start:stop] - first for path, of_step in stream.numbers.items()})
        return {"columns": {path: column[start:stop] for path, column in self._columns.items()}, "frames": frames, "numbers": numbers}

    def steps(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Copies of some of the steps, as they were given."""
        return [unflatten({path: value.copy() for path, value in step.items()}) for step in PackedBlock(self.slice(start, stop))]


class _Frames:
    """The frames of one image column, and of its next observation if it has one."""

    def __init__(self, spec: Spec, path: str, after: str | None, place: Mapping[str, int], room: int, pool: BufferPool):
        leaf = spec[path]
        self.path = path
        self._now, self._after = place[path], None if after is None else place[after]
        self.frames = pool.empty((room + (room // 4 + 1 if after else 0), *leaf.shape), leaf.dtype)
        self.numbers = {p: np.empty(room, np.int64) for p in (path, after) if p is not None}
        self._of_now, self._of_after = self.numbers[path], self.numbers.get(after or "")
        self._stored = 0

    @property
    def full(self) -> bool:
        return self._stored + (1 if self._after is None else 2) > len(self.frames)

    def append(self, row: int, leaves: list[Array]) -> None:
        now = leaves[self._now]
        if self._of_after is None or not row or not equal(now, self.frames[self._of_after[row - 1]]):
            self._of_now[row] = self._store(now)
        else:
            self._of_now[row] = self._of_after[row - 1]
        if self._of_after is not None and self._after is not None:
            self._of_after[row] = self._store(leaves[self._after])

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The frames that some rows refer to: the numbers never fall from row to row."""
        last = self._of_now if self._of_after is None else self._of_after
        return int(self._of_now[start]), int(last[stop - 1]) + 1

    def _store(self, frame: Array) -> int:
        self.frames[self._stored] = frame
        self._stored += 1
        return self._stored - 1


class PackedBlock:
    """A slice of packed steps, read with suspicion: what does not fit together is a `FormatError`."""

    def __init__(self, packed: Mapping[str, Any]):
        if not isinstance(packed, Mapping):
            raise FormatError(f"a block of steps is a {type(packed).__name__}; it was not made by this version of Hilt.")
        columns, frames, numbers = _mapping(packed, "columns"), _mapping(packed, "frames"), _mapping(packed, "numbers")
        arrays = [*columns.values(), *numbers.values()]
        lengths = {len(value) if isinstance(value, np.ndarray) and value.ndim else -1 for value in arrays}
        if len(lengths) != 1 or -1 in lengths:
            raise FormatError("a block of steps has columns of different lengths or none; it was not made by this version of Hilt.")
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
    return next((now for now in (path.replace("next_", "", 1), path.replace("next_", "curr_", 1)) if mate(now) == path), "")
