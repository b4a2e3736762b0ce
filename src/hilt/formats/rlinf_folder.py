"""RLinf's folders: one file per trajectory, an index and metadata.

    metadata.json                     format, size, total_samples, trajectory_counter, seed
    trajectory_index.json             what is known of each trajectory, and their order
    trajectory_{id}_{weights id}.pt   one trajectory, columns [T, B, ...]

A file is written beside its name and renamed; the two JSON files are replaced only after the data they name. Files are
loaded without running what they carry.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hilt.core.errors import CorruptError, FormatError, MissingFileError, SchemaError, UnknownNameError
from hilt.core.files import DISK, inside, read, replacing, sync_file
from hilt.formats.rlinf_trajectory import Trajectory
from hilt.replay import tensors as bridge

FORMATS = ("pt", "pkl")


@dataclass
class FolderIndex:
    """The contents of the two JSON files of a folder."""

    trajectory_format: str = "pt"
    seed: int = 1234
    trajectory_counter: int = 0
    """The number that the next trajectory gets"""
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By trajectory number, in order: num_samples, trajectory_id, max_episode_length, shape, model_weights_id, uuid"""

    @property
    def total_samples(self) -> int:
        return sum(int(entry["num_samples"]) for entry in self.entries.values())

    def without_entries(self) -> FolderIndex:
        return FolderIndex(self.trajectory_format, self.seed, self.trajectory_counter)

    def shard(self, rank: int, world_size: int) -> dict[int, dict[str, Any]]:
        """The entries of one rank: contiguous, and the first ranks get one more when they do not divide evenly."""
        ids = list(self.entries)
        share, more = divmod(len(ids), world_size)
        start = rank * share + min(rank, more)
        return {number: self.entries[number] for number in ids[start : start + share + (rank < more)]}


class FolderSaver:
    """Writes trajectories to a folder in a thread of its own, each file before the index that names it."""

    def __init__(self, folder: Path, index: FolderIndex):
        DISK.make_folders(folder)
        self.folder, self.index = folder, index
        """`index` has what is written, which other trajectories are added to"""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hilt-save")
        self._writes: list[Future[None]] = []

    def add(self, number: int, entry: dict[str, Any], fields: Mapping[str, object]) -> None:
        self._writes = [write for write in self._writes if not write.done() or write.exception()]
        self._writes.append(self._thread.submit(self._write, self.index, number, entry, fields))

    def finish(self) -> None:
        """Returns when everything added so far is there, power-safe; raises what went wrong with it."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def close(self, wait: bool = True) -> None:
        self._thread.shutdown(wait=wait, cancel_futures=not wait)

    def _write(self, index: FolderIndex, number: int, entry: dict[str, Any], fields: Mapping[str, Any]) -> None:
        write_trajectory(self.folder / file_name(entry, index.trajectory_format), fields)
        index.entries[number] = entry
        entries = index.entries.copy()
        write_index(
            self.folder, FolderIndex(index.trajectory_format, index.seed, max(entries, default=-1) + 1, entries)
        )


def new_entry(number: int, trajectory: Trajectory) -> dict[str, object]:
    """What an index has of a trajectory that becomes its `number`-th."""
    shape = trajectory.shape
    if shape is None or len(shape) < 2:
        raise SchemaError(
            "a trajectory needs rewards or prev_logprobs of shape [T, B, ...], from which its length is known."
        )
    return {
        "uuid": str(uuid.uuid4()),
        "model_weights_id": trajectory.model_weights_id,
        "trajectory_id": number,
        "num_samples": shape[0] * shape[1],
        "shape": list(shape),
        "max_episode_length": int(trajectory.max_episode_length),
    }


def check_format_name(name: str) -> None:
    if name not in FORMATS:
        raise UnknownNameError("trajectory format", str(name), FORMATS)


def file_name(entry: Mapping[str, object], trajectory_format: str) -> str:
    return f"trajectory_{entry['trajectory_id']}_{entry['model_weights_id']}.{trajectory_format}"


def write_trajectory(path: Path, fields: Mapping[str, object]) -> None:
    """One trajectory's file, whole or absent."""
    save = bridge.save_pt if path.suffix == ".pt" else bridge.save_pkl
    with replacing(path, durable=False, sole_writer=True) as beside:
        with beside.open("wb") as file:
            save(fields, file)
        sync_file(beside)  # its name survives a power cut with the index that names it


