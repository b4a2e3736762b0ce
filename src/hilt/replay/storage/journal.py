"""A file of checksummed JSON lines that is only appended to."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hilt.core.checksums import checksum
from hilt.core.errors import SchemaError, StorageError
from hilt.core.files import Files, storage_errors
from hilt.replay.storage.records import is_fact

BATCH_LINES = 1000
"""Lines that are parsed together."""
KNOWN_BYTES = 64
"""Bytes before the place up to which a file was read, by which it is known again: a file that was rewritten twice since
may have the number that the first one had."""


class Journal:
    """A file of checksummed JSON lines that is only appended to."""

    def __init__(self, path: Path, files: Files, write: bool):
        self.path, self._files = path, files
        self.torn_bytes = 0
        self.corrupt_lines: list[int] = []
        self.lines = 0
        self._size = self._crc = 0
        self._inode = -1  # of the file that was read last; a rewritten journal is another one
        self._known = b""  # the last bytes that were read of it, or written
        self._fd = -1
        self.unsynced = write  # what the writer before left may not be on the disk, nor the name of a new file
        self._named = False
        self._syncing = threading.Lock()
        if write:
            self.begin_writing()

    def begin_writing(self) -> None:
        """Opens the file for appending; it is created if it does not exist."""
        self._fd = self._files.open(self.path, write=True) if self.path.exists() else self._files.create(self.path)

    def read_new(self) -> Iterator[dict[str, Any]]:
        """The facts appended since the last call, or all of them after a rewrite;
        damaged lines are counted and passed over."""
        if not self.path.exists():
            return
        with storage_errors(self.path), self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._size - len(self._known))
            if inode != self._inode or file.read(len(self._known)) != self._known:
                self._inode, self._size, self._crc, self.lines, self.corrupt_lines = inode, 0, 0, 0, []
                self._known = b""
            file.seek(self._size)
            *whole, tail = file.read().split(b"\n")
        for begin in range(0, len(whole), BATCH_LINES):
            batch = whole[begin : begin + BATCH_LINES]
            facts = parse_lines(batch)
            self._size += sum(map(len, batch)) + len(batch)
            self._crc = checksum(raw := b"\n".join([*batch, b""]), self._crc)
            self._know(raw)
            self.corrupt_lines += [self.lines + 1 + place for place, fact in enumerate(facts) if fact is None]
            self.lines += len(batch)
            yield from (fact for fact in facts if fact is not None)
        self.torn_bytes = len(tail)

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def crc(self) -> int:
        """Checksum of these bytes."""
        return self._crc

    def read_all(self) -> list[dict[str, object]]:
        """Every fact, from the beginning."""
        again = Journal(self.path, self._files, write=False)
        return list(again.read_new())

    def cut_tail(self) -> None:
        """Removes the torn line a killed writer left, if any."""
        if self.torn_bytes:
            self._files.truncate(self._fd, self._size)

    def append(self, fact: dict[str, Any]) -> None:
        """Process-safe when it returns. When it raises, nothing of it was kept."""
        line = format_line(fact)
        try:
            self._files.write(self._fd, line, self._size)
        except StorageError:
            self._files.truncate(self._fd, self._size)
            raise
        self._size, self._crc = self._size + len(line), checksum(line, self._crc)
        self._know(line)
        self.lines += 1
        self.unsynced = True

    def rewrite(self, facts: Sequence[dict[str, Any]]) -> None:
        """Exactly these facts, in a new file that takes the place of the old one. Power-safe when it returns."""
        raw = b"".join(format_line(fact) for fact in facts)
        with self._syncing:
            self._files.replace(self.path, raw)
            self._files.close(self._fd)
            self._fd = self._files.open(self.path, write=True)
            self._inode, self.lines, self.corrupt_lines = os.fstat(self._fd).st_ino, len(facts), []
            self._size, self._crc, self._known = len(raw), checksum(raw), raw[-KNOWN_BYTES:]
            self.unsynced = False

    def _know(self, raw: bytes) -> None:
        self._known = (self._known + raw[-KNOWN_BYTES:])[-KNOWN_BYTES:]

    def sync(self) -> None:
        """Power-safe when it returns: what was appended before the call, by whichever thread."""
        with self._syncing:
            if not self.unsynced:
                return
            self.unsynced = False  # before the sync: what is appended meanwhile needs the next one
            try:
                self._files.sync(self._fd)
                if not self._named:
                    self._files.sync_folder(self.path.parent)
            except StorageError:
                self.unsynced = True
                raise
            self._named = True

    def renew_locks(self) -> None:
        """In a forked process."""
        self._syncing = threading.Lock()

    def close(self) -> None:
        with self._syncing:
            self.unsynced = False
            if self._fd >= 0:
                self._files.close(self._fd)
                self._fd = -1


def format_line(fact: dict[str, Any]) -> bytes:
    try:
        body = json.dumps(fact, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"a fact cannot be written down ({error}): give finite numbers, text, lists and mappings."
        ) from None
    return f"{checksum(body):08x} ".encode() + body + b"\n"


def parse_lines(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """What `parse_line` returns for each of these lines. Parsed together they share the texts of their keys: that takes
    less time and memory."""
    bodies = [line[9:] for line in lines]
    if all(line[:9] == b"%08x " % checksum(body) for line, body in zip(lines, bodies, strict=True)):
        try:
            found = json.loads(b"[" + b",".join(bodies) + b"]")
        except (ValueError, RecursionError):
            found = []
        if len(found) == len(lines):
            return [fact if is_fact(fact) else None for fact in found]
    return [parse_line(line) for line in lines]


def parse_line(line: bytes) -> dict[str, object] | None:
    """The fact on a line, without its line break; None when the line does not have its checksum."""
    if line[:9] != f"{checksum(line[9:]):08x} ".encode():
        return None
    try:
        fact: dict[str, Any] = json.loads(line[9:].decode())
    except (ValueError, RecursionError):
        return None
    return fact if is_fact(fact) else None
