"""The segments of a log whose files are open, each in a slot of the table of its layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hilt.core.platform import allow_open_files
from hilt.replay.sampling.batch_memory import BufferPool
from hilt.replay.settings import ReadOptions
from hilt.replay.snapshot import Table
from hilt.replay.storage.readers import Readers
from hilt.replay.storage.segment import Segment


@dataclass
class ActiveSegment:
    """A segment to which steps are appended. One running episode is written to it
    at a time, so that its rows lie together."""

    segment: Segment
    slot: int
    table: Table

    @property
    def first_row(self) -> int:
        """The address of its first row."""
        return self.slot * self.table.rows_per_slot


class OpenSegments:
    """Iterates over the segments in the order of their numbers. The caller holds
    the log's lock in all of its methods."""

    def __init__(self, pool: BufferPool, options: ReadOptions):
        self.tables: list[Table] = []
        self.readers = Readers()
        self._pool, self._options = pool, options
        self._segments: dict[int, Segment] = {}
        self._slots: dict[int, tuple[int, int]] = {}  # segment number -> table number, slot

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def __iter__(self) -> Iterator[Segment]:
        return iter([self._segments[number] for number in sorted(self._segments)])

    def add(self, segment: Segment) -> None:
        """Gives a segment a slot in the table of its schema."""
        wanted = (segment.room, segment.schema.to_json())
        number = next(
            (n for n, t in enumerate(self.tables) if (t.rows_per_slot, t.schema.to_json()) == wanted), len(self.tables)
        )
        if number == len(self.tables):
            self.tables.append(Table(segment.schema, segment.room, self._pool, self._options, self.readers.later))
        table = self.tables[number]
        slot = table.add(segment)
        allow_open_files(len(self._segments) * (2 + len(segment.layout.frames)))
        self._segments[segment.number] = segment
        self._slots[segment.number] = (number, slot)

    def active(self, number: int) -> ActiveSegment:
        """A segment with its slot, for those who append to it."""
        table, slot = self._slots[number]
        return ActiveSegment(self._segments[number], slot, self.tables[table])

    def table_of(self, number: int) -> int:
        """The number of the table in which a segment has its slot."""
        return self._slots[number][0]

    def first_row(self, number: int) -> int:
        """The address of a segment's first row."""
        table, slot = self._slots[number]
        return slot * self.tables[table].rows_per_slot

    def retire(self, number: int) -> None:
        """Forgets a segment. Its files and maps are closed as soon as no reader uses them."""
        table, slot = self._slots.pop(number)
        del self._segments[number]
        self.readers.later(lambda: self.tables[table].remove(slot))

    def close(self) -> None:
        """Closes all files and maps, as soon as no reader uses them."""
        self.readers.later(*(table.close for table in self.tables))

    def renew_locks(self) -> None:
        """In a forked process: the threads that hold inner locks do not exist here."""
        for table in self.tables:
            table.renew_locks()

    def nbytes(self) -> int:
        return sum(segment.nbytes() for segment in self._segments.values())

    def disk_reads(self) -> int:
        return sum(table.disk_reads for table in self.tables)
