"""A file of one byte for each step and for each episode that an actor has begun, so that a restarted one goes on
counting."""

from __future__ import annotations

from pathlib import Path

from hilt.core.files import DISK, read


class ActedJournal:
    """Counts the steps and episodes that an actor has begun, over all its restarts.
    A byte is written whole, or not at all."""

    def __init__(self, path: Path):
        self._path = path
        self._open()

    def _open(self) -> None:
        there = read(self._path) if self._path.exists() else b""
        self.steps, self.episodes, self._size = there.count(b"s"), there.count(b"e"), len(there)
        self._fd = DISK.open(self._path, write=True) if self._path.exists() else DISK.create(self._path)

    def step(self) -> None:
        self._write(b"s")
        self.steps += 1

    def begin_episode(self) -> int:
        """Its number, from 0."""
        self._write(b"e")
        self.episodes += 1
        return self.episodes - 1

    def restart(self) -> None:
        """Another run: nothing has been done in it."""
        self.close()
        DISK.replace(self._path, b"")
        self._open()

    def _write(self, byte: bytes) -> None:
        DISK.write(self._fd, byte, self._size)
        self._size += 1

    def close(self) -> None:
        DISK.close(self._fd)
