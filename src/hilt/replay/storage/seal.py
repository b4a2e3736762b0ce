"""What a log held when it was closed: the proof that nothing is missing.

A row and a frame carry their own checksums, so that a byte that changed is found. A byte that is *gone* from
the end of a growing file is not, unless the length of the file was recorded. `Log.close` writes
``closed.json``: every segment with its rows and frames, and the length and the checksum of the late facts. Rows
and facts are only appended, so this stays true, as a lower bound, while the next writer goes on; what that
writer deletes is taken out of the list before it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.core.checksums import checksum, read_json, write_json
from hilt.core.errors import CorruptError, StorageError
from hilt.core.files import Files, read
from hilt.replay.storage.records import MAX_ROOM

if TYPE_CHECKING:
    from hilt.replay.storage.segment import Segment

NAME = "closed.json"
logger = logging.getLogger("hilt.replay")


@dataclass(frozen=True)
class Promise:
    """What one segment held when the log was closed."""

    rows: int = 0
    frames: dict[str, int] = field(default_factory=dict)


NOTHING = Promise()


@dataclass(frozen=True)
class Loss:
    """Something that the log held when it was closed and that is gone."""

    file: str
    what: str
    known: bool = False
    """Whether `repair` has reported it; then it no longer counts as damage, but is still listed."""


class LogSeal:
    """The file ``closed.json`` of a log."""

    def __init__(self, folder: Path, files: Files):
        self._folder, self._path, self._files = folder, folder / NAME, files
        self.segments: dict[int, Promise] = {}
        self.facts: tuple[int, int] | None = None
        """Bytes of annotations.jsonl, and their checksum."""
        self.losses: list[Loss] = []
        self.damaged = False
        """Whether the file itself does not have its checksum."""
        self._written = False

    def load(self) -> None:
        """Reads the file. A log that was never closed, or was written by an older
        Hilt, has none: then nothing is promised."""
        self.segments, self.facts, self.losses, self.damaged, self._written = {}, None, [], False, False
        try:
            contents = read_json(self._path)
        except CorruptError:
            self.damaged = True
            return
        except StorageError:
            if self._path.exists():
                raise
            return
        self._written = True
        try:
            self.segments = {int(number): Promise(**promise) for number, promise in contents["segments"].items()}
            if any(not isinstance(p.rows, int) or not 0 <= p.rows <= MAX_ROOM for p in self.segments.values()):
                raise ValueError("rows of a segment")
            self.facts = (int(contents["facts"]["bytes"]), int(contents["facts"]["crc"])) if contents["facts"] else None
            self.losses = [Loss(**loss) for loss in contents["losses"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("%s: expected segments, facts and losses as Log.close writes them (%r)", self._path, error)
            self.segments, self.facts, self.losses, self.damaged, self._written = {}, None, [], True, False

    @property
    def is_there(self) -> bool:
        return self._path.exists()

    def promise(self, segment: int) -> Promise:
        return self.segments.get(segment, NOTHING)

    def find_losses(self) -> list[Loss]:
        """What is gone: whole segments, and facts. Rows and frames that are gone
        are found when their segment is read."""
        gone = [number for number in self.segments if not self._has_segment(number)]
        if gone:
            self.load()  # a writer at work takes a segment out of the list before it deletes it
        found = []
        for number in sorted(set(gone) & self.segments.keys()):
            found.append(
                Loss(f"segments/{number:06d}", f"the segment is missing, with {self.segments[number].rows:,} steps")
            )
        return found + self._find_lost_facts()

    def forget(self, segment: int) -> None:
        """Takes a segment out of the list, before its files are deleted."""
        if self.segments.pop(segment, None) is not None:
            self._save()

    def forget_facts(self) -> None:
        """Removes the entry of annotations.jsonl, before that file is written anew."""
        if self.facts is not None:
            self.facts = None
            self._save()

    def accept(self, found: Sequence[Loss], known: bool = False) -> None:
        """Keeps the losses, so that every later `verify` names them, and continues with the
        rest. `known`: repair has reported them."""
        new = [loss for loss in found if not any((old.file, old.what) == (loss.file, loss.what) for old in self.losses)]
        self.losses = [Loss(loss.file, loss.what, known or loss.known) for loss in [*self.losses, *new]]
        self.segments = {number: promise for number, promise in self.segments.items() if self._has_segment(number)}
        if any(loss.file == "annotations.jsonl" for loss in found):
            self.facts = None
        self._save()

    def write(self, segments: Sequence[Segment], facts: tuple[int, int], durable: bool) -> None:
        """The log is closed and holds this."""
        self.segments |= {segment.number: Promise(segment.rows, dict(segment.frames)) for segment in segments}
        self.facts = facts
        self._write(durable)

    def remove(self) -> None:
        self._files.remove(self._path)

    # Inside

    def _has_segment(self, number: int) -> bool:
        aside = self._folder / "damaged"
        return (self._folder / "segments" / f"{number:06d}").exists() or (aside / f"{number:06d}").exists()

    def _find_lost_facts(self) -> list[Loss]:
        for again in (True, False):
            if self.facts is None:
                return []
            size, crc = self.facts
            path = self._folder / "annotations.jsonl"
            raw = read(path)[:size] if path.exists() else b""
            if len(raw) == size and checksum(raw) == crc:
                return []
            if again:
                self.load()  # a writer at work may have written the facts anew
        if len(raw) < size:
            return [Loss("annotations.jsonl", f"ends too early: {len(raw):,} of {size:,} bytes are there")]
        return [
            Loss("annotations.jsonl", f"its first {size:,} bytes are not those that were there when the log was closed")
        ]

    def _save(self) -> None:
        """Writes what is promised now. On a full disk nothing is promised, rather than what is not true any more."""
        if not self._written:
            return
        try:
            self._write(durable=True)
        except StorageError as error:
            logger.warning("%s: removed, since it cannot be written anew: %s", self._path, error)
            self.remove()

    def _write(self, durable: bool) -> None:
        data: dict[str, Any] = {
            "segments": {str(number): vars(promise) for number, promise in sorted(self.segments.items())}
        }
        data["facts"] = {"bytes": self.facts[0], "crc": self.facts[1]} if self.facts is not None else None
        data["losses"] = [vars(loss) for loss in self.losses]
        write_json(self._path, data, self._files, durable)
        self._written = True
