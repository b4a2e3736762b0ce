"""What writers have in common that fill a folder with units of files: they go on where an earlier one was stopped."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

from hilt.core.errors import ConfigError, StorageError
from hilt.core.files import DISK, leftovers, read
from hilt.formats.episodes import Episode, Writer
from hilt.replay.storage.journal import Journal

PROGRESS = ".progress"


class FolderWriter(Writer):
    """Writes into a new or empty folder; or goes on in one that has a journal, where each complete unit is a line.

    A folder without a journal is complete, and nothing is added to it; or it is somebody's, an error.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._path = path
        self._complete = (
            not (path / PROGRESS).exists() and path.exists() and not (path.is_dir() and not any(path.iterdir()))
        )
        if self._complete:
            try:
                self.next = self._jobs_done()
            except ConfigError:
                raise
            except (StorageError, ValueError, LookupError, TypeError, RecursionError):
                problem = "expected a new or empty folder, got one with other files in it. Choose another path."
                raise ConfigError(f"{path}: {problem}") from None
        else:
            DISK.make_folders(path)
        self._journal = Journal(path / PROGRESS, DISK, write=not self._complete)
        self._lines = list(self._journal.read_new())
        """Of the writer before this one"""
        if not self._complete:
            self._journal.cut_tail()
            self.next = max((line.get("next", 0) for line in self._lines), default=0)
            for rest in leftovers(path):
                DISK.remove(rest)

    def add(self, number: int, episode: Episode) -> None:
        if self._complete:
            raise ConfigError(f"{self._path}: this dataset is complete. Choose another path.")
        self._add(number, episode)

    @abstractmethod
    def _add(self, number: int, episode: Episode) -> None:
        """Writes the episode, or keeps it for the unit to come; `next` is then the number after it."""

    def keep(self) -> None:
        if not self._complete:
            self._end_unit()

    def _end_unit(self) -> None:
        """Completes the unit at hand, if there is one, however small; by itself a unit is one episode, and complete."""
        return

    def finish(self) -> None:
        if not self._complete:
            self._finish()
            self.close()
            DISK.remove(self._path / PROGRESS)
            self._complete = True

    @abstractmethod
    def _finish(self) -> None:
        """Writes the last unit, and then what makes a dataset of all units; at its end, what `_jobs_done` reads."""

    def close(self) -> None:
        self._journal.close()

    def _commit(self, **known: Any) -> None:
        """A unit is complete, and everything before job number `next` is on the disk."""
        self._journal.append({**known, "next": self.next})
        self._journal.sync()

    def _mark_complete(self, **known: Any) -> None:
        DISK.replace(self._path / "hilt.json", json.dumps({**known, "next": self.next}, allow_nan=False).encode())

    def _jobs_done(self) -> int:
        """How many jobs are in the dataset that was completed here; another folder has no such file."""
        return int(json.loads(read(self._path / "hilt.json"))["next"])
