"""Reads `features.json` of a TFDS dataset, and decodes records accordingly.

A record is flat: a feature lies under its path. Inside a sequence its values lie one after the
other; inside several sequences they lie under ``path/ragged_flat_values``, and the lengths of the
inner ones under ``path/ragged_row_lengths_0`` and so on.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hilt.core.errors import CorruptError, FormatError
from hilt.core.files import read
from hilt.core.tree import Array, flatten, unflatten
from hilt.formats import images
from hilt.formats.episodes import StoredSteps, map_leaves
from hilt.formats.tensorflow_files import example
from hilt.replay.sampling.batch_memory import RecentMemory

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")},
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "string": np.dtype(object),
    "object": np.dtype(object),
}
DEPTH_LIMIT = 32
"""Features inside features."""
SIZE_LIMIT = 1 << 32
"""Elements of one tensor or image."""
INFLATED_LIMIT = 1 << 30
"""Bytes of one tensor whose size is not declared."""


@dataclass(frozen=True)
class Leaf:
    """A feature without others inside: a tensor, a text (a tensor of bytes) or an image."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] = ()
    encoding: str = "none"
    """How a tensor is stored: ``none`` as a list of numbers, ``bytes``, ``zlib``; an image: ``image``"""
    memory: RecentMemory = field(default_factory=RecentMemory, compare=False, repr=False)
    """For decoded images: filling fresh memory costs a tenth of the decoding"""


@dataclass(frozen=True)
class Many:
    """A sequence, or a nested dataset."""

    feature: Feature
    length: int | None
    steps: bool
    """Whether it is a nested dataset, as the steps of an episode are"""


Feature = Leaf | Many | dict[str, Any]
TEXT = Leaf(DTYPES["string"])
_CLASSES = {
    "featuresDict": "FeaturesDict",
    "sequence": "Sequence",
    "tensor": "Tensor",
    "classLabel": "ClassLabel",
    "image": "Image",
    "video": "Video",
    "audio": "Audio",
    "boundingBox": "BBoxFeature",
    "text": "Text",
    "translation": "Translation",
}
"""The classes of tfds.features, by the key that holds their content."""
Fields = Mapping[str, example.Values]


@dataclass(frozen=True)
class Features:
    """The features of a dataset."""

    tree: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)
    """By path: features that cannot be read, and why"""

    @classmethod
    def load(cls, path: Path) -> Features:
        try:
            data = json.loads(read(path))
            left_out: dict[str, str] = {}
            tree = _parsed(data, "", left_out)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise FormatError(
                f"{path}: not the features of a TFDS dataset ({type(error).__name__}: {error}). Restore the file."
            ) from error
        if not isinstance(tree, dict):
            raise FormatError(f"{path}: expected a FeaturesDict at the top, got {data.get('pythonClassName')}.")
        return cls(tree, left_out)

    def decode(self, record: bytes | memoryview) -> dict[str, object]:
        """A record as nested dictionaries of arrays and bytes, with `StoredSteps` for nested datasets."""
        result: dict[str, Any] = _decode(self.tree, example.decode(record), "", ())
        return result

    def without_images(self) -> Features:
        return replace(self, tree=_without_images(self.tree))


def _decode(feature: Feature, fields: Fields, path: str, levels: tuple[int | None, ...]) -> Any:
    """A feature of a record. `levels` are the declared lengths of the sequences around it."""
    if isinstance(feature, dict):
        return {
            name: _decode(inner, fields, f"{path}/{name}" if path else name, levels) for name, inner in feature.items()
        }
    if isinstance(feature, Many):
        values = _decode(feature.feature, fields, path, (*levels, feature.length))
        return _steps(values, path) if feature.steps and not levels and isinstance(values, dict) else values
    try:
        flat, rows = _fetched(feature, fields, path, levels)
        if not levels and len(flat) != 1:
            raise CorruptError(f"expected one value, got {len(flat)}.")
        return _nested(flat, rows, levels) if levels else flat[0]
    except ValueError as error:
        raise CorruptError(f"feature {path!r}: {error}") from error


def _steps(columns: dict[str, Any], path: str) -> StoredSteps:
    lengths = {name: len(column) for name, column in flatten(columns).items() if 0 not in column.shape[1:]}
    first = next(iter(lengths), "")
    for name in lengths:
        if lengths[name] != lengths[first]:
            raise CorruptError(
                f"features of {path!r}: {first!r} has {lengths[first]} steps and {name!r} has {lengths[name]}."
            )
    # The size of an array whose elements have no size does not determine their number.
    return StoredSteps(
        map_leaves(
            lambda c: np.empty((lengths.get(first, 0), *c.shape[1:]), c.dtype) if 0 in c.shape[1:] else c, columns
        )
    )


