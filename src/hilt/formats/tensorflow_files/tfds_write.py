"""RLDS written: a folder that ``tensorflow_datasets.builder_from_directory`` opens. One episode is one record.

    features.json  dataset_info.json  metadata.json  NAME-train.tfrecord-00000-of-00002  ...

Numbers are stored exactly: a list in a record holds float32 or int64, so other floats go as
bytes. Images are PNG unless asked otherwise. What RLDS has no place for (facts, sources, ends)
lies in the metadata and in further columns of the steps.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.files import DISK, read
from hilt.core.platform import usable_cpus
from hilt.core.tree import Array, flatten, unflatten
from hilt.formats import images
from hilt.formats.episodes import Episode
from hilt.formats.steps import to_steps
from hilt.formats.tensorflow_files.example import encode
from hilt.formats.tensorflow_files.tfrecord import RecordWriter
from hilt.formats.units import FolderWriter

SHARD_BYTES = 128 << 20
LARGE_BYTES = 1024
"""Integer columns with at least this number of bytes per step are compressed."""
FILE_NAMES = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
"""Of the files of a split, as TFDS has them."""
_CLASS = "tensorflow_datasets.core.features."
_AS_BYTES = ("float16", "float64", "bfloat16", "complex64", "complex128")
_COMPRESSED = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64")
_AS_NUMBERS = ("float32", "uint32", "uint64", *_COMPRESSED)
_DEFAULTS = {"string": b"", "bool": False, "int64": 0, "float64": 0.0}

Kind = list[Any]
"""Of a feature: how it is stored (none, bytes, zlib, png, jpeg, text), its dtype, and its shape."""


def create(
    path: Path,
    *,
    name: str = "episodes",
    version: str = "1.0.0",
    shard_bytes: int = SHARD_BYTES,
    image_format: str = "png",
) -> TfdsWriter:
    """`name` and `version` are the dataset's for TFDS; `shard_bytes` is about how large a file becomes;
    `image_format` is png, which keeps every bit, or jpeg."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"name={name!r}: TFDS takes small letters, digits and '_', and a letter first.")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ConfigError(f"version={version!r}: expected three numbers, such as 1.0.0.")
    if image_format not in ("png", "jpeg"):
        raise ConfigError(f"image_format={image_format!r}: expected png or jpeg.")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes}: expected at least 1.")
    return TfdsWriter(
        path, {"name": name, "version": version, "shard_bytes": shard_bytes, "image_format": image_format}
    )