def read_trajectory(path: Path) -> dict[str, object]:
    """One trajectory's fields."""
    return bridge.load_pt(path) if path.suffix == ".pt" else bridge.load_pkl(path)


def copy_trajectory(source: Path, target: Path) -> None:
    """The same file in another folder; a hard link where the file system has them, since these files never change."""
    if source.resolve() == target.resolve():
        return
    with replacing(target, durable=False, sole_writer=True) as beside:
        try:
            os.link(source, beside)
        except OSError:
            shutil.copyfile(source, beside)


def write_index(folder: Path, index: FolderIndex) -> None:
    """The two JSON files, each replaced whole. Every file they name must be there already."""
    listed = {str(number): entry for number, entry in index.entries.items()}
    DISK.replace(
        folder / "trajectory_index.json",
        json.dumps({"trajectory_index": listed, "trajectory_id_list": list(index.entries)}).encode(),
    )
    metadata = {
        "trajectory_format": index.trajectory_format,
        "size": len(index.entries),
        "total_samples": index.total_samples,
        "trajectory_counter": index.trajectory_counter,
        "seed": index.seed,
    }
    DISK.replace(folder / "metadata.json", json.dumps(metadata).encode())


def read_index(folder: Path) -> FolderIndex:
    """Reads the JSON files of a folder."""
    metadata = _read_json(folder / "metadata.json", "Metadata")
    listed = _read_json(folder / "trajectory_index.json", "Trajectory index")
    try:
        index = FolderIndex(
            str(metadata["trajectory_format"]), int(metadata["seed"]), int(metadata["trajectory_counter"])
        )
        for number in listed["trajectory_id_list"]:
            entry = dict(listed["trajectory_index"][str(number)])
            for name, other in (("uuid", "model_weights_id"), ("model_weights_id", "uuid")):
                entry.setdefault(name, entry.get(other, ""))
            for name in ("num_samples", "shape"):
                entry[name]
            entry["trajectory_id"] = int(entry["trajectory_id"])
            named = [str(entry[name]) for name in ("uuid", "model_weights_id", "trajectory_id")]
            if max(map(len, named)) > 100 or any("/" in name or "\0" in name for name in named):
                raise ValueError(f"{named}: a name that no file of this folder can have")
            index.entries[int(number)] = entry
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"{folder}: its JSON files are not those of an RLinf replay buffer ({error!r} in them)."
        ) from None
    check_format_name(index.trajectory_format)
    return index


def find_file(folder: Path, entry: Mapping[str, object], trajectory_format: str) -> Path | None:
    """The file of a trajectory, by the weights' name or by its own uuid."""
    for name in (entry["model_weights_id"], entry["uuid"]):
        path = inside(
            folder,
            f"trajectory_{entry['trajectory_id']}_{name}.{trajectory_format}",
            str(folder / "trajectory_index.json"),
        )
        if path.exists():
            return path
    return None


def remove_unnamed(folder: Path, kept: Iterable[str]) -> None:
    """Removes trajectory files that the index does not name (any more)."""
    names = set(kept)
    for path in [
        *folder.glob("trajectory_*_*.pt"),
        *folder.glob("trajectory_*_*.pkl"),
        *folder.glob(".trajectory_*.new"),
    ]:
        if path.name not in names:
            DISK.remove(path)


def _read_json(path: Path, what: str) -> dict[str, Any]:
    if not path.exists():
        raise MissingFileError(f"{what} not found at {path}; give a folder that save_checkpoint wrote.")
    try:
        data = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not readable as JSON ({error}); restore it from a copy.") from None
    if not isinstance(data, dict):
        raise FormatError(f"{path}: expected a JSON object, got {type(data).__name__}.")
    return data
