"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio.

Numbers go there as ``update/critic_loss``, ``episode/return``; what is text stays in the file. Updates are drawn over
learner steps, everything else over online steps.
"""

from __future__ import annotations

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hilt.core.checksums import read_json, write_json
from hilt.core.config import read_yaml
from hilt.core.errors import Problems, optional_module, require_module
from hilt.core.files import DISK, read
from hilt.core.names import ExtensionPoint

PROJECT = "hilt"
"""What the runs are filed under, unless WANDB_PROJECT or TRACKIO_PROJECT is set"""
IDENTITY = "sinks.json"
PACKAGES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "trackio": "trackio"}
"""Of a sink, what needs the package of its name"""
NOT_SHOWN = ("kind", "time", "update", "step")


class Sink(ABC):
    """What `hilt.observe.Metrics` writes to. It is made with the folder and the name of a run."""

    @abstractmethod
    def write(self, record: Mapping[str, object]) -> None:
        """One record, as it is in ``metrics.jsonl``: ``kind``, ``time``,
        ``update``, ``step``, and what its kind has."""

    def resumed(self, update: int) -> None:  # noqa: B027
        """The run goes on from this update: records of later updates come again. By
        default nothing is done about them."""

    @abstractmethod
    def close(self) -> None:
        """The last call."""


def open_sinks(names: Sequence[str], folder: Path, run: str) -> list[Sink]:
    """The sinks of these names, for the run in this folder."""
    check_sinks(names)
    return [SINKS.load(name, Sink)(folder, run) for name in names]


def check_sinks(names: Sequence[str]) -> None:
    """Refuses sinks that do not exist, and those whose package is missing; imports and opens nothing."""
    problems = Problems()
    for name in names:
        with problems.collected():
            SINKS.check(name)
            if name in PACKAGES:
                require_module(name, PACKAGES[name], name)
    problems.report()


def numbers(record: Mapping[str, object]) -> dict[str, float]:
    """What can be drawn of a record, by its name there."""
    named = {f"{record['kind']}/{name}": value for name, value in record.items() if name not in NOT_SHOWN}
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float)}


class TensorBoard(Sink):
    """Event files in ``RUN/tensorboard``, by TensorBoard's own writer. Updates have a folder of their own, so that
    those which a resumed learner makes again replace the earlier ones."""

    def __init__(self, folder: Path, run: str):
        needed = ("TensorBoard", "tensorboard")
        self._make = optional_module(
            "tensorboard.summary.writer.event_file_writer", *needed, "tensorboard"
        ).EventFileWriter
        self._event = optional_module("tensorboard.compat.proto.event_pb2", *needed, "tensorboard")
        self._summary = optional_module("tensorboard.compat.proto.summary_pb2", *needed, "tensorboard").Summary
        self._folder = folder / "tensorboard"
        self._writers: dict[str, Any] = {}

    def write(self, record: Mapping[str, object]) -> None:
        axis = "update" if record["kind"] == "update" else "step"
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(record).items()]
        if values:
            event = self._event.Event(wall_time=record["time"], step=record[axis], summary=self._summary(value=values))
            self._writer(axis).add_event(event)

    def resumed(self, update: int) -> None:
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._writer("update").add_event(self._event.Event(step=update + 1, session_log=start))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, axis: str) -> Any:
        if axis not in self._writers:
            self._writers[axis] = self._make(str(self._folder / f"over_{axis}s"), flush_secs=10)
        return self._writers[axis]


class Wandb(Sink):
    """A run of Weights & Biases, the same one after a resume, its history one that only grows: updates that are made
    again are left out. Without WANDB_API_KEY and WANDB_MODE it stays on this machine."""

    def __init__(self, folder: Path, run: str):
        self._step, self._reached = written(folder)
        wandb = optional_module("wandb", "Weights & Biases", "wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        if mode == "offline":
            print(
                f"wandb: offline; later: wandb sync {folder}/wandb/offline-run-*. To send at once, set "
                "WANDB_API_KEY or WANDB_MODE=online."
            )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(folder),
            name=run,
            id=run_id(folder),
            resume="allow",
            mode=mode,
            config=config_of(folder),
            settings=wandb.Settings(silent=True),
        )
        for kind, axis in (("update", "update"), ("episode", "step"), ("actor", "step")):
            self._run.define_metric(f"{kind}/*", step_metric=axis)

    def write(self, record: Mapping[str, Any]) -> None:
        self._step += 1  # counted over all processes of the run, as it could not be by a process that is offline
        if record["kind"] != "update" or record["update"] > self._reached:
            self._run.log({**numbers(record), "update": record["update"], "step": record["step"]}, step=self._step)

    def resumed(self, update: int) -> None:
        """What is made again is not written again."""

    def close(self) -> None:
        self._run.finish()


class Trackio(Sink):
    """A run of trackio, local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set; the same one after a resume.
    Updates that are made again are left out."""

    def __init__(self, folder: Path, run: str):
        _, self._reached = written(folder)
        trackio = optional_module("trackio", "trackio", "trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{run}-{run_id(folder)}"
        self._run = trackio.init(
            project, name, config=config_of(folder), resume="allow", embed=False, auto_log_cpu=False
        )

    def write(self, record: Mapping[str, Any]) -> None:
        if (shown := numbers(record)) and (record["kind"] != "update" or record["update"] > self._reached):
            self._run.log({**shown, "update": record["update"]}, step=record["step"])

    def resumed(self, update: int) -> None:
        """What is made again is not written again."""

    def close(self) -> None:
        self._run.finish()


SINKS = ExtensionPoint("sink", "hilt.sinks", {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio})


def written(folder: Path) -> tuple[int, int]:
    """How many records the run had before, and the highest update of which one was
    sent elsewhere; 0 when nothing was yet."""
    path = folder / "metrics.jsonl"
    records = (
        [json.loads(line) for line in read(path).split(b"\n")[:-1]]
        if path.exists() and (folder / IDENTITY).exists()
        else []
    )
    return len(records), max((record["update"] for record in records if record["kind"] == "update"), default=0)


def run_id(folder: Path) -> str:
    """Returns the identity by which a service knows a resumed run again."""
    path = folder / IDENTITY
    if not path.exists():
        DISK.make_folders(folder)
        write_json(path, {"run": secrets.token_hex(4)})
    return str(read_json(path)["run"])


def config_of(folder: Path) -> dict[str, object]:
    """The settings of a run, as its frozen config has them; none when it has none."""
    path = folder / "config.yaml"
    found = OmegaConf.to_container(read_yaml(path)) if path.exists() else {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
