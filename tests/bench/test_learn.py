"""How the learning benchmark shares a machine among its runs, and what it says of a task."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from bench import learn_tasks
from bench.lab import Lab

from hilt.recipes import RECIPES


def test_runs_side_by_side_have_cores_of_their_own(tmp_path: Path):
    machine, words = sorted(os.sched_getaffinity(0)), [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]

    def cores_of_a_child(meet: threading.Barrier) -> list[int]:
        meet.wait(timeout=60)
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout)

    alone = Lab(tmp_path, quick=True).side_by_side(cores_of_a_child, [threading.Barrier(1)] * 2)
    assert alone == [machine, machine], "without a number each has the whole machine"
    together = Lab(tmp_path, quick=True, cores=1).side_by_side(cores_of_a_child, [threading.Barrier(len(machine))] * len(machine))
    assert sorted(together) == [[core] for core in machine], "all at once, as the barrier shows"
    assert sorted(os.sched_getaffinity(0)) == machine, "the bench itself moves freely"


def test_every_task_with_a_recipe_has_a_row() -> None:
    recipes = {name.removeprefix("tabletop_") for name in RECIPES if name.startswith("tabletop_")}
    assert recipes == set(learn_tasks.RECIPES)


def test_kept_results_of_runs_are_not_measured_again(tmp_path: Path) -> None:
    lab, measured = Lab(tmp_path, quick=False, keep=tmp_path / "kept"), []

    def measure(value: int) -> dict[str, int]:
        measured.append(value)
        return {"value": value}

    assert [lab.once("a-0", lambda: measure(1)), lab.once("a-1", lambda: measure(2)), lab.once("a-0", lambda: measure(3))] == [
        {"value": 1},
        {"value": 2},
        {"value": 1},
    ]
    assert measured == [1, 2] and sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["a-0.json", "a-1.json"]


def test_a_row_of_a_task_counts_seeds_and_scenes_as_samples(tmp_path: Path) -> None:
    before, after = np.zeros((5, 100)), np.ones((5, 100))
    after[2, :30], before[:, 50:] = 0, 1
    spent = {"seconds": 60, "updates": 100, "person": 40}
    runs = [{**spent, "before": one.tolist(), "after": other.tolist()} for one, other in zip(before, after, strict=True)]
    row = learn_tasks.row(Lab(tmp_path, quick=False), "push", runs)
    assert row.ours == pytest.approx(94) and row.spread == (70, 100) and not row.size
    found = re.search(r"seeds and scenes (\d+) - (\d+); seeds 100, 100, 70, 100, 100%; imitation alone 50%, gain \+44", row.note)
    assert found and int(found[1]) < 90 and int(found[2]) == 100, "one seed of five is worse, so others may be"
    assert "the operator made 40 steps" in row.note
    assert learn_tasks.row(Lab(tmp_path, quick=True), "push", runs[:1]).size == "1 seeds instead of 5"
