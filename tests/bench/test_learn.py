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
from bench import learn, learn_state, learn_tasks
from bench.lab import Lab, remove
from bench.report import Row

from hilt.recipes import RECIPES


def test_runs_side_by_side_have_cores_of_their_own(tmp_path: Path):
    machine, words = (
        sorted(os.sched_getaffinity(0)),
        [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"],
    )

    def cores_of_a_child(meet: threading.Barrier) -> list[int]:
        meet.wait(timeout=60)
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout)

    alone = Lab(tmp_path, quick=True).side_by_side(cores_of_a_child, [threading.Barrier(1)] * 2)
    assert alone == [machine, machine], "without a number each has the whole machine"
    together = Lab(tmp_path, quick=True, cores=1).side_by_side(
        cores_of_a_child, [threading.Barrier(len(machine))] * len(machine)
    )
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

    assert [
        lab.once("a-0", lambda: measure(1)),
        lab.once("a-1", lambda: measure(2)),
        lab.once("a-0", lambda: measure(3)),
    ] == [
        {"value": 1},
        {"value": 2},
        {"value": 1},
    ]
    assert measured == [1, 2] and sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "a-0.json",
        "a-1.json",
    ]


def test_a_row_of_a_task_counts_seeds_and_scenes_as_samples(tmp_path: Path) -> None:
    before, after = np.zeros((5, 100)), np.ones((5, 100))
    after[2, :30], before[:, 50:] = 0, 1
    spent = {"seconds": 60, "updates": 100, "person": 40}
    runs = [
        {**spent, "before": one.tolist(), "after": other.tolist()} for one, other in zip(before, after, strict=True)
    ]
    row = learn_tasks.row(Lab(tmp_path, quick=False), "push", runs)
    assert row.ours == pytest.approx(94) and row.spread == (70, 100) and not row.size
    found = re.search(
        r"seeds and scenes (\d+) - (\d+); seeds 100, 100, 70, 100, 100%; imitation alone 50%, gain \+44", row.note
    )
    assert found and int(found[1]) < 90 and int(found[2]) == 100, "one seed of five is worse, so others may be"
    assert "the operator made 40 steps" in row.note
    assert learn_tasks.row(Lab(tmp_path, quick=True), "push", runs[:1]).size == "1 seeds instead of 5"


def test_runs_of_pick_are_kept_with_what_their_peers_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second invocation goes on where the first ended: here after our runs, as
    Stable-Baselines3 was not installed."""
    made, asked, ends = list[str](), list[float](), list[str]()

    def train(run: Path, options: list[str], seconds: float) -> float:
        (run / "demos").mkdir(parents=True)
        (run / "config.yaml").write_text("seed: 0\n")
        if run.name.startswith("equal"):
            ends.append(options[-1])
        else:
            made.append(run.name)
        return seconds + 1

    def sb3(run: Path, variant: object, ratio: float, seed: int, states: int, seconds: float) -> dict[str, object]:
        assert (run / "demos").is_dir() and (run / "config.yaml").is_file() and ratio == 2.0
        if not installed:
            raise RuntimeError("No module named 'stable_baselines3'")
        asked.append(seconds)
        return {"version": "2", "trial": [0] * states, "made": learn.Made(50, 100 + seed, 0), "seconds": 3.0}

    class Alone:
        __enter__ = __exit__ = lambda self, *_: self

        def ask(self, call: str, **given: object) -> list[int]:
            return [9, 0]

    monkeypatch.setattr(learn, "train", train)
    monkeypatch.setattr(learn, "sb3", sb3)
    monkeypatch.setattr(learn, "Side", lambda *_: Alone())
    monkeypatch.setattr(
        learn, "evaluated", lambda run, states, checkpoint=None: learn.Trial([12, 0 if checkpoint == 0 else 15])
    )
    monkeypatch.setattr(learn, "made_by", lambda run: learn.Made(500, 1000, 30))
    monkeypatch.setattr(learn, "updates_per_step", lambda run: (2.0, 500))
    monkeypatch.setattr(learn, "interventions", lambda run: 0.25)
    monkeypatch.setattr(learn, "demonstrated_steps", lambda run: 40.0)

    def rows(number: int, minutes: float = 5.0) -> dict[str, Row]:
        folder = tmp_path / f"lab-{number}"
        lab = Lab(folder, quick=True, seeds=2, minutes=minutes, keep=tmp_path / "kept")
        found = {row.name: row for row in learn.pick(lab)}
        remove(folder)  # as the bench does at its end
        return found

    installed = False
    first = rows(1)
    assert len(made) == 2 * (2 + len(learn.OTHERS)) and first["pick_sb3"].absent and not first["pick_sb3"].peers
    installed = True
    second = rows(2)
    assert len(made) == 2 * (2 + len(learn.OTHERS)) and len(asked) == 2 * len(learn.VARIANTS), "only what was missing"
    assert asked[-1] == 300 and second["pick_margin"].ours == 100
    assert sorted(ends) == ["max_steps=100", "max_steps=101"], "as many updates as Stable-Baselines3"
    assert second["pick_equal_updates"].ours == 100 and second["pick_equal_updates"].peers == {
        "SB3 2 SAC, learning rate 3e-4": 0
    }
    third = rows(3)
    assert len(asked) == 2 * len(learn.VARIANTS) and len(ends) == 2 and third == second, "all of it was kept"
    assert {name: first[name] for name in ("pick_success", "pick_bc", "pick_hg_dagger")} == {
        name: third[name] for name in ("pick_success", "pick_bc", "pick_hg_dagger")
    }
    rows(4, minutes=1.0)
    assert len(made) == 4 * (2 + len(learn.OTHERS)), "results of other minutes are others"


def test_runs_by_state_are_kept_where_meta_world_is_absent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path / "lab", quick=False, keep=tmp_path / "kept")
    monkeypatch.setattr(learn_state, "PYTHON", "")
    assert "HILT_METAWORLD" in learn_state.success(lab, "button").absent["Meta-World"]
    lab.once("state_button", lambda: {"successes": 45, "before": 5, "updates": 1000, "steps": 900})
    lab.once("state_button-sb3", lambda: {"successes": 10, "updates": 800, "steps": 800, "version": "2"})
    row = learn_state.success(lab, "button")
    assert row.ours == 90 and row.peers == {"SB3 2 SAC": 20} and "1,000 updates, 900 steps, 10% before" in row.note


def test_results_of_quick_runs_are_never_those_of_full_ones(tmp_path: Path) -> None:
    quick, full = (Lab(tmp_path, quick=quick, keep=tmp_path / "kept") for quick in (True, False))
    assert quick.once("a", lambda: {"size": 1}) == {"size": 1} and full.once("a", lambda: {"size": 100}) == {
        "size": 100
    }
