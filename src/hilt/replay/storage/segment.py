"""One segment of a log: a folder with a file of rows and a file per frame column.

    000007/
      header.json       the schema; enough to read the folder without any other file
      rows              packed rows, one per step (`Layout.row`)
      NAME.frames       raw frames of one column, one after the other
      seal.json         once nothing more is appended: counts, checksums, how columns were compressed
      extents           which rows belong to which trajectory, so that opening reads no rows
      extents.held      the same of a segment that is not sealed, as it was when the log was last closed

Frames are written before the row that refers to them, and a row is valid when its checksum is. So a process killed at
any moment leaves whole steps and perhaps a torn tail, which the next writer cuts. `docs/format.md` reads a segment in
sixty lines.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from hilt.core.checksums import checksum, read_json, write_json
from hilt.core.errors import CorruptError, HiltError, MissingPackageError, StorageError, UnknownNameError
from hilt.core.files import DISK, Files, read, storage_errors
from hilt.core.platform import boot_id, read_into, start_writing
from hilt.core.tree import Array
from hilt.replay.schema import FrameColumn, Schema
from hilt.replay.storage.records import CODECS, FORMAT, MAX_ROOM, ContentError, read_header, read_seal
from hilt.replay.storage.seal import NOTHING

_COUNT = Struct("<I")
ROWS = "#rows"
"""The file of rows among the open files, which are known by their columns: no column is called so."""
HELD = "extents.held"
"""In a segment that is not sealed: its extents when the log was last closed, and their checksum."""

EXTENT = np.dtype(
    [
        ("trajectory", "<i8"),
        ("offset", "<i8"),
        ("row", "<i8"),
        ("sequence", "<i8"),
        ("steps", "<i4"),
        ("width", "<u4"),
        ("origin", "<u4"),
        ("sources", "u1"),
        ("ended", "?"),
    ]
)
"""A stretch of rows of one trajectory, as a sealed segment lists them. `offset` is the place of its first step
there, `sequence` the highest number its sender gave to one of them."""


Reference = tuple[int, int]
"""A frame's number in its segment, and its checksum."""


class NewFrames(list[Array]):
    """Frames of one column on their way into a segment, each as its bytes; their numbers begin at `base`."""

    def __init__(self, base: int):
        self._base = base
        self.written = 0
        """How many of them are in the file already."""

    def put(self, frame: Array) -> Reference:
        flat = np.ascontiguousarray(frame).reshape(-1).view(np.uint8)
        self.append(flat)
        return self._base + len(self) - 1, checksum(flat)


AHEAD_BYTES = 1 << 20
"""Frames of a long trajectory are written in portions of this size, while they are in the processor's cache."""


