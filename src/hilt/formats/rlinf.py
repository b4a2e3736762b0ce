"""RLinf's buffer folders (see `hilt.formats.rlinf_folder`), and folders of these, one for each rank.

A trajectory has steps ``[T, B, ...]`` of B environments over many episodes; here each environment's
episodes stand alone. A step of several chunks is one transition whose reward is the sum of theirs; what
RLinf stored is kept beside it, under its own names.

We write an episode as a trajectory of one environment, and what RLinf has no field
for into ``hilt_{id}.pt``, which it passes over.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hilt.core.errors import CorruptError, FormatError, SchemaError
from hilt.core.files import DISK
from hilt.core.trajectory import Source
from hilt.core.tree import Array, JsonObject, flatten, unflatten
from hilt.formats import rlinf_folder as folders
from hilt.formats.episodes import Episode, ListedDataset, natural, plain
from hilt.formats.rlinf_trajectory import Trajectory, ends_and_source, get_model_weights_id, step_rows
from hilt.formats.units import FolderWriter
from hilt.replay import tensors as bridge

FIELDS = (
    "actions",
    "intervene_flags",
    "terminations",
    "truncations",
    "dones",
    "prev_logprobs",
    "prev_values",
    "versions",
)
NAMES = {"curr_obs": "observations", "next_obs": "next_observations", "rewards": "extra/rewards"}


def matches(path: Path) -> bool:
    return bool(_folders(path)) or _is_trajectory(path)


def open_dataset(path: Path) -> RLinfDataset:
    """A folder of ``save_checkpoint`` or ``auto_save``, the folder above its ``rank_0``,
    ``rank_1``, ..., or one trajectory's file."""
    return RLinfDataset(path)


