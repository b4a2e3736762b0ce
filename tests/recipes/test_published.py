"""Recipes with published settings: complete, checked, and beside the numbers of their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.core.config import build, freeze
from hilt.core.errors import ConfigError, MissingPackageError
from hilt.envs import libero
from hilt.recipes import PUBLISHED, vla_recipe

SOURCES: dict[str, dict[str, Any]] = {
    "pi0_ppo": {"ratio": "chunk", "discount": 0.99, "lam": 0.95, "clip_high": 0.2, "epochs": 4, "rate": 5e-6, "critic": 1e-4, "beta": 0.95},
    "pi05_ppo": {"ratio": "chunk", "discount": 0.99, "lam": 0.95, "clip_high": 0.2, "epochs": 1, "rate": 5e-6, "critic": 1e-4},
    "pi0_grpo": {"ratio": "chunk", "clip_high": 0.2, "epochs": 2, "rate": 5e-6, "beta": 0.95, "group": 8, "kept": (0.1, 0.9)},
    "oft_ppo": {"ratio": "token", "discount": 0.99, "lam": 0.95, "clip_high": 0.28, "epochs": 1, "rate": 1e-4, "critic": 3e-3, "rank": 32},
    "oft_grpo": {"ratio": "token", "clip_high": 0.28, "epochs": 1, "rate": 2e-5, "group": 8, "kept": (0.1, 0.9), "heat": 1.6},
}  # fmt: skip
"""Copied by hand from github.com/RLinf/RLinf, examples/embodiment/config: the files are not read here"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_whole_and_as_its_source_has_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, told = vla_recipe(name), SOURCES[name]
    algorithm, collect = config.algorithm, config.collect
    found = {
        "ratio": algorithm.ratio, "discount": algorithm.discount, "lam": algorithm.lam, "clip_high": algorithm.clip_high,
        "epochs": algorithm.epochs, "rate": config.optimizer.learning_rate, "critic": config.critic.optimizer.learning_rate,
        "beta": config.optimizer.betas[1], "group": collect.group_size, "heat": collect.temperature, "rank": config.lora.rank,
        "kept": (collect.accuracy_lower_bound, collect.accuracy_upper_bound),
    }  # fmt: skip
    assert {key: found[key] for key in told} == told
    assert algorithm.clip_low == 0.2 and algorithm.dual_clip == 3 and algorithm.reduction == "token_mean" and algorithm.entropy == 0
    if algorithm.estimator == "gae":
        assert algorithm.value_clip == 0.2 and algorithm.value_coefficient == 1 and config.critic.kind != "none"
    freeze(config, tmp_path / "run.yaml")
    assert vla_recipe(str(tmp_path / "run.yaml")) == config, "frozen and read again it is the same"
    assert config.arithmetic()
    with pytest.raises(ConfigError, match="expected the folder of a checkpoint"):
        config._check_policy()
    monkeypatch.setattr(libero.importlib.util, "find_spec", lambda package: None)
    (tmp_path / "policy").mkdir()
    with pytest.raises(MissingPackageError, match="hf-libero"):  # the last of all checks: everything else is fine
        build(config, f"policy={tmp_path / 'policy'}").check()


@pytest.mark.parametrize("name", [*PUBLISHED, "libero_spatial"])
def test_the_page_says_how_each_ends(name: str):
    """It said of all of them that they end when every group succeeds: with a discount below 1 none does."""
    config, page = vla_recipe(name), (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    rows = page.split("| recipe | ends |")[1].split("\n\n")[0]
    (row,) = (row for row in rows.splitlines() if f"`{name}`" in row or (name.startswith("libero_") and "`libero_*`" in row))
    assert f"after {config.max_steps} training steps" in row
    assert ("when every group succeeds" in row) == config.may_be_solved
