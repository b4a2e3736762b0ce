"""The part of an actor's outbox that is on disk: a log of transitions that are not acknowledged yet."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hilt.core.tree import Tree, flatten, unflatten
from hilt.replay.log import Log
from hilt.replay.runs import OFFSET_BITS
from hilt.replay.schema import BUILT_IN, Schema
from hilt.replay.writer import Episode

_TOGETHER = 64
"""Transitions that are written into one trajectory, and deleted together once all are acknowledged."""
_SEGMENT_BYTES = 4 << 20
"""Small, so that files are deleted soon."""


class Spool:
    """Numbered transitions in a log. Each carries the boot of the process that inserted it, so that it keeps its identity
    when another process sends it."""

    def __init__(self, path: str | os.PathLike[str] | None, boot: str, durability: str):
        self._path, self._boot, self._durability = path, boot, durability
        self._log: Log | None = None
        self._running: Episode | None = None
        self._fields: list[str] = []  # of the transitions in the running trajectory
        self._places: deque[tuple[int, int]] = deque()  # (number, key)
        self._trajectories: deque[int] = deque()  # in which they lie
        self._boots: deque[tuple[int, str]] = deque()  # (number from which on, boot) of what earlier processes left
        if path is not None and os.path.exists(os.path.join(path, "log.json")):
            self._recover(path)

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

    def append(self, number: int, transition: Tree) -> None:
        """Process-safe when it returns."""
        leaves = {path: np.asarray(value) for path, value in flatten(transition).items()}
        fields = sorted(leaves)
        if self._log is None:
            schema = Schema.of(unflatten({path: leaf for path, leaf in leaves.items() if path not in BUILT_IN}))
            settings: dict[str, Any] = {"durability": self._durability, "segment_bytes": _SEGMENT_BYTES}
            self._log = Log.create(self._path, schema, **settings) if self._path is not None else Log.anonymous(schema, **settings)
        running = self._running
        if running is None or running.lane is None or running.steps >= _TOGETHER or fields != self._fields:
            if running is not None:
                running.end()
            running, self._running, self._fields = self._log.episode(boot=self._boot), None, fields
        key = running.append(unflatten(leaves), sequence=number)
        if self._running is None:
            self._running = running
            self._trajectories.append(running.trajectory)
            self._log.annotate(running.trajectory, fields=fields)
        self._places.append((number, key))

    def read(self, after: int, count: int) -> list[tuple[int, Tree]]:
        """Up to so many transitions with numbers above `after`, oldest first, as they were given."""
        found: list[tuple[int, int]] = []
        for number, key in self._places:
            if number > after:
                found.append((number, key))
                if len(found) == count:
                    break
        return [(number, self._transition(key)) for number, key in found]

    def acknowledge(self, up_to: int) -> None:
        """Lets go of the transitions up to this number, and of the files in which nothing else lies."""
        while self._places and self._places[0][0] <= up_to:
            self._places.popleft()
        while len(self._boots) > 1 and self._places and self._boots[1][0] <= self._places[0][0]:
            self._boots.popleft()
        if self._log is None:
            return
        if not self._places and self._running is not None:
            self._running.end()
            self._running = None
        awaited = self._places[0][1] >> OFFSET_BITS if self._places else None
        while self._trajectories and self._trajectories[0] != awaited:
            self._log.delete(self._trajectories.popleft())

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _transition(self, key: int) -> Tree:
        """A transition as it was inserted: without the built-in columns, unless it had them."""
        assert self._log is not None
        fields: Sequence[str] | None = self._log.facts.about(key >> OFFSET_BITS).get("fields")
        if fields is None:
            fields = [path for path in self._log.schema.columns if path not in BUILT_IN]
        batch = flatten(self._log.read([key], fields))
        return unflatten({path: values[0] for path, values in batch.items()})

    def _recover(self, path: str | os.PathLike[str]) -> None:
        """Takes up what an earlier process left."""
        self._log = Log.open(path, durability=self._durability)
        keys = self._log.all().keys()
        with self._log.reading() as steps:
            numbers, origins = steps.fields(keys, ["#sequence", "#origin"])
        self._trajectories.extend(self._log.trajectories())
        self._places.extend(zip(numbers.tolist(), keys.tolist(), strict=True))
        names = self._log.facts.origins()
        for number, origin in zip(numbers.tolist(), origins.tolist(), strict=True):
            boot = names[origin][1]
            if not self._boots or self._boots[-1][1] != boot:
                self._boots.append((number, boot))
        self._boots.append((self.latest + 1, self._boot))
