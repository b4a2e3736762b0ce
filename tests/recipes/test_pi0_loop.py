"""pi0 in the RLOO loop: beside the YAML of its source, estimated before it starts, and one real training step."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilt import cli
from hilt.core.config import build, freeze
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.envs import task
from hilt.observe.metrics import read_metrics
from hilt.policies.io import lora
from hilt.policies.io.tensor_files import Tensors
from hilt.policies.vla.gemma import RMSNorm
from hilt.policies.vla.pi0 import VARIANTS, Pi0
from hilt.recipes import vla_recipe
from hilt.recipes.ript_run import rloo
from hilt.vla.config import Vla
from hilt.vla.plan.recomputation import USABLE, on_device, settle
from hilt.vla.train import begin_run
from tests.cli.test_train_simplevla import StandIn

SOURCE = """
task: {benchmark_name: libero_spatial, task_names_to_use: [0, 1, 2, 3, 4, 5, 6, 7, 8], num_parallel_envs: 2,
       rollouts_per_env: 2, max_episode_length: 50}
algo: {rloo_batch_size: 2, data_batch_size: 4, num_epochs: 1, gradient_accumulation_steps: 1}
training: {num_train_steps: 6}
"""
"""multi_task_distributed.yaml"""
OTHERWISE = {
    *("policy", "policy_options", "task_options.step_limit", "max_steps", "optimizer.learning_rate"),
    *("pool.workers", "pool.slots", "pool.envs_per_worker", "pool.start_s", "pool.step_s"),
    *("collect.group_size", "collect.data_batch_size", "collect.groups_at_once"),
    *("algorithm.ratio", "algorithm.batch.chunks_per_pass"),
    *("validation.episodes", "validation.period"),
}
"""Settings of another value than the source's, which its docstring explains: sizes, and the policy"""
SMALLER = {"memory_limit_gb", "lora.rank", "lora.alpha", "lora.targets"} | {
    f"algorithm.kl.{name}" for name in ("where", "estimate", "coefficient")
}
TINY: dict[str, Any] = {
    "random_weights": True,
    "vlm": "dummy",
    "expert": "dummy",
    "vision": {
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
        **{"patch_size": 14, "image_size": 28},
    },
    "vocabulary": 300,
    "chunk_size": 10,
    "n_action_steps": 5,
}
SMALL = [f"policy_options.{name}={value}" for name, value in TINY.items()]
STEP = (
    *("policy=pi0", "tasks=[libero_goal/0]", "task_options={step_limit: 20, wait_steps: 0}", "max_steps=1"),
    *("collect.group_size=4", "collect.data_batch_size=8", "validation={before: false, period: 0, after: false}"),
    "pool={workers: 0, envs_per_worker: 0, start_s: 120, step_s: 60, slots: 4}",
)
NAMES = ("pi0_rloo", "pi0_rloo_24gb")


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or path == "policy_options":
        return {path: tree}
    return {key: one for name, value in tree.items() for key, one in flat(value, f"{path}.{name}".strip(".")).items()}


@pytest.mark.parametrize("name", NAMES)
def test_loop_is_that_of_its_source(name: str, tmp_path: Path):
    (tmp_path / "source.yaml").write_text(SOURCE)
    theirs, ours = flat(asdict(rloo(tmp_path / "source.yaml"))), flat(asdict(vla_recipe(name)))
    different = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    assert different == OTHERWISE | (SMALLER if name.endswith("24gb") else set())
    assert ours["tasks"] == [f"libero_spatial/{number}" for number in range(9)] and ours["collect.tasks_per_step"] == 1
    assert ours["collect.init_state_mode"] == "distinct" and ours["algorithm.estimator"] == "rloo"


@pytest.mark.parametrize("name", NAMES)
def test_each_is_whole_and_its_checks_pass(name: str, tmp_path: Path):
    config = vla_recipe(name)
    config.check(here=False)
    freeze(config, tmp_path / "run.yaml")
    assert vla_recipe(str(tmp_path / "run.yaml")) == config and config.arithmetic()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.TASKS, "libero_goal", StandIn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("stand_in")
