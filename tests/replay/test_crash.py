"""A writer killed with SIGKILL from outside, at random moments and right before
each system call of each kind of commit.

Whatever a call had promised by returning is there afterwards, exactly once, pixel for pixel. What
was not promised is there as a whole or not at all.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hilt.core.errors import FormatError, StorageError
from hilt.replay import Edits, Log
from hilt.replay.key_ranges import key_of
from hilt.replay.retention import Retention
from tests.effort import rounds, some_of
from tests.replay.known_steps import (
    IMAGE,
    SEGMENT_BYTES,
    SPACING,
    all_keys,
    check_contents,
    columns,
    describe,
    make_log,
    trajectory,
)
from tests.replay.writers import DEADLINE_S, NEVER, PLACES, Writer, add_forever, write_forever, write_once

KILLS = rounds(15, 120)


class Promises:
    """What the writers of one log have reported, over all their lives."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[int, int]] = {}  # key -> seed, t
        self.facts: dict[int, float] = {}
        self.deleted: set[int] = set()
        self.vanishing: set[int] = set()
        """Trajectories whose deletion was begun."""

    def take(self, reports: Iterable[Any]) -> set[int]:
        """Adds reports; returns the keys they promise."""
        new: set[int] = set()
        for kind, *rest in reports:
            if kind == "step":
                key, seed, t = rest
                self.steps[key] = (seed, t)
                new.add(key)
            elif kind == "trajectory":
                number, seed, steps, width = rest
                for t in range(steps):
                    for b in range(width):
                        self.steps[key_of(number, t * width + b)] = (seed + b, t)
                        new.add(key_of(number, t * width + b))
            elif kind == "fact":
                self.facts[rest[0]] = rest[1]
            elif kind == "deleting":
                self.vanishing.add(rest[0])
            elif kind == "deleted":
                self.deleted.add(rest[0])
        return new

    def check(self, log: Log, look_at: Iterable[int] | None = None, evicted: int = 0) -> list[int]:
        """Everything promised is there, and what else is there; with `look_at` only these steps are read.

        `evicted` is how many of the oldest steps may be gone.
        """
        present = set(all_keys(log))
        lost = [key for key in sorted(set(self.steps) - present)[evicted:] if key >> 32 not in self.vanishing]
        assert not lost, f"{len(lost)} promised steps are lost, the first is {describe(lost[0])} of {len(self.steps)}"
        found = check_contents(log, None if look_at is None else present & set(look_at))
        for key, what in found.items():
            assert self.steps.get(key, what) == what, f"{describe(key)} is another step than the one that was promised"
        for number, value in self.facts.items():
            assert log.facts.about(number)["tag"] >= value, f"a fact about trajectory {number} is lost"
        assert not self.deleted & {key >> 32 for key in present}, "a deleted trajectory is there again"
        return sorted(present - set(self.steps))

    def settle(self, log: Log, extra: Iterable[int]) -> None:
        """Steps that were not promised but are there have to stay, too."""
        self.steps.update(check_contents(log, extra))


def test_killed_at_random_moments(memory_path: Path, counted: Callable[[str], None]):
    folder, rng, promises = memory_path / "log", np.random.default_rng(7), Promises()
    make_log(folder, compression={IMAGE: "zlib"}, segment_bytes=4 * SEGMENT_BYTES).close()
    outcome: Counter[str] = Counter()
    for kill in range(KILLS):
        writer = Writer(write_forever, folder, kill * 10**6 * SPACING, kill)
        if kill % 5:  # the others are killed while they start and mend what the one before left
            writer.listen(DEADLINE_S, "opened")
        writer.listen(rng.uniform(0, 0.06))
        writer.kill()
        assert not writer.failures()
        fresh = promises.take(writer.reports)
        outcome["killed while opening" if ("opened",) not in writer.reports else "killed while writing"] += 1
        look_at = fresh | set(
            rng.choice(list(promises.steps), size=min(100, len(promises.steps))).tolist() if promises.steps else ()
        )
        with Log.open(folder, "r") as log:
            extra = check_after_kill(promises, log, look_at | unpromised(log, promises))
        if rng.random() < 0.5:  # else the next writer has to mend it
            with Log.open(folder) as log:
                assert check_after_kill(promises, log, look_at | set(extra)) == extra
                assert log.recovery.corrupt_steps == 0
                outcome["torn steps cut"] += log.recovery.torn_steps
                promises.settle(log, extra)
        else:
            with Log.open(folder, "r") as log:
                promises.settle(log, extra)
        outcome["unpromised but whole"] += bool(extra)
    with Log.open(folder) as log:
        assert promises.check(log) == []
        assert log.damage() == []
        outcome["segments"] = len(log.segments)
    counted(
        f"{KILLS} kills, {len(promises.steps)} steps and {len(promises.facts)} facts promised, "
        f"none lost; {dict(outcome)}"
    )
    assert outcome["killed while writing"] >= KILLS // 2


