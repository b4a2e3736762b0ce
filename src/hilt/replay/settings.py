"""What the settings of a log may be, and where one may be made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.files import leftovers, storage_errors
from hilt.replay.durability import Durability
from hilt.replay.records import CODECS
from hilt.replay.schema import Schema

VERIFY_READS = ("always", "sampled", "never")


@dataclass(frozen=True)
class ReadOptions:
    """How one process reads a log; not a setting of the log itself."""

    cache_bytes: int | None = None
    verify_reads: str = "sampled"
    without: tuple[str, ...] = ()
    """Columns, or subtrees of them, that this process does not read: damage in their frames is none of its business."""

    def __post_init__(self) -> None:
        if self.verify_reads not in VERIFY_READS:
            raise UnknownNameError("verify_reads", self.verify_reads, VERIFY_READS)


def check_settings(settings: Mapping[str, Any], schema: Schema) -> None:
    """Refuses settings that cannot work, naming the one."""
    Durability.parse(settings["durability"])
    for name in ("capacity_steps", "capacity_bytes", "segment_bytes"):
        if settings[name] is not None and settings[name] <= 0:
            raise ConfigError(f"{name}: expected a number above 0 or None, got {settings[name]}.")
    large = [column.name for column in schema.layout.frames]
    for column, codec in settings["compression"].items():
        if column not in large:
            raise UnknownNameError("large column to compress", column, large)
        if codec not in CODECS:
            raise UnknownNameError("codec", codec, CODECS)


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
            raise ConfigError(f"{folder}: expected a new or empty folder, got one that holds {found}. Choose another path.")
