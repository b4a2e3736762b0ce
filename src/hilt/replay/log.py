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
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError, FormatError, HiltError, SchemaError, StorageError, UnknownNameError
from hilt.core.files import DISK, Files, storage_errors
from hilt.core.tree import Array, Spec, Tree, flatten, unflatten
from hilt.replay.catalog import Catalog, Lane
from hilt.replay.durability import Durability, Syncer
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.sampling.assembly import Steps, check_out
from hilt.replay.sampling.limiters import Limited, RateLimiter
from hilt.replay.schema import BUILT_IN_DEFAULTS, Schema, check_sources
from hilt.replay.settings import ReadOptions, as_compression, as_folder, as_sequence, check_new, check_settings, segment_bytes_for
from hilt.replay.step_encoder import StepEncoder, TrajectorySteps
from hilt.replay.storage.lock import WriterLock
from hilt.replay.storage.records import FORMAT, read_settings
from hilt.replay.storage.segment import Segment
from hilt.replay.view import Selection, View
from hilt.replay.writer import EpisodeWriter

_OFFSET = (1 << OFFSET_BITS) - 1
logger = logging.getLogger("hilt.replay")


class Log(Catalog):
    """Make one with `Log.create`, `Log.open` or `Log.anonymous`."""

    def __init__(self, path: Path, settings: dict[str, Any], files: Files, lock: WriterLock | None, options: ReadOptions):
        super().__init__(path, settings, files, lock is not None, options)
        self.durability = Durability.parse(settings["durability"])
        self._limited: list[Limited] = []
        self.synced = 0
        """How many of the steps appended since opening are power-safe."""
        self._writer_lock = lock
        self._compressing: list[threading.Thread] = []
        self.temporary = False  # whether it is removed when it is closed
        self._started = time.monotonic()

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
        full. `cache_bytes` bounds how much of the frames is memory-mapped; the rest is read from the files. `verify_reads` says which
        frames are compared with their checksums: ``"always"`` all, ``"sampled"`` of those in memory 1 in 16, ``"never"`` none.
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
        ``capacity_steps=``. A reader may leave out columns with `without`: steps whose frames are damaged only there are shown.
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
            raise ConfigError(f"{', '.join(changes)}: a log that is opened for reading keeps its settings; open it with mode='a'.")
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
            log.load()
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
            return EpisodeWriter(self, self.take_lane(), self.take_trajectory(), origin)

    def check(self, step: Tree, cast: bool = False) -> list[Array]:
        """The step's leaves in the order of the schema; what does not fit is refused and counted."""
        try:
            return self.schema.check(step, cast)
        except SchemaError:
            self.counts["rejected"] += 1
            raise

    @contextlib.contextmanager
    def inserting(self, steps: int, timeout: float | None) -> Iterator[None]:
        """Rate limiters let so many steps in, and no other thread writes or draws. What a step goes on with is found out inside."""
        with self._admitted(steps, timeout), self.lock:
            self.require_writable()
            yield

    def written(self, lane: Lane) -> None:
        """Steps were committed to a lane: makes them as safe as promised."""
        if self.durability.every_step:
            self._sync_written([lane.segment])
        elif self._syncer is not None:
            self._syncer.notify()

    def episode_written(self, lane: Lane) -> None:
        """The episode that wrote to a lane has ended: makes it as safe as promised."""
        self.give_lane(lane)
        if self.durability.every_episode and not self.durability.every_step:
            self._sync_written([lane.segment])
        self.tidy()

    def tidy(self) -> None:
        """Makes room for what was committed, and tells the limiters about both."""
        self.enforce_capacity()
        self.tell_limiters()

    def add(
        self,
        trajectory: Tree,
        *,
        actor: str = "",
        boot: str = "",
        store: str = "",
        sequence: int = -1,
        timeout: float | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> int:
        """Stores a whole ``[T, B, ...]`` trajectory and returns its number; `facts` are kept with it.

        Process-safe when it returns, and power-safe too with 'every step' and 'every episode'.
        """
        try:
            shape, leaves = self.schema.check_batch(self._complete(trajectory))
        except SchemaError:
            self.counts["rejected"] += 1
            raise
        (length, width), sequence = shape, as_sequence(sequence)
        if length == 0 or width == 0:
            raise SchemaError(f"a trajectory needs at least one step, got T={length} and B={width}.")
        with self.inserting(length * width, timeout):
            number = self.take_trajectory()
            if facts:
                self.facts.annotate(number, facts)
            steps = TrajectorySteps(self.schema, leaves, (length, width))
            self._write_trajectory(steps, StepEncoder(self.schema, number, self.facts.origin(actor, boot, store), width), sequence)
            for place in self.index.places_of(number):
                self.index.entries["open"][place] = False
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

    def relabel(self, trajectory: int, column: str, values: Any, first: int = 0) -> None:
        """Gives steps of a trajectory, from offset `first` on, new values in a small column such as ``rewards``."""
        with self.lock:
            self.require_writable()
            self._check_trajectory(trajectory)
            if column not in self.schema.layout.inline:
                raise UnknownNameError("column of numbers", column, self.schema.layout.inline)
            spec, given = self.schema.columns[column], np.asarray(values)
            if not given.ndim or given.shape[1:] != spec.shape:
                raise SchemaError(f"{column}: expected one value of shape {spec.shape} per step, got an array of shape {given.shape}.")
            if spec.dtype.kind == "f" and given.dtype.kind in "iu":
                given = given.astype(spec.dtype)
            _, (checked,) = Spec({column: spec}).check_batch(unflatten({column: given}), leading=1, cast=True)
            if column == "source":
                check_sources(checked)
            steps = self.trajectory_keys(trajectory) & _OFFSET
            if not len(given) or not isinstance(first, (int, np.integer)):
                raise SchemaError(f"{column}: expected one value or more from a whole offset on, got {len(given)} from {first!r} on.")
            if first < steps[0] or first + len(given) - 1 > steps[-1]:
                has, given_to = f"{steps[0]} to {steps[-1]}", f"{first} to {first + len(given) - 1}"
                raise SchemaError(f"trajectory {trajectory} has the steps {has}, and {given_to} were to get new values in {column}.")
            self.facts.relabel(trajectory, column, checked, int(first))
            self._facts_changed(trajectory)

    def delete(self, trajectory: int) -> None:
        """Takes a trajectory out of every view. Its bytes go when nothing else of their segment is wanted."""
        with self.lock:
            self.require_writable()
            self._check_trajectory(trajectory)
            if any(self.index.entries["open"][place] for place in self.index.places_of(trajectory)):
                raise ConfigError(f"trajectory {trajectory} is still running; end its episode before deleting it.")
            self.facts.delete(trajectory)
            self._settle_facts()
            self.drop(trajectory)
            self.tell_limiters()

    def sync(self) -> None:
        """All steps and facts so far are power-safe when this returns."""
        with self.reading():  # so that no segment is closed meanwhile
            with self.lock:
                segments, appended = list(self._segments.values()), self.appended
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
        """The steps for which a predicate on one column holds. It gets ``[n, ...]`` values and returns ``[n]`` booleans."""
        return View(self, Selection.where(self, column, predicate))

    def read(self, keys: Any, columns: Sequence[str] | None = None, out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Steps by key, as a nested batch; `columns` names single columns or whole subtrees, `out` takes the arrays."""
        keys, into = np.asarray(keys, np.int64), None
        if out is not None:
            into = flatten(out)
            check_out(Steps().leaves(self.schema, columns, len(keys)), into)
        with self.reading() as steps:
            return unflatten(steps.gather(keys, self.schema.select(columns), into))

    def trajectories(self) -> list[int]:
        """The numbers of all trajectories, oldest first."""
        with self.lock:
            return np.unique(self.index.keys >> OFFSET_BITS).tolist()  # type: ignore[no-any-return]

    def trajectory_keys(self, trajectory: int) -> Array:
        """The keys of a trajectory's steps, T-major."""
        with self.lock:
            self._check_trajectory(trajectory)
            with self.reading() as steps:
                return steps.trajectory(trajectory)

    def refresh(self) -> None:
        """Shows a reader what the writer has added and removed since the last look."""
        if not self._write:
            with self.lock:
                self.load_new()
                self.tell_limiters()

    def stats(self) -> dict[str, Any]:
        """Counters since opening, sizes now, and rates per second since opening."""
        with self.lock:
            seconds = max(1e-9, time.monotonic() - self._started)
            return {
                "steps": self.live_steps,
                "trajectories": len(self.trajectories()),
                "bytes": self.live_bytes,
                "segments": len(self._segments),
                **self.counts,
                "power_safe": self.synced,
                "index_bytes": self.index.nbytes(),
                "disk_reads": sum(table.disk_reads for table in self._tables),
                "inserted_per_s": self.counts["inserted"] / seconds,
                "sampled_per_s": self.counts["sampled"] / seconds,
            }

    def compress(self) -> None:
        """Waits until every full segment is compressed as the settings say."""
        for thread in self._compressing:
            thread.join()
        self._compressing = []

    def close(self) -> None:
        """Makes everything power-safe (unless the durability is 'never') and lets go of all files; a temporary log is removed."""
        if self.closed or self.process != os.getpid():  # a forked process has nothing to bring to an end
            return
        if self._syncer is not None:
            self._syncer.close()
        self.compress()
        try:
            if self._write and self.durability.words != "never":
                self.sync()
            if self._write and not self.temporary:
                self.write_seal()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        with self.lock:
            self.closed = True
            for limited in self._limited:
                limited.limiter.close()
            self.close_tables()
            self.facts.close()
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
        return self.live_steps

    # Rate limiters

    def limit(self, limiter: RateLimiter, selection: Selection) -> None:
        """Writers obey this limiter from now on; it counts the steps of one view."""
        with self.lock:
            if any(limited.limiter is limiter or limited.selection is selection for limited in self._limited):
                raise ConfigError("this limiter, or this view, is another sampler's already; make a new limiter and a new view for each.")
            limiter.inserted(len(selection.current()))
            self._limited.append(Limited(limiter, selection, selection.entered, selection.left))

    def tell_limiters(self) -> None:
        """Tells every limiter how many steps entered and left its view since it was told last."""
        for limited in self._limited:
            limited.tell()

    def _admitted(self, steps: int, timeout: float | None) -> contextlib.AbstractContextManager[object]:
        """Waits until every rate limiter admits this number of steps. They are counted by `tell_limiters`, once they are there."""
        if not self._limited:
            return _NOTHING
        stack = contextlib.ExitStack()
        try:
            for limited in self._limited:
                stack.enter_context(limited.limiter.inserting(steps, timeout)).stored = 0
        except BaseException:
            stack.close()
            raise
        return stack

    # Inside

    def _write_trajectory(self, steps: TrajectorySteps, encoder: StepEncoder, sequence: int) -> None:
        number, lane = encoder.trajectory, self.take_lane(steps.count)
        written: list[Segment] = []
        in_pieces = self.room(lane) < steps.count
        try:
            if in_pieces:  # longer than a segment: it counts when the last piece is there
                self.facts.begin(number)
                self._sync_pieces([])
            while encoder.steps < steps.count:
                if written:
                    lane = self.next_lane(lane)
                stop = min(steps.count, encoder.steps + self.room(lane))
                piece = encoder.many(steps, encoder.steps, stop, False, sequence, lane.segment)
                self.enter(lane, lane.segment.append(piece.rows, piece.steps, piece.frames), piece, None)
                encoder.advance(piece)
                written.append(lane.segment)
            if in_pieces:
                self._sync_pieces(written)
                self.facts.finish(number)
                self._sync_pieces([])
        except BaseException:
            self._take_back(number)
            raise
        finally:
            self.give_lane(lane)
        if self.durability.every_episode:
            self._sync_written(written)

    def _sync_pieces(self, written: Sequence[Segment]) -> None:
        """Syncs the pieces, so that no power cut takes one and leaves the record that all are there."""
        if self.durability.words != "never":
            for segment in written:
                segment.sync()
            self.facts.sync()

    def _take_back(self, number: int) -> None:
        """Removes what was written of a trajectory whose writing failed."""
        for place in self.index.places_of(number):
            self.index.entries["open"][place] = False
        for selection in self.selections():
            selection.taken_back(number << OFFSET_BITS, 1 << OFFSET_BITS)
        dropped = self.drop(number)
        self.appended -= dropped
        self.counts["inserted"] -= dropped
        if dropped:
            with contextlib.suppress(StorageError):  # without this line, the next writer sees that it was not finished
                self.facts.delete(number)

    def _complete(self, trajectory: Tree) -> dict[str, Any]:
        """The trajectory with the built-in columns that it leaves out."""
        absent = [name for name in BUILT_IN_DEFAULTS if name not in trajectory]
        if not absent:
            return dict(trajectory)
        first: Any = trajectory
        while isinstance(first, Mapping):
            first = next(iter(first.values()), np.zeros((0, 0)))
        axes = np.shape(first)[:2]
        return {**trajectory, **{n: np.full(axes, BUILT_IN_DEFAULTS[n], self.schema.columns[n].dtype) for n in absent}}

    def _sync_written(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.sync()
        self.facts.sync()
        if not any(s.unsynced for s in self._segments.values()):
            self.synced = self.appended

    def _settle_facts(self) -> None:
        """A fact was written. It becomes power-safe as the end of an episode does."""
        if self.durability.every_episode:
            self.facts.sync()
        elif self._syncer is not None:
            self._syncer.notify()

    def _facts_changed(self, trajectory: int) -> None:
        self._settle_facts()
        for selection in self.selections():
            selection.refresh({trajectory})
        self.tell_limiters()

    def _check_trajectory(self, trajectory: int) -> None:
        if not len(self.index.places_of(trajectory)):
            raise UnknownNameError("trajectory", str(trajectory), map(str, self.trajectories()[-5:]))

    def sealed(self, segment: Segment) -> None:
        if self.settings["compression"]:
            thread = threading.Thread(target=self._compress, args=(segment,), name="hilt-compress", daemon=True)
            self._compressing = [t for t in self._compressing if t.is_alive()] + [thread]
            thread.start()

    def _compress(self, segment: Segment) -> None:
        try:
            with self.reading():
                if segment.number not in self._segments:
                    return
                raw = segment.compress(self.settings["compression"])
        except HiltError as error:
            logger.warning("%s: not compressed, its frames stay as they are: %s", segment.folder, error)
            return
        with self.lock:
            if raw and not self.closed and segment.number in self._segments:
                self.reopen(segment.number)
                for path in raw:
                    self._files.remove(path)


_NOTHING = contextlib.nullcontext()
