"""Looking at every byte of a log, and mending what is damaged.

    report = verify("runs/pick/log")       # changes nothing; also while a writer is at work
    print(report.ok, *report.findings)
    repair("runs/pick/log")                # as the one writer

A step is damaged when its row, or a frame that it refers to, does not have its checksum. Such steps go into quarantine:
they stay on disk, no view shows them, and everything else stays usable. Files that follow from others are rebuilt;
what is replaced and cannot be rebuilt in full is kept in the folder ``damaged`` of the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import write_json
from hilt.core.errors import CorruptError, DeadlineError, FormatError, VersionError
from hilt.core.files import DISK, Files, read, storage_errors
from hilt.core.tree import Array
from hilt.replay.log import Log
from hilt.replay.maintenance.findings import Finding, Kind, LogReport, Span
from hilt.replay.maintenance.merge import merge, split
from hilt.replay.maintenance.salvage import (
    ASIDE,
    KNOWN,
    LEFT,
    QUARANTINED,
    REBUILT,
    REMOVED,
    Checked,
    Salvage,
    wrong_with,
)
from hilt.replay.schema import Schema
from hilt.replay.settings import SEGMENT_BYTES
from hilt.replay.storage.edit_journal import LOCK, EditJournal
from hilt.replay.storage.edit_journal import NAME as EDITS
from hilt.replay.storage.journal import format_line, parse_line
from hilt.replay.storage.lock import WriterLock, writer_of
from hilt.replay.storage.quarantine import Quarantine
from hilt.replay.storage.records import FORMAT, ContentError, read_header, read_settings
from hilt.replay.storage.scan import Damage
from hilt.replay.storage.seal import NAME as SEAL
from hilt.replay.storage.seal import LogSeal, Loss

__all__ = ["Progress", "merge", "repair", "split", "verify"]

Progress = Callable[[int, int], None]
"""Called with how many bytes are done, and how many there are."""

_OURS = {"log.json", "writer.lock", "annotations.jsonl", EDITS, LOCK, "quarantine.json", "segments", "damaged", SEAL}
LOST = "is noted as lost: restore it from a copy instead, if there is one"
KNOWN_LOST = "nothing more: it is lost, and noted"
_AGAIN_SECONDS = 0.05
"""While a writer is at work, damage counts if it is still there after this number of seconds."""
_LOOKS = 8
_MAX_PASSES = 6
"""Of one repair."""


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> LogReport:
    """Reads every byte of a log and names everything that is not as it was written. Changes nothing."""
    examination = Examination(Path(path), DISK, progress)
    for segment, _ in examination.segments():
        segment.close()
    examination.finish()
    return examination.report


def repair(path: str | os.PathLike[str], progress: Progress | None = None, files: Files = DISK) -> LogReport:
    """Mends a log, as its one writer: afterwards it opens, and every step that it shows is as it was written.

    A second run finds nothing to do. Interrupted at any moment, it is simply run again. What is mended may show more
    that is wrong, so it looks again until nothing is; damage that stays is a `CorruptError` that names it.
    """
    first = report = _mend_once(Path(path), progress, files)
    for _ in range(_MAX_PASSES):
        if not report.mended:
            first.steps, first.trajectories, first.frames, first.facts = (
                report.steps,
                report.trajectories,
                report.frames,
                report.facts,
            )
            return first
        report = _mend_once(Path(path), None, files)
        first.mended += report.mended
        first.findings += [finding for finding in report.of("damage") if finding not in first.findings]
    left = "; ".join(map(str, report.of("damage")[:3])) or "; ".join(report.mended[:3])
    raise CorruptError(f"{path}: still damaged after {_MAX_PASSES} repairs: {left}. Restore these files from a copy.")


def _mend_once(folder: Path, progress: Progress | None, files: Files) -> LogReport:
    _require_log(folder)
    with WriterLock(folder):
        mending = Mending(Examination(folder, files, progress, own=True))
        mending.run()
    with Log.open(folder, files=files) as log:  # cuts torn tails, and shows that the log opens
        for trajectory, missing in mending.examination.gaps.items():
            known = log.facts.about(trajectory).get("missing_steps", [])
            log.annotate(trajectory, missing_steps=[*(gap for gap in known if gap not in missing), *missing])
            mending.report.mended.append(
                f"segments: steps of trajectory {trajectory} are missing: noted as the fact missing_steps"
            )
    return mending.report


class Examination:
    """One look at a whole log: segment by segment, then what concerns all of them."""

    def __init__(self, folder: Path, files: Files, progress: Progress | None, own: bool = False):
        _require_log(folder)
        self.folder, self.files = folder, files
        self.report = LogReport(folder, writing=not own and writer_of(folder) is not None)
        self.settings = self._read_settings()
        self.quarantine = Quarantine(folder / "quarantine.json", files)
        self.quarantine.load()
        self.quarantine_lost = self.quarantine.lost
        if self.quarantine_lost:
            self.add("damage", "quarantine.json", "does not have its checksum, or not what it should hold", REBUILT)
        self.annotations, self.edits = Annotations(folder / "annotations.jsonl"), Annotations(folder / EDITS)
        self.seal = LogSeal(folder, files)
        self.seal.load()
        if self.seal.damaged:
            self.add(
                "damage", SEAL, "does not have its checksum: what the log held when it was closed is not known", REBUILT
            )
        self.losses: list[Loss] = []
        self.schemas = self._schemas()
        self.duplicates: list[Damage] = []
        self.gaps: dict[int, list[list[int]]] = {}
        self._extents: list[tuple[int, Array]] = []  # (segment, its whole steps)
        self._origins: set[int] = set()
        self._all_named = True
        self._progress, self._started, self._done = progress, time.perf_counter(), 0
        self.report.bytes = _bytes_in(folder)

    def segments(self) -> Iterator[tuple[Salvage, Checked]]:
        """Every segment, checked. Its findings are in the report by then."""
        for folder in _segment_folders(self.folder):
            found = self._look(folder)
            if found is None:
                continue
            segment, checked = found
            self.report.segments += 1
            self.report.findings += segment.findings
            self.report.steps += int(checked.extents["steps"].sum())
            self.report.frames += checked.frames
            self._extents.append((segment.number, checked.extents))
            self._origins |= set(checked.origins.tolist())
            self._all_named &= checked.named
            self._done += _bytes_in(folder)
            if self._progress is not None:
                self._progress(self._done, self.report.bytes)
            yield segment, checked

    def finish(self) -> None:
        """What is known only when all segments were seen."""
        report = self.report
        self._check_annotations()
        self._check_edits()
        self._check_losses()
        self._check_overlaps()
        self._check_gaps()
        self._check_names()
        report.closed = self.seal.is_there and not self.seal.damaged
        if self._extents:
            trajectories = np.concatenate([extents["trajectory"] for _, extents in self._extents])
            report.trajectories = len(np.unique(trajectories))
        report.seconds = time.perf_counter() - self._started
        if self._progress is not None:
            self._progress(report.bytes, report.bytes)

    def add(self, kind: Kind, file: str, what: str, cure: str, steps: tuple[Span, ...] = ()) -> None:
        self.report.findings.append(Finding(kind, file, what, cure, steps))

    # Inside

    def _look(self, folder: Path) -> tuple[Salvage, Checked] | None:
        """One segment; None when a writer at work deleted it meanwhile."""
        if not self.report.writing:
            return self._open(folder)
        earlier: list[Finding] | None = None
        for _ in range(_LOOKS):
            try:
                segment, checked = self._open(folder)
            except (OSError, CorruptError):  # a file was renamed or removed while we looked
                if not folder.exists():
                    return None
                time.sleep(_AGAIN_SECONDS)
                continue
            damage = [f for f in segment.findings if f.kind == "damage" and (earlier is None or f in earlier)]
            if not damage or earlier is not None:
                others = [f for f in segment.findings if f.kind not in ("damage", "leftover")]
                segment.findings = others + damage if folder.exists() else []
                return segment, checked
            earlier = damage
            segment.close()
            time.sleep(_AGAIN_SECONDS)
        raise DeadlineError(
            f"{folder}: its writer changed it faster than it could be read, {_LOOKS} times; verify it again."
        )

    def _open(self, folder: Path) -> tuple[Salvage, Checked]:
        segment = Salvage(folder, self.schemas, self.files, self.seal.promise(int(folder.name)))
        return segment, segment.check(self.quarantine.rows(segment.number), self.report.writing)

    def _read_settings(self) -> dict[str, Any] | None:
        path = self.folder / "log.json"
        if not path.exists():
            self.add("damage", path.name, "the file is missing", REBUILT)
            return None
        try:
            return read_settings(path)
        except CorruptError as error:
            self.add("damage", path.name, wrong_with(error), REBUILT)
        except VersionError:
            raise
        except FormatError:
            self.add("damage", path.name, wrong_with(ContentError()), REBUILT)
        return None

    def _schemas(self) -> list[Schema]:
        """The schemas of the log, oldest first: from log.json, or else from the headers that are whole."""
        if self.settings is not None:
            return [Schema.from_json(schema) for schema in self.settings["schemas"]]
        found: list[Any] = []
        for folder in _segment_folders(self.folder):
            with contextlib.suppress(CorruptError):
                if (folder / "header.json").exists() and (
                    schema := read_header(folder / "header.json")[0].to_json()
                ) not in found:
                    found.append(schema)
        return [Schema.from_json(schema) for schema in found]

    def _check_annotations(self) -> None:
        notes = self.annotations
        notes.load()
        self.report.facts = len(notes.lines)
        if notes.missing and self._extents:
            self.add("damage", "annotations.jsonl", "the file is missing", "is made anew, empty: what it said is lost")
        for number, about in notes.damaged:
            whom = tuple(Span(t, 0, 1) for t in about)
            text = f"line {number} does not have its checksum" + (
                f", it was about trajectory {about[0]}" if whom else ""
            )
            self.add("damage", "annotations.jsonl", text, "is taken out, and the damaged file kept")
        if notes.torn and not self.report.writing:
            what = f"{notes.torn:,} bytes behind the last fact, which were not acknowledged"
            self.add("torn", "annotations.jsonl", what, "is cut")
        self.lost_origins = sorted(self._origins - {0} - set(notes.origins))
        if self.lost_origins:
            senders = ", ".join(map(str, self.lost_origins))
            self.add(
                "damage", "annotations.jsonl", f"the names of the senders {senders} are lost", "they get names made up"
            )

    def _check_edits(self) -> None:
        self.edits.load()
        for number, about in self.edits.damaged:
            text = f"line {number} does not have its checksum" + (f", it was about trajectory {about[0]}" * bool(about))
            self.add("damage", EDITS, text, "is taken out, and the damaged file kept")

    def _check_losses(self) -> None:
        """What the log held when it was closed, and is gone as a whole. Single rows
        and frames are found in their segments."""
        named = {finding.file for finding in self.report.of("damage")}
        self.losses = [loss for loss in self.seal.find_losses() if loss.file not in named]
        for loss in self.losses:
            self.add("damage", loss.file, f"{loss.what}, and the log held it when it was closed", LOST)
        for loss in self.seal.losses:
            kind: Kind = "quarantined" if loss.known else "damage"
            self.add(
                kind, loss.file, f"{loss.what}, found when the log was opened later", KNOWN_LOST if loss.known else LOST
            )

    def _check_overlaps(self) -> None:
        """Two rows that claim to be the same step: the later segment is a copy that was put there."""
        if not self._extents:
            return
        extents = np.concatenate([e for _, e in self._extents])
        segment = np.repeat([n for n, _ in self._extents], [len(e) for _, e in self._extents])
        key = (extents["trajectory"] << 32) | extents["offset"]
        order = np.argsort(key, kind="stable")
        end = np.iinfo(np.int64).min
        for i in order.tolist():
            stop = int(key[i]) + int(extents["steps"][i])
            again = min(int(end), stop) - int(key[i])
            if again > 0:
                first = int(extents["row"][i])
                what = f"rows: the {again} rows from {first} on are steps that another segment has too"
                self.duplicates.append(Damage(int(segment[i]), what, first, again))
                span = Span(int(extents["trajectory"][i]), int(extents["offset"][i]), again)
                known = np.isin(np.arange(first, first + again), self.quarantine.rows(int(segment[i]))).all()
                file, text = f"segments/{segment[i]:06d}/rows", what.partition(": ")[2]
                kind: Kind = "quarantined" if known else "damage"
                self.add(kind, file, text, KNOWN if known else QUARANTINED, (span,))
            end = max(end, stop)

    def _check_gaps(self) -> None:
        """Steps that must have been there, since later ones of their trajectory are. What
        was deleted or evicted is written down."""
        if not self._all_named or not self._extents:
            return
        aside = {span.trajectory for finding in self.report.findings if finding.cure == ASIDE for span in finding.steps}
        explained = {
            span.trajectory for finding in self.report.findings if finding.cure != ASIDE for span in finding.steps
        }
        explained |= self.annotations.deleted
        extents = np.sort(np.concatenate([e for _, e in self._extents]), order=["trajectory", "offset"])
        # where the extent before ends: the place of this one
        ends, trajectories = extents["offset"] + extents["steps"], extents["trajectory"]
        others = trajectories[1:] != trajectories[:-1]
        before = np.r_[0, ends[:-1]]
        before[np.r_[True, others]] = 0
        for i in np.flatnonzero(extents["offset"] > before).tolist():
            trajectory, first, stop = int(extents["trajectory"][i]), int(before[i]), int(extents["offset"][i])
            if trajectory in explained or [first, stop] in self.annotations.missing_steps.get(trajectory, []):
                continue
            self.gaps.setdefault(trajectory, []).append([first, stop])
            if trajectory in aside:
                continue
            cure = "is noted as the fact missing_steps: restore the folder from a copy instead, if there is one"
            self.add("damage", "segments", "a segment is missing", cure, (Span(trajectory, first, stop - first),))

    def _check_names(self) -> None:
        """Files of a log's folder that no log has."""
        if self.report.writing:
            return
        beside = [p for p in self.folder.iterdir() if p.name not in _OURS]
        beside += [p for p in (self.folder / "segments").iterdir() if not p.name.isdigit()]
        for path in sorted(beside):
            ours = is_leftover(path)
            what = "a file that was being written" if ours else "not a part of a log"
            self.add("leftover", str(path.relative_to(self.folder)), what, REMOVED if ours else LEFT)


