"""Document 004 (SimpleVLA-RL), section by section: its own text and code, with changed imports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf, open_dict

from hilt.compat.simplevla import BufferedDataLoader, LIBERO_Dataset, Robotwin_Dataset, collate_fn
from hilt.core.errors import HiltError
from hilt.recipes.simplevla import simplevla
from hilt.recipes.simplevla_names import suites
from hilt.runtime.batch import Batch

MODEL, ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}." for part in ("model", "actor", "rollout", "ref"))
COMMAND = f"""
  data.task_suite_name=libero_10 data.n_samples=8 data.filter_accuracy=True data.accuracy_lower_bound=0.1 data.accuracy_upper_bound=0.9
  data.train_batch_size=64 data.val_batch_size=496 data.max_prompt_length=256 data.max_response_length=128 {MODEL}vla=openvla-oft
  {ACTOR}optim.lr=5e-6 {ACTOR}ppo_mini_batch_size=128 {ACTOR}ppo_micro_batch_size=8 {ACTOR}grad_clip=1 {ACTOR}clip_ratio_high=0.28
  {ACTOR}clip_ratio_low=0.2 {ACTOR}entropy_coeff=0.0 {ROLLOUT}num_images_in_input=1 {ROLLOUT}use_proprio=False {ROLLOUT}temperature=1.6
  {ROLLOUT}micro_batch_size=1 {ROLLOUT}log_prob_micro_batch_size=32 {ROLLOUT}center_crop=True {REF}log_prob_micro_batch_size=32
  {REF}fsdp_config.param_offload=True algorithm.kl_ctrl.kl_coef=0.00 trainer.project_name=SimpleVLA-RL
  trainer.experiment_name=libero10_openvlaoft_grpo trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=25 trainer.test_freq=4
  trainer.total_epochs=100 trainer.val_only=False algorithm.adv_estimator=grpo trainer.wandb_mode=disabled trainer.val_before_train=True
