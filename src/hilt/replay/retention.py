"""Retention: which trajectories of a log go when it is larger than its capacity."""

from __future__ import annotations

import json

from hilt.replay.catalog import Catalog
from hilt.replay.key_ranges import OFFSET_BITS


class Retention:
    """Evicts the oldest trajectories of a log. The caller holds the log's lock."""

    def __init__(self, catalog: Catalog):
        self._catalog = catalog
        self._steps: int | None = catalog.settings["capacity_steps"]
        self._bytes: int | None = catalog.settings["capacity_bytes"]
        # with its checksum, and the lock beside it
        self._settings_bytes = len(json.dumps(catalog.settings, indent=1)) + 512

    def enforce(self) -> None:
        """Evicts until the log is within its capacity; a running trajectory is spared while others are there."""
        catalog = self._catalog
        while self._too_many_steps() or (self._bytes is not None and self._folder_bytes() > self._bytes):
            oldest = catalog.index.first_ended()
            if oldest is None:
                if not self._evict_running():
                    return
                continue
            if len(catalog.index) == 1 and not self._too_many_steps():
                return  # one trajectory larger than capacity_bytes: it stays until the next one comes
            self._evict(int(catalog.index.keys[oldest] >> OFFSET_BITS))

    def _too_many_steps(self) -> bool:
        return self._steps is not None and self._catalog.live_steps > self._steps

    def _folder_bytes(self) -> int:
        return self._catalog.live_bytes + self._catalog.facts.nbytes + self._settings_bytes

    def _evict(self, trajectory: int) -> None:
        index = self._catalog.index
        last = [place for place in index.places_of(trajectory) if not index.entries["open"][place]][-1]
        self._catalog.note_evicted(int(index.keys[last]) + int(index.entries["steps"][last]))
        self._catalog.counts["evicted"] += self._catalog.drop(trajectory)

    def _evict_running(self) -> bool:
        """Only running episodes are left: the first steps of the oldest go, a good
        many at once. False when none can."""
        catalog, index = self._catalog, self._catalog.index
        if not len(index):
            return False
        key, steps = int(index.keys[0]), int(index.entries["steps"][0])
        if self._steps is not None and self._too_many_steps():
            wanted = max(catalog.live_steps - self._steps, self._steps // 16)
            steps = min(wanted, steps - 1 if index.entries["open"][0] else steps)
        elif index.entries["open"][0]:
            return False  # its bytes stay until its segment is full
        if steps > 0:
            before = catalog.live_steps
            catalog.note_evicted(key + steps)
            catalog.drop_before(key >> OFFSET_BITS, (key & 0xFFFFFFFF) + steps)
            catalog.counts["evicted"] += before - catalog.live_steps
        return steps > 0
