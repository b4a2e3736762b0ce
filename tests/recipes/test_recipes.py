"""Recipes by name, file and function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hilt.cli
from hilt.core.config import build, freeze
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.hil.config import Hil
from hilt.hil.environment import spaces
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.recipes import RECIPES, SFT_RECIPES, VLA_RECIPES, recipe, sft_recipe, vla_recipe


def mine() -> Hil:
    return Hil(batch_size=7)


def wrong() -> int:
    return 7


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete_and_its_task_can_be_made(name: str, tmp_path: Path):
    config = recipe(name)
    assert isinstance(config, Hil) and recipe(name) is not config, "each call gives its own"
    freeze(config, tmp_path / "run.yaml")
    assert recipe(str(tmp_path / "run.yaml")) == config, "frozen and read again it is the same"
    if config.agent.kind == "frozen_vla":  # whose environment asks the policy, which the recipe is to be given
        config.agent.kind = "actor_critic"
    assert spaces(config).action_space.shape


@pytest.mark.parametrize("name", [*RECIPES, *VLA_RECIPES])
def test_every_recipe_ends_by_updates_and_the_clock_is_a_cap(name: str):
    """Six of them ended by the clock alone, so that what they reached depended on the machine."""
    config: Any = recipe(name) if name in RECIPES else vla_recipe(name)
    assert 0 < config.max_steps <= 100_000
    assert not config.max_seconds or config.max_steps / config.max_seconds < 20, (
        "two busy cores make as many updates a second"
    )


@pytest.mark.parametrize("name", SFT_RECIPES)
def test_every_recipe_of_fine_tuning_is_complete(name: str, tmp_path: Path):
    config = sft_recipe(name)
    if name == "distill":  # which is to be given them
        config.data, config.policy = ["runs/frozen/log"], _small_policy(tmp_path)
    config.check()
    freeze(config, tmp_path / "run.yaml")
    assert sft_recipe(str(tmp_path / "run.yaml")) == config


def _small_policy(folder: Path) -> str:
    SmallVLA(SmallVLAConfig(width=16, depth=1, heads=2)).save_pretrained(folder / "policy")
    return str(folder / "policy")


def test_distillation_is_in_the_task_of_the_run_beside_the_frozen_policy():
    made, beside = sft_recipe("distill"), recipe("frozen_vla")
    assert made.tasks == [beside.task] and made.task_options == beside.task_options


def test_distillation_without_the_policy_that_was_frozen_is_refused():
    config = sft_recipe("distill")
    config.data = ["runs/frozen/log"]
    with pytest.raises(ConfigError, match=r"policy is ''; expected .*Give policy=FOLDER"):
        config.check()


def documented(page: str) -> list[str]:
    """The commands that begin a run, in the blocks of a page; and in its tables the settings of WSRL."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    rows = re.findall(r"^\| WSRL .*`(offline_updates=.*?)`", text, re.M)
    return [
        *re.findall(r"^hilt (train vla_tabletop .*)$", text, re.M),
        *(f"train tabletop_button {row}" for row in rows),
    ]


@pytest.mark.parametrize(
    "command", [*documented("algorithm-variants.md"), *documented("learner-phases.md"), "train wsrl"]
)
def test_documented_settings_of_other_losses_and_wsrl_begin_a_run(command: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(hilt.cli.app, [*command.split(), "--dry-run"])
    assert done.exit_code == 0, done.output


def test_the_settings_of_wsrl_are_those_of_its_recipe():
    (command,) = documented("learner-phases.md")
    assert build(recipe("tabletop_button"), *command.split()[2:]) == recipe("wsrl")
    assert len(documented("algorithm-variants.md")) == 3


@pytest.mark.parametrize("name", ["act", "flow_bc"])
def test_baselines_imitate_demonstrations_like_those_of_the_run_that_they_are_compared_with(name: str):
    baseline, beside = sft_recipe(name), recipe("tabletop_pick")
    assert baseline.tasks == [beside.task] and baseline.task_options == beside.task_options
    assert baseline.demonstrations == beside.demonstrations
    assert baseline.demonstration_options == beside.demonstration_options


def test_functions_of_ones_own_and_files():
    assert recipe(f"{__name__}:mine").batch_size == 7
    assert build(recipe(f"{__name__}:mine"), "agent.rlpd.discount=0.9").agent.rlpd.discount == 0.9
    with pytest.raises(ConfigError, match=r"gave 7: expected a hilt\.hil.config.Hil"):
        recipe(f"{__name__}:wrong")
    with pytest.raises(UnknownNameError, match="no recipe named 'tabletop_pik'; did you mean 'tabletop_pick'"):
        recipe("tabletop_pik")
    with pytest.raises(ConfigError, match="there is no module 'nowhere'"):
        recipe("nowhere:function")
