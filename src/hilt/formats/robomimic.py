"""robomimic's HDF5 demonstrations, and LIBERO's, which are the same with an instruction.

data                        attributes: env_args (JSON); LIBERO: problem_info (JSON), bddl_file_name
data/demo_0/obs/NAME        what was seen before each step; next_obs/NAME after it (not in LIBERO)
data/demo_0/actions, rewards, dones, states, ...
mask/NAME                   filter keys: lists of demonstrations
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import CorruptError, FormatError, SchemaError, UnknownNameError
from hilt.core.files import DISK, leftovers, replacing
from hilt.core.trajectory import Source
from hilt.core.tree import Array, JsonObject, flatten, unflatten
from hilt.formats.episodes import INSTRUCTION, Episode, ListedDataset, Notes, natural, plain, text_fact
from hilt.formats.hdf5 import attributes, child, import_h5py, is_hdf5, leaves, opened, values
from hilt.formats.units import FolderWriter
from hilt.replay.schema import mate

NAMES = {"obs": "observations", "next_obs": "next_observations", "dones": "terminated"}
"""robomimic's names of our columns; all others are the same"""
LIBERO_NAMES = {
    "agentview_image": "agentview_rgb",
    "robot0_eye_in_hand_image": "eye_in_hand_rgb",
    "robot0_eef_pos": "ee_pos",
    "robot0_eef_quat": "ee_ori",
    "robot0_gripper_qpos": "gripper_states",
}
"""Observations of LIBERO's simulator, and what its demonstrations call them; ``ee_ori`` is a turn about an axis"""
_OF_EVERY_STEP = ("obs", "next_obs", "rewards", "dones")
OURS = ("hilt", "hilt_facts", *NAMES)
"""Names of their own in a file: a log's column of such a name is written under ``hilt/``."""


def matches(path: Path) -> bool:
    return any(is_hdf5(file) for file in _files(path))


def open_dataset(path: Path, *, filter_key: str = "") -> RobomimicDataset:
    """One file, or a folder of them, such as a suite of LIBERO. `filter_key` names a
    list of demonstrations, such as ``train``."""
    return RobomimicDataset(path, filter_key)


class RobomimicDataset(ListedDataset):
    format = "robomimic"

    def __init__(self, path: Path, filter_key: str = ""):
        super().__init__(path)
        self._files, self._filter_key = _files(path), filter_key
        if not self._files:
            raise FormatError(f"{path}: no .hdf5 file in it. Check the path.")

    @cached_property
    def _episodes(self) -> list[tuple[Path, str, list[str]] | CorruptError]:
        """File, name and filter keys of each demonstration."""
        found: list[tuple[Path, str, list[str]] | CorruptError] = []
        for path in self._files:
            try:
                with opened(path) as file:
                    data, members = child(file, "data"), _filter_keys(file)
                    if not isinstance(data, import_h5py().Group):
                        raise FormatError(
                            f"{path}: no group named 'data' in it, so no demonstrations of robomimic or LIBERO."
                        )
                    if self._filter_key and self._filter_key not in members:
                        raise UnknownNameError("filter key", self._filter_key, members)
                    for name in sorted(data, key=natural):
                        keys = [key for key in members if name in members[key]]
                        found += [(path, name, keys)] if not self._filter_key or self._filter_key in keys else []
            except CorruptError as error:
                found.append(error)
        return found

    def describe(self) -> JsonObject:
        known: dict[str, Any] = {"files": len(self._files)}
        with opened(self._files[0]) as file:
            known["filter keys"] = list(_filter_keys(file))
            known |= _facts_of_all(child(file, "data"))
        return known

    def stated_counts(self) -> dict[str, int]:
        if self._filter_key:
            return {}
        total = 0
        for path in self._files:
            with opened(path) as file:
                found = attributes(child(file, "data")).get("total")
            if not isinstance(found, int):
                return {}
            total += found
        return {"steps": total}

    def label(self, number: int) -> str:
        found = self._episodes[number]
        return f"episode {number}" if isinstance(found, CorruptError) else f"{found[0].name}: {found[1]}"

    def _read(self, found: tuple[Path, str, list[str]], images: bool) -> Episode | None:
        path, name, keys = found
        with opened(path) as file:
            data = child(file, "data")
            demo = child(data, name)
            datasets = dict(leaves(demo))
            facts, single, ours = _facts(data, demo, self.notes), False, "hilt_facts" in datasets
            if ours:
                facts, single = json.loads(datasets.pop("hilt_facts").asstr()[()])
                facts = dict(facts)
            facts |= {"filter_keys": keys} if keys else {}
            actions = [dataset for leaf, dataset in datasets.items() if leaf.partition("/")[0] == "actions"]
            if not actions:
                raise CorruptError(f"{path}: {name} has no actions.")
            if not len(actions[0]):
                return None
            columns = self._columns(datasets, len(actions[0]), images, facts)
            if not ours and columns["terminated"][:-1].any():
                self.notes.add(
                    "dones before the last step, as success has them: the demonstration goes "
                    "on, so it does not end there"
                )
                columns["terminated"][:-1] = False
        names = {f"{path}/array": path for path in ("observations", "next_observations") if single}
        return Episode(unflatten({names.get(path, path): column for path, column in columns.items()}), facts)

    def _columns(self, found: dict[str, Any], length: int, images: bool, facts: dict[str, Any]) -> dict[str, Array]:
        columns: dict[str, Array] = {}
        if not any(leaf.startswith("obs/") for leaf in found) and "states" in found:
            self.notes.add("no obs in this dataset: states stand for them")
            found["obs/states"] = found.pop("states")
        repeated = False
        for leaf, dataset in found.items():
            path, paired = _ours(leaf), leaf.startswith("obs/") and f"next_{leaf}" not in found
            if not images and dataset.dtype == np.uint8 and len(dataset.shape) > 3:
                continue
            rows = dataset.shape[0] if dataset.shape else 0
            if rows not in (length, length + paired) and leaf.partition("/")[0] in _OF_EVERY_STEP:
                raise CorruptError(
                    f"{dataset.file.filename}: {dataset.name} has {rows:,} rows, and there are {length:,} actions."
                )
            column = (
                values(dataset, more=length + 1 - rows if paired else 0) if rows in (length, length + paired) else None
            )
            if isinstance(column, list):
                facts[INSTRUCTION if "instruction" in path or "language" in path else path] = text_fact(column)
            elif column is None:
                self.notes.add(f"{leaf}: not numbers for each step, not carried over")
            elif paired:
                columns[path], columns[mate(path)] = column[:-1], column[1:]
                repeated |= rows == length
            else:
                columns[path] = column
        if repeated:
            self.notes.add(
                "no next_obs in this dataset: after the last step its own observation stands for the next one"
            )
        if "rewards" not in columns:
            self.notes.add("no rewards in this dataset: 0 everywhere")
        for path, kind in (("rewards", np.float32), ("terminated", bool), ("truncated", bool), ("source", np.uint8)):
            column = columns.setdefault(path, np.full(length, Source.DEMO if path == "source" else 0, kind))
            if column.size != length or (path == "source" and column.dtype != kind):
                raise CorruptError(
                    f"{path}: expected one value for each of {length} steps, got {column.dtype} {column.shape}."
                )
            columns[path] = column.reshape(length).astype(
                column.dtype if path == "rewards" and column.dtype.kind == "f" else kind
            )
        return columns


