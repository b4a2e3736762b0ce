"""Our own log, as one of the formats: every conversion into it or out of it goes the same way as all others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.tree import Array
from hilt.formats.episodes import Dataset, Episode, Job, Writer, map_leaves, plain
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.schema import INLINE_BYTES, Schema
from hilt.replay.storage.segment import check_codec

VIEWS = ("all", "demo", "human", "policy", "random", "successes")


def matches(path: Path) -> bool:
    return (path / "log.json").is_file()


def open_dataset(path: Path, *, view: str = "all") -> LogDataset:
    """`view` chooses steps: all, those of one source (demo, human, policy, random), or those of trajectories that succeeded."""
    if view not in VIEWS:
        raise UnknownNameError("view", view, VIEWS)
    return LogDataset(path, view)


class LogDataset(Dataset):
    """The episodes of a log: of a wide trajectory each of its rows, cut where episodes ended."""

    format = "log"

    def __init__(self, path: Path, view: str = "all"):
        super().__init__(path)
        self.log = Log.open(path, "r")
        self._view = view

    @cached_property
    def episodes(self) -> list[Array]:
        """The keys of each episode's steps."""
        log, view = self.log, self._view
        chosen = log.all() if view == "all" else log.successes() if view == "successes" else log.by_source(view)
        keys = chosen.keys()
        if not len(keys):
            return []
        with log.reading() as steps:
            stop, cut = steps.fields(keys, ["terminated", "truncated"])
            widths = steps.widths(keys)
        lanes = (keys & ((1 << OFFSET_BITS) - 1)) % widths
        order = np.lexsort((keys, lanes, keys >> OFFSET_BITS))
        keys, lanes, ended = keys[order], lanes[order], (stop | cut)[order].astype(bool)
        new = (np.diff(keys >> OFFSET_BITS) != 0) | (np.diff(lanes) != 0) | ended[:-1]
        return np.split(keys, np.flatnonzero(new) + 1)

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
        return Episode(self.log.read(keys, columns), self.log.facts.about(int(keys[0]) >> OFFSET_BITS))

    def describe(self) -> dict[str, Any]:
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
                f"compression={self._compression} had nothing to do: no column is an image of at least {INLINE_BYTES:,} bytes"
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
