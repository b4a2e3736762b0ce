"""The file of a run's numbers: whole lines, whatever ends the writer, and what a
resumed learner repeats is read once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ClosedError, ConfigError, CorruptError
from hilt.observe import Metrics, read_metrics


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["update"], record["loss"]) for record in read_metrics(folder, ["update"])]


def test_one_object_a_line(tmp_path: Path):
    with Metrics(tmp_path / "run") as metrics:
        metrics.write(
            "update", {"loss": np.float32(0.5), "count": np.int64(3), "on": np.bool_(True)}, update=10, step=100
        )
        metrics.write("episode", {"success": True, "actor": "arm-1", "unknown": None}, update=11, step=107)
        metrics.event("no demonstrations", update=12, step=108)
    first, second, third = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first.pop("time") <= second.pop("time") <= third.pop("time")
    assert first == {"kind": "update", "update": 10, "step": 100, "loss": 0.5, "count": 3, "on": True}
    assert second == {"kind": "episode", "update": 11, "step": 107, "success": True, "actor": "arm-1", "unknown": None}
    assert third == {"kind": "event", "update": 12, "step": 108, "event": "no demonstrations"}
    assert read_metrics(tmp_path / "run")[1]["actor"] == "arm-1"
    assert [record["kind"] for record in read_metrics(tmp_path / "run", ["event", "update"])] == ["update", "event"]


def test_metrics_write_null_for_what_is_no_number_and_count_it(tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        metrics.write("update", {"a": math.nan, "b": np.float32("inf"), "c": 1.0}, update=1, step=1)
        metrics.write("update", {"a": 1.0}, update=2, step=1)
        metrics.write("update", {"a": -math.inf}, update=3, step=1)
        assert metrics.not_finite == 3
    found = read_metrics(tmp_path)
    assert (found[0]["a"], found[0]["b"], found[0]["c"], found[0]["not_finite"]) == (None, None, 1.0, 2)
    assert "not_finite" not in found[1] and found[2]["not_finite"] == 1


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_last_line_that_is_torn_is_mended(cut: int, tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        for update in (1, 2, 3):
            metrics.write("update", {"loss": update}, update=update, step=0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert losses(tmp_path) == [(1, 1), (2, 2)], "a reader leaves it out"
    with Metrics(tmp_path) as metrics:
        metrics.write("update", {"loss": 4}, update=4, step=0)
    assert losses(tmp_path) == [(1, 1), (2, 2), (4, 4)]


def test_updates_that_were_made_again_are_read_once(tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        for update in (10, 20, 30, 40):
            metrics.write("update", {"loss": update}, update=update, step=update)
        metrics.write("episode", {"return": 1.0}, update=40, step=40)
    with Metrics(tmp_path) as metrics:
        metrics.resumed(20, step=40)
        metrics.write("update", {"loss": -30}, update=30, step=41)
    assert losses(tmp_path) == [(10, 10), (20, 20), (30, -30)]
    assert len(read_metrics(tmp_path, ["episode"])) == 1, "an episode was lived, whatever the learner forgot"
    with Metrics(tmp_path) as metrics:
        metrics.resumed(0)
    assert losses(tmp_path) == []


def test_metrics_refuse_what_cannot_be_written(tmp_path: Path):
    metrics = Metrics(tmp_path)
    with pytest.raises(
        ConfigError, match="metrics of the kind 'updates': expected one of update, episode, actor, event"
    ):
        metrics.write("updates", {}, update=0, step=0)
    with pytest.raises(ConfigError, match="a metric named 'step': every record has its own"):
        metrics.write("update", {"step": 3}, update=0, step=0)
    with pytest.raises(ConfigError, match=r"a metric is \[1\]; expected a number, True or False, or a text"):
        metrics.write("update", {"q": [1]}, update=0, step=0)  # type: ignore[dict-item]
    metrics.close()
    metrics.close()
    with pytest.raises(ClosedError, match="is closed, and a metric of the kind 'update' was to be written"):
        metrics.write("update", {}, update=0, step=0)
    assert read_metrics(tmp_path) == []


def test_metrics_report_damage_with_its_line(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "event", "event": "a"}\nnonsense\n')
    with pytest.raises(CorruptError, match=r"metrics.jsonl: line 2 is no record of metrics"):
        read_metrics(tmp_path)
