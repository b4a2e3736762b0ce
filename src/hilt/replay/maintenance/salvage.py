"""A segment opened in spite of damage: what is wrong with it, by file and by step, and what of it can be rebuilt.

The rows and the frames are the data; everything else in a segment follows from them. A header comes from the log's
schema, a seal and its extents from the rows, the index of a compressed column from the compressed frames themselves.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hilt.core.checksums import checksum, write_json
from hilt.core.errors import CorruptError
from hilt.core.files import DISK, Files, read
from hilt.core.tree import Array
from hilt.replay.maintenance.findings import Finding, Kind, Span, spans
from hilt.replay.schema import FrameColumn, Schema
from hilt.replay.storage.records import CODECS, FORMAT, ContentError, read_header, read_seal
from hilt.replay.storage.scan import (
    Damage,
    Scan,
    build_extents,
    committed_frames,
    frames_in_use,
    scan_file,
    scan_frames,
    scan_rows,
)
from hilt.replay.storage.seal import NOTHING, Promise
from hilt.replay.storage.segment import EXTENT, HELD, ROWS, Segment, frame_end

REBUILT = "is rebuilt"
QUARANTINED = "its steps go into quarantine"
KNOWN = "nothing more: its steps are in quarantine"
ASIDE = "the segment is set aside in the folder 'damaged'"
REMOVED = "is removed"
CUT = "is cut"
LEFT = "is left alone: it is not Hilt's"


_FRAME = re.compile(r"(?P<file>.*\.frames[^:]*): frame (?P<frame>-?\d+) (?P<fault>.*)")
MAX_FRAME_FINDINGS = 4
"""Frames of a file with the same fault that are named one by one; of more it is one finding."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Checked:
    """What reading every byte of a segment gave."""

    damage: list[Damage]
    extents: Array
    """Where the whole steps lie."""
    frames: int
    origins: Array
    """The senders that its whole steps name."""
    named: bool
    """Whether trajectory and offset of every damaged step are known."""


