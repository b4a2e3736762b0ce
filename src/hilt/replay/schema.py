"""What a log stores, and how one step lies in a row.

Small columns lie inside the row. Large ones (images) are frames: stored once in a file of their own, and the row holds
*references*: the frame's number in its segment and its checksum. An observation and the next observation are columns of
one pair; they share a frame file, so that the frame which ends one step and begins the next exists once.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.core.tree import Array, ArraySpec, Spec, Tree, unflatten

if TYPE_CHECKING:
    from gymnasium.spaces import Space

INLINE_BYTES = 1024
"""A column of fewer bytes lies inside the row; a larger one is stored as frames."""
MAX_FILE_NAME_BYTES = 200
"""Of the file of a large column: file systems take 255 bytes, and a file that is being written has a longer name."""
PAIRS = {"observations": "next_observations", "curr_obs": "next_obs"}
"""Which subtree is the next observation of which."""
REFERENCE = np.dtype([("frame", "<i8"), ("crc", "<u4")])
"""A frame by identity: its number in the segment, and the checksum of its bytes."""
BUILT_IN = {
    "terminated": ArraySpec(np.dtype(bool)),
    "truncated": ArraySpec(np.dtype(bool)),
    "source": ArraySpec(np.dtype(np.uint8)),
    "policy_version": ArraySpec(np.dtype(np.int64)),
}
"""Columns that every log has; `terminated` and `truncated` are never merged."""
BUILT_IN_DEFAULTS: dict[str, Any] = {
    "terminated": np.False_,
    "truncated": np.False_,
    "source": np.uint8(0),
    "policy_version": np.int64(-1),
}

FOLLOWS = 1
"""Flag of a row: its observation is the next observation of the step before it in its episode."""


@dataclass(frozen=True)
class Schema:
    """The columns of a log."""

    columns: Spec
    """Every column by path, the built-in ones included."""
    stacked: tuple[str, ...] = ()
    """Observation columns whose first axis is a stack of frames; each frame of the stack is stored once."""

    @classmethod
    def declare(cls, columns: Mapping[str, object], stacked: Sequence[str] = ()) -> Schema:
        """A schema from nested `ArraySpec`s or (dtype, shape) pairs; built-in columns are added."""
        given = Spec(columns)
        if not len(given):
            raise SchemaError("a schema needs at least one column; give {'observations': {...}, 'actions': ...}.")
        for path, spec in BUILT_IN.items():
            if path in given and (given[path].dtype, given[path].shape) != (spec.dtype, spec.shape):
                raise SchemaError(
                    f"{path}: expected {spec}, got {given[path]}: this column is built in. Give yours another name."
                )
        if bad := [p for p in given if p.startswith("#")]:
            raise SchemaError(f"{bad[0]}: names that begin with '#' are Hilt's own. Rename it.")
        _check_names(given)
        merged = {path: given[path] for path in given} | {p: s for p, s in BUILT_IN.items() if p not in given}
        for path in stacked:
            if path not in merged:
                raise UnknownNameError("stacked column", path, given)
        made = cls(Spec(merged), tuple(stacked))
        _check_files(made.layout)
        return made

    @classmethod
    def of(cls, example: Tree, leading: int = 0, stacked: Sequence[str] = ()) -> Schema:
        """The schema of an example step, or of a trajectory with `leading` time and batch axes."""
        return cls.declare(Spec.of(example, leading), stacked)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self)

    @cached_property
    def _selected(self) -> dict[tuple[str, ...], list[str]]:
        """What `select` found before: learners ask for the same columns again and again."""
        return {}

    def grown_from(self, old: Schema) -> list[str]:
        """The columns this schema adds to the old one; any other difference is an error that names it."""
        added = [path for path in self.columns if path not in old.columns]
        lacking = [path for path in added if self.columns[path].default is None]
        changed = [line for line in old.columns.difference(self.columns) if not line.split(": ")[1].startswith("added")]
        changed += [f"{path}: added without a default" for path in lacking]
        if old.stacked != self.stacked:
            changed.append(f"stacked: {old.stacked} became {self.stacked}")
        if changed:
            rule = "A log may gain columns that have a default; for anything else begin a new log."
            raise SchemaError(f"this log has another schema: {'; '.join(changed)}. {rule}")
        return added

    def complete(self, tree: Tree) -> dict[str, Any]:
        """The tree with defaults for the built-in columns that it leaves out."""
        return {**BUILT_IN_DEFAULTS, **tree}

    def complete_batch(self, trajectory: Tree) -> Tree:
        """The same of a whole trajectory, whose leaves have time and batch axes."""
        absent = [name for name in BUILT_IN_DEFAULTS if name not in trajectory]
        if not absent:
            return dict(trajectory)
        first: Any = trajectory
        while isinstance(first, Mapping):
            first = next(iter(first.values()), np.zeros((0, 0)))
        axes = np.shape(first)[:2]
        return {
            **trajectory,
            **{name: np.full(axes, BUILT_IN_DEFAULTS[name], self.columns[name].dtype) for name in absent},
        }

    def check(self, tree: Tree, cast: bool = False) -> list[Array]:
        """The leaves of a step, in the order of the columns; the built-in ones that it leaves out are added."""
        leaves = self.columns.check(self.complete(tree), cast)
        if leaves[self._source] >= len(Source):
            check_sources(leaves[self._source])
        return leaves

    def check_batch(self, tree: Tree) -> tuple[tuple[int, ...], list[Array]]:
        """The same of a whole trajectory with all of its columns, and its shape (T, B)."""
        shape, leaves = self.columns.check_batch(tree, leading=2)
        check_sources(leaves[self._source])
        return shape, leaves

    def check_values(self, column: str, values: object) -> Array:
        """Values for steps in a small column, ``[n, ...]``, as the column has them; others are refused."""
        if column not in self.layout.inline:
            raise UnknownNameError("column of numbers", column, self.layout.inline)
        spec, given = self.columns[column], np.asarray(values)
        if not given.ndim or given.shape[1:] != spec.shape:
            raise SchemaError(
                f"{column}: expected one value of shape {spec.shape} per step, got an array of shape {given.shape}."
            )
        if spec.dtype.kind == "f" and given.dtype.kind in "iu":
            given = given.astype(spec.dtype)
        _, (checked,) = Spec({column: spec}).check_batch(unflatten({column: given}), leading=1, cast=True)
        if column == "source":
            check_sources(checked)
        return checked

    @cached_property
    def _source(self) -> int:
        return list(self.columns).index("source")

    def select(self, keys: Sequence[str] | None) -> list[str]:
        """The column paths that `keys` name: whole paths, or subtrees such as ``observations``."""
        if keys is None:
            return list(self.columns)
        asked = (keys,) if isinstance(keys, str) else tuple(keys)
        if asked not in self._selected:
            chosen: list[str] = []
            for key in asked:
                found = [p for p in self.columns if p == key or p.startswith(key + "/")]
                if not found:
                    raise UnknownNameError("column", key, self.columns)
                chosen += [p for p in found if p not in chosen]
            self._selected[asked] = chosen
        return list(self._selected[asked])

    def reduced(self, without: Sequence[str]) -> Schema:
        """The schema without these columns or subtrees; a next observation goes with
        its observation, whose frames it shares."""
        if not without:
            return self
        gone = set(self.select(list(without)))
        gone |= {mate(path) for path in gone} | {path for path in self.columns if mate(path) in gone}
        if built_in := sorted(gone & BUILT_IN.keys()):
            raise SchemaError(f"{built_in[0]}: expected columns to leave out, got one that every log has.")
        kept = {path: spec for path, spec in self.columns.items() if path not in gone}
        return Schema(Spec(kept), tuple(path for path in self.stacked if path in kept))

    def to_json(self) -> dict[str, object]:
        return {
            "columns": [[path, spec.to_json()] for path, spec in self.columns.items()],
            "stacked": list(self.stacked),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        return cls(Spec({path: ArraySpec.from_json(spec) for path, spec in data["columns"]}), tuple(data["stacked"]))


def _check_names(paths: Iterable[str]) -> None:
    for path in paths:
        try:
            plain = "\0" not in path and bool(path.encode())
        except UnicodeEncodeError:
            plain = False
        if not plain:
            raise SchemaError(
                f"column {path!r}: expected a name that a file can have: Unicode text without NUL "
                "and surrogates. Rename it."
            )


def _check_files(layout: Layout) -> None:
    """Large columns have a file each, which is called after the column."""
    by_file: dict[str, str] = {}
    for column in layout.frames:
        size = len(column.file.encode())
        if size > MAX_FILE_NAME_BYTES:
            raise SchemaError(
                f"{column.name}: its file may have at most {MAX_FILE_NAME_BYTES} bytes of name, got {size}. Rename it."
            )
        if column.file in by_file:
            both = f"{by_file[column.file]} and {column.name}"
            raise SchemaError(
                f"{both}: two large columns would be stored in one file, {column.file}. Rename one of them."
            )
        by_file[column.file] = column.name


def check_sources(values: Array) -> None:
    """An index of sources is a byte for each trajectory, and knows no others."""
    if np.max(values, initial=0) >= len(Source):
        known = ", ".join(f"{source.value} ({source.name.lower()})" for source in Source)
        raise SchemaError(f"source: expected one of {known}, got {np.max(values)}.")


@dataclass(frozen=True)
class FrameColumn:
    """One frame file: the columns whose references point into it."""

    name: str
    """Path of the observation column (or of the only column)."""
    columns: tuple[str, ...]
    """(column,) or (observation column, next observation column)."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one frame."""
    stack: int = 0
    """References per step, when the column is a stack of frames; 0 when it is a single frame."""

    @cached_property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    @cached_property
    def frames_per_step(self) -> int:
        """How many frames a step brings at most."""
        return len(self.columns) * max(1, self.stack)

    @cached_property
    def file(self) -> str:
        return self.name.replace("/", ".") + ".frames"