class Annotations:
    """The late facts, line by line: those that are whole, and their values that the rest depends on."""

    def __init__(self, path: Path):
        self._path = path
        self.lines: list[bytes] = []
        self.damaged: list[tuple[int, list[int]]] = []
        """(number of the line, trajectories it seems to be about)."""
        self.torn = 0
        self.missing = False
        self.deleted: set[int] = set()
        self.origins: set[int] = set()
        self.missing_steps: dict[int, list[list[int]]] = {}

    def load(self) -> None:
        self.missing = not self._path.exists()
        *lines, tail = read(self._path).split(b"\n") if not self.missing else [b""]
        for number, line in enumerate(lines, 1):
            self._take(number, line)
        if parse_line(tail[:-1]) is not None:  # its line break is damaged
            self._take(len(lines) + 1, tail)
        else:
            self.torn = len(tail)

    def _take(self, number: int, line: bytes) -> None:
        fact = parse_line(line)
        if fact is not None:
            self._keep(line, fact)
            return
        self.damaged.append((number, [int(t) for t in re.findall(rb'"trajectory": (\d+)', line)]))
        for part in _parts(line):
            fact = parse_line(part)
            if fact is not None:
                self._keep(part, fact)

    def _keep(self, line: bytes, fact: dict[str, Any]) -> None:
        self.lines.append(line)
        if "origin" in fact:
            self.origins.add(int(fact["origin"]))
        elif "deleted_before" in fact:
            self.deleted.add(int(fact["trajectory"]))
        elif "missing_steps" in fact.get("facts", {}):
            self.missing_steps[int(fact["trajectory"])] = fact["facts"]["missing_steps"]


