"""A log: an append-only, crash-safe folder of trajectories, and the views of it.

    log = Log.create("runs/pick/log", Schema.of(example_step), capacity_steps=200_000)
    with log.episode(actor="bench-1") as episode:
        episode.append(step)
    batch = log.all().sample(256)

One process writes, any number read. Indices are drawn under a lock, bytes are gathered without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hilt.core.checksums import write_json
from hilt.core.errors import ClosedError, ConfigError, FormatError, ReadOnlyError, SchemaError, UnknownNameError
from hilt.core.files import DISK, Files, storage_errors
from hilt.core.tree import Array, Tree, flatten, unflatten
from hilt.replay.active_segments import ActiveSegments
from hilt.replay.catalog import Catalog
from hilt.replay.compressor import Compressor
from hilt.replay.durability import Durability, Syncer
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.retention import Retention
from hilt.replay.sampling.assembly import Steps, check_out
from hilt.replay.sampling.limiters import Limiters, RateLimiter
from hilt.replay.schema import Schema
from hilt.replay.settings import (
    ReadOptions,
    as_compression,
    as_folder,
    as_sequence,
    check_new,
    check_settings,
    segment_bytes_for,
)
from hilt.replay.snapshot import Snapshot
from hilt.replay.step_encoder import StepEncoder, TrajectorySteps
from hilt.replay.storage.lock import WriterLock, after_fork, wait_before_fork
from hilt.replay.storage.open_segments import ActiveSegment
from hilt.replay.storage.records import FORMAT, read_settings
from hilt.replay.storage.scan import Damage, damage_in
from hilt.replay.storage.segment import Segment
from hilt.replay.view import Selection, View, Watcher
from hilt.replay.writer import EpisodeWriter, write_trajectory

_OFFSET = (1 << OFFSET_BITS) - 1
COMPRESS_TIMEOUT_S = 600.0
logger = logging.getLogger("hilt.replay")


class Log:
    """Make one with `Log.create`, `Log.open` or `Log.anonymous`.

    It is composed of a `Catalog` (where every step lies), `ActiveSegments` (those to which steps are appended),
    `Retention` (what is evicted when it is full), a `Compressor`, the `Limiters` of its samplers, and `Facts` (what is
    known about trajectories). Each part is given what it needs; none refers to the log.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], files: Files, lock: WriterLock | None, options: ReadOptions
    ):
        self.path, self.settings, self._write = path, settings, lock is not None
        self.lock = threading.RLock()
        """Held while the log is changed or sampled. A forked process gets another one."""
        self.catalog = Catalog(path, settings, files, self._write, options)
        self.schema, self.index, self.facts = self.catalog.schema, self.catalog.index, self.catalog.facts
        self.quarantine, self.seal, self.recovery = self.catalog.quarantine, self.catalog.seal, self.catalog.recovery
        self.counts, self.pool = self.catalog.counts, self.catalog.pool
        self._compressor = Compressor(self.catalog, self.lock, files)
        self.active_segments = ActiveSegments(self.catalog, self._compressor.start)
        self._retention = Retention(self.catalog)
        self._limiters = Limiters()
        self.durability = Durability.parse(settings["durability"])
        self._syncer: Syncer | None = None
        self.synced = 0
        """How many of the steps appended since opening are power-safe."""
        self._writer_lock = lock
        self.temporary = False  # whether it is removed when it is closed
        self._started = time.monotonic()
        self.closed = self.cut_by_fork = False
        self.process = os.getpid()
        after_fork(self, "stop_writing")
        wait_before_fork(self)

    # Making and opening

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        schema: Schema,
        *,
        capacity_steps: int | None = None,
        capacity_bytes: int | None = None,
        durability: str = "every episode",
        compression: Mapping[str, str] | None = None,
        segment_bytes: int | None = None,
        cache_bytes: int | None = None,
        verify_reads: str = "sampled",
        files: Files = DISK,
    ) -> Log:
        """A new log in a folder that does not exist or is empty.

        `capacity_steps` and `capacity_bytes` bound it: the oldest trajectories go first, and their files are deleted.
        `compression` maps a large column to ``"zlib"`` or ``"zstd"``; it is done in the background, when a segment is
        full. `cache_bytes` bounds how much of the frames is memory-mapped; the rest is read from the files.
        `verify_reads` determines which frames are compared with their checksums: ``"always"`` all, ``"sampled"`` of
        those in memory 1 in 16, ``"never"`` none.
        """
        folder = as_folder(path)
        check_new(folder)
        settings = {
            "format": FORMAT,
            "schemas": [schema.to_json()],
            "capacity_steps": capacity_steps,
            "capacity_bytes": capacity_bytes,
            "durability": durability,
            "compression": as_compression(compression),
            "segment_bytes": segment_bytes,
        }
        check_settings(settings, schema)
        settings["segment_bytes"] = segment_bytes_for(capacity_bytes) if segment_bytes is None else segment_bytes
        options = ReadOptions(cache_bytes, verify_reads)
        files.make_folders(folder)
        with WriterLock(folder):
            check_new(folder)
            files.make_folders(folder / "segments")
            write_json(folder / "log.json", settings, files)
        return cls._start(folder, settings, files, True, options)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: Literal["r", "a"] = "a",
        *,
        schema: Schema | None = None,
        cache_bytes: int | None = None,
        verify_reads: str = "sampled",
        without: Sequence[str] = (),
        files: Files = DISK,
        **changes: Any,
    ) -> Log:
        """An existing log, for reading ('r', any number of processes) or for appending too ('a', one process).

        `schema` may add columns that have a default. `changes` are settings that change from now on, such as
        ``capacity_steps=``. A reader may leave out columns with `without`: steps whose
        frames are damaged only there are shown.
        """
        folder = as_folder(path)
        if mode not in ("r", "a"):
            raise ConfigError(f"mode {mode!r}: expected 'r' to read or 'a' to append.")
        with storage_errors(folder):
            found = os.listdir(folder)
        if "log.json" not in found:
            raise FormatError(f"{folder}: not a Hilt log (no log.json in it). Give the folder that Log.create made.")
        settings = read_settings(folder / "log.json")
        known = [name for name in settings if name not in ("format", "schemas")]
        if unknown := [name for name in changes if name not in known]:
            raise UnknownNameError("setting", unknown[0], known)
        if changes and mode == "r":
            raise ConfigError(
                f"{', '.join(changes)}: a log that is opened for reading keeps its settings; open it with mode='a'."
            )
        changed = {**settings, **changes}
        old = Schema.from_json(settings["schemas"][-1])
        if schema is not None and schema.grown_from(old):
            changed["schemas"] = [*settings["schemas"], schema.to_json()]
        check_settings(changed, schema or old)
        if without and mode == "a":
            raise ConfigError("without=: a writer needs every column; open the log with mode='r'.")
        options = ReadOptions(cache_bytes, verify_reads, (without,) if isinstance(without, str) else tuple(without))
        if mode == "a" and changed != settings:
            with WriterLock(folder):
                write_json(folder / "log.json", changed, files)
        return cls._start(folder, changed, files, mode == "a", options)

    @classmethod
    def anonymous(cls, schema: Schema, **settings: Any) -> Log:
        """A log in a temporary folder, which is removed when the log is closed or nothing refers to it."""
        folder = Path(tempfile.mkdtemp(prefix="hilt-log-"))
        try:
            log = cls.create(folder, schema, **{"durability": "never", **settings})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        log.temporary = True
        logger.info("no path was given: steps are kept in %s until the log is closed; give a path to keep them", folder)
        return log

    @classmethod
    def _start(cls, folder: Path, settings: dict[str, Any], files: Files, write: bool, options: ReadOptions) -> Log:
        lock = WriterLock(folder).__enter__() if write else None
        try:
            log = cls(folder, settings, files, lock, options)
        except BaseException:
            if lock is not None:
                lock.__exit__()
            raise
        try:
            log.active_segments.adopt(log.catalog.load(log._retention.enforce))
        except BaseException:
            log._let_go()
            raise
        if write and log.durability.milliseconds is not None:
            log._syncer = Syncer(log.durability.milliseconds, log.sync)
        return log

    # Writing

    def episode(self, actor: str = "", boot: str = "", store: str = "") -> EpisodeWriter:
        """A new running episode, to which single steps are appended."""
        with self.lock:
            self.require_writable()
            origin = self.facts.origin(actor, boot, store)
            return EpisodeWriter(self, self.active_segments.acquire(), self.catalog.take_trajectory(), origin)

    def check(self, step: Tree, cast: bool = False) -> list[Array]:
        """The step's leaves in the order of the schema; what does not fit is refused and counted."""
        try:
            return self.schema.check(step, cast)
        except SchemaError:
            self.counts["rejected"] += 1
            raise

    @contextlib.contextmanager
    def inserting(self, steps: int, timeout: float | None) -> Iterator[None]:
        """A context in which rate limiters have admitted this number of steps, and
        no other thread writes or samples."""
        with self._limiters.inserting(steps, timeout), self.lock:
            self.require_writable()
            yield

    def written(self, active: ActiveSegment) -> None:
        """Makes steps that were written to a segment as safe as promised."""
        if self.durability.every_step:
            self.sync_written([active.segment])
        elif self._syncer is not None:
            self._syncer.notify()

    def episode_written(self, active: ActiveSegment) -> None:
        """Makes an episode that has ended in this segment as safe as promised."""
        self.active_segments.release(active)
        if self.durability.every_episode and not self.durability.every_step:
            self.sync_written([active.segment])
        self.tidy()

    def sync_written(self, segments: Sequence[Segment]) -> None:
        """Steps and facts that were written to these segments are power-safe when this returns."""
        for segment in segments:
            segment.sync()
        self.facts.sync()
        if not any(segment.unsynced for segment in self.catalog.segments):
            self.synced = self.appended

    def tidy(self) -> None:
        """Makes room for what was committed, and tells the limiters about both."""
        self._retention.enforce()
        self._limiters.update()

    def add(
        self,
        trajectory: Tree,
        *,
        actor: str = "",
        boot: str = "",
        store: str = "",
        sequence: int = -1,
        timeout: float | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> int:
        """Stores a whole ``[T, B, ...]`` trajectory and returns its number; `facts` are kept with it.

        Process-safe when it returns, and power-safe too with 'every step' and 'every episode'.
        """
        try:
            shape, leaves = self.schema.check_batch(self.schema.complete_batch(trajectory))
        except SchemaError:
            self.counts["rejected"] += 1
            raise
        (length, width), sequence = shape, as_sequence(sequence)
        if length == 0 or width == 0:
            raise SchemaError(f"a trajectory needs at least one step, got T={length} and B={width}.")
        with self.inserting(length * width, timeout):
            number = self.catalog.take_trajectory()
            if facts:
                self.facts.annotate(number, facts)
            steps = TrajectorySteps(self.schema, leaves, (length, width))
            write_trajectory(
                self, steps, StepEncoder(self.schema, number, self.facts.origin(actor, boot, store), width), sequence
            )
            if self._syncer is not None:
                self._syncer.notify()
            self.tidy()
            return number

    def annotate(self, trajectory: int, **facts: Any) -> None:
        """Adds late facts about a trajectory, such as ``success=True``. The newest of each name counts."""
        with self.lock:
            self.require_writable()
            self._check_trajectory(trajectory)
            self.facts.annotate(trajectory, facts)
            self._facts_changed(trajectory)

    def relabel(self, trajectory: int, column: str, values: object, first: int = 0) -> None:
        """Gives steps of a trajectory, from offset `first` on, new values in a small column such as ``rewards``."""
        with self.lock:
            self.require_writable()
            self._check_trajectory(trajectory)
            self.facts.relabel(trajectory, column, self.check_values(trajectory, column, values, first), int(first))
            self._facts_changed(trajectory)

    def check_values(self, trajectory: int, column: str, values: object, first: int) -> Array:
        """New values for steps of a trajectory, from offset `first` on, as the column has them; others are refused."""
        checked = self.schema.check_values(column, values)
        steps = self.trajectory_keys(trajectory, hidden=True) & _OFFSET
        if not len(checked) or not isinstance(first, (int, np.integer)):
            raise SchemaError(
                f"{column}: expected one value or more from a whole offset on, got {len(checked)} from {first!r} on."
            )
        if first < steps[0] or first + len(checked) - 1 > steps[-1]:
            has, given_to = f"{steps[0]} to {steps[-1]}", f"{first} to {first + len(checked) - 1}"
            raise SchemaError(
                f"trajectory {trajectory} has the steps {has}, and {given_to} were to get new values in {column}."
            )
        return checked

    def delete(self, trajectory: int) -> None:
        """Takes a trajectory out of every view. Its bytes go when nothing else of their segment is wanted."""
        with self.lock:
            self.require_writable()
            self._check_trajectory(trajectory)
            if any(self.index.entries["open"][place] for place in self.index.places_of(trajectory)):
                raise ConfigError(f"trajectory {trajectory} is still running; end its episode before deleting it.")
            self.facts.delete(trajectory)
            self._settle_facts()
            self.catalog.drop(trajectory)
            self._limiters.update()

    def sync(self) -> None:
        """All steps and facts so far are power-safe when this returns."""
        with self.reading():  # so that no segment is closed meanwhile
            with self.lock:
                segments, appended = self.segments, self.appended
            for segment in segments:
                segment.sync()
            self.facts.sync()
        self.synced = max(self.synced, appended)

    # Views and reading

    def all(self) -> View:
        """Every step."""
        return View(self, Selection.all(self))

    def last(self, trajectories: int) -> View:
        """The steps of the newest trajectories."""
        return self.all().last(trajectories)

    def by_source(self, *sources: str) -> View:
        """The steps of those who acted: ``"policy"``, ``"human"``, ``"demo"``, ``"random"``."""
        return View(self, Selection.by_source(self, sources))

    def successes(self) -> View:
        """The steps of trajectories that succeeded: annotated so, or else with a true value in a column ``success``."""
        return View(self, Selection.successes(self))

    def where(self, column: str, predicate: Callable[[Array], Array]) -> View:
        """The steps for which a predicate on one column holds. It gets ``[n, ...]``
        values and returns ``[n]`` booleans."""
        return View(self, Selection.where(self, column, predicate))

    def read(
        self, keys: Sequence[int] | Array, columns: Sequence[str] | None = None, out: Tree | None = None
    ) -> dict[str, Any]:
        """Steps by key, as a nested batch; `columns` names single columns or whole subtrees, `out` takes the arrays."""
        keys, into = np.asarray(keys, np.int64), None
        if out is not None:
            into = flatten(out)
            check_out(Steps().leaves(self.schema, columns, len(keys)), into)
        with self.reading() as steps:
            return unflatten(steps.gather(keys, self.schema.select(columns), into))

    def reading(self) -> Snapshot:
        """The log as it is now, for a ``with``: until its end no step changes place, and none of their bytes go."""
        with self.lock:
            self.require_open()
            done = partial(self._done_reading, self.catalog.segments.readers.enter())
            return Snapshot(self.schema, self.index, self.catalog.segments.tables, self.facts, self.pool, done)

    def watch(self, selection: Watcher) -> None:
        """Reports every change to a selection, or another watcher, from now on, as long as it is referenced."""
        self.catalog.watch(selection)

    def damage(self) -> list[Damage]:
        """Reads every byte and lists what is not as it was written."""
        with self.reading():  # so that no segment is closed meanwhile, and one that was deleted meanwhile has no files
            return [
                damage
                for segment in self.segments
                for damage in damage_in(segment)
                if segment.number in self.catalog.segments
            ]

    def trajectories(self, hidden: bool = False) -> list[int]:
        """The numbers of all trajectories, oldest first; with `hidden` also of those that edits hide."""
        with self.lock:
            numbers: list[int] = np.unique(self.index.keys >> OFFSET_BITS).tolist()
            shown = self.facts.edits.shown
            return [number for number in numbers if not shown.hides(number)] if shown and not hidden else numbers

    def trajectory_keys(self, trajectory: int, hidden: bool = False) -> Array:
        """The keys of a trajectory's steps, T-major; with `hidden` also of those that edits hide."""
        with self.lock:
            self._check_trajectory(trajectory)
            with self.reading() as steps:
                return steps.trajectory(trajectory, hidden)

    def refresh(self) -> None:
        """Shows a reader what the writer has added and removed since the last look, and anyone what was edited."""
        with self.lock:
            if self._write:
                self.catalog.load_edits()
            else:
                self.catalog.load_new()
            self._limiters.update()

    def look_for_edits(self) -> None:
        """Takes in now and then what other processes edited: for samplers, which call it under the lock."""
        if self.facts.edits.due() and self.catalog.load_edits():
            self._limiters.update()

    def edit(self, edit: dict[str, Any] | Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Appends an edit of `Edits`, also to a log opened for reading; returns it with its number. Process-safe when
        it returns, and power-safe unless the durability is 'never'. A function decides while no other process edits."""
        with self.lock:
            self.require_open()
            made, changed = self.facts.edits.append(edit, self.catalog.durable)
            self.catalog.refresh_selections(changed)
            self._limiters.update()
            return made

    def stats(self) -> dict[str, Any]:
        """Counters since opening, sizes now, and rates per second since opening."""
        with self.lock:
            seconds = max(1e-9, time.monotonic() - self._started)
            return {
                "steps": self.live_steps,
                "trajectories": len(self.trajectories()),
                "bytes": self.live_bytes,
                "segments": len(self.catalog.segments),
                **self.counts,
                "power_safe": self.synced,
                "index_bytes": self.index.nbytes(),
                "disk_reads": self.catalog.segments.disk_reads(),
                "inserted_per_s": self.counts["inserted"] / seconds,
                "sampled_per_s": self.counts["sampled"] / seconds,
            }

    def complete_segments(self) -> None:
        """Completes every segment to which no episode is written, as if it were full, so that it is compressed too."""
        with self.lock:
            self.require_writable()
            self.active_segments.complete_idle()

    def compress(self, timeout: float = COMPRESS_TIMEOUT_S) -> None:
        """Waits until every full segment is compressed as the settings say; raises
        `DeadlineError` after `timeout` seconds."""
        self._compressor.wait(timeout)

    def close(self) -> None:
        """Makes everything power-safe (unless the durability is 'never') and lets go of
        all files; a temporary log is removed."""
        if self.closed or self.process != os.getpid():  # a forked process has nothing to bring to an end
            return
        if self._syncer is not None:
            self._syncer.close()
        try:
            self.compress()
            if self._write and self.durability.words != "never":
                self.sync()
            if self._write and not self.temporary:
                with self.lock:
                    self.catalog.write_seal()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        with self.lock:
            self.closed = True
            self._limiters.close()
            self.catalog.close()
            if self._writer_lock is not None:
                self._writer_lock.__exit__()
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "temporary", False) and not self.closed:
            self.close()

    def __len__(self) -> int:
        return self.catalog.live_steps

    @property
    def live_steps(self) -> int:
        """How many steps there are."""
        return self.catalog.live_steps

    @property
    def live_bytes(self) -> int:
        """Bytes of all segments, as they lie on disk."""
        return self.catalog.live_bytes

    @property
    def appended(self) -> int:
        """How many steps were appended since opening."""
        return self.catalog.appended

    @property
    def segments(self) -> list[Segment]:
        return list(self.catalog.segments)

    # Rate limiters

    def limit(self, limiter: RateLimiter, selection: Selection) -> None:
        """Writers obey this limiter from now on; it counts the steps of one view."""
        with self.lock:
            self._limiters.add(limiter, selection)

    def update_limiters(self) -> None:
        """Lets every limiter count the steps that entered and left its view since the last update."""
        self._limiters.update()

    # Whether it may be used

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path}: this log is closed; open it again.")
        if self.cut_by_fork:
            raise ClosedError(
                f"{self.path}: this process was forked while a thread changed it; open it again, with mode='r'."
            )

    def require_writable(self) -> None:
        self.require_open()
        if not self._write and self.process != os.getpid():
            who = f"process {self.process} writes to this log, and this one was forked from it"
            raise ReadOnlyError(f"{self.path}: {who}; open it with mode='r'.")
        if not self._write:
            raise ReadOnlyError(f"{self.path}: opened for reading; open it with mode='a' to write.")
        if self._syncer is not None:
            self._syncer.check()

    def stop_writing(self) -> None:
        """In a forked process: its parent goes on writing."""
        self._write = False
        self.catalog.stop_writing()
        self._compressor.after_fork(self.lock)

    # Inside

    def _done_reading(self, epoch: int) -> None:
        with self.lock:
            self.catalog.segments.readers.leave(epoch)

    def _settle_facts(self) -> None:
        """A fact was written. It becomes power-safe as the end of an episode does."""
        if self.durability.every_episode:
            self.facts.sync()
        elif self._syncer is not None:
            self._syncer.notify()

    def _facts_changed(self, trajectory: int) -> None:
        self._settle_facts()
        self.catalog.refresh_selections({trajectory})
        self._limiters.update()

    def _check_trajectory(self, trajectory: int) -> None:
        if not len(self.index.places_of(trajectory)):
            raise UnknownNameError("trajectory", str(trajectory), map(str, self.trajectories()[-5:]))
