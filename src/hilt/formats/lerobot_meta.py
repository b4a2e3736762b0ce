"""The metadata of LeRobot's datasets: their episodes, tasks and statistics, read with suspicion."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hilt.core.errors import CorruptError, HiltError
from hilt.core.files import read
from hilt.core.tree import Array
from hilt.formats.lerobot_write import merge, pyarrow

ROW_LIMIT = 1 << 25
"""Rows of one file: more are refused, since a few bytes of parquet can claim any number."""


def read_episodes(path: Path, version: str, videos: list[str]) -> dict[str, Array]:
    """Returns the metadata of each episode as columns: its number and length, and
    in version 3.0 the locations of its frames."""
    names, files = ["episode_index", "length"], [path / "meta/episodes.jsonl"]
    if version == "v3.0":
        names += ["data/chunk_index", "data/file_index"]
        names += [
            f"videos/{video}/{name}" for video in videos for name in ("chunk_index", "file_index", "from_timestamp")
        ]
        files = sorted((path / "meta/episodes").glob("*/*.parquet")) or [
            path / "meta/episodes/chunk-000/file-000.parquet"
        ]
    parts = [listing(file, names) for file in files]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if not ((columns["length"] >= 0) & (columns["length"] <= ROW_LIMIT)).all():
        raise CorruptError(f"{files[0]}: the length of an episode is not between 0 and {ROW_LIMIT}. Restore the file.")
    return columns


def read_statistics(path: Path) -> dict[str, dict[str, Array]]:
    """Returns the statistics of all features: of the whole dataset (2.0 and 3.0), or
    merged from those of its episodes (2.1)."""
    whole, parts = path / "meta/stats.json", path / "meta/episodes_stats.jsonl"
    file = whole if whole.is_file() else parts
    if not file.is_file():
        return {}
    lines = (
        [parse_json(read(file), file)]
        if file is whole
        else [parse_json(line, file) for line in read(file).splitlines()]
    )
    merged: dict[str, dict[str, Array]] = {}
    try:
        for line in lines:
            for name, stats in (line if file is whole else line["stats"]).items():
                one = {stat: np.asarray(value, np.float64).reshape(-1) for stat, value in stats.items()}
                merged[name] = merge(merged[name], one) if name in merged else one
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{file}: not the statistics of a LeRobot dataset ({error!r}). Restore the file.") from None
    return merged


def read_task_lists(path: Path, version: str, count: int) -> list[str]:
    """The tasks of every episode as meta/episodes lists them, joined to one text; nothing where it does not."""
    texts: list[str] = []
    files = [path / "meta/episodes.jsonl"]
    if version == "v3.0":
        files = sorted((path / "meta/episodes").glob("*/*.parquet"))
    for file in files:
        with parquet_module(file) as pq:
            if file.suffix == ".jsonl":
                lists = [parse_json(line, file).get("tasks") for line in file.read_bytes().splitlines() if line.strip()]
            elif "tasks" in pq.read_schema(file.absolute()).names:
                lists = pq.ParquetFile(file.absolute()).read(columns=["tasks"]).column("tasks").to_pylist()
            else:
                return []
        texts += [" → ".join(map(str, tasks)) if isinstance(tasks, list) else "" for tasks in lists]
    return texts if len(texts) == count else []


def read_texts(path: Path, kind: str) -> dict[int, str]:
    """The texts of all tasks (or subtasks) by number."""
    file, index, text = path / f"meta/{kind}s.parquet", f"{kind}_index", kind
    if file.is_file():
        with parquet_module(file) as pq:
            text = next(
                (name for name in pq.read_schema(file.absolute()).names if name in (kind, "__index_level_0__")), kind
            )
    elif not (file := file.with_suffix(".jsonl")).is_file():
        return {}
    listed = listing(file, [index], text)
    return dict(zip(listed[index].tolist(), map(str, listed[text].tolist()), strict=True))


def listing(file: Path, names: Sequence[str], text: str = "") -> dict[str, Array]:
    """Columns of numbers, and one of text, from a parquet file or from a file of JSON lines."""
    wanted = [*names, text] if text else names
    with parquet_module(file) as pq:
        if file.suffix == ".jsonl":
            lines = [parse_json(line, file) for line in file.read_bytes().splitlines() if line.strip()]
            found = {name: np.array([line[name] for line in lines] or np.empty(0, np.int64)) for name in wanted}
        else:
            parquet = pq.ParquetFile(file.absolute())
            if parquet.metadata.num_rows > ROW_LIMIT:
                raise CorruptError(f"{file}: {parquet.metadata.num_rows} rows; at most {ROW_LIMIT} are read.")
            table = parquet.read(columns=wanted)
            found = {name: table.column(name).to_numpy() for name in wanted}
        for name in names:
            if found[name].dtype.kind not in ("fiu" if name.endswith("timestamp") else "iu") or found[name].ndim != 1:
                raise ValueError(f"{name} is not a number in every row")
    return found


@contextlib.contextmanager
def parquet_module(file: Path) -> Iterator[ModuleType]:
    """The module that reads parquet files; what it raises about this file becomes ours."""
    pa = pyarrow()
    import pyarrow.parquet as pq

    try:
        yield pq
    except HiltError:
        raise
    except FileNotFoundError:
        raise CorruptError(f"{file}: this file is missing. Restore it from a copy.") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise CorruptError(f"{file}: not as LeRobot writes it ({reason}). Restore it from a copy.") from error


def parse_json(text: str | bytes, file: Path) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{file}: not readable as JSON ({error}). Restore the file from a copy.") from None
    if not isinstance(data, dict):
        raise CorruptError(f"{file}: a mapping was expected, got {type(data).__name__}. Restore the file from a copy.")
    return data