class TfdsWriter(FolderWriter):
    """A file of records that is complete gets a line in a journal; whatever comes
    after the last line is written again."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        super().__init__(path)
        self._settings = settings
        self._features: dict[str, Kind] = {}
        self._shards: list[dict[str, int]] = []
        self._shard: RecordWriter | None = None
        self._pool = ThreadPoolExecutor(usable_cpus(), "hilt-encode")
        for line in self._lines:
            if line.get("settings", settings) != settings:
                raise ConfigError(
                    f"{path}: it was begun with {line['settings']}, and is to go on with "
                    f"{settings}. Give the same options."
                )
            self._features = line.get("features", self._features)
            self._shards += [line["shard"]] if "shard" in line else []

    def _jobs_done(self) -> int:
        return int(json.loads(read(self._path / "metadata.json"))["hilt"]["next"])

    def _add(self, number: int, episode: Episode) -> None:
        if (split := episode.facts.get("split", "train")) != "train":
            self.notes.add(f"split {split}: all episodes are written as one split, train")
        for piece in to_steps(episode, self.notes):
            record = self._record(flatten({"steps": piece["steps"].columns}), piece["episode_metadata"])
            if self._shard is None:
                self._shard = RecordWriter(self._part(len(self._shards)))
            self._shard.add(record)
        self.next = number + 1
        if self._shard is not None and self._shard.size >= self._settings["shard_bytes"]:
            self._end_unit()

    def _finish(self) -> None:
        self._end_unit()
        if not self._shards:
            raise ConfigError(
                "there is not one episode with a transition to write; look at the source with: hilt data inspect"
            )
        for i in range(len(self._shards)):
            if self._part(i).exists():
                DISK.rename(
                    self._part(i),
                    self._path / f"{self._settings['name']}-train.tfrecord-{i:05}-of-{len(self._shards):05}",
                )
        DISK.sync_folder(self._path)
        split = {
            "name": "train",
            "filepathTemplate": FILE_NAMES,
            "numBytes": str(sum(shard["bytes"] for shard in self._shards)),
            "shardLengths": [str(shard["records"]) for shard in self._shards],
        }
        info = {
            "name": self._settings["name"],
            "version": self._settings["version"],
            "fileFormat": "tfrecord",
            "splits": [split],
        }
        features = _described(unflatten(self._features))
        inner = features["featuresDict"]["features"]
        inner["steps"] = _feature("dataset_feature.Dataset", "sequence", {"feature": inner["steps"], "length": "-1"})
        for file, content in (
            ("features", features),
            ("dataset_info", info),
            ("metadata", {"hilt": {"next": self.next}}),
        ):
            DISK.replace(self._path / f"{file}.json", json.dumps(content, indent=1, sort_keys=True).encode())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._shard is not None:
            self._shard.close()
        super().close()

    def _record(self, columns: dict[str, Any], metadata: Mapping[str, Any]) -> bytes:
        """A serialized example. The first one decides which features there are."""
        given = {path: kind_of(path, column, self._settings["image_format"]) for path, column in columns.items()}
        if not self._features:
            known = {
                f"episode_metadata/{name}": _metadata_kind(value)
                for name, value in metadata.items()
                if name.isidentifier()
            }
            self._features = {**given, **{path: kind for path, kind in known.items() if kind is not None}}
            self._commit(settings=self._settings, features=self._features)
        wanted = {path: kind for path, kind in self._features.items() if path.startswith("steps/")}
        if given != wanted:
            differing = [path for path in {**wanted, **given} if given.get(path) != wanted.get(path)]
            differ = [
                f"{path}: expected {_shown(wanted.get(path))}, got {_shown(given.get(path))}" for path in differing
            ]
            raise SchemaError(
                "not as in the episodes before, and all steps of a dataset have the same "
                f"features: {'; '.join(differ)}."
            )
        if any(kind == "jpeg" for kind, _, _ in given.values()):
            self.notes.add("images were stored as JPEG, which changes them a little")
        record = {path: self._encoded(column, given[path][0]) for path, column in columns.items()}
        for path, (kind, dtype, _) in self._features.items():
            if path not in columns:
                value = metadata.get(path.split("/")[1])
                value = value if _metadata_kind(value) == [kind, dtype, []] else _DEFAULTS[dtype]
                value = value.encode() if isinstance(value, str) else value
                record[path] = [value] if kind == "text" else self._encoded(np.array([value], dtype), kind)
        return encode(record)

    def _encoded(self, column: Any, kind: str) -> Any:
        if kind in ("png", "jpeg"):
            return list(self._pool.map(partial(images.encode, format=kind), column))
        if kind == "zlib":
            return list(self._pool.map(lambda row: zlib.compress(row.tobytes()), column))
        return column if kind == "none" else [row if kind == "text" else row.tobytes() for row in column]

    def _part(self, number: int) -> Path:
        """A file of records, as long as it is not known of how many it is one."""
        return self._path / f".shard-{number:05}"

    def _end_unit(self) -> None:
        if self._shard is not None:
            self._shard.sync()
            self._shard.close()
            DISK.sync_folder(self._path)
            self._shards.append({"records": self._shard.records, "bytes": self._shard.size})
            self._commit(shard=self._shards[-1])
            self._shard = None


def kind_of(path: str, column: Array, image_format: str) -> Kind:
    """How a column of the steps is stored."""
    name, shape = column.dtype.name, list(column.shape[1:])
    if column.dtype == object:
        return ["text", "string", []]
    if name == "uint8" and len(shape) == 3 and shape[2] in (1, 3, 4) and all(shape):
        return [image_format if shape[2] < 4 else "png", name, shape]
    if name in _AS_BYTES or (name in _COMPRESSED and not all(shape)):
        return ["bytes", name, shape]
    if name in _COMPRESSED and column[0].nbytes >= LARGE_BYTES:
        return ["zlib", name, shape]
    if name not in _AS_NUMBERS or not all(shape):
        raise SchemaError(f"{path}: TFDS has no way to store {name} {tuple(shape)}.")
    return ["none", name, shape]


def _metadata_kind(value: Any) -> Kind | None:
    if isinstance(value, (bytes, str)):
        return ["text", "string", []]
    if isinstance(value, bool):
        return ["none", "bool", []]
    if isinstance(value, int):
        return ["none", "int64", []] if -(2**63) <= value < 2**63 else None
    return ["bytes", "float64", []] if isinstance(value, float) else None


def _described(feature: Any) -> dict[str, Any]:
    """A feature, or nested ones, in the form of features.json."""
    if isinstance(feature, dict):
        return _feature(
            "features_dict.FeaturesDict",
            "featuresDict",
            {"features": {name: _described(feature[name]) for name in feature}},
        )
    kind, dtype, shape = feature
    sizes = {"dimensions": [str(size) for size in shape]} if shape else {}
    if kind == "text":
        return _feature("text_feature.Text", "text", {})
    if kind in ("png", "jpeg"):
        return _feature("image_feature.Image", "image", {"dtype": dtype, "encodingFormat": kind, "shape": sizes})
    name = "tensor_feature.Tensor" if shape or kind != "none" else "scalar.Scalar"
    return _feature(name, "tensor", {"dtype": dtype, "encoding": kind, "shape": sizes})


def _feature(name: str, key: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"pythonClassName": f"{_CLASS}{name}", key: content}


def _shown(kind: Kind | None) -> str:
    return "nothing" if kind is None else f"{kind[1]} {tuple(kind[2])}"
