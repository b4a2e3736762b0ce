"""The folder of a run: how every kind of run begins, is found again, and is resumed with other settings.

RUN/config.yaml   every setting, frozen; it is written last, so that a folder that has it holds a run
RUN/run.json      the identity of the run, its kind and recipe, its precision and why, what was
                  changed when it was resumed, and
                  why it ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from hilt.core.checksums import read_json, write_json
from hilt.core.config import build, freeze, thaw
from hilt.core.errors import ConfigError, HiltError
from hilt.core.files import DISK, leftovers, storage_errors
from hilt.core.trust import check_names
from hilt.replay import Log

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONFIG, RUN_FILE = "config.yaml", "run.json"
FAILED = "failed"
"""Why a run ended of which a process failed"""
FAILURES = frozenset({FAILED, "not_finite", "alarm"})
"""Reasons for the end of a run that are failures"""
HIL = "hil"
"""The kind of a run whose run.json names none"""

T = TypeVar("T", bound="DataclassInstance")
"""The settings of a run: a dataclass"""
Overrides = Sequence[str | Mapping[str, object]]
Changes = dict[str, tuple[object, object]]
"""Dotted keys of settings, each with its former and its new value"""


@dataclass(frozen=True)
class RunKind(Generic[T]):
    """A kind of run: which settings it has, and which of them a resumed run may change."""

    name: str
    settings: type[T]
    changeable: frozenset[str]
    """Settings, or sections of them, that may differ when a run is resumed. Everything else decides what
    its data mean, or what its checkpoint holds"""
    check: Callable[[T], None]
    """Raises a `ConfigError` for settings that cannot work"""
    thaw: Callable[[Path], T] | None = None
    """Reads the frozen settings of a run folder; by default ``config.yaml`` as it is"""
    override: Callable[..., T] = build
    """Applies the overrides of a command line"""
    may_change: Callable[[Path, str], bool] | None = None
    """Decides for a run and a setting that is not in `changeable`"""

    def begin(self, run: Path, recipe: str, config: T, described: Mapping[str, object]) -> T:
        """Makes the folder and freezes the settings. `described` is added to ``run.json``."""
        DISK.make_folders(run)
        metadata = {"id": secrets.token_hex(8), "kind": self.name, "recipe": recipe, "began": now(), "changed": []}
        write_json(run / RUN_FILE, {**metadata, **described})
        freeze(config, run / CONFIG)
        return config

    def is_run(self, run: Path) -> bool:
        """Returns whether the folder holds a run of this kind."""
        return (run / RUN_FILE).is_file() and (run / CONFIG).is_file() and kind_of(run) == self.name

    def frozen(self, run: Path) -> T:
        """Returns the settings that the run has now."""
        return self.thaw(run) if self.thaw is not None else thaw(self.settings, run / CONFIG)

    def resume(self, run: Path, recipe: str, overrides: Overrides) -> T:
        """Returns the settings of an existing run with `overrides` applied. Changes
        are frozen and noted in ``run.json``."""
        config, changed = self.resumed(run, recipe, overrides)
        if changed:
            note_changes(run, changed)
        if changed or thaw(self.settings, run / CONFIG) != config:
            freeze(config, run / CONFIG)
        return config

    def resumed(self, run: Path, recipe: str, overrides: Overrides) -> tuple[T, Changes]:
        """Returns what `resume` would return, and what it would change; writes nothing."""
        if not self.is_run(run):
            other = kind_of(run) if (run / RUN_FILE).is_file() else ""
            there = f"a run of {COMMANDS[other]}, and none" if other in COMMANDS else "no run"
            wanted = f"{run} has {there} of {COMMANDS.get(self.name, self.name)} to resume"
            raise ConfigError(f"{wanted}: leave out --resume to begin one, or name its folder with --run.")
        frozen, known = self.frozen(run), read_json(run / RUN_FILE)["recipe"]
        if recipe and recipe != known:
            named = f"{run} is a run of {known or 'no recipe'}, not of {recipe}"
            raise ConfigError(f"{named}: leave the recipe out, or name another folder with --run.")
        config = self.override(frozen, *overrides)
        changed = differences(frozen, config)
        for key, (was, given) in changed.items():
            if not is_in(key, self.changeable) and not (self.may_change is not None and self.may_change(run, key)):
                raise ConfigError(
                    f"{key} was {was!r} in {run} and is {given!r} now, which a resumed run cannot change: leave "
                    "it out, or begin another run with --run. These can be changed: "
                    f"{', '.join(sorted(self.changeable))}."
                )
        check_names(config)  # before any process is started for them
        self.check(config)
        return config, changed


COMMANDS = {HIL: "`hilt train`", "sft": "`hilt train sft`", "vla": "post-training"}
"""What makes a run of each kind, as errors name it"""


def kind_of(run: Path) -> str:
    """Returns the kind of the run in a folder."""
    return str(read_json(run / RUN_FILE).get("kind", HIL))


def check_new(run: Path) -> None:
    """Refuses a folder in which no run can begin."""
    if (run / CONFIG).exists():
        raise ConfigError(f"{run} has a run already: --resume goes on with it, --run FOLDER begins another.")
    with storage_errors(run):
        if run.exists() and (
            others := {path.name for path in run.iterdir()} - {RUN_FILE} - {path.name for path in leftovers(run)}
        ):
            raise ConfigError(
                f"{run} is not a run: {min(others)} is in it, and no {CONFIG}. Choose another folder with --run."
            )


def note_changes(run: Path, changed: Changes) -> None:
    """Adds to ``run.json`` which settings a resumed run has changed: when, after
    which step, and their former and new values."""
    from hilt.runs.checkpoint import numbers  # late: it needs torch

    metadata, noted = read_json(run / RUN_FILE), {key: {"was": was, "now": new} for key, (was, new) in changed.items()}
    change = {"at": now(), "step": max(numbers(run), default=0), "settings": noted}
    write_json(run / RUN_FILE, {**metadata, "changed": [*metadata["changed"], change]})


def note_end(run: Path, reason: str = "", step: int = 0, words: str = "") -> None:
    """Writes into ``run.json`` why and after which step the run ended; without a reason, that it is running.
    Does nothing where there is no ``run.json``."""
    if not (run / RUN_FILE).is_file():
        return
    metadata = {name: value for name, value in read_json(run / RUN_FILE).items() if name != "ended"}
    ended = {"ended": {"at": now(), "reason": reason, "step": step, "words": words}} if reason else {}
    write_json(run / RUN_FILE, {**metadata, **ended})


def note_failure(run: Path, words: str) -> None:
    """Writes into ``run.json`` that a process of the run failed, with its error. What the learner wrote as it was
    asked to end is replaced; a failure that it noted itself stays."""
    ended = read_json(run / RUN_FILE).get("ended", {}) if (run / RUN_FILE).is_file() else {}
    if ended.get("reason") not in FAILURES:
        note_end(run, FAILED, ended.get("step", 0), words)


@contextlib.contextmanager
def failure_noted(run: Path) -> Iterator[None]:
    """Notes the error that ends a run which this process trains itself: see `note_failure`."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, HiltError) else f"{type(error).__name__}: "
        note_failure(run, kind + str(error))
        raise