def test_killed_at_random_moments_while_old_trajectories_go(memory_path: Path, counted: Callable[[str], None]):
    """Only the oldest are gone, whole trajectories of them, and no more than the capacity asks for."""
    folder, rng, promises, capacity = memory_path / "log", np.random.default_rng(11), Promises(), 200
    make_log(folder, compression={IMAGE: "zlib"}, capacity_steps=capacity, durability="never").close()
    for kill in range(KILLS // 3):
        writer = Writer(add_forever, folder, kill * 10**6 * SPACING, kill)
        for _ in range(rng.integers(3, 20)):  # so many that the oldest go, however busy the machine is
            writer.listen(DEADLINE_S, "trajectory", "failed")
        writer.listen(rng.uniform(0, 0.02))
        writer.kill()
        assert not writer.failures()
        promises.take(writer.reports)
        for mode in ("r", "a"):
            with Log.open(folder, mode) as log:  # type: ignore[arg-type]
                present = set(check_contents(log))
                if present:
                    lost = [key for key in promises.steps if key >= min(present) and key not in present]
                    assert not lost, f"{describe(lost[0])} is gone, and older ones are there"
                gone = sum(key not in present for key in promises.steps)
                assert len(present) > capacity - 16 or not gone, f"{gone} steps are gone, only {len(present)} are left"
                assert len(present) <= capacity + (16 if mode == "r" else 0)
                promises.steps.update({key: (0, 0) for key in present - set(promises.steps)})
    counted(
        f"{KILLS // 3} kills, {len(promises.steps)} steps written, {len(present)} left; nothing lost but the oldest"
    )
    assert gone


def unpromised(log: Log, promises: Promises) -> set[int]:
    return set(all_keys(log)) - set(promises.steps)


def check_after_kill(promises: Promises, log: Log, look_at: Iterable[int]) -> list[int]:
    """What is there besides the promised steps is the one call that was under way:
    one step, or one whole trajectory."""
    extra = promises.check(log, look_at)
    assert len({key >> 32 for key in extra}) <= 1, f"steps nobody wrote: {[describe(key) for key in extra]}"
    if extra:
        steps, width = log.read(np.array(extra[:1]))["shape"][0].tolist()
        assert len(extra) == max(1, steps * width), f"a part of a trajectory: {[describe(key) for key in extra]}"
        offset = extra[0] & 0xFFFFFFFF
        assert offset == 0 or extra[0] - 1 in promises.steps, f"{describe(extra[0])} has no step before it"
    return extra


@pytest.mark.parametrize("place", PLACES)
def test_killed_before_each_system_call(place: str, memory_path: Path, counted: Callable[[str], None]):
    template = memory_path / "template"
    before = prepare(place, template)

    def write(folder: Path, kill_at: int) -> tuple[str | None, list[str]]:
        shutil.copytree(template, folder)
        promises = Promises()
        promises.take(before)
        writer = Writer(write_once, folder, place, kill_at)
        died_at = drive(writer)
        promises.take(writer.reports)
        check_survivor(place, folder, promises)
        shutil.rmtree(folder)
        return died_at, next((report[1] for report in writer.reports if report[0] == "done"), [])

    nobody, calls = write(memory_path / "whole", NEVER)
    assert nobody is None and len(calls) >= 2
    places = some_of([kind_of(call) for call in calls], 6)
    killed = []
    for number in places:
        died_at, made = write(memory_path / f"log-{number}", number + 1)
        if died_at is not None:
            killed.append(number)
        else:  # how many calls the thread that compresses segments makes varies: this time it had ended before that one
            assert len(made) <= number, f"not killed at call {number} of {len(made)}"
    assert killed
    places = killed
    kinds = Counter(kind_of(calls[number]) for number in places)
    counted(
        f"killed before {len(places)} of {len(calls)} calls: "
        f"{', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}"
    )
    print("\n".join(f"{place}: {call}" for call in calls))


def kind_of(call: str) -> str:
    return call.removeprefix("second half of ").split()[0]


def prepare(place: str, template: Path) -> list[Any]:
    """The log as it is before the commit; returns the reports of what it holds."""
    if place == "create a log":
        template.mkdir()
        return []
    with make_log(template) as log:
        number = log.add(trajectory(100 * SPACING, 3, 2), actor="before")
        log.annotate(number, tag=5)
        reports: list[Any] = [("trajectory", number, 100 * SPACING, 3, 2), ("fact", number, 5)]
        if place.startswith("open"):
            reports += [
                ("trajectory", log.add(trajectory(s * SPACING, 4, 3)), s * SPACING, 4, 3) for s in range(101, 104)
            ]
        if place == "open a log with many old facts":
            for i in range(1200):
                log.facts.annotate(reports[-2][1], {"old": i})
        if place == "open a log with many old edits":
            for i in range(1200):
                Edits(log).tag(reports[-2][1], f"old {i}")
            Edits(log).facts(number, tag=7)
            reports.insert(2, ("fact", number, 7))
        if "many old" in place:
            with patch("hilt.replay.edit_state.MIN_GONE", 10**6):  # the edits stay until it is opened
                log.delete(reports[-2][1])
            reports = [*reports[:-2], *reports[-1:], ("deleted", reports[-2][1])]
    if place == "open after a crash":
        tear(template)
    if place == "open a damaged log":
        spoil(template)
    return reports


def spoil(folder: Path) -> None:
    """Damages one small file in each of three segments."""
    first, second, third, *_ = sorted((folder / "segments").iterdir())
    (first / "header.json").write_bytes(b"?")
    (second / "seal.json").write_bytes(b"?")
    (third / "extents").unlink()


def tear(folder: Path) -> None:
    """Torn tails in the segment that was written to last, and whatever a killed writer may leave lying about."""
    last = max((folder / "segments").iterdir())
    for file in last.glob("*"):
        if file.suffix != ".json":
            with file.open("ab") as stream:
                stream.write(file.read_bytes()[:100])
    with (folder / "annotations.jsonl").open("ab") as stream:
        stream.write(b'01234567 {"traject')
    (folder / ".log.json.1.2.new").write_bytes(b"{")
    shutil.copytree(last, last.with_name(".000099.new"))
    shutil.copytree(last, last.with_name(".000098.trash"))
    (last / ".seal.json.1.2.new").write_bytes(b"{")


def drive(writer: Writer) -> str | None:
    """Kills the writer where it waits; returns the call before which that was, or None when it came to the end."""
    writer.listen(DEADLINE_S, "call", "done", "failed")
    last = writer.reports[-1]
    writer.kill()
    assert not writer.failures()
    assert last[0] in ("call", "done"), f"the writer says nothing any more: {last}"
    return str(last[1]) if last[0] == "call" else None


def check_survivor(place: str, folder: Path, promises: Promises) -> None:
    """Readers and the next writer see everything promised; the next writer can go on."""
    if place == "create a log":
        folder = folder / "inner" / "log"
        try:
            Log.open(folder, "r").close()
        except (FormatError, StorageError):
            make_log(folder).close()
    evicted = 14 if place.startswith("evict") else 0
    with Log.open(folder, "r") as log:
        seen = promises.check(log, evicted=evicted)
    with Log.open(folder) as log:
        extra = promises.check(log, evicted=evicted)
        assert extra == seen, "the next writer sees other steps than a reader"
        assert len(extra) in (0, 1, 4, 8, 30)
        assert log.recovery.corrupt_steps == 0
        assert not list(folder.rglob("*.new")) and not list(folder.rglob("*.trash")), "leftovers stay on the disk"
        for path in folder.rglob("*.zlib"):
            assert not path.with_suffix("").exists(), "frames stay on the disk twice"
        promises.settle(log, extra)
        promises.take(go_on(log))
        present = promises.check(log, evicted=evicted)
    with Log.open(folder) as log:
        assert promises.check(log, evicted=evicted) == present == []
        assert log.damage() == []


def go_on(log: Log) -> list[Any]:
    seed, reports = 10**6 * SPACING, []
    with log.episode(actor="after") as episode:
        for t in range(3):
            reports.append(("step", episode.append(columns(seed, t)), seed, t))
    number = log.add(trajectory(seed + SPACING, 3, 2))
    assert log.facts.about(number) == {}, "a new trajectory has the facts of another one"
    return [*reports, ("trajectory", number, seed + SPACING, 3, 2)]


def test_a_number_is_never_given_twice(tmp_path: Path):
    """The newest trajectory was deleted or evicted, and the next process goes on after it:
    what was said of it is not said of another."""
    with make_log(tmp_path / "log") as log:
        first = log.add(trajectory(0, 2, 1))
        second = log.add(trajectory(SPACING, 2, 1))
        log.annotate(second, success=True)
        log.delete(second)
    with Log.open(tmp_path / "log") as log:
        third = log.add(trajectory(2 * SPACING, 2, 1))
        assert third > second > first
        assert log.facts.about(third) == {}
    with Log.open(tmp_path / "log") as log:
        assert log.trajectories() == [first, third]


def test_a_number_is_not_given_again_after_eviction(tmp_path: Path):
    """An old episode runs on while everything newer is evicted, its file too."""
    with make_log(tmp_path / "log", capacity_steps=64) as log:
        episode = log.episode()
        seed = 10 * SPACING
        episode.append(columns(seed, 0))
        numbers = [log.add(trajectory((11 + i) * SPACING, 12, 1)) for i in range(20)]
        log.settings["capacity_steps"] = 1
        Retention(log.catalog).enforce()
        assert log.trajectories() == [episode.trajectory]
        segments = {segment.number for segment in log.segments}
    with Log.open(tmp_path / "log") as log:
        assert log.add(trajectory(0, 1, 1)) > max(numbers)
        assert {segment.number for segment in log.segments} - segments <= {20, 21, 22}
        assert not {segment.number for segment in log.segments} & set(range(1, 20))
