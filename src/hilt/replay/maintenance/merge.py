"""Several logs as one, and one log as several.

    merge(["monday/log", "tuesday/log"], "week/log")
    split("week/log", ["train", "held_out"], ratios=[0.9, 0.1], seed=0)

Trajectories are copied as they are: steps with their sequence numbers, senders, facts, relabeled values and edits. Only
their numbers change. Every checksum is checked on the way, so damage is never copied. A log is written beside its name
and renamed when it is complete: one that was interrupted does not look like one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import checksum, read_json, write_json
from hilt.core.errors import ConfigError, CorruptError, LockedError, SchemaError
from hilt.core.files import DISK, Files
from hilt.core.tree import Array
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.schema import FrameColumn, Schema
from hilt.replay.settings import as_generator
from hilt.replay.step_encoder import EncodedSteps
from hilt.replay.storage.lock import writer_of
from hilt.replay.storage.scan import scan_file
from hilt.replay.storage.segment import Segment

Progress = Callable[[int, int], None]
_OWN = ("#trajectory", "#origin", "#pad", "#count", "#crc")
"""Fields of a row that are not copied."""
_SEGMENTS_KEPT = 4
"""Segments of a source whose rows are kept in memory."""


@dataclass(frozen=True)
class Copied:
    """A log that was made."""

    path: Path
    trajectories: int
    steps: int


def merge(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    progress: Progress | None = None,
    files: Files = DISK,
    without: Sequence[str] = (),
) -> Copied:
    """A new log with the trajectories of all sources, source after source, oldest first.

    It has the settings of the first source, but no capacity. Sources need the same columns. `progress` gets steps done
    and steps in all. Columns in `without` are left out: so the steps are kept of
    which one camera's frames are damaged or gone.
    """
    paths = [Path(source) for source in sources]
    if not paths:
        raise ConfigError("merge needs at least one log.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"merge: the same log is given twice, in {', '.join(map(str, paths))}.")
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(Log.open(path, "r", without=without)) for path in paths]
        for log in logs[1:]:
            _require_same_schema(logs[0], log)
        (copied,) = _write([(Path(target), [(log, log.trajectories(hidden=True)) for log in logs])], progress, files)
        return copied


def split(
    source: str | os.PathLike[str],
    targets: Sequence[str | os.PathLike[str]],
    ratios: Sequence[float] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    files: Files = DISK,
) -> list[Copied]:
    """New logs that share out the trajectories of one: each is in exactly one of them, drawn at random by `seed`.

    Shares are equal without `ratios`, and exact up to rounding; inside a log the order is that of the source.
    """
    shares = list(ratios) if ratios is not None else [1.0] * len(targets)
    if not targets or len(shares) != len(targets):
        raise ConfigError(
            f"split: expected one ratio for each target, got {len(shares)} ratios for {len(targets)} targets."
        )
    if any(not np.isfinite(share) or share <= 0 for share in shares):
        raise ConfigError(f"split: expected ratios above 0, got {shares}.")
    if len({Path(target).resolve() for target in targets}) < len(targets):
        raise ConfigError(f"split: two targets are the same folder, in {', '.join(map(str, targets))}.")
    with Log.open(source, "r") as log:
        trajectories = log.trajectories(hidden=True)
        counts = _share_out(len(trajectories), shares)
        for target, count in zip(targets, counts, strict=True):
            if not count:
                raise ConfigError(
                    f"{target}: its share of {len(trajectories)} trajectories is none; give it a larger ratio."
                )
        shuffled = as_generator(seed).permutation(trajectories)
        parts = np.split(shuffled, np.cumsum(counts)[:-1])
        jobs = [(Path(target), [(log, sorted(part.tolist()))]) for target, part in zip(targets, parts, strict=True)]
        return _write(jobs, progress, files)


Part = tuple[Log, list[int]]
"""A log, and which of its trajectories are wanted."""


def _write(jobs: Sequence[tuple[Path, list[Part]]], progress: Progress | None, files: Files) -> list[Copied]:
    """Writes every target beside its name, then renames them all."""
    for target, _ in jobs:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(
                f"{target}: expected a new or empty folder, got one with other files in it. Choose another path."
            )
    total = sum(log.live_steps for log in {id(log): log for _, parts in jobs for log, _ in parts}.values())
    copied, done, besides = [], 0, []

    def moved(steps: int) -> None:
        nonlocal done
        done += steps
        if progress is not None:
            progress(done, total)

    try:
        for target, parts in jobs:
            besides.append(beside := _beside(target, files))
            with _new_log(beside, parts[0][0], files) as log:
                _copy(parts, log, moved)
                copied.append(Copied(target, len(log.trajectories(hidden=True)), log.live_steps))
            _complete(beside, parts[0][0].settings["durability"], files)
    except BaseException:
        for beside in besides:
            files.remove(beside)
        raise
    for (target, _), beside in zip(jobs, besides, strict=True):
        files.rename(beside, target)
        files.sync_folder(target.parent)
    return copied


def _copy(parts: Sequence[Part], log: Log, moved: Callable[[int], None]) -> None:
    """Copies the trajectories of these parts into a log; `moved` is called with the number of steps of each."""
    for source, trajectories in parts:
        copier = Copier(source, log)
        for trajectory in trajectories:
            moved(copier.copy(trajectory))
        copier.copy_edits()
    if log.settings["compression"]:
        log.complete_segments()  # also the last segment, which is not full, is compressed


def _beside(target: Path, files: Files) -> Path:
    beside = target.absolute().with_name(f".{target.name}.new")
    if (holder := writer_of(beside)) is not None:
        raise LockedError(f"{target}: {holder} is making this log. Choose another path, or end that process.")
    files.remove(beside)  # of a run that was interrupted
    return beside


def _new_log(beside: Path, like: Log, files: Files) -> Log:
    compression = {
        column: codec for column, codec in like.settings["compression"].items() if column in like.schema.columns
    }
    settings = {"compression": compression, "segment_bytes": like.settings["segment_bytes"]}
    return Log.create(beside, like.schema, durability="never", files=files, **settings)


def _complete(beside: Path, durability: str, files: Files) -> None:
    """Makes every file power-safe at once, which is far quicker than trajectory by trajectory."""
    write_json(beside / "log.json", {**read_json(beside / "log.json"), "durability": durability}, files)
    for path in sorted(beside.rglob("*")):
        if path.is_dir():
            files.sync_folder(path)
        else:
            fd = files.open(path)
            files.sync(fd)
            files.close(fd)
    files.sync_folder(beside)


def _require_same_schema(first: Log, other: Log) -> None:
    differences = first.schema.columns.difference(other.schema.columns)
    if first.schema.stacked != other.schema.stacked:
        differences.append(f"stacked: {first.schema.stacked} became {other.schema.stacked}")
    if differences:
        raise SchemaError(
            f"{other.path} has another schema than {first.path}: {'; '.join(differences)}. Merge "
            "logs with the same columns."
        )


def _share_out(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in these shares, by largest remainder."""
    exact = [count * share / sum(shares) for share in shares]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


