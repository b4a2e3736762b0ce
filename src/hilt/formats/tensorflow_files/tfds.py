"""RLDS datasets, Open X-Embodiment's among them: folders of TFDS, read without TensorFlow.

    for episode in open_dataset(Path("bridge/1.0.0"), split="train[:10%]").rlds():
        episode["episode_metadata"], episode["steps"][0]["observation"]

Such a folder holds

    dataset_info.json                           splits, and how many records each of their files has
    features.json                               what a record holds
    bridge-train.tfrecord-00000-of-00002, ...   a record for each episode
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hilt.core.errors import ConfigError, CorruptError, FormatError, UnknownNameError, optional_module
from hilt.core.files import inside, read
from hilt.core.platform import usable_cpus
from hilt.core.tree import Array, JsonObject
from hilt.formats.episodes import Dataset, Episode, Job, map_leaves
from hilt.formats.steps import to_episode
from hilt.formats.tensorflow_files.features import Features, Many
from hilt.formats.tensorflow_files.tfds_write import FILE_NAMES
from hilt.formats.tensorflow_files.tfds_write import create as create
from hilt.formats.tensorflow_files.tfrecord import RecordFile

LOST_LIMIT = 1 << 16
"""The maximum number of records counted as lost in a truncated file that cannot have held more."""

_SHARD = re.compile(r".+-(?P<split>[^-]+)\.(?:tfrecord|array_record)-(?P<number>\d+)-of-\d+")
_SPLIT = re.compile(r"([\w-]+)(?:\[([\d%:._a-z-]+)\])?")
_BORDER = re.compile(r"(?:(-?[\d_.]+)(%|shard)?)?")


def matches(path: Path) -> bool:
    """Whether a path is a folder of TFDS, or has one for its only version."""
    try:
        return bool(_folders(path))
    except OSError:
        return False


def open_dataset(path: Path, *, split: str | None = None, last_step: str = "end") -> RldsDataset:
    """The episodes of a split, or of a part of it or of several: ``train``,
    ``train[:10%]``, ``train[10:20]+val``; all without.

    An episode's last step is only where its last transition ends; ``last_step="keep"`` makes a transition of it, too.
    """
    if last_step not in ("end", "keep"):
        raise ConfigError(f"last_step={last_step!r}: expected end or keep.")
    return RldsDataset(path, split, last_step)


@dataclass(frozen=True)
class Shard:
    """One file of a split."""

    path: Path
    records: int


@dataclass(frozen=True)
class Part:
    """Some consecutive records of a shard."""

    split: str
    shard: Shard
    first: int
    count: int


class RldsDataset(Dataset):
    format = "rlds"

    def __init__(self, path: Path, split: str | None = None, last_step: str = "end"):
        super().__init__(path := Path(path))
        self._keep_last = last_step == "keep"
        folders = _folders(path)
        if len(folders) != 1:
            found = ", ".join(str(folder.relative_to(path)) for folder in folders) or "none"
            raise FormatError(
                f"{path}: expected a folder with features.json, or with one such version inside; found: {found}."
            )
        self.folder = folders[0]
        self.features = Features.load(self.folder / "features.json")
        steps = self.features.tree.get("steps")
        if not isinstance(steps, Many) or not steps.steps:
            raise FormatError(
                f"{self.folder}: a TFDS dataset, but not of episodes: its features have no nested dataset 'steps'."
            )
        self.info, self.splits = _splits(self.folder)
        self.parts = select(split or "all", self.splits)
        missing = [part.shard.path for part in self.parts if not _is_there(part.shard.path)]
        if missing:
            raise FormatError(
                f"{missing[0]}: {len(missing)} of {len(self.parts)} files are missing. Fetch them, or "
                "read those that are there with a split such as train[:5shard]."
            )
        for feature, why in self.features.left_out.items():
            self.notes.add(f"{feature}: {why}, not carried over")

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    def jobs(self, first: int = 0, images: bool = True) -> Iterator[Job]:
        features = self.features if images else self.features.without_images()
        for split, decode in self._records(first, features):
            yield partial(self._episode, split, decode)

    def rlds(self, workers: int | None = None) -> Iterator[dict[str, Any]]:
        """The episodes as TFDS has them: ``steps``, and beside them what else a record holds. Threads decode ahead."""
        workers = workers or usable_cpus()
        waiting: deque[Future[dict[str, Any]]] = deque()
        pool = ThreadPoolExecutor(workers, "hilt-decode")
        try:
            for _, decode in self._records(0, self.features):
                waiting.append(pool.submit(decode))
                if len(waiting) > 2 * workers:  # a long episode keeps no thread waiting
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def describe(self) -> JsonObject:
        return {
            "name": str(self.info.get("name", self.folder.parent.name)),
            "version": str(self.info.get("version", self.folder.name)),
            "splits": {name: sum(shard.records for shard in shards) for name, shards in self.splits.items()},
        }

    def unlisted(self) -> Iterator[str]:
        for shard in dict.fromkeys(part.shard for part in self.parts):
            records = sum(1 for _ in _opened(shard.path).places())
            if records > shard.records:
                yield f"{shard.path} has {records:,} records, and dataset_info.json lists {shard.records:,} of them."

    def _episode(self, split: str, decode: Callable[[], dict[str, Any]]) -> Episode | None:
        episode = to_episode(decode(), self.notes, self._keep_last)
        if episode is not None:
            episode.columns = map_leaves(self._known, episode.columns)
            if len(self.splits) > 1:
                episode.facts.setdefault("split", split)
        return episode

    def _known(self, column: Array) -> Array:
        if column.dtype != ml_dtypes.bfloat16:
            return column
        self.notes.add("bfloat16, which logs do not have, becomes float32 of the same values")
        return column.astype(np.float32)

    def _records(self, first: int, features: Features) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """The split of each record, and what decodes it."""
        for part in self.parts:
            if first < part.count:
                for decode in itertools.islice(_of_part(part, features), first, None):
                    yield part.split, decode
            first = max(0, first - part.count)


def select(spec: str, splits: dict[str, list[Shard]]) -> list[Part]:
    """The parts of files that a split means. Percentages are rounded to the nearest
    record, halves to the even one, as TFDS does."""
    parts = []
    for piece in re.split(r"\s*\+\s*", spec.strip()):
        if piece == "all":
            parts += [Part(name, shard, 0, shard.records) for name in splits for shard in splits[name] if shard.records]
            continue
        match = _SPLIT.fullmatch(piece)
        borders = [_BORDER.fullmatch(border) for border in (match[2] or ":").split(":")] if match else []
        if not match or None in borders or not 1 <= len(borders) <= 2 or (match[2] == ":"):
            raise ConfigError(
                f"split {spec!r}: expected such as train, train[:10%], train[10:20], train[2shard] or "
                f"train+val, got {piece!r}."
            )
        if match[1] not in splits:
            raise UnknownNameError("split", match[1], splits)
        begin, end = _range(spec, [(b[1], b[2]) for b in borders if b], [shard.records for shard in splits[match[1]]])
        for shard in splits[match[1]]:
            first, last = max(0, begin), min(shard.records, end)
            if first < last:
                parts.append(Part(match[1], shard, first, last - first))
            begin, end = begin - shard.records, end - shard.records
    return parts


def _range(spec: str, borders: list[tuple[str | None, str | None]], lengths: list[int]) -> tuple[int, int]:
    """First and last record (exclusive) of a slice."""
    total, unit = sum(lengths), next((unit for _, unit in borders if unit), "")
    try:
        values = [None if value is None else float(value) if unit == "%" else int(value) for value, _ in borders]
        if len(values) == 1:
            if unit != "shard" or values[0] is None:
                raise ValueError("only whole shards can be taken without a ':'")
            values.append(values[0] + 1)
        if unit == "%":
            if any(abs(value or 0) > 100 for value in values):
                raise ValueError("percentages are between -100 and 100")
            values = [None if value is None else round(value * total / 100.0) for value in values]
        elif unit == "shard":
            if values[1] is not None and values[1] <= 0:
                values[1] += len(lengths)
            values = [None if value is None else sum(lengths[: int(value)]) for value in values]
        begin, end = int(values[0] or 0), total if values[1] is None else int(values[1])
        if abs(begin) > total or abs(end) > total:
            raise ValueError(f"there are {total} records")
    except ValueError as error:
        raise ConfigError(f"split {spec!r}: {error}.") from None
    return begin + total if begin < 0 else begin, end + total if end < 0 else end


def _of_part(part: Part, features: Features) -> Iterator[Callable[[], dict[str, Any]]]:
    """What decodes each record of a part. Where damage hides the rest of a file, each of them raises that error."""
    file = _opened(part.shard.path)
    places, damage = file.places(), ""
    for number in range(part.first + part.count):
        place = (0, 0)
        try:
            place = place if damage else next(places)
        except StopIteration:
            damage = (
                f"{part.shard.path}: the file has {number} records, and dataset_info.json has {part.shard.records}."
            )
        except CorruptError as error:
            damage = str(error)
        if number >= part.first:
            yield partial(_decoded, file, place, damage, features)


def _decoded(file: Any, place: tuple[int, int], damage: str, features: Features) -> dict[str, Any]:
    if damage:
        raise CorruptError(damage)
    data = file.read(*place)
    try:
        return features.decode(data)
    except CorruptError as error:
        raise CorruptError(f"{file.path}: the record at {file.unit} {place[0]}: {error}") from error


class _ArrayRecordFile:
    """An ArrayRecord file, with the methods of `RecordFile`; the place of a record is its number."""

    unit = "number"

    def __init__(self, path: Path):
        module = optional_module(
            "array_record.python.array_record_module", "Reading ArrayRecord files", "array-record", "array-record"
        )
        self.path = path
        self._reader = module.ArrayRecordReader(str(path), "readahead_buffer_size:0")

    def places(self) -> Iterator[tuple[int, int]]:
        if not self._reader.ok():
            raise CorruptError(f"{self.path}: not a readable ArrayRecord file.")
        yield from ((number, 0) for number in range(self._reader.num_records()))

    def read(self, number: int, _: int) -> bytes:
        try:
            result: bytes = self._reader.read([number])[0]
            return result
        except (RuntimeError, ValueError, IndexError) as error:
            raise CorruptError(f"{self.path}: the record at number {number} is damaged ({error}).") from error


def _folders(path: Path) -> list[Path]:
    """The folders of TFDS at a path: itself, or the versions inside it, or those of the configurations inside it."""
    for pattern in ("features.json", "[0-9]*.[0-9]*.[0-9]*/features.json", "*/[0-9]*.[0-9]*.[0-9]*/features.json"):
        if found := sorted(path.glob(pattern)):
            return [file.parent for file in found]
    return []


def _splits(folder: Path) -> tuple[dict[str, Any], dict[str, list[Shard]]]:
    """Reads dataset_info.json and the files of each split; without it, the names of the files."""
    path = folder / "dataset_info.json"
    try:
        info = json.loads(read(path)) if path.exists() else {}
        kind = info.get("fileFormat") or "tfrecord"
        splits = {str(split["name"]): _shards(folder, info, kind, split) for split in info.get("splits", [])}
    except FormatError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FormatError(
            f"{path}: not the description of a TFDS dataset ({type(error).__name__}: {error}). Restore the file."
        ) from error
    if kind not in ("tfrecord", "array_record"):
        raise FormatError(
            f"{path}: files of the format {kind!r}; those that can be read are tfrecord and array_record."
        )
    if not splits:
        for file in sorted(folder.iterdir()):
            if match := _SHARD.fullmatch(file.name):
                file = inside(folder, file.name, str(folder))
                splits.setdefault(match["split"], []).append(Shard(file, _count(file)))
                if len(splits[match["split"]]) - 1 != int(match["number"]):
                    raise FormatError(
                        f"{file}: the file before it is missing. Fetch it, or dataset_info.json, which names all files."
                    )
    if not splits:
        raise FormatError(
            f"{folder}: no splits in dataset_info.json, and no files such as name-train.tfrecord-00000-of-00001."
        )
    return info, splits


def _shards(folder: Path, info: dict[str, Any], kind: str, split: dict[str, Any]) -> list[Shard]:
    lengths = [int(length) for length in split.get("shardLengths", [])]
    count = len(lengths) or int(split.get("numShards", 0))
    digits = max(5, len(str(count)))
    shards: dict[Path, Shard] = {}
    for number in range(count):
        name = split.get("filepathTemplate") or FILE_NAMES
        parts = {
            "DATASET": info["name"],
            "SPLIT": split["name"],
            "FILEFORMAT": kind,
            "SHARD_X_OF_Y": "{SHARD_INDEX}-of-{NUM_SHARDS}",
        }
        parts |= {"SHARD_INDEX": f"{number:0{digits}}", "NUM_SHARDS": f"{count:0{digits}}"}
        for key, value in parts.items():
            name = name.replace(f"{{{key}}}", value)
        path = inside(folder, name, str(folder / "dataset_info.json"))
        if path in shards:
            raise ValueError(f"{name[:100]!r} is the file of two shards")
        if not lengths and not _is_there(path):  # any number of them may be promised
            raise FormatError(
                f"{path}: this file is missing, one of {count}. Fetch it, or correct numShards in dataset_info.json."
            )
        if lengths and (
            lengths[number] < 0 or (_is_there(path) and lengths[number] > max(path.stat().st_size, LOST_LIMIT))
        ):
            raise ValueError(f"{lengths[number]} records in {name}")
        shards[path] = Shard(path, lengths[number] if lengths else _count(path))
    return list(shards.values())


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file can have such a name
        return False


def _count(path: Path) -> int:
    """Records of a file, as far as they can be found; the first that cannot counts, so that it is missed."""
    count = 0
    try:
        for _ in _opened(path).places():
            count += 1
    except CorruptError:
        count += 1
    return count


def _opened(path: Path) -> RecordFile | _ArrayRecordFile:
    return _ArrayRecordFile(path) if ".array_record" in path.name else RecordFile(path)
