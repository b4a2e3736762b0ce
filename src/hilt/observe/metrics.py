"""The numbers of a run: ``metrics.jsonl``, one JSON object a line, always; the same
elsewhere when asked (`hilt.observe.sinks`).

Every record has ``kind``, ``time`` (seconds since 1970), ``update`` (learner steps so far),
``step`` (online steps so far), and what its kind has:

- ``update``: what the learner measures: losses, Q values, rates, buffer sizes; per
  source as ``q/online``, ``q/demo``, ``q/human``
- ``episode``: one for each trajectory: success, return, length, seconds,
  intervention_count, intervention_steps, lost_steps, actor
- ``actor``: what an actor reports: its rates, its lateness, the version of its policy
- ``event``: something that happened, in words

A process that continues a run writes the event `GOES_ON` first. A learner that resumes repeats updates that an earlier
one made after its last checkpoint. It calls `Metrics.resumed`, and `read_metrics` leaves out the records of the updates
that were repeated, and those of episodes of post-training (which have a ``training_step``) that were made again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hilt.core.errors import ClosedError, ConfigError, CorruptError, SchemaError
from hilt.core.files import DISK, read
from hilt.core.tree import flatten

FILE = "metrics.jsonl"
OWN = ("kind", "time", "update", "step")
"""The names that every record has"""
KINDS = ("update", "episode", "actor", "event")
NOT_FINITE = "not_finite"
"""In a record that had them: how many of its values were NaN or infinite, and are null"""
RESUMED, GOES_ON = "resumed", "another process goes on"
"""Events: the learner continues from this update; another process writes from now
on, so that the time between is not counted"""
PAUSE = "pause"
"""In an event with which a pause of the run "begins" or "ends": the time between does not count either"""
Value = float | int | str | bool | None


class Metrics:
    """Writes the metrics of a run. One process writes, one line at a time; any number may read meanwhile."""

    def __init__(self, folder: Path, sinks: Sequence[str] = (), name: str = ""):
        """`sinks`: tensorboard, wandb, trackio; `name`: what the run is called there, its folder's name when empty."""
        from hilt.observe.sinks import open_sinks

        DISK.make_folders(folder)
        self.path = folder / FILE
        self.not_finite = 0
        """Values that were NaN or infinite, so far"""
        self._lock = threading.Lock()
        # first: a sink that is not there costs no file
        self._sinks = open_sinks(sinks, folder, name or folder.resolve().name)
        known = read(self.path) if self.path.exists() else b""
        self._size = known.rfind(b"\n") + 1
        self._file: int | None = DISK.open(self.path, write=True) if self.path.exists() else DISK.create(self.path)
        if self._size < len(known):  # a process was killed while it wrote the last line
            DISK.truncate(self._file, self._size)
        if self._size:
            last = json.loads(known[: self._size].splitlines()[-1])
            self.event(GOES_ON, update=last["update"], step=last["step"])

    def write(self, kind: str, values: Mapping[str, Value], *, update: int, step: int) -> None:
        """One record; process-safe when it returns."""
        if kind not in KINDS:
            raise ConfigError(f"metrics of the kind {kind!r}: expected one of {', '.join(KINDS)}.")
        if taken := [name for name in values if name in OWN]:
            raise ConfigError(f"a metric named {taken[0]!r}: every record has its own; choose another name.")
        record: dict[str, Any] = {"kind": kind, "time": round(time.time(), 3), "update": int(update), "step": int(step)}
        record |= {name: _plain(value) for name, value in values.items()}
        missing = sum(value is None and values[name] is not None for name, value in record.items() if name not in OWN)
        if missing:
            record[NOT_FINITE] = missing
        with self._lock:
            if self._file is None:
                raise ClosedError(f"{self.path} is closed, and a metric of the kind {kind!r} was to be written.")
            line = json.dumps(record, allow_nan=False).encode() + b"\n"
            DISK.write(self._file, line, self._size)
            self._size += len(line)
            self.not_finite += missing
            for sink in self._sinks:
                sink.write(record)

    def event(self, text: str, *, update: int, step: int) -> None:
        """Something that happened, in words."""
        self.write("event", {"event": text}, update=update, step=step)

    def resumed(self, update: int, step: int = 0) -> None:
        """The learner goes on from this update: what was written of later ones will be written again."""
        self.event(RESUMED, update=update, step=step)
        with self._lock:
            for sink in self._sinks:
                sink.resumed(update)

    def close(self) -> None:
        """Closes the file and the sinks. Calling it twice is allowed."""
        with self._lock:
            if self._file is None:
                return
            DISK.sync(self._file)
            DISK.close(self._file)
            self._file = None
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def running(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """For each record the seconds since the first one, without pauses and without
    the time in which no process was running."""
    seconds, first, paused, before, halted = [], 0.0, 0.0, 0.0, False
    for number, record in enumerate(records):
        first = first if number else record["time"]
        paused += record["time"] - before if number and (halted or record.get("event") == GOES_ON) else 0.0
        halted = is_paused(record, halted)
        before = record["time"]
        seconds.append(record["time"] - first - paused)
    return seconds


def is_paused(record: Mapping[str, object], before: bool) -> bool:
    """Whether the run is paused after this record; `before`: whether it was paused before it."""
    if record.get("event") == GOES_ON:
        return False
    return record[PAUSE] == "begins" if PAUSE in record else before


def read_metrics(path: Path, kinds: Iterable[str] = KINDS) -> list[dict[str, Any]]:
    """The records of a run's folder or of its file, without updates that were made again,
    and without a last line that is not whole."""
    path = path / FILE if path.is_dir() else path
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read(path).split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            if record["kind"] == "event" and record["event"] == RESUMED:
                records = [known for known in records if _made(known) <= record["update"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{path}: line {number} is no record of metrics ({error!r}). Restore the file, or remove the line."
            ) from None
        records.append(record)
    wanted = set(kinds)
    return [record for record in records if record["kind"] in wanted]


def _made(record: Mapping[str, Any]) -> int:
    """The update that a record came with, if it comes again with that; else none, and it stays."""
    return int(record["update"] if record["kind"] == "update" else record.get("training_step", -1))


def _plain(value: Any) -> Value:
    """Returns a value as JSON has it; what is no number is None."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    if hasattr(value, "item"):  # a number of numpy's or torch's
        value = value.item()
    if isinstance(value, bool | int):
        return value
    try:
        return float(value) if math.isfinite(value) else None
    except TypeError:
        raise ConfigError(f"a metric is {value!r}; expected a number, True or False, or a text.") from None


def flat_scalars(payload: object) -> dict[str, Any]:
    """An actor's report, flat; only numbers, flags and text are metrics."""
    if not isinstance(payload, Mapping):
        raise SchemaError(
            f"send-stats was given a {type(payload).__name__}; give a dictionary of numbers, flags and text."
        )
    flat = {}
    for path, value in flatten(payload).items():
        if getattr(value, "size", 2) == 1:
            value = value.reshape(-1)[0].item()
        if not isinstance(value, (str, bool, int, float)):
            raise SchemaError(f"send-stats: {path} is a {type(value).__name__}; give numbers, flags and text only.")
        flat[path] = value
    return flat
