"""The part of an actor's outbox that is on disk: logs of transitions that are not acknowledged yet."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import SchemaError
from hilt.core.files import DISK
from hilt.core.tree import Array, Tree, flatten, unflatten
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.schema import BUILT_IN, BUILT_IN_DEFAULTS, Schema
from hilt.replay.settings import as_folder
from hilt.replay.writer import EpisodeWriter

_TOGETHER = 64
"""Transitions that are written into one trajectory, and deleted together once all are acknowledged."""
_SEGMENT_BYTES = 4 << 20
"""Small, so that files are deleted soon."""


class Spool:
    """Numbered transitions on disk. Each carries the boot of the process that inserted it, so that it keeps its
    identity when another process sends it. Transitions of one layout share a log: nearly always there is one."""

    def __init__(self, path: str | os.PathLike[str] | None, boot: str, durability: str):
        self._path, self._boot = None if path is None else as_folder(path), boot
        self._settings: dict[str, Any] = {"durability": durability, "segment_bytes": _SEGMENT_BYTES}
        self._parts: list[_Part] = []
        self._places: deque[tuple[int, _Part, int]] = deque()  # (number, where, key)
        self._boots: deque[tuple[int, str]] = deque()  # (number from which on, boot) of what earlier processes left
        if self._path is not None and self._path.exists():
            self._recover(self._path)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> int | None:
        """The number of the oldest transition."""
        return self._places[0][0] if self._places else None

    @property
    def latest(self) -> int:
        return self._places[-1][0] if self._places else -1

    def boot_of(self, number: int) -> str:
        """Who inserted a transition."""
        return next((boot for first, boot in reversed(self._boots) if number >= first), self._boot)

    def last_of(self, boot: str) -> int:
        """The last number of a boot before this one; -1 when nothing of it waits."""
        after = [first for first, _ in self._boots]
        return next(
            (next_first - 1 for next_first, (_, known) in zip(after[1:], self._boots, strict=False) if known == boot),
            -1,
        )

    def append(self, number: int, transition: Tree) -> None:
        """Process-safe when it returns."""
        if not isinstance(transition, Mapping):
            what = f"a transition of type {type(transition).__name__} cannot be kept on disk"
            raise SchemaError(
                f"{what}; expected a mapping of arrays. Use one, or full='block' or 'drop_oldest' and no path=."
            )
        leaves = {path: np.asarray(value) for path, value in flatten(transition).items()}
        for part in reversed(self._parts):
            try:
                self._places.append((number, part, part.append(number, leaves)))
                return
            except SchemaError:  # another layout than this part has
                continue
        part = self._new_part(leaves)
        self._places.append((number, part, part.append(number, leaves)))

    def read(self, after: int, count: int) -> list[tuple[int, Tree]]:
        """Returns up to this number of transitions with numbers above `after`, oldest first, as they were given."""
        found = []
        for number, part, key in self._places:
            if number > after:
                found.append((number, part.read(key)))
                if len(found) == count:
                    break
        return found

    def acknowledge(self, up_to: int) -> None:
        """Lets go of the transitions up to this number, and of the files in which nothing else lies."""
        while self._places and self._places[0][0] <= up_to:
            _, part, key = self._places.popleft()
            part.acknowledge(key)
            if not part.waiting and part is not self._parts[-1]:
                self._parts.remove(part)
                part.remove()
        while len(self._boots) > 1 and self._places and self._boots[1][0] <= self._places[0][0]:
            self._boots.popleft()

    def close(self) -> None:
        for part in self._parts:
            part.log.close()

    def _new_part(self, leaves: Mapping[str, Array]) -> _Part:
        if self._parts and not self._parts[-1].waiting:  # of a program that inserted something else
            self._parts.pop().remove()
        schema = Schema.of(unflatten({path: leaf for path, leaf in leaves.items() if path not in BUILT_IN}))
        if self._path is None:
            log = Log.anonymous(schema, **self._settings)
        else:
            newest = max((int(part.log.path.name) for part in self._parts), default=-1)
            log = Log.create(self._path / f"{newest + 1:03d}", schema, **self._settings)
        self._parts.append(_Part(log, self._boot))
        return self._parts[-1]

    def _recover(self, path: Path) -> None:
        """Takes up what an earlier process left."""
        found: list[tuple[int, _Part, int, str]] = []
        for folder in sorted(f for f in path.iterdir() if (f / "log.json").exists()):
            part = _Part(Log.open(folder, durability=self._settings["durability"]), self._boot)
            self._parts.append(part)
            found += [(number, part, key, boot) for number, key, boot in part.recover()]
        for number, part, key, boot in sorted(found, key=lambda one: one[0]):
            self._places.append((number, part, key))
            if not self._boots or self._boots[-1][1] != boot:
                self._boots.append((number, boot))
        self._boots.append((self.latest + 1, self._boot))


class _Part:
    """The transitions of one layout, in one log."""

    def __init__(self, log: Log, boot: str):
        self.log = log
        self.waiting = 0
        self._boot = boot
        self._running: EpisodeWriter | None = None
        self._fields: list[str] = []  # of the transitions in the running trajectory
        self._oldest: deque[int] = deque()  # trajectories in which something waits

    def append(self, number: int, leaves: Mapping[str, Array]) -> int:
        fields, running = sorted(leaves), self._running
        if running is None or running.ended or running.steps >= _TOGETHER or fields != self._fields:
            self.log.check(unflatten(leaves))  # before anything changes
            if running is not None:
                running.end()
            running, self._running, self._fields = self.log.episode(boot=self._boot), None, fields
            self._note_fields(running.trajectory, fields)
        key = running.append(unflatten(leaves), sequence=number)
        if self._running is None:
            self._running = running
            self._oldest.append(running.trajectory)
        self.waiting += 1
        return key

    def _note_fields(self, trajectory: int, fields: list[str]) -> None:
        """Notes which columns were given. It is written before the first row: a row
        without it would lose its built-in columns."""
        with self.log.lock:
            self.log.facts.annotate(trajectory, {"fields": fields})
            if self.log.durability.every_episode:
                self.log.facts.sync()

    def read(self, key: int) -> Tree:
        """A transition as it was inserted: without the built-in columns, unless it had them."""
        fields: Sequence[str] | None = self.log.facts.about(key >> OFFSET_BITS).get("fields")
        if fields is None:
            fields = self._guess_fields(key >> OFFSET_BITS)
        batch = flatten(self.log.read([key], fields))
        return unflatten({path: values[0] for path, values in batch.items()})

    def _guess_fields(self, trajectory: int) -> list[str]:
        """After a power cut, or from an older Hilt: a built-in column was given if
        it has anything but its default value."""
        keys = self.log.trajectory_keys(trajectory)
        with self.log.reading() as steps:
            values = dict(zip(BUILT_IN, steps.fields(keys, list(BUILT_IN)), strict=True))
        absent = [path for path, found in values.items() if (found == BUILT_IN_DEFAULTS[path]).all()]
        return [path for path in self.log.schema.columns if path not in absent]

    def acknowledge(self, key: int) -> None:
        """This one and those before it are safe elsewhere: trajectories without any other are deleted."""
        self.waiting -= 1
        if not self.waiting and self._running is not None:
            self._running.end()
            self._running = None
        while self._oldest and (not self.waiting or self._oldest[0] < key >> OFFSET_BITS):
            self.log.delete(self._oldest.popleft())

    def recover(self) -> list[tuple[int, int, str]]:
        """(number, key, boot) of every transition."""
        keys, names = self.log.all().keys(), self.log.facts.origins()
        with self.log.reading() as steps:
            numbers, origins = steps.fields(keys, ["#sequence", "#origin"])
        self._oldest.extend(self.log.trajectories())
        self.waiting = len(keys)
        return [(n, k, names[o][1]) for n, k, o in zip(numbers.tolist(), keys.tolist(), origins.tolist(), strict=True)]

    def remove(self) -> None:
        self.log.close()
        DISK.remove(self.log.path)
