"""The active segments of a log: those to which steps are appended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from hilt.replay.catalog import Catalog
from hilt.replay.storage.open_segments import ActiveSegment
from hilt.replay.storage.segment import Segment


class ActiveSegments:
    """Gives each running episode a segment of its own. A full segment is completed, and `completed` is called with it.

    The caller holds the log's lock in all of its methods.
    """

    def __init__(self, catalog: Catalog, completed: Callable[[Segment], None]):
        self._catalog, self._completed = catalog, completed
        self._idle: list[ActiveSegment] = []  # some may have been deleted meanwhile, with the last trajectory in them

    def acquire(self, steps: int = 1) -> ActiveSegment:
        """Returns a segment to which no episode is written, with room for this
        number of steps if a whole segment has it."""
        while self._idle:
            active = self._idle.pop()
            if active.segment.deleted:
                continue
            fits = self.room(active) >= min(steps, self.rows_per_segment) or not active.segment.rows
            schema = self._catalog.schema
            if fits and (active.segment.schema is schema or active.segment.schema.to_json() == schema.to_json()):
                self._catalog.protect(active.segment)
                return active
            self._complete(active)
        return self._new()

    def release(self, active: ActiveSegment) -> None:
        """Takes a segment back to which an episode is no longer written."""
        self._catalog.unprotect(active.segment)
        self._idle.append(active)

    def adopt(self, idle: Iterable[ActiveSegment]) -> None:
        """Takes segments that an earlier process left incomplete."""
        self._idle += idle

    def replace(self, full: ActiveSegment) -> ActiveSegment:
        """Completes a full segment and returns a fresh one in its place."""
        if self._catalog.durable:
            full.segment.sync()
        fresh = self._new()  # first: when there is no room for it on the disk, the full segment stays as it was
        try:
            self._complete(full)
        except BaseException:
            self.release(fresh)
            raise
        self._catalog.unprotect(full.segment)
        return fresh

    def room(self, active: ActiveSegment) -> int:
        """How many more steps fit, whatever frames they bring."""
        rooms = [min(self.rows_per_segment, active.segment.room) - active.segment.rows]
        for column in active.segment.layout.frames:
            rooms.append((active.segment.room - active.segment.frames[column.name]) // column.frames_per_step)
        return max(0, min(rooms))

    def has_room(self, active: ActiveSegment) -> bool:
        """Whether one more step fits, whatever frames it brings."""
        segment = active.segment
        if segment.rows >= self.rows_per_segment or segment.rows >= segment.room:
            return False
        return all(segment.frames[c.name] + c.frames_per_step <= segment.room for c in segment.layout.frames)

    def complete_idle(self) -> None:
        """Completes every segment to which no episode is written, as if it were full."""
        while self._idle:
            active = self._idle.pop()
            if not active.segment.deleted:
                self._complete(active)

    @cached_property
    def rows_per_segment(self) -> int:
        """How many steps a segment takes: by bytes, and few enough that old segments are deleted in time."""
        settings, step_bytes = self._catalog.settings, self._catalog.schema.layout.step_bytes
        rows: int = max(1, settings["segment_bytes"] // step_bytes)
        if settings["capacity_steps"] is not None:
            rows = min(rows, max(64, settings["capacity_steps"] // 8))
        if settings["capacity_bytes"] is not None:
            rows = min(rows, max(1, settings["capacity_bytes"] // 8 // step_bytes))
        return min(rows, 1 << 18)

    def _new(self) -> ActiveSegment:
        active = self._catalog.new_segment(self._catalog.schema.layout.room(self.rows_per_segment))
        self._catalog.protect(active.segment)
        return active

    def _complete(self, active: ActiveSegment) -> None:
        if self._catalog.complete(active):
            self._completed(active.segment)
