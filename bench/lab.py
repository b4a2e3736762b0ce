"""Where a bench works: its folder, its sizes, and the limits it finds on the way."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench.report import Row


class NotKeptError(LookupError):
    """A result that is not kept, where nothing is to be run"""


@dataclass
class Lab:
    folder: Path
    """On a disk; emptied at the end."""
    quick: bool
    """Smaller sizes and fewer rounds; no target counts as met."""
    limits: dict[str, str] = field(default_factory=dict)
    seeds: int = 5
    """Of what is learned"""
    minutes: float = 5.0
    """Of learning, for each seed"""
    cores: int = 0
    """Of each of the runs that are made side by side, as many as the machine has
    cores for; 0: one at a time, with all of them"""
    only: frozenset[str] = frozenset()
    """Rows and groups that were asked for; none: all of them"""
    keep: Path | None = None
    """Where results of single runs are kept, so that a bench of hours can be
    interrupted, or measured on several machines"""
    first_seed: int = 0
    measures: bool = True
    """False: nothing is run, and what is not kept is missing"""

    @property
    def seed_range(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def read(self, name: str) -> dict[str, Any] | None:
        """The kept result of this name; None if there is none."""
        file = self.kept(f"{name}.json")
        if self.keep is None or not file.exists():
            return None
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the kept result of this name, or measures it and keeps it.
        Results of --quick have names of their own."""
        file = self.kept(f"{name}.json")
        if (known := self.read(name)) is not None:
            self.progress(f"{name}: kept in {file}")
            return known
        if not self.measures:
            raise NotKeptError(f"{name} is not kept in {self.keep}")
        result = measure()
        if self.keep is None:
            return result
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(result) + "\n")
        beside.replace(file)
        return result

    def kept(self, name: str) -> Path:
        """Returns the path of a result, or of a folder that later runs need: below `keep` where it is given, else below
        our own folder, which is removed at the end."""
        return (self.keep or self.folder) / (f"quick-{name}" if self.quick else name)

    def side_by_side(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Calls `work` with each item and returns the results in order. The processes that it
        starts inherit the cores of its thread."""
        machine = sorted(os.sched_getaffinity(0))
        size = self.cores or len(machine)
        lanes: SimpleQueue[list[int]] = SimpleQueue()
        for first in range(0, len(machine) - size + 1, size):
            lanes.put(machine[first : first + size])
        with ThreadPoolExecutor(lanes.qsize(), "lane", lambda: os.sched_setaffinity(0, lanes.get_nowait())) as pool:
            return list(pool.map(work, items))

    def progress(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def wants(self, group: str, row: str) -> bool:
        return not self.only or not self.only.isdisjoint((group, row))

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 9

    @property
    def seconds(self) -> float:
        """Seconds that each contender runs in one round."""
        return 0.02 if self.quick else 0.5

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def pick_words(self, quick: list[str]) -> list[str]:
        return quick if self.quick else []

    def size(self, ran: int, full: int, unit: str) -> str:
        """What a row says about its size: nothing when it is the full one."""
        return "" if ran == full else f"{ran:,} {unit} instead of {full:,}"

    def new(self, name: str) -> Path:
        """A path in the folder where nothing is."""
        path = self.folder / name
        remove(path)
        return path


@dataclass(frozen=True)
class Group:
    """Rows that are measured together."""

    rows: Sequence[str]
    run: Callable[[Lab], Iterable[Row]]


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def disk_usage(folder: Path) -> int:
    """Bytes that a folder takes on disk, as `du` counts."""
    return sum(os.stat(path).st_blocks * 512 for path in files_of(folder))


def available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def resident(process: int | str = "self") -> dict[str, int]:
    """Bytes of a process in memory, by kind."""
    found = dict.fromkeys(("RssAnon", "RssShmem", "RssFile"), 0)
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] = int(value.split()[0]) * 1024
    return found


def cpu_seconds(process: int) -> float:
    """What a process has used so far, in the kernel and outside."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
