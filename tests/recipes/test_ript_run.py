"""A trainer's YAML as it stands: every key changes the run, and one that is not known is told."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from hilt.core.errors import ConfigError, SeveralErrors, UnknownNameError
from hilt.recipes.ript_run import KEYS, rloo

PLAN = """
task:
  benchmark_name: "libero_spatial"
  task_names_to_use: [0, 1, 2, 3, 4, 5, 6, 7, 8]
  num_parallel_envs: 2
  rollouts_per_env: 2
  max_episode_length: 50

algo:
  rloo_batch_size: 2
  data_batch_size: 4
  num_epochs: 1
  gradient_accumulation_steps: 1

training:
  num_train_steps: 6
"""


def made(folder, text=PLAN, **changes):
    tree = OmegaConf.create(text)
    for key, value in changes.items():
        OmegaConf.update(tree, key.replace("__", "."), value, force_add=True)
    path = folder / "multi_task_distributed.yaml"
    path.write_text(OmegaConf.to_yaml(tree))
    return rloo(path)


def test_the_plan_as_it_stands(tmp_path):
    config = made(tmp_path)
    assert config.tasks == [f"libero_spatial/{task}" for task in range(9)] and config.max_steps == 6
    assert (config.pool.workers, config.pool.slots, config.task_options) == (2, 2, {"step_limit": 50})
    collect = config.collect
    assert (collect.group_size, collect.data_batch_size, collect.groups_at_once, collect.tasks_per_step) == (2, 4, 2, 1)
    assert (collect.init_state_mode, collect.when_exhausted, collect.report_ranks) == ("distinct", "partial", True)
    assert (config.algorithm.estimator, config.algorithm.epochs, config.algorithm.batch.chunks_per_pass) == (
        "rloo",
        1,
        64,
    )
    assert (config.validation.episodes, config.validation.before, config.validation.after) == (2, False, True)


@pytest.mark.parametrize("key", ["task_name", "task_names_to_use"])
def test_nine_is_task_nine(tmp_path, key):
    assert made(tmp_path, f"task: {{{key}: 9}}").tasks == ["libero_spatial/9"]
    assert made(tmp_path, f"task: {{{key}: [2, 9], benchmark_name: LIBERO_GOAL}}").tasks == [
        "libero_goal/2",
        "libero_goal/9",
    ]
    assert made(tmp_path, f"{key}: 9").tasks == ["libero_spatial/9"], "outside its section too"
    assert len(made(tmp_path, f"task: {{{key}: null, benchmark_name: libero_90}}").tasks) == 90
    words = made(tmp_path, f"task: {{{key}: [pick_red, tabletop/reach], benchmark_name: tabletop}}").tasks
    assert words == ["tabletop/pick_red", "tabletop/reach"]


OTHER = {
    "policy_path": "/some/folder", "algo.enable_dynamic_sampling": True, "algo.enable_rollout_stats_tracking": True,
    "algo.init_state_mode": "group", "algo.ppo_clip_range": 0.3, "algo.ppo_clip_high": 0.3, "algo.lr": 3e-6,
    "algo.log_prob_mode": "sum_on_action_dim",
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_every_key_changes_the_run(tmp_path, key):
    assert made(tmp_path, **{key.replace(".", "__"): OTHER.get(key, 3)}) != made(tmp_path)
    assert made(tmp_path, PLAN, **{key.replace(".", "__"): None}), "nothing is no value"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algo__rloo_batchsize": 2}, "no setting named 'algo.rloo_batchsize'; did you mean 'algo.rloo_batch_size'"),
        ({"algo__data_batch_size": "many"}, "algo.data_batch_size: 'many' was given; expected is a whole number"),
        ({"algo__enable_dynamic_sampling": "yes please"}, "expected is true or false"),
        ({"algo__gradient_accumulation_steps": 0}, "expected is a whole number from 1 to 64"),
        ({"task__task_name": 3}, "task.task_name and task.task_names_to_use both choose the tasks"),
        ({"data_batch_size": 8}, "algo.data_batch_size is given twice, 4 and 8: leave one out"),
        ({"task__task_names_to_use": 10}, "task 10 was asked for; there are the tasks 0 to 9"),
        ({"task__benchmark_name": "libero_spatiel"}, "did you mean 'libero_spatial'"),
    ],
)
def test_ript_errors_are_reported(tmp_path, changes, words):
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        made(tmp_path, **changes)


RIPT = """
defaults: [train_base_rl_openvla_oft, _self_, {override reward_function: success}, {override task: libero_long}]
exp_name: mine
algo: {rloo_batch_size: 8, rollouts_per_env: 50, num_ppo_epochs: 2, num_parallel_envs: 1, max_episode_length: null,
       lr: 5e-5, use_val_init: false, max_step_batch_size: 1, log_prob_mode: sum_on_action_dim, checkpoint_path: null,
       ppo_clip_high: 0.1}
task: {task_names_to_use: null}
train_dataloader: {batch_size: 6, shuffle: true}
training: {n_steps: 3, rollout_steps: 1}
rollout: {enabled: true}
"""


def test_names_of_ripts_own_files_are_understood(tmp_path):
    config = made(tmp_path, RIPT)
    assert len(config.tasks) == 10 and config.tasks[0] == "libero_10/0" and config.task_options == {}
    assert (config.collect.group_size, config.collect.data_batch_size, config.max_steps) == (8, 48, 3)
    assert config.collect.init_state_mode == "group", "RIPT's own files: each state has so many episodes"
    assert (config.algorithm.epochs, config.algorithm.ratio, config.validation.episodes) == (2, "action", 50)
    assert made(tmp_path, RIPT, checkpoint_path="here").policy == "here"
    with pytest.raises(ConfigError, match=r"algo\.num_ppo_epochs and algo\.num_epochs are one setting"):
        made(tmp_path, RIPT, algo__num_epochs=3)
    with pytest.raises(ConfigError, match=r"no algo\.data_batch_size beside it"):
        made(tmp_path, RIPT, algo__data_batch_size=3)


def test_ript_settings_without_counterpart_are_listed_together(tmp_path):
    own = {
        "algo__use_laplace_sampling": True,
        "algo__scale_factor": 5.0,
        "algo__header_lr": 5e-5,
        "algo__log_scale_clip": [-2, 0.5],
    }
    with pytest.raises(SeveralErrors) as error:
        made(tmp_path, RIPT, **own, algo__fix_scale_head=True, algo__rloo_batchsize=3, algo__lr="much")
    assert len(error.value.errors) == 7 and str(error.value).count("Leave it out.") == 5
    assert made(tmp_path, RIPT, algo__use_laplace_sampling=False, algo__scale_factor=1.0, algo__header_checkpoint=None)


def test_ript_impossible_batch_is_refused_before_anything_starts(tmp_path):
    ours = {"task__benchmark_name": "tabletop", "task__task_names_to_use": ["reach", "button"]}
    made(tmp_path, **ours).check()
    with pytest.raises(
        ConfigError, match="groups_at_once=2 in max_sampling_attempts=1 are 2 groups, and data_batch_size=5 needs 3"
    ):
        made(tmp_path, **ours, algo__data_batch_size=5, algo__max_sampling_attempts=1).check()
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected settings by name"):
        rloo(tmp_path / "list.yaml")
