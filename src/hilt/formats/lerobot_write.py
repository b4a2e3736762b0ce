"""LeRobot's datasets, version 3.0, written as LeRobot 0.4 writes and reads them.

Files are written in units: one parquet file of frames, its mp4 files, its part of meta/episodes, and its part of
meta/hilt, which LeRobot does not look at: what was seen after the last frame of each episode, and the episode's facts.
Each complete unit is a line in a journal, so that a writer goes on where the one before was stopped.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError, optional_module
from hilt.core.files import DISK, read, storage_errors, sync_file
from hilt.core.trajectory import Source
from hilt.core.tree import Array, flatten
from hilt.formats import images as pictures
from hilt.formats.episodes import INSTRUCTION, Episode, cut, gaps, plain, texts_of
from hilt.formats.units import PROGRESS, FolderWriter
from hilt.formats.video import CODECS, VideoWriter
from hilt.replay.schema import mate
from hilt.replay.storage.journal import Journal

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
LAST_PATH = "meta/hilt/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
JOURNAL_OF_ALL, FILES_PER_CHUNK = "meta/hilt/journal.jsonl", 1000
BOOKKEEPING = {
    "timestamp": "float32",
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index", "subtask_index"), "int64"),
}
"""Columns with the position of a frame in the dataset. No other column has such a name."""
NAMES = {
    "observations": "observation.state",
    "actions": "action",
    "rewards": "next.reward",
    "terminated": "next.terminated",
    "truncated": "next.truncated",
    "source": "complementary_info.source",
    "policy_version": "complementary_info.policy_version",
}
QUANTILES = {f"q{percent:02d}": percent / 100 for percent in (1, 10, 50, 90, 99)}
UNIT_BYTES = 4 << 30
"""Bytes of images, as they come in, after which a unit is complete even if its files are small."""


def create(
    path: Path,
    *,
    fps: float | None = None,
    robot_type: str | None = None,
    images: str = "video",
    codec: str = "av1",
    data_files_size_in_mb: int = 100,
    video_files_size_in_mb: int = 200,
) -> LeRobotWriter:
    """`images`: as ``video``, or every bit of them as ``png``. `codec` of videos: av1, h264 or lossless.

    `fps` and `robot_type` are those of the first episode's facts, unless given.
    """
    if images not in ("video", "png"):
        raise UnknownNameError("way to store images", images, ("video", "png"))
    if codec not in CODECS:
        raise UnknownNameError("codec", codec, CODECS)
    if images == "png" and codec != "av1":
        raise ConfigError(f"codec={codec}: only videos have one. Leave it out, or images=png.")
    if fps is not None and not 0.01 <= fps < 1e4:
        raise ConfigError(f"fps: expected frames per second, from 0.01 on, got {fps}.")
    if min(data_files_size_in_mb, video_files_size_in_mb) < 1:
        raise ConfigError("data_files_size_in_mb and video_files_size_in_mb: expected 1 or more.")
    sizes = {"data_files_size_in_mb": data_files_size_in_mb, "video_files_size_in_mb": video_files_size_in_mb}
    return LeRobotWriter(path, {"fps": fps, "robot_type": robot_type}, codec if images == "video" else "", sizes)


@dataclass(frozen=True)
class Column:
    """A column of an episode, and the feature that it becomes."""

    path: str
    """Empty if the feature duplicates other columns, for programs that expect it under this name"""
    name: str
    kind: str
    """Its dtype, ``image`` or ``video``"""
    shape: tuple[int, ...]
    """In the files"""
    origin: tuple[int, ...]
    """In the episode"""

    @property
    def is_image(self) -> bool:
        return self.kind in ("image", "video")

    def feature(self, fps: float, codec: str) -> dict[str, object]:
        axes = ["height", "width", "channels"]
        entry: dict[str, Any] = {
            "dtype": self.kind,
            "shape": list(self.shape),
            "names": axes if self.is_image else None,
        }
        entry["hilt"] = {"path": self.path, "shape": list(self.origin)}
        if self.kind == "video":
            kind = {
                "video.codec": {"lossless": "h264"}.get(codec, codec),
                "video.pix_fmt": CODECS[codec][1],
                "video.fps": fps,
            }
            size = {f"video.{axis}": length for axis, length in zip(axes, self.shape, strict=True)}
            entry["info"] = {**size, **kind, "video.is_depth_map": False, "has_audio": False}
        return entry


class LeRobotWriter(FolderWriter):
    """Writes a dataset whose features are the columns of the first episode."""

    def __init__(self, path: Path, given: dict[str, Any], codec: str, sizes: dict[str, int]):
        super().__init__(path)
        self._given, self._codec, self._sizes = given, codec, sizes
        self._columns: list[Column] = []
        self._dropped: dict[str, str] = {}
        self._fps_known = True
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, dict[str, Array]] = {}
        self._episodes = self._frames = self._units = 0
        self._unit: _Unit | None = None
        for line in self._lines:
            self._go_on(line)
        if not self._complete:
            paths = (DATA_PATH, VIDEO_PATH, EPISODES_PATH, LAST_PATH)
            kept = {path / _place(p, unit, c.name) for unit in range(self._units) for c in self._columns for p in paths}
            for file in {file for file in path.rglob("*") if file.is_file()} - kept - {path / PROGRESS}:
                DISK.remove(file)

    def _jobs_done(self) -> int:
        journal = self._path / JOURNAL_OF_ALL
        if not journal.is_file():
            raise ConfigError(
                f"{self._path}: expected a new or empty folder, or an unfinished dataset. Choose another path."
            )
        return max((line.get("next", 0) for line in Journal(journal, DISK, write=False).read_new()), default=0)

    def _add(self, number: int, episode: Episode) -> None:
        leaves, facts = flatten(episode.columns), plain(episode.facts)
        if not self._columns:
            self._begin(leaves, facts)
        self._check(leaves, facts)
        unit = self._unit = self._unit or _Unit(self._path, self._units, self._columns, self._given["fps"], self._codec)
        if self._codec not in ("", "lossless") and any(column.kind == "video" for column in self._columns):
            self.notes.add(
                f"images were stored as {self._codec} video, which changes them a little; images=png keeps every bit"
            )
        parts = cut(Episode(episode.columns, facts), gaps(episode).tolist())
        if len(parts) > 1:
            self.notes.add(
                "an episode with gaps between its steps, which LeRobot cannot hold, was cut there", len(parts) - 1
            )
        for part in parts:
            self._add_part(unit, flatten(part.columns), part.facts)
        self.next = number + 1
        if unit.is_full(self._sizes):
            self._end_unit()

    def _finish(self) -> None:
        if not self._episodes:
            raise ConfigError(
                "there is not one episode with a transition to write; look at the source with: hilt data inspect"
            )
        self._end_unit()
        table = pyarrow().table({"task_index": list(self._tasks.values()), "task": list(self._tasks)})
        kinds = [{"name": n, "field_name": n, "pandas_type": t, "numpy_type": t, "metadata": None} for n, t in _TASKS]
        # pandas finds tasks by text
        index = {"index_columns": ["task"], "column_indexes": [], "columns": kinds, "pandas_version": "2.0.0"}
        _write(self._path / "meta/tasks.parquet", table.replace_schema_metadata({"pandas": json.dumps(index)}))
        stats = {name: {stat: values.tolist() for stat, values in found.items()} for name, found in self._stats.items()}
        DISK.replace(self._path / "meta/stats.json", json.dumps(stats, indent=4).encode())
        features = {column.name: column.feature(self._given["fps"], self._codec) for column in self._columns}
        features |= {
            name: {"dtype": dtype, "shape": [1], "names": None}
            for name, dtype in BOOKKEEPING.items()
            if name != "subtask_index"
        }
        info = {
            "codebase_version": "v3.0",
            **self._given,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            **self._sizes,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if any(column.kind == "video" for column in self._columns) else None,
            "features": features,
        }
        DISK.replace(self._path / "meta/info.json", json.dumps(info, indent=4, ensure_ascii=False).encode())
        DISK.replace(self._path / JOURNAL_OF_ALL, read(self._path / PROGRESS))

    def close(self) -> None:
        if self._unit is not None:
            self._unit.close(complete=False)
            self._unit = None
        super().close()

    def _begin(self, leaves: dict[str, Array], facts: dict[str, Any]) -> None:
        """Decides, by the first episode, what all are like."""
        given = {name: facts.get(name) if value is None else value for name, value in self._given.items()}
        fps = given["fps"]
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0.01 <= fps < 1e4:
            fps, self._fps_known = 10, False
        self._columns, self._dropped = _plan(leaves, "success" in facts, self._codec)
        robot = given["robot_type"] if isinstance(given["robot_type"], str) else None
        self._given = {"fps": int(fps) if fps == int(fps) else fps, "robot_type": robot}
        known = {"given": self._given, "fps_known": self._fps_known, "dropped": self._dropped}
        self._journal.append({**known, "columns": [asdict(column) for column in self._columns]})

    def _go_on(self, line: dict[str, Any]) -> None:
        """Takes in one line of the journal: what all episodes are like, or that a unit is complete."""
        if "columns" in line:
            self._given, self._fps_known, self._dropped = line["given"], line["fps_known"], line["dropped"]
            self._columns = [
                Column(c["path"], c["name"], c["kind"], tuple(c["shape"]), tuple(c["origin"])) for c in line["columns"]
            ]
            return
        import pyarrow.parquet as pq

        for row in pq.read_table((self._path / _place(EPISODES_PATH, self._units)).absolute()).to_pylist():
            self._count(row)
        self._units += 1

    def _check(self, leaves: dict[str, Array], facts: dict[str, Any]) -> None:
        known = {column.path: column for column in self._columns if column.path}
        if not self._fps_known:
            self.notes.add(f"fps: not known, {self._given['fps']} is written; give it with the option fps")
        if ("success" in facts) != ("next.success" in [column.name for column in self._columns]):
            self.notes.add(
                "success: known of some episodes only; what the first one lacks is kept, but LeRobot does not see it"
            )
        if facts.get("fps", self._given["fps"]) != self._given["fps"]:
            self.notes.add(f"fps: not that of the first episode or of the option, {self._given['fps']} is written")
        for path, values in leaves.items():
            column = known.get(path)
            if column and (
                values.shape[1:] != column.origin or values.dtype.name != ("uint8" if column.is_image else column.kind)
            ):
                raise SchemaError(
                    f"{path}: {values.dtype} {values.shape[1:]}, where the first episode has "
                    f"{column.kind} {column.origin}."
                )
            if not column and path not in self._dropped and not path.startswith("next_observations"):
                raise SchemaError(f"{path}: the first episode has no such column, and all must be alike.")
            if path in self._dropped:
                self.notes.add(f"{path}: {self._dropped[path]}, not carried over")
        if missing := [path for path in known if path not in leaves]:
            raise SchemaError(f"{missing[0]}: the first episode has it, this one does not, and all must be alike.")

    def _add_part(self, unit: _Unit, leaves: dict[str, Array], facts: dict[str, Any]) -> None:
        """One episode of the dataset: a whole one, or a part up to a gap."""
        length = len(next(iter(leaves.values())))
        count, texts = np.arange(length), texts_of(facts.get(INSTRUCTION, ""), length)
        begin, chunk, file = self._frames, *divmod(self._units, FILES_PER_CHUNK)
        derived = {"next.success": count == (length - 1 if facts.get("success") else -1)}
        derived["complementary_info.is_intervention"] = leaves.get("source", count * 0) == Source.HUMAN
        derived["next.done"] = leaves.get("terminated", count < 0) | leaves.get("truncated", count < 0)
        values = {
            c.name: (leaves[c.path] if c.path else derived[c.name]).reshape(length, *c.shape) for c in self._columns
        }
        tasks = [self._tasks.setdefault(text, len(self._tasks)) for text in texts]
        places = (count / self._given["fps"], count, count * 0 + self._episodes, begin + count, np.array(tasks))
        values |= {
            n: place.astype(BOOKKEEPING[n]).reshape(-1, 1) for n, place in zip(BOOKKEEPING, places, strict=False)
        }
        row = {"episode_index": self._episodes, "tasks": list(dict.fromkeys(texts)), "length": length}
        row |= {
            "data/chunk_index": chunk,
            "data/file_index": file,
            "dataset_from_index": begin,
            "dataset_to_index": begin + length,
        }
        for name, time in unit.add(values).items():
            row |= {f"videos/{name}/chunk_index": chunk, f"videos/{name}/file_index": file}
            row |= {
                f"videos/{name}/from_timestamp": time,
                f"videos/{name}/to_timestamp": time + length / self._given["fps"],
            }
        for name, column in values.items():
            row |= {
                f"stats/{name}/{stat}": value.tolist()
                for stat, value in statistics(column, name in unit.images).items()
            }
        after = {
            c.name: leaves[mate(c.path)][-1:].reshape(1, *c.shape) for c in self._columns if mate(c.path) in leaves
        }
        further = {"episode_index": [self._episodes], "length": [length], "facts": [json.dumps(facts)]}
        unit.rows.append(row | {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file})
        unit.last.append(
            pyarrow().table({**further, **{name: encode(value, name in unit.images) for name, value in after.items()}})
        )
        self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        """Adds an episode to the metadata of the dataset."""
        self._episodes += 1
        self._frames += row["length"]
        for task in row["tasks"]:
            self._tasks.setdefault(task, len(self._tasks))
        for name in [key.removeprefix("stats/").removesuffix("/count") for key in row if key.endswith("/count")]:
            one = {
                stat: np.asarray(row[f"stats/{name}/{stat}"])
                for stat in ("min", "max", "mean", "std", "count", *QUANTILES)
            }
            self._stats[name] = merge(self._stats[name], one) if name in self._stats else one

    def _end_unit(self) -> None:
        if self._unit is not None:
            self._unit.close(complete=True)
            _write(self._path / _place(EPISODES_PATH, self._units), pyarrow().Table.from_pylist(self._unit.rows))
            _write(self._path / _place(LAST_PATH, self._units), pyarrow().concat_tables(self._unit.last))
            self._unit, self._units = None, self._units + 1
            self._commit()


class _Unit:
    """The files of one unit while they grow."""

    def __init__(self, path: Path, unit: int, columns: list[Column], fps: float, codec: str):
        self.images = {column.name for column in columns if column.is_image}
        self.rows: list[dict[str, Any]] = []
        self.last: list[Any] = []
        self._fps, self._frames, self._bytes = fps, 0, 0
        self._writer: Any = None
        self._file = path / _place(DATA_PATH, unit)
        self._videos: dict[str, VideoWriter] = {}
        DISK.make_folders(self._file.parent)
        for column in [column for column in columns if column.kind == "video"]:
            file = path / _place(VIDEO_PATH, unit, column.name)
            DISK.make_folders(file.parent)
            self._videos[column.name] = VideoWriter(file, fps, column.shape[0], column.shape[1], codec)

    def add(self, values: dict[str, Array]) -> dict[str, float]:
        """Writes the frames of an episode; returns the time at which it begins in each video."""
        columns = {
            name: encode(column, name in self.images) for name, column in values.items() if name not in self._videos
        }
        with storage_errors(self._file):
            import pyarrow.parquet as pq

            table = pyarrow().table(columns)
            self._writer = self._writer or pq.ParquetWriter(self._file.absolute(), table.schema)
            self._writer.write_table(table)
        for name, video in self._videos.items():
            video.add(values[name])
        begin, self._frames = self._frames / self._fps, self._frames + table.num_rows
        self._bytes += sum(values[name].nbytes for name in self.images)
        return dict.fromkeys(self._videos, begin)

    def is_full(self, sizes: dict[str, int]) -> bool:
        largest = max((video.nbytes for video in self._videos.values()), default=0)
        data = self._file.stat().st_size
        return (
            data >> 20 >= sizes["data_files_size_in_mb"]
            or largest >> 20 >= sizes["video_files_size_in_mb"]
            or self._bytes >= UNIT_BYTES
        )

    def close(self, complete: bool) -> None:
        """Ends all files; complete ones are on the disk when it returns."""
        with storage_errors(self._file):
            if self._writer is not None:
                self._writer.close()
        for video in self._videos.values():
            video.close(complete)
        for file in [self._file, *(video.path for video in self._videos.values())] if complete else []:
            sync_file(file)
            DISK.sync_folder(file.parent)


def _plan(leaves: dict[str, Array], success: bool, codec: str) -> tuple[list[Column], dict[str, str]]:
    """The features of a dataset with such episodes; and what cannot be one, with the reason."""
    columns: dict[str, Column] = {}
    dropped: dict[str, str] = {}
    for path, values in leaves.items():
        kind, shape, (head, _, tail) = values.dtype.name, values.shape[1:], path.partition("/")
        if head == "next_observations":
            continue
        if values.dtype.kind not in "biuf" or 0 in shape:
            dropped[path] = f"{values.dtype} {shape} is nothing that LeRobot stores"
            continue
        size = shape or (1,) if len(shape) < 6 else (math.prod(shape),)
        if values.dtype == np.uint8 and len(shape) > 2 and shape[-1] in (1, 3, 4) and math.prod(shape[:-3]) == 1:
            size = shape[-3:]
            fits = size[2] == 3 and (codec == "lossless" or (size[0] % 2 == size[1] % 2 == 0 and min(size[:2]) >= 16))
            kind = "video" if codec and fits else "image"
        start = {"observations": "observation", "actions": "action"}.get(head, head)
        names = [start, *tail.split("/")] if tail else [NAMES.get(path, path)]
        if start == "observation" and kind in ("image", "video") and not tail.startswith("image"):
            names = ["observation.images", *names[1:]] if tail else ["observation.images.image"]
        name = ".".join(names)
        while name in columns or name in BOOKKEEPING or name in ("task", "subtask"):
            name = f"extra.{name}"
        columns[name] = Column(path, name, kind, size, shape)
    for name in ("next.done", "complementary_info.is_intervention", *(["next.success"] if success else [])):
        columns.setdefault(name, Column("", name, "bool", (1,), (1,)))
    return list(columns.values()), dropped


def encode(values: Array, is_image: bool) -> object:
    """``[N, ...]`` as a column of parquet: numbers, lists of them, lists of lists,
    or PNG images as LeRobot holds them."""
    pa = pyarrow()
    if is_image:
        files = pa.array([pictures.encode(image) for image in values], pa.binary())
        return pa.StructArray.from_arrays([files, pa.nulls(len(values), pa.string())], ["bytes", "path"])
    column, sizes = pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1:]
    for size in reversed(sizes) if len(sizes) > 1 else ():
        column = pa.ListArray.from_arrays(pa.array(np.arange(0, len(column) + 1, size, dtype=np.int32)), column)
    return column if sizes == (1,) or len(sizes) > 1 else pa.FixedSizeListArray.from_arrays(column, sizes[0])


def statistics(values: Array, is_image: bool) -> dict[str, Array]:
    """What LeRobot keeps of a feature to normalize it: of images by channel, from 0 to 1; of others by element.

    Of images a sample is counted, of others all finite numbers. A feature of very many elements has none.
    """
    if not is_image and math.prod(values.shape[1:]) > 4096:
        return {}
    if is_image:
        every, stride = -(-len(values) // 32), max(1, min(values.shape[1:3]) // 64)
        values = values[::every, ::stride, ::stride]
    axes: Any = (0, 1, 2) if is_image else 0
    numbers = np.nan_to_num(values, nan=np.nan, posinf=np.nan, neginf=np.nan).astype(np.float64) / (
        255 if is_image else 1
    )
    numbers = numbers.clip(-1e150, 1e150)  # their squares are finite too
    numbers[:, np.isnan(numbers).all(axis=0)] = 0
    found = {name: function(numbers, axis=axes) for name, function in _MOMENTS.items()}
    quantiles = np.nanquantile(numbers, list(QUANTILES.values()), axis=axes)
    found |= dict(zip(QUANTILES, quantiles, strict=True))
    return {
        **{name: value.reshape(-1, 1, 1) if is_image else value for name, value in found.items()},
        "count": np.array([len(values)]),
    }


def merge(a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
    """The statistics of two parts as those of the whole; its quantiles are only near, as LeRobot's own are."""
    count = a["count"] + b["count"]
    wa, wb = a["count"] / count, b["count"] / count
    whole = {name: a[name] * wa + b[name] * wb for name in ("mean", *QUANTILES) if name in a and name in b}
    spread = (a["std"] ** 2 + (a["mean"] - whole["mean"]) ** 2) * wa + (
        b["std"] ** 2 + (b["mean"] - whole["mean"]) ** 2
    ) * wb
    return {
        "min": np.minimum(a["min"], b["min"]),
        "max": np.maximum(a["max"], b["max"]),
        "std": np.sqrt(spread),
        **whole,
        "count": count,
    }


_MOMENTS: dict[str, Any] = {"min": np.nanmin, "max": np.nanmax, "mean": np.nanmean, "std": np.nanstd}
_TASKS = (("task_index", "int64"), ("task", "str"))


def _place(template: str, unit: int, video: str = "") -> str:
    chunk, file = divmod(unit, FILES_PER_CHUNK)
    return template.format(chunk_index=chunk, file_index=file, video_key=video)


def _write(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(table, file)
    DISK.make_folders(path.parent)
    DISK.replace(path, file.getvalue())


def pyarrow() -> ModuleType:
    return optional_module("pyarrow", "Reading and writing LeRobot's datasets", "formats")
