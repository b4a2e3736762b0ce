"""Reading a segment's rows with suspicion: which are whole, which are damaged, and where a torn tail begins.

Rows are committed in blocks: one row, or all rows of a trajectory. The last row of a block has its number of rows
and carries the checksum of them all. A damaged block is skipped and named; the blocks behind it stay usable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from hilt.core.checksums import checksum
from hilt.core.trajectory import Source
from hilt.core.tree import Array
from hilt.replay.schema import FrameColumn, Layout
from hilt.replay.storage.records import MAX_ROOM
from hilt.replay.storage.segment import EXTENT, ROWS, Segment

READ_BYTES = 1 << 20
"""Bytes of frames that are read at once"""


@dataclass
class Damage:
    """One thing found wrong in a segment."""

    segment: int
    what: str
    """Which file, and what is wrong with it."""
    first: int
    """First row that cannot be trusted because of it."""
    rows: int
    """How many."""


@dataclass
class Scan:
    """What a segment's rows hold."""

    rows: int
    """Rows up to the end of the last whole block."""
    damage: list[Damage] = field(default_factory=list)
    torn_rows: int = 0
    """Rows of the torn tail, a started one included."""

    def bad_rows(self) -> Array:
        """Every damaged row, sorted."""
        spans = [np.arange(d.first, d.first + d.rows, dtype=np.int64) for d in self.damage]
        return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)


def scan_rows(segment: Segment, rows: Array, partial_bytes: int = 0, growing: bool = False) -> Scan:
    """Checks every block of these rows (all rows of the file, whole ones).

    A killed process leaves the beginning of its last block, never the end, since a file grows from front to back. So a
    last block that has its end was committed, and is damaged if it lacks its
    checksum; unless it is `growing` right now.
    """
    scan = Scan(0)
    raw = rows.view(np.uint8).reshape(len(rows), -1) if len(rows) else np.zeros((0, 1), np.uint8)
    counts = rows["#count"]
    stored = rows["#crc"]
    end = 0
    for last in np.flatnonzero(counts).tolist():
        start = last + 1 - int(counts[last])
        if start < end or checksum(raw[start : last + 1].reshape(-1)[:-4]) != stored[last]:
            continue
        if start > end:
            scan.damage.append(Damage(segment.number, f"rows: row {end} does not have its checksum", end, start - end))
        end = last + 1
    ends = np.flatnonzero((counts[end:] != 0) | (stored[end:] != 0))
    if len(ends) and not growing:
        scan.damage.append(
            Damage(segment.number, f"rows: row {end} does not have its checksum", end, int(ends[-1]) + 1)
        )
        end += int(ends[-1]) + 1
    scan.rows = end
    scan.torn_rows = len(rows) - end + (1 if partial_bytes else 0)
    return scan


def scan_file(segment: Segment, growing: bool = False) -> tuple[Scan, Array]:
    """Scans the row file as it lies on disk; also returns its rows. `growing`:
    another process may be appending to it."""
    size = os.fstat(segment.fd(ROWS)).st_size
    whole, partial = divmod(size, segment.layout.row.itemsize)
    rows = segment.read_rows(0, whole)
    if segment.sealed is None:
        scan = scan_rows(segment, rows, partial, growing)
        scan.damage += implausible(segment, rows[: scan.rows], scan.bad_rows())
        return _expect_promised(segment, scan, rows)
    scan = scan_rows(segment, rows[: segment.rows])
    scan.damage += implausible(segment, rows[: scan.rows], scan.bad_rows())
    missing = segment.rows - scan.rows
    if missing:
        scan.damage.append(
            Damage(
                segment.number, f"rows: row {scan.rows} does not have its checksum or is missing", scan.rows, missing
            )
        )
    scan.rows, scan.torn_rows = segment.rows, 0
    return scan, rows


def implausible(segment: Segment, rows: Array, bad: Array) -> list[Damage]:
    """Rows with a valid checksum whose values no step can have: the file may be of another program or segment."""
    trajectory, wrong = rows["#trajectory"], rows["#width"] == 0
    for impossible in (trajectory < 0, trajectory >= MAX_ROOM, rows["source"] >= len(Source)):
        wrong |= impossible
    for number, _, row in frames_in_use(segment.layout, rows).values():
        wrong[row[(number < 0) | (number >= (segment.room or MAX_ROOM))]] = True
    wrong[bad[bad < len(rows)]] = False
    return [
        Damage(segment.number, f"rows: row {row} holds numbers that no step has", row, 1)
        for row in np.flatnonzero(wrong).tolist()
    ]


def _expect_promised(segment: Segment, scan: Scan, rows: Array) -> tuple[Scan, Array]:
    """What a growing segment held when the log was closed is no torn tail: rows of it
    that are gone are damaged, and read as zeros."""
    missing = segment.promise.rows - scan.rows
    if missing > 0:
        what = f"rows: row {scan.rows} is missing: the log held {segment.promise.rows:,} rows here when it was closed"
        scan.damage.append(Damage(segment.number, what, scan.rows, missing))
        scan.torn_rows, scan.rows = max(0, len(rows) - segment.promise.rows), segment.promise.rows
        if len(rows) < scan.rows:
            rows = np.concatenate([rows, np.zeros(scan.rows - len(rows), rows.dtype)])
    return scan, rows


