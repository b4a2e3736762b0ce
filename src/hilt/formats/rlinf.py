"""RLinf's buffer folders (see `hilt.replay.rlinf_folder`), and folders of these, one for each rank.

A trajectory has steps ``[T, B, ...]`` of B environments over many episodes; here each environment's episodes stand alone. A step of
several chunks is one transition whose reward is the sum of theirs; what RLinf stored is kept beside it, under its own names.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hilt.core.errors import CorruptError, FormatError, SchemaError
from hilt.core.tree import Array, flatten, unflatten
from hilt.formats.episodes import Dataset, Episode, Job, natural, plain
from hilt.replay import rlinf_folder as folders
from hilt.replay import torch as bridge
from hilt.replay.rlinf import ends_and_source
from hilt.replay.rollout import Trajectory, step_rows

NAMES = {"curr_obs": "observations", "next_obs": "next_observations", "rewards": "extra/rewards"}


def matches(path: Path) -> bool:
    return bool(_folders(path)) or _is_trajectory(path)


def open_dataset(path: Path) -> RLinfDataset:
    """A folder of ``save_checkpoint`` or ``auto_save``, the folder above its ``rank_0``, ``rank_1``, ..., or one trajectory's file."""
    return RLinfDataset(path)


class RLinfDataset(Dataset):
    format = "rlinf"

    def __init__(self, path: Path):
        super().__init__(path)
        self._files: list[tuple[Path, bool]] = [(path, True)] if _is_trajectory(path) else []
        for folder in _folders(path):
            index = folders.read_index(folder)
            for entry in index.entries.values():
                found = folders.find_file(folder, entry, index.trajectory_format)
                self._files.append((found or folder / folders.file_name(entry, index.trajectory_format), found is not None))
        if not self._files and not _folders(path):
            raise FormatError(f"{path}: no trajectory_index.json in it, nor in rank_0, rank_1, ... Check the path.")
        self._loaded: tuple[int, Any] = (-1, None)
        self._lock = threading.Lock()

    @cached_property
    def _episodes(self) -> list[tuple[int, int, int, int] | CorruptError]:
        """File, environment, first step and end of each episode."""
        found: list[tuple[int, int, int, int] | CorruptError] = []
        for number, (path, there) in enumerate(self._files):
            try:
                if not there:
                    raise CorruptError(f"{path} is missing, and the index names it. Copy it again from where it came.")
                columns, facts = self._load(number)
            except CorruptError as error:
                found.append(error)
                continue
            ended = columns["terminated"] | columns["truncated"]
            epochs = range(0, len(ended) + 1, max(1, len(ended) // facts["rollout_epochs"]))
            for lane in range(ended.shape[1]):
                edges = sorted({*epochs, *(np.flatnonzero(ended[:, lane]) + 1).tolist(), len(ended)})
                found += [(number, lane, first, stop) for first, stop in itertools.pairwise(edges)]
        return found

    def __len__(self) -> int:
        return len(self._episodes)

    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        for found in self._episodes[first:]:
            yield partial(self._episode, found, images)

    def describe(self) -> dict[str, Any]:
        return {"trajectories": len(self._files)}

    def _episode(self, found: tuple[int, int, int, int] | CorruptError, images: bool) -> Episode:
        if isinstance(found, CorruptError):
            raise found
        number, lane, first, stop = found
        columns, facts = self._load(number)
        kept = {path: column for path, column in columns.items() if images or column.dtype != np.uint8 or column.ndim < 5}
        return Episode(unflatten({path: column[first:stop, lane] for path, column in kept.items()}), {**facts, "environment": lane})

    def _load(self, number: int) -> tuple[dict[str, Array], dict[str, Any]]:
        """Columns ``[T, B, ...]`` and facts of a file; the last one is kept."""
        with self._lock:
            if self._loaded[0] != number:
                path = self._files[number][0]
                try:
                    self._loaded = number, self._columns(folders.read_trajectory(path))
                except (FormatError, CorruptError):
                    raise
                except (SchemaError, TypeError, ValueError, LookupError) as error:
                    raise CorruptError(f"{path}: {error}") from error
            return self._loaded[1]

    def _columns(self, values: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
        trajectory = Trajectory.from_dict(values)
        if not trajectory.curr_obs or not trajectory.next_obs or trajectory.rewards is None or trajectory.actions is None:
            raise SchemaError("a trajectory without curr_obs, next_obs, actions or rewards, which transitions are made of.")
        facts: dict[str, Any] = {"rollout_epochs": 1}
        raw: dict[str, Array] = {}
        for path, value in flatten({name: value for name, value in values.items() if value is not None}).items():
            if not bridge.is_tensor(value) and not isinstance(value, np.ndarray):
                facts[path] = plain(value)
                continue
            array, own_type = bridge.raw_array(value, path)
            if array.ndim < 2:
                self.notes.add(f"{path}: not a value for each step and environment, not carried over")
                continue
            if own_type:
                self.notes.add(f"{path}: {own_type} is kept as float32")
                array = array.view(getattr(ml_dtypes, own_type)).astype(np.float32)
            raw[path] = step_rows(path, array, len(trajectory.rewards))
            facts["rollout_epochs"] = max(len(array) - len(raw[path]), facts["rollout_epochs"])  # each begins with a reset
        shape = raw["rewards"].shape[:2]
        if wrong := [path for path, array in raw.items() if array.shape[:2] != shape]:
            raise SchemaError(f"{wrong[0]} has shape {raw[wrong[0]].shape}, and the rewards have {shape}.")
        columns = {"rewards": raw["rewards"].reshape(*shape, -1).sum(axis=2, dtype=np.float32), **ends_and_source(raw)}
        for path, array in raw.items():
            head, slash, tail = path.partition("/")
            columns[f"{NAMES.get(head, head)}{slash}{tail}"] = array
        return columns, facts


def _folders(path: Path) -> list[Path]:
    """Those that have an index: this one, or one for each rank."""
    found = [path, *sorted(path.glob("rank_*"), key=lambda folder: natural(folder.name))]
    return [folder for folder in found if (folder / "trajectory_index.json").is_file() and (folder / "metadata.json").is_file()]


def _is_trajectory(path: Path) -> bool:
    return path.is_file() and path.name.startswith("trajectory_") and path.suffix in (".pt", ".pkl")
