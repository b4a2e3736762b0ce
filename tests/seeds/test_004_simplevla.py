"""Document 004 (SimpleVLA-RL), section by section: its own text and code, with changed imports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf, open_dict

from hilt.compat.simplevla import BufferedDataLoader, LIBERO_Dataset, Robotwin_Dataset, collate_fn, rollout_batch
from hilt.core.errors import ConfigError, HiltError
from hilt.policies.base import join
from hilt.policies.openvla import OpenVLAOptions
from hilt.policies.prismatic import L1Head
from hilt.recipes.simplevla import simplevla
from hilt.recipes.simplevla_names import suites
from hilt.runtime.batch import Batch
from hilt.runtime.episode import Episode, Start
from tests.policies.tiny_openvla import observations, tiny

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


# --- 主流程: `ppo_trainer.yaml`（及 Megatron 变体）; 动态批长: `ulysses_sequence_parallel_size` ---


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"{ACTOR}ulysses_sequence_parallel_size=2", f"not split over GPUs .* give a smaller {ACTOR}traj_mini_batch_size, .*=True"),
        (f"{REF}ulysses_sequence_parallel_size=4", "not split over GPUs"),
        (f"{ACTOR}strategy=megatron", f"there is FSDP, and no Megatron: .*{ACTOR}fsdp_config.param_offload=True"),
        ("critic.strategy=megatron", "there is FSDP, and no Megatron"),
    ],
)
def test_ulysses_and_megatron_are_refused_with_what_to_use(word: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        settings_of(word)
    settings_of(f"{ACTOR}ulysses_sequence_parallel_size=1", f"{ACTOR}strategy=fsdp")


# --- 数据过滤与格式 ---


def settings_of(*words: str) -> Any:
    return simplevla([*COMMAND, *words], {"SFT_MODEL_PATH": "/models/sft"}).config


def test_filter_truncated_cuts_episodes_off_at_max_response_length():
    plain, cut = settings_of(), settings_of("data.filter_truncated=True", "data.max_response_length=300")
    assert plain.task_options["step_limit"] == 512 and not plain.collect.filter_truncated
    assert cut.task_options["step_limit"] == 300 and cut.collect.filter_truncated
    assert cut.algorithm.batch.log_prob_chunks_per_pass == 4 * 38, "a trajectory has 38 chunks of 8 actions"
    said = lines_of("data.filter_truncated=True", "data.max_response_length=300")
    assert "an episode is cut off after 300 actions (data.max_response_length), in validation too; a group with one is dropped" in said
    one = settings_of("data.task_suite_name=robotwin2_lift_pot", "data.num_trials_per_task=1000", "data.filter_truncated=True")
    assert one.task_options["step_limit"] == 128


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.max_response_length=55"], "an answer has 8 actions of 7 tokens = 56. Give 56 or more"),
        (["data.filter_truncated=True", "data.max_response_length=600"], "an episode has 512 actions. Give 512 at most"),
        (["data.filter_truncated=True", "data.task_suite_name=tabletop/reach"], "tabletop/reach has a step limit of its own. Leave"),
        (["data.max_prompt_length=0"], "data.max_prompt_length=0: expected a whole number from 1 on"),
    ],
)
def test_lengths_that_could_not_take_effect_are_refused(words: list[str], expected: str):
    with pytest.raises(ConfigError, match=expected):
        settings_of(*words)


def test_max_prompt_length_refuses_longer_prompts():
    assert settings_of().policy_options["max_prompt_length"] == 256
    assert settings_of(f"{ROLLOUT}max_prompt_length=64").policy_options["max_prompt_length"] == 64
    policy = tiny(options=OpenVLAOptions(max_prompt_length=60))
    with pytest.raises(ConfigError, match=r"a prompt has \d+ tokens, and max_prompt_length=60: give \d+, or 0"):
        policy.act(observations(1))
    tiny(options=OpenVLAOptions(max_prompt_length=512)).act(observations(1))


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


# --- 输出数据结构（rollout → DataProto）; 模型接口与统计 ---


def episode_of(policy: Any, rows: int, seed: int, success: bool) -> Episode:
    """As `roll_out` makes it; of the last chunk one action was carried out."""
    draws = torch.Generator().manual_seed(seed)
    record = join([policy.act([each], temperature=1.6, generator=draws)[1] for each in observations(rows, seed)])
    executed = np.array([policy.chunk] * (rows - 1) + [1], np.int32)
    start = Start("libero_goal/1", "train", 0, 0, group=seed)
    return Episode(start, record, executed, np.zeros(rows, np.float32), success, int(executed.sum()), not success, 0, b"")


def test_pixel_values_of_a_rollout_batch_are_what_generate_action_verl_takes():
    policy = tiny()
    episodes = [episode_of(policy, 3, 0, True), episode_of(policy, 2, 1, False)]
    batch, frames = (rollout_batch(episodes, policy, 256, pixel_values=wanted).batch for wanted in (True, False))
    assert batch["pixel_values"].shape == (2, 3, 6, 28, 28) and "frames" not in batch and "pixel_values" not in frames
    assert batch["responses"].shape == (2, 3, policy.slots) and batch["input_ids"].shape == batch["attention_mask"].shape == (2, 3, 256)
    assert (batch["complete"].dtype, batch["finish_step"].dtype) == (torch.bool, torch.int64)
    assert "action" not in batch, "actions are for the environment"
    assert torch.equal(policy.frames_of(batch["pixel_values"][0]), frames["frames"][0]), "nothing is lost on the way"
    step = {name: batch[name][:, 0] for name in ("input_ids", "attention_mask", "pixel_values")}
    actions, response = policy.generate_action_verl(
        input_ids=step["input_ids"], pixel_values=step["pixel_values"], proprio=None, attention_mask=step["attention_mask"],
        padding_idx=32000, do_sample=False, unnorm_key="libero_spatial", temperature=1.6,
    )  # fmt: skip
    plain, record = policy.act([observations(3, 0)[0], observations(2, 1)[0]], sample=False)
    np.testing.assert_allclose(actions, plain, atol=1e-6)
    assert torch.equal(response, torch.from_numpy(record["tokens"]).flatten(1).long())


class Upstream(torch.nn.Module):
    """A head as OpenVLA-OFT has it: `predict_action`."""

    def __init__(self, head: L1Head):
        super().__init__()
        self.model = head.model
        self.chunk = head.chunk

    def predict_action(self, slots: torch.Tensor) -> torch.Tensor:
        return self.model(slots.reshape(len(slots), self.chunk, -1))


class Diffusion(torch.nn.Module):
    """A diffusion head with the parts of OpenVLA-OFT's, and a scheduler that takes away a tenth of the noise it is told of."""

    class Scheduler:
        timesteps = torch.tensor([2, 1, 0])

        def step(self, noise: torch.Tensor, time: Any, actions: torch.Tensor) -> Any:
            return SimpleNamespace(prev_sample=actions - 0.1 * noise)

    def __init__(self, width: int, numbers: int):
        super().__init__()
        self.noise_scheduler, self.time_encoder = self.Scheduler(), lambda time: time[:, None].expand(1, width)
        self.out = torch.nn.Linear(width, 1)

    def predict_noise(self, slots: torch.Tensor) -> torch.Tensor:
        return self.out(slots).squeeze(-1)