""".split()
"""The command of "运行示例", without its paths"""


def lines_of(*words: str) -> str:
    return "\n".join(simplevla([*COMMAND, *words], {"SFT_MODEL_PATH": "/models/sft"}).lines)


# --- FAQ（分类版）：数据与数据加载器; 代码示例：RayTrainer 与数据集/加载器 ---


class Trainer:
    """`RayTrainer._create_dataloader` as the document prints it."""

    def __init__(self, config: Any):
        self.config = config

    def _create_dataloader(self) -> None:
        from torch.utils.data import DataLoader

        if "libero" in self.config.data.task_suite_name:
            self.train_dataset: Any = LIBERO_Dataset(
                self.config.data.task_suite_name, num_trials_per_task=self.config.data.num_trials_per_task, train_val="train"
            )
            self.val_dataset: Any = LIBERO_Dataset(
                self.config.data.task_suite_name, num_trials_per_task=self.config.data.num_trials_per_task, train_val="valid"
            )
        elif "robotwin" in self.config.data.task_suite_name:
            self.train_dataset = Robotwin_Dataset(
                self.config.data.task_suite_name, num_trials_per_task=self.config.data.num_trials_per_task, train_val="train"
            )
            self.val_dataset = Robotwin_Dataset(
                self.config.data.task_suite_name, num_trials_per_task=self.config.data.num_trials_per_task, train_val="valid"
            )
        else:
            raise ValueError(f"Unsupported task suite name: {self.config.data.task_suite_name}")

        self.train_dataloader = BufferedDataLoader(
            DataLoader(
                dataset=self.train_dataset,
                batch_size=int(self.config.data.train_batch_size * self.config.data.oversample_factor),
                shuffle=True,
                drop_last=True,
                collate_fn=collate_fn,
            )
        )
        self.val_dataloader = DataLoader(
            dataset=self.val_dataset, batch_size=self.config.data.val_batch_size, shuffle=True, drop_last=True, collate_fn=collate_fn
        )

        assert len(self.train_dataloader) >= 1
        assert len(self.val_dataloader) >= 1

        total_training_steps = len(self.train_dataloader) * self.config.trainer.total_epochs

        OmegaConf.set_struct(self.config, True)
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = total_training_steps
            self.config.critic.optim.total_training_steps = total_training_steps


def config_of(suite: str, trials: int = 50, batch: int = 64, valid: int = 496) -> Any:
    data = {"task_suite_name": suite, "num_trials_per_task": trials, "train_batch_size": batch, "val_batch_size": valid}
    optim = {"optim": {"lr": 5e-6}}
    return OmegaConf.create({
        "data": {**data, "oversample_factor": 1}, "trainer": {"total_epochs": 100},
        "actor_rollout_ref": {"actor": optim}, "critic": optim,
    })  # fmt: skip


def test_create_dataloader_with_the_values_of_the_document():
    trainer = Trainer(config_of("libero_10"))
    trainer._create_dataloader()
    assert (len(trainer.train_dataset), len(trainer.val_dataset)) == (500, 500)
    assert (len(trainer.train_dataloader), len(trainer.val_dataloader)) == (500 // 64, 1)
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 700
    (valid,) = trainer.val_dataloader
    assert valid["data_source"].tolist() == ["libero_10"] * 496 and valid["task_id"].shape == (496, 1)
    assert {int(row["trial_id"]) for row in trainer.val_dataset} == set(range(50))
    assert set(trainer.train_dataset[0]) == {"task_suite_name", "task_id", "trial_id", "trial_seed", "data_source"}


def test_create_dataloader_of_one_and_of_every_robotwin_task():
    one, every = Trainer(config_of("robotwin_shoe_place", 70, valid=256)), Trainer(config_of("robotwin_all", 10))
    one._create_dataloader()
    every._create_dataloader()
    assert (len(one.train_dataset), len(one.val_dataset)) == (70, 256)
    assert (len(every.train_dataset), len(every.val_dataset)) == (17 * 10, 17 * 256)
    rows = list(every.train_dataset)
    assert len({row["task_suite_name"] for row in rows}) == 17 and "robotwin_shoe_place" in {row["task_suite_name"] for row in rows}
    assert rows[0]["data_source"] == rows[0]["task_suite_name"] + "_train_iid"
    assert "robotwin_all" in suites() and "robotwin2_all" in suites()
    told = simplevla([*COMMAND, "data.task_suite_name=robotwin2_all", "data.num_trials_per_task=1000"], {"SFT_MODEL_PATH": "/models/sft"})
    assert len(told.config.tasks) == 21 and "robotwin2/lift_pot" in told.config.tasks


@pytest.mark.parametrize(
    "asked",
    [
        lambda: LIBERO_Dataset("libero_11"),
        lambda: Robotwin_Dataset("robotwin_fold"),
        lambda: simplevla([*COMMAND, "data.task_suite_name=meta_world"], {"SFT_MODEL_PATH": "/models/sft"}),
    ],
)
def test_an_unknown_suite_is_a_value_error_and_one_of_ours(asked: Any):
    with pytest.raises(ValueError, match="named") as error:
        asked()
    assert isinstance(error.value, HiltError)


def test_a_line_says_which_initial_states_train_and_validate():
    assert "initial states: 0 to 29 of each task's 50 train, 30 to 39 validate" in lines_of()
    chosen = lines_of("hilt.task_options.splits={train: [0, 50], eval: [0, 50]}")
    assert "initial states: those of hilt.task_options.splits" in chosen and "30 to 39" not in chosen


def test_collate_fn_and_the_buffer_of_the_loader():
    rows = collate_fn([{"x": torch.tensor([1]), "name": "a"}, {"x": torch.tensor([2]), "name": "b"}])
    assert rows["x"].tolist() == [[1], [2]] and rows["name"].dtype == object
    trainer = Trainer(config_of("libero_goal"))
    trainer._create_dataloader()
    loader = trainer.train_dataloader
    loader.start_new_epoch()
    loader.add_to_buffer(Batch.from_single_dict(loader.get_next_batch()))
    loader.add_to_buffer(Batch.from_single_dict(loader.get_next_batch()))
    assert loader.buffer_size() == 128 and len(loader.get_from_buffer(64, 8)) == 64
    assert len(loader.get_from_buffer(100, 8)) == 64 and loader.buffer_size() == 0