class Mending:
    """The part of `repair` that changes files."""

    def __init__(self, examination: Examination):
        self.examination = examination
        self.folder, self.files, self.report = examination.folder, examination.files, examination.report

    def run(self) -> None:
        look = self.examination
        if look.settings is None:
            self._mend_settings()
        if look.quarantine_lost:
            self._set_aside(self.folder / "quarantine.json")
        found: list[Damage] = []
        for segment, checked in look.segments():
            found += self._mend_segment(segment, checked)
            segment.close()
        look.finish()
        self._mend_quarantine(found + look.duplicates)
        self._mend_seal()
        if look.annotations.damaged or look.annotations.missing or look.lost_origins:
            self._mend_annotations()
        if look.edits.damaged:
            self._mend_edits()
        for path in [*self.folder.iterdir(), *(self.folder / "segments").iterdir()]:
            if is_leftover(path):
                self.files.remove(path)
                self.report.mended.append(f"{path.relative_to(self.folder)}: removed")

    def _mend_segment(self, segment: Salvage, checked: Checked) -> list[Damage]:
        if segment.hopeless:
            self._set_aside(segment.folder)
            return []
        if checked.damage:  # before its files change: from then on nothing shows that steps are missing
            self.examination.quarantine.add(checked.damage)
        bad = self.examination.quarantine.rows(segment.number)
        self.report.mended += segment.mend(bad)
        return checked.damage

    def _mend_quarantine(self, found: list[Damage]) -> None:
        quarantine = self.examination.quarantine
        before = quarantine.steps()
        quarantine.replace(found)
        fresh = [f for f in self.report.of("damage") if f.cure == QUARANTINED and f.steps]
        self.report.mended += [f"{finding}: in quarantine" for finding in fresh]
        if quarantine.steps() < before:
            self.report.mended.append(
                f"quarantine.json: {before - quarantine.steps()} steps are whole again and were set free"
            )

    def _mend_seal(self) -> None:
        """Writes down what is lost for good. The log is sealed anew, with what it holds
        now, when it is closed after the repair."""
        look = self.examination
        unknown = [loss for loss in look.seal.losses if not loss.known] + look.losses
        if look.seal.damaged:
            self._set_aside(self.folder / SEAL)
            look.seal.remove()
        elif unknown:
            look.seal.accept(look.losses, known=True)
        self.report.mended += [f"{loss.file}: {loss.what}: noted as lost" for loss in unknown]
        for finding in self.report.of("torn"):
            self.report.mended.append(f"{finding}: cut")

    def _mend_settings(self) -> None:
        """A new log.json: the schemas are known from the segments, the other settings are the defaults."""
        look = self.examination
        if not look.schemas:
            raise FormatError(
                f"{self.folder}: no segment tells the schema, so log.json cannot be rebuilt; restore it from a copy."
            )
        said = _settings_in(self.folder / "log.json")
        self._set_aside(self.folder / "log.json")
        look.settings = {
            "format": FORMAT,
            "schemas": [schema.to_json() for schema in look.schemas],
            "capacity_steps": None,
            "capacity_bytes": None,
            "durability": "every episode",
            "compression": {},
            "segment_bytes": SEGMENT_BYTES,
        }
        write_json(self.folder / "log.json", look.settings, self.files)
        hint = f" The damaged file said {said}: set what is right with Log.open(path, NAME=VALUE)." if said else ""
        self.report.mended.append(
            f"log.json: rebuilt from the headers, with default settings (no capacity, every episode).{hint}"
        )

    def _mend_annotations(self) -> None:
        path, notes = self.folder / "annotations.jsonl", self.examination.annotations
        self.examination.seal.forget_facts()
        self._set_aside(path)
        lines = [line + b"\n" for line in notes.lines]
        for origin in self.examination.lost_origins:
            lines.append(format_line({"origin": origin, "actor": f"lost sender {origin}", "boot": "", "store": ""}))
        self.files.replace(path, b"".join(lines))
        self.report.mended.append(f"annotations.jsonl: written anew with its {len(notes.lines)} whole lines")

    def _mend_edits(self) -> None:
        with EditJournal(self.folder, self.files).locked():  # others may edit meanwhile
            whole = Annotations(self.folder / EDITS)
            whole.load()
            self._set_aside(self.folder / EDITS)
            self.files.replace(self.folder / EDITS, b"".join(line + b"\n" for line in whole.lines))
        self.report.mended.append(f"{EDITS}: written anew with its {len(whole.lines)} whole lines")

    def _set_aside(self, path: Path) -> None:
        """Keeps what is damaged under another name: a folder is moved, a file copied."""
        if not path.exists():
            return
        aside = self.folder / "damaged"
        self.files.make_folder(aside)
        target, copies = aside / path.name, 1
        while target.exists():
            target, copies = aside / f"{path.name}.{copies}", copies + 1
        if path.is_dir():
            self.files.rename(path, target)
        else:
            self.files.replace(target, read(path))
            if path.name == "quarantine.json":
                self.files.remove(path)
        self.report.mended.append(f"{path.relative_to(self.folder)}: kept as {target.relative_to(self.folder)}")


