"""What is checked while steps are read, so that damage is an error and never a wrong batch.

A row is checked with its whole segment, when the first row of it is read: the row holds the frames'
numbers, so a flipped bit never pairs a step with another step's image. Frame numbers are compared with
what the segment holds in every batch. The checksum of a frame costs as much as copying it from memory,
so `verify_reads` determines how many are checked.
"""

from __future__ import annotations

import numpy as np

from hilt.core.checksums import checksum
from hilt.core.errors import CorruptError
from hilt.core.tree import Array
from hilt.replay.schema import FrameColumn
from hilt.replay.storage.scan import scan_file
from hilt.replay.storage.segment import Segment

SAMPLED_SHARE = 16
"""With ``"sampled"``, one frame in this number is checked of those that are copied
from memory, at random, at least one a batch."""


class ReadChecks:
    """Checks rows and frames of one table as they are read."""

    def __init__(self, verify_reads: str):
        self._how = verify_reads
        self._generator = np.random.default_rng(0)

    def rows(self, segment: Segment, rows: Array) -> None:
        """That these rows of a segment are as they were written. All rows of a
        segment are read when its first ones are."""
        if segment.bad_rows is None and self._how != "never":
            scan, _ = scan_file(segment)
            segment.bad_rows = scan.bad_rows()
        if segment.bad_rows is not None and len(segment.bad_rows):
            bad = rows[np.isin(rows, segment.bad_rows)]
            if len(bad):
                raise _damaged(segment, "rows", f"row {bad[0]} does not have its checksum")

    def bounds(self, segment: Segment, column: FrameColumn, frames: Array) -> None:
        """That a segment has these frames: reading one beyond its end would end the process."""
        held = segment.frames[column.name]
        if len(frames) and (frames.min() < 0 or frames.max() >= held):
            bad = frames[(frames < 0) | (frames >= held)][0]
            raise _damaged(segment, column.file, f"a row refers to frame {bad}, and there are {held}")

    def wants(self, frames: int, from_memory: bool) -> Array:
        """Returns the frames, of this number, to compare with their checksums: places among them."""
        if self._how == "never":
            return np.zeros(0, np.int64)
        if self._how == "always" or not from_memory:  # reading or decompressing a frame costs many times as much
            return np.arange(frames)
        return self._generator.integers(frames, size=-(-frames // SAMPLED_SHARE))


def differs(flat: Array, crcs: Array, places: Array) -> int | None:
    """The first of these places whose frame does not have its checksum."""
    expected = crcs[places].tolist()
    for place, crc in zip(places.tolist(), expected, strict=True):
        if checksum(flat[place]) != crc:
            return int(place)
    return None


def wrong_frame(segment: Segment, column: FrameColumn, frame: int) -> CorruptError:
    made = segment.codecs.get(column.name)
    file = column.file + (f".{made['codec']}" if made else "")
    return _damaged(segment, file, f"frame {frame} does not have the checksum that its row has")


def _damaged(segment: Segment, file: str, what: str) -> CorruptError:
    log = segment.folder.parent.parent
    return CorruptError(f"{segment.folder / file}: {what}. Put its steps into quarantine with: hilt data repair {log}")