def create(path: Path, *, names: str = "") -> RobomimicWriter:
    """One file, ``data.hdf5``, in the folder. `names` "libero" writes what was recorded in LIBERO's simulator as its
    own demonstrations have it: agentview_rgb, ee_pos, ee_ori, ... and the instruction of the file, which has one
    task."""
    if names not in ("", "libero"):
        raise UnknownNameError("names of observations", names, ["libero"])
    return RobomimicWriter(path, libero=names == "libero")


class RobomimicWriter(FolderWriter):
    """Each episode is a file of its own until the end: an HDF5 file that is being written does not survive its writer.

    The names of these files show the progress, so its journal has no lines.
    """

    def __init__(self, path: Path, libero: bool = False):
        super().__init__(path)
        self._parts, self._libero = path / ".parts", libero
        if self._complete:
            DISK.remove(self._parts)
            return
        DISK.make_folders(self._parts)
        for rest in leftovers(self._parts):
            DISK.remove(rest)
        self.next = max((int(part.stem) + 1 for part in self._parts.glob("*.hdf5")), default=0)

    def _add(self, number: int, episode: Episode) -> None:
        single = not isinstance(episode.columns["observations"], Mapping)
        with _new(self._parts / f"{number}.hdf5") as file:
            demo = file.create_group("demo")
            for path, column in (_liberos(episode) if self._libero else flatten(episode.columns)).items():
                if column.dtype.kind not in "biuf":
                    raise SchemaError(f"{path}: {column.dtype} has no place in HDF5. Leave this column out.")
                name = _theirs(f"{path}/array" if single and path in ("observations", "next_observations") else path)
                demo[name] = column.astype(np.int64) if path == "terminated" else column
            demo["hilt_facts"] = json.dumps([plain(episode.facts), single])
            demo.attrs["num_samples"] = len(episode)
        self.next = number + 1

    def finish(self) -> None:
        super().finish()
        DISK.remove(self._parts)  # not before it is complete: a part of them must not be taken for all

    def _finish(self) -> None:
        with _new(self._path / "data.hdf5") as file:
            data, total, environment = file.create_group("data"), 0, "{}"
            masks: dict[str, list[str]] = {}
            instructions: set[str] = set()
            for number, part in enumerate(sorted(self._parts.glob("*.hdf5"), key=natural)):
                with opened(part) as source:
                    source.copy("demo", data, f"demo_{number}")
                    total += int(source["demo"].attrs["num_samples"])
                    facts = json.loads(source["demo/hilt_facts"].asstr()[()])[0]
                instructions.add(str(facts.get(INSTRUCTION, "")))
                for key in keys if isinstance(keys := facts.get("filter_keys"), list) else ():
                    masks.setdefault(str(key).replace("/", "_"), []).append(f"demo_{number}")
                arguments = json.dumps(facts.get("env_args"))
                # the most that an attribute can hold
                environment = arguments if arguments != "null" and len(arguments) < 60_000 else environment
            data.attrs["total"], data.attrs["env_args"] = total, environment
            if self._libero and len(instructions) > 1:
                raise SchemaError(
                    f"a file of LIBERO's has one task; given {len(instructions)}: {', '.join(sorted(instructions))}. "
                    "Convert the recording of each task by itself."
                )
            if self._libero:
                data.attrs["problem_info"] = json.dumps({INSTRUCTION: instructions.pop() if instructions else ""})
                data.attrs["macros_image_convention"] = "opengl"
                data.attrs["num_demos"] = len(data)
            if environment == "{}":
                self.notes.add("env_args: not known, so robomimic cannot make the environment of this file")
            for key, names in masks.items():
                file[f"mask/{key}"] = np.array(names, "S")
        self._mark_complete()