class RLinfDataset(ListedDataset):
    format = "rlinf"

    def __init__(self, path: Path):
        super().__init__(path)
        self._files: list[tuple[Path, bool]] = [(path, True)] if _is_trajectory(path) else []
        self._stated_steps: list[Any] = []
        for folder in _folders(path):
            index = folders.read_index(folder)
            for entry in index.entries.values():
                self._stated_steps.append(entry.get("num_samples"))
                found = folders.find_file(folder, entry, index.trajectory_format)
                self._files.append(
                    (found or folder / folders.file_name(entry, index.trajectory_format), found is not None)
                )
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
                columns, facts, ours = self._load(number)
            except CorruptError as error:
                found.append(error)
                continue
            length, width = columns["actions"].shape[:2]
            for lane in range(width):
                edges = {0, length}
                if not ours:  # else it is one episode
                    edges |= set(range(0, length, max(1, length // facts["rollout_epochs"])))
                    edges |= set(
                        (np.flatnonzero(columns["terminated"][:, lane] | columns["truncated"][:, lane]) + 1).tolist()
                    )
                found += [(number, lane, first, stop) for first, stop in itertools.pairwise(sorted(edges))]
        return found

    def stated_counts(self) -> dict[str, int]:
        if not self._stated_steps or not all(isinstance(count, int) for count in self._stated_steps):
            return {}
        return {"steps": sum(self._stated_steps)}

    def describe(self) -> JsonObject:
        return {"trajectories": len(self._files)}

    def _read(self, found: tuple[int, int, int, int], images: bool) -> Episode:
        number, lane, first, stop = found
        columns, facts, ours = self._load(number)
        kept = {
            path: column for path, column in columns.items() if images or column.dtype != np.uint8 or column.ndim < 5
        }
        facts = facts | ({} if ours else {"environment": lane})
        return Episode(unflatten({path: column[first:stop, lane] for path, column in kept.items()}), facts)

    def _load(self, number: int) -> tuple[dict[str, Array], dict[str, Any], bool]:
        """Columns ``[T, B, ...]`` and facts of a file, and whether they are as we wrote them; the last one is kept."""
        with self._lock:
            if self._loaded[0] != number:
                path = self._files[number][0]
                try:
                    columns, facts = self._columns(folders.read_trajectory(path))
                    beside = path.with_name(f"hilt_{path.name.split('_')[1]}.pt")
                    if beside.is_file():
                        columns, facts = _restored(columns, bridge.load_pt(beside))
                    self._loaded = number, (columns, facts, beside.is_file())
                except (FormatError, CorruptError):
                    raise
                except (SchemaError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
                    raise CorruptError(f"{path}: {error}") from error
            result: tuple[dict[str, Array], dict[str, Any], bool] = self._loaded[1]
            return result

    def _columns(self, values: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
        trajectory = Trajectory.from_dict(values)
        if (
            not trajectory.curr_obs
            or not trajectory.next_obs
            or trajectory.rewards is None
            or trajectory.actions is None
        ):
            raise SchemaError(
                "a trajectory without curr_obs, next_obs, actions or rewards, which transitions are made of."
            )
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
            # each begins with a reset
            facts["rollout_epochs"] = max(len(array) - len(raw[path]), facts["rollout_epochs"])
        shape = raw["rewards"].shape[:2]
        if wrong := [path for path, array in raw.items() if array.shape[:2] != shape]:
            raise SchemaError(f"{wrong[0]} has shape {raw[wrong[0]].shape}, and the rewards have {shape}.")
        columns = {"rewards": raw["rewards"].reshape(*shape, -1).sum(axis=2, dtype=np.float32), **ends_and_source(raw)}
        for path, array in raw.items():
            head, slash, tail = path.partition("/")
            columns[f"{NAMES.get(head, head)}{slash}{tail}"] = array
        return columns, facts


def _restored(columns: dict[str, Array], kept: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Columns and facts as they were when we wrote them."""
    own = {path: bridge.raw_array(value, path)[0][:, None] for path, value in flatten(kept["columns"]).items()}
    found = {**{path.removesuffix("/array"): column for path, column in columns.items()}, **columns, **own}
    restored = {path: found[path] for path in json.loads(kept["names"])}
    if wrong := [path for path, column in restored.items() if column.shape[:2] != columns["actions"].shape[:2]]:
        raise SchemaError(
            f"{wrong[0]} has shape {restored[wrong[0]].shape}, and the actions have {columns['actions'].shape}."
        )
    return restored, plain(dict(json.loads(kept["facts"])))


def create(path: Path, *, trajectory_format: str = "pt") -> RLinfWriter:
    """`trajectory_format` is ``pt`` or ``pkl``, as RLinf has it."""
    folders.check_format_name(trajectory_format)
    return RLinfWriter(path, trajectory_format)


class RLinfWriter(FolderWriter):
    """One file for each episode, and the index at the end."""

    def __init__(self, path: Path, trajectory_format: str):
        super().__init__(path)
        self._index = folders.FolderIndex(trajectory_format)
        self._index.entries = {line["entry"]["trajectory_id"]: line["entry"] for line in self._lines}
        if not self._complete:
            folders.remove_unnamed(
                path, (folders.file_name(entry, trajectory_format) for entry in self._index.entries.values())
            )
            DISK.remove(path / f"hilt_{len(self._index.entries)}.pt")

    def _add(self, number: int, episode: Episode) -> None:
        columns, identity = flatten(episode.columns), len(self._index.entries)
        if "actions" not in columns or "observations" not in episode.columns:
            raise SchemaError("RLinf's trajectories have actions, one array, and observations.")
        fields = _fields(columns)
        given = str(episode.facts.get("model_weights_id", ""))
        weights = given if re.fullmatch(r"[\w-]{1,64}", given) else get_model_weights_id(fields.get("versions"))
        limit = episode.facts.get("max_episode_length")
        trajectory = Trajectory(limit if isinstance(limit, int) else len(episode), weights, **unflatten(fields))
        entry = {
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{weights} {identity}")),
            "model_weights_id": weights,
            "trajectory_id": identity,
            "num_samples": len(episode),
            "shape": list(trajectory.shape or ()),
            "max_episode_length": trajectory.max_episode_length,
        }
        kept = {"names": json.dumps(list(columns)), "facts": json.dumps(plain(episode.facts))}
        own = unflatten({path: column for path, column in columns.items() if not _field(path)})
        folders.write_trajectory(self._path / f"hilt_{identity}.pt", {**kept, "columns": own})
        folders.write_trajectory(
            self._path / folders.file_name(entry, self._index.trajectory_format), trajectory.to_dict()
        )
        self._index.entries[identity] = entry
        self.next = number + 1
        self._commit(entry=entry)

    def _finish(self) -> None:
        self._index.trajectory_counter = len(self._index.entries)
        folders.write_index(self._path, self._index)
        self._mark_complete()


def _fields(columns: dict[str, Array]) -> dict[str, Any]:
    """The tensors of a trajectory, by path; what the columns do not have under RLinf's names is derived."""
    stored = {_field(path): np.ascontiguousarray(column[:, None]) for path, column in columns.items() if _field(path)}
    human = (columns["source"] == Source.HUMAN).reshape(-1, *(1 for _ in stored["actions"].shape[1:]))
    derived = {
        "intervene_flags": np.broadcast_to(human, stored["actions"].shape),
        "rewards": columns["rewards"][:, None, None],
        "terminations": columns["terminated"][:, None, None],
        "truncations": columns["truncated"][:, None, None],
        "dones": (columns["terminated"] | columns["truncated"])[:, None, None],
    }
    if "policy_version" in columns:
        derived["versions"] = columns["policy_version"].astype(np.float32)[:, None, None]
    return {name: bridge.as_tensor(array.copy(), name) for name, array in {**derived, **stored}.items()}


def _field(path: str) -> str:
    """RLinf's name of a column that it stores as it is; empty for others."""
    head, _, tail = path.partition("/")
    if head in ("observations", "next_observations"):
        return f"{'curr' if head == 'observations' else 'next'}_obs/{tail or 'array'}"
    if path == "extra/rewards":
        return "rewards"
    return path if path in FIELDS or (head == "forward_inputs" and tail) else ""


def _folders(path: Path) -> list[Path]:
    """Those that have an index: this one, or one for each rank."""
    found = [path, *sorted(path.glob("rank_*"), key=natural)]
    return [
        folder
        for folder in found
        if (folder / "trajectory_index.json").is_file() and (folder / "metadata.json").is_file()
    ]


def _is_trajectory(path: Path) -> bool:
    return path.is_file() and path.name.startswith("trajectory_") and path.suffix in (".pt", ".pkl")
