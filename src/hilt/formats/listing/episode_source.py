"""Where episodes come from: a log, or a dataset of any format that `hilt data` reads."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.trajectory import STARTS, VERSIONS_PER_START
from hilt.core.tree import Array, ArraySpec
from hilt.formats.listing.episode_table import Vocabulary


class EpisodeSource(ABC):
    """The episodes of one log or dataset. Several threads may use it at once."""

    editable = False
    """Whether labels can be written: to a log, and to nothing else."""

    def __init__(self, path: Path, name: str, texts: Vocabulary):
        self.path, self.name, self.texts = path, name, texts
        self.key = source_key(path)
        """Names this source in addresses."""
        self.lock = threading.RLock()
        self.rows: Array = np.zeros(0)
        """What is known of each episode, as `hilt.formats.listing.episode_table.ROW`, in the order of their numbers. It
        is replaced, and never resized, when episodes come or go."""
        self.version = 0
        """Changes with the rows."""

    @property
    def versions_per_start(self) -> int:
        """The difference between the numbers of weights of two starts of the run that a log belongs to; 0 where they go
        on."""
        return VERSIONS_PER_START if (self.path.parent / STARTS).is_file() else 0

    @property
    @abstractmethod
    def format(self) -> str:
        """The name of the format in `hilt.formats.FORMATS`."""

    @abstractmethod
    def refresh(self) -> None:
        """Takes in what was added since the last look. Quick; the steps of new episodes are not read."""

    @abstractmethod
    def read_some(self, places: Sequence[int] | None = None) -> bool:
        """Reads the steps of some episodes that were not read yet, of these places or of the next ones; returns whether
        there was anything to read. A damaged episode gets a text in its column ``problem``."""

    @abstractmethod
    def facts(self, number: int) -> dict[str, Any]:
        """What is known of the whole episode."""

    @abstractmethod
    def known_facts(self, numbers: Iterable[int]) -> Sequence[Mapping[str, Any]]:
        """The same of many episodes, as far as it is known without reading them now."""

    @abstractmethod
    def cameras(self, number: int) -> dict[str, ArraySpec]:
        """The names of the images that can be shown of an episode, and how they are stored."""

    @abstractmethod
    def columns(self, number: int, lane: int = 0) -> dict[str, Array]:
        """Every column of numbers of an episode, ``[T, ...]`` by name, without images."""

    @abstractmethod
    def frame(self, number: int, lane: int, step: int, camera: str) -> Array:
        """One image of a camera as it is stored. The step after the last one is what was seen at the end; where the
        data do not have it, the last image stands for it."""

    def names(self, column: str) -> Sequence[str]:
        """The names of the numbers in a column, where the data have them."""
        return ()

    def hz(self, number: int) -> float:
        """Steps in a second, 0 where that is unknown."""
        value = self.facts(number).get("fps")
        return float(value) if isinstance(value, (int, float)) and 0 < value < 1e6 else 0.0

    def first_step(self, number: int) -> int:
        """The recorded number of the first step that is shown: not 0 where the beginning was trimmed."""
        return 0

    def following(self, number: int) -> int:
        """The episode that the same sender recorded next, of those that are shown; -1 where that is unknown."""
        return -1

    def place(self, number: int, lane: int = 0) -> int:
        """The place of an episode among the rows, -1 where there is none."""
        rows = self.rows
        first = int(np.searchsorted(rows["number"], number))
        at = first + lane
        return at if at < len(rows) and rows["number"][at] == number and rows["lane"][at] == lane else -1

    def shown_of(self, numbers: Iterable[int]) -> list[int]:
        """Those of these episodes that are there and not deleted."""
        places = {number: self.place(number) for number in numbers}
        return [number for number, at in places.items() if at >= 0 and not self.rows["deleted"][at]]

    @abstractmethod
    def close(self) -> None:
        """Releases all files."""


def source_key(path: Path) -> str:
    """The name of a log or dataset in addresses."""
    return hashlib.blake2s(str(path.absolute()).encode(), digest_size=5).hexdigest()
