"""The episodes of a dataset of another system, of any format that `hilt data` reads; they cannot be edited there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.app.episodes.byte_cache import ByteCache
from hilt.core.errors import CorruptError, HiltError, UnknownNameError
from hilt.core.tree import Array, ArraySpec, flatten
from hilt.formats import open_dataset
from hilt.formats.episodes import INSTRUCTION, Episode
from hilt.formats.images import is_image
from hilt.formats.listing.episode_source import EpisodeSource
from hilt.formats.listing.episode_table import (
    SOURCES,
    TERMINATED,
    TRUNCATED,
    Vocabulary,
    blank_rows,
    fill_facts,
    shown_facts,
)
from hilt.replay.schema import mate

SECONDS_AT_ONCE = 0.05
"""For this long episodes are read before others may have their turn."""
DECODED: ByteCache[Episode] = ByteCache(128 << 20)
"""Decoded episodes of all datasets that are open, where a dataset cannot read a single image."""


class DatasetEpisodes(EpisodeSource):
    """Episodes are numbered as `hilt data convert` numbers them: in the order of the dataset, from 0 on."""

    def __init__(self, path: Path, name: str, texts: Vocabulary, format: str = "auto"):
        super().__init__(path, name, texts)
        self.dataset = open_dataset(path, format)
        self._facts: dict[int, dict[str, Any]] = {}
        self.rows = blank_rows(len(self.dataset))
        self.rows["number"] = np.arange(len(self.rows))
        self._unread = 0
        listed = self.dataset.listed()
        if "length" in listed:
            self.rows["length"] = listed["length"]
        for row, text in zip(self.rows, listed.get(INSTRUCTION, ()), strict=False):
            row["task"] = row["instruction"] = texts.code(text)

    @property
    def format(self) -> str:
        return self.dataset.format

    def refresh(self) -> None:
        """A dataset does not grow."""

    def read_some(self, places: Sequence[int] | None = None) -> bool:
        end, rows = time.monotonic() + SECONDS_AT_ONCE, self.rows
        if places is None:
            fresh = np.flatnonzero(~rows["read"][self._unread :]) + self._unread
            self._unread = int(fresh[0]) if len(fresh) else len(rows)
        else:
            fresh = np.array([place for place in places if not rows["read"][place]], np.int64)
        for place in fresh.tolist():
            self._read(place)
            if places is None and time.monotonic() > end:
                break
        if len(fresh):
            self.version += 1
        return len(fresh) > 0

    def facts(self, number: int) -> dict[str, Any]:
        if number not in self._facts:
            self._read(number)
        return self._facts.get(number, {})

    def known_facts(self, numbers: Iterable[int]) -> Sequence[Mapping[str, Any]]:
        return [self._facts.get(number, {}) for number in numbers]

    def cameras(self, number: int) -> dict[str, ArraySpec]:
        if known := self.dataset.cameras():
            return known
        columns = flatten(self._episode(number, images=True).columns)
        specs = {path: ArraySpec(column.dtype, column.shape[1:]) for path, column in columns.items()}
        return {path: spec for path, spec in specs.items() if not path.startswith("next_") and is_image(spec)}

    def columns(self, number: int, lane: int = 0) -> dict[str, Array]:
        found = flatten(self._episode(number, images=False).columns)
        return {
            path: column for path, column in found.items() if not is_image(ArraySpec(column.dtype, column.shape[1:]))
        }

    def frame(self, number: int, lane: int, step: int, camera: str) -> Array:
        if camera in self.dataset.cameras():
            return self.dataset.frame(number, step, camera)
        columns = flatten(self._episode(number, images=True).columns)
        if camera not in columns:
            raise UnknownNameError("camera", camera, self.cameras(number))
        length = len(columns[camera])
        if step >= length and mate(camera) in columns:
            return columns[mate(camera)][-1]  # type: ignore[no-any-return]
        return columns[camera][min(step, length - 1)]  # type: ignore[no-any-return]

    def hz(self, number: int) -> float:
        listed = self.dataset.describe().get("fps")
        return super().hz(number) or (float(listed) if isinstance(listed, (int, float)) else 0.0)

    def names(self, column: str) -> Sequence[str]:
        return self.dataset.component_names(column)

    def close(self) -> None:
        with self.lock:
            DECODED.drop(self.key)
            self.dataset.close()

    def _episode(self, number: int, images: bool) -> Episode:
        """An episode as it is decoded; the last ones are kept."""
        with self.lock:
            if (kept := DECODED.get((self.key, number, images))) is not None:
                return kept
            episode = next(iter(self.dataset.jobs(number, images)))()
            if episode is None:
                raise CorruptError(f"{self.path}: episode {number} has no transition. There is nothing to show.")
            DECODED.put((self.key, number, images), episode, _nbytes(episode))
            return episode

    def _read(self, place: int) -> None:
        row = self.rows[place : place + 1]
        try:
            episode = next(iter(self.dataset.jobs(place, images=False)))()
        except (HiltError, OSError) as error:
            row["problem"], row["read"] = self.texts.code(str(error)), True
            return
        if episode is None:
            row["read"] = True
            return
        self._facts[place] = shown_facts(episode.facts)
        columns = episode.columns
        fill_facts(row, [episode.facts], self.texts)
        row["length"] = len(episode)
        if "rewards" in columns:
            row["return"] = float(np.asarray(columns["rewards"], np.float64).sum())
        counts = np.bincount(np.asarray(columns.get("source", ()), np.int64).reshape(-1), minlength=len(SOURCES))
        for value, name in enumerate(SOURCES):
            row[name] = counts[value]
        if "policy_version" in columns:
            versions = np.asarray(columns["policy_version"], np.int64)
            acted = versions[versions >= 0]
            row["version"], row["first_version"] = (int(acted.max()), int(acted.min())) if len(acted) else (-1, -1)
        ended = {name: bool(np.any(columns.get(name, False))) for name in ("terminated", "truncated")}
        row["end"] = TERMINATED if ended["terminated"] else TRUNCATED if ended["truncated"] else 0
        row["read"] = True


def _nbytes(episode: Episode) -> int:
    return sum(column.nbytes for column in flatten(episode.columns).values())