def test_generate_action_verl_takes_an_action_head_a_noise_projector_and_film():
    torch.manual_seed(0)
    policy, own = tiny(), tiny(head="l1")
    asked: dict[str, Any] = {"input_ids": torch.randint(3, 29000, (2, 6)), "pixel_values": torch.randn(2, 6, 28, 28)}
    tokens, _ = policy.generate_action_verl(**asked)
    wanted, _ = own.generate_action_verl(**asked)
    for head in (own.action_head, Upstream(own.action_head)):
        actions, hidden = policy.generate_action_verl(**asked, action_head=head)
        np.testing.assert_allclose(actions, wanted, atol=1e-6)  # the two policies have the same weights
        assert hidden.shape == (2, policy.slots, 32) and not np.allclose(actions, tokens)
    with pytest.raises(ConfigError, match="draws none: use do_sample=False"):
        policy.generate_action_verl(**asked, action_head=own.action_head, do_sample=True)

    head, projector = Diffusion(32, policy.slots), torch.nn.Linear(1, 32)

    def denoised(projector: Any) -> Any:
        draws = torch.Generator().manual_seed(3)
        return policy.generate_action_verl(**asked, action_head=head, noisy_action_projector=projector, generator=draws)[0]

    once, again, other = denoised(projector), denoised(projector), denoised(torch.nn.Linear(1, 32))
    np.testing.assert_array_equal(once, again)
    assert once.shape == (2, policy.chunk, 7) and not np.allclose(once, other), "the noisy actions go through the model"
    for wrong in ({"noisy_action_projector": projector}, {"action_head": head}):
        with pytest.raises(ConfigError, match="go together: give both, or an L1 head alone"):
            policy.generate_action_verl(**asked, **wrong)
    with pytest.raises(ConfigError, match="read the slots of OpenVLA-OFT"):
        tiny(causal=True).generate_action_verl(**asked, action_head=head)

    listening = tiny(film=True)
    np.testing.assert_array_equal(*(listening.generate_action_verl(**asked, **film)[0] for film in ({}, {"use_film": True})))
    for model, film in ((policy, True), (listening, False)):
        with pytest.raises(ConfigError, match=f"use_film={film}, and this checkpoint was trained with"):
            model.generate_action_verl(**asked, use_film=film)
