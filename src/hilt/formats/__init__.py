"""Datasets of other systems, in and out.

    for episode in open_dataset("bridge/1.0.0", split="train[:10%]"):
        ...
    convert("bridge/1.0.0", "bridge-log")

Each format is one module, or class, with up to three functions: `matches` returns whether a path looks like one,
`open_dataset` reads it, and `create` writes it. Nothing of a format is imported before it is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from hilt.core.errors import ConfigError, FormatError, StorageError, suggest
from hilt.core.hub import local
from hilt.core.names import ExtensionPoint
from hilt.formats.episodes import Dataset, Episode, Writer

FORMATS = ExtensionPoint(
    "format",
    "hilt.formats",
    {
        "log": "hilt.formats.experience",
        "rlds": "hilt.formats.tensorflow_files.tfds",
        "lerobot": "hilt.formats.lerobot",
        "hil-serl": "hilt.formats.hilserl",
        "rlinf": "hilt.formats.rlinf",
        "robomimic": "hilt.formats.robomimic",
        "minari": "hilt.formats.minari",
    },
)
"""By name, in the order in which a path is tried: the module. LIBERO's demonstrations are robomimic's HDF5. Formats
that installed packages register are tried after these."""


def open_dataset(path: str | os.PathLike[str], format: str = "auto", **options: Any) -> Dataset:
    """A dataset of any known format. `options` are those of the format's own
    ``open_dataset``, such as ``split=`` of RLDS."""
    place = located(path, format)
    name = detect(place) if format == "auto" else format
    require(place)
    check_filter(options, name, place)
    check_options(options, options_of(name, "open_dataset"), name)
    dataset: Dataset = _module(name).open_dataset(place, **options)
    return dataset


def create(path: str | os.PathLike[str], format: str, **options: Any) -> Writer:
    """What writes a dataset into a folder, or goes on there where an earlier writer was stopped."""
    check_options(options, options_of(format, "create"), format)
    writer: Writer = _module(format).create(Path(path), **options)
    return writer


def located(path: str | os.PathLike[str], format: str = "auto") -> Path:
    """Where the data of a folder is: of a recording or a run in its ``log``, of everything else in the folder itself. A
    name of the Hub is the folder that was fetched (`hilt.core.hub`)."""
    place = local(path)
    inside = format in ("auto", "log") and not (place / "log.json").is_file() and (place / "log" / "log.json").is_file()
    return place / "log" if inside else place


def located_log(path: str | os.PathLike[str]) -> Path:
    """Where the log of a folder is. Raises ConfigError where the folder holds a dataset
    of another format, with the way to a log."""
    place = located(path)
    # a log may have lost one of them
    if place.exists() and not (place / "log.json").exists() and not (place / "segments").exists():
        with contextlib.suppress(FormatError):
            if (found := detect(place)) != "log":
                raise ConfigError(
                    f"{path} is a dataset ({found}), and this command is for logs: hilt data convert "
                    f"{path} NEW, then give NEW."
                )
    return place


def detect(path: Path) -> str:
    """The format of a file or folder, by its names and first bytes."""
    require(path)
    for name in FORMATS.known():
        module = _module(name)
        if hasattr(module, "matches") and module.matches(path):
            return name
    raise FormatError(
        f"{path}: none of the known formats ({', '.join(FORMATS.known())}). If it is one of them, name it with --from."
    )


def options_of(format: str, function: str) -> dict[str, inspect.Parameter]:
    """The options with which a format is read (``open_dataset``) or written (``create``)."""
    module = _module(format)
    if not hasattr(module, function):
        able = [other for other in FORMATS.known() if hasattr(_module(other), function)]
        deed = "written" if function == "create" else "read"
        raise ConfigError(f"{format}: this format cannot be {deed}. Those that can: {', '.join(able)}.")
    parameters = inspect.signature(getattr(module, function), eval_str=True).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def meaning_of(format: str, function: str) -> str:
    """Returns the documentation of the options of a format."""
    return " ".join((inspect.getdoc(getattr(_module(format), function)) or "").split())


def check_filter(options: Collection[str], format: str, path: Path) -> None:
    """Raises for a filter of episodes (``where``) of a dataset that is no log."""
    if "where" in options and format != "log":
        raise ConfigError(
            f"{path} is a dataset ({format}), and filters of episodes are for logs: hilt data convert {path} NEW, then "
            "give NEW."
        )


def check_options(given: Iterable[str], known: Collection[str], format: str) -> None:
    """Refuses an option that would do nothing."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{name}: {format} has no such option{suggest(name, known)} It has: {', '.join(known) or 'none'}."
            )


def require(path: Path) -> None:
    if not path.exists():
        raise StorageError(f"{path}: there is no such file or folder. Check the path.")


def _module(name: str) -> Any:
    return FORMATS.load(name)


__all__ = ["FORMATS", "Dataset", "Episode", "Writer", "open_dataset", "create", "detect", "located"]
