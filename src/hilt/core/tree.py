"""Nested arrays and their specification.

A tree is a nested mapping whose leaves are arrays: ``{"observations": {"state": a}, "actions": b}``. A leaf's path
joins its keys with slashes, ``observations/state``. A `Spec` lists the leaves a tree must have and names, by path,
whatever is wrong with one that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, suggest

Array = npt.NDArray[Any]
"""An array of any element type and shape."""
Tree: TypeAlias = Mapping[str, "Tree | npt.ArrayLike"]
"""A nested mapping whose leaves are arrays, or whatever numpy makes arrays of: numbers, text, lists of them."""
Observation: TypeAlias = "Tree | npt.ArrayLike"
"""What an environment returns as its observation: a tree, or one array."""
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value that JSON can hold."""
JsonObject: TypeAlias = dict[str, Json]
"""A JSON object: a record of a file, or a message."""


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by path, in order."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise SchemaError(
                f"{prefix or 'the tree'} has the key {key!r}; keys are non-empty strings without '/'. Rename it."
            )
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            leaves.update(flatten(value, path))
        else:
            leaves[path] = value
    return leaves


def unflatten(leaves: Mapping[str, object]) -> dict[str, Any]:
    """The nested dictionary that `flatten` came from."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        if "/" not in path and path not in tree and not isinstance(value, dict):
            tree[path] = value
            continue
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise SchemaError(f"{parent}: a field and a subtree of the same name. Rename one of them.")
        if name in node:
            raise SchemaError(f"{path}: a field and a subtree of the same name. Rename one of them.")
        node[name] = unflatten(value) if isinstance(value, dict) else value
    return tree


def equal(a: Array, b: Array) -> bool:
    """Whether two arrays hold the same bytes in the same shape: NaN equals itself, 0.0 and -0.0 differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    words = 8 if a.nbytes % 8 == 0 else 1
    if a.flags.c_contiguous and b.flags.c_contiguous and a.ndim:
        kind: Any = np.int64 if words == 8 else np.uint8
        return bool(np.array_equal(a.reshape(-1).view(kind), b.reshape(-1).view(kind)))
    return a.tobytes() == b.tobytes()


class ArraySpecJson(TypedDict):
    """An `ArraySpec` in a JSON file."""

    dtype: str
    shape: list[int]
    finite: bool
    default: float | int | bool | None


