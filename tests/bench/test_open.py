"""The bench of `hilt open` at its smallest: the real app and a real browser, every row of a group, no target met."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import open as bench_open
from bench.__main__ import main
from bench.lab import Lab
from bench.open_live import newest

from tests.teleop import chromium

needs_browser = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


def test_the_open_suite_lists_its_rows(capsys: pytest.CaptureFixture[str]):
    assert main(["open", "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == [
        "list: first_paint_first, first_paint_again, filter, memory_list",
        "opened: memory_opened, memory_growth",
    ]
    assert shown[2].count("scrub_") == 18 and shown[3] == "live: learner_cost, app_cpu"


@pytest.mark.long
@needs_browser
def test_scrub_rows_are_measured_in_the_browser(tmp_path: Path):
    lab = Lab(tmp_path, quick=True, only=frozenset(["scrub_log_forward_cold", "scrub_log_random_cold"]))
    rows = {row.name: row for row in bench_open.GROUPS["scrub"].run(lab)}
    assert set(rows) == {f"scrub_log_{order}_{state}" for order in ("forward", "random") for state in ("cold", "warm")}
    for row in rows.values():
        assert row.ours is not None and row.spread is not None and 0 < row.spread[0] <= row.ours <= row.spread[1]
        assert row.met is False and "20 steps instead of 150" in row.notes
    assert rows["scrub_log_random_cold"].limit and not rows["scrub_log_forward_cold"].limit
    assert not (tmp_path / "log").exists(), "the data are removed"


def test_open_rows_without_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chromium, "absent", lambda: "there is no browser")
    for group in bench_open.GROUPS.values():
        rows = group.run(Lab(tmp_path, quick=True))
        assert [row.name for row in rows] == list(group.rows)
        assert all("Chromium was not measured: there is no browser" in row.notes and not row.met for row in rows)


def test_newest_update_of_a_file_that_is_being_written(tmp_path: Path):
    assert newest(tmp_path) == 0
    text = (
        '{"kind": "event", "update": 0}\n{"kind": "update", "update": 7}\n{"kind": "actor", "update": 8}\n{"kind": "upd'
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    assert newest(tmp_path) == 7
