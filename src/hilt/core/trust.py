"""Decides which code may be run when it is named as ``package.module:attribute`` or as a folder.

A name that a user typed, or that a program or a recipe of theirs gives, is their word. A name that was read
from a file, such as the settings of a run that another person made, is not: Hilt's own and what an installed
package has registered (see `registered`) is free; anything else needs the user's word for its module,
``--trust module``, and is refused otherwise before it is imported. That word is remembered outside of the
file's folder, under a hash of the file's place and contents.

The command line, and every process that it starts, refuses every name that is not trusted (`command_line`). A program
that uses Hilt as a library is refused only what was read from a file; it gives its word with `trust`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hilt.core import hub
from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, CorruptError, StorageError, UnsafeError
from hilt.core.files import DISK

_MODULE = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
NAME = re.compile(rf"{_MODULE}:(?!\d+$)\w[^\s:]*")
"""``package.module:attribute`` or ``package:gym/Id-v0``, and not ``cuda:0``"""
_TYPED = re.compile(rf"(?:^|[=\[{{,\s'\"])(?:hil-serl:)?({_MODULE}:(?!\d+\b)\w[\w./-]*)")
EXPERIMENTS = "experiments.mappings:CONFIG_MAPPING"
"""What ``hil-serl:NAME`` without a module stands for"""
FOLDER_SETTING = "root"
"""The setting that names a folder of code: RoboTwin's"""
GROUPS = (
    *("hilt.tasks", "hilt.devices", "hilt.backends", "hilt.rewards", "hilt.policies", "hilt.agents", "hilt.algorithms"),
    *("hilt.estimators", "hilt.losses", "hilt.formats", "hilt.sinks"),
)
"""Entry points with which an installed package registers what may be named: a short name, and its ``module:attribute``.
Each is one extension point (`hilt.core.names`)"""
VARIABLE = "HILT_NAMES"
"""In its environment a process of ours finds what its parent trusts (`for_children`)"""


@dataclass
class _Word:
    """The modules that the user trusts, and where each name came from."""

    strict: bool = False
    """Whether every name that is not trusted is refused, wherever it came from"""
    trusted: set[str] = field(default_factory=set)
    """Modules with all that is in them, single names, and folders"""
    typed: set[str] = field(default_factory=set)
    """Names that this command, or a recipe that it names, gives"""
    from_files: dict[str, str] = field(default_factory=dict)
    """Names that were read from a file, and the file"""


def _inherited(given: Mapping[str, Any]) -> _Word:
    return _Word(
        given.get("strict", False),
        set(given.get("trusted", ())),
        set(given.get("typed", ())),
        given.get("from_files", {}),
    )


_word = _inherited(json.loads(os.environ.get(VARIABLE, "{}")))


def for_children() -> dict[str, str]:
    """What a process that this one starts must find in its environment to trust the same names."""
    known = {
        "strict": _word.strict,
        "trusted": sorted(_word.trusted),
        "typed": sorted(_word.typed),
        "from_files": _word.from_files,
    }
    return {VARIABLE: json.dumps(known)}


def inherit(environment: Mapping[str, str]) -> None:
    """Trusts what the parent trusts, as it gave it with `for_children`."""
    global _word
    _word = _inherited(json.loads(environment[VARIABLE]))


def is_command() -> bool:
    """Whether this process runs a command of Hilt, or was started by one; False in
    a program that uses Hilt as a library."""
    return _word.strict


# --- questions
# ----------------------------------------------------------------------------------------------------------------------


def permit(name: str) -> None:
    """Refuses a name of code that is not trusted; nothing is imported."""
    if not _is_free(name) and _voucher(name) is None:
        module = name.partition(":")[0]
        raise UnsafeError(
            f"{origin(name)} names {name!r}, code that is not Hilt's; nothing of it was run. If you know that "
            f"code, add --trust {module} to the command: that is remembered for this file."
        )


def permit_folder(folder: Path, setting: str) -> None:
    """Refuses a folder of code that a file names, in the same way."""
    if _voucher(place := str(folder.resolve())) is None:
        raise UnsafeError(
            f"{origin(place)} names {setting}={folder}, a folder of code; nothing of it was run. "
            f"If you know that code, add --trust {place} to the command: that is remembered for this file."
        )


def check_names(settings: object) -> list[str]:
    """Refuses code that settings name and that is not trusted; returns the names that a dry
    run does not import although they are trusted.

    A name that may also be one of data, such as an existing path or a name of the Hugging Face Hub, is not
    checked here: it is checked again before it is run.
    """
    names = sorted(named_in(settings))
    folders = [name for name in names if os.sep in name.partition(":")[0]]
    for folder in folders:
        permit_folder(Path(folder), FOLDER_SETTING)
    code = [
        name for name in names if name not in folders and not name.startswith(hub.PREFIX) and not os.path.exists(name)
    ]
    for name in code:
        permit(name)
    return [name for name in (*folders, *code) if is_from_file(name)]


def needs_type(name: str) -> bool:
    """Whether what is called must first be found to be of the right type: unless
    the user gave their word for that very name."""
    return name not in _word.trusted and _is_suspect(name)


def is_from_file(name: str) -> bool:
    """Whether a file names it, and neither this command nor Hilt's own code: then a dry run does not import it."""
    return not _is_free(name) and name not in _word.typed and _is_suspect(name)


