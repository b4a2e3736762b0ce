"""Gathering steps: the segments of one layout as flat arrays of rows and frames.

A step's address is one integer, `slot * rows_per_slot + row`. A batch is one ``take`` of rows, then per frame column
one ``take`` at the frames those rows refer to. Frames that are not in memory are read with `pread`, in the order of the
file and announced ahead: a memory map would fetch them page by page, many times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from hilt.core.errors import SchemaError
from hilt.core.platform import announce_read, is_cached
from hilt.core.tree import Array, ArraySpec
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import FrameColumn, Schema
from hilt.replay.settings import ReadOptions
from hilt.replay.storage.arena import make_arena
from hilt.replay.storage.checks import ReadChecks, differs, wrong_frame
from hilt.replay.storage.segment import ROWS, Segment

Action = Callable[[], None]
_PROBES = 12
"""Frames of a batch that are asked whether they are in memory."""
_AHEAD = 32
"""Frames that are announced to the system ahead of their read."""


class Table:
    """Segments of one schema, each in a slot."""

    def __init__(
        self,
        schema: Schema,
        rows_per_slot: int,
        pool: BufferPool,
        options: ReadOptions,
        later: Callable[[Action], None],
    ):
        """`later` calls an action when all current readers have ended."""
        self.schema, self.layout, self._pool = schema, schema.layout, pool
        self.rows_per_slot = rows_per_slot
        self._rows = make_arena(self.layout.row.itemsize, self.rows_per_slot)
        self._frames = {c.name: make_arena(c.nbytes, self.rows_per_slot) for c in self.layout.frames}
        self._segments: dict[int, Segment] = {}
        self._free: list[int] = []
        self._budget, self._later, self._checks = options.cache_bytes, later, ReadChecks(options.verify_reads)
        self._mapped: dict[str, dict[int, int]] = {c.name: {} for c in self.layout.frames}
        self._probe = np.random.default_rng(0)
        self.disk_reads = 0

    def add(self, segment: Segment) -> int:
        """The slot of a segment."""
        slot = self._free.pop() if self._free else len(self._segments)
        self._segments[slot] = segment
        self._rows.map(slot, segment.fd(ROWS))
        self._map_frames(slot, segment)
        return slot

    def _map_frames(self, slot: int, segment: Segment) -> None:
        """Maps a segment's frames as far as the budget allows; newer segments take the place of older ones."""
        for column in self.layout.frames:
            mapped = self._mapped[column.name]
            if column.name in segment.codecs or column.name in segment.unread:
                continue
            size = max(segment.frames[column.name], 0 if segment.sealed else self.rows_per_slot) * column.nbytes
            if self._budget is not None and not self._make_room(column, size, segment.number):
                continue
            self._frames[column.name].map(slot, segment.fd(column.name))
            mapped[slot] = size

    def remove(self, slot: int) -> None:
        segment = self._segments.pop(slot)
        self._rows.unmap(slot)
        for name, arena in self._frames.items():
            arena.unmap(slot)
            self._mapped[name].pop(slot, None)
        self._free.append(slot)
        segment.close()

    def close(self) -> None:
        for slot in list(self._segments):
            self.remove(slot)

    def renew_locks(self) -> None:
        """In a forked process."""
        for segment in self._segments.values():
            segment.renew_locks()

    # Reading

    def rows(self, at: Array) -> Array:
        """The packed rows at these addresses, as one record array in the order asked for."""
        used = _distinct(at, self.rows_per_slot)
        for slot in used:
            segment = self._segments[slot]
            segment.check_size(ROWS)
            if segment.bad_rows is None or len(segment.bad_rows):
                mine = at if len(used) == 1 else at[at // self.rows_per_slot == slot]
                self._checks.rows(segment, mine - slot * self.rows_per_slot)
        out = np.empty(len(at), self.layout.row)
        self._rows.take(at, out.view(np.uint8).reshape(len(at), self.layout.row.itemsize))
        return out

    def frame(self, column: FrameColumn, slot: int, number: int) -> Array:
        """The bytes of one frame that is not compressed: a view of its map, or a copy when it is not mapped."""
        segment = self._segments[slot]
        if slot in self._mapped[column.name]:
            segment.check_size(column.name)
            return self._frames[column.name].item(slot * self.rows_per_slot + number)
        frame = np.empty(column.nbytes, np.uint8)
        segment.read_frame(column, number, frame)
        return frame

    def read(self, at: Array, columns: Sequence[str], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """These columns of the steps at these addresses, each ``[len(at), ...]``, in the order asked for."""
        rows = self.rows(at)
        batch = {}
        for path in columns:
            frame = self.layout.frame_of.get(path)
            if frame is not None:
                target = self._target(path, len(at), out)
                self.gather(frame, at, rows[path]["frame"], rows[path]["crc"], target)
            elif out is None or path not in out:
                target = rows[path].copy()
            else:
                target = self._target(path, len(at), out)
                target[...] = rows[path]
            batch[path] = target
        return batch

    def gather(self, column: FrameColumn, at: Array, frames: Array, crcs: Array, target: Array) -> None:
        """Frames of the steps `at`, given by number and checksum, ``[n]`` or ``[n, stack]``, into ``target``."""
        slots, numbers = at // self.rows_per_slot, frames.reshape(-1)
        if frames.ndim > 1:
            slots = np.repeat(slots, frames.shape[1])
        used = np.bincount(slots).nonzero()[0].tolist()
        for slot in used:
            segment = self._segments[slot]
            self._checks.bounds(segment, column, numbers if len(used) == 1 else numbers[slots == slot])
            if column.name not in segment.codecs:
                segment.check_size(column.name)
        index = slots * self.rows_per_slot + numbers
        flat = target.reshape(-1).view(np.uint8).reshape(len(index), column.nbytes)
        mapped = self._mapped[column.name]
        from_memory = all(slot in mapped for slot in used) and self._resident(column, index)
        if from_memory:
            self._frames[column.name].take(index, flat)
        else:
            self._read_in_order(column, index, flat)
        wrong = differs(flat, crcs.reshape(-1), self._checks.wants(len(index), from_memory))
        if wrong is not None:
            raise wrong_frame(self._segments[int(slots[wrong])], column, int(numbers[wrong]))

    # Inside

    def _target(self, path: str, n: int, out: Mapping[str, Array] | None) -> Array:
        spec = self.schema.columns[path]
        if out is None or path not in out:
            return self._pool.empty((n, *spec.shape), spec.dtype)
        check_target(path, ArraySpec(spec.dtype, (n, *spec.shape)), out[path])
        return out[path]

    def _resident(self, column: FrameColumn, index: Array) -> bool:
        """Whether a few frames of the batch, picked at random, are all in memory."""
        picked = (
            index[self._probe.integers(len(index), size=min(_PROBES, len(index)))] if len(index) > _PROBES else index
        )
        for item in picked.tolist():
            slot, number = divmod(item, self.rows_per_slot)
            if is_cached(self._segments[slot].fd(column.name), number * column.nbytes + column.nbytes // 2) is False:
                return False
        return True

    def _read_in_order(self, column: FrameColumn, index: Array, flat: Array) -> None:
        order = np.argsort(index, kind="stable").tolist()
        places = [divmod(item, self.rows_per_slot) for item in index.tolist()]
        size = column.nbytes
        self.disk_reads += len(order)
        for k, i in enumerate(order):
            if k + _AHEAD < len(order):
                slot, number = places[order[k + _AHEAD]]
                if column.name not in self._segments[slot].codecs:
                    announce_read(self._segments[slot].fd(column.name), number * size, size)
            slot, number = places[i]
            self._segments[slot].read_frame(column, number, flat[i])

    def _make_room(self, column: FrameColumn, size: int, number: int) -> bool:
        assert self._budget is not None
        used = [
            (self._segments[s].number, name, s, n) for name, mapped in self._mapped.items() for s, n in mapped.items()
        ]
        total = sum(n for *_, n in used)
        given_up: list[Action] = []
        for other, name, slot, n in sorted(used):
            if total + size <= self._budget or other >= number:
                break
            if self._segments[slot].sealed is None:  # its writer compares with frames where they lie
                continue
            del self._mapped[name][slot]
            given_up.append(partial(self._frames[name].unmap, slot))
            total -= n
        for unmap in given_up:
            self._later(unmap)
        return total + size <= self._budget


def check_target(path: str, spec: ArraySpec, target: object) -> None:
    """Whether an array given as ``out`` can take a column."""
    if not isinstance(target, np.ndarray):
        raise SchemaError(f"out[{path!r}]: expected {spec}, got {type(target).__name__}, which is not a numpy array.")
    if (
        target.dtype != spec.dtype
        or target.shape != spec.shape
        or not target.flags.c_contiguous
        or not target.flags.writeable
    ):
        plain = (
            "" if target.flags.c_contiguous and target.flags.writeable else " that is not contiguous or not writable"
        )
        raise SchemaError(f"out[{path!r}]: expected contiguous {spec}, got {target.dtype} {target.shape}{plain}.")


def _distinct(index: Array, per_slot: int) -> list[int]:
    """The slots that these addresses lie in."""
    return np.bincount(index // per_slot).nonzero()[0].tolist()
