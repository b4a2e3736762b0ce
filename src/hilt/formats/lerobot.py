"""LeRobot's datasets, versions 2.0, 2.1 and 3.0, read without LeRobot.

    meta/info.json      what a frame holds: arrays, text, images inside the parquet files, or videos beside them
    data/**.parquet     the frames of one episode (2.x) or of many (3.0)
    videos/**.mp4       the same, with the time at which each episode begins (3.0)

A frame is what was seen, what was done then, and what came of it; what was seen after the last one
has no place there. Datasets that Hilt wrote keep it in a file of their own (see `lerobot_write`);
in all others the last observation stands for it.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, CorruptError, FormatError, UnknownNameError
from hilt.core.files import inside, read
from hilt.core.trajectory import Source
from hilt.core.tree import Array, ArraySpec, JsonObject, unflatten
from hilt.formats import images
from hilt.formats.episodes import INSTRUCTION, Dataset, Episode, Job, plain, text_fact, transitions
from hilt.formats.lerobot_meta import (
    listing,
    parquet_module,
    parse_json,
    read_episodes,
    read_statistics,
    read_task_lists,
    read_texts,
)
from hilt.formats.lerobot_write import BOOKKEEPING, DATA_PATH, LAST_PATH, VIDEO_PATH, create, pyarrow
from hilt.formats.video import OpenVideos, read_frames

__all__ = ["matches", "open_dataset", "create", "LeRobotDataset"]

OLD_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
OLD_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
PATHS = {
    "v2.0": (OLD_DATA_PATH, OLD_VIDEO_PATH),
    "v2.1": (OLD_DATA_PATH, OLD_VIDEO_PATH),
    "v3.0": (DATA_PATH, VIDEO_PATH),
}
ENDS = ("next.done", "next.terminated", "next.truncated")
INTERVENTION = ("is_intervention", "intervention")
"""Endings of the names of columns that mark steps in which a person acted."""
RESERVED = (
    "observations",
    "next_observations",
    "actions",
    "rewards",
    "terminated",
    "truncated",
    "source",
    "policy_version",
)
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
SINGLE = {"rewards": "", "terminated": "bool", "truncated": "bool", "source": "uint8"}
"""Columns of one number for each step, and its type where there is only one."""
BYTE_LIMIT = 1 << 33
"""Bytes of one row group: more are refused, since a few bytes of parquet can claim any number."""


def matches(path: Path) -> bool:
    return (path / "meta/info.json").is_file()


def open_dataset(path: Path, *, tolerance_s: float = 1e-4) -> LeRobotDataset:
    """`tolerance_s`: how far, in seconds, a frame of a video may lie from the time at which it was taken."""
    return LeRobotDataset(path, tolerance_s)


@dataclass(frozen=True)
class Feature:
    """The entry of meta/info.json for one column."""

    name: str
    kind: str
    """``array``, ``text``, ``image`` or ``video``"""
    spec: ArraySpec
    """As it lies in the files; of images with the channels last"""
    path: str
    """Its column in an episode; empty when it goes into other columns"""
    shape: tuple[int, ...]
    """Its shape there"""


class LeRobotDataset(Dataset):
    """A folder of LeRobot's."""

    format = "lerobot"

    def __init__(self, path: Path, tolerance_s: float = 1e-4):
        super().__init__(path)
        if not 0 < tolerance_s < 1:
            raise ConfigError(f"tolerance_s: expected a part of a second, got {tolerance_s}.")
        self._tolerance = tolerance_s
        self.info = _read_info(path / "meta/info.json")
        self.features = {f.name: f for f in _features(self.info.get("features"), path / "meta/info.json")}
        self._episodes = read_episodes(
            path, self.info["codebase_version"], [f.name for f in self.features.values() if f.kind == "video"]
        )
        self._tasks, self._subtasks = read_texts(path, "task"), read_texts(path, "subtask")
        self._lock = threading.Lock()
        self._listing = lru_cache(8)(listing)
        self._group = lru_cache(2)(self._read_group)
        self._times_of = lru_cache(64)(self._read_times)
        self._videos = OpenVideos()
        if self.info.get("total_episodes", len(self)) != len(self):
            self.notes.add(
                f"meta/info.json promises {self.info['total_episodes']} episodes, meta/episodes lists {len(self)}"
            )

    def __len__(self) -> int:
        return len(self._episodes["length"])

    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        for place in range(first, len(self)):
            yield partial(self._read, place, images)

    def describe(self) -> JsonObject:
        return {
            "version": self.info["codebase_version"],
            "robot_type": plain(self.info.get("robot_type")),
            "fps": self.info["fps"],
            "frames": int(self._episodes["length"].sum()),
            "tasks": len(self._tasks),
            "features": {f.name: f"{f.kind} {f.spec}" for f in self.features.values() if f.name not in BOOKKEEPING},
        }

    def stated_counts(self) -> dict[str, int]:
        stated = {"episodes": self.info.get("total_episodes"), "steps": self.info.get("total_frames")}
        return {name: count for name, count in stated.items() if isinstance(count, int)}

    def unlisted(self) -> Iterator[str]:
        listed: dict[Path, int] = {}
        for place, length in enumerate(self._episodes["length"].tolist()):
            if length:
                file = self._file("data_path", place)
                listed[file] = listed.get(file, 0) + length
        root = self.path.resolve()  # as the files that the metadata name
        for file in sorted((root / "data").rglob("*.parquet")):
            with parquet_module(file) as pq:
                rows = pq.read_metadata(file).num_rows
            if rows > (known := listed.get(file, 0)):
                shown = self.path / file.relative_to(root)
                yield f"{shown} has {rows:,} frames, and meta/episodes lists {known:,} of them."

    def stored_statistics(self) -> dict[str, dict[str, Array]]:
        paths = {f.name: f.path for f in self.features.values() if f.kind == "array" and f.path}
        found = read_statistics(self.path)
        return {paths[name]: stats for name, stats in found.items() if name in paths}

    def label(self, number: int) -> str:
        return f"episode {int(self._episodes['episode_index'][number])}"

    def listed(self) -> dict[str, Sequence[Any]]:
        known: dict[str, Sequence[Any]] = {"length": self._episodes["length"].tolist()}
        if tasks := read_task_lists(self.path, self.info["codebase_version"], len(self)):
            known[INSTRUCTION] = tasks
        return known

    def cameras(self) -> dict[str, ArraySpec]:
        pictures = [f for f in self.features.values() if f.kind in ("image", "video")]
        return {f.path: ArraySpec(f.spec.dtype, f.shape) for f in pictures}

    def frame(self, number: int, step: int, column: str) -> Array:
        feature = self._feature_of(column)
        if feature is None or column not in self.cameras():
            raise UnknownNameError("camera", column, self.cameras())
        length = int(self._episodes["length"][number])
        if step >= length:
            last, _ = self._last(number, int(self._episodes["episode_index"][number]), length)
            if last is not None and feature.name in last.column_names:
                seen: Array = _pictures(last, feature, str(self.path))[0].reshape(feature.shape)
                return seen
            step = length - 1
        if feature.kind == "video":
            file, offset = self._video(feature, number)
            height, width = feature.spec.shape[:2]
            reader = self._videos.reader(file, height, width, self._tolerance)
            image = reader.frame(float(self._times_of(number)[step]) + offset)
        else:
            file, episode = self._file("data_path", number), int(self._episodes["episode_index"][number])
            row = self._rows(file, episode, length, (feature.name,)).slice(step, 1)
            image = _pictures(row, feature, f"{file}, episode {episode}")[0]
        return image.reshape(feature.shape)

    def close(self) -> None:
        self._videos.close()

    def component_names(self, column: str) -> Sequence[str]:
        feature = self._feature_of(column)
        names = self.info["features"][feature.name].get("names") if feature is not None else None
        if isinstance(names, dict):  # by the kind of joint, as LeRobot's first robots have them
            names = [name for part in names.values() for name in (part if isinstance(part, list) else [part])]
        return [str(name) for name in names] if isinstance(names, list) else ()

    def _feature_of(self, column: str) -> Feature | None:
        return next((f for f in self.features.values() if f.path == column), None)

    def _read_times(self, place: int) -> Array:
        """The time of each frame of an episode since it began."""
        episode, length = (int(self._episodes[name][place]) for name in ("episode_index", "length"))
        file = self._file("data_path", place)
        wanted = [f for f in self.features.values() if f.name in ("timestamp", "frame_index")]
        table = self._rows(file, episode, length, tuple(f.name for f in wanted))
        where = f"{file}, episode {episode}"
        return self._times({f.name: _arrays(table, f, where) for f in wanted}, length, where)

    def _read(self, place: int, with_images: bool) -> Episode | None:
        episode, length = (int(self._episodes[name][place]) for name in ("episode_index", "length"))
        if not length:
            return None
        file = self._file("data_path", place)
        wanted = [f for f in self.features.values() if with_images or f.kind in ("array", "text")]
        table = self._rows(file, episode, length, tuple(f.name for f in wanted if f.kind != "video"))
        last, facts = self._last(place, episode, length)
        where = f"{file}, episode {episode}"
        found = {f.name: _arrays(table, f, where) for f in wanted if f.kind == "array"}
        times = self._times(found, length, where)
        for f in wanted:
            if f.kind == "image":
                found[f.name] = _pictures(table, f, where)
            elif f.kind == "video":
                found[f.name] = self._frames(f, place, times)
            if last is not None and f.name in last.column_names:
                found[f.name][length] = (_arrays if f.kind == "array" else _pictures)(last, f, str(file))[0]
        if facts is None:
            facts = self._facts(found, {f.name: table.column(f.name).to_pylist() for f in wanted if f.kind == "text"})
        return Episode(self._columns(found, length, ends=last is None), facts, times)

    def _columns(self, found: dict[str, Array], length: int, ends: bool) -> dict[str, Any]:
        """The columns of an episode from ``[length + 1, ...]`` arrays by feature. `ends`:
        the data do not contain how it ended."""
        leaves = {
            f.path: found[name].reshape(length + 1, *f.shape)
            for name, f in self.features.items()
            if f.path and name in found
        }
        flags = {name: values[:-1, 0] != 0 for name, values in found.items() if values.shape == (length + 1, 1)}
        columns = {path: values[:-1] for path, values in leaves.items() if path.split("/")[0] != "observations"}
        seen = unflatten({path: values for path, values in leaves.items() if path not in columns})
        never = np.zeros(length, bool)
        if "rewards" not in columns:
            columns["rewards"] = np.zeros(length, np.float32)
            self.notes.add("no rewards in this dataset: 0 everywhere")
        columns.setdefault("truncated", flags.get("next.truncated", never.copy()))
        columns.setdefault(
            "terminated", flags.get("next.terminated", flags.get("next.done", never) & ~columns["truncated"])
        )
        if "source" not in columns:
            human = [flag for name, flag in flags.items() if name.split(".")[-1] in INTERVENTION]
            sources = np.where(human[0], Source.HUMAN, Source.POLICY) if human else np.full(length, Source.DEMO)
            columns["source"] = sources.astype(np.uint8)
        if ends:
            columns["truncated"][-1] |= not columns["terminated"][-1]
            self.notes.add(
                "what was seen after the last step is not in this dataset: the last observation stands for it"
            )
        return {**(transitions(seen["observations"]) if seen else {}), **unflatten(columns)}

    def _facts(self, found: dict[str, Array], texts: dict[str, list[Any]]) -> dict[str, Any]:
        facts: dict[str, Any] = {"fps": self.info["fps"]}
        if isinstance(self.info.get("robot_type"), str):
            facts["robot_type"] = self.info["robot_type"]
        for fact, index, known in (
            (INSTRUCTION, "task_index", self._tasks),
            ("subtask", "subtask_index", self._subtasks),
        ):
            texts_of_steps = [known.get(int(number), "") for number in found[index][:-1, 0]] if index in found else []
            if any(texts_of_steps):
                facts[fact] = text_fact(texts_of_steps)
        for name, texts_of_steps in texts.items():
            facts[name] = text_fact(["" if text is None else str(text) for text in texts_of_steps])
        if "next.success" in found:
            facts["success"] = bool(found["next.success"].any())
        return facts

    def _times(self, found: dict[str, Array], length: int, where: str) -> Array:
        """The time of each frame since its episode began."""
        even = np.arange(length) / self.info["fps"]
        if "frame_index" in found and not np.array_equal(found["frame_index"][:-1, 0], np.arange(length)):
            raise CorruptError(f"{where}: its frames are not numbered from 0 to {length - 1}. Restore the file.")
        times = found["timestamp"][:-1, 0] if "timestamp" in found else even
        # as exact as they can be
        times = even if np.array_equal(times, even.astype(times.dtype)) else times.astype(np.float64)
        if not (np.diff(times) > 0).all() or not 0 <= times[0] <= times[-1] < 1e7:
            raise CorruptError(f"{where}: its timestamps do not rise from 0. Restore the file.")
        if np.abs(times - even).max() > self._tolerance:
            self.notes.add("timestamp: not those of an even frame rate, not carried over")
        return times

    def _frames(self, feature: Feature, place: int, times: Array) -> Array:
        file, offset = self._video(feature, place)
        height, width = feature.spec.shape[:2]
        return read_frames(file, np.append(times, times[-1]) + offset, height, width, self._tolerance)

    def _video(self, feature: Feature, place: int) -> tuple[Path, float]:
        """The file of an episode's video, and the time at which the episode begins in it."""
        file, begin = (
            self._file("video_path", place, feature.name),
            self._episodes.get(f"videos/{feature.name}/from_timestamp"),
        )
        offset = 0.0 if begin is None else float(begin[place])
        if not 0 <= offset < 1e7:
            raise CorruptError(
                f"{file}: an episode begins at {offset} s by meta/episodes, which is impossible. Restore meta/episodes."
            )
        return file, offset

    def _last(self, place: int, episode: int, length: int) -> tuple[Any, dict[str, Any] | None]:
        """A row with what was seen after the last frame, and the facts: of episodes that Hilt wrote."""
        file = inside(self.path, self._expand(LAST_PATH, place), str(self.path))
        if not file.is_file():
            return None, None
        row = self._rows(file, episode, 1, None)
        if not {"length", "facts"} <= set(row.column_names) or row.column("length").to_pylist() != [length]:
            raise CorruptError(
                f"{file}: not of the {length} frames of episode {episode}. Remove meta/hilt to "
                "read the dataset without it."
            )
        return row, parse_json(row.column("facts").to_pylist()[0], file)

    def _rows(self, file: Path, episode: int, length: int, names: tuple[str, ...] | None) -> Any:
        """The rows of an episode, from the row groups that hold them. The last
        groups are kept, since episodes share them."""
        with parquet_module(file) as pq, self._lock:
            rows = np.flatnonzero(self._listing(file, ("episode_index",))["episode_index"] == episode)
            if len(rows) != length or rows[-1] - rows[0] != length - 1:
                raise CorruptError(
                    f"{file}: {len(rows)} frames of episode {episode}, or not in one piece; meta "
                    f"has {length}. Restore it."
                )
            groups, first, parts = pq.read_metadata(file.absolute()), 0, []
            for group in range(groups.num_row_groups):
                low, high = (
                    max(int(rows[0]) - first, 0),
                    min(int(rows[-1]) + 1 - first, groups.row_group(group).num_rows),
                )
                if low < high:
                    parts.append(self._group(file, group, names).slice(low, high - low))
                first += groups.row_group(group).num_rows
            return pyarrow().concat_tables(parts)

    def _read_group(self, file: Path, group: int, names: tuple[str, ...] | None) -> Any:
        with parquet_module(file) as pq:
            parquet = pq.ParquetFile(file.absolute())
            rows, there = parquet.metadata.row_group(group), parquet.schema_arrow.names
            size = max(
                rows.num_rows * sum(f.spec.nbytes for f in self.features.values() if f.kind == "array"),
                rows.total_byte_size,
            )
            if size > BYTE_LIMIT:
                raise CorruptError(f"{file}: row group {group} would take {size} bytes; at most {BYTE_LIMIT} are read.")
            if missing := [name for name in names or () if name not in there]:
                raise CorruptError(
                    f"{file}: there is no column {missing[0]!r}, which meta/info.json describes. Restore the file."
                )
            if names is not None:
                for name in set(there) - set(self.features):
                    self.notes.add(f"{name}: not described in meta/info.json, not carried over")
            return parquet.read_row_group(group, columns=names and list(names))

    def _file(self, template: str, place: int, video: str = "") -> Path:
        return inside(
            self.path,
            self._expand(str(self.info[template]), place, video),
            f"{self.path / 'meta/info.json'}: {template}",
        )

    def _expand(self, template: str, place: int, video: str = "") -> str:
        """A path of meta/info.json with the numbers and the camera in its braces; nothing else is carried out there."""
        values = {name: column[place] for name, column in self._episodes.items()}
        values |= {
            name: values.get(f"{f'videos/{video}' if video else 'data'}/{name}", -1)
            for name in ("chunk_index", "file_index")
        }
        values["episode_chunk"] = values["episode_index"] // self.info["chunks_size"]

        def fill(match: re.Match[str]) -> str:
            return video if match[1] == "video_key" else f"{int(values[match[1]]):0{int(match[2] or 0)}d}"

        return re.sub(
            r"\{(chunk_index|file_index|episode_chunk|episode_index|video_key)(?::0?(\d)d)?\}", fill, template
        )


