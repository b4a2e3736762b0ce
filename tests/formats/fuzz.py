"""Spoils datasets of each format in many ways, and reads them as a user would.

    python -m tests.formats.fuzz FORMAT FOLDER [--seed 0] [--first 0] [--count 1000] [--seconds 10]

It runs as a process of its own, with little memory and under a watchdog, because what it provokes may end that process:
each input's number stands in FOLDER/at before it is tried, and what was done to it when that is done. The only outcomes
that are right are data or a `HiltError`; a reader that writes, starts something or looks for a name in a pickle is
found by an audit hook. What went wrong is printed, a line of JSON each.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import HiltError
from hilt.core.tree import flatten
from hilt.formats import detect, open_dataset
from hilt.formats.convert import convert
from tests.formats.samples import FORMATS, samples
from tests.formats.spoil import spoil

MEMORY = 1 << 30
"""Bytes of address space that reading one input may take, beyond what the process has when it begins."""
DEADLINE_S = 120
SLOW_CPU_S = 5
"""For one input; on this the process ends with the tracebacks of its threads."""


# --- reading ---


def read(path: Path, format: str) -> str:
    """All that one can ask of a dataset. Returns how it ended."""
    outcomes = set()
    try:
        detect(path)
    except HiltError:
        outcomes.add("not detected")
    try:
        dataset: Any = open_dataset(path, format)
        json.dumps(dataset.describe(), allow_nan=False)
        total = len(dataset)
        for images in (False, True):
            jobs = 0
            for job in dataset.jobs(images=images):
                jobs += 1
                try:
                    episode = job()
                    if episode is not None:
                        check(episode)
                    outcomes.add("data")
                except HiltError as error:
                    check_text(error)
                    outcomes.add("a damaged episode")
            assert jobs == total, f"{total} jobs were promised and {jobs} came"
        if hasattr(dataset, "rlds"):
            for episode in dataset.rlds():
                sum(1 for _ in episode["steps"])
    except HiltError as error:
        check_text(error)
        outcomes.add("refused")
    return ", ".join(sorted(outcomes))


def check_text(error: HiltError) -> None:
    """One line, unless it is a strange name in a file that has several."""
    lines = str(error).split("\n")
    assert lines[0].strip() and (len(lines) == 1 or not all(line.isprintable() for line in lines)), (
        f"not one line: {error}"
    )


def carry_over(path: Path, format: str, target: Path) -> None:
    """Into a log, past whatever is damaged: every episode is counted."""
    try:
        summary = convert(
            path, target, format=format, skip_corrupt=True, to="hil-serl" if format == "log" else "log", workers=2
        )
        assert summary.episodes + summary.damaged + summary.empty == len(open_dataset(path, format)), summary
    except HiltError:
        pass


def check(episode: Any) -> None:
    """What every writer relies on."""
    columns = flatten(episode.columns)
    lengths = {path: len(column) for path, column in columns.items()}
    assert len(set(lengths.values())) == 1, f"columns of several lengths: {lengths}"
    for path, column in columns.items():
        assert isinstance(column, np.ndarray) and column.dtype.kind in "biufcV" and not column.dtype.hasobject, (
            f"{path}: {column.dtype}"
        )
    for path in ("rewards", "terminated", "truncated", "source"):
        assert path in columns and columns[path].ndim == 1, f"{path}: {columns.get(path)}"
    json.dumps(episode.facts, allow_nan=False)


# --- the process ---


FORBIDDEN = {
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "os.forkpty",
        "subprocess.Popen",
        "pty.spawn",
        "socket.connect",
        "socket.bind",
    ),
    *(
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.link",
        "os.symlink",
        "os.chmod",
        "os.chown",
        "shutil.rmtree",
    ),
    "pickle.find_class",
}


class Guard:
    """Notes what a reader must not do while `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if (event in FORBIDDEN or writes) and "__pycache__" not in str(arguments[0]):
            self.seen.append(f"{event} {arguments[:2]}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("folder", type=Path)
    for name, default in (("seed", 0), ("first", 0), ("count", 10**9), ("seconds", 10**9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    logging.disable()  # a log that mends itself says so each time
    given = samples(options.format, folder / "samples")
    for sample in given:
        outcome = read(sample, options.format)  # imports all that is needed, and must be all right
        assert outcome == "data", f"{sample} as it was made: {outcome}"
    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    guard, outcomes, end = Guard(), dict[str, int](), time.monotonic() + options.seconds
    number = options.first
    while number < options.first + options.count and time.monotonic() < end:
        rng = random.Random(f"{options.seed} {options.format} {number}")
        sample = rng.choice(given)
        place = folder / "input" / sample.name
        shutil.rmtree(folder / "input", ignore_errors=True)
        if sample.is_dir():
            shutil.copytree(sample, place)
        else:
            (folder / "input").mkdir()
            shutil.copyfile(sample, place)
        (folder / "at").write_text(json.dumps({"number": number, "what": None}))
        what = spoil(rng, place)
        (folder / "at").write_text(json.dumps({"number": number, "what": what}))
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        began = time.process_time()
        guard.watching = True
        try:
            outcome = read(place, options.format)
            guard.watching = False
            if rng.random() < 0.2:
                carry_over(place, options.format, folder / "input" / "carried over")
        except Exception as error:  # noqa: BLE001 (anything but a HiltError is what is looked for)
            guard.watching = False
            trace = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in trace if "hilt" in frame.filename or "tests" in frame.filename]
            at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-4:]))
            report(number, what, f"{type(error).__name__}: {str(error)[:300]}", at)
            outcome = "WRONG"
        guard.watching = False
        faulthandler.cancel_dump_traceback_later()
        if guard.seen:
            report(number, what, f"did {guard.seen[:3]}")
            guard.seen.clear()
        if time.process_time() - began > SLOW_CPU_S:
            report(number, what, f"took {time.process_time() - began:.1f} s of CPU time", "slow")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        number += 1
    print(json.dumps({"tried": number - options.first, "outcomes": outcomes}), flush=True)
    return 0


def report(number: int, what: str, wrong: str, at: str = "") -> None:
    print(json.dumps({"number": number, "what": what, "wrong": wrong, "at": at}), flush=True)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
