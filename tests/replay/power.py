"""A disk that forgets: what may be left of a folder after a power cut.

`Recorder` performs every operation and writes it down. `Disk` plays the record up to some moment and then makes a
folder as it may be found when the power comes back. The model is that of a journaling file system, without the
orderings that such file systems give beyond what POSIX promises:

* **Bytes.** `sync(fd)` makes durable whatever was written to that file, through any descriptor, before the sync
  *began*. A later write is kept, dropped, or torn: of its 512-byte sectors any may be kept. Dropped sectors hold what
  was there before, zeros behind the old end. A file may have grown to the end of a dropped write (its size was written,
  its bytes were not). Truncations are kept or dropped.
* **Names.** `sync_folder` makes durable whatever happened to the names in that folder before. Every later creation,
  renaming and removal is kept or dropped on its own, so that a later one may be kept and an earlier one dropped: they
  are reordered. A renaming is kept or dropped as one: the file is never under neither name. What is kept points to the
  same file, whose bytes are another matter: a name without its bytes is an empty file.
* A file's name is *not* made durable by syncing the file.
* Nothing that was durable is damaged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.files import Files

SECTOR = 512


@dataclass
class Event:
    """One operation, or a promise that was given between two of them."""

    what: str
    path: Path = Path()
    other: Path = Path()
    file: int = 0
    """Number of the file that a name refers to, negative for a folder."""
    data: bytes = b""
    offset: int = 0
    began: int = 0
    """Of a sync: how many events there were when it began."""
    promise: Any = None


class Recorder(Files):
    """Performs and records. A sync takes a little while instead of going to the
    disk, so that other threads run into it."""

    def __init__(self, root: Path, sync_seconds: float = 0.0):
        self.events: list[Event] = []
        self._root, self._sync_seconds = root, sync_seconds
        self._lock = threading.RLock()
        self._number: dict[Path, int] = {}  # which file a name refers to now
        self._of_fd: dict[int, int] = {}
        self._next = 1

    def promise(self, what: Any) -> None:
        with self._lock:
            self.events.append(Event("promise", promise=what))

    def create(self, path: Path) -> int:
        with self._lock:
            fd = super().create(path)
            self._number[path] = self._of_fd[fd] = self._take_number()
            self.events.append(Event("link", path, file=self._of_fd[fd]))
            return fd

    def open(self, path: Path, write: bool = False) -> int:
        with self._lock:
            fd = super().open(path, write)
            self._of_fd[fd] = self._number[path]
            return fd

    def write(self, fd: int, data: Any, offset: int) -> None:
        with self._lock:
            super().write(fd, data, offset)
            self.events.append(
                Event("write", file=self._of_fd[fd], data=bytes(memoryview(data).cast("B")), offset=offset)
            )

    def write_all(self, fd: int, buffers: Sequence[Any], offset: int) -> None:
        for buffer in buffers:
            self.write(fd, buffer, offset)
            offset += buffer.nbytes

    def truncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().truncate(fd, size)
            self.events.append(Event("truncate", file=self._of_fd[fd], offset=size))

    def sync(self, fd: int) -> None:
        with self._lock:
            file, began = self._of_fd[fd], len(self.events)
        time.sleep(self._sync_seconds)
        with self._lock:
            self.events.append(Event("sync", file=file, began=began))

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            self.events.append(Event("sync folder", path))

    def close(self, fd: int) -> None:
        with self._lock:
            super().close(fd)
            self._of_fd.pop(fd)

    def make_folder(self, path: Path) -> None:
        with self._lock:
            if not path.exists():
                super().make_folder(path)
                self._number[path] = self._take_number()
                self.events.append(Event("link", path, file=-self._number[path]))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            folder = source.is_dir()
            super().rename(source, target)
            for path in [p for p in self._number if p == source or source in p.parents]:
                self._number[target / path.relative_to(source)] = self._number.pop(path)
            self.events.append(
                Event("rename", source, target, file=-self._number[target] if folder else self._number[target])
            )

    def remove(self, path: Path) -> None:
        with self._lock:
            if path.is_dir():
                for inner in sorted(path.iterdir()):
                    self.remove(inner)
            if path.exists():
                super().remove(path)
                self._number.pop(path, None)
                self.events.append(Event("unlink", path))

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1


@dataclass
class _File:
    durable: bytes = b""
    pending: list[tuple[int, Event]] = field(default_factory=list)


Change = tuple[str, int, bool]
"""A name, the file it refers to, and whether the name appears or goes."""


@dataclass
class _Folder:
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[int, list[Change]]] = field(default_factory=list)  # number of the event, what it does here
    now: dict[str, int] = field(default_factory=dict)


class Disk:
    """The state of a disk after some events, and what it may be after a power cut."""

    def __init__(self, root: Path):
        self._root = root
        self._files: dict[int, _File] = {}
        self._folders: dict[int, _Folder] = {0: _Folder()}
        self.promises: list[Any] = []

    def play(self, events: Sequence[Event]) -> None:
        for number, event in enumerate(events):
            self._play(number, event)

    def cut(self, rng: np.random.Generator, target: Path) -> None:
        """Makes one of the folders that may be found after a power cut."""
        mood = self._mood(rng)
        changes = {number for folder in self._folders.values() for number, _ in folder.pending}
        self._make(self._folders[0], target, {n for n in sorted(changes) if rng.random() < mood}, rng, {})

    def _play(self, number: int, event: Event) -> None:
        if event.what == "promise":
            self.promises.append(event.promise)
        elif event.what in ("write", "truncate"):
            self._files[event.file].pending.append((number, event))
        elif event.what == "sync":
            file = self._files[event.file]
            for at, done in file.pending:
                if at < event.began:
                    file.durable = _applied(file.durable, done)
            file.pending = [(at, e) for at, e in file.pending if at >= event.began]
        elif event.what == "sync folder":
            if self._inside(event.path):
                self._sync_names({number for number, _ in self._folder(event.path).pending})
        else:
            self._change_names(number, event)

    def _sync_names(self, changes: set[int]) -> None:
        """Makes these changes durable; one that moved a file to another folder is so in both."""
        for folder in self._folders.values():
            for number, change in folder.pending:
                if number in changes:
                    _rename(folder.durable, change)
            folder.pending = [(number, change) for number, change in folder.pending if number not in changes]

    def _change_names(self, number: int, event: Event) -> None:
        if event.file > 0:
            self._files.setdefault(event.file, _File())
        elif event.file < 0:
            self._folders.setdefault(-event.file, _Folder())
        changes: list[tuple[Path, Change]] = [(event.path.parent, (event.path.name, event.file, event.what == "link"))]
        if event.what == "rename":
            changes.append((event.other.parent, (event.other.name, event.file, True)))
        for path in dict.fromkeys(path for path, _ in changes):
            if self._inside(path):
                folder, mine = self._folder(path), [change for where, change in changes if where == path]
                folder.pending.append((number, mine))
                _rename(folder.now, mine)

    def _inside(self, path: Path) -> bool:
        return path == self._root or self._root in path.parents

    def _folder(self, path: Path) -> _Folder:
        folder = self._folders[0]
        for name in path.relative_to(self._root).parts:
            folder = self._folders[-folder.now[name]]
        return folder

    def _make(
        self, folder: _Folder, target: Path, kept: set[int], rng: np.random.Generator, made: dict[int, bytes]
    ) -> None:
        names = dict(folder.durable)
        for number, change in folder.pending:
            if number in kept:
                _rename(names, change)
        target.mkdir()
        for name, file in names.items():
            if file < 0:
                self._make(self._folders[-file], target / name, kept, rng, made)
            else:
                if file not in made:
                    made[file] = self._bytes(self._files[file], rng)
                (target / name).write_bytes(made[file])

    def _bytes(self, file: _File, rng: np.random.Generator) -> bytes:
        content, mood = file.durable, self._mood(rng)
        for _, event in file.pending:
            if event.what == "truncate":
                content = _applied(content, event) if rng.random() < mood else content
            else:
                content = _torn(content, event, mood, rng)
        return content

    def _mood(self, rng: np.random.Generator) -> float:
        """How much of what was not synced is kept: often all or nothing, for then the rarer mixtures are found too."""
        return float(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]))


def _rename(names: dict[str, int], changes: list[Change]) -> None:
    for name, file, appears in changes:
        if appears:
            names[name] = file
        elif not file or names.get(name) == file:
            names.pop(name, None)


def _applied(content: bytes, event: Event) -> bytes:
    if event.what == "truncate":
        return content[: event.offset].ljust(event.offset, b"\0")
    content = content.ljust(event.offset, b"\0")
    return content[: event.offset] + event.data + content[event.offset + len(event.data) :]


def _torn(content: bytes, event: Event, mood: float, rng: np.random.Generator) -> bytes:
    fate = rng.random()
    if fate < mood:
        return _applied(content, event)
    end = event.offset + len(event.data)
    if fate < mood + (1 - mood) / 3:  # dropped
        return content
    if fate < mood + 2 * (1 - mood) / 3:  # the size was written, the bytes were not
        return content.ljust(end, b"\0")
    raw = bytearray(content.ljust(end, b"\0"))
    for start in range(event.offset // SECTOR * SECTOR, end, SECTOR):
        if rng.random() < 0.5:
            low, high = max(start, event.offset), min(start + SECTOR, end)
            raw[low:high] = event.data[low - event.offset : high - event.offset]
    return bytes(raw)