def _read_info(file: Path) -> dict[str, Any]:
    info = parse_json(read(file), file)
    version = info.get("codebase_version")
    if not isinstance(version, str) or version not in PATHS:
        raise FormatError(
            f"{file}: LeRobot's format {version!r}; read are {', '.join(PATHS)}. Convert the "
            "dataset with LeRobot first."
        )
    for name, default in zip(("data_path", "video_path"), PATHS[version], strict=True):
        info[name] = info.get(name) or default
    for name, value in (("fps", info.get("fps")), ("chunks_size", info.setdefault("chunks_size", 1000))):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise CorruptError(f"{file}: {name} is {value!r}, expected a number above 0. Restore the file.")
    return info


def _features(described: Any, file: Path) -> Iterator[Feature]:
    taken: list[str] = []
    for name, feature in described.items() if isinstance(described, dict) else [("features", described)]:
        try:
            kind = {"string": "text", "image": "image", "video": "video", **dict.fromkeys(DTYPES, "array")}[
                feature["dtype"]
            ]
            sizes = tuple(int(size) for size in feature["shape"] or [1])
            if kind in ("image", "video"):
                first = str((feature.get("names") or ["?"])[0])
                if first.startswith("channel") or (first == "?" and sizes[0] < 5 < sizes[-1]):
                    sizes = (*sizes[1:], sizes[0])
                if len(sizes) != 3 or sizes[2] > 4 or (kind == "video" and sizes[2] != 3):
                    raise ValueError(f"pictures of shape {sizes}")
            spec = ArraySpec(np.dtype(feature["dtype"] if kind == "array" else np.uint8), sizes)
            ours = feature.get("hilt")
            path = _path_of(name, sizes, taken) if ours is None else str(ours["path"])
            shape = () if path == "rewards" else sizes if ours is None else tuple(int(size) for size in ours["shape"])
            if not 0 < spec.nbytes < BYTE_LIMIT or math.prod(shape) != math.prod(sizes):
                raise ValueError(f"{spec} cannot be read")
            if path in SINGLE and (shape or SINGLE[path] not in ("", spec.dtype.name)):
                raise ValueError(f"{spec} cannot be {path}")
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise CorruptError(
                f"{file}: {name!r} is not described as LeRobot describes a feature ({error}). Restore the file."
            ) from None
        taken.append(path)
        yield Feature(name, kind, spec, path, shape)