def _fetched(leaf: Leaf, fields: Fields, path: str, levels: tuple[int | None, ...]) -> tuple[Array, list[Array]]:
    """All values of a leaf, one after the other and decoded, and the lengths of rows that they form."""
    if leaf.shape.count(None) > 1 and leaf.encoding != "image":
        sizes, _ = _raw(fields, f"{path}/shape", levels)
        values, rows = _raw(fields, f"{path}/value", levels)
        shapes = _numbers(sizes, np.dtype(np.int64)).reshape(-1, len(leaf.shape)).tolist()
        if len(shapes) != len(values):
            raise CorruptError(f"{len(values)} tensors and {len(shapes)} shapes.")
        return _uniform(
            [_inflated(value, leaf, shape) for value, shape in zip(values, shapes, strict=True)], leaf
        ), rows
    values, rows = _raw(fields, path, levels)
    if leaf.encoding == "none":
        return _shaped(_numbers(values, leaf.dtype), leaf.shape, bool(levels)), rows
    if isinstance(values, np.ndarray):
        raise CorruptError(f"expected bytes, got numbers of {values.dtype}.")
    if leaf.encoding == "image":
        return images.decode_all(values, leaf.shape, leaf.dtype, memory=leaf.memory), rows
    return _uniform([_inflated(value, leaf, leaf.shape) for value in values], leaf), rows


def _shaped(numbers: Array, shape: tuple[int | None, ...], several: bool) -> Array:
    """Numbers as tensors of this shape, one after the other."""
    size = math.prod(size for size in shape if size is not None)
    if None in shape and several:
        raise CorruptError("an unknown dimension inside a sequence, which TFDS cannot read either.")
    count = len(numbers) // size if size and several else 0 if several else 1
    return numbers.reshape(count, *(-1 if size is None else size for size in shape))


def _raw(fields: Fields, path: str, levels: tuple[int | None, ...]) -> tuple[example.Values, list[Array]]:
    """The values of a field as they are stored, and the lengths of rows."""
    if len(levels) < 2:
        if path not in fields and None not in levels:
            raise CorruptError("it is missing.")
        return fields.get(path, []), []
    rows = [
        _numbers(fields.get(f"{path}/ragged_row_lengths_{i}", []), np.dtype(np.int64)) for i in range(len(levels) - 1)
    ]
    return fields.get(f"{path}/ragged_flat_values", []), rows


def _numbers(values: example.Values, dtype: np.dtype[Any]) -> Array:
    """A list of a record in the dtype of its feature."""
    given = "bytes" if isinstance(values, list) else values.dtype.name
    if len(values) and (given == "bytes", given == "int64") != (dtype.kind == "O", dtype.kind in "biu"):
        raise CorruptError(f"expected {'bytes' if dtype.kind == 'O' else dtype}, got {given}.")
    if isinstance(values, list):
        return np.fromiter(map(bytes, values), dtype)
    with np.errstate(over="ignore"):  # too large for float16: infinite, as it is there
        return values.astype(dtype, copy=False)


def _inflated(value: Any, leaf: Leaf, shape: Sequence[int | None]) -> Array:
    """A tensor that is stored as bytes, compressed or not."""
    sizes = [size for size in shape if size is not None]
    room = math.prod(sizes) * leaf.dtype.itemsize
    if min(sizes, default=0) < 0 or (None in leaf.shape and room > INFLATED_LIMIT):
        raise CorruptError(f"a tensor of shape {list(shape)}.")
    if leaf.encoding == "zlib":
        unpacker = zlib.decompressobj()
        try:
            value = unpacker.decompress(value, (INFLATED_LIMIT if None in shape else room) + 1)
        except zlib.error as error:
            raise CorruptError(f"not a compressed tensor ({error}).") from error
        if not unpacker.eof:
            raise CorruptError("a compressed tensor was cut off, or is larger than its shape.")
    if len(value) != room and (None not in shape or not room or len(value) % room):
        raise CorruptError(f"{len(value)} bytes for a tensor of {leaf.dtype} and shape {list(shape)}.")
    array = np.frombuffer(value, np.uint8) != 0 if leaf.dtype == bool else np.frombuffer(value, leaf.dtype)
    return array.reshape([-1 if size is None else size for size in shape])


def _uniform(arrays: list[Array], leaf: Leaf) -> Array:
    """Arrays side by side, as objects where a shape may differ from step to step."""
    if None not in leaf.shape:
        return np.stack(arrays) if arrays else np.empty((0, *leaf.shape), leaf.dtype)  # type: ignore[arg-type]
    return np.fromiter(arrays, object)


def _nested(flat: Array, rows: list[Array], levels: tuple[int | None, ...]) -> Array:
    """Values as rows, and rows of rows. Where the length is declared they are one array, else an array of objects."""
    for lengths, declared in zip(reversed(rows), reversed(levels[1:]), strict=True):
        if (lengths.size and (lengths.min() < 0 or lengths.max() > len(flat))) or lengths.sum() != len(flat):
            raise CorruptError(f"rows of {lengths.sum()} values in all, and {len(flat)} values.")
        if declared is not None:
            if (lengths != declared).any():
                raise CorruptError(f"rows of other lengths than the declared {declared}.")
            flat = flat.reshape(len(lengths), declared, *flat.shape[1:])
            continue
        ends = zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True)
        flat = np.fromiter([flat[end - length : end] for end, length in ends], object)
    if levels[0] is not None and len(flat) != levels[0]:
        raise CorruptError(f"expected {levels[0]} values, got {len(flat)}.")
    return flat


