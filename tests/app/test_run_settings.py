"""How the settings of runs differ, from their recipe and from each other."""

from __future__ import annotations

from pathlib import Path

from hilt.app.run_settings import changed_from_recipe, differing, flat_settings
from hilt.core.config import build, freeze
from hilt.recipes import recipe
from tests.app.test_run_library import make_run, summary


def test_settings_that_differ_from_the_recipe(tmp_path: Path):
    run = make_run(tmp_path / "run")
    freeze(build(recipe("tabletop_button"), "max_steps=77", "agent.rlpd.tau=0.5"), run / "config.yaml")
    found = changed_from_recipe(summary(run))
    assert found is not None and [(key, value) for key, value, _ in found] == [
        ("agent.rlpd.tau", "0.5"),
        ("max_steps", "77"),
    ]
    mine = make_run(tmp_path / "mine", recipe="mine:attack")
    assert changed_from_recipe(summary(mine)) is None, "no code of others is imported"


def test_settings_in_which_runs_differ_and_no_others(tmp_path: Path):
    runs = [make_run(tmp_path / name) for name in "abc"]
    (runs[1] / "config.yaml").write_text("task: tabletop/button\nseed: 1\nmax_steps: 100\nsinks: [wandb]\n")
    assert differing(runs) == [("seed", ["0", "1", "0"]), ("sinks", ["–", "[wandb]", "–"])]
    assert flat_settings(runs[0])["task"] == "tabletop/button"
