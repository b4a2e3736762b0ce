"""The file of edits: a journal that any process may append to, one edit at a time.

A log has one writer, which may be a run that goes on for days. People edit episodes meanwhile, in several processes. So
edits have a file of their own, and a lock that is held only while one edit is appended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

from hilt.core.errors import LockedError
from hilt.core.files import Files, storage_errors
from hilt.replay.storage.journal import Journal, format_line
from hilt.replay.storage.lock import try_lock

NAME, LOCK = "edits.jsonl", "edits.lock"
LOCK_TIMEOUT_S = 30.0
"""An edit is appended within milliseconds; a process that waits longer than this for another one gives up."""


class EditJournal:
    """The edits of a log, in the order in which they were made. Each is one line, so it is there as a whole or not."""

    def __init__(self, folder: Path, files: Files):
        self.path = folder / NAME
        self._lock, self._files = folder / LOCK, files
        self._journal = Journal(self.path, files, write=False)
        self._seen: tuple[int, int, int] | None = None
        self._last = 0

    @property
    def corrupt(self) -> int:
        """How many lines do not have their checksum; they are passed over."""
        return len(self._journal.corrupt_lines)

    def changed(self) -> bool:
        """Whether the file is another one, or longer, than at the last look."""
        return self._stamp() != self._seen

    def read_new(self) -> list[dict[str, object]]:
        """The edits that were made since the last call, by whichever process."""
        self._seen = self._stamp()
        edits = [line for line in self._journal.read_new() if "edit" in line]
        self._last = max([self._last, *(int(edit["edit"]) for edit in edits)])
        return edits

    def append(
        self, make: Callable[[list[dict[str, Any]]], dict[str, Any] | None], durable: bool
    ) -> dict[str, Any] | None:
        """Appends the edit that `make` returns, given the new ones of others, under the next free number, and returns
        it. No other process edits meanwhile. With None, nothing is appended.

        Process-safe when this returns, and power-safe with `durable`. When it raises, nothing of the edit was kept.
        """
        with self.locked():
            edit = make(self.read_new())
            if edit is None:
                return None
            # a line that was damaged had a number too
            numbered = {"edit": max(self._last, self._journal.lines) + 1, **edit}
            try:
                self._journal.begin_writing()
                self._journal.cut_tail()  # of a process that was killed: no other one writes now
                self._journal.append(numbered)
                if durable:
                    self._journal.sync()
            finally:
                self._journal.close()
            self._last, self._seen = numbered["edit"], self._stamp()
        return numbered

    def renew_locks(self) -> None:
        """In a forked process."""
        self._journal.renew_locks()

    def leave_out(self, numbers: Set[int], durable: bool) -> None:
        """Rewrites the file without the edits of these numbers, in one step: a process that reads meanwhile sees the
        file before it, or after it. The lock has to be held, and the newest edit has to stay: no number is given
        again."""
        kept = [line for line in self._journal.read_all() if line.get("edit") not in numbers]
        self._files.replace(self.path, b"".join(format_line(line) for line in kept), durable)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    @contextlib.contextmanager
    def locked(self, timeout: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Until the end of the context no other process appends. The system frees the lock when a process ends."""
        with storage_errors(self._lock):
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not try_lock(fd, timeout):
                raise LockedError(
                    f"{self._lock}: another process has been writing an edit for {timeout:.0f} s, expected "
                    "a moment. End the process that hangs, and try again."
                )
            yield
        finally:
            os.close(fd)
