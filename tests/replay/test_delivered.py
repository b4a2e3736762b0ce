"""What a log says it has of a sender: read from its rows, and right after eviction,
deletion, crashes and power cuts."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilt.replay import Log
from hilt.replay.transfer.delivered import DeliveredSequence, received_by
from hilt.replay.writer import RunningEpisodes
from tests.effort import rounds
from tests.replay.power import Disk, Recorder
from tests.replay.toy_steps import SCHEMA, step

A, B = ("arm", "boot-1", "env"), ("arm", "boot-2", "env")
CUTS = int(os.environ.get("HILT_POWER_CUTS", rounds(5, 100)))


def new(path: Path, **settings: Any) -> Log:
    return Log.create(
        path, SCHEMA, **{"durability": "never", "segment_bytes": 4 * SCHEMA.layout.step_bytes, **settings}
    )


def send(
    log: Log, numbers: Any, sender: Any = A, length: int = 5, chains: RunningEpisodes | None = None
) -> RunningEpisodes:
    """Steps with these numbers; every `length` of them are an episode."""
    chains = chains or RunningEpisodes(log)
    for n in numbers:
        chains.insert(sender, log.check(step(n, terminated=n % length == length - 1)), n, 0)
    return chains


def known(log: Log, sender: Any = A, first: int = 0, of: int = 60) -> list[int]:
    received = received_by(log, *sender, first)
    return [n for n in range(first, of) if n in received]


# The numbers


@given(st.integers(-1, 5), st.sets(st.integers(0, 12)), st.lists(st.integers(0, 15)))
def test_numbers(high: int, above: set[int], noted: list[int]):
    """`high` is the end of what is there without a gap; a number that is noted closes the gap below it."""
    received, have = DeliveredSequence(high, above), set(range(high + 1)) | above
    for number in [None, *noted]:
        if number is not None:
            have |= set(range(number + 1)) if number > received.high else set()
            received.note(number)
        assert {n for n in range(20) if n in received} == have
        assert received.high == next(n for n in range(-1, 30) if n + 1 not in have)
        assert received.has_gaps == any(n > received.high for n in have)


# A log that is open, and open again


def test_delivered_sequences_of_unknown_senders(tmp_path: Path):
    with new(tmp_path / "log") as log:
        assert received_by(log, *A, 0).high == -1
        assert received_by(log, *A, 7).high == 6  # below that, they were acknowledged before
        send(log, range(8))
        assert known(log) == list(range(8))
        assert known(log, B) == [] and known(log, ("other", *A[1:])) == [] and known(log, (*A[:2], "demo")) == []
        send(log, range(3), B)
        assert known(log, B) == list(range(3)) and known(log) == list(range(8))
        assert received_by(log, *A, 5).high == 7 and received_by(log, *A, 20).high == 19


@pytest.mark.parametrize("again", [False, True])
def test_with_gaps(tmp_path: Path, again: bool):
    """Numbers that were refused or dropped are not there; nobody says they are."""
    log = new(tmp_path / "log")
    send(log, [*range(7), *range(9, 13), 20])
    log = reopened(log, again)
    received = received_by(log, *A, 0)
    assert known(log) == [*range(7), *range(9, 13), 20]
    assert received.high == 6 and received.has_gaps
    assert received_by(log, *A, 9).high == 12
    log.close()


def reopened(log: Log, again: bool = True) -> Log:
    if not again:
        return log
    log.close()
    return Log.open(log.path)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_after_eviction(tmp_path: Path, again: bool, running: bool):
    """What came and went is not asked for again: whole episodes, or the beginning of one that runs."""
    log = new(tmp_path / "log", capacity_steps=8)
    chains = RunningEpisodes(log)
    for upto in range(1, 40):
        send(log, [upto - 1], chains=chains, length=1000 if running else 5)
        assert known(log) == list(range(upto))
    assert len(log) <= 8
    log = reopened(log, again)
    assert known(log) == list(range(39))
    assert received_by(log, *A, 0).high == 38
    log.close()


@pytest.mark.parametrize("again", [False, True])
def test_after_deletion(tmp_path: Path, again: bool):
    """In the middle, and of everything."""
    log = new(tmp_path / "log")
    send(log, range(25))
    log.delete(log.trajectories()[2])
    log = reopened(log, again)
    assert known(log) == list(range(25))
    for trajectory in log.trajectories():
        log.delete(trajectory)
    log = reopened(log, again)
    assert len(log) == 0 and known(log) == list(range(25))
    send(log, [25])
    assert known(log) == list(range(26))
    log.close()


def test_after_the_facts_are_compacted(tmp_path: Path):
    """Thousands of lines about trajectories that are gone are forgotten, and not who sent them."""
    log = new(tmp_path / "log", capacity_steps=8)
    send(log, range(3), B)
    chains, before = RunningEpisodes(log), 0
    for n in range(0, 2400, 2):
        send(log, range(n, n + 2), chains=chains, length=2)
        before = max(before, log.facts.lines)
    log = reopened(log)
    assert log.facts.lines < before / 2
    assert received_by(log, *A, 0).high == 2399 and received_by(log, *B, 0).high == 2
    log = reopened(log)
    assert received_by(log, *A, 0).high == 2399 and received_by(log, *B, 0).high == 2
    log.close()


def test_a_writer_that_was_killed(tmp_path: Path):
    """Nothing is closed or sealed; the next writer reads it from the rows."""
    log = new(tmp_path / "log")
    send(log, range(13))
    shutil.copytree(tmp_path / "log", tmp_path / "found")
    log.close()
    with Log.open(tmp_path / "found") as found:
        assert known(found) == list(range(13))


# Power cuts


@pytest.mark.parametrize("durability", ["every step", "every episode", "at most 5 ms", "never"])
def test_power_cuts(
    durability: str, memory_path: Path, counted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """Two senders; the power is cut at any moment; whatever the log does not say it has is sent again. In the end
    everything is there once, but for what a full log had let go of."""
    root = memory_path / "disk"
    root.mkdir()
    files = Recorder(root, 0.0002)
    log = new(root / "log", durability=durability, files=files)
    files.promise("log")
    chains = RunningEpisodes(log)
    for n in range(0, 30, 2):
        send(log, (n, n + 1), A, chains=chains)
        send(log, (n, n + 1), B, 7, chains=chains)
        files.promise(log.synced)
    log.close()
    monkeypatch.setattr("hilt.replay.storage.segment.boot_id", lambda: "after the power cut")
    rng, resent, cuts = np.random.default_rng(len(durability)), 0, Counter[str]()
    for number in range(CUTS):
        moment = int(rng.integers(len(files.events) + 1))
        disk = Disk(root)
        disk.play(files.events[:moment])
        disk.cut(rng, memory_path / f"found-{number}")
        if "log" not in disk.promises:
            continue
        log = Log.open(memory_path / f"found-{number}" / "log")
        safe = max((promise for promise in disk.promises if promise != "log"), default=0)
        assert len(log) >= safe
        chains = RunningEpisodes(log)
        for sender, length in ((A, 5), (B, 7)):
            received = received_by(log, *sender, 0)
            missing = [n for n in range(30) if n not in received]
            cuts["with a gap"] += received.has_gaps
            resent += len(missing)
            send(log, missing, sender, length, chains)
            assert received_by(log, *sender, 0).high == 29
        log = reopened(log)
        rows = rows_of(log)
        if durability == "never":  # then rows may be left whose sender is not
            rows = {sender: rows[sender] for sender in (A, B)}
        assert rows == {A: list(range(30)), B: list(range(30))}, f"cut {number} after {moment} events"
        log.close()
        cuts["cuts"] += 1
    counted(f"{cuts['cuts']} cuts, {cuts['with a gap']} with a gap; {resent} steps sent again, each there once")


def rows_of(log: Log) -> dict[Any, list[int]]:
    """The numbers in the rows by sender, checked against what the steps say they are."""
    keys = log.all().keys()
    with log.reading() as steps:
        numbers, origins = steps.fields(keys, ["#sequence", "#origin"])
    assert np.array_equal(numbers, log.read(keys, ["rewards"])["rewards"].astype(np.int64))
    names, found = log.facts.origins(), dict[Any, list[int]]()
    for number, origin in sorted(zip(numbers.tolist(), origins.tolist(), strict=True)):
        found.setdefault(names.get(origin, origin), []).append(number)
    return found