class Salvage(Segment):
    """Open it, `check` it, and `mend` what can be mended. Nothing on disk changes before `mend`."""

    def __init__(
        self,
        folder: Path,
        schemas: Sequence[Schema],
        files: Files = DISK,
        promise: Promise = NOTHING,
        unread: frozenset[str] = frozenset(),
    ):
        self.findings: list[Finding] = []
        self.number = int(folder.name)
        self.header_lost = self.seal_lost = self.extents_lost = self.hopeless = False
        self._leftovers: list[Path] = []
        self._sizes: dict[str, int] = {}  # file that ends too early or too late -> bytes that it should have
        self._indices: dict[str, Array] = {}  # compressed column -> rebuilt ends of its frames
        self._listed: Array | None = None  # the extents, if they are whole
        self._rows: Array = np.zeros(0, np.uint8)
        schema, room = self._find_schema(folder, schemas)
        super().__init__(folder, schema, room, files, write=False)
        self.promise, self.unread = promise, unread
        self._find_seal()
        self._find_extents()
        self._open_files()
        self._find_leftovers()
        if self.hopeless and (folder / "rows").exists():
            self._add("damage", "rows", "no schema of this log fits the file", ASIDE, self._all_steps())

    def check(self, known: Array, live: bool) -> Checked:
        """Reads every byte. `known` are the rows in quarantine; with `live`, a writer
        may be at work behind the last commit."""
        if self.hopeless:
            return Checked([], np.zeros(0, EXTENT), 0, np.zeros(0, np.int64), self._listed is not None)
        scan, rows = scan_file(self)
        self._rows = rows = rows[: scan.rows]
        bad = scan.bad_rows()
        damage = scan.damage + scan_frames(self, rows, bad)
        trajectory, offset = self._locate(rows, scan)
        self._name(damage, trajectory, offset, known)
        every = Scan(scan.rows, damage).bad_rows()
        whole = np.setdiff1d(np.arange(len(rows)), every)
        self._check_sizes(scan, rows[np.setdiff1d(np.arange(len(rows)), bad)], live)
        frames = sum(len(np.unique(number)) for number, _, _ in frames_in_use(self.layout, rows[whole]).values())
        return Checked(
            damage,
            build_extents(rows, every),
            frames,
            np.unique(rows["#origin"][whole]),
            bool((trajectory[bad] >= 0).all()),
        )

    def mend(self, bad: Array) -> list[str]:
        """Rebuilds what was lost, and reports what it did. The rows in `bad` must be in quarantine by now."""
        done = []
        if self.header_lost:
            self.room = self._needed_room()
            header = {"format": FORMAT, "room": self.room, "schema": self.schema.to_json()}
            write_json(self.folder / "header.json", header, self.files)
            done.append(f"{self._path('header.json')}: rebuilt from the schema of the log")
        for name, size in self._sizes.items():
            done.append(self._mend_size(self.folder / name, size))
        for name, ends in self._indices.items():
            done.append(self._mend_index(next(c for c in self.layout.frames if c.name == name), ends))
        if self.sealed is not None and (self.seal_lost or self.extents_lost or self._indices):
            raw = build_extents(self._rows, bad).tobytes()
            self.files.replace(self.folder / "extents", raw)
            seal = {
                **self.sealed,
                "rows": self.rows,
                "frames": self.frames,
                "codecs": self.codecs,
                "extents_crc": checksum(raw),
            }
            write_json(self.folder / "seal.json", seal, self.files)
            done.append(f"{self._path('seal.json')}: rebuilt, with the extents, from the rows")
        for path in self._leftovers:
            self.files.remove(path)
            done.append(f"{self._path(path.name)}: removed")
        return done

    def use_what_is_there(self) -> None:
        """Makes it readable as it is, without mending anything, where `check` found whole steps."""
        rows, frames = (
            self._size(ROWS) // self.layout.row.itemsize,
            {c.name: self.stored_frames(c.name) for c in self.layout.frames},
        )
        if self.sealed is not None:
            rows, frames = (
                min(self.rows, rows),
                {name: min(self.frames[name], stored) for name, stored in frames.items()},
            )
        self.set_counts(rows, frames)
        self.room = self.room or self._needed_room()

    def _needed_room(self) -> int:
        most = [self._size(c.name) // c.nbytes for c in self.layout.frames if c.name not in self.codecs]
        return self.layout.room(max([self._size(ROWS) // self.layout.row.itemsize, *most, *self.frames.values()]))

    # Opening

    def _find_schema(self, folder: Path, schemas: Sequence[Schema]) -> tuple[Schema, int]:
        header = self._read(folder / "header.json", read_header)
        rows = folder / "rows"
        self.hopeless = not rows.is_file()
        if header is not None:
            return header
        self.header_lost = True
        if not schemas:
            raise CorruptError(
                f"{folder}: neither its header nor log.json tells the schema; restore one of them from a copy."
            )
        for schema in reversed(schemas):
            scan = scan_rows(self, np.fromfile(rows, schema.layout.row)) if rows.is_file() else Scan(0)
            if scan.rows > len(scan.bad_rows()):
                return schema, 0
        self.hopeless = self.hopeless or rows.stat().st_size > 0
        return schemas[-1], 0

    def _find_seal(self) -> None:
        path = self.folder / "seal.json"
        packed = {c.name: codec for c in self.layout.frames for codec in CODECS if self._is_packed(c, codec)}
        if not path.exists() and not packed:
            return
        seal = self._read(path, lambda file: read_seal(file, self.layout, self.room))
        if seal is None:
            self.seal_lost = True
            sizes = {c.name: self._size_of(c.file) // c.nbytes for c in self.layout.frames}
            codecs = {name: {"codec": codec} for name, codec in packed.items()}
            seal = {
                "rows": self._size_of("rows") // self.layout.row.itemsize,
                "frames": sizes,
                "codecs": codecs,
                "extents_crc": 0,
            }
        self.sealed, self.rows, self.frames, self.codecs = (
            seal,
            int(seal["rows"]),
            dict(seal["frames"]),
            dict(seal["codecs"]),
        )
        for column in self.layout.frames:
            if column.name in self.codecs:
                self._find_index(column)

    def _find_index(self, column: FrameColumn) -> None:
        """Where the frames of a compressed column end: from its index, or else from the frames."""
        made = self.codecs[column.name]
        path = self.folder / f"{column.file}.{made['codec']}"
        data = read(path) if path.exists() else b""
        known = "bytes" in made
        start = int(made["bytes"]) if known else int.from_bytes(data[-8:], "little")
        tail = data[start:]
        hints = np.frombuffer(tail[: len(tail) // 8 * 8], "<i8")
        whole = (
            checksum(tail) == made["index_crc"]
            if known
            else len(hints) and hints[-1] == start and bool((np.diff(hints) > 0).all())
        )
        if whole and len(tail) == 8 * (self.frames[column.name] if known else len(hints)):
            ends = hints
        else:
            if known and path.exists():
                self._add("damage", path.name, "the index at its end does not have its checksum", REBUILT)
            frames = self.frames[column.name] if known else None
            ends = find_ends(data[:start] if known else data, made["codec"], column.nbytes, frames, hints)
            self._indices[column.name] = ends
        self._offsets[column.name] = ends
        self.frames[column.name] = len(ends)
        end = int(ends[-1]) if len(ends) else 0
        self.codecs[column.name] = {"codec": made["codec"], "bytes": end, "index_crc": checksum(ends.tobytes())}

    def _open_file(self, path: Path) -> int:
        """A file that is missing is read as an empty one."""
        if path.exists():
            return super()._open_file(path)
        cure = ASIDE if path.name == "rows" else QUARANTINED
        self._add("damage", path.name, "the file is missing", cure, self._all_steps() if path.name == "rows" else ())
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _find_extents(self) -> None:
        if self.sealed is None or self.seal_lost:
            try:
                self._listed = self.held()  # of the last close: it still names the steps from before
            except CorruptError as error:
                self._add("damage", HELD, wrong_with(error), REMOVED)
                self._leftovers.append(self.folder / HELD)
            return
        try:
            self._listed = self.extents() if (self.folder / "extents").exists() else None
        except CorruptError as error:
            self._add("damage", "extents", wrong_with(error), REBUILT)
        else:
            if self._listed is None:
                self._add("damage", "extents", "the file is missing", REBUILT)
        self.extents_lost = self._listed is None

    def _find_leftovers(self) -> None:
        files = {c.name: [c.file, *(f"{c.file}.{codec}" for codec in CODECS)] for c in self.layout.frames}
        used = {
            c.file + (f".{self.codecs[c.name]['codec']}" if c.name in self.codecs else "") for c in self.layout.frames
        }
        for path in sorted(self.folder.iterdir()):
            if path.name in {"header.json", "rows", "seal.json", "extents"} | used or (
                path.name == HELD and self.sealed is None
            ):
                continue
            ours = path.name.startswith(".") or path.name == HELD or any(path.name in names for names in files.values())
            if ours:
                self._leftovers.append(path)
            self._add(
                "leftover",
                path.name,
                f"{path.stat().st_size:,} bytes that nothing refers to",
                REMOVED if ours else LEFT,
            )

    # Checking

    def _locate(self, rows: Array, scan: Scan) -> tuple[Array, Array]:
        """Per row, its trajectory and offset: from the row, and for a damaged one from
        the extents or its neighbors; else -1."""
        total = max(len(rows), scan.rows)
        trajectory, offset = np.full(total, -1, np.int64), np.full(total, -1, np.int64)
        trajectory[: len(rows)], offset[: len(rows)] = rows["#trajectory"], rows["#offset"]
        for damage in scan.damage:
            at = slice(damage.first, damage.first + damage.rows)
            trajectory[at], offset[at] = _vote(rows, damage)
        if scan.damage and self._listed is not None:
            for extent in self._listed:
                # the list may know of later rows
                at = slice(int(extent["row"]), min(total, int(extent["row"]) + int(extent["steps"])))
                trajectory[at], offset[at] = (
                    extent["trajectory"],
                    extent["offset"] + np.arange(max(0, at.stop - at.start)),
                )
        return trajectory, offset

    def _name(self, damage: list[Damage], trajectory: Array, offset: Array, known: Array) -> None:
        groups: dict[str, list[Array]] = defaultdict(list)
        for d in together(damage):
            groups[d.what].append(np.arange(d.first, d.first + d.rows))
        for what, parts in groups.items():
            at = np.unique(np.concatenate(parts))
            named = at[trajectory[at] >= 0]
            file, _, text = what.partition(": ")
            kind: Kind = "quarantined" if np.isin(at, known).all() else "damage"
            unknown = f" ({len(at) - len(named)} steps, of unknown trajectories)" if len(named) < len(at) else ""
            self._add(
                kind,
                file,
                text + unknown,
                KNOWN if kind == "quarantined" else QUARANTINED,
                spans(trajectory[named], offset[named]),
            )

    def _check_sizes(self, scan: Scan, trusted: Array, live: bool) -> None:
        """Files that end too early or too late."""
        committed = committed_frames(self.layout, trusted) if self.sealed is None else self.frames
        wanted = {ROWS: ("rows", scan.rows * self.layout.row.itemsize)}
        wanted |= {
            c.name: (c.file, committed[c.name] * c.nbytes) for c in self.layout.frames if c.name not in self.codecs
        }
        for name, (file, size) in wanted.items():
            excess = self._size(name) - size
            if excess < 0 or (excess and self.sealed is not None) or not (self.folder / file).exists():
                self._sizes[file] = size
            if excess < 0 and (self.folder / file).exists():
                self._add("damage", file, f"ends too early: {size + excess:,} of {size:,} bytes are there", QUARANTINED)
            elif excess > 0 and self.sealed is not None:
                self._add("leftover", file, f"{excess:,} bytes behind its end", CUT)
            elif excess > 0 and not live and not scan.damage:
                steps = f", {scan.torn_rows} steps" if name == ROWS else ""
                self._add(
                    "torn", file, f"{excess:,} bytes{steps} behind the last commit, which were not acknowledged", CUT
                )

    # Inside

    def _read(self, path: Path, reader: Callable[[Path], _T]) -> _T | None:
        """The contents of a small file; None, and a finding, when it is unreadable."""
        if not path.exists():
            self._add("damage", path.name, "the file is missing", REBUILT)
            return None
        try:
            return reader(path)
        except CorruptError as error:
            self._add("damage", path.name, wrong_with(error), REBUILT)
            return None

    def _mend_index(self, column: FrameColumn, ends: Array) -> str:
        made = self.codecs[column.name]
        path = self.folder / f"{column.file}.{made['codec']}"
        data = read(path)[: made["bytes"]] if path.exists() else b""
        self.files.replace(path, data + ends.tobytes())
        return f"{self._path(path.name)}: its index was rebuilt from the compressed frames"

    def _mend_size(self, path: Path, size: int) -> str:
        before = self._size_of(path.name)
        fd = self.files.open(path, write=True) if path.exists() else self.files.create(path)
        self.files.truncate(fd, size)
        self.files.sync(fd)
        self.files.close(fd)
        if before > size:
            return f"{self._path(path.name)}: {before - size:,} bytes behind its end were cut"
        return (
            f"{self._path(path.name)}: filled up with zeros to its {size:,} bytes; the steps that "
            "were there are in quarantine"
        )

    def _all_steps(self) -> tuple[Span, ...]:
        """Every step that the extents list, when these can be read."""
        if self._listed is None:
            return ()
        return tuple(Span(int(e["trajectory"]), int(e["offset"]), int(e["steps"])) for e in self._listed)

    def _is_packed(self, column: FrameColumn, codec: str) -> bool:
        return (self.folder / f"{column.file}.{codec}").exists() and not (self.folder / column.file).exists()

    def _size(self, name: str) -> int:
        return os.fstat(self.fd(name)).st_size

    def _size_of(self, file: str) -> int:
        path = self.folder / file
        return path.stat().st_size if path.exists() else 0

    def _path(self, file: str) -> str:
        return f"segments/{self.number:06d}/{file}"

    def _add(self, kind: Kind, file: str, what: str, cure: str, steps: tuple[Span, ...] = ()) -> None:
        frames = self.layout.frames if hasattr(self, "layout") else ()
        column = next((c.name for c in frames if file.startswith(c.file)), "")
        self.findings.append(Finding(kind, self._path(file), what, cure, steps, column))


def together(damage: list[Damage]) -> list[Damage]:
    """Many frames of one file that have the same fault as one finding."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    parsed = [_FRAME.fullmatch(d.what) for d in damage]
    for match in parsed:
        if match:
            found[match["file"], match["fault"]].add(int(match["frame"]))
    out = []
    for d, match in zip(damage, parsed, strict=True):
        frames = found[match["file"], match["fault"]] if match else set()
        if match and len(frames) > MAX_FRAME_FINDINGS:
            what = f"{match['file']}: {len(frames)} frames from {min(frames)} to {max(frames)}: each {match['fault']}"
            out.append(Damage(d.segment, what, d.first, d.rows))
        else:
            out.append(d)
    return out


def wrong_with(error: CorruptError) -> str:
    return "does not hold what it should" if isinstance(error, ContentError) else "does not have its checksum"


def _vote(rows: Array, damage: Damage) -> tuple[int, Any]:
    """Trajectory and offsets of damaged rows, by majority of the neighbors and the rows themselves."""
    first, count = damage.first, damage.rows
    votes: Counter[tuple[int, int]] = Counter()
    if first + count < len(rows) and rows["#offset"][first + count] >= count:
        votes[int(rows["#trajectory"][first + count]), int(rows["#offset"][first + count]) - count] += 1
    if first and not (rows["terminated"][first - 1] or rows["truncated"][first - 1]):
        votes[int(rows["#trajectory"][first - 1]), int(rows["#offset"][first - 1]) + 1] += 1
    for i, row in enumerate(rows[first : first + count]):
        votes[int(row["#trajectory"]), int(row["#offset"]) - i] += 1
    (trajectory, offset), _ = votes.most_common(1)[0] if votes else ((-1, 0), 0)
    return (trajectory, offset + np.arange(count)) if trajectory >= 0 and offset >= 0 else (-1, -1)


def find_ends(data: bytes, codec: str, nbytes: int, frames: int | None, hints: Array) -> Array:
    """Where each compressed frame ends. One that does not decompress is passed over with the help of the old index."""
    ends: list[int] = []
    position = 0
    while len(ends) < frames if frames is not None else position < len(data):
        end = frame_end(codec, memoryview(data)[position : position + nbytes + nbytes // 64 + 1024], nbytes)
        if end is None and frames is None:
            break
        hint = int(hints[len(ends)]) if len(ends) < len(hints) else 0
        position = position + end if end is not None else hint if position < hint <= len(data) else position
        ends.append(position)
    return np.array(ends, "<i8")
