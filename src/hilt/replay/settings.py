"""What the settings of a log and the arguments of its faces may be, and where one may be made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.files import leftovers, storage_errors
from hilt.core.validate import check, setting
from hilt.replay.durability import Durability
from hilt.replay.schema import Schema
from hilt.replay.storage.records import CODECS

SEGMENT_BYTES = 256 << 20
MIN_WHOLE, MAX_WHOLE = -(1 << 63), (1 << 63) - 1
VERIFY_READS = ("always", "sampled", "never")


@dataclass(frozen=True)
class ReadOptions:
    """How one process reads a log; not a setting of the log itself."""

    cache_bytes: int | None = None
    verify_reads: str = setting("sampled", choices=VERIFY_READS)
    without: tuple[str, ...] = ()
    """Columns, or subtrees of them, that this process does not read: damage in their frames is none of its business."""

    def __post_init__(self) -> None:
        check(self)


def check_settings(settings: Mapping[str, Any], schema: Schema) -> None:
    """Refuses settings that cannot work, naming the one."""
    Durability.parse(settings["durability"])
    for name in ("capacity_steps", "capacity_bytes", "segment_bytes"):
        size = settings[name]
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int | float | np.number) or not size > 0
        ):
            raise ConfigError(f"{name}: expected a number above 0 or None, got {size!r}.")
    large = [column.name for column in schema.layout.frames]
    for column, codec in settings["compression"].items():
        if column not in large:
            raise UnknownNameError("large column to compress", column, large)
        if codec not in CODECS:
            raise UnknownNameError("codec", codec, CODECS)


def segment_bytes_for(capacity_bytes: int | None) -> int:
    """Returns a size so large that a log has few files, and so small that old ones are deleted in time."""
    return SEGMENT_BYTES if capacity_bytes is None else min(SEGMENT_BYTES, max(1 << 16, capacity_bytes // 8))


def as_compression(given: object) -> dict[str, str]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"compression: expected a codec by column, such as {{'observations/wrist': "
            f"'zstd'}}, or None; got {given!r}."
        )
    return dict(given or {})


def as_folder(path: object, name: str = "path") -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigError(f"{name}: expected the name of a folder, text or a pathlib.Path, got {path!r}.")
    return Path(path)


def as_whole_number(name: str, value: Any, meaning: str, least: int | None = None) -> int:
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not fits or not (MIN_WHOLE if least is None else least) <= value <= MAX_WHOLE:
        bound = "" if least is None else f" from {least} on"
        large = " of at most 64 bits" * (fits and abs(int(value)) > MAX_WHOLE)
        raise ConfigError(f"{name}: expected a whole number{bound}{large}, {meaning}; got {value!r}.")
    return int(value)


def as_sequence(value: object) -> int:
    return as_whole_number("sequence", value, "the number of this transition at its sender, or -1 for none", -1)


def as_seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value >= 0:
        raise ConfigError(f"{name}: expected a number of seconds from 0 on, such as 60.0; got {value!r}.")
    return float(value)


def as_transitions(given: object) -> Iterable[Any]:
    if isinstance(given, Mapping | str) or not isinstance(given, Iterable):
        what = f"batch_insert: expected a list of transitions, got {type(given).__name__}"
        raise ConfigError(f"{what}. One transition is stored with insert().")
    return given


def as_generator(seed: Any) -> np.random.Generator:
    """A stream of random numbers of its own."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError):
        raise ConfigError(
            f"seed: expected a whole number from 0 on, or None for a different stream each time; got {seed!r}."
        ) from None


def check_new(folder: Path) -> None:
    """Whether a log may be made here: nothing is, or what a process left that was killed while it made one."""
    with storage_errors(folder):
        if (folder / "log.json").exists():
            raise ConfigError(f"{folder}: a log is there already; open it with Log.open({str(folder)!r}).")
        if not folder.exists():
            return
        ours = {folder / "writer.lock", folder / "segments", *leftovers(folder)}
        strangers = [path for path in [*folder.iterdir(), *folder.glob("segments/*")] if path not in ours]
        if strangers:
            found = strangers[0].relative_to(folder)
            raise ConfigError(
                f"{folder}: expected a new or empty folder, got one that holds {found}. Choose another path."
            )