def _parsed(data: Any, path: str, left_out: dict[str, str], depth: int = 0) -> Feature | None:
    """A feature from JSON, in the form of today or in that of before 2022 (``type``
    and ``content``). None if it cannot be read."""
    if depth > DEPTH_LIMIT:
        raise ValueError(f"more than {DEPTH_LIMIT} features inside features")
    name = str(data.get("pythonClassName", data.get("type", "")))
    known = next((key for key in _CLASSES if key in data), "")
    kind, content = _CLASSES.get(known, name.rsplit(".", 1)[-1]), data[known] if known else data.get("content")
    content = json.loads(content) if isinstance(content, str) else content or {}

    def inside(inner: object, step: str = "") -> Feature | None:
        return _parsed(inner, f"{path}/{step}".strip("/"), left_out, depth + 1)

    if kind == "FeaturesDict":
        entries = content.get("features", {}) if known or "proto_cls" in data else content
        parsed = {str(key): inside(inner, str(key)) for key, inner in entries.items()}
        return unflatten({key: inner for key, inner in parsed.items() if inner is not None})
    if kind in ("Sequence", "Dataset"):
        inner, length = inside(content["feature"]), content.get("length")
        return None if inner is None else Many(inner, _size(length), name.endswith(".Dataset"))
    if kind.startswith("Translation"):
        several = content.get("variableLanguagesPerExample") or kind.endswith("VariableLanguages")
        return (
            Many({"language": TEXT, "translation": TEXT}, None, False)
            if several
            else dict.fromkeys(content["languages"], TEXT)
        )
    found = _leaf(kind, content)
    frames = found.shape[:1] if found and kind == "Video" else ()
    found = replace(found, shape=found.shape[1:]) if found and frames else found
    numbers = f" with numbers of {content['dtype']}" if content.get("dtype") else ""
    why = (
        _unreadable(found, content)
        if found
        else f"a feature of class {name or 'unknown'}{numbers}, which is not supported"
    )
    if why:
        left_out[path] = why
        return None
    return Many(found, frames[0], False) if found and frames else found


def _leaf(kind: str, content: Mapping[str, Any]) -> Leaf | None:
    shape = content.get("shape") or ()
    shape = tuple(_size(size) for size in (shape.get("dimensions", ()) if isinstance(shape, dict) else shape))
    dtype = str(content.get("dtype") or "").removeprefix("tf.")
    if dtype and dtype not in DTYPES:
        return None
    if kind in ("Image", "LabeledImage", "Video"):
        default = (None, None, None, 3)[kind != "Video" :] if kind != "LabeledImage" else (None, None, 1)
        return Leaf(DTYPES[dtype or "uint8"], shape or default, "image")
    if kind in ("Tensor", "Scalar", "Audio"):
        return Leaf(DTYPES[dtype or "int64"], shape, str(content.get("encoding") or "none").lower())
    return {"Text": TEXT, "ClassLabel": Leaf(DTYPES["int64"]), "BBoxFeature": Leaf(DTYPES["float32"], (4,))}.get(kind)


def _size(size: Any) -> int | None:
    return None if size is None or int(size) < 0 else int(size)


def _unreadable(leaf: Leaf, content: Mapping[str, Any]) -> str:
    if content.get("lazyDecode") or content.get("lazy_decode"):
        return "audio that is stored as files, which is not supported"
    if math.prod(size or 1 for size in leaf.shape) > SIZE_LIMIT:
        return f"a tensor of shape {leaf.shape}, which is too large"
    if leaf.encoding == "image":
        known = len(leaf.shape) == 3 and (
            leaf.dtype in (np.uint8, np.uint16) or (leaf.dtype == np.float32 and leaf.shape[2] == 1)
        )
        return "" if known else f"images of {leaf.dtype} and shape {leaf.shape}, which are not supported"
    if leaf.encoding not in ("none", "bytes", "zlib") or (leaf.encoding != "none" and leaf.dtype == object):
        return f"a tensor of {leaf.dtype} in the encoding {leaf.encoding!r}, which is not supported"
    if leaf.encoding == "none" and (leaf.dtype.kind == "c" or leaf.shape.count(None) > 1):
        return f"a tensor of {leaf.dtype} and shape {leaf.shape}, which TFDS cannot read either"
    return ""


def _without_images(feature: Any) -> Any:
    if isinstance(feature, dict):
        kept = {name: _without_images(inner) for name, inner in feature.items()}
        return {name: inner for name, inner in kept.items() if inner is not None}
    if isinstance(feature, Many):
        inner = _without_images(feature.feature)
        return None if inner is None else replace(feature, feature=inner)
    return None if feature.encoding == "image" else feature
