"""Drawing steps when the view is all of a log, or its last trajectories: then the
runs of the view are extents of the log.

A drawn place leads to its run by a search. Once the log has not changed for a while, as a log of demonstrations never
does and another one does not between two episodes, a table takes the place of the search, and leads to the step's
address too. Building it costs as much as many searches, so the wait grows with the number of runs.
"""

from __future__ import annotations

import numpy as np

from hilt.core.tree import Array
from hilt.replay.key_ranges import Runs
from hilt.replay.snapshot import Snapshot

_BUCKETS = 4
"""Places of the table per run."""
_RUNS_PER_DRAW = 256
"""How many runs a draw must be worth before a table is built for them."""


class UniformDraw:
    """Keys at random places of a view, and what it takes to find their addresses without another search."""

    def __init__(self) -> None:
        self._seen = (-1, -1)
        self._wait = 0
        self._table: _Table | None = None

    def draw(self, runs: Runs, places: Array, steps: Snapshot) -> Array:
        """The keys at these places, ``0 <= places < len(runs)``. The snapshot notes where they lie."""
        seen = (runs.version, steps.version)
        if seen != self._seen:
            self._seen, self._table, self._wait = seen, None, 2 + len(runs.starts) // _RUNS_PER_DRAW
        if self._table is None:
            self._wait -= 1
            if self._wait == 0:
                self._table = _Table.of(runs, steps)
        if self._table is None:
            keys, run = runs.draw_runs(places)
            steps.expect(keys, run, len(runs.starts))
        else:
            keys, at = self._table.draw(places)
            steps.know(keys, at)
        return keys


class _Table:
    """From places to keys and addresses, for runs that do not change."""

    def __init__(self, starts: Array, counts: Array, at: Array):
        self._ends = np.cumsum(counts)
        before = self._ends - counts
        self._to_key, self._to_address = starts - before, at - before  # [run]
        size = int(self._ends[-1])
        self._bits = max(0, (size // (_BUCKETS * len(starts))).bit_length() - 1)
        # [bucket] of 2**bits places
        self._first_run = self._ends.searchsorted(np.arange(0, size, 1 << self._bits), "right")

    @classmethod
    def of(cls, runs: Runs, steps: Snapshot) -> _Table | None:
        """None when the runs are not the last extents after all, or lie in tables of several schemas."""
        at = steps.addresses(runs.starts, runs.counts)
        return None if at is None else cls(runs.starts, runs.counts, at)

    def draw(self, places: Array) -> tuple[Array, Array]:
        """The keys at these places, and their addresses."""
        run = self._first_run.take(places >> self._bits)
        behind = places >= self._ends.take(run)
        for _ in range(_BUCKETS):
            if not np.count_nonzero(behind):
                break
            run += behind
            behind = places >= self._ends.take(run)
        else:  # a crowd of short runs in one bucket
            run = self._ends.searchsorted(places, "right")
        return places + self._to_key.take(run), places + self._to_address.take(run)
