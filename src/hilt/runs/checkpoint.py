"""Checkpoints of a learner: ``checkpoints/UPDATE/`` has ``agent.pt`` and ``state.json``, written beside and renamed.

One that has its name is whole: its files were synced before. A thread writes it
from a copy, so that who learns never waits.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.checksums import checksum, read_json, write_json
from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, LockedError, StorageError
from hilt.core.files import DISK, Files, read, replacing, storage_errors
from hilt.formats.hilserl import write_buffers
from hilt.observe.metrics import FILE as METRICS
from hilt.replay.storage.lock import WriterLock
from hilt.replay.tensors import as_tensor, load_pt, map_tree, save_pt

if TYPE_CHECKING:
    import torch

FOLDER = "checkpoints"
logger = logging.getLogger("hilt.runs")


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after some update."""

    update: int
    agent: dict[str, Any]
    """For `Agent.load_state_dict`"""
    state: dict[str, Any]
    """Counters, generators, and what the views had"""
    path: Path


def save(
    run: Path,
    update: int,
    agent: Mapping[str, object],
    state: Mapping[str, object],
    keep: int,
    files: Files = DISK,
    alarm: int | None = None,
) -> Path:
    """Writes a checkpoint, power-safe when this returns, and then removes the oldest ones beyond
    `keep`, but for that of update 0, and the newest one from before the update at which an `alarm` was raised. Where
    one of this update is complete, only its `state` is written again: time may have passed without an update."""
    if keep < 1:
        raise ConfigError(f"checkpoint_keep={keep}: expected at least 1.")
    folder = run / FOLDER
    if (there := _checksum_of(run, update)) is not None:
        write_json(folder / str(update) / "state.json", {**state, "update": update, "agent_checksum": there}, files)
        return folder / str(update)
    files.make_folders(folder)
    for rest in folder.glob(".*.new"):  # of a process that was killed
        files.remove(rest)
    target, data = folder / str(update), io.BytesIO()
    save_pt(agent, data)
    with replacing(target, files, sole_writer=True) as beside:  # what is there under this name is damaged
        files.make_folder(beside)
        files.replace(beside / "agent.pt", data.getvalue(), durable=False)
        write_json(
            beside / "state.json",
            {**state, "update": update, "agent_checksum": checksum(data.getvalue())},
            files,
            durable=False,
        )
    good = max((number for number in numbers(run) if alarm is not None and number < alarm), default=0)
    # the first one, from before learning, stays, and the one to go back to (`hilt.runs.last_good`)
    for old in [number for number in [number for number in numbers(run) if number][:-keep] if number != good]:
        files.rename(folder / str(old), folder / f".{old}.new")  # never half of one under its name
        files.remove(folder / f".{old}.new")
    return target