def is_in(key: str, names: Iterable[str]) -> bool:
    """Returns whether a setting is among these, or in a section that is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def differences(one: DataclassInstance, other: DataclassInstance, prefix: str = "") -> Changes:
    """Returns the settings that differ between two configurations."""
    found: Changes = {}
    for item in dataclasses.fields(one):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            found |= differences(a, b, f"{prefix}{item.name}.")
        elif a != b:
            found[f"{prefix}{item.name}"] = a, b
    return found


@contextlib.contextmanager
def undone_if_nothing_is_kept(run: Path) -> Iterator[None]:
    """Removes the folder of a run that an error ends before it has a step, a demonstration or a checkpoint, so
    that the corrected command can begin there."""
    try:
        yield
    except HiltError as error:
        if not _keeps(run):
            DISK.remove(run)
            raise
        raise HiltError(
            f"{error}\n{run} has what was made until then: hilt train --run {run} --resume goes on with it."
        ) from error


def _keeps(run: Path) -> bool:
    """Returns whether a run has made anything that took work: demonstrations,
    checkpoints, steps in a log or in a spool."""
    if any((run / name).exists() for name in ("demonstrations", "checkpoints", "best")):
        return True
    logs = [path.parent for path in (*run.glob("log/log.json"), *run.glob("rollouts/*/log.json"))]
    acted = [path for path in run.glob("actors/*/acted") if b"s" in path.read_bytes()]
    return bool(acted) or any(_steps(log) for log in logs)


def _steps(log: Path) -> int:
    with Log.open(log, "r") as opened:
        return len(opened)


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