@dataclass(frozen=True)
class ArraySpec:
    """What one leaf must be."""

    dtype: np.dtype[Any]
    """The exact element type."""
    shape: tuple[int, ...] = ()
    """The exact shape, without time and batch axes."""
    finite: bool = False
    """Whether NaN and infinities are refused."""
    default: float | int | bool | None = None
    """The value a log's older steps get when it gains this column; None when the column was there from the start."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if self.dtype.hasobject:
            raise ConfigError(
                f"dtype {self.dtype} cannot be stored: a column holds numbers, booleans or fixed-size bytes."
            )
        if any(n < 0 for n in self.shape):
            raise ConfigError(f"shape {self.shape} has a negative axis; give every axis its exact size.")
        if self.default is not None:
            object.__setattr__(self, "default", _checked_default(self.default, self.dtype))

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def check_column(self, path: str, values: Array) -> Array:
        """``[n, ...]`` values of this leaf, converted from another width of the same
        kind; what does not fit is named by path."""
        if values.dtype != self.dtype or values.shape[1:] != self.shape:
            values = _coerce(path, values, self, (*values.shape[:1], *self.shape), cast=True)
        if self.finite:
            _check_finite(path, values)
        return values

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    def to_json(self) -> ArraySpecJson:
        return {"dtype": self.dtype.str, "shape": list(self.shape), "finite": self.finite, "default": self.default}

    @classmethod
    def from_json(cls, data: ArraySpecJson) -> ArraySpec:
        return cls(np.dtype(data["dtype"]), tuple(data["shape"]), bool(data["finite"]), data["default"])


class Spec(Mapping[str, ArraySpec]):
    """The leaves of a tree, by path, and the check that a tree has exactly these."""

    def __init__(self, leaves: Mapping[str, Any]):
        given = flatten(unflatten(leaves))
        self._leaves = {path: spec if isinstance(spec, ArraySpec) else ArraySpec(*spec) for path, spec in given.items()}
        self._keys = [
            (path, tuple(path.split("/")), spec, spec.dtype, spec.shape) for path, spec in self._leaves.items()
        ]
        self._sizes = _node_sizes(self._leaves)
        self._nodes = [
            (tuple(node.split("/")) if node else (), size, self._leaves_of(node)) for node, size in self._sizes.items()
        ]

    @classmethod
    def of(cls, example: Tree, leading: int = 0) -> Spec:
        """The spec that an example fits, not counting its first `leading` axes."""
        return cls({path: _spec_of(path, x, leading) for path, x in flatten(example).items()})

    def __getitem__(self, path: str) -> ArraySpec:
        try:
            return self._leaves[path]
        except KeyError:
            raise MissingFieldError(
                f"{path}: no such field{suggest(path, self._leaves)} Fields: {', '.join(self._leaves)}."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, path: object) -> bool:
        return path in self._leaves

    def check(self, tree: Tree, cast: bool = False) -> list[Array]:
        """The leaves of one element, checked, in the spec's order.

        Python and numpy scalars are taken for leaves of shape ``()`` of their kind. With `cast`, arrays of another
        width of the same kind are converted (float64 for float32), as the familiar buffers do.
        """
        out: list[Any] = [None] * len(self._leaves)
        try:
            for parents, size, leaves in self._nodes:
                node: Any = tree
                for key in parents:
                    node = node[key]
                if len(node) != size:
                    raise KeyError
                for name, place, path, spec, dtype, shape in leaves:
                    value = node[name]
                    if not isinstance(value, _ARRAYS) or value.dtype != dtype or value.shape != shape:
                        value = _coerce(path, value, spec, shape, cast)
                    if spec.finite:
                        _check_finite(path, value)
                    out[place] = value
        except (KeyError, TypeError, IndexError):
            self._check_names(tree)
            raise
        return out

    def match(self, tree: Tree) -> list[Array] | None:
        """The leaves of a tree that has exactly these names, types and shapes; None for any other tree."""
        out: list[Any] = [None] * len(self._leaves)
        try:
            for parents, size, leaves in self._nodes:
                node: Any = tree
                for key in parents:
                    node = node[key]
                if len(node) != size:
                    return None
                for name, place, _, _, dtype, shape in leaves:
                    value = node[name]
                    if not isinstance(value, _ARRAYS):
                        value = np.asarray(value)
                    if value.dtype != dtype or value.shape != shape:
                        return None
                    out[place] = value
        except (KeyError, TypeError, IndexError, ValueError):
            return None
        return out

    def check_batch(self, tree: Tree, leading: int, cast: bool = False) -> tuple[tuple[int, ...], list[Array]]:
        """Does what `check` does for leaves that all have the same `leading` first
        axes; those axes are returned too."""
        axes: tuple[int, ...] | None = None
        first, out = "", []
        for path, keys, spec, _, _ in self._keys:
            node: Any = tree
            try:
                for key in keys:
                    node = node[key]
            except (KeyError, TypeError, IndexError):
                raise self._missing(path, tree) from None
            node = _as_array(path, node, spec)
            if axes is None:
                axes, first = node.shape[:leading], path
                if len(axes) < leading:
                    raise SchemaError(
                        f"{path}: expected {leading} leading axes before {spec.shape}, got shape {node.shape}."
                    )
            if node.shape[:leading] != axes and node.shape[leading:] == spec.shape:
                raise SchemaError(f"{path}: expected leading axes {axes} as {first} has, got {node.shape[:leading]}.")
            if node.dtype != spec.dtype or node.shape != axes + spec.shape:
                node = _coerce(path, node, spec, axes + spec.shape, cast)
            if spec.finite:
                _check_finite(path, node)
            out.append(node)
        self._check_names(tree)
        return axes or (), out

    def difference(self, other: Spec) -> list[str]:
        """What changes from this spec to the other, one line per leaf."""
        lines = [f"{p}: removed (was {self[p]})" for p in self if p not in other]
        lines += [f"{p}: added ({other[p]})" for p in other if p not in self]
        for path in [p for p in self if p in other]:
            ours, theirs = self[path], other[path]
            if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
                lines.append(f"{path}: {ours} became {theirs}")
            if ours.finite != theirs.finite:
                lines.append(f"{path}: finite={ours.finite} became finite={theirs.finite}")
            if ours.default is not None and theirs.default is not None and ours.default != theirs.default:
                lines.append(f"{path}: default {ours.default} became {theirs.default}")
        return lines

    def to_json(self) -> dict[str, ArraySpecJson]:
        return {path: spec.to_json() for path, spec in self._leaves.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, ArraySpecJson]) -> Spec:
        return cls({path: ArraySpec.from_json(spec) for path, spec in data.items()}) if data else cls({})

    def _missing(self, path: str, tree: Tree) -> MissingFieldError:
        strangers = [p for p in flatten(tree) if p not in self._leaves]
        return MissingFieldError(
            f"{path}: expected {self._leaves[path]}, got nothing{suggest(path, strangers)} Add this field."
        )

    def _leaves_of(self, node: str) -> list[tuple[str, int, str, ArraySpec, np.dtype[Any], tuple[int, ...]]]:
        """(name, place, path, spec, its dtype, its shape) of the leaves right below an inner node."""
        found = []
        for place, (path, spec) in enumerate(self._leaves.items()):
            parent, _, name = path.rpartition("/")
            if parent == node:
                found.append((name, place, path, spec, spec.dtype, spec.shape))
        return found

    def _check_names(self, tree: Tree) -> None:
        for path, keys, *_ in self._keys:
            node: Any = tree
            try:
                for key in keys:
                    node = node[key]
            except (KeyError, TypeError, IndexError):
                raise self._missing(path, tree) from None
        self._check_extra(tree)

    def _check_extra(self, tree: Tree) -> None:
        stack: list[tuple[str, Any]] = [("", tree)]
        while stack:
            prefix, node = stack.pop()
            if len(node) != self._sizes[prefix]:
                extra = next(p for p in _ends(tree) if p not in self._leaves)
                raise SchemaError(
                    f"{extra}: not a field of this schema{suggest(extra, self._leaves)} Remove it or declare it."
                )
            for key, value in node.items():
                if not isinstance(value, (np.ndarray, np.generic)) and isinstance(value, Mapping):
                    stack.append((f"{prefix}/{key}" if prefix else key, value))


def _node_sizes(leaves: Mapping[str, ArraySpec]) -> dict[str, int]:
    """How many keys each inner node of the tree has, by its path."""
    children: dict[str, set[str]] = {"": set()}
    for path in leaves:
        prefix = ""
        for key in path.split("/"):
            children.setdefault(prefix, set()).add(key)
            prefix = f"{prefix}/{key}" if prefix else key
    return {prefix: len(keys) for prefix, keys in children.items()}


_ARRAYS = (np.ndarray, np.generic)


def _ends(tree: Tree, prefix: str = "") -> Iterator[str]:
    """The paths at which a tree ends: its leaves, and mappings without keys."""
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _ends(value, path)
        else:
            yield path


def _spec_of(path: str, value: Any, leading: int) -> ArraySpec:
    try:
        given = np.asarray(value)
        return ArraySpec(given.dtype, given.shape[leading:])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _checked_default(default: Any, dtype: np.dtype[Any]) -> Any:
    """The default as a plain value, when a column of this type can hold it."""
    given = np.asarray(default)
    fits = given.shape == () and given.dtype.kind in _SCALAR_KINDS.get(dtype.kind, dtype.kind)
    if fits and dtype.kind in "iu":
        fits = bool(np.iinfo(dtype).min <= given <= np.iinfo(dtype).max)
    if not fits:
        raise ConfigError(f"default {default!r}: expected a value that fits into {dtype}.")
    return given.item()


_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "f", "c": "cf"}
"""Which kinds of array are converted to which kind of column, where casting is asked for."""
_PLAIN = {bool: "b", float: "f"}
"""The kinds of column that plain Python values fit as they are."""
_SCALAR_KINDS = {**_KINDS, "f": "fiu", "c": "cfiu"}
"""The same for single numbers, where a Python 1 is as good as 1.0."""


def _coerce(path: str, value: Any, spec: ArraySpec, shape: tuple[int, ...], cast: bool) -> Array:
    if not shape and _PLAIN.get(type(value)) == spec.dtype.kind and spec.dtype.isnative:
        return spec.dtype.type(value)  # type: ignore[no-any-return]
    if isinstance(value, Mapping):
        raise SchemaError(f"{path}: expected {spec}, got a mapping with {', '.join(map(str, value)) or 'no keys'}.")
    given = _as_array(path, value, spec)
    if given.shape == shape:
        kind, scalar = spec.dtype.kind, given.ndim == 0
        kinds = (_SCALAR_KINDS if scalar else _KINDS).get(kind, "") + ("b" if scalar and cast else "")
        if given.dtype == spec.dtype:
            return given
        if (scalar or cast) and given.dtype.kind in kinds:
            converted = given.astype(spec.dtype)
            if kind in "iu" and not np.array_equal(converted, given):
                misfit = given[converted != given][0]
                raise SchemaError(f"{path}: expected {spec.dtype}, got {misfit}, which does not fit into it.")
            return converted
    cure = f" Convert it with .astype(np.{spec.dtype})." if given.shape == shape else ""
    raise SchemaError(f"{path}: expected {spec.dtype} {shape}, got {given.dtype} {given.shape}.{cure}")


def _as_array(path: str, value: Any, spec: ArraySpec) -> Array:
    try:
        given = np.asarray(value)
    except ValueError:  # lists of uneven length
        given = np.empty(0, object)
    if given.dtype.hasobject:
        raise SchemaError(f"{path}: expected {spec}, got {type(value).__name__}, which is not an array of numbers.")
    return given


def _check_finite(path: str, value: Array) -> None:
    if value.dtype.kind in "fc" and not np.isfinite(value).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        raise SchemaError(
            f"{path}: expected finite numbers, got {value[where]} at {where}. Drop this step or mend its source."
        )