class Copier:
    """Copies trajectories of one log to the end of another."""

    def __init__(self, source: Log, target: Log):
        self._source, self._target = source, target
        self._segments = {segment.number: segment for segment in source.segments}
        self._rows: dict[int, Array] = {}
        self._origins = source.facts.origins()
        self._relabeled = _by_trajectory(source.facts.relabeled)
        self._copied: dict[int, int] = {}  # the new number of each trajectory

    def copy(self, trajectory: int) -> int:
        """Returns how many steps it had."""
        with self._target.lock:  # segments of the target are compressed in the background meanwhile
            return self._copy(trajectory)

    def copy_edits(self) -> None:
        """Copies the edits of these trajectories that count, with their authors and times."""
        state = self._source.facts.edits
        for number, edit in sorted(state.edits.items()):
            changes = [
                {**change, "trajectory": self._copied[change["trajectory"]]}
                for change in edit.get("changes", [])
                if change["trajectory"] in self._copied and number not in state.undone
            ]
            if changes:
                self._target.edit({**{k: edit[k] for k in ("action", "author", "time")}, "changes": changes})

    def _copy(self, trajectory: int) -> int:
        source, target = self._source, self._target
        entries = [source.index.entries[place].copy() for place in source.index.places_of(trajectory)]
        steps = sum(int(entry["steps"]) for entry in entries)
        origin = target.facts.origin(*self._origins.get(int(entries[0]["origin"]), ("", "", "")))
        number = target.catalog.take_trajectory()
        self._copied[trajectory] = number
        if facts := source.facts.recorded(trajectory):
            target.facts.annotate(number, facts)
        segments = target.active_segments
        active = segments.acquire(steps)
        for entry in entries:
            segment = self._segments[int(entry["segment"])]
            first, left = int(entry["at"]) % segment.room, int(entry["steps"])
            while left:
                if not segments.room(active):
                    active = segments.replace(active)
                count = min(left, segments.room(active))
                rows = self._checked_rows(segment)[first : first + count]
                stretch = Stretch(
                    segment, rows, target.schema, {"#trajectory": number, "#origin": origin}, active.segment.frames
                )
                place = None
                for block in stretch.blocks():
                    place = target.catalog.enter(
                        active, active.segment.append(block.rows, block.steps, block.frames), block, place
                    )
                first, left = first + count, left - count
                target.catalog.end_extents(number)
        segments.release(active)
        for column, first, values in self._relabeled.get(trajectory, []):
            target.relabel(number, column, values, first)
        return steps

    def _checked_rows(self, segment: Segment) -> Array:
        """The rows of a segment, each of them as it was written."""
        if segment.number not in self._rows:
            while len(self._rows) >= _SEGMENTS_KEPT:
                del self._rows[next(iter(self._rows))]
            scan, rows = scan_file(segment)
            fresh = np.setdiff1d(scan.bad_rows(), self._source.quarantine.rows(segment.number))
            if len(fresh):
                raise _damaged(segment, "rows", f"row {fresh[0]}")
            self._rows[segment.number] = rows
        return self._rows[segment.number]