def _liberos(episode: Episode) -> dict[str, Array]:
    """The columns of an episode under the names of LIBERO's demonstrations, which have no next observations."""
    columns: dict[str, Array] = {}
    for path, column in flatten(episode.columns).items():
        head, _, leaf = path.partition("/")
        if head == "observations" and leaf not in LIBERO_NAMES:
            raise SchemaError(
                f"{path}: not an observation of LIBERO's simulator, which are {', '.join(LIBERO_NAMES)}. "
                "Leave out -o names=libero."
            )
        if head != "next_observations":
            columns[f"{head}/{LIBERO_NAMES[leaf]}" if head == "observations" else path] = column
    if "observations/ee_ori" in columns:
        columns["observations/ee_ori"] = _axis_angles(columns["observations/ee_ori"])
        states = [columns[f"observations/{name}"] for name in ("ee_pos", "ee_ori")]
        columns["observations/ee_states"] = np.concatenate(states, -1)
    return columns


def _axis_angles(quaternions: Array) -> Array:
    """From ``[x y z w]``, as robosuite has them: without a turn, 0."""
    w = quaternions[:, 3:].clip(-1.0, 1.0)
    sine = np.sqrt(1.0 - w * w)
    turns = quaternions[:, :3] * (2.0 * np.arccos(w)) / np.where(sine < 1e-6, 1.0, sine)
    result: Array = np.where(sine < 1e-6, 0.0, turns).astype(quaternions.dtype)
    return result


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Any]:
    """A new HDF5 file, whole or absent."""
    with replacing(path, sole_writer=True) as place, import_h5py().File(place, "w") as file:
        yield file


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted([*path.glob("*.hdf5"), *path.glob("*.h5")], key=natural)
    # which is Minari's
    return [file for file in found if file.suffix in (".hdf5", ".h5") and file.name != "main_data.hdf5"]


def _filter_keys(file: Any) -> dict[str, set[str]]:
    """The demonstrations of each."""
    masks = child(file, "mask")
    keys = sorted(masks) if isinstance(masks, import_h5py().Group) else []
    return {
        key: set(values(lists) or ()) for key in keys if isinstance(lists := child(masks, key), import_h5py().Dataset)
    }


def _ours(leaf: str) -> str:
    head, slash, tail = leaf.partition("/")
    if head == "hilt":
        return tail
    return f"extra/{leaf}" if head in NAMES.values() else f"{NAMES.get(head, head)}{slash}{tail}"


def _theirs(path: str) -> str:
    head, slash, tail = path.partition("/")
    theirs = {ours: name for name, ours in NAMES.items()}
    return f"hilt/{path}" if head in OURS else f"{theirs.get(head, head)}{slash}{tail}"


def _facts(data: Any, demo: Any, notes: Notes) -> dict[str, Any]:
    """Returns facts from the attributes of a file and of a demonstration."""
    facts = _facts_of_all(data)
    own = {name: value for name, value in attributes(demo).items() if name != "num_samples"}
    for name in [name for name, value in (facts | own).items() if isinstance(value, str) and len(value) > 4096]:
        notes.add(f"{name}: a text of more than 4,096 characters, not carried over")
        facts.pop(name, None)
        own.pop(name, None)
    if "success" in own:
        facts["success"] = bool(own.pop("success"))
    return facts | ({"episode_metadata": own} if own else {})


def _facts_of_all(data: Any) -> dict[str, Any]:
    facts = {name: value for name, value in attributes(data).items() if name not in ("total", "num_demos")}
    for name in ("env_args", "problem_info"):
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # not JSON: it stays a text
            facts[name] = plain(json.loads(facts.get(name, "")))
    problem_info = facts.get("problem_info")
    if isinstance(problem_info, dict) and INSTRUCTION in problem_info:
        facts[INSTRUCTION] = "".join(map(str, problem_info.pop(INSTRUCTION))).strip('"')
    return facts
