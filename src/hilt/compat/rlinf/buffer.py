"""RLinf's `TrajectoryReplayBuffer`, as a face of a log.

Same arguments, same random stream, same batches, same folders; sampling reads only the rows it
needs, from disk, however many trajectories there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.compat.rlinf.trajectory_cache import TrajectoryCache
from hilt.core.errors import ClosedError, ConfigError, CorruptError, EmptyError, HiltError, SchemaError, explained_calls
from hilt.core.files import DISK
from hilt.core.tree import Array, flatten, unflatten
from hilt.formats import rlinf_folder as folders
from hilt.formats.rlinf_folder import FolderIndex, FolderSaver
from hilt.formats.rlinf_trajectory import Trajectory, ends_and_source, step_rows
from hilt.replay import tensors as bridge
from hilt.replay.key_ranges import key_of
from hilt.replay.log import Log
from hilt.replay.schema import Schema
from hilt.replay.settings import as_folder, as_whole_number
from hilt.replay.storage.lock import wait_before_fork

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger("hilt.replay")
_FIELDS = (
    "actions",
    "intervene_flags",
    "rewards",
    "terminations",
    "truncations",
    "dones",
    "prev_logprobs",
    "prev_values",
    "versions",
)
_TREES = ("curr_obs", "next_obs", "forward_inputs")


@explained_calls
class TrajectoryReplayBuffer:
    """Trajectories ``[T, B, ...]``, sampled as chunk steps.

    seed
        Of the buffer's own generator; no global one is touched.
    enable_cache, cache_size
        Whether the newest trajectories are also kept in memory, and how many.
    sample_window_size
        The number of newest trajectories that are sampled; 0 for all.
    auto_save, auto_save_path, trajectory_format
        Whether every trajectory is written to a folder in RLinf's format (``pt`` or ``pkl``), by a thread.
    load_path, is_distributed, local_rank, world_size
        A checkpoint to begin with; see `load_checkpoint`.

    Without `auto_save` trajectories live in a temporary folder until `save_checkpoint` or `close`. `log` is the log
    underneath, with all its views, from the first trajectory on.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str = "",
        trajectory_format: str = "pt",
        *,
        load_path: str | None = None,
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
    ):
        folders.check_format_name(trajectory_format)
        sample_window_size = as_whole_number(
            "sample_window_size", sample_window_size, "the number of trajectories, 0 for all", 0
        )
        if auto_save and not auto_save_path:
            raise ConfigError("auto_save=True needs auto_save_path=, the folder to write to.")
        if auto_save_path and not auto_save:
            raise ConfigError("auto_save_path= is only used with auto_save=True; give both.")
        self.seed, self.sample_window_size = seed, sample_window_size
        self.auto_save, self.trajectory_format = auto_save, trajectory_format
        self.log: Log | None = None
        self._cache = TrajectoryCache(cache_size) if enable_cache else None
        self._generator = bridge.generator(seed)
        self._index = FolderIndex(trajectory_format, seed if seed is not None else 0)
        self._saver = (
            FolderSaver(as_folder(auto_save_path, "auto_save_path"), self._index.without_entries())
            if auto_save
            else None
        )
        self._numbers: dict[int, int] = {}  # trajectory id -> its number in the log
        self._unread: dict[int, Path] = {}  # trajectory id -> its file, not read yet
        self._read_from: dict[int, Path] = {}  # the same, once read
        self._types: dict[str, str] = {}
        self._counts = {"sampled": 0, "disk_reads": 0, "corrupt": 0}
        self.lock, self.cut_by_fork = threading.RLock(), False
        wait_before_fork(self)
        self._closed = False
        if load_path is not None:
            self.load_checkpoint(load_path, is_distributed, local_rank, world_size)

    # Adding and sampling

    def add_trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        """Stores trajectories. With `auto_save` they are written to the folder meanwhile."""
        if isinstance(trajectories, Trajectory | Mapping | str) or not isinstance(trajectories, Iterable):
            raise ConfigError(f"add_trajectories: expected a list of trajectories, got {type(trajectories).__name__}.")
        with self.lock:
            self._require_open()
            for trajectory in trajectories:
                self._add(trajectory)

    def sample(self, num_chunks: int = 0) -> dict[str, Tensor]:
        """A batch of chunk steps as torch tensors, ``[num_chunks, ...]``, drawn with replacement from the window.

        At most as many as the window holds.
        """
        return self.sample_chunks(
            as_whole_number("num_chunks", num_chunks, "the number of chunk steps of the batch", 1)
        )

    def sample_chunks(self, num_chunks: int) -> dict[str, object]:
        """Samples chunks like `sample`; an empty batch for 0."""
        if as_whole_number("num_chunks", num_chunks, "the number of chunk steps of the batch") <= 0:
            return {}
        with self.lock:
            self._require_open()
            while True:
                ids, rows = self._draw(num_chunks)
                if self._all_imported(ids):
                    break
            self._counts["sampled"] += len(ids)
            arrays = self._read(ids, rows)
        return unflatten({path: bridge.from_raw_array(array, self._types[path]) for path, array in arrays.items()})

    # Sizes

    @property
    def size(self) -> int:
        """The number of trajectories in the buffer."""
        return len(self._index.entries)

    @property
    def total_samples(self) -> int:
        """The number of chunk steps in the buffer."""
        return self._index.total_samples

    @property
    def trajectory_counter(self) -> int:
        """The number that the next trajectory gets."""
        return self._index.trajectory_counter

    def __len__(self) -> int:
        return self.size

    def is_ready(self, min_size: int) -> bool:
        """Returns whether there are at least this number of trajectories."""
        return self.size >= as_whole_number("min_size", min_size, "the number of trajectories that are needed")

    @property
    def random_generator(self) -> torch.Generator:
        """What samples are drawn with; its state decides the next ones."""
        return self._generator

    async def is_ready_async(self, min_size: int) -> bool:
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        return {
            "num_trajectories": self.size,
            "total_samples": self.total_samples,
            "cache_size": len(self._cache or ()),
        }

    def stats(self) -> dict[str, object]:
        """Returns the values of `get_stats`, counters (`disk_reads` are chunk steps that were
        not in the cache), and those of the log."""
        return {**self.get_stats(), **self._counts, "log": self.log.stats() if self.log is not None else {}}

    # Checkpoints

    def save_checkpoint(self, save_path: str) -> None:
        """Writes every trajectory, the index and the metadata to a folder. The
        index names only files that are there."""
        folder = as_folder(save_path, "save_path")
        DISK.make_folder(folder)
        with self.lock:
            self._require_open()
            self._finish_writes()
            for number, entry in self._index.entries.items():
                target = folder / folders.file_name(entry, self.trajectory_format)
                source = self._file_of(number, entry)
                if source is not None and source.suffix == target.suffix:
                    folders.copy_trajectory(source, target)
                else:
                    folders.write_trajectory(target, self._fields_of(number, entry))
            folders.write_index(folder, self._index)
            folders.remove_unnamed(
                folder, (folders.file_name(e, self.trajectory_format) for e in self._index.entries.values())
            )

    def load_checkpoint(
        self, load_path: str, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Replaces the buffer's content by a checkpoint, or by the share of one rank of it.

        Files are read when a sample first needs them. One that is missing or damaged is left out, counted and named in
        a warning; the rest stays usable. Format, seed and generator become those of the checkpoint.
        """
        if is_distributed and world_size < 1:
            raise ConfigError(f"world_size ({world_size}) must be at least 1.")
        if is_distributed and not 0 <= local_rank < world_size:
            raise ConfigError(f"local_rank ({local_rank}) must be in range [0, {world_size}).")
        folder = as_folder(load_path, "load_path")
        found = folders.read_index(folder)
        with self.lock:
            self._require_open()
            self._finish_writes()
            self._forget_all()
            entries = found.shard(local_rank, world_size) if is_distributed else found.entries
            counter = (
                max(entries, default=-1) + 1
                if is_distributed
                else max([found.trajectory_counter, *(n + 1 for n in entries)])
            )
            self.trajectory_format, self.seed = found.trajectory_format, found.seed
            self._generator = bridge.generator(found.seed)
            self._index = FolderIndex(found.trajectory_format, found.seed, counter)
            if self._saver is not None:
                self._saver.index = self._index.without_entries()
            for number, entry in entries.items():
                path = folders.find_file(folder, entry, found.trajectory_format)
                if path is None:
                    self._leave_out(number, f"{folder / folders.file_name(entry, found.trajectory_format)} is missing")
                    continue
                self._index.entries[number], self._unread[number] = entry, path
                if self._saver is not None and folder == self._saver.folder:  # whose index keeps naming them
                    self._saver.index.entries[number] = entry
            self._fill_cache()

    # Ending

    def clear(self) -> None:
        """Removes every trajectory, also from the `auto_save` folder; numbers go on."""
        with self.lock:
            self._require_open()
            self._finish_writes()
            counter = self._index.trajectory_counter
            self._forget_all()
            self._index = FolderIndex(self.trajectory_format, self._index.seed, counter)
            if self._saver is not None:
                self._saver.index = self._index.without_entries()
                folders.write_index(self._saver.folder, self._index)
                folders.remove_unnamed(self._saver.folder, ())

    def clear_cache(self) -> None:
        """Empties the cache in memory."""
        with self.lock:
            if self._cache is not None:
                self._cache.clear()

    def flush(self) -> None:
        """Returns when everything added so far is in the `auto_save` folder,
        power-safe; raises what went wrong with it."""
        with self.lock:
            self._finish_writes()

    def close(self, wait: bool = True) -> None:
        """Ends the buffer. With `wait`, after all writes."""
        with self.lock:
            if self._closed:
                return
            try:
                if wait:
                    self._finish_writes()
            finally:
                self._closed = True
                if self._saver is not None:
                    self._saver.close(wait)
                if self.log is not None:
                    self.log.close()

    # Inside; all under the lock

    def _add(self, trajectory: Trajectory) -> None:
        if not isinstance(trajectory, Trajectory):
            raise SchemaError(
                f"a trajectory: expected a Trajectory, got {type(trajectory).__name__}; "
                "Trajectory.from_dict takes a dict."
            )
        number = self._index.trajectory_counter
        entry = folders.new_entry(number, trajectory)
        columns = self._columns(trajectory)
        self._store(number, entry, columns)
        self._index.trajectory_counter += 1
        self._index.entries[number] = entry
        if self._cache is not None:
            self._cache.put(number, unflatten({path: a.reshape(-1, *a.shape[2:]) for path, a in columns.items()}))
        if self._saver is not None:
            self._saver.add(number, entry, trajectory.to_dict())

    def _columns(self, trajectory: Trajectory) -> dict[str, Array]:
        """The trajectory's fields as arrays ``[T, B, ...]``, rows that belong to no step left out."""
        steps = int((trajectory.rewards if trajectory.rewards is not None else trajectory.prev_logprobs).shape[0])  # type: ignore[union-attr]
        given = {name: getattr(trajectory, name) for name in _FIELDS if getattr(trajectory, name) is not None}
        for name in _TREES:
            given.update(flatten({name: getattr(trajectory, name)}))
        columns = {}
        for path, value in given.items():
            array, own_type = bridge.raw_array(value, path)
            if array.ndim >= 2:
                columns[path] = np.ascontiguousarray(step_rows(path, array, steps))
                if self._types.setdefault(path, own_type) != own_type:
                    raise SchemaError(
                        f"{path}: expected {self._types[path] or array.dtype}, got {own_type or array.dtype}."
                    )
        return columns

    def _store(self, number: int, entry: dict[str, Any], columns: dict[str, Array]) -> None:
        if self.log is None:
            self.log = Log.anonymous(Schema.of(unflatten(columns), leading=2))
        facts = {name: entry[name] for name in ("trajectory_id", "model_weights_id", "max_episode_length", "shape")}
        self._numbers[number] = self.log.add(unflatten({**columns, **ends_and_source(columns)}), facts=facts)

    def _draw(self, num_chunks: int) -> tuple[Array, Array]:
        """(trajectory ids, rows in them), by RLinf's own stream of random numbers."""
        window = list(self._index.entries)[-self.sample_window_size :]
        ends = np.cumsum([int(self._index.entries[number]["num_samples"]) for number in window])
        if not len(ends):
            raise EmptyError("Cannot sample from an empty buffer.")
        drawn = bridge.randint(self._generator, int(ends[-1]), min(num_chunks, int(ends[-1])))
        place = np.searchsorted(ends, drawn, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        return np.array(window, np.int64)[place], drawn - starts[place]

    def _all_imported(self, ids: Array) -> bool:
        """Reads the files of these trajectories that were not read yet; False when one had to be left out."""
        wanted = [number for number in dict.fromkeys(ids.tolist()) if number in self._unread]
        return all([self._import(number) for number in wanted])

    def _import(self, number: int) -> bool:
        path, entry = self._unread.pop(number), self._index.entries[number]
        try:
            trajectory = Trajectory.from_dict(folders.read_trajectory(path))
            columns = self._columns(trajectory)
            steps = len(next(iter(columns.values()), ())) * int(entry["shape"][1])
            if steps != entry["num_samples"]:
                raise CorruptError(f"it has {steps} steps, and the index has {entry['num_samples']}")
            self._store(number, entry, columns)
        except HiltError as error:
            del self._index.entries[number]
            if self._saver is not None:
                self._saver.index.entries.pop(number, None)
            self._leave_out(number, f"{path}: {error}")
            return False
        self._read_from[number] = path
        return True

    def _read(self, ids: Array, rows: Array) -> dict[str, Array]:
        assert self.log is not None
        paths = [path for path in self.log.schema.columns if path in self._types]
        cached = np.isin(ids, list(self._cache.cache)) if self._cache is not None else np.zeros(len(ids), bool)
        self._counts["disk_reads"] += int((~cached).sum())
        numbers = np.array([self._numbers[number] for number in ids.tolist()], np.int64)
        keys = (numbers << 32) | rows
        with self.log.reading() as steps:
            if not cached.any():
                return steps.gather(keys, paths)
            misses = steps.gather(keys[~cached], paths) if not cached.all() else {}
        batch = {}
        for path in paths:
            spec = self.log.schema.columns[path]
            hits = self.log.pool.empty((int(cached.sum()), *spec.shape), spec.dtype)
            assert self._cache is not None
            self._cache.take(path, ids[cached], rows[cached], hits)
            if cached.all():
                batch[path] = hits
                continue
            batch[path] = self.log.pool.empty((len(ids), *spec.shape), spec.dtype)
            batch[path][cached], batch[path][~cached] = hits, misses[path]
        return batch

    def _finish_writes(self) -> None:
        if self._saver is not None:
            self._saver.finish()

    def _file_of(self, number: int, entry: dict[str, Any]) -> Path | None:
        """The file that holds a trajectory already, if one does."""
        if self._saver is not None and number in self._saver.index.entries:
            return self._saver.folder / folders.file_name(entry, self.trajectory_format)
        path = self._unread.get(number) or self._read_from.get(number)
        return path if path is not None and path.exists() else None

    def _fields_of(self, number: int, entry: dict[str, Any]) -> dict[str, Any]:
        """A trajectory's fields as RLinf writes them, read back from the log."""
        if number in self._unread:
            return folders.read_trajectory(self._unread[number])
        assert self.log is not None
        length, width = entry["shape"][:2]
        keys = key_of(self._numbers[number]) + np.arange(length * width)
        with self.log.reading() as steps:
            flat = steps.gather(keys, [path for path in self.log.schema.columns if path in self._types])
        tensors = {
            p: bridge.from_raw_array(a.reshape(length, width, *a.shape[1:]), self._types[p]) for p, a in flat.items()
        }
        known = {"max_episode_length": entry["max_episode_length"], "model_weights_id": entry["model_weights_id"]}
        return Trajectory.from_dict({**known, **unflatten(tensors)}).to_dict()

    def _fill_cache(self) -> None:
        """The newest trajectories of a checkpoint come into memory at once, as they would have been."""
        if self._cache is not None:
            for number in list(self._index.entries)[-self._cache.max_size :]:
                if self._import(number):
                    flat = self._fields_flat(number)
                    self._cache.put(number, flat)

    def _fields_flat(self, number: int) -> dict[str, Any]:
        assert self.log is not None
        keys = key_of(self._numbers[number]) + np.arange(int(self._index.entries[number]["num_samples"]))
        with self.log.reading() as steps:
            return unflatten(steps.gather(keys, [path for path in self.log.schema.columns if path in self._types]))

    def _leave_out(self, number: int, why: str) -> None:
        self._counts["corrupt"] += 1
        logger.warning("trajectory %d is left out: %s", number, why)

    def _forget_all(self) -> None:
        self.clear_cache()
        if self.log is not None:
            self.log.close()
        self.log, self._numbers, self._unread, self._types = None, {}, {}, {}
        self._read_from = {}

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this buffer is closed; make another one.")
