"""An index of the episodes of several logs and datasets: filtered, sorted and handed out page by page.

    index = EpisodeIndex([Path("runs/pick")])
    page = index.page(EpisodeFilter.parse("success=no source=human"), sort="length", descending=True, first=0, count=50)

Sources are opened by a thread in the background. What the catalog of a log has is known then; the steps are read
afterwards, those of the page that is shown before all others. A source that cannot be opened is listed in `problems`,
and the others go on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hilt.app.episodes.dataset_episodes import DatasetEpisodes
from hilt.app.error_words import PageError
from hilt.core.errors import HiltError, UnknownNameError
from hilt.core.trajectory import VERSIONS_PER_START
from hilt.core.tree import Array
from hilt.formats import detect, located
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.formats.listing.episode_source import EpisodeSource
from hilt.formats.listing.episode_table import ROW, SOURCES, FactColumn, Vocabulary, split_tags
from hilt.formats.listing.log_episodes import LogEpisodes

SORTS = ("number", "task", "length", "return", "success", "human", "version", "date", "tags", "end", "group")
"""The columns by which a list can be sorted."""
REFRESH_S = 1.0
"""Seconds between two looks at a log that may grow."""
QUIET_S = 0.25
"""Seconds after the last picture before the background reads on: a person who looks at pictures has priority."""
KEPT_SELECTIONS = 16
SUCCESS = {-1: None, 0: False, 1: True}
ENDS = ("unfinished", "terminated", "truncated")


@dataclass(frozen=True)
class EpisodePage:
    """A stretch of the episodes that a filter admits."""

    rows: list[dict[str, Any]]
    matched: int
    total: int
    """All episodes; those that were deleted are among them if the filter is about them."""
    unread: int
    """Episodes whose steps are still to be read: filters on what the steps have do not find them yet."""


@dataclass(frozen=True)
class Neighbors:
    """The position of an episode in a filtered and sorted list, and the episodes before and after it."""

    position: int
    """From 0 on; -1 when the filter does not admit it."""
    matched: int
    previous: dict[str, Any] | None
    next: dict[str, Any] | None


def find_sources(path: Path) -> list[tuple[str, Path]]:
    """The logs and datasets of a path, with a name for each: of a run its log, its demonstrations and the rollouts of
    every rank, of a recording its log, and of everything else itself."""
    ranks = sorted((path / "rollouts").glob("rank-*/log.json"), key=lambda file: (len(str(file)), str(file)))
    inside = [(f"rollouts/{file.parent.name}", file.parent) for file in ranks]
    if not (path / "log.json").is_file():
        inside = [(name, path / name) for name in ("log", "demos") if (path / name / "log.json").is_file()] + inside
    return inside or [("", located(path))]


class EpisodeIndex:
    """The episodes below some paths. Several threads may use it at once."""

    def __init__(self, paths: Iterable[Path]):
        """`paths`: the first ones; `add` gives more."""
        self.texts = Vocabulary()
        self.sources: list[EpisodeSource] = []
        self.problems: dict[str, str] = {}
        """What could not be opened, by its path, and why."""
        self._lock = threading.RLock()
        self._merged: tuple[tuple[int, ...], Array] = ((-1,), np.zeros(0, ROW))
        self._selected: OrderedDict[tuple[Any, ...], Array] = OrderedDict()
        self._facts: dict[str, tuple[tuple[int, ...], FactColumn]] = {}
        self._looked = self._shown = 0.0
        self._closed = threading.Event()
        self._opened = threading.Event()
        self._waiting: list[tuple[Path, str]] = []
        self._given: set[Path] = set()
        self._thread = threading.Thread(target=self._read_all, name="episode index", daemon=True)
        self.add({path: path.name for path in paths})
        self._thread.start()

    def add(self, names: Mapping[Path, str]) -> None:
        """Has other paths opened, too, each under a name; those that were given before are passed over."""
        with self._lock:
            new = [(path, name) for path, name in names.items() if path not in self._given]
            self._waiting += new
            self._given.update(path for path, _ in new)
            if new:
                self._opened.clear()

    def page(
        self, chosen: EpisodeFilter, sort: str = "number", descending: bool = False, first: int = 0, count: int = 50
    ) -> EpisodePage:
        """Some episodes that a filter admits, in an order."""
        places = self.select(chosen, sort, descending)
        rows = self._rows()
        shown = places[max(0, first) : max(0, first) + count]
        self._read_now(rows[shown])
        rows = self._rows()
        about_deleted = any(condition.name == "deleted" for condition in chosen.conditions)
        return EpisodePage(
            [self.describe(rows[place]) for place in shown.tolist()],
            len(places),
            len(rows) if about_deleted else int((~rows["deleted"]).sum()),
            int((~rows["read"]).sum()),
        )

    def select(self, chosen: EpisodeFilter, sort: str = "number", descending: bool = False) -> Array:
        """The places of all episodes that a filter admits, in an order."""
        if sort not in SORTS:
            raise UnknownNameError("column to sort by", sort, SORTS)
        rows = self._rows()
        known = (self._merged[0], chosen, sort, descending)
        with self._lock:
            if known in self._selected:
                self._selected.move_to_end(known)
                return self._selected[known]
        groups, per_start = ([getattr(one, name) for one in self.sources] for name in ("name", "versions_per_start"))
        places = np.flatnonzero(chosen.mask(rows, self.texts, groups, self._fact_values, per_start))
        places = places[self._order(rows[places], sort, descending)]
        with self._lock:
            self._selected[known] = places
            while len(self._selected) > KEPT_SELECTIONS:
                self._selected.popitem(last=False)
        return places

    def rows_of(self, places: Array) -> Array:
        """The rows at these places."""
        rows: Array = self._rows()[places]
        return rows

    def neighbors(
        self, key: str, number: int, lane: int, chosen: EpisodeFilter, sort: str = "number", descending: bool = False
    ) -> Neighbors:
        """Returns the position of an episode in a list, and the episodes before and after it."""
        places, rows = self.select(chosen, sort, descending), self._rows()
        group, matched = self.sources.index(self.source(key)), len(places)
        same = rows["group"] == group
        same &= rows["number"] == number
        same &= rows["lane"] == lane
        here = np.flatnonzero(same)
        is_listed = bool(np.isin(here, places).any())
        if not is_listed:  # an edit may have taken it out of the list: others stand beside the place that it had
            places = np.sort(np.concatenate([places, here]))
            places = places[self._order(rows[places], sort, descending)]
        found = np.flatnonzero(np.isin(places, here))
        if not len(found):
            return Neighbors(-1, matched, None, None)
        position = int(found[0])
        beside = [
            self.describe(rows[places[at]]) if 0 <= at < len(places) else None for at in (position - 1, position + 1)
        ]
        return Neighbors(position if is_listed else -1, matched, *beside)

    def following(self, key: str, number: int, lane: int = 0) -> dict[str, Any] | None:
        """The episode that the same sender recorded next, whatever the list shows; None where there is none."""
        source = self.source(key)
        self._rows()
        following = source.following(number)
        return self.row(key, following, lane) if source.place(following, lane) >= 0 else None

    def source(self, key: str) -> EpisodeSource:
        """The source of this key."""
        for source in self.sources:
            if source.key == key:
                return source
        raise PageError("error.no_data")

    def row(self, key: str, number: int, lane: int = 0) -> dict[str, Any]:
        """One episode, described after its steps were read."""
        source = self.source(key)
        place = source.place(number, lane)
        if place < 0:
            raise PageError("error.no_episode", number=number)
        source.read_some([place])
        self._rows()
        return self.describe(source.rows[source.place(number, lane)])

    def describe(self, row: np.void) -> dict[str, Any]:
        """One row as plain values, for a page and for JSON."""
        source = self.sources[row["group"]]
        read = bool(row["read"])
        return {
            "source": source.key,
            "group": source.name,
            "number": int(row["number"]),
            "lane": int(row["lane"]),
            "length": int(row["length"]),
            "return": None if np.isnan(row["return"]) else float(row["return"]),
            "success": SUCCESS[int(row["success"])],
            "sources": {name: int(row[name]) for name in SOURCES if row[name]},
            "version": int(row["version"]) if row["version"] >= 0 else None,
            "first_version": int(row["first_version"]) if row["first_version"] >= 0 else None,
            "versions_per_start": source.versions_per_start if row["version"] >= VERSIONS_PER_START else 0,
            "date": None if np.isnan(row["date"]) else float(row["date"]),
            "end": ENDS[int(row["end"])] if read else None,
            "task": self.texts[int(row["task"])],
            "instruction": self.texts[int(row["instruction"])],
            "tags": split_tags(self.texts[int(row["tags"])]),
            "problem": self.texts[int(row["problem"])],
            "bad": bool(row["bad"]),
            "deleted": bool(row["deleted"]),
            "read": read,
        }

    def values(self, name: str, most: int = 200) -> list[str]:
        """The different texts of a column, for a menu: ``task``, ``tag`` or ``group``; the most frequent first."""
        if name == "group":
            return [source.name for source in self.sources]
        rows = self._rows()
        counts = np.bincount(rows["tags" if name == "tag" else name], minlength=len(self.texts))
        codes = np.argsort(-counts, kind="stable")
        texts = [self.texts[code] for code in codes.tolist() if counts[code] and code]
        if name == "tag":
            texts = list(dict.fromkeys(tag for text in texts for tag in split_tags(text)))
        return texts[:most]

    def looking(self) -> None:
        """Somebody asks for pictures: the background waits a little."""
        self._shown = time.monotonic()

    def wait_until_opened(self, timeout: float) -> bool:
        """Waits until all sources were opened, so that every episode is listed; returns whether they were."""
        return self._opened.wait(timeout)

    def wait_until_read(self, timeout: float) -> bool:
        """Waits until the steps of all episodes were read; returns whether they were."""
        end = time.monotonic() + timeout
        self._opened.wait(timeout)
        while time.monotonic() < end:
            if all(source.rows["read"].all() for source in self.sources):
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        """Ends the thread and releases all files."""
        self._closed.set()
        self._thread.join(10)
        for source in self.sources:
            source.close()

    def __len__(self) -> int:
        return len(self._rows())

    def _open(self, path: Path, name: str) -> None:
        try:
            is_log = detect(path) == "log"
            source = LogEpisodes(path, name, self.texts) if is_log else DatasetEpisodes(path, name, self.texts)
            with self._lock:
                self.sources.append(source)
        except (HiltError, OSError) as error:
            self.problems[str(path)] = str(error)

    def _rows(self) -> Array:
        """All rows, after a look at what was added."""
        with self._lock:
            if time.monotonic() - self._looked > REFRESH_S:
                self._looked = time.monotonic()
                for source in self.sources:
                    self._refresh(source)
            versions = tuple(source.version for source in self.sources)
            if versions != self._merged[0]:
                parts = [source.rows for source in self.sources]
                for group, part in enumerate(parts):
                    part["group"] = group
                self._merged = versions, np.concatenate(parts) if parts else np.zeros(0, ROW)
            return self._merged[1]

    def _refresh(self, source: EpisodeSource) -> None:
        try:
            source.refresh()
            self.problems.pop(str(source.path), None)
        except (HiltError, OSError) as error:
            self.problems[str(source.path)] = str(error)

    def _read_now(self, rows: Array) -> None:
        """Reads the steps of the episodes that a page shows, before all others."""
        unread = rows[~rows["read"]]
        for group in np.unique(unread["group"]).tolist():
            source, belongs = self.sources[group], unread["group"] == group
            mine = unread[belongs]
            places = [source.place(int(row["number"]), int(row["lane"])) for row in mine]
            source.read_some([place for place in places if place >= 0])

    def _open_waiting(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                if not self._waiting:
                    self._opened.set()
                    return
                path, title = self._waiting.pop(0)
            for name, place in find_sources(path):
                self._open(place, f"{title}/{name}" if name else title)

    def _read_all(self) -> None:
        while not self._closed.wait(0.0):
            if not self._opened.is_set():
                self._open_waiting()
            quiet = time.monotonic() - self._shown > QUIET_S
            # every source has its turn
            busy = quiet and any([source.read_some() for source in self.sources])
            if self._closed.wait(0.001 if busy else 0.1):
                return

    def _order(self, rows: Array, sort: str, descending: bool) -> Array:
        """What is unknown comes last either way; equal ones stay in the order of their numbers."""
        values = self.texts.order()[rows[sort]] if sort in ("task", "tags") else rows[sort]
        if sort == "human":
            values = rows["human"] / np.maximum(rows["length"], 1)
        values = values.astype(np.float64)
        unknown = np.isnan(values)
        if sort in ("success", "version"):
            unknown |= rows[sort] < 0
        values = np.where(unknown, np.inf, -values if descending else values)
        return np.argsort(values, kind="stable")

    def _fact_values(self, name: str) -> FactColumn:
        """One fact of every episode."""
        versions, rows = self._merged
        known = self._facts.get(name)
        if known is None or known[0] != versions:

            def facts() -> Iterator[Mapping[str, Any]]:
                numbers = (rows["number"][rows["group"] == group].tolist() for group in range(len(self.sources)))
                asked = zip(self.sources, numbers, strict=True)
                return itertools.chain.from_iterable(source.known_facts(mine) for source, mine in asked)

            known = versions, FactColumn([about.get(name) for about in facts()], lambda: set().union(*facts()))
            self._facts[name] = known
        return known[1]
