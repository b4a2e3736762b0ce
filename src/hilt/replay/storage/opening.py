"""Opening a segment: as it lies there, or what can be saved of it.

Opening reads little of a segment that is sealed and whole. One that is not sealed is scanned, frames included: its
writer may have been killed, or the power cut. One whose small files are damaged or whose data files end too early is
rebuilt from its rows, by the writer on disk and by a reader in memory. One that tells nothing any more is set aside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hilt.core.errors import CorruptError, StorageError
from hilt.core.files import Files
from hilt.core.tree import Array
from hilt.replay.maintenance.salvage import Salvage
from hilt.replay.schema import Schema
from hilt.replay.storage.quarantine import Quarantine
from hilt.replay.storage.records import CODECS
from hilt.replay.storage.scan import (
    Scan,
    build_extents,
    committed_frames,
    implausible,
    scan_file,
    scan_frames,
    scan_rows,
    without_rows,
)
from hilt.replay.storage.seal import LogSeal
from hilt.replay.storage.segment import EXTENT, ROWS, Segment

_TRIES = 4
_AGAIN_SECONDS = 0.01
"""A reader that finds a segment damaged looks again: its writer may be compressing or deleting it."""


@dataclass
class Recovery:
    """What opening a log had to mend."""

    torn_steps: int = 0
    """Steps that were being written when the process before died; none of them had been promised."""
    torn_bytes: int = 0
    """Bytes of a late fact that was being written likewise."""
    corrupt_steps: int = 0
    """Steps in quarantine or in segments that were set aside: their bytes are not those that were written."""
    corrupt_facts: int = 0
    """Late facts whose bytes are not those that were written."""
    lost: list[str] = field(default_factory=list)
    """What the log held when it was closed and is not there any more: whole segments, late facts."""
    mended: list[str] = field(default_factory=list)
    """What was found damaged and got round: files rebuilt from others, on disk by a
    writer and in memory by a reader."""
    set_aside: list[str] = field(default_factory=list)
    """Segments that cannot be read at all, by number. They are in the folder ``damaged`` of the log."""
    seconds: float = 0.0
    """How long opening took."""

    def in_words(self) -> str:
        """One line about everything that was not as it should be; empty when nothing was."""
        parts = [
            (self.torn_steps, f"{self.torn_steps} torn steps were cut, which had not been acknowledged"),
            (self.torn_bytes, f"{self.torn_bytes} torn bytes of a late fact were cut"),
            (self.corrupt_steps, f"{self.corrupt_steps} damaged steps are in quarantine or set aside"),
            (self.corrupt_facts, f"{self.corrupt_facts} late facts are damaged"),
            (self.lost, f"lost since the log was closed: {'; '.join(self.lost)}"),
            (self.set_aside, f"segments set aside: {', '.join(self.set_aside)}"),
            (self.mended, f"mended: {'; '.join(self.mended)}"),
        ]
        return "; ".join(text for found, text in parts if found)


class Opener:
    """Opens the segments of one log."""

    def __init__(
        self,
        log: Path,
        schemas: Sequence[Schema],
        files: Files,
        write: bool,
        quarantine: Quarantine,
        seal: LogSeal,
        unread: frozenset[str] = frozenset(),
    ):
        """`unread` are frame columns that will not be read: damage of their files does not matter."""
        self._seal, self._unread = seal, unread
        self._log, self._schemas, self._files, self._write, self._quarantine = log, schemas, files, write, quarantine
        self.recovery = Recovery()
        self.aside_steps = 0
        """The number of steps in segments that were set aside, now and before, as far as it is known."""
        self._hidden: dict[int, int] = {}  # of a reader: segment that tells nothing -> its steps

    def open(self, folder: Path) -> tuple[Segment, Array] | None:
        """A segment and where its whole steps lie; None when nothing of it can be
        read, or when it was deleted meanwhile."""
        for again in range(_TRIES):
            try:
                return self._open_whole(folder)
            except CorruptError:
                if not folder.exists():
                    return None
            except StorageError:
                if not folder.exists():
                    return None
                raise
            if self._write or int(folder.name) in self._hidden:
                break
            time.sleep(_AGAIN_SECONDS * again)
        return self._save(folder)

    def look_again(self, segment: Segment, seen: int) -> Array:
        """Where the whole steps lie that a writer appended to a segment after the rows that a reader has seen."""
        rows = segment.read_rows(seen, os.fstat(segment.fd(ROWS)).st_size // segment.layout.row.itemsize)
        scan = scan_rows(segment, rows, growing=True)
        rows = rows[: scan.rows]
        scan.damage += implausible(segment, rows, scan.bad_rows())
        frames = committed_frames(segment.layout, rows, scan.bad_rows())
        segment.set_counts(seen + scan.rows, {name: max(count, segment.frames[name]) for name, count in frames.items()})
        scan.damage += scan_frames(segment, rows, scan.bad_rows())
        extents = build_extents(rows, scan.bad_rows())
        extents["row"] += seen
        return extents

    def count_set_aside(self) -> int:
        """Looks into the folder of segments that were set aside; returns the first number that none of them has."""
        folders = [
            path for path in self._log.glob("damaged/*") if path.is_dir() and path.name.partition(".")[0].isdigit()
        ]
        self.aside_steps = sum(self._steps_in(folder) for folder in folders) + sum(self._hidden.values())
        self.recovery.set_aside = sorted(
            [folder.name for folder in folders] + [f"{number:06d}" for number in self._hidden]
        )
        return max((int(folder.name.partition(".")[0]) + 1 for folder in folders), default=0)

    def find_losses(self, facts_damaged: bool) -> None:
        """What the log held when it was closed and is gone as a whole. A writer writes it
        down, as its own close would hide it."""
        if self._seal.damaged:
            self.recovery.mended.append(
                "closed.json: does not have its checksum; what the log held when it was closed is not known"
            )
        found = [loss for loss in self._seal.find_losses() if not (facts_damaged and loss.file == "annotations.jsonl")]
        self.recovery.lost = [f"{loss.file}: {loss.what}" for loss in [*self._seal.losses, *found] if not loss.known]
        if found and self._write:
            self._seal.accept(found)

    # Inside

    def _open_whole(self, folder: Path) -> tuple[Segment, Array]:
        segment = Segment.open(folder, self._files, self._write, self._unread)
        segment.promise = self._seal.promise(segment.number)
        if segment.sealed is None:
            return segment, self._scan(segment)
        bad = self._quarantine.rows(segment.number, self._unread)
        if self._write:
            self._remove_unused(segment)
        for name in [ROWS, *(column.name for column in segment.layout.frames if column.name not in segment.codecs)]:
            if name in self._unread:
                continue
            segment.check_size(name)
        if self._quarantine.lost or not segment.trusted:
            scan, rows = scan_file(segment)
            scan.damage += scan_frames(segment, rows, scan.bad_rows())
            bad = np.union1d(bad, self._take_damage(scan))
            segment.bad_rows = np.zeros(0, np.int64)
        if self._write and not segment.trusted:
            segment.vouch()
        extents = segment.extents()
        return segment, without_rows(extents, bad) if len(bad) else extents

    def _remove_unused(self, segment: Segment) -> None:
        """Raw or compressed frames that are of no use, since the last writer ended between
        writing the one and removing the other."""
        for column in segment.layout.frames:
            made = segment.codecs.get(column.name)
            used = f"{column.file}.{made['codec']}" if made else column.file
            for name in {column.file, *(f"{column.file}.{codec}" for codec in CODECS)} - {used}:
                if (segment.folder / name).exists():
                    self._files.remove(segment.folder / name)

    def _scan(self, segment: Segment) -> Array:
        """What a segment that was not sealed holds: its writer is at work, or was killed."""
        scan, rows = scan_file(segment, growing=not self._write)
        rows = rows[: scan.rows]
        frames = committed_frames(segment.layout, rows, scan.bad_rows())
        scan.damage += scan_frames(segment, rows, scan.bad_rows())
        if self._write:
            self.recovery.torn_steps += scan.torn_rows
            segment.set_counts(scan.rows, frames)
            segment.cut_tail()
        else:
            stored = os.fstat(segment.fd(ROWS)).st_size // segment.layout.row.itemsize
            segment.set_counts(
                min(scan.rows, stored),
                {name: min(count, segment.stored_frames(name)) for name, count in frames.items()},
            )
        segment.bad_rows = np.zeros(0, np.int64)  # those that are damaged are in quarantine, and are not read
        return build_extents(
            rows, np.union1d(self._quarantine.rows(segment.number, self._unread), self._take_damage(scan))
        )

    def _take_damage(self, scan: Scan) -> Array:
        """The damaged rows; a writer puts them into quarantine."""
        if scan.damage and self._write:
            self._quarantine.add(scan.damage)
        elif scan.damage:
            self._quarantine.note(scan.damage)
        return scan.bad_rows()

    def _save(self, folder: Path) -> tuple[Segment, Array] | None:
        number = int(folder.name)
        saved = Salvage(folder, self._schemas, self._files, self._seal.promise(number), self._unread)
        checked = saved.check(self._quarantine.rows(number, self._unread), live=not self._write)
        if saved.hopeless or (not self._write and not len(checked.extents)):
            saved.close()
            self._set_aside(folder)
            return None
        self._take_damage(Scan(0, checked.damage))
        self.recovery.mended += [str(finding) for finding in saved.findings if finding.kind == "damage"]
        if self._write:
            saved.mend(self._quarantine.rows(number))
            saved.close()
            return self._open_whole(folder)
        saved.use_what_is_there()
        saved.bad_rows = np.zeros(0, np.int64)
        return saved, checked.extents

    def _set_aside(self, folder: Path) -> None:
        if not self._write:
            self._hidden[int(folder.name)] = self._steps_in(folder)
            return
        aside = self._log / "damaged"
        self._files.make_folders(aside)
        target = aside / folder.name
        while target.exists():
            target = target.with_name(f"{target.name}.1")
        self._files.rename(folder, target)
        self._files.sync_folder(aside)

    def _steps_in(self, folder: Path) -> int:
        """How many steps a segment had that cannot be read: by its list of extents, or else by the size of its rows."""
        with_extents, rows = folder / "extents", folder / "rows"
        if with_extents.exists() and os.path.getsize(with_extents) % EXTENT.itemsize == 0:
            return int(np.fromfile(with_extents, EXTENT)["steps"].sum())
        return os.path.getsize(rows) // self._schemas[-1].layout.row.itemsize if rows.exists() else 0