class Segment:
    """The files of one segment, for its writer and for readers."""

    def __init__(self, folder: Path, schema: Schema, room: int, files: Files, write: bool):
        self.folder, self.schema, self.layout, self.files = folder, schema, schema.layout, files
        self.room = room
        """How many rows, and frames of each column, it may hold."""
        self.number = int(folder.name)
        self.rows = 0
        self.frames = {column.name: 0 for column in self.layout.frames}
        self.sealed: dict[str, Any] | None = None
        self.codecs: dict[str, dict[str, Any]] = {}
        self._offsets: dict[str, Array] = {}
        self._fds: dict[str, int] = {}
        self._write = write
        self.unsynced = False
        """Whether something was written that a power cut would take away."""
        self._loose = False  # whether files and names, too, may not be on the disk yet
        self._syncing = threading.Lock()
        self._sync_error: StorageError | None = None
        self.unread: frozenset[str] = frozenset()
        """Frame columns that are not read here: their files may be damaged or missing."""
        self.bad_rows: Array | None = None
        """The rows whose checksum is wrong; None before they were checked."""
        self.promise = NOTHING
        """What it held when the log was last closed: less than that is damage, not a torn tail."""
        self.deleted = False
        """Its files are going away: a sync that is under way has nothing left to promise."""

    @classmethod
    def create(cls, folder: Path, schema: Schema, room: int, files: Files = DISK, durable: bool = True) -> Segment:
        """A new, empty segment; its folder appears whole."""
        beside = folder.with_name(f".{folder.name}.new")
        files.remove(beside)
        files.make_folder(beside)
        write_json(beside / "header.json", {"format": FORMAT, "room": room, "schema": schema.to_json()}, files, durable)
        for name in ["rows", *(column.file for column in schema.layout.frames)]:
            files.close(files.create(beside / name))
        if durable:
            files.sync_folder(beside)
        files.rename(beside, folder)
        if durable:
            files.sync_folder(folder.parent)
        segment = cls(folder, schema, room, files, write=True)
        segment._loose = not durable
        segment.bad_rows = np.zeros(0, np.int64)
        segment._open_files()
        return segment

    @classmethod
    def open(
        cls, folder: Path, files: Files = DISK, write: bool = False, unread: frozenset[str] = frozenset()
    ) -> Segment:
        """An existing segment. One that was not sealed has zero rows until `scan` has looked at them."""
        require_file(folder / "header.json")
        schema, room = read_header(folder / "header.json")
        segment = cls(folder, schema, room, files, write)
        segment.unread = unread
        if (folder / "seal.json").exists():
            segment._load_seal(read_seal(folder / "seal.json", schema.layout, room))
        segment._open_files()
        # What a killed process wrote, and what one wrote that never synced, may not be on the disk.
        segment.unsynced = segment._loose = write and not (segment.sealed or {}).get("durable", False)
        return segment

    # Writing

    def append(self, rows: bytearray | Array, count: int, frames: Mapping[str, Sequence[Array]]) -> int:
        """Commits rows, given as their bytes, and the new frames they refer to; returns the number of the first row.

        Process-safe when it returns. When it raises, nothing of it was kept.
        """
        _COUNT.pack_into(rows, len(rows) - 8, count)
        _COUNT.pack_into(rows, len(rows) - 4, checksum(memoryview(rows)[:-4]))
        try:
            for column in self.layout.frames:
                new = frames.get(column.name)
                if new is not None and len(new):
                    self._write_frames(column, new)
            self.files.write(self._fds[ROWS], rows, self.rows * self.layout.row.itemsize)
        except StorageError:
            self.cut_tail()
            raise
        first = self.rows
        self.rows += count
        for name, new in frames.items():
            self.frames[name] += len(new)
        self.unsynced = True
        return first

    def write_ahead(self, column: FrameColumn, frames: NewFrames) -> None:
        """Writes frames behind what is committed, where `append` will find them: the
        disk works while more are made ready."""
        try:
            self._write_frames(column, frames)
        except StorageError:
            self.cut_tail()
            raise

    def _write_frames(self, column: FrameColumn, frames: Sequence[Array]) -> None:
        written = frames.written if isinstance(frames, NewFrames) else 0
        if written == len(frames):
            return
        fd, offset = self._fds[column.name], (self.frames[column.name] + written) * column.nbytes
        size = (len(frames) - written) * column.nbytes
        if isinstance(frames, np.ndarray):  # they lie side by side
            self.files.write(fd, frames, offset)
        else:
            self.files.write_all(fd, frames[written:], offset)
        if isinstance(frames, NewFrames):
            frames.written = len(frames)
        if 2 * size >= AHEAD_BYTES and not self._loose:
            start_writing(fd, offset, size)

    def sync(self) -> None:
        """Power-safe when it returns: what was appended before the call, by whichever thread."""
        with self._syncing:
            if not self.unsynced:
                return
            # the system may have dropped what it could not write, and would not report it again
            if self._sync_error is not None:
                raise self._sync_error
            # before the sync: what comes meanwhile needs the next one
            loose, self.unsynced, self._loose = self._loose, False, False
            try:
                _sync_together(self.files, list(self._fds.values()))
                if loose:
                    self._sync_names()
            except StorageError as error:
                if self.deleted:
                    return
                self.unsynced, self._loose, self._sync_error = True, loose, error
                raise

    def _sync_names(self) -> None:
        for name in ("header.json", "extents", "seal.json", HELD):
            if (self.folder / name).exists():
                fd = self.files.open(self.folder / name)
                try:
                    self.files.sync(fd)
                finally:
                    self.files.close(fd)
        self.files.sync_folder(self.folder)
        self.files.sync_folder(self.folder.parent)

    def seal(self, extents: Array, durable: bool) -> None:
        """Ends the segment: nothing is appended any more, and opening it reads no rows."""
        if durable:
            self.sync()
        raw = extents.tobytes()
        self.files.replace(self.folder / "extents", raw, durable)
        data = {"rows": self.rows, "frames": self.frames, "codecs": {}, "extents_crc": checksum(raw)}
        data |= {"durable": durable, "boot": "" if durable else boot_id()}
        write_json(self.folder / "seal.json", data, self.files, durable)
        self.files.remove(self.folder / HELD)
        self._load_seal(data)
        if not durable:
            self.unsynced = self._loose = True

    def list_held(self, extents: Array, durable: bool) -> None:
        """Writes down which rows of a growing segment belong to which trajectory, when the log
        is closed: names for what goes missing."""
        raw = extents.tobytes()
        self.files.replace(self.folder / HELD, raw + _COUNT.pack(checksum(raw)), durable)

    def held(self) -> Array | None:
        """What `list_held` listed; None when there is no such list."""
        path = self.folder / HELD
        if not path.exists():
            return None
        raw = read(path)
        if (
            len(raw) % EXTENT.itemsize != _COUNT.size
            or _COUNT.pack(checksum(raw[: -_COUNT.size])) != raw[-_COUNT.size :]
        ):
            raise CorruptError(
                f"{path}: does not have its checksum; run: hilt data repair {self.folder.parent.parent}."
            )
        return self._checked_extents(raw[: -_COUNT.size], HELD)

    def compress(self, codecs: Mapping[str, str]) -> list[Path]:
        """Writes frame columns of a sealed segment once more with a lossless codec, beside the raw files.

        The seal names them when this returns, so the segment opened anew reads them. Returns the raw files, which are
        of no more use to it.
        """
        assert self.sealed is not None
        self.sync()
        made, raw = dict(self.codecs), []
        for column in self.layout.frames:
            if column.name in codecs and column.name not in made:
                made[column.name] = self._compress_column(column, codecs[column.name])
                raw.append(self.folder / column.file)
        if raw:
            self.files.sync_folder(self.folder)
            write_json(self.folder / "seal.json", {**self.sealed, "codecs": made, "durable": True}, self.files)
        return raw

    @property
    def trusted(self) -> bool:
        """Whether a sealed segment matches its seal without being read: it was synced,
        or the machine has not been restarted."""
        seal = self.sealed or {}
        return bool(seal.get("durable")) or (bool(seal.get("boot")) and seal["boot"] == boot_id())

    def vouch(self) -> None:
        """Makes a sealed segment power-safe, and notes it in its seal, after every byte of it was read."""
        assert self.sealed is not None
        self.sync()
        self.sealed = {**self.sealed, "durable": True}
        write_json(self.folder / "seal.json", self.sealed, self.files)

    def _compress_column(self, column: FrameColumn, codec: str) -> dict[str, Any]:
        encode, ends, position = _encoder(codec), np.zeros(self.frames[column.name], "<i8"), 0
        target = self.folder / f"{column.file}.{codec}"
        beside = target.with_name(f".{target.name}.new")
        self.files.remove(beside)
        fd = self.files.create(beside)
        frame = np.empty(column.nbytes, np.uint8)
        try:
            for number in range(self.frames[column.name]):
                self.read_frame(column, number, frame)
                data = encode(frame)
                self.files.write(fd, data, position)
                position += len(data)
                ends[number] = position
            self.files.write(fd, ends.tobytes(), position)
            self.files.sync(fd)
        except HiltError:
            self.files.remove(beside)
            raise
        finally:
            self.files.close(fd)
        self.files.rename(beside, target)
        return {"codec": codec, "bytes": position, "index_crc": checksum(ends.tobytes())}

    # Reading

    def fd(self, name: str) -> int:
        return self._fds[name]

    def read_rows(self, first: int, stop: int) -> Array:
        out = np.zeros(stop - first, self.layout.row)
        with storage_errors(self.folder / "rows"):
            got = read_into(self._fds[ROWS], out.view(np.uint8), first * self.layout.row.itemsize)
        return out[: got // self.layout.row.itemsize]

    def read_frame(self, column: FrameColumn, number: int, out: Array) -> None:
        """One frame's bytes into `out`."""
        made = self.codecs.get(column.name)
        target = out.reshape(-1).view(np.uint8)
        if made is None:
            got = read_into(self._fds[column.name], target, number * column.nbytes)
            if got != column.nbytes:
                raise self._cut_short(column.file, number)
            return
        ends = self._offsets[column.name]
        start = int(ends[number - 1]) if number else 0
        data = bytearray(max(0, int(ends[number]) - start))
        read_into(self._fds[column.name], data, start)
        try:
            raw = _decoder(made["codec"])(data, column.nbytes)
        except (zlib.error, ValueError) as error:
            raise self._bad_frame(column, number, f"does not decompress ({error})") from None
        if len(raw) != column.nbytes:
            raise self._bad_frame(column, number, f"has {len(raw)} bytes, expected {column.nbytes}")
        target[:] = np.frombuffer(raw, np.uint8)

    def read_frames(self, column: FrameColumn, first: int, out: Array) -> int:
        """Frames that lie side by side into the rows of `out` [count, bytes]; returns the number that could be read.
        Compressed ones are read one at a time."""
        if column.name not in self.codecs and first >= 0:
            return int(read_into(self._fds[column.name], out.reshape(-1), first * column.nbytes)) // column.nbytes
        try:
            self.read_frame(column, first, out[0])
        except (CorruptError, IndexError):
            return 0
        return 1

    def check_size(self, name: str) -> None:
        """An error when a file was cut behind our back; reading its map would end the process."""
        needed = (
            self.rows * self.layout.row.itemsize
            if name == ROWS
            else self.frames[name] * self.layout.frame_of[name].nbytes
        )
        # half the cost of fstat; the file's position is not used
        if os.lseek(self._fds[name], 0, os.SEEK_END) < needed:
            raise self._cut_short("rows" if name == ROWS else self.layout.frame_of[name].file, None)

    def nbytes(self) -> int:
        """Bytes of all files, as they lie on disk."""
        size = sum(os.fstat(fd).st_size for fd in self._fds.values())
        for name in ("header.json", "seal.json", "extents", HELD):
            with contextlib.suppress(OSError):  # not sealed yet; or, for a reader, deleted by the writer
                size += os.stat(self.folder / name).st_size
        return size

    def renew_locks(self) -> None:
        """In a forked process."""
        self._syncing = threading.Lock()

    def close(self) -> None:
        with self._syncing:
            for fd in self._fds.values():
                self.files.close(fd)
            self._fds = {}

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", {}).values():
            os.close(fd)

    # Inside

    def _open_files(self) -> None:
        for column in self.layout.frames:
            made = self.codecs.get(column.name)
            path = self.folder / (f"{column.file}.{made['codec']}" if made else column.file)
            gone = column.name in self.unread and not path.exists()
            self._fds[column.name] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if gone else self._open_file(path)
        self._fds[ROWS] = self._open_file(self.folder / "rows")

    def _open_file(self, path: Path) -> int:
        require_file(path)
        return self.files.open(path, write=self._write and self.sealed is None)

    def _load_seal(self, seal: dict[str, Any]) -> None:
        self.sealed, self.rows, self.frames = seal, int(seal["rows"]), dict(seal["frames"])
        self.codecs = dict(seal["codecs"])
        for column in self.layout.frames:
            made = self.codecs.get(column.name)
            if made and column.name not in self._offsets and column.name not in self.unread:
                path = self.folder / f"{column.file}.{made['codec']}"
                require_file(path)
                with storage_errors(path), path.open("rb") as file:
                    file.seek(made["bytes"])
                    raw = file.read()
                if checksum(raw) != made["index_crc"] or len(raw) != 8 * self.frames[column.name]:
                    raise CorruptError(
                        f"{path}: the index at its end does not have its checksum; run: hilt data repair."
                    )
                ends = np.frombuffer(raw, np.int64)
                if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] > made["bytes"]):
                    raise ContentError(f"{path}: the index at its end does not list its frames; run: hilt data repair.")
                self._offsets[column.name] = ends

    def extents(self) -> Array:
        """The extents that `seal` listed."""
        assert self.sealed is not None
        require_file(self.folder / "extents")
        raw = read(self.folder / "extents")
        if checksum(raw) != self.sealed["extents_crc"]:
            raise CorruptError(
                f"{self.folder / 'extents'}: does not have its checksum; run: hilt data repair "
                f"{self.folder.parent.parent}."
            )
        return self._checked_extents(raw, "extents")

    def _checked_extents(self, raw: bytes, name: str) -> Array:
        """Extents that lie within the segment and give every step a key; those of another segment are refused."""
        extents = np.frombuffer(raw, EXTENT) if len(raw) % EXTENT.itemsize == 0 else np.zeros(1, EXTENT)
        row, steps, trajectory, offset = (extents[name] for name in ("row", "steps", "trajectory", "offset"))
        right = extents["width"] > 0
        for holds in (row >= 0, steps > 0, trajectory >= 0, trajectory < MAX_ROOM, offset >= 0):
            right &= holds
        for holds in (offset < 1 << 32, offset + steps <= 1 << 32):
            right &= holds
        if self.sealed is not None:
            right &= row < self.rows
            right &= row + steps <= self.rows
        if not right.all():
            raise ContentError(
                f"{self.folder / name}: has its checksum, and lists rows that are not there; run: hilt data repair."
            )
        return extents

    def is_there(self) -> bool:
        """Whether the open files are those in the folder: another log may have been put in its place."""
        try:
            return os.stat(self.folder / "rows").st_ino == os.fstat(self._fds[ROWS]).st_ino
        except FileNotFoundError:
            return False

    def damaged_names(self) -> list[str]:
        """The small files that are not as they were written."""
        checks: dict[str, Callable[[], object]] = {"header.json": lambda: read_json(self.folder / "header.json")}
        if self.sealed is not None:
            checks |= {"seal.json": lambda: read_json(self.folder / "seal.json"), "extents": self.extents}
        else:
            checks[HELD] = self.held
        damaged = []
        for name, check in checks.items():
            try:
                check()
            except (CorruptError, StorageError):
                damaged.append(name)
        return damaged

    def stored_frames(self, name: str) -> int:
        """How many whole frames of a column there are in its file."""
        if name in self.unread:
            return self.frames[name]
        if name in self.codecs:
            return len(self._offsets[name])
        return os.fstat(self._fds[name]).st_size // self.layout.frame_of[name].nbytes

    def set_counts(self, rows: int, frames: Mapping[str, int]) -> None:
        """What a scan found committed."""
        self.rows, self.frames = rows, dict(frames)

    def cut_tail(self) -> None:
        """Removes whatever lies behind the last commit."""
        for column in self.layout.frames:
            self.files.truncate(self._fds[column.name], self.frames[column.name] * column.nbytes)
        self.files.truncate(self._fds[ROWS], self.rows * self.layout.row.itemsize)

    def _bad_frame(self, column: FrameColumn, number: int, what: str) -> CorruptError:
        return CorruptError(
            f"{self.folder}: frame {number} of {column.name} {what}; run: hilt data repair {self.folder.parent.parent}."
        )

    def _cut_short(self, file: str, frame: int | None) -> CorruptError:
        at = f" at frame {frame}" if frame is not None else ""
        return CorruptError(
            f"{self.folder / file}: the file ends too early{at}; it was cut after it was "
            "written. Run: hilt data repair."
        )


