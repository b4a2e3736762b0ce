"""Which runs are found below folders, and how each stands."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hilt.app.run_library import STALE_S, RunLibrary, run_folders, tasks_of
from hilt.app.table_parts import when, why
from hilt.app.words import Words
from hilt.core.checksums import write_json
from hilt.observe.live import Standing
from hilt.observe.metrics import Metrics
from hilt.replay.storage.lock import WriterLock
from hilt.runs.folder import note_end, note_failure


def make_run(folder: Path, updates: int = 3, **metadata: Any) -> Path:
    """A small run, as `hilt train` leaves one: two episodes in three succeed."""
    with Metrics(folder) as metrics:
        for number in range(updates):
            success = number % 3 != 0
            values: dict[str, Any] = {
                "success": success,
                "return": float(success),
                "length": 10,
                "intervention_steps": 2,
            }
            metrics.write("episode", {**values, "seconds": 1.0}, update=10 * number, step=20 * number)
            metrics.write("update", {"critic_loss": 1 / (number + 1)}, update=10 * number, step=20 * number)
    (folder / "config.yaml").write_text("task: tabletop/button\nseed: 0\nmax_steps: 100\n")
    described = {
        "id": "a",
        "kind": "hil",
        "recipe": "tabletop_button",
        "began": "2026-01-01 00:00:00 UTC",
        "changed": [],
    }
    write_json(folder / "run.json", {**described, **metadata})
    return folder


def summary(folder: Path, now: float | None = None) -> Any:
    written = (folder / "metrics.jsonl").stat().st_mtime
    library = RunLibrary([folder], lambda: written + 1 if now is None else written + now)
    library.look()
    assert not library.errors
    return next(iter(library.runs.values()))


def test_run_library_finds_runs_below_folders_and_nothing_inside_them(tmp_path: Path):
    for name in ("a", "deeper/below/b"):
        make_run(tmp_path / name)
    make_run(tmp_path / "a" / "actors" / "inside")
    make_run(tmp_path / ".hidden")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.json").write_text("{}")
    make_run(tmp_path / "log" / "inside")
    assert [path.relative_to(tmp_path).as_posix() for path in run_folders(tmp_path)] == ["a", "deeper/below/b"]
    library = RunLibrary([tmp_path])
    library.look()
    assert sorted(run.name for run in library.runs.values()) == ["a", "deeper/below/b"]


def test_run_library_lists_a_damaged_run_beside_the_others(tmp_path: Path):
    make_run(tmp_path / "good")
    (make_run(tmp_path / "bad") / "run.json").write_text("{")
    library = RunLibrary([tmp_path])
    library.look()
    assert [run.name for run in library.runs.values()] == ["good"]
    assert list(library.errors) == ["bad"] and "run.json" in library.errors["bad"]


def test_run_library_finds_runs_that_begin_and_forgets_those_that_are_gone(tmp_path: Path):
    make_run(tmp_path / "a")
    library = RunLibrary([tmp_path])
    library.look()
    make_run(tmp_path / "b")
    library.look()
    assert sorted(run.name for run in library.runs.values()) == ["a", "b"]
    shutil.rmtree(tmp_path / "a")
    library.look()
    assert [run.name for run in library.runs.values()] == ["b"]


def test_run_that_ended_tells_why(tmp_path: Path):
    run = make_run(tmp_path / "run")
    note_end(run, "goal", 20, "goal, after 20 updates")
    found = summary(run)
    assert (found.state, found.why, found.kind, found.recipe) == (
        "ended",
        "goal, after 20 updates",
        "hil",
        "tabletop_button",
    )
    assert (found.task, found.steps, found.updates) == ("tabletop/button", 40, 20) and found.disk > 0
    note_end(run, "not_finite", 20, "25 updates in a row were not finite")
    assert summary(run).state == "failed"


def test_run_whose_process_is_gone_died_or_failed_with_the_error_at_the_end_of_its_logs(tmp_path: Path):
    run = make_run(tmp_path / "run")
    found = summary(run)
    assert (found.state, found.reason) == ("died", "why.gone")
    shown = why(found, Words("en"), 0.0)
    assert when(found.last) in shown and when(found.last).endswith(" UTC") and "probably killed" in shown
    (run / "logs").mkdir()
    (run / "logs" / "learner.log").write_text("12:00:00 begins\nerror: the disk is full. Free some.\n")
    assert (summary(run).state, summary(run).why) == ("failed", "learner: the disk is full. Free some.")


def test_run_that_was_stopped_because_an_actor_failed_is_shown_as_failed(tmp_path: Path):
    """As runs are that ended before run.json noted failures."""
    run = make_run(tmp_path / "run")
    note_end(run, "stopped", 37, "stopped, after 37 updates with 400 online steps")
    assert summary(run).state == "ended"
    (run / "logs").mkdir()
    trace = "Traceback (most recent call last):\n  File x\nRuntimeError: camera 1 is gone\n"
    (run / "logs" / "actor-1.log").write_text(f"12:00:00 begins\n{trace}")
    assert (summary(run).state, summary(run).why) == ("failed", "actor-1: RuntimeError: camera 1 is gone")
    (run / "logs" / "actor-1.log").write_text(f"12:00:00 begins\n{trace}12:01:00 begins again\n")
    assert summary(run).state == "ended", "the error is one of an earlier start"
    note_failure(run, "actor-1: RuntimeError: camera 1 is gone")
    assert (summary(run).state, summary(run).why) == ("failed", "actor-1: RuntimeError: camera 1 is gone")
    assert summary(run).metadata["ended"]["step"] == 37


def test_rows_of_a_run_that_is_over_say_nothing_of_now(tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        metrics.write("update", {"updates_per_second": 7.0, "torch_share": 0.5}, update=10, step=20)
        metrics.write("actor", {"actor": "actor-1", "acting": "policy"}, update=10, step=20)
        metrics.event("the operator is back", update=10, step=20)
    standing = Standing(tmp_path)
    standing.read()
    assert {"who acts", "last event"} < dict(standing.rows()).keys() and "7/s" in dict(standing.rows())["updates"]
    over = dict(standing.rows(over=True))
    assert over["updates"] == "10" and not {"who acts", "last event"} & over.keys()


def test_run_with_a_process_learns_waits_or_is_stale(tmp_path: Path):
    run, fresh = make_run(tmp_path / "run"), make_run(tmp_path / "fresh", updates=0)
    with WriterLock(run), WriterLock(fresh):
        found = summary(run)
        assert found.state == "learning" and f"process {os.getpid()}" in found.writer
        assert summary(run, STALE_S + 1).state == "stale" and summary(fresh).state == "waiting"


def test_success_is_that_of_the_newest_test_evaluation_else_of_the_last_episodes(tmp_path: Path):
    run = make_run(tmp_path / "run", updates=6)
    found = summary(run)
    assert (found.success, found.episodes, found.split) == (pytest.approx(4 / 6), 6, "")
    assert found.low < 4 / 6 < found.high
    for split, update, success in (("eval", 20, 0.1), ("test", 10, 0.9)):
        (folder := run / "evaluations" / f"{split}-{update}").mkdir(parents=True)
        write_json(folder / "evaluation.json", {
            "split": split, "update": update, "success": success, "low": 0.0, "high": 1.0, "episodes": 40, "task": "t",
        })  # fmt: skip
    (run / "evaluations" / "broken").mkdir()
    (run / "evaluations" / "broken" / "evaluation.json").write_text(json.dumps({"split": "test"}))
    found = summary(run)
    assert (found.success, found.episodes, found.split) == (0.9, 40, "test")


def test_tasks_are_read_from_the_settings_without_parsing_the_rest(tmp_path: Path):
    for text, tasks in (
        ("task: tabletop/button\ntask_options: {}\n", ["tabletop/button"]),
        ("seed: 0\ntasks:\n- a/b\n- 'c: d'\nother: [1\n", ["a/b", "c: d"]),
        ("tasks:\n  - a\n  - {b: 1}\n", ["a"]),
        ("task: [\nseed: 0\n", []),
        ("seed: 0\n", []),
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert tasks_of(tmp_path) == tasks
