"""The runs, logs and datasets below some folders whose episodes can be shown; each is opened when it is looked at."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hilt.app.episodes.byte_cache import ByteCache
from hilt.app.episodes.episode_index import EpisodeIndex, find_sources
from hilt.app.episodes.jpeg_frames import CACHE_BYTES, JpegFrames
from hilt.app.error_words import PageError
from hilt.app.run_library import MAX_DEPTH, SKIPPED
from hilt.core.errors import FormatError, HiltError
from hilt.formats import detect

MAX_OPEN = 4
"""Indices that stay open; the one that was used least recently is closed."""
TOGETHER = "all"
"""In an address, in place of a key: all runs and logs in one list"""
LOOK_S = 5.0
"""Seconds between two looks at the folders."""
HIDDEN = (".", "_")
OF_RUN = {"log", "demos", "rollouts", "actors", "demonstrations", "evaluations", *SKIPPED}
"""Folders of a run that are its own parts; other folders in it, such as exports, are listed by themselves."""


@dataclass(frozen=True)
class EpisodeData:
    """One run, log or dataset."""

    key: str
    """Names it in addresses: no path of the disk is taken from an address"""
    name: str
    path: Path
    format: str


@dataclass(frozen=True)
class OpenedData:
    """The same, opened."""

    data: EpisodeData
    index: EpisodeIndex
    frames: JpegFrames

    def close(self) -> None:
        self.frames.close()
        self.index.close()


class EpisodeShelf:
    """What there is below some paths. Several threads may use it at once."""

    def __init__(self, paths: Sequence[Path]):
        self._paths, self._lock = list(paths), threading.RLock()
        self._found: dict[str, EpisodeData] = {}
        self._looked = -LOOK_S
        self._opened: OrderedDict[str, OpenedData] = OrderedDict()
        self._frames: ByteCache[bytes] = ByteCache(CACHE_BYTES)

    def listed(self) -> list[EpisodeData]:
        """All of them, by name."""
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_S:
                found = [data for path in self._paths for data in _find(path, path, 0)]
                self._found = {data.key: data for data in found}
                self._looked = time.monotonic()
            return sorted(self._found.values(), key=lambda data: data.name)

    def opened(self, key: str) -> OpenedData:
        """The index of the data of this key, which is opened if it is not open."""
        with self._lock:
            if key not in self._opened:
                known = {data.key: data for data in self.listed()}
                if key not in known:
                    raise PageError("error.no_data")
                index = EpisodeIndex([known[key].path])
                self._opened[key] = OpenedData(known[key], index, JpegFrames(index, self._frames))
            return self._kept(key)

    def _kept(self, key: str) -> OpenedData:
        """The data of this key, which was used last; others are closed."""
        self._opened.move_to_end(key)
        while len(self._opened) > MAX_OPEN:
            self._opened.popitem(last=False)[1].close()
        return self._opened[key]

    def opened_together(self) -> OpenedData:
        """One index of all runs and logs, which takes in those that come later. Datasets of other systems, most of them
        exports of these, have lists of their own."""
        with self._lock:
            names = {data.path: data.name for data in self.listed() if data.format == "log"}
            if TOGETHER not in self._opened:
                index = EpisodeIndex(())
                data = EpisodeData(TOGETHER, "", Path(), "log")
                self._opened[TOGETHER] = OpenedData(data, index, JpegFrames(index, self._frames))
            self._opened[TOGETHER].index.add(names)
            return self._kept(TOGETHER)

    def open_only_one(self) -> None:
        """Opens the data if there is one only: its list is then there sooner when somebody asks for it."""
        listed = self.listed()
        if len(listed) == 1:
            with contextlib.suppress(HiltError, OSError):  # the page shows the error
                self.opened(listed[0].key)

    def close(self) -> None:
        """Closes whatever is open."""
        with self._lock:
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()


def data_key(path: Path) -> str:
    """The name of a path in addresses."""
    return hashlib.blake2s(str(path.absolute()).encode(), digest_size=6).hexdigest()


def _find(path: Path, top: Path, depth: int) -> Iterator[EpisodeData]:
    """What a path is, and what lies below it; below a log or dataset nothing is looked for."""
    format, skipped = _format(path), SKIPPED
    if format:
        name = path.absolute().name if path == top else str(path.relative_to(top))
        yield EpisodeData(data_key(path), name, path, format)
        if find_sources(path)[0][1] == path:
            return
        skipped = OF_RUN
        if path == top:  # what lies in a run that was given is named with it
            top = path.parent
    if not path.is_dir() or depth >= MAX_DEPTH:
        return
    try:
        below = sorted(inner for inner in path.iterdir() if inner.is_dir())
    except OSError:
        return
    for inner in below:
        if inner.name not in skipped and not inner.name.startswith(HIDDEN):
            yield from _find(inner, top, depth + 1)


def _format(path: Path) -> str:
    """The format of what lies in a path; empty where it is not known."""
    try:
        sources = find_sources(path)
        return detect(sources[0][1])
    except FormatError:
        return ""
    except (HiltError, OSError):
        return ""