def test_one_training_step_of_a_tiny_one(name: str, tmp_path: Path):
    words = [*STEP, *SMALL, "optimizer.learning_rate=0.01"]
    run = tmp_path / "run"
    result = CliRunner().invoke(cli.app, ["train", name, *words, "--run", str(run)], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "max_steps is reached: 1 training steps" in result.output, result.output
    assert "recomputation: policy_options.gradient_checkpointing=0 (auto: " in result.output
    (update,) = read_metrics(run, ["update"])
    assert update["optimizer_steps"] == 1 and math.isfinite(update["policy_loss"]) and update["gradient_norm"] > 0
    assert update["trajectories"] == 8 and ("kl" in update) == name.endswith("24gb")
    after = Tensors(run / "policy")
    if name.endswith("24gb"):
        kinds = {after[part].dtype for part in after if "language_model" in part and "norm" not in part}
        assert kinds == {torch.bfloat16} and (run / "adapter/adapter_config.json").is_file()


@pytest.mark.usefixtures("stand_in")
def test_dry_run_shows_memory_and_share(tmp_path: Path):
    words = [*STEP, *SMALL, "--dry-run"]
    shown = CliRunner().invoke(cli.app, ["train", "pi0_rloo_24gb", *words], env={"COLUMNS": "200"}).output
    for line in (
        "recomputation: policy_options.gradient_checkpointing=0 (auto: a training step needs ",
        "memory of the policy, in training with 32 chunks in a pass: ",
        "memory of the reference with 32 chunks in a pass: ",
        "memory that a rank may use on cpu (memory_limit_gb): 24.0 GB",
    ):
        assert line in shown, shown


def full_size(name: str, *changes: str) -> Vla:
    new = {"policy_options": {"random_weights": True}}
    return build(vla_recipe(name), "policy=pi0", "tasks=[libero_goal/0]", STEP[2], new, *changes)


@pytest.mark.long
@pytest.mark.usefixtures("stand_in")
def test_full_size_fits_into_24_gigabytes():
    """3.5 billion weights, none of which is made."""
    config = full_size("pi0_rloo_24gb")
    settled, choice = settle(config)
    assert choice is not None and 7e9 < on_device(settled, choice.roles) <= USABLE * 24e9


@pytest.mark.usefixtures("stand_in")
def test_adapters_are_on_the_expert_alone(tmp_path: Path):
    config = vla_recipe("pi0_rloo_24gb")
    policy = Pi0.create({}, TINY | {"dtype": "bfloat16"}, 0)
    lora.attach(policy, 2, 2, config.lora.targets, dtype=torch.float32)
    names = set(lora.adapted(policy))
    expert = {name for name in names if ".gemma_expert.model.layers." in name}
    assert len(expert) == 4 * 7, "four layers of seven projections"
    assert {name for name in names - expert} == {
        *("action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out", "state_proj")
    }
    with pytest.raises(UnknownNameError, match="linear layer"):
        lora.attach(Pi0.create({}, TINY, 0), 2, 2, ["gemma_experts.*_proj"])


def test_new_one_needs_the_option_and_takes_its_sizes():
    with pytest.raises(ConfigError, match=r"a new Pi0 cannot be made: give policy=FOLDER.*random_weights=true"):
        Pi0.check_options({})
    with pytest.raises(UnknownNameError, match="vlms"):
        Pi0.check_options(TINY | {"vlms": "dummy"})
    with pytest.raises(UnknownNameError, match="variant of Gemma"):
        Pi0.check_options(TINY | {"vlm": "gemma_9b"})
    sizes = {"cameras": ["full_image", "wrist_image"], "image_size": 32, "state_dim": 9, "action_dim": 6}
    policy = Pi0.create(sizes, TINY | {"dtype": "bfloat16", "value": "auto", "flow": {"kind": "noise"}}, seed=3)
    config = policy.config
    assert (config.images, config.state_dim, config.action_dim) == (("full_image", "wrist_image"), 9, 6)
    assert config.vlm == VARIANTS["dummy"] and config.value == "actions" and config.flow.kind == "noise"
    assert policy.action_in_proj.weight.dtype == torch.float32
    for module in policy.paligemma_with_expert.modules():
        for weight in module.parameters(recurse=False):
            assert weight.dtype == (torch.float32 if isinstance(module, RMSNorm) else torch.bfloat16)
    again = Pi0.create(sizes, TINY | {"dtype": "bfloat16", "value": "auto", "flow": {"kind": "noise"}}, seed=3)
    assert all(torch.equal(one, other) for one, other in zip(policy.parameters(), again.parameters(), strict=True))
    seen = {name: np.zeros((28, 28, 3), np.uint8) for name in config.images}
    seen |= {"state": np.zeros(9, np.float32), "instruction": "push the plate"}
    assert policy.act([seen], generator=torch.Generator().manual_seed(0))[0].shape == (1, 5, 6)
    policy.fit(np.ones((3, 9)), np.arange(18.0).reshape(3, 6))
    assert policy.statistics["action"]["mean"] == pytest.approx([6, 7, 8, 9, 10, 11]) and "state" in policy.normalizers


@pytest.mark.usefixtures("stand_in")
def test_weights_that_are_trained_are_float32(tmp_path: Path):
    options = "policy_options.dtype=bfloat16"
    with pytest.raises(ConfigError, match=r"policy_options.dtype=bfloat16: weights that are trained are float32"):
        begin_run(tmp_path / "run", "pi0_rloo", build(vla_recipe("pi0_rloo"), *STEP, *SMALL, options))