class Stretch:
    """Consecutive rows of a segment, as rows of another log; their frames are numbered from `bases`."""

    def __init__(
        self, segment: Segment, rows: Array, schema: Schema, numbers: Mapping[str, int], bases: Mapping[str, int]
    ):
        self._segment, self._old, self._schema = segment, rows, schema
        self._rows = np.zeros(len(rows), schema.layout.row)
        self._frames: dict[str, tuple[FrameColumn, Array, Array, Array]] = {}
        for name, value in numbers.items():
            self._rows[name] = value
        known = rows.dtype.names or ()
        for name in self._rows.dtype.names or ():
            if name not in _OWN and name not in schema.layout.frame_of:
                self._rows[name] = rows[name] if name in known else schema.columns[name].default
        for column in schema.layout.frames:
            self._number_frames(column, bases[column.name])

    def blocks(self) -> Iterator[EncodedSteps]:
        """The rows as they were committed together, so that later damage costs no more than it would have before."""
        ends = np.union1d(np.flatnonzero(self._old["#count"]) + 1, [len(self._old)])
        for first, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            frames = {}
            for name, (column, numbers, crcs, rows) in self._frames.items():
                new = slice(*np.searchsorted(rows, [first, stop]).tolist())
                frames[name] = [
                    self._read(column, int(n), int(c)) for n, c in zip(numbers[new], crcs[new], strict=True)
                ]
            yield EncodedSteps.of(self._rows[first:stop], frames)

    def _number_frames(self, column: FrameColumn, base: int) -> None:
        """New references for a column, and its frames in the order in which rows first refer to them."""
        width = max(1, column.stack)
        number = np.concatenate([self._references(column, i)["frame"] for i in range(len(column.columns))], axis=1)
        crc = np.concatenate([self._references(column, i)["crc"] for i in range(len(column.columns))], axis=1)
        numbers, first, inverse = np.unique(number.reshape(-1), return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        fresh = (base + rank[inverse.reshape(-1)]).reshape(number.shape)
        for i, path in enumerate(column.columns):
            target = self._rows[path].reshape(len(self._rows), width)
            target["frame"], target["crc"] = fresh[:, i * width : (i + 1) * width], crc[:, i * width : (i + 1) * width]
            self._rows[path] = target.reshape(self._rows[path].shape)
        self._frames[column.name] = (
            column,
            numbers[order],
            crc.reshape(-1)[first[order]],
            first[order] // number.shape[1],
        )

    def _references(self, column: FrameColumn, member: int) -> Array:
        """A column's references, ``[rows, stack]``; where an older schema lacks it,
        to a frame below 0 that is its default."""
        path, width = column.columns[member], max(1, column.stack)
        if path in (self._old.dtype.names or ()):
            return self._old[path].reshape(len(self._old), width)
        references = np.zeros((len(self._old), width), self._rows[path].dtype.base)
        references["frame"] = -1 - member
        references["crc"] = checksum(self._default(column, member))
        return references

    def _default(self, column: FrameColumn, member: int) -> Array:
        default = self._schema.columns[column.columns[member]].default
        return np.full(column.shape, default, column.dtype).reshape(-1).view(np.uint8)

    def _read(self, column: FrameColumn, number: int, crc: int) -> Array:
        if number < 0:
            return self._default(column, -1 - number)
        frame = np.empty(column.nbytes, np.uint8)
        self._segment.read_frame(column, number, frame)
        if checksum(frame) != crc:
            raise _damaged(self._segment, column.file, f"frame {number}")
        return frame


def _damaged(segment: Segment, file: str, what: str) -> CorruptError:
    return CorruptError(
        f"{segment.folder / file}: {what} does not have its checksum; run: hilt data repair "
        f"{segment.folder.parent.parent}"
    )


def _by_trajectory(relabeled: Mapping[str, Mapping[int, Any]]) -> dict[int, list[tuple[str, int, Array]]]:
    """Relabeled values as (column, first offset, values) per trajectory."""
    out: dict[int, list[tuple[str, int, Array]]] = {}
    for column, values in relabeled.items():
        keys = np.sort(np.fromiter(values, np.int64, len(values)))
        for run in np.split(keys, np.flatnonzero(np.diff(keys) != 1) + 1):
            if len(run):
                first = int(run[0])
                out.setdefault(first >> OFFSET_BITS, []).append(
                    (column, first & 0xFFFFFFFF, np.array([values[key] for key in run.tolist()]))
                )
    return out
