"""The episodes of a log: its trajectories, and of a wide trajectory each of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, HiltError, UnknownNameError
from hilt.core.tree import Array, ArraySpec
from hilt.formats.images import is_image
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.formats.listing.episode_source import EpisodeSource
from hilt.formats.listing.episode_table import (
    ROW,
    SOURCES,
    TERMINATED,
    TRUNCATED,
    UNKNOWN,
    FactColumn,
    Vocabulary,
    blank_rows,
    fill_facts,
)
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.log import Log
from hilt.replay.recut import ACTOR as COPIES
from hilt.replay.schema import mate
from hilt.replay.snapshot import Snapshot

STEPS_AT_ONCE = 1 << 16
"""Steps whose rows are read at once, while others wait."""
TIME = "times/observed"
NO_VERSION = np.iinfo(np.int64).max


class Changes:
    """The trajectories of a log that have changed since the last look: a watcher of its catalog."""

    is_all = True

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def added(self, key: int, steps: int, rows: Array | None, extends: bool = False) -> None:
        self.numbers.add(key >> OFFSET_BITS)

    def removed(self, key: int, steps: int) -> None:
        self.numbers.add(key >> OFFSET_BITS)

    def taken_back(self, key: int, steps: int) -> None:
        self.numbers.add(key >> OFFSET_BITS)

    def refresh(self, trajectories: set[int], moved: Set[int] = frozenset()) -> None:
        self.numbers |= trajectories | moved


class LogEpisodes(EpisodeSource):
    """Reads a log that another process may be writing."""

    editable = True
    format = "log"

    def __init__(self, path: Path, name: str, texts: Vocabulary, log: Log | None = None):
        super().__init__(path, name, texts)
        self.log = Log.open(path, "r") if log is None else log
        self._changes = Changes()
        self.log.watch(self._changes)
        self.rows = self._rows_of(None)
        self._unread = 0  # rows before this place were read

    def refresh(self) -> None:
        with self.lock:
            self.log.refresh()
            changed, self._changes.numbers = self._changes.numbers - {-1}, set()
            if not changed:
                return
            numbers = np.array(sorted(changed), np.int64)
            kept = self.rows[~np.isin(self.rows["number"], numbers)]
            rows = np.concatenate([kept, self._rows_of(numbers)])
            self.rows = rows[np.lexsort((rows["lane"], rows["number"]))]
            self._unread = 0
            self.version += 1

    def read_some(self, places: Sequence[int] | None = None) -> bool:
        with self.lock:
            rows = self.rows
            if places is None:
                is_read = rows["read"][self._unread :]
                fresh = np.flatnonzero(~is_read) + self._unread
                self._unread = int(fresh[0]) if len(fresh) else len(rows)
            else:
                fresh = np.array([place for place in places if not rows["read"][place]], np.int64)
            if not len(fresh):
                return False
            inside = np.cumsum(rows["length"][fresh]) <= STEPS_AT_ONCE
            inside[0] = True
            chosen = fresh[inside] if places is None else fresh
            numbers = np.unique(rows["number"][chosen])
            try:
                self._read(numbers)
            except (HiltError, OSError):
                for number in numbers:
                    try:
                        self._read(np.array([number]))
                    except (HiltError, OSError) as error:
                        damaged = rows["number"] == number
                        rows["problem"][damaged], rows["read"][damaged] = self.texts.code(str(error)), True
            self.version += 1
            return True

    def facts(self, number: int) -> dict[str, Any]:
        return self.log.facts.about(number)

    def known_facts(self, numbers: Iterable[int]) -> Sequence[Mapping[str, Any]]:
        return self.log.facts.about_each(numbers)

    def cameras(self, number: int) -> dict[str, ArraySpec]:
        columns = self.log.schema.columns
        found = {path: spec for path, spec in columns.items() if is_image(spec)}
        # what was seen after a step is the next step's picture
        shown = {path: spec for path, spec in found.items() if mate(path) in columns or not path.startswith("next_")}
        out: dict[str, ArraySpec] = {}
        for path, spec in shown.items():
            if path.startswith("record/") and len(spec.shape) == 4:  # what a policy saw: all cameras in one column
                out |= {f"{path}/{camera}": ArraySpec(spec.dtype, spec.shape[1:]) for camera in range(spec.shape[0])}
            else:
                out[path] = spec
        return out

    def columns(self, number: int, lane: int = 0) -> dict[str, Array]:
        inline = [path for path in self.log.schema.columns if path in self.log.schema.layout.inline]
        with self.log.reading() as steps:
            keys = self._keys(steps, number, lane)
            return steps.gather(keys, inline)

    def frame(self, number: int, lane: int, step: int, camera: str) -> Array:
        columns, path, part = self.log.schema.columns, camera, -1
        if path not in columns:
            path, _, text = camera.rpartition("/")
            if path not in columns or not text.isdecimal() or int(text) >= columns[path].shape[0]:
                raise UnknownNameError("camera", camera, self.cameras(number))
            part = int(text)
        with self.log.reading() as steps:
            keys = self._keys(steps, number, lane)
            if step >= len(keys) and mate(path) in columns:
                path = mate(path)
            image: Array = steps.gather(keys[min(step, len(keys) - 1) :][:1], [path])[path][0]
        return image[part] if image.ndim == 4 else image

    def close(self) -> None:
        self.log.close()

    def first_step(self, number: int) -> int:
        first, stop = self.log.facts.edits.shown.ranges.get(number, (0, 1))
        return first // self._width(number) if first < stop else 0

    def following(self, number: int) -> int:
        with self.log.lock:
            entries, names = self.log.index.entries, self.log.facts.origins()
            numbers, first = np.unique(entries["key"] >> OFFSET_BITS, return_index=True)
            actors = np.array([names.get(origin, ("",))[0] for origin in entries["origin"][first].tolist()], object)
        with self.lock:
            rows = self.rows[(self.rows["lane"] == 0) & ~self.rows["deleted"] & ~self.rows["bad"]]
        sent = actors[np.searchsorted(numbers, rows["number"])]
        own = actors[np.searchsorted(numbers, number)]
        if len({*sent.tolist()} - {COPIES}) > 1:  # of one sender, copies are too
            rows = rows[sent == own]
        mine = np.flatnonzero(rows["number"] == number)
        if not len(mine):
            return -1
        times = rows["number"] if np.isnan(rows["date"]).any() else rows["date"]
        order = np.lexsort((rows["number"], times))
        later = int(np.flatnonzero(order == mine[0])[0]) + 1
        return int(rows["number"][order[later]]) if later < len(rows) else -1

    def _width(self, number: int) -> int:
        places = self.log.index.places_of(number)
        if not len(places):
            raise UnknownNameError("trajectory", str(number), [])
        return int(self.log.index.entries["width"][places[0]])

    def _keys(self, steps: Snapshot, number: int, lane: int) -> Array:
        """The keys of the steps that are shown; of an episode that edits hide as a whole, of all."""
        keys, width = steps.trajectory(number, self.log.facts.edits.shown.hides(number)), self._width(number)
        return keys if width == 1 else keys[(keys & ((1 << OFFSET_BITS) - 1)) % width == lane]

    def _rows_of(self, numbers: Array | None) -> Array:
        """Rows of all trajectories, or of these: from the index of the log and its facts, without reading any step."""
        keys, counts, widths = self._stretches(numbers)
        if not len(keys):
            return np.zeros(0, ROW)
        found, first = np.unique(keys >> OFFSET_BITS, return_index=True)
        steps, width = np.add.reduceat(counts, first), widths[first]
        there = ~np.isin(found, list(self.log.facts.edits.withdrawn()))
        found, steps, width = found[there], steps[there], width[there]
        rows = blank_rows(len(found))
        rows["number"], rows["length"] = found, steps // np.maximum(width, 1)
        fill_facts(rows, self.known_facts(found.tolist()), self.texts)
        if (width > 1).any():
            rows = np.repeat(rows, width)
            begins = np.repeat(np.cumsum(width) - width, width)
            rows["lane"] = np.arange(len(rows)) - begins
        return rows

    def _stretches(self, numbers: Array | None) -> tuple[Array, Array, Array]:
        """The steps of all trajectories, or of these, as their edits show them: first keys, counts, and widths."""
        with self.log.lock:
            entries, shown = self.log.index.entries, self.log.facts.edits.shown
            if numbers is not None:
                entries = entries[np.isin(entries["key"] >> OFFSET_BITS, numbers)]
            keys, counts, widths = (entries[name].astype(np.int64) for name in ("key", "steps", "width"))
        if not shown or not len(keys):
            return keys, counts, widths
        found, first = np.unique(keys >> OFFSET_BITS, return_index=True)
        width_of = widths[first]
        hidden = np.isin(keys >> OFFSET_BITS, [number for number in shown.ranges if shown.hides(number)])
        some, lengths = shown.clip(keys[~hidden], counts[~hidden])
        keys, counts = np.concatenate([some, keys[hidden]]), np.concatenate([lengths, counts[hidden]])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        return keys, counts[order], width_of[np.searchsorted(found, keys >> OFFSET_BITS)]

    def _read(self, numbers: Array) -> None:
        """Fills in what only the steps have: the return, who acted, versions, dates and ends."""
        log, rows = self.log, self.rows
        inline = log.schema.layout.inline
        optional = [name for name in ("rewards", "success", TIME) if name in inline]
        names = ["source", "policy_version", "terminated", "truncated", *optional]
        with log.reading() as steps:
            firsts, counts, widths = self._stretches(numbers)
            begins = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
            keys = begins + np.arange(len(begins))
            read = dict(zip(names, steps.fields(keys, names), strict=True))
        width = np.repeat(widths, counts)
        lane = (keys & ((1 << OFFSET_BITS) - 1)) % width
        place = np.searchsorted(rows["number"], keys >> OFFSET_BITS) + lane
        count, low = int(place.max()) + 1 if len(place) else 0, int(place.min()) if len(place) else 0
        at, size = place - low, count - low
        touched = np.bincount(at, minlength=size) > 0
        part = rows[low:count]
        for value, name in enumerate(SOURCES):
            counts = np.bincount(at, read["source"] == value, size)
            part[name][touched] = counts[touched]
        if "rewards" in read:
            rewards = read["rewards"].reshape(len(keys), -1).sum(1, dtype=np.float64)
            returns = np.bincount(at, rewards, size)
            part["return"][touched] = returns[touched]
        by_policy, versions = read["policy_version"] >= 0, read["policy_version"].astype(np.int64)
        for name, pick, unknown in (("version", np.maximum, -1), ("first_version", np.minimum, NO_VERSION)):
            version = np.full(size, unknown, np.int64)
            pick.at(version, at[by_policy], versions[by_policy])
            part[name][touched] = np.where(version == NO_VERSION, -1, version)[touched]
        stop, cut = (np.bincount(at, read[name] != 0, size) > 0 for name in ("terminated", "truncated"))
        part["end"][touched] = np.where(stop, TERMINATED, np.where(cut, TRUNCATED, 0))[touched]
        if "success" in read:
            marked = np.bincount(at, read["success"].reshape(len(keys), -1).any(1), size) > 0
            unknown = touched & (part["success"] == UNKNOWN)
            part["success"][unknown] = marked[unknown]
        if TIME in read:
            times = np.where(read[TIME] > 0, read[TIME], np.inf)
            began = np.full(size, np.inf)
            np.minimum.at(began, at, times)
            part["date"][touched] = np.where(np.isfinite(began), began, np.nan)[touched]
        part["read"][touched] = True


def episodes_where(log: Log, conditions: Sequence[str]) -> list[int]:
    """The trajectories of a log for which all conditions hold; of a wide one, for one of its rows at least."""
    return sorted({number for number, _ in rows_where(log, conditions)})


def rows_where(log: Log, conditions: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the rows of trajectories for which all conditions hold: each is a trajectory and the number of a row."""
    chosen = EpisodeFilter.parse(" ".join(conditions))
    for condition in chosen.conditions:
        if condition.name == "group":
            raise ConfigError(f"filter {condition}: this is one log, which has no groups as a run has. Leave it out.")
    listed = LogEpisodes(log.path, "", Vocabulary(), log)
    while listed.read_some():
        pass
    rows = listed.rows
    numbers = rows["number"].tolist()

    def fact(name: str) -> FactColumn:
        about = log.facts.about
        return FactColumn(
            (about(number).get(name) for number in numbers), lambda: {name for n in numbers for name in about(n)}
        )

    found = rows[chosen.mask(rows, listed.texts, [""], fact, [listed.versions_per_start])]
    return sorted(zip(found["number"].tolist(), found["lane"].tolist(), strict=True))
