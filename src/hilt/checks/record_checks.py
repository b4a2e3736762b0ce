"""Checks of an episode as a record: its counts, values that are not finite, ends, instructions and duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from hilt.checks.dataset_findings import DatasetFinding
from hilt.checks.episode_columns import Check, EpisodeColumns
from hilt.formats.convert import is_image
from hilt.formats.episodes import INSTRUCTION, Dataset, texts_of
from hilt.replay.schema import mate
from hilt.replay.storage.lock import writer_of


class Counts(Check):
    """Compares the numbers of episodes and steps that the metadata state with those that were read, and with those
    that the files hold."""

    name = "counts"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._stated, self._found = dataset.stated_counts(), {"episodes": 0, "steps": 0}

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        self._found["episodes"] += 1
        self._found["steps"] += len(episode)
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        if not complete:
            return  # what is damaged explains the difference
        for sentence in self.dataset.unlisted():
            yield self.about("error", "counts.unlisted", sentence=sentence)
        for name, stated in self._stated.items():
            found = self._found[name]
            if stated != found:
                yield self.about("error", f"counts.{name}", stated=stated, found=found)


class Values(Check):
    """Looks for numbers that are not finite."""

    name = "values"

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        reported = set[str]()
        for path, column in episode.leaves.items():
            if column.dtype.kind != "f" or path in reported:
                continue
            bad = ~np.isfinite(column.reshape(len(column), -1)).all(axis=1)
            if bad.any():
                places = np.flatnonzero(bad)
                reported.add(mate(path))  # the same values a step later
                yield episode.finding(
                    "error",
                    "values.not_finite",
                    at=path,
                    steps=(int(places[0]), int(places[-1])),
                    weight=len(places),
                    count=len(places),
                    total=len(episode),
                )


class Ends(Check):
    """Looks for episodes whose last step is neither terminated nor truncated, and for steps after an end."""

    name = "ends"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._writing = writer_of(dataset.path) is not None

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        leaves, last = episode.leaves, len(episode) - 1
        if "terminated" not in leaves or "truncated" not in leaves:
            return
        ended = np.any([leaves[name].reshape(last + 1, -1) != 0 for name in ("terminated", "truncated")], axis=(0, 2))
        if not ended[last] and not self._writing:
            # a run or a recording that is stopped leaves its newest episode so
            newest = self.dataset.format == "log" and episode.number == len(self.dataset) - 1 > 0
            yield episode.finding(
                "info" if newest else "warning",
                "ends.newest" if newest else "ends.none",
                steps=(last, last),
                last=last + episode.first_step,
            )
        early = np.flatnonzero(ended[:-1])
        if len(early):
            yield episode.finding(
                "error",
                "ends.early",
                steps=(int(early[0]), int(early[-1])),
                weight=len(early),
                count=len(early),
            )


class Language(Check):
    """Looks for episodes without an instruction."""

    name = "language"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._with, self._without = 0, list[int]()

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        texts = texts_of(episode.episode.facts.get(INSTRUCTION, ""), len(episode))
        missing = [number for number, text in enumerate(texts) if not text.strip()]
        if len(missing) == len(texts):
            self._without.append(episode.number)
            return
        self._with += 1
        if missing:
            yield episode.finding(
                "warning",
                "language.steps",
                steps=(missing[0], missing[-1]),
                weight=len(missing),
                count=len(missing),
                total=len(texts),
            )

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        if self._without and not self._with:
            yield self.about("info", "language.none")
            return
        for number in self._without:
            yield self.about("warning", "language.episode", episode=number, others=self._with)


class Duplicates(Check):
    """Looks for episodes with the same numbers in every step, by their hash."""

    name = "duplicates"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._first: dict[bytes, int] = {}

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        compared = [
            path
            for path in sorted(episode.leaves)
            if path.split("/")[0] in ("observations", "actions") and not is_image(episode.leaves[path])
        ]
        if not any(path.startswith("observations") for path in compared):
            return  # equal actions alone show nothing
        digest = hashlib.blake2b(digest_size=16)
        for path in compared:
            column = episode.leaves[path]
            digest.update(f"{path} {column.dtype} {column.shape}".encode())
            digest.update(np.ascontiguousarray(column).tobytes() if column.dtype.kind != "O" else repr(column).encode())
        earlier = self._first.setdefault(digest.digest(), episode.number)
        if earlier != episode.number:
            yield episode.finding("warning", "duplicates.same", other=self.dataset.label(earlier))
