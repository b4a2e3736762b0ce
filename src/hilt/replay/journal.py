"""A file of checksummed JSON lines that is only appended to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hilt.core.files import Files, checksum, read


class Journal:
    """A file of checksummed JSON lines that is only appended to."""

    def __init__(self, path: Path, files: Files, write: bool):
        self.path, self._files = path, files
        self.torn_bytes = 0
        self.corrupt_lines: list[int] = []
        self.lines = 0
        self._size = 0
        self._fd = -1
        self.unsynced = False
        if write:
            self._fd = files.open(path, write=True) if path.exists() else files.create(path)

    def read_new(self) -> Iterator[dict[str, Any]]:
        """The facts appended since the last call; damaged lines are counted and passed over."""
        if not self.path.exists():
            return
        raw = read(self.path)
        while self._size < len(raw):
            end = raw.find(b"\n", self._size)
            if end < 0:
                break
            line = raw[self._size : end]
            self._size = end + 1
            self.lines += 1
            fact = parse_line(line)
            if fact is not None:
                yield fact
            else:
                self.corrupt_lines.append(self.lines)
        self.torn_bytes = len(raw) - self._size

    def read_all(self) -> list[dict[str, Any]]:
        """Every fact, from the beginning."""
        again = Journal(self.path, self._files, write=False)
        return list(again.read_new())

    def cut_tail(self) -> None:
        """Removes the torn line a killed writer left, if any."""
        if self.torn_bytes:
            self._files.truncate(self._fd, self._size)

    def append(self, fact: dict[str, Any]) -> None:
        """Process-safe when it returns."""
        line = format_line(fact)
        self._files.write(self._fd, line, self._size)
        self._size += len(line)
        self.lines += 1
        self.unsynced = True

    def sync(self) -> None:
        if self.unsynced:
            self._files.sync(self._fd)
            self.unsynced = False

    def close(self) -> None:
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1


def format_line(fact: dict[str, Any]) -> bytes:
    body = json.dumps(fact, sort_keys=True, allow_nan=False).encode()
    return f"{checksum(body):08x} ".encode() + body + b"\n"


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The fact on a line, without its line break; None when the line does not have its checksum."""
    if line[8:9] != b" " or _parse_hex(line[:8]) != checksum(line[9:]):
        return None
    fact: dict[str, Any] = json.loads(line[9:])
    return fact


def _parse_hex(text: bytes) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1
