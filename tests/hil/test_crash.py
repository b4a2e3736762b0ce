"""A recorder killed from outside right before its system calls: only the running
episode is lost, and the next session goes on.

Before each of them in `make test-long`, before some of each kind in `make test`.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hilt.core.files import DISK
from hilt.recording.record import Recorded, RecordingSummary, Settings, record
from hilt.replay import Log
from hilt.teleop.operator import Script
from tests.effort import some_of
from tests.hil.toy import Toy, points
from tests.replay import writers
from tests.replay.writers import DEADLINE_S, NEVER, Announcing, Writer

SETTINGS = Settings("toy", episodes=2, states=[0, 1, 2])
TOY = {"hopeless": [1], "step_limit": 3}
"""From the second state nothing succeeds: that episode is deleted."""


class Reports:
    """Tells what was promised."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def begin(self, summary: RecordingSummary) -> None: ...
    def step(self, summary: RecordingSummary) -> None: ...
    def episode(self, recorded: Recorded, summary: RecordingSummary) -> None:
        self._pipe.send(("dropped" if recorded.dropped else "kept", recorded.trajectory, recorded.steps))


def record_until_killed(pipe: Connection, folder: Path, stop_at: int) -> None:
    DISK.__class__ = Announcing
    DISK.__init__(pipe, stop_at)  # type: ignore[misc]
    DISK.armed = True  # type: ignore[attr-defined]
    try:
        record(Toy(**TOY), Script(), folder, SETTINGS, watch=Reports(pipe), videos=False)  # type: ignore[arg-type]
        DISK.armed = False  # type: ignore[attr-defined]
        pipe.send(("done", DISK.calls))  # type: ignore[attr-defined]
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


def test_killed_before_every_system_call(
    memory_path: Path, counted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    # all is imported here: a child starts in milliseconds
    monkeypatch.setattr(writers, "_context", multiprocessing.get_context("fork"))
    places: Counter[str] = Counter()
    before: Counter[str] = Counter()
    kept = 0

    def session(stop_at: int) -> list[Any]:
        """What it reported until it was killed, if it was; all that was promised is there."""
        nonlocal kept
        folder = memory_path / str(stop_at)
        writer = Writer(record_until_killed, folder, stop_at)
        writer.listen(DEADLINE_S, "call", "done", "failed")
        writer.kill()
        assert not writer.failures(), writer.failures()
        promised = {report[1]: report[2] for report in writer.reports if report[0] == "kept"}
        if writer.reports[-1][0] != "done":
            places[writer.reports[-1][1].split()[0]] += 1
            before[f"with {len(promised)} kept"] += 1
        check(folder, promised)
        kept += len(promised)
        shutil.rmtree(folder)
        return writer.reports

    kind, calls = session(NEVER)[-1]
    assert kind == "done" and not places
    for number in some_of([call.rsplit(" ", 1)[0] for call in calls], 20):
        session(number + 1)
    assert set(before) == {"with 0 kept", "with 1 kept", "with 2 kept"}, (
        "the last ones while the log is closed, which writes its proof"
    )
    assert places["write"] and places["sync"] and places["rename"]
    counted(
        f"{sum(places.values())} kills before {len(calls)} calls: {dict(places)}; {dict(before)}; {kept} "
        "episodes promised, 0 lost"
    )


def check(folder: Path, promised: dict[int, int]) -> None:
    """What was promised is there, as it was, after a session that goes on; and
    nothing else but what that one recorded."""
    there: dict[int, Any] = {}
    if (folder / "log" / "log.json").exists():
        with Log.open(folder / "log", "r") as log:
            there = {number: points(log, number) for number in promised}
    assert {number: len(moved) - 1 for number, moved in there.items()} == promised
    summary = record(Toy(**TOY), Script(), folder, SETTINGS, videos=False)  # type: ignore[arg-type]
    assert summary.have == summary.episodes == 2 and summary.unfinished <= 1
    with Log.open(folder / "log", "r") as log:
        assert set(promised) <= set(log.trajectories()) and len(log.trajectories()) == 2
        for number, moved in there.items():
            assert (points(log, number) == moved).all()
        for number in log.trajectories():
            facts, ends = log.facts.about(number), log.read(log.trajectory_keys(number), ["terminated"])["terminated"]
            assert facts["success"] and facts["steps"] == len(ends) and ends[-1] and not ends[:-1].any()
        assert {log.facts.about(number)["state"] for number in log.trajectories()} == {0, 2}
