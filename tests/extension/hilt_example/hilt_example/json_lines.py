"""A dataset format: a folder with one JSON object for each episode, a line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten, unflatten
from hilt.formats.episodes import Episode, ListedDataset, Writer

FILE = "episodes.jsonl"


def matches(path: Path) -> bool:
    return (path / FILE).is_file()


def open_dataset(path: Path, *, first: int = 0) -> JsonLines:
    """`first`: the number of the episode from which on it is read."""
    return JsonLines(path, first)


def create(path: Path) -> JsonLinesWriter:
    """Everything but pictures is small enough for it."""
    return JsonLinesWriter(path)


class JsonLines(ListedDataset):
    format = "json-lines"

    def __init__(self, path: Path, first: int):
        super().__init__(path)
        self._first = first

    @cached_property
    def _episodes(self) -> Sequence[Any]:
        return (self.path / FILE).read_text().splitlines()[self._first :]

    def _read(self, found: Any, images: bool) -> Episode:
        line = json.loads(found)
        columns = {name: np.array(column["values"], column["type"]) for name, column in line["columns"].items()}
        return Episode(unflatten(columns), line["facts"])

    def describe(self) -> dict[str, Any]:
        return {"episodes": len(self)}


class JsonLinesWriter(Writer):
    def __init__(self, path: Path):
        super().__init__()
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / FILE).open("a")
        self.next = len((path / FILE).read_text().splitlines())

    def add(self, number: int, episode: Episode) -> None:
        columns = {
            name: {"type": str(array.dtype), "values": array.tolist()}
            for name, array in flatten(episode.columns).items()
        }
        self._file.write(json.dumps({"columns": columns, "facts": episode.facts}) + "\n")

    def keep(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