def origin(name: str) -> str:
    return _word.from_files.get(name, "a file")


def registered(group: str) -> Mapping[str, str]:
    """Name to ``module:attribute``: what installed packages have registered as entry points of one of `GROUPS`."""
    return installed().get(group, {})


@functools.cache
def installed() -> Mapping[str, Mapping[str, str]]:
    """The entry points of all groups. A package in the current folder does not count as installed."""
    from importlib.metadata import distributions  # late: takes a while to import

    places = [place for place in sys.path if place and os.path.realpath(place) != os.path.realpath(os.curdir)]
    found: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for point in (
        point for package in distributions(path=places) for point in package.entry_points if point.group in GROUPS
    ):
        # what is found first is what an import finds
        found[point.group].setdefault(point.name, point.value.replace(" ", ""))
    return found


def _is_suspect(name: str) -> bool:
    return _word.strict or name in _word.from_files


def _is_free(name: str) -> bool:
    return name.partition(":")[0].partition(".")[0] == "hilt" or any(
        name in registered(group).values() for group in GROUPS
    )


def _voucher(name: str) -> str | None:
    """The word of the user's that lets a name pass: for itself, for its module or a
    package around that, or, in a program, its own."""
    parts = [] if os.sep in name.partition(":")[0] else name.partition(":")[0].split(".")
    words = [name, *(".".join(parts[:end]) for end in range(len(parts), 0, -1))]
    return next((word for word in words if word in _word.trusted), None if _is_suspect(name) else name)


# --- answers
# ----------------------------------------------------------------------------------------------------------------------


def trust(*words: str) -> None:
    """The user's word for modules, single names ``module:attribute``, or folders of code,
    in this process and those that it starts."""
    for word in words:
        is_folder = os.sep in word.partition(":")[0] or word.startswith(".")
        if not is_folder and not re.fullmatch(_MODULE, word) and not NAME.fullmatch(word):
            raise ConfigError(
                f"--trust {word!r}: expected the name of a module, such as my_tasks, or the path of a folder of code."
            )
        _word.trusted.add(str(Path(word).resolve()) if is_folder else word)


def given(*names: str) -> None:
    """Names that this command gives, or a program or recipe of the user's: their own word."""
    _word.trusted.update(names)
    _word.typed.update(names)


@contextlib.contextmanager
def command_line(words: Sequence[str]) -> Iterator[None]:
    """While a command runs, what its words name and what its parent trusts may be
    run, and nothing else but what is free."""
    global _word
    before, path = _word, list(sys.path)
    _word = replace(copy.deepcopy(before), strict=True)
    given(*_typed(words))
    try:
        yield
    finally:
        _word = before
        sys.path[:] = path  # `hilt.core.names.import_named` may have added the current folder


def _typed(words: Iterable[str]) -> Iterator[str]:
    """The names in the words of a command. What exists as a file or folder is data, whatever it is called."""
    for word in words:
        key, _, value = word.rpartition("=")
        if key.rpartition(".")[2] == FOLDER_SETTING and _exists(value) and Path(value).is_dir():
            yield str(Path(value).resolve())
        if re.fullmatch(r"hil-serl:\w+", word):
            yield EXPERIMENTS
        if not _exists(word) and not _exists(value):
            yield from _TYPED.findall(word)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for the name of a file, as settings in braces may be
        return False


# --- names in files
# ------------------------------------------------------------------------------------------------------------------


def named_in(settings: Any) -> set[str]:
    """Every name of code in settings, wherever in them it stands, and every folder of code; but for what is free."""
    if is_dataclass(settings):
        settings = {item.name: getattr(settings, item.name) for item in fields(settings)}
    if isinstance(settings, Mapping):
        folders = {
            str(Path(value).resolve())
            for key, value in settings.items()
            if key == FOLDER_SETTING and isinstance(value, str)
        }
        return folders.union(*map(named_in, settings.values()))
    if isinstance(settings, (list, tuple)):
        return set().union(*map(named_in, settings))
    is_name = isinstance(settings, str) and NAME.fullmatch(settings) and not _is_free(settings)
    return {settings} if is_name else set()


def came_from(path: Path, data: bytes, settings: object) -> None:
    """These settings were read from a file: what they name is not the user's word, unless it is remembered to be."""
    if not (names := named_in(settings)):
        return
    memory = _memory(path, data)
    known: set[str] = set()
    with contextlib.suppress(StorageError, CorruptError):
        known = set(read_json(memory)["trusted"])
    _word.from_files.update({name: str(path) for name in names - _word.typed})
    _word.trusted |= known
    remember(path, data, names, known)


def remember(path: Path, data: bytes, names: Iterable[str], known: Iterable[str] = ()) -> None:
    """Keeps the user's word for what a settings file names, for this file, at this
    place, as it is now; `known` is kept already."""
    words = {word for name in names if (word := _voucher(name)) is not None}
    if words - set(known):
        memory = _memory(path, data)
        with contextlib.suppress(StorageError):  # where there is no home to keep it in, the user is asked again
            DISK.make_folders(memory.parent)
            write_json(memory, {"settings": str(path.resolve()), "trusted": sorted(words)})


def _memory(path: Path, data: bytes) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return (
        state / "hilt" / "trusted" / f"{hashlib.sha256(os.fsencode(path.resolve()) + bytes(1) + data).hexdigest()}.json"
    )