def damage_in(segment: Segment) -> list[Damage]:
    """Reads every byte of a segment and lists what is not as it was written."""
    scan, rows = scan_file(segment)
    bad = scan.damage + scan_frames(segment, rows[: scan.rows], scan.bad_rows())
    return bad + [
        Damage(segment.number, f"{name}: does not have its checksum or is missing", 0, 0)
        for name in segment.damaged_names()
    ]


def frames_in_use(layout: Layout, rows: Array) -> dict[str, tuple[Array, Array, Array]]:
    """Per frame column: the frame numbers that rows refer to, their checksums, and
    for each the rows, as flat arrays."""
    used = {}
    for column in layout.frames:
        fields = [rows[path].reshape(len(rows), max(1, column.stack)) for path in column.columns]
        number = np.concatenate([f["frame"] for f in fields], axis=1)
        crc = np.concatenate([f["crc"] for f in fields], axis=1)
        row = np.broadcast_to(np.arange(len(rows))[:, None], number.shape)
        used[column.name] = (number.reshape(-1), crc.reshape(-1), row.reshape(-1))
    return used


def scan_frames(segment: Segment, rows: Array, bad: Array) -> list[Damage]:
    """Checks the bytes of every frame that a trusted row refers to."""
    trusted = np.ones(len(rows), bool)
    trusted[bad[bad < len(rows)]] = False
    damage = []
    for column in segment.layout.frames:
        if column.name in segment.unread:
            continue
        number, crc, row = frames_in_use(segment.layout, rows)[column.name]
        keep = trusted[row]
        number, crc, row = number[keep], crc[keep], row[keep]
        there, place = np.unique(number, return_inverse=True)
        actual = frame_checksums(segment, column, there)
        for i in np.lexsort((row, number)).tolist() if (actual[place] != crc).any() else ():
            if actual[place[i]] == crc[i]:
                continue
            made = segment.codecs.get(column.name)
            unreadable = "does not decompress" if made else "is missing"
            reason = unreadable if actual[place[i]] < 0 else "does not have its checksum"
            file = column.file + (f".{made['codec']}" if made else "")
            damage.append(Damage(segment.number, f"{file}: frame {int(number[i])} {reason}", int(row[i]), 1))
    return damage


def frame_checksums(segment: Segment, column: FrameColumn, numbers: Array) -> Array:
    """int64 checksums of the frames with these numbers, which are ascending; -1 for one that cannot be read."""
    found = np.full(len(numbers), -1, np.int64)
    at_once = 1 if column.name in segment.codecs else max(1, READ_BYTES // column.nbytes)
    buffer = np.empty((at_once, column.nbytes), np.uint8)
    begin = 0
    while begin < len(numbers):
        run = numbers[begin : begin + at_once]
        count = int(np.argmax(np.diff(run, prepend=run[0] - 1) != 1)) or len(run)  # frames that lie side by side
        for place in range(segment.read_frames(column, int(run[0]), buffer[:count])):
            found[begin + place] = checksum(buffer[place])
        begin += count
    return found


def committed_frames(layout: Layout, rows: Array, bad: Array | None = None) -> dict[str, int]:
    """How many frames of each column belong to these rows; what a `bad` row refers to cannot be trusted."""
    rows = np.delete(rows, bad) if bad is not None else rows
    return {
        name: int(number.max()) + 1 if len(number) else 0
        for name, (number, _, _) in frames_in_use(layout, rows).items()
    }


def without_rows(extents: Array, bad: Array) -> Array:
    """The extents in pieces, without the rows that are `bad`."""
    pieces = []
    for extent in extents:
        first, stop = int(extent["row"]), int(extent["row"]) + int(extent["steps"])
        edges = [first - 1, *bad[(bad >= first) & (bad < stop)].tolist(), stop]
        for before, after in pairwise(edges):
            piece = extent.copy()
            piece["row"], piece["steps"], piece["offset"] = (
                before + 1,
                after - before - 1,
                extent["offset"] + before + 1 - first,
            )
            piece["ended"] = extent["ended"] and after == stop
            pieces.append(piece)
    return np.array([piece for piece in pieces if piece["steps"]], EXTENT)


def build_extents(rows: Array, bad: Array) -> Array:
    """The stretches of trusted rows that are consecutive steps of one trajectory, as `EXTENT` records."""
    place = np.setdiff1d(np.arange(len(rows)), bad, assume_unique=True)
    if not len(place):
        return np.zeros(0, EXTENT)
    trajectory, offset = rows["#trajectory"][place], rows["#offset"][place].astype(np.int64)
    apart = (trajectory[1:] != trajectory[:-1]) | (offset[1:] != offset[:-1] + 1) | (place[1:] != place[:-1] + 1)
    starts = np.flatnonzero(np.r_[True, apart])
    stops = np.r_[starts[1:], len(place)]
    extents = np.zeros(len(starts), EXTENT)
    first, last = place[starts], place[stops - 1]
    extents["trajectory"], extents["offset"], extents["row"], extents["steps"] = (
        trajectory[starts],
        offset[starts],
        first,
        stops - starts,
    )
    extents["width"], extents["origin"] = rows["#width"][first], rows["#origin"][first]
    extents["ended"] = rows["terminated"][last] | rows["truncated"][last]
    bits = np.left_shift(1, rows["source"][place].astype(np.int64) & 7).astype(np.uint8)
    extents["sources"] = np.bitwise_or.reduceat(bits, starts)
    extents["sequence"] = np.maximum.reduceat(rows["#sequence"][place], starts)
    return extents