def _sync_together(files: Files, fds: Sequence[int]) -> None:
    """All files at once: the file system then writes one journal for all of them, which takes half the time.

    A layer that replaces `sync` gets the calls one after the other.
    """
    if len(fds) == 1 or type(files).sync is not Files.sync:
        for fd in fds:
            files.sync(fd)
        return
    others = [_sync_threads().submit(files.sync, fd) for fd in fds[1:]]
    try:
        files.sync(fds[0])
    finally:
        wait(others)
    for other in others:
        other.result()


@cache
def _sync_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, thread_name_prefix="hilt-fsync")


os.register_at_fork(after_in_child=_sync_threads.cache_clear)  # threads do not cross a fork


def require_file(path: Path) -> None:
    problem = "a folder is where this file was" if path.is_dir() else "" if path.exists() else "the file is missing"
    if problem:
        raise CorruptError(f"{path}: {problem}; run: hilt data repair {path.parent.parent.parent}.")


def check_codec(codec: str) -> None:
    """Refuses a codec that is unknown, or whose package is missing."""
    if codec not in CODECS:
        raise UnknownNameError("codec", codec, CODECS)
    _encoder(codec)


def _encoder(codec: str) -> Callable[[Array], bytes]:
    if codec == "zlib":
        return lambda frame: zlib.compress(frame, 6)
    return _zstd().ZstdCompressor(level=3).compress  # type: ignore[no-any-return]


