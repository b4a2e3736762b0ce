"""Where all formats meet: an episode as columns of transitions, what reads a dataset, and what writes one.

    reader ─► jobs ─► Episode ─► writer

A reader knows nothing of writers. It hands out *jobs* in the order of the dataset: making one is quick, calling it
decodes the episode, and several threads may call several jobs at once.
"""

from __future__ import annotations

import math
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, overload

import numpy as np

from hilt.core.errors import CorruptError, UnknownNameError
from hilt.core.trajectory import INSTRUCTION as INSTRUCTION
from hilt.core.trajectory import text_fact as text_fact
from hilt.core.trajectory import texts_of as texts_of
from hilt.core.tree import Array, ArraySpec, JsonObject, Tree, flatten
from hilt.replay.schema import mate
from hilt.replay.step_encoder import same_rows


@dataclass
class Episode:
    """One episode (or the part of one that a dataset has)."""

    columns: dict[str, Any]
    """Nested ``[T, ...]`` columns under the names of a log: ``observations``, ``actions``, ``rewards``,
    ``next_observations``, ``terminated``, ``truncated``, ``source``, and whatever else the dataset has."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is known of the whole of it, as plain values: ``success``,
    ``language_instruction``, ``episode_metadata``, ..."""
    times: Array | None = None
    """The second at which each step was observed, where a format has these besides its columns."""

    def __len__(self) -> int:
        return len(next(iter(flatten(self.columns).values())))


Job = Callable[[], Episode | None]
"""Decodes one episode; a damaged one raises `CorruptError`, and one without a single transition is None."""


class Notes:
    """What could not be carried over, sentence by sentence, with how often. Several threads may add to it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def add(self, sentence: str, times: int = 1) -> None:
        with self._lock:
            getattr(self._of_thread, "counts", self.counts)[sentence] += times

    def during(self, job: Job) -> tuple[Episode | None, Counter[str]]:
        """Calls a job, and tells apart what it noted."""
        noted: Counter[str] = Counter()
        self._of_thread.counts = noted
        try:
            return job(), noted
        finally:
            del self._of_thread.counts


class Dataset(ABC):
    """A dataset on disk, opened for reading."""

    format: str
    """Its name in `hilt.formats.FORMATS`"""

    def __init__(self, path: Path):
        self.path = path
        self.notes = Notes()

    @abstractmethod
    def __len__(self) -> int:
        """How many jobs there are."""

    @abstractmethod
    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        """One job for each episode, in order, from number `first` on. Without
        `images` they leave those out, and are quick."""

    @abstractmethod
    def describe(self) -> JsonObject:
        """A summary that does not require reading everything: plain values by name."""

    def stated_counts(self) -> dict[str, int]:
        """Returns the numbers of ``episodes`` and ``steps`` that the dataset's own metadata state, if they do."""
        return {}

    def unlisted(self) -> Iterator[str]:
        """Yields a sentence for each file with data that the metadata do not list, and which are not read therefore."""
        yield from ()

    def stored_statistics(self) -> dict[str, dict[str, Array]]:
        """Returns the statistics for normalization that the dataset stores, by column: ``mean``, ``std``, ``min``,
        ``max`` and ``count``, as far as it has them."""
        return {}

    def label(self, number: int) -> str:
        """Returns the name of an episode in the terms of its format."""
        return f"episode {number}"

    def first_step(self, number: int) -> int:
        """Returns the recorded number of an episode's first step: not 0 where steps before it are left out."""
        return 0

    def listed(self) -> dict[str, Sequence[Any]]:
        """What is known of every episode without reading one, by name: ``length`` in steps, and the facts that the
        dataset lists."""
        return {}

    def cameras(self) -> dict[str, ArraySpec]:
        """The columns of images of which `frame` reads a single one, without decoding the whole episode."""
        return {}

    def frame(self, number: int, step: int, column: str) -> Array:
        """One image of an episode, of a column that `cameras` has. The step after the last one is what was seen at the
        end."""
        raise UnknownNameError("camera", column, self.cameras())

    def close(self) -> None:  # noqa: B027  # most datasets keep no file open
        """Releases files that `frame` keeps open."""

    def component_names(self, column: str) -> Sequence[str]:
        """The names of the numbers in a column, where the dataset has them."""
        return ()

    def __iter__(self) -> Iterator[Episode]:
        for job in self.jobs():
            if (episode := job()) is not None:
                yield episode