def _path_of(name: str, shape: tuple[int, ...], taken: Sequence[str]) -> str:
    """The column of a feature that another program named: ``observation.images.front`` is observations/images/front."""
    if name in ENDS or name in BOOKKEEPING or (shape == (1,) and name.split(".")[-1] in INTERVENTION):
        return ""
    if name == "next.reward" and shape == (1,):
        return "rewards"
    head, *rest = [part for part in name.replace("/", ".").split(".") if part] or ["feature"]
    head = {"observation": "observations", "action": "actions"}.get(head) or (
        f"extra/{head}" if head in RESERVED else head
    )
    path = "/".join([head, *rest])
    clashes = any(
        path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in taken if other
    )
    return f"extra/{name.replace('/', '.')}" if clashes else path


def _arrays(table: Any, feature: Feature, where: str) -> Array:
    """``[rows + 1, ...]``: the values of a column, the last one twice."""
    pa = pyarrow()
    column, rows = table.column(feature.name).combine_chunks(), table.num_rows
    try:
        # where the package `datasets` is loaded, lists of lists have a type of their own
        column = getattr(column, "storage", column)
        while pa.types.is_nested(column.type):
            fixed = pa.types.is_fixed_size_list(column.type)
            if column.null_count or (not fixed and len(column.value_lengths().unique()) > 1):
                raise ValueError("rows of several sizes")
            column = column.flatten()
        if column.null_count or len(column) * feature.spec.dtype.itemsize != rows * feature.spec.nbytes:
            raise ValueError(f"{len(column) - column.null_count} values in {rows} frames")
        values = (
            column.cast(pa.from_numpy_dtype(feature.spec.dtype))
            .to_numpy(zero_copy_only=False)
            .reshape(rows, *feature.spec.shape)
        )
    except (pa.ArrowException, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{where}: {feature.name} is not {feature.spec} in every frame ({error}). Restore the file."
        ) from None
    return np.concatenate([values, values[-1:]])


def _pictures(table: Any, feature: Feature, where: str) -> Array:
    """``[rows + 1, height, width, channels]``: the images of a column, the last one twice."""
    frame, out = 0, np.empty(0, np.uint8)
    try:
        for frame, row in enumerate(table.column(feature.name).to_pylist()):
            picture = images.decode((row["bytes"] if isinstance(row, dict) else row) or b"", feature.spec.shape)
            if not frame:
                out = np.empty((table.num_rows + 1, *picture.shape), np.uint8)
            out[frame] = picture
    except (CorruptError, KeyError, TypeError, MemoryError) as error:
        raise CorruptError(f"{where}, frame {frame}: {feature.name}: {error}") from None
    out[-1] = out[-2]
    return out
