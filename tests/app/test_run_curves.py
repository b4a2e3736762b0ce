"""Curves of runs as JSON, read again as a run grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hilt.app.run_curves import RunCurves
from hilt.app.words import Words
from hilt.observe.metrics import Metrics
from hilt.observe.plots import PlottedRun
from tests.app.test_run_library import make_run


def test_curves_are_those_of_hilt_plot_with_names_in_the_language(tmp_path: Path):
    runs = [make_run(tmp_path / name, 30) for name in ("a", "b")]
    found = RunCurves().charts(runs, ["a", "b"], "step", 5, Words("zh"))
    assert found["charts"][0]["title"] == "最近 5 个回合的成功率" and found["charts"][0]["percent"]
    lines = found["charts"][0]["lines"]
    assert [line["whose"] for line in lines] == ["a", "b"] and [line["color"] for line in lines] == [0, 1]
    assert lines[0]["x"][-1] == 580 and lines[0]["y"][-1] == pytest.approx(4 / 5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    titles = [chart["title"] for chart in RunCurves().charts(runs[:1], ["a"], "minutes", 5, Words("en"))["charts"]]
    assert "Critic loss" in titles


def test_curves_are_read_again_only_when_a_run_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, empty = make_run(tmp_path / "run"), make_run(tmp_path / "empty", 0)
    loads: list[Path] = []
    load = PlottedRun.load
    monkeypatch.setattr(PlottedRun, "load", lambda path: (loads.append(path), load(path))[1])
    clock = [0.0]
    curves = RunCurves(lambda: clock[0])
    before = curves.stamp([run])
    assert curves.stamp([run]) == curves.charts([run], ["run"], "step", 1, Words("en"))["stamp"] == before
    assert len(loads) == 1
    with Metrics(run) as metrics:
        metrics.write("update", {"critic_loss": 0.1}, update=100, step=200)
    clock[0] += 1
    assert curves.stamp([run]) != before and len(loads) == 2
    assert curves.charts([empty], ["empty"], "step", 1, Words("en"))["charts"] == []


def test_curves_of_a_damaged_run_are_its_error_beside_the_others(tmp_path: Path):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    (bad / "metrics.jsonl").write_text("no JSON\n")
    found = RunCurves().charts([good, bad], ["good", "bad"], "step", 1, Words("en"))
    assert len(found["charts"]) > 3 and len(found["problems"]) == 1 and "bad: " in found["problems"][0]