@dataclass(frozen=True)
class Layout:
    """How a schema's step lies on disk."""

    row: np.dtype[Any]
    """The packed row: bookkeeping, small columns, references, and at its end the checksum."""
    inline: tuple[str, ...]
    frames: tuple[FrameColumn, ...]
    pairs: tuple[tuple[str, str], ...]
    """(observation column, next observation column), small and large ones."""
    frame_of: dict[str, FrameColumn] = field(repr=False)

    @classmethod
    def of(cls, schema: Schema) -> Layout:
        columns = schema.columns
        pairs = [(path, mate(path)) for path in columns if mate(path) in columns]
        for path, after in pairs:
            if (columns[path].dtype, columns[path].shape) != (columns[after].dtype, columns[after].shape):
                raise SchemaError(f"{after}: expected {columns[path]} as {path} has, got {columns[after]}.")
        mates = dict(pairs)
        frames: dict[str, FrameColumn] = {}
        for path, spec in columns.items():
            if path in frames or (spec.nbytes < INLINE_BYTES and path not in schema.stacked):
                continue
            if path in mates.values():
                continue
            stack = spec.shape[0] if path in schema.stacked else 0
            members = (path, mates[path]) if path in mates else (path,)
            frame = FrameColumn(path, members, spec.dtype, spec.shape[1:] if stack else spec.shape, stack)
            frames.update(dict.fromkeys(members, frame))
        inline = tuple(p for p in columns if p not in frames)
        fields: list[Any] = [("#trajectory", "<i8"), ("#sequence", "<i8")]
        fields += [("#offset", "<u4"), ("#origin", "<u4"), ("#width", "<u4"), ("#flags", "u1")]
        fields += [(p, columns[p].dtype, columns[p].shape) for p in inline]
        fields += [(p, REFERENCE, (f.stack,) if f.stack else ()) for p, f in frames.items()]
        size = np.dtype(fields).itemsize + 8
        fields += [("#pad", "u1", (-size % 8,)), ("#count", "<u4"), ("#crc", "<u4")]
        unique = tuple({f.name: f for f in frames.values()}.values())
        return cls(np.dtype(fields), inline, unique, tuple(pairs), frames)

    @cached_property
    def plain(self) -> tuple[bool, ...]:
        """Per small column, whether `packed` takes its value as it is; it takes the bytes of the others."""
        return tuple(self.row[path].str in _PLAIN for path in self.inline)

    @cached_property
    def packed(self) -> Struct:
        """The row for Python's `struct`, which makes a single one many times faster than numpy does."""
        # the fields with a '#'
        codes = [_PLAIN["<i8"], _PLAIN["<i8"], _PLAIN["<u4"], _PLAIN["<u4"], _PLAIN["<u4"], _PLAIN["|u1"]]
        for path, plain in zip(self.inline, self.plain, strict=True):
            codes.append(_PLAIN[self.row[path].str] if plain else f"{self.row[path].itemsize}s")
        codes += ["qI" * max(1, self.frame_of[path].stack) for path in self.frame_of]
        packed = Struct("<" + "".join(codes))
        return Struct(f"{packed.format}{self.row.itemsize - packed.size}x")

    @property
    def step_bytes(self) -> int:
        """Bytes of one step that shares its observation with the step before it."""
        return self.row.itemsize + sum(f.nbytes for f in self.frames)

    def room(self, rows: int) -> int:
        """At least this number of rows and frames, and so that every segment begins
        on a memory page of this machine."""
        granule, least = 1, max([rows, *(column.frames_per_step for column in self.frames)])
        for size in [self.row.itemsize, *(f.nbytes for f in self.frames)]:
            pages = mmap.PAGESIZE // gcd(mmap.PAGESIZE, size)
            granule = granule * pages // gcd(granule, pages)
        return -(-least // granule) * granule


_PLAIN = {"|b1": "?", "|u1": "B", "|i1": "b", "<u2": "H", "<i2": "h", "<u4": "I", "<i4": "i", "<u8": "Q", "<i8": "q"}
"""Types whose numbers go through Python unchanged, and their codes in `struct`."""


def mate(path: str) -> str:
    """The next observation of this column; empty when it has none."""
    head, _, tail = path.partition("/")
    return f"{PAIRS[head]}/{tail}" if head in PAIRS and tail else PAIRS.get(path, "")


def spec_of_space(space: Space, where: str) -> Any:
    """The (nested) spec of a Gymnasium space, or of anything shaped like one."""
    if hasattr(space, "spaces") and isinstance(space.spaces, Mapping):
        return {key: spec_of_space(inner, f"{where}/{key}") for key, inner in space.spaces.items()}
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None:
        raise ConfigError(
            f"{where}: expected a space with a shape and a dtype (or a Dict space), got {type(space).__name__}."
        )
    return ArraySpec(np.dtype(dtype), tuple(shape))
