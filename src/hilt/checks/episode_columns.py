"""What the checks look at in an episode: its cameras, states, actions and times; and what a check is."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from hilt.checks.dataset_findings import DatasetFinding, Severity
from hilt.core.tree import Array, flatten
from hilt.formats.convert import is_image
from hilt.formats.episodes import Dataset, Episode, plain

MAX_WIDTH = 64
"""Numbers of one step that the checks look at; wider columns are embeddings or point clouds."""
CLOCKS = ("timestamp", "timestamps", "times/observed", "time")


@dataclass
class EpisodeColumns:
    """One episode, with its columns sorted by what they are."""

    number: int
    label: str
    episode: Episode
    first_step: int = 0
    """The number of its first step as it was recorded, from which the steps of findings are counted."""

    def __len__(self) -> int:
        return len(self.episode)

    @cached_property
    def leaves(self) -> dict[str, Array]:
        return flatten(self.episode.columns)

    @cached_property
    def cameras(self) -> dict[str, Array]:
        """Images ``[T, height, width, channels]`` of each camera; of a stack of images, the newest."""
        seen = {path: column for path, column in self.leaves.items() if _is_within(path, "observations")}
        return {
            path: column[:, -1] if column.ndim > 4 else column
            for path, column in seen.items()
            if is_image(column) and column.size
        }

    @cached_property
    def states(self) -> dict[str, Array]:
        """Observations that are numbers, ``[T, D]``; those with values that are not finite are left out."""
        return self._numbers("observations")

    @cached_property
    def actions(self) -> dict[str, Array]:
        """Actions that are real numbers, ``[T, D]``; those with values that are not finite are left out."""
        return self._numbers("actions")

    @cached_property
    def times(self) -> tuple[str, Array] | None:
        """The name and the values of the clock: seconds, or another unit, of each step."""
        if self.episode.times is not None:
            return "timestamp", np.asarray(self.episode.times, np.float64)
        for path, column in self.leaves.items():
            ours = any(path == name or path.endswith(f"/{name}") for name in CLOCKS)
            if ours and column.dtype.kind in "iuf" and column.size == len(self) and not path.startswith("next_"):
                return path, column.reshape(-1).astype(np.float64)
        return None

    def finding(
        self,
        severity: Severity,
        text: str,
        *,
        at: str = "",
        steps: tuple[int, int] | None = None,
        weight: float = 0.0,
        **values: Any,
    ) -> DatasetFinding:
        """A finding about this episode, a column `at` which it is, or the steps from the first to the last of `steps`;
        `values` are those of its text."""
        first, last = (None, None) if steps is None else (step + self.first_step for step in steps)
        finding = DatasetFinding(severity, text, plain(values), episode=self.number, label=self.label, column=at)
        return replace(finding, first=first, last=last, trimmed=self.first_step, weight=float(weight))

    def _numbers(self, part: str) -> dict[str, Array]:
        found = {}
        for path, column in self.leaves.items():
            if _is_within(path, part) and column.dtype.kind == "f" and 0 < column.size <= MAX_WIDTH * len(column):
                values = column.reshape(len(column), -1).astype(np.float64)
                if np.isfinite(values).all():
                    found[path] = values
        return found


class Check(ABC):
    """Looks at one episode after the other. What it keeps of each are a few numbers."""

    name: ClassVar[str]
    images: ClassVar[bool] = False
    """Whether it looks at images; without such a check, they are not decoded."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        """Yields what is wrong with one episode."""
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        """Yields what all episodes together show. `complete`: whether every episode could be read."""
        yield from ()

    def about(
        self,
        severity: Severity,
        text: str,
        *,
        episode: int | None = None,
        at: str = "",
        weight: float = 0.0,
        **values: Any,
    ) -> DatasetFinding:
        """A finding about the dataset, or about the episode of this number; `at`: its column."""
        label = "" if episode is None else self.dataset.label(episode)
        finding = DatasetFinding(severity, text, plain(values), episode=episode, label=label, column=at)
        return replace(finding, weight=float(weight))


def stretches(flags: Array) -> list[tuple[int, int]]:
    """The first and last places of each stretch of true values."""
    edges = np.flatnonzero(np.diff(np.r_[False, flags, False].astype(np.int8)))
    return [(int(first), int(end) - 1) for first, end in edges.reshape(-1, 2)]


def _is_within(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}/")
