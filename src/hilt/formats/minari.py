"""Minari's datasets, read without Minari.

    data/metadata.json                   the spaces, how many episodes, and in which form the rest is
    data/main_data.hdf5                  episode_0/{observations, actions, rewards, terminations, truncations, infos}
    data/0/part-0.arrow (or .parquet)    the same in Arrow's forms, one folder for each episode, with a metadata.json of
                                         its own

Observations have one row more than the rest: what was seen after the last step.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import CorruptError, FormatError, HiltError, optional_module
from hilt.core.files import read
from hilt.core.trajectory import Source
from hilt.core.tree import Array, JsonObject, unflatten
from hilt.formats.episodes import INSTRUCTION, Episode, ListedDataset, natural, plain, text_fact
from hilt.formats.hdf5 import MAX_BYTES, attributes, child, elements, import_h5py, leaves, opened, values
from hilt.formats.images import decode_all
from hilt.replay.schema import mate

MAIN = "main_data.hdf5"
NAMES = {"terminations": "terminated", "truncations": "truncated"}
FACTS = {"id": "episode_id", "seed": "seed", "options": "options"}
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RuntimeError)


def matches(path: Path) -> bool:
    metadata = _folder(path) / "metadata.json"
    try:
        with metadata.open("rb") as file:
            return (metadata.parent / MAIN).is_file() or b'"data_format"' in file.read(4096)
    except OSError:
        return False


def open_dataset(path: Path) -> MinariDataset:
    """The folder of a dataset (``D4RL/door/human-v2``), or its ``data``."""
    return MinariDataset(path)


class MinariDataset(ListedDataset):
    format = "minari"

    def __init__(self, path: Path):
        super().__init__(path)
        self._data = _folder(path)
        file = self._data / "metadata.json"
        try:
            self._about = _parsed(read(file))
            self._spaces = {
                name: _parsed(self._about.get(f"{name[:-1]}_space", "{}")) for name in ("observations", "actions")
            }
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"{file}: not the metadata of a Minari dataset ({error}).") from None
        self._kind = str(self._about.get("data_format", "hdf5"))
        if self._kind not in ("hdf5", "arrow", "parquet"):
            raise FormatError(f"{file}: data_format is {self._kind!r}; hdf5, arrow and parquet are read.")

    @cached_property
    def _episodes(self) -> list[str]:
        if self._kind != "hdf5":
            return sorted((folder.name for folder in self._data.iterdir() if folder.name.isdecimal()), key=natural)
        with opened(self._data / MAIN) as file:
            return sorted((name for name in file if re.fullmatch(r"episode_\d+", name)), key=natural)

    def describe(self) -> JsonObject:
        return {name: plain(value) for name, value in self._about.items() if not name.endswith(("_space", "_spec"))}

    def stated_counts(self) -> dict[str, int]:
        stated = {name: self._about.get(f"total_{name}") for name in ("episodes", "steps")}
        return {name: count for name, count in stated.items() if isinstance(count, int)}

    def _read(self, found: str, images: bool) -> Episode | None:
        return self._from_hdf5(found, images) if self._kind == "hdf5" else self._from_arrow(found, images)

    def _from_hdf5(self, name: str, images: bool) -> Episode | None:
        with opened(self._data / MAIN) as file:
            group, found = child(file, name), {}
            for path, dataset in leaves(group):
                path = re.sub(r"\b_index_(\d+)\b", r"\1", path)  # of a tuple
                space, of_bytes = self._space(path), import_h5py().check_vlen_dtype(dataset.dtype) == np.uint8
                if not images and (_is_image(space) or of_bytes):
                    continue
                if of_bytes or (dataset.dtype == np.uint8 and _is_image(space) and len(dataset.shape) == 2):
                    found[path] = _pictures(
                        [bytes(data) for data in elements(dataset)], space, f"{file.filename}: {name}/{path}"
                    )
                else:
                    found[path] = values(dataset)
            return self._episode(found, unflatten(attributes(group)), f"{file.filename}: {name}")

    def _from_arrow(self, name: str, images: bool) -> Episode | None:
        pa = optional_module("pyarrow", "Reading Minari's Arrow files", "formats")
        folder = self._data / name
        found: dict[str, Any] = {}
        try:
            for path, column, shape in _arrow_leaves(
                _table(sorted(map(str, folder.glob(f"*.{self._kind}"))), self._kind), ""
            ):
                space, rows = self._space(path), None if path.partition("/")[0] in ("observations", "infos") else -1
                if pa.types.is_binary(column.type):
                    found[path] = _pictures(column.to_pylist()[:rows], space, f"{folder}: {path}") if images else None
                elif pa.types.is_fixed_size_list(column.type):
                    flat = column.flatten().to_numpy(zero_copy_only=False)
                    found[path] = flat.reshape(len(column), *_shape(space, shape))[:rows]
                else:
                    text = pa.types.is_string(column.type)
                    found[path] = (column.to_pylist() if text else column.to_numpy(zero_copy_only=False))[:rows]
            found.pop("episode_id", None)
            found = {path: value for path, value in found.items() if images or not _is_image(self._space(path))}
            return self._episode(found, _parsed(read(folder / "metadata.json")), str(folder))
        except HiltError:
            raise
        except _DAMAGE as error:
            raise CorruptError(
                f"{folder}: damaged ({' '.join(str(error).split())[:300]}). Copy it again from where it came."
            ) from error

    def _space(self, path: str) -> dict[str, Any]:
        """Returns the entry of metadata.json for a leaf."""
        head, *rest = path.split("/")
        space = self._spaces.get(head, {})
        for part in rest:
            inner = space.get("subspaces")
            space = (
                inner.get(part, {}) if isinstance(inner, dict) else inner[int(part)] if isinstance(inner, list) else {}
            )
        return space

    def _episode(self, found: dict[str, Any], about: dict[str, Any], where: str) -> Episode | None:
        for name in ("rewards", *NAMES):
            values = found.get(name)
            if (
                not isinstance(values, np.ndarray)
                or values.ndim != 1
                or values.dtype.kind not in ("biuf" if name == "rewards" else "b")
            ):
                got = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else "none"
                raise CorruptError(f"{where}/{name}: expected one number for each step, got {got}.")
        length = len(found["rewards"])
        if not length:
            return None
        facts = {name: plain(about.pop(key)) for key, name in FACTS.items() if key in about}
        columns: dict[str, Array] = {"source": np.full(length, Source.DEMO, np.uint8)}
        for path, value in found.items():
            seen, is_info = path.partition("/")[0] == "observations", path.startswith("infos/")
            if isinstance(value, list):
                facts[INSTRUCTION if path.endswith(("mission", "instruction")) else path] = text_fact(
                    list(map(str, value))
                )
            elif value is None or value.dtype.kind not in "biuf":
                self.notes.add(f"{path}: not numbers of one shape for each step, not carried over")
            elif len(value) != length + seen and not (is_info and len(value) == length + 1):
                raise CorruptError(f"{where}/{path} has {len(value)} rows, for {length} steps.")
            elif seen:
                columns[path], columns[mate(path)] = value[:-1], value[1:]
            else:
                columns[NAMES.get(path, path)] = value[-length:]
                if is_info and len(value) > length:
                    self.notes.add("infos of the reset, before the first step: not carried over")
        rest = {name: plain(value) for name, value in about.items() if name != "total_steps"}
        return Episode(unflatten(columns), facts | ({"episode_metadata": rest} if rest else {}))


def _folder(path: Path) -> Path:
    if path.name == MAIN:
        return path.parent
    return path / "data" if (path / "data" / "metadata.json").is_file() else path


def _parsed(text: str | bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__}, not an object")
    return found


def _is_image(space: Mapping[str, Any]) -> bool:
    """Returns whether Minari would store this space as JPEG."""
    shape = space.get("shape") or ()
    return space.get("dtype") == "uint8" and len(shape) in (2, 3) and min(shape[:2]) >= 32


def _pictures(encoded: Sequence[bytes], space: Mapping[str, Any], where: str) -> Array:
    """JPEG images, bit for bit as Minari decodes them."""
    shape = space["shape"] if _is_image(space) else [None, None]
    try:
        if _is_image(space) and math.prod(shape) * len(encoded) > MAX_BYTES:
            raise CorruptError(f"{len(encoded)} images of {shape[0]} x {shape[1]} pixels; they were not read.")
        images = decode_all(encoded, [*shape, None][:3], fast=False)
    except CorruptError as error:
        raise CorruptError(f"{where}: {error}") from error
    return images[..., 0] if len(space.get("shape", ())) == 2 else images


def _table(files: Sequence[str], kind: str) -> Any:
    """All rows of an episode as an array of structs. They are read in small parts, since few bytes can stand for many.

    The schema stored in a parquet file is ignored: Arrow ends the process if it is damaged.
    """
    import pyarrow as pa
    import pyarrow.dataset as datasets

    parts, size = [], 0
    for part in datasets.dataset(files, format=kind).to_batches(batch_size=64, batch_readahead=0):
        size += part.nbytes
        if size > MAX_BYTES:
            break
        part.validate(full=True)
        parts.append(part)
    if not parts or size > MAX_BYTES:
        raise ValueError(f"{len(files)} files with {size:,} bytes")
    return pa.Table.from_batches(parts).combine_chunks().to_struct_array().combine_chunks()


def _shape(space: Mapping[str, Any], declared: str | None) -> Sequence[int]:
    """Returns the shape of one row of numbers, which Arrow has flat: from the space, or from the metadata of infos."""
    if declared is not None:
        return [int(size) for size in declared.split(",") if size]
    many = space.get("n")
    return (
        space["shape"]
        if "shape" in space
        else np.shape(space["nvec"])
        if "nvec" in space
        else many
        if isinstance(many, list)
        else [-1]
    )


def _arrow_leaves(array: Any, prefix: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yields path, array and declared shape of every leaf of a struct."""
    for i, field in enumerate(array.type):
        column = array.field(i)
        if str(column.type).startswith("struct<"):
            yield from _arrow_leaves(column, f"{prefix}{field.name}/")
        else:
            declared = (field.metadata or {}).get(b"shape")
            yield f"{prefix}{field.name}", column, None if declared is None else declared.decode()
