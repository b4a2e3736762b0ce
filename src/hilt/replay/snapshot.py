"""Reading steps: a log at one moment, and the segments of one layout as flat arrays of rows and frames.

A `Snapshot` is what a batch is read from while the log goes on: it leads from keys to addresses. A step's address in
its `Table` is one integer, `slot * rows_per_slot + row`. A batch is one ``take`` of rows, then per frame column one
``take`` at the frames those rows refer to. Frames that are not in memory are read with `pread`, in the order of the
file and announced ahead: a memory map would fetch them page by page, many times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from hilt.core.errors import SchemaError, UnknownNameError
from hilt.core.platform import announce_read, is_cached
from hilt.core.tree import Array, ArraySpec
from hilt.replay.facts import Facts
from hilt.replay.key_ranges import OFFSET_BITS, Runs, key_of, search
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import FOLLOWS, FrameColumn, Schema
from hilt.replay.settings import ReadOptions
from hilt.replay.storage.arena import make_arena
from hilt.replay.storage.checks import ReadChecks, differs, wrong_frame
from hilt.replay.storage.index import Index
from hilt.replay.storage.segment import ROWS, Segment

Action = Callable[[], None]
_PROBES = 12
"""Frames of a batch that are asked whether they are in memory."""
_AHEAD = 32
"""Frames that are announced to the system ahead of their read."""


class Snapshot:
    """Finds steps by key and reads their columns. Valid inside ``with log.reading() as steps``."""

    def __init__(
        self,
        schema: Schema,
        index: Index,
        tables: Sequence[Table],
        facts: Facts,
        pool: BufferPool,
        done: Callable[[], None],
    ):
        self.schema = schema
        self._keys, self._entries = index.keys, index.entries
        self._tables, self._facts, self._pool, self._done = list(tables), facts, pool, done
        self.version, self._shown = index.version, facts.edits.shown
        self._guess: tuple[Array, Array] | None = None
        self._known: tuple[Array, Array] | None = None
        # not so where the log has gained columns, and no step since
        self._one_table = len(self._tables) == 1 and schema.columns.keys() <= self._tables[0].schema.columns.keys()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self._done()

    def expect(self, keys: Array, run: Array, runs: int) -> None:
        """Notes in which of the log's last `runs` extents these very keys lie, as the sampler
        that drew them knows: it saves a search."""
        before = len(self._keys) - runs
        if before >= 0:
            self._guess = keys, run + before if before else run

    def know(self, keys: Array, at: Array) -> None:
        """Says at which addresses these very keys lie: no search at all. Only with `addresses` of this version."""
        self._known = keys, at

    def addresses(self, starts: Array, counts: Array) -> Array | None:
        """The addresses of the last extents, when these keys and numbers of steps
        are theirs and one table holds all of their columns."""
        last = slice(len(self._keys) - len(starts), None)
        same = (
            last.start >= 0
            and np.array_equal(self._keys[last], starts)
            and np.array_equal(self._entries["steps"][last], counts)
        )
        return self._entries["at"][last].copy() if same and self._one_table else None

    def find(self, keys: Array) -> tuple[Array, Array]:
        """Per key: the place of its extent, and whether the step exists."""
        if not len(self._keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        place = np.maximum(search(self._keys, keys) - 1, 0)
        return place, self._inside(keys, place)[1]

    def exist(self, keys: Array) -> Array:
        """Per key, whether there is such a step, and edits do not hide it."""
        there = self.find(keys)[1]
        return there & self._shown.contain(keys) if self._shown else there

    def widths(self, keys: Array) -> Array:
        """Per key, how many steps of its trajectory run side by side (B)."""
        return self._entries["width"][self.find(keys)[0]].astype(np.int64)

    def trajectory(self, number: int, hidden: bool = False) -> Array:
        """The keys of a trajectory's steps, T-major; with `hidden` also of those that edits hide."""
        first, stop = np.searchsorted(self._keys, [key_of(number), key_of(number + 1)])
        keys, steps = self._keys[first:stop], self._entries["steps"][first:stop].astype(np.int64)
        if self._shown and not hidden:
            keys, steps = self._shown.clip(keys, steps)
        if not len(keys):
            raise UnknownNameError("trajectory", str(number), [])
        return Runs(keys, steps).keys()

    def ended_trajectories(self) -> list[int]:
        """The numbers of the trajectories that have ended, oldest first: those whose
        last step terminated or was truncated."""
        last = self._keys[self._entries["ended"]]
        ended: list[int] = np.unique(last >> OFFSET_BITS).tolist()
        return [number for number in ended if not self._shown.hides(number)] if self._shown else ended

    def senders(self) -> dict[int, tuple[str, str, str]]:
        """Who sent each trajectory, ``(actor, boot, store)``, by its number, oldest first."""
        origins, (numbers, first) = self._facts.origins(), np.unique(self._keys >> OFFSET_BITS, return_index=True)
        of = self._entries["origin"][first]
        return {
            number: origins.get(origin, ("", "", ""))
            for number, origin in zip(numbers.tolist(), of.tolist(), strict=True)
        }

    def gather(
        self, keys: Array, paths: Sequence[str], out: Mapping[str, Array] | None = None, edited: bool = True
    ) -> dict[str, Array]:
        """Columns of steps, each ``[len(keys), ...]``, in the order asked for; without `edited`, as they were
        before people edited them."""
        if self._known is not None and self._known[0] is keys:
            batch = self._tables[0].read(self._known[1], paths, out)
        elif self._one_table:
            batch = self._tables[0].read(self._locate(keys)[1], paths, out)
        else:
            place, at = self._locate(keys)
            batch = self._gather_grown(self._entries["table"][place], at, paths, out)
        if self._facts.any_relabeled:
            self._facts.overlay(keys, batch, edited)
        return batch

    def fields(self, keys: Array, names: Sequence[str]) -> list[Array]:
        """Small columns or bookkeeping fields of steps."""
        place, at = self._locate(keys)
        table_of = self._entries["table"][place]
        out: list[Array] = [
            np.zeros((len(keys), *self.schema.layout.row[n].shape), self.schema.layout.row[n].base) for n in names
        ]
        for number in np.unique(table_of).tolist():
            chosen = table_of == number
            rows = self._tables[number].rows(at[chosen])
            for name, target in zip(names, out, strict=True):
                target[chosen] = rows[name] if name in (rows.dtype.names or ()) else self.schema.columns[name].default
        if self._facts.any_relabeled:
            self._facts.overlay(keys, dict(zip(names, out, strict=True)))
        return out

    def follows(self, keys: Array) -> Array:
        """Per key, whether its observation is the next observation of the step before it in its trajectory."""
        return (self.fields(keys, ["#flags"])[0] & FOLLOWS).astype(bool)

    def sequences(self, keys: Array) -> Array:
        """Per key, the number that its sender gave to the step; -1 if none."""
        return self.fields(keys, ["#sequence"])[0]

    def gather_packed(self, keys: Array, column: FrameColumn) -> Array:
        """Observation and next observation of one frame column as one stack, ``[n, stack + 1, ...]``."""
        place, at = self._locate(keys)
        table_of = self._entries["table"][place]
        stack = max(1, column.stack)
        out = self._pool.empty((len(keys), stack + 1, *column.shape), column.dtype)
        for number in np.unique(table_of).tolist():
            chosen, table = np.flatnonzero(table_of == number), self._tables[number]
            rows = table.rows(at[chosen])
            now, after = (rows[path].reshape(len(chosen), stack) for path in column.columns)
            if not np.array_equal(now["frame"][:, 1:], after["frame"][:, :-1]):
                raise _unpackable(column)
            frames, crcs = (np.concatenate([now[name], after[name][:, -1:]], axis=1) for name in ("frame", "crc"))
            if len(chosen) == len(keys):
                table.gather(column, at, frames, crcs, out)
            else:
                part = np.empty((len(chosen), *out.shape[1:]), out.dtype)
                table.gather(column, at[chosen], frames, crcs, part)
                out[chosen] = part
        return out

    def _gather_grown(
        self, table_of: Array, at: Array, paths: Sequence[str], out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        """Over segments of several schemas: columns that an older one lacks get their default."""
        batch = {path: _target(self.schema, path, len(at), out, self._pool) for path in paths}
        for number in np.unique(table_of).tolist():
            chosen, table = np.flatnonzero(table_of == number), self._tables[number]
            part = table.read(at[chosen], [p for p in paths if p in table.schema.columns])
            for path in paths:
                batch[path][chosen] = part[path] if path in part else self.schema.columns[path].default
        return batch

    def _locate(self, keys: Array) -> tuple[Array, Array]:
        """The extent and the address of every key; a key that is not there is an error."""
        if self._guess is not None and self._guess[0] is keys:
            place = self._guess[1]
            inside, there = self._inside(keys, place)
            if np.count_nonzero(there) == len(there):
                return place, self._entries["at"][place] + inside
        place, there = self.find(keys)
        if not there.all():
            key = int(keys[np.argmin(there)])
            raise UnknownNameError("step", f"{key >> OFFSET_BITS}:{key & 0xFFFFFFFF}", [])
        inside = keys - self._keys[place]
        return place, self._entries["at"][place] + inside

    def _inside(self, keys: Array, place: Array) -> tuple[Array, Array]:
        """How far each key lies behind the first of an extent, and whether it is one of its steps."""
        inside = keys - self._keys.take(place)
        return inside, inside.view(np.uint64) < self._entries["steps"][place]  # one below 0 is very large


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
                target = _target(self.schema, path, len(at), out, self._pool)
                self.gather(frame, at, rows[path]["frame"], rows[path]["crc"], target)
            elif out is None or path not in out:
                target = rows[path].copy()
            else:
                target = _target(self.schema, path, len(at), out, self._pool)
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


def _target(schema: Schema, path: str, n: int, out: Mapping[str, Array] | None, pool: BufferPool) -> Array:
    """The array for a column of `n` steps: the one that was given, or memory of the pool."""
    spec = schema.columns[path]
    if out is None or path not in out:
        return pool.empty((n, *spec.shape), spec.dtype)
    check_target(path, ArraySpec(spec.dtype, (n, *spec.shape)), out[path])
    return out[path]


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


def _unpackable(column: FrameColumn) -> SchemaError:
    return SchemaError(
        f"{column.name}: observation and next observation cannot be packed into one stack, since the "
        "next stack is not this one moved on by one frame. Sample with pack_obs_and_next_obs=False."
    )