def is_leftover(path: Path) -> bool:
    """Whether this is something Hilt was writing or removing when its process ended."""
    return path.name.startswith(".") and path.name.endswith((".new", ".trash"))


def _require_log(folder: Path) -> None:
    with storage_errors(folder):
        found = os.listdir(folder)
    if "log.json" not in found and not any((f / "header.json").exists() for f in _segment_folders(folder)):
        raise FormatError(f"{folder}: not a Hilt log (no log.json in it). Give the folder that Log.create made.")


def _segment_folders(folder: Path) -> list[Path]:
    segments = folder / "segments"
    return sorted(f for f in segments.iterdir() if f.name.isdigit()) if segments.is_dir() else []


def _parts(line: bytes) -> list[bytes]:
    """A damaged line as two, where a line break may have been."""
    for end in (match.end() for match in re.finditer(rb"}", line)):
        if parse_line(line[:end]) is not None or parse_line(line[end + 1 :]) is not None:
            return [line[:end], line[end + 1 :]]
    return []


def _settings_in(path: Path) -> str:
    """The settings that a damaged log.json seems to hold, in words."""
    text = read(path).decode(errors="replace") if path.exists() else ""
    found = re.findall(r'"(capacity_steps|capacity_bytes|durability|segment_bytes)": ("[^"]*"|\d+)', text)
    return ", ".join(f"{name} {value}" for name, value in found)


def _bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; those that a writer at work deletes meanwhile do not count."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