def _decoder(codec: str) -> Callable[[bytes | bytearray, int], bytes]:
    """Takes a compressed frame and how many bytes it should give: it never gives many more."""
    if codec == "zlib":
        return lambda data, nbytes: zlib.decompressobj().decompress(data, nbytes + 1)
    zstd = _zstd()

    def decode(data: bytes | bytearray, nbytes: int) -> bytes:
        try:
            if zstd.frame_content_size(data) not in (-1, nbytes):
                raise ValueError("another size")
            return zstd.ZstdDecompressor().decompress(data, max_output_size=nbytes + 1)  # type: ignore[no-any-return]
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None

    return decode


def frame_end(codec: str, data: memoryview, nbytes: int) -> int | None:
    """How many bytes the compressed frame takes that begins here; None when it does not give `nbytes`."""
    zstd = _zstd() if codec == "zstd" else None
    stream, fault = (
        (zstd.ZstdDecompressor().decompressobj(), zstd.ZstdError) if zstd else (zlib.decompressobj(), zlib.error)
    )
    try:
        size = len(stream.decompress(data))
    except fault:
        return None
    return len(data) - len(stream.unused_data) if stream.eof and size == nbytes else None


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingPackageError("zstandard", "a column compressed with zstd", "zstd") from None
    return zstandard
