"""The small files of a log, checked as they are read: even with a valid checksum, a
file may be another one, or of another program.

Unexpected contents raise a `ContentError`, which is a `CorruptError`: callers that can rebuild the
file do so, and the others use no value from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError, CorruptError, FormatError, SchemaError, VersionError
from hilt.replay.schema import BUILT_IN, Layout, Schema

FORMAT = 1
"""Version of the segment format. A reader refuses a newer one."""
CODECS = ("zlib", "zstd")
MAX_ROOM = 1 << 31
"""Rows, or frames of one column, of a segment."""
MAX_QUARANTINED_ROWS = 1 << 26
"""Of one entry: more than any segment has."""


class ContentError(CorruptError):
    """A file has its checksum, and does not hold what such a file holds."""


def check_format(version: object, where: Path) -> None:
    if not isinstance(version, int):
        raise FormatError(f"{where}: not a Hilt log (no format version or schema in it).")
    if version > FORMAT:
        raise VersionError(
            f"{where}: written in format {version}, this Hilt reads up to {FORMAT}. Upgrade: pip install -U hilt"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """The contents of log.json."""
    settings = read_json(path)
    check_format(settings.get("format") if settings.get("schemas") else None, path.parent)
    with _content(path):
        for schema in settings["schemas"]:
            _schema(schema)
        for name in ("capacity_steps", "capacity_bytes", "segment_bytes"):
            if settings[name] is not None:
                _number(settings, name, 0, 1 << 62)
        _require(settings["segment_bytes"] is not None, "segment_bytes is a number")
        _require(isinstance(settings["durability"], str), "durability is text")
        compression = settings["compression"]
        _require(
            all(isinstance(path, str) and codec in CODECS for path, codec in compression.items()),
            f"codecs are {', '.join(CODECS)}",
        )
    return settings


def read_header(path: Path) -> tuple[Schema, int]:
    """The schema of a segment, and how many rows it may hold."""
    header = read_json(path)
    if isinstance(header.get("format"), int):
        check_format(header["format"], path.parent)
    with _content(path):
        _number(header, "format", 0, FORMAT)
        return _schema(header["schema"]), _number(header, "room", 1, MAX_ROOM)


def read_seal(path: Path, layout: Layout, room: int) -> dict[str, Any]:
    """What a complete segment holds. `room` is what it may hold, 0 when that is not known."""
    seal = read_json(path)
    with _content(path):
        most = room or MAX_ROOM
        _number(seal, "rows", 0, most)
        _number(seal, "extents_crc", 0, (1 << 32) - 1)
        names = {column.name for column in layout.frames}
        _require(seal["frames"].keys() == names, f"frames of {', '.join(sorted(names)) or 'no column'}")
        for name in names:
            _number(seal["frames"], name, 0, most)
        _require(seal["codecs"].keys() <= names, "codecs of large columns")
        for made in seal["codecs"].values():
            _require(made["codec"] in CODECS, f"codecs are {', '.join(CODECS)}")
            _number(made, "bytes", 0, 1 << 62)
            _number(made, "index_crc", 0, (1 << 32) - 1)
    return seal


def read_quarantine(path: Path) -> dict[str, list[Any]]:
    """Returns for each segment: first row, number of rows, and what is wrong with them."""
    with _content(path):
        segments: dict[str, list[Any]] = read_json(path)["segments"]
        for number, listed in segments.items():
            int(number)
            for first, rows, what in listed:
                _number({"first": first}, "first", 0, MAX_ROOM)
                _number({"rows": rows}, "rows", 0, MAX_QUARANTINED_ROWS)
                _require(isinstance(what, str), "findings are text")
        return segments


def is_fact(fact: object) -> bool:
    """Whether this is a valid line of annotations.jsonl or edits.jsonl. Lines of a newer Hilt are skipped."""
    if is_about_trajectory(fact):
        return True
    try:
        _check_fact(fact)
    except _WRONG_CONTENT:
        return False
    return True


def is_about_trajectory(fact: object) -> bool:
    """Whether this is the most frequent kind of line, which is decided quickly: the facts about one trajectory."""
    return (
        type(fact) is dict
        and len(fact) == 2
        and type(fact.get("facts")) is dict
        and type(number := fact.get("trajectory")) is int
        and 0 <= number < MAX_ROOM
    )


def _check_fact(fact: Any) -> None:
    _require(isinstance(fact, dict), "a mapping")
    if "edit" in fact:
        _check_edit(fact)
    elif "used" in fact:
        for name in fact["used"]:
            _number(fact["used"], name, -1, 1 << 62)
        for origin, _ in fact.get("seen", {}).items():
            int(origin)
            _number(fact["seen"], origin, -1, 1 << 62)
    elif "origin" in fact:
        _number(fact, "origin", 0, (1 << 32) - 1)
        _require(all(isinstance(fact[name], str) for name in ("actor", "boot", "store")), "names are text")
    elif fact.keys() & {"facts", "column", "deleted_before", "whole"}:
        _number(fact, "trajectory", 0, MAX_ROOM - 1)
    if "facts" in fact:
        _require(isinstance(fact["facts"], dict), "facts are a mapping")
    elif "column" in fact:
        _number(fact, "first", 0, (1 << 32) - 1)
        _require(isinstance(fact["column"], str) and isinstance(fact["values"], list), "values of a column")
    elif "deleted_before" in fact:
        _number(fact, "deleted_before", 0, (1 << 32) - 1)


def _check_edit(edit: Any) -> None:
    _number(edit, "edit", 1, 1 << 62)
    for name in ("action", "author", "time"):
        _require(isinstance(edit[name], str), "action, author, time as text")
    if "undo" in edit:
        _number(edit, "undo", 1, edit["edit"] - 1)
    for change in edit.get("changes", []):
        _number(change, "trajectory", 0, MAX_ROOM - 1)
        _require(isinstance(change.get("facts", {}), dict), "facts are a mapping")
        for column, first, values in change.get("values", []):
            _in_range(first, "first", 0, (1 << 32) - 1)
            _require(isinstance(column, str) and isinstance(values, list), "values of a column")
        for kind in ("tag", "mark"):
            if kind in change:
                name, *rest = change[kind]
                _require(isinstance(name, str) and isinstance(rest[-1], bool), "a name, and whether it is there")
        if "mark" in change:
            _in_range(change["mark"][1], "step", 0, (1 << 32) - 1)
        if change.get("trim") is not None:
            first, last, cut = change["trim"]
            _in_range(last, "last", _in_range(first, "first", 0, (1 << 32) - 1), (1 << 32) - 1)
            _in_range(cut, "cut", 0, last - first + 1)


def _schema(data: Any) -> Schema:
    """The schema in a file. The segments of a log have the same, which is made and checked once."""
    try:
        return _checked_schema(json.dumps(data))
    except RecursionError:
        raise ValueError("expected: columns, each with a type and a shape") from None


@functools.lru_cache(maxsize=64)
def _checked_schema(text: str) -> Schema:
    schema = Schema.from_json(json.loads(text))
    for path, spec in BUILT_IN.items():
        _require(
            (schema.columns[path].dtype, schema.columns[path].shape) == (spec.dtype, spec.shape), f"{path} is {spec}"
        )
    _require(
        all(path in schema.columns and schema.columns[path].shape for path in schema.stacked),
        "stacked columns are columns",
    )
    _require(schema.layout.packed.size == schema.layout.row.itemsize, "columns lie in a row")
    return schema


def _number(data: Any, name: str, low: int, high: int) -> int:
    return _in_range(data[name], name, low, high)


def _in_range(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # as JSON has it: true is no number
        raise ValueError(f"expected: {name} is a number from {low} to {high}")
    return value


def _require(right: bool, expected: str) -> None:
    if not right:
        raise ValueError(f"expected: {expected}")


_WRONG_CONTENT = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    MemoryError,
    ConfigError,
    SchemaError,
)
"""What the checks raise for a value that is not what it should be."""


@contextlib.contextmanager
def _content(path: Path) -> Iterator[None]:
    try:
        yield
    except CorruptError:
        raise
    except _WRONG_CONTENT as error:
        what = "has its checksum, and does not hold what such a file holds"
        raise ContentError(f"{path}: {what} ({error!r}); restore it from a copy or run: hilt data repair.") from None
