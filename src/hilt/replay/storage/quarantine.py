"""Steps that are known to be damaged. They stay on disk, and no view shows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import write_json
from hilt.core.errors import CorruptError
from hilt.core.files import Files
from hilt.core.tree import Array
from hilt.replay.storage.records import read_quarantine
from hilt.replay.storage.scan import Damage


class Quarantine:
    """The damaged rows of every segment, and what is wrong with them, in one small file."""

    def __init__(self, path: Path, files: Files):
        self._path, self._files = path, files
        self._entries: dict[str, list[Any]] = {}
        self.lost = False
        """Whether the file itself is damaged: what it listed must be found again."""

    def load(self) -> None:
        try:
            self._entries = read_quarantine(self._path) if self._path.exists() else {}
        except CorruptError:
            self.lost = True

    def add(self, damage: Sequence[Damage]) -> None:
        """Records damage; what is recorded already stays once."""
        self.note(damage)
        self._save()

    def note(self, damage: Sequence[Damage]) -> None:
        """Does what `add` does, for as long as this log is open: a reader changes no file."""
        for d in damage:
            listed = self._entries.setdefault(str(d.segment), [])
            if [d.first, d.rows, d.what] not in listed:
                listed.append([d.first, d.rows, d.what])

    def found_again(self) -> None:
        """Every segment was read: what is listed now is everything, and takes the place of the damaged file."""
        self._save()
        self.lost = False

    def replace(self, damage: Sequence[Damage]) -> None:
        """Records exactly this damage: what was listed and is whole now is set free."""
        before, self._entries = self._entries, {}
        if damage:
            self.add(damage)
        elif before:
            self._save()

    def forget(self, segment: int) -> None:
        if self._entries.pop(str(segment), None) is not None:
            self._save()

    def rows(self, segment: int, unread: Collection[str] = ()) -> Array:
        """The damaged rows of a segment, sorted; those whose frames are damaged only in `unread` columns are none."""
        files = tuple(f"{name.replace('/', '.')}.frames" for name in unread)
        listed = [
            (first, rows)
            for first, rows, what in self._entries.get(str(segment), [])
            if not (files and what.startswith(files))
        ]
        spans = [np.arange(first, first + rows, dtype=np.int64) for first, rows in listed]
        return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)

    def steps(self) -> int:
        return sum(len(self.rows(int(segment))) for segment in self._entries)

    def list(self) -> list[Damage]:
        return [
            Damage(int(s), what, first, rows)
            for s, listed in sorted(self._entries.items())
            for first, rows, what in listed
        ]

    def _save(self) -> None:
        write_json(self._path, {"segments": self._entries}, self._files)
