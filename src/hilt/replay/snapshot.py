"""A log at one moment: what a batch is read from while the log goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hilt.core.errors import SchemaError, UnknownNameError
from hilt.core.tree import Array, ArraySpec
from hilt.replay.facts import Facts
from hilt.replay.key_ranges import OFFSET_BITS, Runs, key_of, search
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.schema import FOLLOWS, FrameColumn, Schema
from hilt.replay.storage.index import Index
from hilt.replay.storage.table import Table, check_target


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
        are theirs and one table holds them all."""
        last = slice(len(self._keys) - len(starts), None)
        same = (
            last.start >= 0
            and np.array_equal(self._keys[last], starts)
            and np.array_equal(self._entries["steps"][last], counts)
        )
        return self._entries["at"][last].copy() if same and len(self._tables) == 1 else None

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
        elif len(self._tables) == 1:
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
        batch = {}
        for path in paths:
            spec = self.schema.columns[path]
            if out is not None and path in out:
                check_target(path, ArraySpec(spec.dtype, (len(at), *spec.shape)), out[path])
                batch[path] = out[path]
            else:
                batch[path] = self._pool.empty((len(at), *spec.shape), spec.dtype)
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


def _unpackable(column: FrameColumn) -> SchemaError:
    return SchemaError(
        f"{column.name}: observation and next observation cannot be packed into one stack, since the "
        "next stack is not this one moved on by one frame. Sample with pack_obs_and_next_obs=False."
    )
