"""A run as a terminal and as a pipe show it."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest

from hilt.core import progress
from hilt.observe import Metrics, live
from hilt.observe.live import Live, Standing, clock
from hilt.observe.metrics import GOES_ON


def write(folder: Path, *records: dict[str, object]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for record in records:
            file.write(json.dumps({"kind": "update", "time": 1000.0, "update": 0, "step": 0, **record}) + "\n")


def episode(success: bool, human: int = 0, length: int = 20) -> dict[str, object]:
    return {
        "kind": "episode",
        "success": success,
        "length": length,
        "intervention_steps": human,
        "return": float(success),
    }


def test_standing_of_a_run(tmp_path: Path):
    now = 1100.0
    standing = Standing(tmp_path, lambda: now)
    assert not standing.read() and dict(standing.rows())["who acts"] == "none yet"
    write(
        tmp_path,
        {"time": 1000, "step": 5, "critic_loss": 0.5},
        {"update": 400, "step": 900, "critic_loss": 0.25, "q/demo": 0.75},
    )
    write(
        tmp_path,
        {
            "updates_per_second": 40.0,
            "env_steps_per_second": 12.5,
            "staleness": 31.6,
            "torch_share": 0.925,
            "log_steps": 12345,
        },
    )
    write(tmp_path, *[episode(True) for _ in range(30)], episode(False, human=10), episode(True, human=10))
    write(
        tmp_path,
        {"kind": "actor", "time": 1095, "actor": "b", "acting": "human", "lateness_p99_ms": 1.25, "spooled": 1200},
    )
    write(
        tmp_path,
        {"kind": "actor", "time": 1020, "actor": "a", "acting": "policy"},
        {"kind": "event", "event": "a checkpoint"},
    )
    assert standing.read() and not standing.read()
    rows = dict(standing.rows())
    assert rows["who acts"] == "a: silent, b: human" and rows["spool"] == "b: 1,200 steps"
    assert rows["online steps"] == "900 (12.5/s)" and rows["updates"] == "400 (40/s)   92% torch"
    assert rows["success"] == "95% of the last 20 episodes; 100% of 18 without take-over"
    assert (
        rows["a person makes"] == "5% of steps" and rows["losses"] == "critic 0.25" and rows["Q values"] == "demo 0.75"
    )
    assert (
        rows["acting weights"] == "32 updates old"
        and rows["steps kept"] == "online 12,345"
        and rows["last event"] == "a checkpoint"
    )
    assert rows["control rate"].startswith("1.2 ms late") and "policy" not in rows, "what nobody told is left out"
    assert standing.line({"max_seconds": 160}).startswith("1:40  900 steps (12.5/s)  400 updates (40/s)  success 95%")
    assert standing.line({"max_seconds": 160}).endswith("critic loss 0.25  1:00 left  a checkpoint")


def test_time_left_is_that_of_the_nearest_limit(tmp_path: Path):
    standing = Standing(tmp_path, lambda: 1100.0)
    write(tmp_path, {"step": 5}, {"update": 400, "step": 900, "updates_per_second": 40.0, "env_steps_per_second": 12.5})
    standing.read()
    assert standing.left({}) is None and standing.left({"max_steps": 0, "max_seconds": 0.0}) is None
    assert standing.left({"max_seconds": 130}) == 30 and standing.left({"max_steps": 1200}) == 20
    assert standing.left({"max_env_steps": 1025, "max_steps": 1200, "max_seconds": 130}) == 10
    assert standing.left({"max_steps": 300}) == 0


def test_standing_excludes_time_without_a_process(tmp_path: Path):
    standing = Standing(tmp_path, lambda: 5010.0)
    write(tmp_path, {"time": 1000, "step": 5, "update": 50}, {"time": 1030, "step": 9, "update": 90})
    write(tmp_path, {"kind": "event", "event": GOES_ON, "time": 4999, "update": 90, "step": 9})
    write(tmp_path, {"kind": "event", "event": "checkpoint 80 is passed over", "time": 5000, "update": 0, "step": 0})
    write(tmp_path, {"kind": "event", "event": "resumed", "time": 5000, "update": 60, "step": 9})
    standing.read()
    assert standing.seconds() == 41 and standing.updates == 60 and clock(40) == "0:40" and clock(3735) == "1:02:15"


def test_the_clock_stands_still_until_the_new_process_writes(tmp_path: Path):
    write(tmp_path, {"time": 1000, "step": 5, "update": 50}, {"time": 1030, "step": 9, "update": 90})
    standing = Standing(tmp_path, lambda: 5010.0)  # as of `hilt train --resume`, whose learner is only being started
    standing.read()
    assert standing.seconds() == 30
    write(tmp_path, {"kind": "event", "event": GOES_ON, "time": 5005, "update": 90, "step": 9})
    standing.read()
    assert standing.seconds() == 35


def test_standing_shows_unknown_success_as_a_dash(tmp_path: Path):
    standing = Standing(tmp_path, lambda: 1100.0)
    write(tmp_path, {**episode(True), "success": None, "step": 5})
    standing.read()
    assert (
        dict(standing.rows())["success"] == "–" and "success –" in standing.line({}) and "0%" not in standing.success()
    )
    write(tmp_path, episode(True, human=3))
    standing.read()
    assert standing.success() == "100% of the last 1 episodes; – of 0 without take-over"


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path):
    standing = Standing(tmp_path)
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, {"update": 1})
    path.write_bytes(path.read_bytes() + b'{"kind": "update", "time": 1, "upd')
    assert standing.read() and not standing.read() and standing.updates == 1
    with Metrics(tmp_path) as metrics:  # a resumed learner mends it
        metrics.write("update", {}, update=7, step=0)
    assert standing.read() and standing.updates == 7


def test_a_pipe_gets_a_line_now_and_then(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    out = io.StringIO()
    with Live(tmp_path, limits={"max_steps": 100}, file=out, beat=False) as shown:
        shown.look()
        shown.notify("recording [20] demonstrations")
        write(tmp_path, {"kind": "event", "event": "imitates the demonstrations first"})
        shown.look()
        write(tmp_path, {"update": 10, "step": 40, "updates_per_second": 5.0})
        shown.look()
        monkeypatch.setattr(progress, "LINE_S", 1000.0)
        write(tmp_path, {"update": 20, "step": 80})
        shown.look()
        assert "20 updates" not in out.getvalue(), "not yet due"
    first, before, second, third = out.getvalue().splitlines()
    assert before == "imitates the demonstrations first" and "imitates" not in second, (
        "what goes before learning is told"
    )
    assert (
        first == "recording [20] demonstrations"
        and "40 steps  10 updates (5/s)" in second
        and second.endswith("0:18 left")
    )
    assert "80 steps  20 updates" in third and "\x1b" not in out.getvalue()


def test_standing_line_has_the_phase_of_the_process(tmp_path: Path):
    clock = [100.0]
    out = io.StringIO()
    with Live(tmp_path, file=out, now=lambda: clock[0], beat=False) as shown:
        for done in range(21):
            shown.report("recording demonstrations", done, 20)
            clock[0] += 1
        shown.report("waiting until the learner has started")
        clock[0] += 10
        shown.look()
        write(tmp_path, {"update": 10, "updates_per_second": 5.0})
        shown.report("collecting", 1, 4)
        clock[0] += 10
        shown.report("collecting", 2, 4)
        write(tmp_path, {"kind": "event", "event": "ends: max_steps", "update": 20})
        shown.report("")
    assert out.getvalue().splitlines() == [
        "recording demonstrations: 10 of 20, about 10 s left",
        "recording demonstrations: 20 of 20, 20 s so far",
        "waiting until the learner has started, 10 s so far",
        "0:00  0 steps  10 updates (5/s)  collecting: 2 of 4, about 20 s left",
        "0:00  0 steps  20 updates (5/s)  ends: max_steps",
    ]


def test_no_line_comes_twice_where_nothing_changes(tmp_path: Path):
    clock = [100.0]
    out = io.StringIO()
    write(tmp_path, {"kind": "event", "event": "waits: there is no online step yet"})
    with Live(tmp_path, file=out, now=lambda: clock[0], beat=False) as shown:
        for _ in range(4):
            clock[0] += 10
            shown.look()
    waits = "waits: there is no online step yet"
    assert out.getvalue().splitlines() == [
        waits,
        f"{waits} (10 s so far)",
        f"{waits} (20 s so far)",
        f"{waits} (30 s so far)",
    ]


def test_a_thread_looks_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    monkeypatch.setattr(live, "POLL_INTERVAL_S", 0.001)
    there = threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            there.set()
            return super().write(text)

    heard = Heard()
    write(tmp_path, {"kind": "event", "event": "opens the task"})
    with Live(tmp_path, file=heard):
        assert there.wait(60)
    assert heard.getvalue().startswith("opens the task\n")


def test_a_terminal_gets_a_table(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(live, "TABLE_S", 0.0)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Live(tmp_path, "pick", {"max_steps": 100}, out) as shown:
        shown.report("recording", 1, 4)
        assert "since it began" in out.getvalue() and "recording: 1 of 4" in out.getvalue()
        write(tmp_path, {"update": 10, "step": 40, "updates_per_second": 5.0}, episode(True))
        shown.look()
        shown.notify("a word")
    text = out.getvalue()
    assert (
        "pick" in text
        and "0:18 left" in text
        and "100% of the last 1 episodes" in text
        and "a word" in text
        and "\x1b[" in text
    )
