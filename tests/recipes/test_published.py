"""Recipes with published settings: complete, checked, and beside the numbers of their sources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.config import build, freeze
from hilt.core.errors import ConfigError, MissingPackageError
from hilt.envs import libero
from hilt.observe.metrics import read_metrics
from hilt.policies.io.tensor_files import Tensors
from hilt.recipes import PUBLISHED, published, vla_recipe
from hilt.vla.config import Vla
from tests.cli.test_train_simplevla import folder  # noqa: F401  # a fixture
from tests.effort import sampled
from tests.policies.tiny_pi0 import tiny

ALIKE: dict[str, Any] = {
    "runner.max_epochs": 1000,
    "algorithm.normalize_advantages": True,
    "algorithm.loss_agg_func": "token-mean",
    "algorithm.kl_beta": 0.0,
    "algorithm.entropy_bonus": 0,
    "algorithm.clip_ratio_low": 0.2,
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.value_clip": 0.2,
    "algorithm.huber_delta": 10.0,
    "algorithm.gamma": 0.99,
    "algorithm.gae_lambda": 0.95,
    "optim.adam_beta1": 0.9,
    "optim.weight_decay": 0.01,  # of rlinf/config.py, as the files have none
}
OPENPI: dict[str, Any] = {
    **ALIKE,
    "algorithm.logprob_type": "chunk_level",
    "algorithm.clip_ratio_high": 0.2,
    "algorithm.reward_coef": 1.0,
    "algorithm.rewards_lower_bound": 0.1,
    "algorithm.rewards_upper_bound": 0.9,
    "env.train.max_episode_steps": 240,
    "env.train.total_num_envs": 64,
    "env.train.rollout_epoch": 8,
    "actor.global_batch_size": 2048,
    "model.num_action_chunks": 5,
    "model.is_lora": False,
    "openpi.noise_method": "flow_sde",
    "openpi.noise_level": 0.5,
    "openpi.train_expert_only": True,
    "optim.lr": 5.0e-6,
    "optim.value_lr": 1.0e-4,
    "optim.adam_beta2": 0.95,
    "optim.clip_grad": 1.0,
}
OFT: dict[str, Any] = {
    **ALIKE, "algorithm.logprob_type": "token_level", "algorithm.update_epoch": 1, "algorithm.clip_ratio_high": 0.28,
    "optim.value_lr": 3.0e-3, "optim.adam_beta2": 0.999,
}  # fmt: skip
PPO: dict[str, Any] = {
    "algorithm.adv_type": "gae",
    "algorithm.group_size": 1,
    "model.add_value_head": True,
    "optim.critic_warmup_steps": 0,
}
GRPO: dict[str, Any] = {
    "algorithm.adv_type": "grpo",
    "algorithm.group_size": 8,
    "model.add_value_head": False,
    "algorithm.filter_rewards": True,
}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "pi0_ppo": (
        "libero_spatial_ppo_openpi",
        {
            **OPENPI,
            **PPO,
            "algorithm.filter_rewards": False,
            "algorithm.update_epoch": 4,
            "model.num_steps": 4,
            "openpi.detach_critic_input": True,
        },
    ),
    "pi05_ppo": (
        "libero_spatial_ppo_openpi_pi05",
        {
            **OPENPI,
            **PPO,
            "algorithm.filter_rewards": False,
            "algorithm.update_epoch": 1,
            "model.num_steps": 3,
            "openpi.value_after_vlm": True,
        },
    ),
    "pi0_grpo": ("libero_spatial_grpo_openpi", {**OPENPI, **GRPO, "algorithm.update_epoch": 2, "model.num_steps": 4}),
    "oft_ppo": (
        "maniskill_ppo_openvlaoft",
        {
            **OFT,
            **PPO,
            "algorithm.bootstrap_type": "always",
            "model.is_lora": True,
            "model.lora_rank": 32,
            "model.unnorm_key": "bridge_orig",
            "sampling.temperature_train": 1.0,
            "sampling.temperature_eval": 0.6,
            "env.train.max_episode_steps": 80,
            "env.train.max_steps_per_rollout_epoch": 160,
            "env.train.total_num_envs": 128,
            "env.train.rollout_epoch": 1,
            "actor.global_batch_size": 640,
            "optim.lr": 1.0e-4,
            "optim.clip_grad": 10.0,
        },
    ),
    "oft_grpo": (
        "libero_spatial_grpo_openvlaoft",
        {
            **OFT,
            **GRPO,
            "algorithm.reward_coef": 5.0,
            "algorithm.rewards_lower_bound": 0.5,
            "algorithm.rewards_upper_bound": 4.5,
            "model.is_lora": False,
            "model.unnorm_key": "libero_spatial_no_noops",
            "sampling.temperature_train": 1.6,
            "sampling.temperature_eval": 1.6,
            "env.train.max_episode_steps": 512,
            "env.train.total_num_envs": 64,
            "env.train.rollout_epoch": 16,
            "actor.global_batch_size": 16384,
            "optim.lr": 2.0e-5,
            "optim.clip_grad": 1.0,
        },
    ),
}
"""What the files of github.com/RLinf/RLinf say, examples/embodiment/config at a3816b5 (2026-08-22), with the defaults
of their model files: copied by hand, and not read here"""
OTHERWISE: dict[str, set[str]] = {
    "runner.max_epochs": set(PUBLISHED),  # 200 is the cap here
    "algorithm.bootstrap_type": {"oft_ppo"},  # an end is an end here
    "sampling.temperature_eval": {"oft_ppo", "oft_grpo"},  # the likeliest actions are taken here
    "model.unnorm_key": {"oft_ppo"},  # of ManiSkill's data
    "env.train.max_episode_steps": {"oft_ppo"},  # of ManiSkill's tasks
    "env.train.max_steps_per_rollout_epoch": {"oft_ppo"},
    # whole episodes: see the test of these below
    "actor.global_batch_size": {"pi0_ppo", "pi05_ppo", "pi0_grpo", "oft_ppo"},
    "algorithm.gamma": {"pi0_grpo", "oft_grpo"},  # without effect on their grpo, whose scores are sums of rewards
}
"""Settings that differ from their source; docs/recipes.md and the recipes say so"""


def as_theirs(config: Vla) -> dict[str, Any]:
    """The settings of a recipe under RLinf's names; a step of the optimizer in chunks of whole episodes."""
    algorithm, collect, critic, options = config.algorithm, config.collect, config.critic, config.policy_options
    gae, chunk = algorithm.estimator == "gae", options.get("n_action_steps", 8)
    found: dict[str, Any] = {
        "runner.max_epochs": config.max_steps,
        "algorithm.adv_type": algorithm.estimator,
        "algorithm.group_size": collect.group_size,
        "algorithm.normalize_advantages": algorithm.normalize == "auto",
        "algorithm.kl_beta": 0.0 if algorithm.kl.where == "none" else None,
        "algorithm.loss_agg_func": algorithm.reduction.replace("_", "-"),
        "algorithm.entropy_bonus": algorithm.entropy,
        "algorithm.clip_ratio_low": algorithm.clip_low,
        "algorithm.clip_ratio_high": algorithm.clip_high,
        "algorithm.clip_ratio_c": algorithm.dual_clip,
        "algorithm.gamma": algorithm.discount,
        "algorithm.update_epoch": algorithm.epochs,
        "algorithm.logprob_type": f"{algorithm.ratio}_level",
        "algorithm.filter_rewards": collect.filter_accuracy,
        "model.add_value_head": critic.kind in ("shared", "detached"),
        "model.is_lora": bool(config.lora.rank),
        "model.lora_rank": config.lora.rank,
        "model.num_action_chunks": chunk,
        "model.unnorm_key": options.get("unnorm_key"),
        "openpi.train_expert_only": options.get("trained") == "expert",
        "openpi.detach_critic_input": critic.kind == "detached",
        "openpi.value_after_vlm": config.policy.endswith("pi05_libero"),
        "sampling.temperature_train": collect.temperature,
        "env.train.max_episode_steps": config.task_options["step_limit"],
        "optim.lr": config.optimizer.learning_rate,
        "optim.adam_beta1": config.optimizer.betas[0],
        "optim.adam_beta2": config.optimizer.betas[1],
        "optim.clip_grad": config.optimizer.gradient_clip,
        "optim.weight_decay": config.optimizer.weight_decay,
        "actor.global_batch_size": algorithm.batch.trajectories_per_step * config.task_options["step_limit"] // chunk,
    }
    if "flow" in options:
        flow = options["flow"]
        found |= {
            "openpi.noise_method": f"flow_{flow['kind']}",
            "openpi.noise_level": flow["level"],
            "model.num_steps": flow["steps"],
        }
    if collect.filter_accuracy:  # their bounds are of rewards
        most = 5.0 if collect.temperature == 1.6 else 1.0
        bounds = {"lower": collect.accuracy_lower_bound, "upper": collect.accuracy_upper_bound}
        found |= {f"algorithm.rewards_{name}_bound": share * most for name, share in bounds.items()}
    if gae:
        same = (
            critic.optimizer.betas == config.optimizer.betas
            and critic.optimizer.gradient_clip == config.optimizer.gradient_clip
        )
        found |= {
            "algorithm.gae_lambda": algorithm.lam,
            "algorithm.value_clip": algorithm.value_clip,
            "same optimizer": same,
        }
        found |= {"optim.value_lr": critic.optimizer.learning_rate, "optim.critic_warmup_steps": critic.warmup_steps}
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_setting_is_that_of_its_source_or_listed_as_another(name: str):
    config, (file, theirs) = vla_recipe(name), SOURCES[name]
    ours = as_theirs(config)
    assert f"{file}.yaml" in " ".join((getattr(published, name).__doc__ or "").split()), "the recipe names its file"
    different = {key for key, value in theirs.items() if key in ours and ours[key] != pytest.approx(value)}
    # no setting of ours
    without = {"algorithm.bootstrap_type", "sampling.temperature_eval", "env.train.max_steps_per_rollout_epoch"}
    different |= without & theirs.keys()
    assert different == {key for key, names in OTHERWISE.items() if name in names}
    sizes = {"env.train.total_num_envs", "env.train.rollout_epoch", "env.train.max_steps_per_rollout_epoch"}
    gae = {"algorithm.gae_lambda", "algorithm.value_clip", "optim.value_lr"}
    unused = (
        {"algorithm.rewards_lower_bound", "algorithm.rewards_upper_bound"}
        if not config.collect.filter_accuracy
        else gae
    )
    unused |= {
        "algorithm.huber_delta",
        "algorithm.reward_coef",
        "algorithm.bootstrap_type",
        "sampling.temperature_eval",
    } | sizes
    assert {key for key in theirs if key not in ours} <= unused, (
        "each of their settings has one of ours, or cannot have an effect"
    )
    assert ours.get("same optimizer", True), "of the critic, but for its rate"


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_step_has_the_episodes_of_its_source(name: str):
    config, (_, theirs) = vla_recipe(name), SOURCES[name]
    most = theirs["env.train.max_episode_steps"]
    rollouts = theirs["env.train.total_num_envs"] * theirs["env.train.rollout_epoch"]
    episodes = rollouts * theirs.get("env.train.max_steps_per_rollout_epoch", most) // most
    assert config.collect.data_batch_size == episodes
    chunks = episodes * most // theirs.get("model.num_action_chunks", 8)
    steps, ours = chunks / theirs["actor.global_batch_size"], episodes / config.algorithm.batch.trajectories_per_step
    # of pi0 2,048 chunks are 42.7 episodes, and 64 here
    assert ours == steps or (name.startswith("pi") and (steps, ours) == (12, 8)), "steps of the optimizer in each epoch"


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_whole_and_is_checked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = vla_recipe(name)
    if config.algorithm.estimator == "gae":
        assert config.algorithm.value_coefficient == 1 and config.critic.kind != "none"
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
def test_recipes_page_lists_how_each_recipe_ends(name: str):
    """It said of all of them that they end when every group succeeds: with a discount below 1 none does."""
    config, page = vla_recipe(name), (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    rows = page.split("| recipe | ends |")[1].split("\n\n")[0]
    (row,) = (
        row for row in rows.splitlines() if f"`{name}`" in row or (name.startswith("libero_") and "`libero_*`" in row)
    )
    assert f"after {config.max_steps} training steps" in row
    assert ("when every group succeeds" in row) == config.may_be_solved


# --- a run of each, with a tiny policy and a stand-in for LIBERO ---

SMALL = (
    "tasks=[libero_goal/0]",
    "task_options={step_limit: 20, wait_steps: 0}",
    "collect.data_batch_size=8",
    "max_steps=2",
    "pool={workers: 0, envs_per_worker: 0, start_s: 120, step_s: 60}",
    "validation={before: false, period: 0, after: false}",
    "algorithm.batch={trajectories_per_step: 4, chunks_per_pass: 8}",
)
# random weights, which a guard refuses
OWN = {"pi": [], "oft": ["policy_options.unnorm_key=tiny", "policy_options.allow_untrained=true"]}


@pytest.mark.parametrize("name", sampled(["pi0_ppo", "pi0_grpo", "oft_ppo", "oft_grpo"], "pi0_ppo", "oft_grpo"))
def test_each_runs_from_the_command_line(name: str, folder: Path, tmp_path: Path):  # noqa: F811
    kind = name.partition("_")[0].strip("0")
    if kind == "pi":
        tiny().save_pretrained(folder := tmp_path / "pi0")
    words = ["train", name, f"policy={folder}", *SMALL, *OWN[kind], "--run", str(tmp_path / "run")]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "max_steps is reached: 2 training steps" in result.output, result.output
    updates = read_metrics(tmp_path / "run", ["update"])
    steps = 2 * vla_recipe(name).algorithm.epochs
    assert [record["optimizer_steps"] for record in updates] == [steps] * 2, "8 episodes in 2 steps, in each epoch"
    assert all(math.isfinite(record["policy_loss"]) and record["gradient_norm"] > 0 for record in updates)
    assert ("value_loss" in updates[0]) == name.endswith("ppo") == ("explained_variance" in updates[0])
    before, after = Tensors(folder), Tensors(tmp_path / "run/policy")
    changed = {part for part in before if not np.array_equal(before[part].numpy(), after[part].numpy())}
    trained = {
        "pi": lambda part: "expert" in part or "action" in part or "state_proj" in part,
        "oft": lambda part: True,
    }[kind]
    assert changed and all(map(trained, changed)), "pi0's language model is frozen"
    if name == "oft_ppo":
        assert (tmp_path / "run/adapter/adapter_config.json").is_file() and "value_head" not in str(changed)