def numbers(run: Path) -> list[int]:
    """The updates of which there is a checkpoint, in order."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    with storage_errors(folder):
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


def _checksum_of(run: Path, update: int) -> Any:
    """Returns the checksum of the agent of a checkpoint that is there, and whole; else None."""
    with contextlib.suppress(CorruptError, FormatError, StorageError):
        return read_json(load(run, update).path / "state.json")["agent_checksum"]
    return None


def load(run: Path, update: int) -> Checkpoint:
    """One checkpoint; a damaged one is a `CorruptError` that names the file."""
    path = run / FOLDER / str(update)
    if not path.is_dir():
        there = ", ".join(map(str, numbers(run))) or "none"
        raise StorageError(f"{run}: there is no checkpoint {update}. There are: {there}.")
    state = read_json(path / "state.json")
    if checksum(read(path / "agent.pt")) != state.pop("agent_checksum", None):
        raise CorruptError(
            f"{path / 'agent.pt'}: its bytes do not have their checksum; restore it from a copy, "
            "or use another checkpoint."
        )
    return Checkpoint(int(state.pop("update")), load_pt(path / "agent.pt"), state, path)


def latest(run: Path, notify: Callable[[str], None] = logger.warning) -> Checkpoint | None:
    """Returns the newest complete checkpoint; damaged ones are skipped with a warning. None if there is none at all."""
    errors = []
    for update in reversed(numbers(run)):
        try:
            return load(run, update)
        except (CorruptError, FormatError, StorageError) as error:
            errors.append(error)
            notify(f"checkpoint {update} is skipped, and the one before it is used: {error}")
    if errors:
        raise CorruptError(f"{run}: none of its {len(errors)} checkpoints is whole; the first error is: {errors[0]}")
    return None


class Saver:
    """Writes checkpoints in a thread, one at a time."""

    def __init__(self, run: Path, keep: int, files: Files = DISK):
        self._run, self._keep, self._files = run, keep, files
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last one was not written"""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, update: int, agent: Mapping[str, object], state: Mapping[str, object], alarm: int | None = None
    ) -> bool:
        """Begins to write a copy of this; False when the one before is still being written. `alarm`: see `save`."""
        if self.busy:
            return False
        copied, own = map_tree(_copied, agent), copy.deepcopy(dict(state))
        self._thread = threading.Thread(
            target=self._write, args=(update, copied, own, alarm), name="hilt-checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, seconds: float) -> None:
        """Until it is written; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise StorageError(
                    f"{self._run / FOLDER}: a checkpoint was not written within {seconds:g} s. Look at the disk."
                )
        if self.error is not None:
            raise self.error

    def close(self, seconds: float) -> None:
        """Waits for the one that is being written, also after an error of something else; raises nothing."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self, update: int, agent: Mapping[str, Any], state: Mapping[str, Any], alarm: int | None) -> None:
        self.error = None
        try:
            save(self._run, update, agent, state, self._keep, self._files, alarm)
        except Exception as error:  # noqa: BLE001  # broad: the state of an agent may fail to be saved in any way; `wait` raises it
            self.error = error


class Buffers:
    """Copies of the log in HIL-SERL's files, for its own tools: every `period` online
    steps the episodes that ended since, in a thread.

    ``buffer/transitions_N.pkl`` has them, N counting steps, and
    ``demo_buffer/transitions_N.pkl`` what a person did in them.
    """

    def __init__(self, run: Path, period: int):
        self._run, self._period, self._next = run, period, 0
        self._thread: threading.Thread | None = None
        self._path = run / "buffers.json"
        known: dict[str, Any] = read_json(self._path) if self._path.exists() else {"steps": 0, "trajectories": []}
        self._steps, self._written = int(known["steps"]), set(known["trajectories"])
        for path in (
            [*run.glob("buffer/transitions_*.pkl"), *run.glob("demo_buffer/transitions_*.pkl")] if period else []
        ):
            if int(path.stem.rpartition("_")[2]) > self._steps:  # of a process that was killed before it recorded it
                DISK.remove(path)

    def write_if_due(self, experience: Any) -> None:
        if self._period and experience.total >= self._next and (self._thread is None or not self._thread.is_alive()):
            due, self._next = self._next > 0, (experience.total // self._period + 1) * self._period
            if due:
                self._thread = threading.Thread(
                    target=self._write, args=(experience,), name="hilt-buffers", daemon=True
                )
                self._thread.start()

    def finish(self, experience: object, seconds: float) -> None:
        """Everything that has ended is written when this returns."""
        if self._period:
            if self._thread is not None:
                self._thread.join(seconds)
            self._write(experience)

    def close(self, seconds: float) -> None:
        """Waits for what is being written; begins nothing."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self, experience: Any) -> None:
        try:
            episodes = experience.ended_episodes(self._written)
            if not episodes:
                return
            steps = self._steps + sum(len(columns["rewards"]) for columns in episodes.values())
            write_buffers(self._run, steps, list(episodes.values()))
            self._steps, self._written = steps, self._written | set(episodes)
            write_json(self._path, {"steps": steps, "trajectories": sorted(self._written)})
        except HiltError as error:
            logger.warning("the buffers were not written, and learning goes on: %s", error)


def _copied(value: Any, _: str) -> Any:
    return value.detach().clone() if hasattr(value, "detach") else copy.deepcopy(value)


@contextlib.contextmanager
def alone(run: Path, otherwise: str, cure: str = "") -> Iterator[None]:
    """Locks this folder for training; a second process gets the error `otherwise`."""
    lock = WriterLock(run)
    try:
        lock.__enter__()
    except LockedError as error:
        raise LockedError(f"{run} {otherwise}: {error} {cure}".rstrip()) from None
    try:
        yield
    finally:
        lock.__exit__()


@contextlib.contextmanager
def taken_back(run: Path, *made: str) -> Iterator[None]:
    """A start that is refused before there is anything of `made`, a checkpoint or a
    metric is no run: the folder is left empty."""
    try:
        yield
    except LockedError:
        raise
    except HiltError:
        metrics = run / METRICS
        if not any((run / name).exists() for name in (*made, FOLDER)) and not (
            metrics.exists() and metrics.stat().st_size
        ):
            for path in run.iterdir():
                DISK.remove(path)
        raise


def generator_state(generator: torch.Generator) -> str:
    """Returns the state of a torch generator as text."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def set_generator_state(generator: torch.Generator, text: str) -> None:
    """Sets the state that `generator_state` returned."""
    generator.set_state(as_tensor(np.frombuffer(base64.b64decode(text), np.uint8), "a generator's state"))
