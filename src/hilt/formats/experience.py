"""Our own log, as one of the formats: every conversion into it or out of it goes the same way as all others."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml  # type: ignore[import-untyped]

from hilt.core.errors import ConfigError, HiltError, UnknownNameError
from hilt.core.trajectory import INSTRUCTION
from hilt.core.tree import Array, JsonObject
from hilt.formats.episodes import Dataset, Episode, Job, Writer, map_leaves, plain
from hilt.formats.listing.log_episodes import rows_where
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.recut import facts_of_piece
from hilt.replay.schema import INLINE_BYTES, Schema
from hilt.replay.storage.segment import check_codec

_OFFSET = (1 << OFFSET_BITS) - 1
Row: TypeAlias = tuple[int, int]
"""A trajectory, and one of the rows that it has if it is a wide one; of others row 0"""
VIEWS = ("all", "demo", "human", "policy", "random", "successes")


def matches(path: Path) -> bool:
    return (path / "log.json").is_file()


def open_dataset(path: Path, *, view: str = "all", trajectories: str = "", where: str = "") -> LogDataset:
    """`view` chooses steps: all, those of one source (demo, human, policy, random), or those of trajectories that
    succeeded. `trajectories` chooses among their trajectories by number, such as ``3,7-9``; `where` by a filter, such
    as ``success=true advantage_percentile>=60``."""
    if view not in VIEWS:
        raise UnknownNameError("view", view, VIEWS)
    return LogDataset(path, view, trajectories, where)


def _where(log: Log, where: str, trajectories: str) -> list[Row]:
    """The rows that a filter chooses of the trajectories that a text names, of all where it is empty: one at least."""
    known = log.trajectories()
    among, found = {*_chosen(trajectories, known)} if trajectories else {*known}, rows_where(log, [where])
    if rows := [(number, lane) for number, lane in found if number in among]:
        return rows
    shown = {number for number, _ in found}.intersection(known)
    hints = [f"{len(found)} episodes that are bad or deleted are in no dataset"] if found and not shown else []
    hints += [f"the filter alone chooses {len(shown)} of them"] if shown else []
    raise ConfigError(
        f"where={where!r}{f' with trajectories={trajectories}' if trajectories else ''} chooses none of the "
        f"{len(known)} episodes of {log.path}{''.join(f': {hint}' for hint in hints)}. See what they have with: hilt "
        f"data inspect {log.path}"
    )


def _chosen(text: str, known: list[int]) -> list[int]:
    """The trajectories that a text names, such as ``3,7-9``; of a range, those that there are."""
    chosen: set[int] = set()
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"trajectories={text}: expected numbers and ranges, such as 3,7-9.")
        first, last = int(match[1]), int(match[2] or match[1])
        inside = [number for number in known if first <= number <= last]
        if not inside:
            raise UnknownNameError("trajectory", part.strip(), map(str, known[-5:]))
        chosen.update(inside)
    return sorted(chosen)


def facts_of_run(path: Path) -> dict[str, object]:
    """What the folder of a run says about the episodes of its log, for logs whose episodes do not have it: the rate of
    its settings, and the instruction of its demonstrations where all have the same."""
    settings, demos = path.parent / "config.yaml", path.parent / "demos"
    if path.name != "log" or not settings.is_file():
        return {}
    out: dict[str, Any] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError, ValueError):
        given = yaml.safe_load(settings.read_text())
        if (hz := float(given.get("control_hz") or (given.get("task_options") or {}).get("control_hz") or 0)) > 0:
            out["fps"] = hz
    with contextlib.suppress(HiltError, OSError), Log.open(demos, "r") as log:
        texts = {str(log.facts.about(number).get(INSTRUCTION, "")) for number in log.trajectories()}
        if len(texts) == 1 and "" not in texts:
            out[INSTRUCTION] = texts.pop()
    return out


class LogDataset(Dataset):
    """The episodes of a log: of a wide trajectory each of its rows, cut where episodes ended."""

    format = "log"

    def __init__(
        self,
        path: Path,
        view: str = "all",
        trajectories: str = "",
        where: str = "",
        rows: Sequence[Row] | None = None,
    ):
        """`rows`: only these, where a filter has chosen them before."""
        super().__init__(path)
        self.log = Log.open(path, "r")
        self._view = view
        self._facts_of_run = facts_of_run(path)
        self.rows = rows if rows is not None else _where(self.log, where, trajectories) if where else None
        """Those that a filter has chosen; None: there is none"""
        self._trajectories = {number for number, _ in self.rows} if self.rows is not None else None
        if trajectories and not where:
            self._trajectories = {*_chosen(trajectories, self.log.trajectories())}

    @cached_property
    def episodes(self) -> list[Array]:
        """The keys of each episode's steps."""
        log, view = self.log, self._view
        chosen = log.all() if view == "all" else log.successes() if view == "successes" else log.by_source(view)
        if self._trajectories is not None:
            chosen = chosen.only(self._trajectories)
        keys = chosen.keys()
        if not len(keys):
            return []
        with log.reading() as steps:
            lanes = (keys & _OFFSET) % steps.widths(keys)
            keys, lanes = self._of_rows(keys, lanes)
            stop, cut = steps.fields(keys, ["terminated", "truncated"])
        if not len(keys):
            return []
        order = np.lexsort((keys, lanes, keys >> OFFSET_BITS))
        keys, lanes, ended = keys[order], lanes[order], (stop | cut)[order].astype(bool)
        new = (np.diff(keys >> OFFSET_BITS) != 0) | (np.diff(lanes) != 0) | ended[:-1]
        return np.split(keys, np.flatnonzero(new) + 1)

    def _of_rows(self, keys: Array, lanes: Array) -> tuple[Array, Array]:
        """The steps, and the number of the row of each, that are of rows that a filter has chosen."""
        if self.rows is None:
            return keys, lanes
        first = np.array([number << OFFSET_BITS | lane for number, lane in self.rows], np.int64)
        inside = np.isin(keys & ~_OFFSET | lanes, first)
        return keys[inside], lanes[inside]

    def __len__(self) -> int:
        return len(self.episodes)

    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        columns = (
            None
            if images
            else [path for path in self.log.schema.columns if path not in self.log.schema.layout.frame_of]
        )
        for keys in self.episodes[first:]:
            yield partial(self._read, keys, columns)

    def _read(self, keys: Array, columns: list[str] | None) -> Episode:
        trajectory = int(keys[0]) >> OFFSET_BITS
        facts = self._facts_of_run | self.log.facts.about(trajectory)
        if (
            "marks" in facts or trajectory in self.log.facts.edits.shown.ranges
        ):  # steps of facts count what was recorded
            with self.log.reading() as steps:
                width = int(steps.widths(keys[:1])[0])
            first, last = ((keys[[0, -1]] & _OFFSET) // width).tolist()
            facts = facts_of_piece(facts, first, last + 1, last=True)
        return Episode(self.log.read(keys, columns), facts)

    def label(self, number: int) -> str:
        return f"trajectory {int(self.episodes[number][0]) >> OFFSET_BITS}"

    def first_step(self, number: int) -> int:
        keys = self.episodes[number][:1]
        with self.log.reading() as steps:
            return int((keys & _OFFSET)[0]) // int(steps.widths(keys)[0])

    def describe(self) -> JsonObject:
        return {
            "view": self._view,
            "trajectories": len(self.log.trajectories()),
            "durability": self.log.durability.words,
        }


def create(path: Path, *, durability: str = "every episode", compression: str = "") -> LogWriter:
    """`compression` is the codec of all images of at least 1,024 bytes: zlib or zstd, or none."""
    if compression:
        check_codec(compression)
    return LogWriter(path, durability, compression)


class LogWriter(Writer):
    """Writes a log whose columns are those of the first episode.

    A step's sequence number is the number of its job, so the log itself determines where to continue.
    """

    def __init__(self, path: Path, durability: str, compression: str):
        super().__init__()
        self._path, self._durability, self._compression = path, durability, compression
        self._log: Log | None = None
        if matches(path):
            self._log = Log.open(path, "a")
            self.next = int(self._log.index.entries["sequence"].max(initial=-1)) + 1

    def add(self, number: int, episode: Episode) -> None:
        columns = map_leaves(lambda column: np.asarray(column)[:, None], episode.columns)
        if self._log is None:
            self._log = self._create(Schema.of(columns, leading=2))
        self._log.add(columns, actor="convert", sequence=number, facts=plain(episode.facts))

    def keep(self) -> None:
        """Every episode is in the log when `add` returns."""

    def finish(self) -> None:
        if self._log is None:
            raise ConfigError(
                "there is not one episode with a transition to write; look at the source with: hilt data inspect"
            )
        if self._compression and not self._log.settings["compression"]:
            self.notes.add(
                f"compression={self._compression} had nothing to do: no column is an image of at "
                f"least {INLINE_BYTES:,} bytes"
            )
        self._log.complete_segments()  # also the last segment, which is not full, is compressed
        self.close()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _create(self, schema: Schema) -> Log:
        images = [frame.name for frame in schema.layout.frames if frame.dtype == np.uint8] if self._compression else []
        return Log.create(
            self._path, schema, durability=self._durability, compression=dict.fromkeys(images, self._compression)
        )
