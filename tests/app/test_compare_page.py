"""The difference of the success of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hilt.app.compare_page import success_difference
from hilt.core.checksums import write_json
from hilt.observe.statistics import paired_difference
from tests.app.test_run_library import make_run


def evaluate(run: Path, update: int, outcomes: list[bool], split: str = "test", first: int = 0) -> None:
    (folder := run / "evaluations" / f"{split}-{update}").mkdir(parents=True)
    result: dict[str, Any] = {
        "split": split,
        "update": update,
        "task": "t",
        "low": 0.0,
        "high": 1.0,
        "episodes": len(outcomes),
    }
    states = [{"state": first + number, "success": one} for number, one in enumerate(outcomes)]
    write_json(folder / "evaluation.json", {**result, "episodes": len(outcomes), "success": 0.5, "outcomes": states})


def test_success_difference_is_paired_by_state_and_of_the_newest_evaluation(tmp_path: Path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    assert success_difference(one, other) is None
    worse, better = [number % 2 == 0 for number in range(20)], [number % 5 != 0 for number in range(20)]
    evaluate(one, 10, [False] * 20)
    evaluate(one, 20, worse)
    evaluate(other, 5, better)
    evaluate(other, 30, [True] * 9, "eval")
    expected = paired_difference(worse, better, range(20))
    assert success_difference(one, other) == ("test", *expected)


def test_success_difference_needs_the_same_states(tmp_path: Path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    evaluate(one, 10, [True] * 4)
    evaluate(other, 10, [True] * 4, first=100)
    assert success_difference(one, other) is None
