"""Power cuts: whatever was promised power-safe is there afterwards, exactly once, and the log opens.

A workload is recorded once per setting; then the record is cut at many moments, and at each the disk keeps, drops,
tears and reorders what was not synced (the model is in `power.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import FormatError, StorageError
from hilt.core.files import Files
from hilt.replay import Log
from hilt.replay.key_ranges import key_of
from hilt.replay.storage.segment import ROWS
from tests.effort import rounds
from tests.replay.known_steps import (
    IMAGE,
    SPACING,
    all_keys,
    check_contents,
    columns,
    describe,
    length,
    make_log,
    trajectory,
)
from tests.replay.power import Disk, Event, Recorder

CUTS = int(os.environ.get("HILT_POWER_CUTS", rounds(5, 100)))
"""Power cuts per workload."""


class Workload:
    """Writes to a log and says what was promised, by the words of the setting."""

    def __init__(self, folder: Path, durability: str, sync_seconds: float, **settings: Any):
        self.files = Recorder(folder.parent, sync_seconds)
        self.durability = durability
        self.log = make_log(folder, self.files, durability=durability, **settings)
        self.written: list[int] = []  # keys in the order in which they were appended
        self.files.promise(("log",))

    def reopen(self) -> None:
        """As after a crash: nothing is synced, ended or closed."""
        self.promise_synced()
        self.written = []
        files, self.log.durability = self.files, self.log.durability.parse("never")
        if self.log._syncer is not None:
            self.log._syncer.close()
        self.log.facts.sync = lambda: None  # type: ignore[method-assign]
        self.log.sync = lambda: None  # type: ignore[method-assign]
        self.log.close()
        self.log = Log.open(self.log.path, files=files)

    def steps(self, seed: int, episode: Any, count: int) -> None:
        for _ in range(count):
            t = episode.steps
            key = episode.append(columns(seed, t))
            self.written.append(key)
            if self.durability == "every step":
                self.files.promise(("step", key))
            if self.durability == "every episode" and t == length(seed) - 1:
                for offset in range(length(seed)):
                    self.files.promise(("step", key_of(episode.trajectory, offset)))
            self.promise_synced()

    def end(self, episode: Any) -> None:
        episode.end()
        if self.durability in ("every step", "every episode"):
            for offset in range(episode.steps):
                self.files.promise(("step", key_of(episode.trajectory, offset)))

    def add(self, seed: int, steps: int, width: int, **options: Any) -> int:
        number = self.log.add(trajectory(seed, steps, width), **options)
        keys = [key_of(number, offset) for offset in range(steps * width)]
        self.written += keys
        if self.durability in ("every step", "every episode"):
            for key in keys:
                self.files.promise(("step", key))
            for name, value in options.get("facts", {}).items():
                self.files.promise(("fact", number, name, value))
        self.promise_synced()
        return number

    def annotate(self, number: int, **facts: Any) -> None:
        self.log.annotate(number, **facts)
        if self.durability in ("every step", "every episode"):
            for name, value in facts.items():
                self.files.promise(("fact", number, name, value))

    def delete(self, number: int) -> None:
        self.files.promise(("deleting", number))
        self.log.delete(number)

    def promise_synced(self) -> None:
        """What the log itself says to be power-safe."""
        for key in self.written[: self.log.synced]:
            self.files.promise(("step", key))

    def sync(self) -> None:
        facts = {number: self.log.facts.about(number) for number in self.log.trajectories()}
        self.log.sync()
        for key in self.written:
            self.files.promise(("step", key))
        for number, about in facts.items():
            for name, value in about.items():
                self.files.promise(("fact", number, name, value))


def write(work: Workload) -> list[Event]:
    """Two episodes side by side, trajectories within and over segments, facts, a deletion, a crash, and some more."""
    left, right = work.log.episode(actor="left"), work.log.episode(actor="right")
    seeds = iter(range(0, 10**6, SPACING))
    a, b = next(seeds), next(seeds)
    for _ in range(3):
        work.steps(a, left, 1)
        work.steps(b, right, 1)
    first = work.add(next(seeds), 4, 2, actor="batch", facts={"tag": 1})
    work.annotate(first, success=True)
    work.steps(a, left, 1)  # terminates
    work.add(next(seeds), 10, 2)  # longer than a segment
    work.sync()
    second = work.add(next(seeds), 3, 4)
    work.end(right)
    work.delete(second)
    work.add(next(seeds), 3, 3)
    work.reopen()
    work.steps(next(seeds), work.log.episode(actor="left"), 3)
    time.sleep(0.02)
    work.promise_synced()
    work.add(next(seeds), 4, 3)
    work.annotate(first, tag=2)
    work.sync()
    work.log.compress()
    work.add(next(seeds), 2, 2)
    work.log.close()
    return work.files.events


def moments(events: list[Event], rng: np.random.Generator, count: int) -> Iterator[int]:
    """Right after promises, where it matters most, and anywhere."""
    promised = [i + 1 for i, event in enumerate(events) if event.what == "promise"]
    for _ in range(count):
        yield int(rng.choice(promised)) if rng.random() < 0.5 else int(rng.integers(len(events) + 1))


@pytest.mark.parametrize("compression", ["raw", "zlib"])
@pytest.mark.parametrize("durability", ["every step", "every episode", "at most 5 ms", "never"])
def test_power_cuts(
    durability: str,
    compression: str,
    memory_path: Path,
    counted: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
):
    settings = {"compression": {IMAGE: "zlib"}} if compression == "zlib" else {}
    root = memory_path / "disk"
    root.mkdir()
    events = write(Workload(root / "log", durability, 0.0005, **settings))
    monkeypatch.setattr("hilt.replay.storage.segment.boot_id", lambda: "after the power cut")
    rng, promised, shown = np.random.default_rng(len(durability) + len(compression)), 0, 0
    for number, moment in enumerate(moments(events, rng, CUTS)):
        disk = Disk(root)
        disk.play(events[:moment])
        found = memory_path / f"found-{number}"
        disk.cut(rng, found)
        promised += check(found / "log", disk.promises, f"cut {number} after {moment} events")
    shown = len(events)
    counted(f"{CUTS} cuts in a record of {shown} operations, {promised} promises checked, none broken")


def test_what_is_appended_during_a_sync_needs_the_next_one(tmp_path: Path):
    """A sync in another thread does not vouch for what came after it began, and a
    second one does not return before it."""
    inside, go_on, syncs = threading.Event(), threading.Event(), list[int]()

    class Slow(Files):
        def sync(self, fd: int) -> None:
            inside.set()
            assert go_on.wait(60)
            syncs.append(fd)

    with make_log(tmp_path / "log", durability="never") as log:
        log.add(trajectory(0, 2, 1))
    with Log.open(tmp_path / "log", files=Slow()) as log:
        first = threading.Thread(target=log.sync)
        first.start()
        assert inside.wait(60)
        log.add(trajectory(SPACING, 2, 1))
        second = threading.Thread(target=log.sync)
        second.start()
        second.join(0.05)
        assert second.is_alive() and log.synced == 0
        go_on.set()
        first.join(60)
        second.join(60)
        rows = log.segments[0].fd(ROWS)
        assert syncs.count(rows) == 2
        assert log.synced == 2


def check(folder: Path, promises: list[Any], when: str) -> int:
    steps = {what[1] for what in promises if what[0] == "step"}
    deleted = {what[1] for what in promises if what[0] == "deleting"}
    steps = {key for key in steps if key >> 32 not in deleted}
    facts = {(what[1], what[2]): what[3] for what in promises if what[0] == "fact"}
    if ("log",) not in promises:
        try:
            log = Log.open(folder)
        except (FormatError, StorageError):
            make_log(folder).close()
            log = Log.open(folder)
    else:
        with Log.open(folder, "r") as log:
            check_log(log, steps, facts, f"{when}, read")
        log = Log.open(folder)
    with log:
        check_log(log, steps, facts, when)
        before = all_keys(log)
        number = log.add(trajectory(10**7 * SPACING, 3, 2))
    with Log.open(folder) as log:
        check_log(log, steps, facts, f"{when}, opened again")
        assert all_keys(log) == sorted([*before, *(key_of(number, i) for i in range(6))])
    return len(steps) + len(facts)


def check_log(log: Log, steps: set[int], facts: dict[tuple[int, str], Any], when: str) -> None:
    present = set(all_keys(log))
    lost = sorted(steps - present)
    assert not lost, f"{when}: {len(lost)} of {len(steps)} promised steps are lost, the first is {describe(lost[0])}"
    # of what was not promised a part may be lost, as the log says; what is there is right
    check_contents(log, whole=False)
    for (number, name), value in facts.items():
        if key_of(number) in present:
            assert log.facts.about(number).get(name) in (value, 2), (
                f"{when}: the fact {name} about trajectory {number} is lost"
            )


def test_a_segment_that_is_deleted_while_it_is_synced(tmp_path: Path):
    """A sync under way has looked up a segment that eviction then takes away: nothing
    is left to promise, and the log works on."""

    class Evicting(Files):
        def sync_folder(self, path: Path) -> None:
            if path.parent.name == "segments" and not path.name.startswith(".") and self.log is not None:
                log, self.log = self.log, None
                log.catalog.delete_segment(int(path.name))
            super().sync_folder(path)

        log: Log | None = None

    with make_log(tmp_path / "log", durability="never") as log:
        for n in range(6):
            log.add(trajectory(n * SPACING, 8, 1))
    with Log.open(tmp_path / "log", files=(files := Evicting())) as log:
        log.add(trajectory(6 * SPACING, 8, 1))
        files.log, held = log, len(log.segments)
        log.sync()
        assert len(log.segments) == held - 1
        log.sync()
