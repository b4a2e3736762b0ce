"""``hilt recipes`` and ``hilt settings``: everything that can be trained, and every setting of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.config import build, describe, freeze
from hilt.hil.config import Hil
from hilt.recipes import RECIPES, SFT_RECIPES, VLA_RECIPES, recipe


def run(*words: str, code: int = 0, columns: int = 80) -> str:
    done = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": str(columns)})
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


def test_every_recipe_is_listed_with_its_command_and_meaning():
    listed = {one["recipe"]: one for one in json.loads(run("recipes", "--json"))}
    assert set(listed) == {*RECIPES, *VLA_RECIPES, *SFT_RECIPES}
    assert all(one["meaning"] and "`" not in one["meaning"] for one in listed.values())
    assert listed["sft_tabletop"]["command"] == "hilt train sft sft_tabletop"
    text = run("recipes")
    assert all(one["command"] in text for one in listed.values()) and "hilt settings RECIPE" in text


def test_listing_recipes_needs_no_torch():
    script = (
        "import sys; from hilt.cli import app; app(['recipes'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr


def test_every_setting_with_its_value_default_and_meaning():
    rows = {row["setting"]: row for row in json.loads(run("settings", "hil_debug", "--json"))}
    assert list(rows) == [key for key, *_ in describe(Hil)] and all(
        row["meaning"] and row["type"] for row in rows.values()
    )
    assert (rows["batch_size"]["value"], rows["batch_size"]["default"]) == (32, Hil().batch_size)
    text = run("settings", "hil_debug", "batch_size=64", "batch_size", "control_hz")
    assert "batch_size = 64   (default: 256)   int" in text
    assert "    Half of it online, half demonstrations\n    Expected: at least 2.\n" in text
    assert "control_hz = 0.0   float" in text and "Steps in a second" in text and "max_steps" not in text
    assert (rows["store"]["expected"], rows["cta_ratio"]["needs"]) == ("one of log, trajectories", ["algorithm=rlpd"])
    assert "Expected: at least 1. Needs: algorithm=rlpd." in run("settings", "hil_debug", "cta_ratio")
    changed = run("settings", "hil_debug", "--changed")
    assert "task = tabletop/reach   (default: tabletop/pick)" in changed and "control_hz" not in changed
    assert max(map(len, run("settings", "tabletop_pick", "rlpd").splitlines())) <= 80


def test_settings_of_a_run_and_of_other_jobs(tmp_path: Path):
    freeze(build(recipe("hil_debug"), "max_steps=77"), tmp_path / "config.yaml")
    assert "max_steps = 77" in run("settings", str(tmp_path / "config.yaml"), "max_steps")
    for name, key in (
        ("vla_debug", "collect.group_size"),
        ("sft_debug", "validation_period"),
        ("classifier", "learning_rate"),
    ):
        assert f"{key} = " in run("settings", name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tabletop_pik"], "no recipe named 'tabletop_pik'; did you mean 'tabletop_pick'?"),
        (["hil_debug", "nope"], "no setting of hil_debug has 'nope' in its name"),
        (["hil_debug", "batch=3"], "no setting named 'batch'"),
    ],
)
def test_what_is_not_there_is_said(words: list[str], said: str):
    assert said in run("settings", *words, code=1)
