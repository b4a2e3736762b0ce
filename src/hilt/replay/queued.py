"""An actor's outbox: transitions that wait to be taken by the learner."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, DeadlineError
from hilt.core.tree import Tree, flatten, unflatten
from hilt.replay.log import Log
from hilt.replay.runs import OFFSET_BITS
from hilt.replay.schema import BUILT_IN, Schema
from hilt.replay.writer import Episode

_TOGETHER = 64
"""Transitions that are spilled into one trajectory, and deleted together once all are acknowledged."""
_SEGMENT_BYTES = 4 << 20
"""Of the spilled log: small, so that files are deleted soon."""
FULL = ("spill", "block", "drop_oldest")


class QueuedDataStore:
    """Transitions numbered from 0 in the order of their insertion, kept until they are acknowledged.

    The newest `capacity` ones are in memory. What happens when that is full is said by `full`: ``"spill"`` moves the
    oldest to a log on disk (in `path`, or a temporary folder), ``"block"`` makes `insert` wait until some are
    acknowledged, and ``"drop_oldest"`` drops and counts them. A `path` that was used before gives back what was spilled
    there and not acknowledged; what was only in memory is gone with its process.
    """

    def __init__(self, capacity: int, *, full: str = "spill", path: str | os.PathLike[str] | None = None):
        if capacity < 1:
            raise ConfigError(f"capacity: expected at least 1 transition, got {capacity}.")
        if full not in FULL:
            raise ConfigError(f"full={full!r}: expected one of {', '.join(FULL)}.")
        if path is not None and full != "spill":
            raise ConfigError(f"path= is where full='spill' keeps transitions; with full={full!r} nothing is written.")
        self.capacity, self._full, self._path = capacity, full, path
        self._memory: deque[tuple[int, Tree]] = deque()
        self._latest = -1
        self._acknowledged = -1
        self._spill: Log | None = None
        self._spilling: Episode | None = None
        self._fields: list[str] = []  # of the transitions in the running episode
        self._places: deque[tuple[int, int]] = deque()  # (id, key) of what was spilled
        self._trajectories: deque[int] = deque()  # in which they lie
        self._changed = threading.Condition()
        self._counts = {"inserted": 0, "dropped": 0, "spilled": 0}
        if path is not None and os.path.exists(os.path.join(path, "log.json")):
            self._recover(path)

    def insert(self, transition: Tree, timeout: float = 60.0) -> int:
        """Keeps a transition; returns its number. Waits at most `timeout` seconds, and only with ``full="block"``."""
        with self._changed:
            if len(self._memory) >= self.capacity:
                self._make_room(timeout)
            self._latest += 1
            self._memory.append((self._latest, transition))
            self._counts["inserted"] += 1
            self._changed.notify_all()
            return self._latest

    def batch_insert(self, transitions: Iterable[Tree]) -> None:
        for transition in transitions:
            self.insert(transition)

    def latest_data_id(self) -> int:
        """The number of the newest transition, -1 when there was none."""
        with self._changed:
            return self._latest

    def get_latest_data(self, from_id: int) -> list[Tree]:
        """The transitions after number `from_id` that are still kept, oldest first."""
        return [transition for _, transition in self.get_since(from_id)]

    def get_since(self, from_id: int) -> list[tuple[int, Tree]]:
        """The same with their numbers, so that nothing inserted meanwhile is counted among them."""
        with self._changed:
            spilled = [(number, self._unspill(key)) for number, key in self._places if number > from_id]
            return spilled + [(number, transition) for number, transition in self._memory if number > from_id]

    def acknowledge(self, up_to: int) -> None:
        """Lets go of the transitions up to this number: they are safe elsewhere."""
        with self._changed:
            self._acknowledged = max(self._acknowledged, min(up_to, self._latest))
            while self._places and self._places[0][0] <= up_to:
                self._places.popleft()
            while self._memory and self._memory[0][0] <= up_to:
                self._memory.popleft()
            self._delete_acknowledged()
            self._changed.notify_all()

    def __len__(self) -> int:
        """How many are kept."""
        with self._changed:
            return len(self._places) + len(self._memory)

    def stats(self) -> dict[str, int]:
        with self._changed:
            kept = {"kept": len(self), "on_disk": len(self._places)}
            return {**self._counts, **kept, "latest": self._latest, "acknowledged": self._acknowledged}

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()

    def _make_room(self, timeout: float) -> None:
        if self._full == "drop_oldest":
            self._memory.popleft()
            self._counts["dropped"] += 1
        elif self._full == "spill":
            self._spill_oldest()
        else:
            deadline = time.monotonic() + timeout
            while len(self._memory) >= self.capacity:
                if not self._changed.wait(timeout=max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"waited {timeout:g} s for room: {len(self._memory)} of {self.capacity} transitions are not acknowledged. "
                        "Is the learner running? Or use full='spill'."
                    )

    def _spill_oldest(self) -> None:
        number, transition = self._memory[0]
        leaves = {path: np.asarray(value) for path, value in flatten(transition).items()}
        fields = sorted(leaves)
        if self._spill is None:
            schema = Schema.of(unflatten({path: leaf for path, leaf in leaves.items() if path not in BUILT_IN}))
            settings: dict[str, Any] = {"durability": "never", "segment_bytes": _SEGMENT_BYTES}
            self._spill = Log.create(self._path, schema, **settings) if self._path is not None else Log.anonymous(schema, **settings)
        running = self._spilling
        if running is None or running.lane is None or running.steps >= _TOGETHER or fields != self._fields:
            if running is not None:
                running.end()
            running, self._spilling, self._fields = self._spill.episode(), None, fields
        key = running.append(unflatten(leaves), sequence=number)
        if self._spilling is None:
            self._spilling = running
            self._trajectories.append(running.trajectory)
            self._spill.annotate(running.trajectory, fields=fields)
        self._memory.popleft()
        self._places.append((number, key))
        self._counts["spilled"] += 1

    def _unspill(self, key: int) -> Tree:
        """A transition as it was inserted: without the built-in columns, unless it had them."""
        assert self._spill is not None
        fields = self._spill.facts.about(key >> OFFSET_BITS).get("fields")
        if fields is None:
            fields = [path for path in self._spill.schema.columns if path not in BUILT_IN]
        batch = flatten(self._spill.read([key], fields))
        return unflatten({path: values[0] for path, values in batch.items()})

    def _delete_acknowledged(self) -> None:
        """Deletes the spilled trajectories of which every transition is acknowledged."""
        if self._spill is None:
            return
        if not self._places and self._spilling is not None:
            self._spilling.end()
            self._spilling = None
        awaited = self._places[0][1] >> OFFSET_BITS if self._places else None
        while self._trajectories and self._trajectories[0] != awaited:
            self._spill.delete(self._trajectories.popleft())

    def _recover(self, path: str | os.PathLike[str]) -> None:
        """Takes up what an earlier process spilled."""
        self._spill = Log.open(path)
        self._trajectories.extend(self._spill.trajectories())
        keys = self._spill.all().keys()
        with self._spill.reading() as steps:
            numbers = steps.fields(keys, ["#sequence"])[0]
        self._places.extend(zip(numbers.tolist(), keys.tolist(), strict=True))
        self._latest = int(numbers.max(initial=-1))