class ListedDataset(Dataset):
    """One that lists its episodes before it reads any."""

    @property
    @abstractmethod
    def _episodes(self) -> Sequence[Any]:
        """What `_read` needs to find each; or the error that its job raises."""

    @abstractmethod
    def _read(self, found: Any, images: bool) -> Episode | None:
        """Does the work of a job."""

    def __len__(self) -> int:
        return len(self._episodes)

    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        for found in self._episodes[first:]:
            yield partial(self._read_or_raise, found, images)

    def _read_or_raise(self, found: Any, images: bool) -> Episode | None:
        if isinstance(found, CorruptError):
            raise found
        return self._read(found, images)


class Writer(ABC):
    """A dataset that is being written. It goes on by itself in a folder where an earlier one was stopped."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.next = 0
        """The number of the job from which to go on: everything before it is there."""

    @abstractmethod
    def add(self, number: int, episode: Episode) -> None:
        """Writes the episode of this job. Numbers rise; those of damaged episodes are left out."""

    @abstractmethod
    def keep(self) -> None:
        """Between two episodes, before writing is stopped: everything that was
        added is there for a writer that goes on."""

    @abstractmethod
    def finish(self) -> None:
        """Completes the dataset. Until then nothing else can read it."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of all files, finished or not."""


class StoredSteps(Sequence[dict[str, Any]]):
    """The steps of an episode as a format stores them: columns ``[N, ...]``, and each step as a nested dictionary.

    A column whose steps do not have one shape (text, images of any size, ragged sequences) is an array of objects.
    """

    def __init__(self, columns: dict[str, Any]):
        self.columns = columns
        self._length = len(next(iter(flatten(columns).values()), ()))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> StoredSteps: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return StoredSteps(map_leaves(lambda column: column[index], self.columns))
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return map_leaves(lambda column: column[index], self.columns)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nested dictionary (or the same leaf) with ``function(leaf)`` for each leaf."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, inner) for key, inner in tree.items()}
    return function(tree)


def transitions(observations: Tree) -> dict[str, object]:
    """``observations`` and ``next_observations`` from ``[T + 1, ...]`` columns, without copying them."""
    return {
        "observations": map_leaves(lambda column: column[:-1], observations),
        "next_observations": map_leaves(lambda column: column[1:], observations),
    }


def plain(value: object) -> Any:
    """A value as JSON can hold it: arrays are lists, bytes are text, and what is not a number is None."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def gaps(episode: Episode) -> Array:
    """Where the next observation of a step is not what the step after it saw: the numbers of those later steps.

    Formats that store each observation once cannot represent this; an episode is split there.
    """
    broken = np.zeros(max(0, len(episode) - 1), bool)
    leaves = flatten(episode.columns)
    for path, now in leaves.items():
        if mate(path) in leaves and now[1:].size:
            broken |= ~same_rows(now[1:], leaves[mate(path)][:-1])
    return np.flatnonzero(broken) + 1


def cut(episode: Episode, places: Sequence[int]) -> list[Episode]:
    """The parts of an episode, which begin at its first step and at these. Its outcome is
    that of the last; texts go with their steps."""
    if not places:
        return [episode]
    parts, length = [], len(episode)
    texts = texts_of(episode.facts.get(INSTRUCTION, ""), length)
    for begin, end in pairwise([0, *places, length]):
        facts = {name: fact for name, fact in episode.facts.items() if name != "success" or end == length}
        if INSTRUCTION in facts:
            facts[INSTRUCTION] = text_fact(texts[begin:end])
        times = None if episode.times is None else episode.times[begin:end]
        parts.append(Episode(map_leaves(itemgetter(slice(begin, end)), episode.columns), facts, times))
    return parts


def natural(name: str | Path) -> list[tuple[int, str]]:
    """A key that sorts names, or files by their names, by the numbers in them: ``demo_2`` before ``demo_10``."""
    parts = re.split(r"(\d+)", name.name if isinstance(name, Path) else name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
