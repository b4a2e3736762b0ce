"""Document 004 (SimpleVLA-RL), section by section: its own text and code, with changed imports."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf, open_dict

from hilt.compat.simplevla import (
    BufferedDataLoader,
    LIBERO_Dataset,
    RobHFRollout,
    Robotwin_Dataset,
    RobotwinEnvWrapper,
    center_crop_image,
    collate_fn,
    env_worker,
    episodes_of,
    get_libero_env,
    rollout_batch,
)
from hilt.compat.simplevla.batch import Batch
from hilt.core.errors import ConfigError, HiltError, UnknownNameError
from hilt.envs import task
from hilt.envs.adapters import from_custom
from hilt.policies.base import join
from hilt.policies.io.preprocess import center_crop
from hilt.policies.vla.observation_adapters import suite
from hilt.policies.vla.prismatic import L1Head
from hilt.recipes.simplevla_names import suites
from hilt.recipes.simplevla_run import simplevla
from hilt.vla.episode import RolloutEpisode, Start
from tests.cli.test_train_simplevla import StandIn
from tests.envs.test_robotwin import root  # noqa: F401 - a fixture
from tests.policies.tiny_openvla import observations, statistics, tiny

MODEL, ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}." for part in ("model", "actor", "rollout", "ref"))
COMMAND = f"""
  data.task_suite_name=libero_10 data.n_samples=8 data.filter_accuracy=True data.accuracy_lower_bound=0.1
  data.accuracy_upper_bound=0.9
  data.train_batch_size=64 data.val_batch_size=496 data.max_prompt_length=256 data.max_response_length=128
  {MODEL}vla=openvla-oft
  {ACTOR}optim.lr=5e-6 {ACTOR}ppo_mini_batch_size=128 {ACTOR}ppo_micro_batch_size=8 {ACTOR}grad_clip=1
  {ACTOR}clip_ratio_high=0.28
  {ACTOR}clip_ratio_low=0.2 {ACTOR}entropy_coeff=0.0 {ROLLOUT}num_images_in_input=1 {ROLLOUT}use_proprio=False
  {ROLLOUT}temperature=1.6
  {ROLLOUT}micro_batch_size=1 {ROLLOUT}log_prob_micro_batch_size=32 {ROLLOUT}center_crop=True
  {REF}log_prob_micro_batch_size=32
  {REF}fsdp_config.param_offload=True algorithm.kl_ctrl.kl_coef=0.00 trainer.project_name=SimpleVLA-RL
  trainer.experiment_name=libero10_openvlaoft_grpo trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=25
  trainer.test_freq=4
  trainer.total_epochs=100 trainer.val_only=False algorithm.adv_estimator=grpo trainer.wandb_mode=disabled
  trainer.val_before_train=True
""".split()
"""The command of "运行示例", without its paths"""


def settings_of(*words: str) -> Any:
    return simplevla([*COMMAND, *words], {"SFT_MODEL_PATH": "/models/sft"}).config


def lines_of(*words: str) -> str:
    return "\n".join(simplevla([*COMMAND, *words], {"SFT_MODEL_PATH": "/models/sft"}).lines)


# --- 主流程: `ppo_trainer.yaml`（及 Megatron 变体）; 动态批长: `ulysses_sequence_parallel_size` ---


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            f"{ACTOR}ulysses_sequence_parallel_size=2",
            f"not split over GPUs .* give a smaller {ACTOR}traj_mini_batch_size, .*=True",
        ),
        (f"{REF}ulysses_sequence_parallel_size=4", "not split over GPUs"),
        (f"{ACTOR}strategy=megatron", f"there is FSDP, and no Megatron: .*{ACTOR}fsdp_config.param_offload=True"),
        ("critic.strategy=megatron", "there is FSDP, and no Megatron"),
    ],
)
def test_ulysses_and_megatron_are_refused_with_what_to_use(word: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        settings_of(word)
    settings_of(f"{ACTOR}ulysses_sequence_parallel_size=1", f"{ACTOR}strategy=fsdp")


# --- FAQ（分类版）：数据与数据加载器; 代码示例：RayTrainer 与数据集/加载器 ---


class Trainer:
    """`RayTrainer._create_dataloader` as the document prints it."""

    def __init__(self, config: Any):
        self.config = config

    def _create_dataloader(self) -> None:
        from torch.utils.data import DataLoader

        if "libero" in self.config.data.task_suite_name:
            self.train_dataset: Any = LIBERO_Dataset(
                self.config.data.task_suite_name,
                num_trials_per_task=self.config.data.num_trials_per_task,
                train_val="train",
            )
            self.val_dataset: Any = LIBERO_Dataset(
                self.config.data.task_suite_name,
                num_trials_per_task=self.config.data.num_trials_per_task,
                train_val="valid",
            )
        elif "robotwin" in self.config.data.task_suite_name:
            self.train_dataset = Robotwin_Dataset(
                self.config.data.task_suite_name,
                num_trials_per_task=self.config.data.num_trials_per_task,
                train_val="train",
            )
            self.val_dataset = Robotwin_Dataset(
                self.config.data.task_suite_name,
                num_trials_per_task=self.config.data.num_trials_per_task,
                train_val="valid",
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
            dataset=self.val_dataset,
            batch_size=self.config.data.val_batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=collate_fn,
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
    assert len({row["task_suite_name"] for row in rows}) == 17 and "robotwin_shoe_place" in {
        row["task_suite_name"] for row in rows
    }
    assert rows[0]["data_source"] == rows[0]["task_suite_name"] + "_train_iid"
    assert "robotwin_all" in suites() and "robotwin2_all" in suites()
    told = simplevla(
        [*COMMAND, "data.task_suite_name=robotwin2_all", "data.num_trials_per_task=1000"],
        {"SFT_MODEL_PATH": "/models/sft"},
    )
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


def episode_of(policy: Any, rows: int, seed: int, success: bool, state: int = 0) -> RolloutEpisode:
    """As `roll_out` makes it; of the last chunk one action was carried out."""
    draws = torch.Generator().manual_seed(seed)
    record = join([policy.act([each], temperature=1.6, generator=draws)[1] for each in observations(rows, seed, state)])
    executed = np.array([policy.chunk] * (rows - 1) + [1], np.int32)
    start = Start("libero_goal/1", "train", 0, 0, group=seed)
    return RolloutEpisode(
        start, record, executed, np.zeros(rows, np.float32), success, int(executed.sum()), not success, 0, b""
    )


def test_pixel_values_of_a_rollout_batch_are_what_generate_action_verl_takes():
    policy = tiny()
    episodes = [episode_of(policy, 3, 0, True), episode_of(policy, 2, 1, False)]
    batch, frames = (rollout_batch(episodes, policy, 256, pixel_values=wanted).batch for wanted in (True, False))
    assert batch["pixel_values"].shape == (2, 3, 6, 28, 28) and "frames" not in batch and "pixel_values" not in frames
    assert batch["responses"].shape == (2, 3, policy.slots) and batch["input_ids"].shape == batch[
        "attention_mask"
    ].shape == (2, 3, 256)
    assert (batch["complete"].dtype, batch["finish_step"].dtype) == (torch.bool, torch.int64)
    assert "action" not in batch, "actions are for the environment"
    assert torch.equal(policy.frames_of(batch["pixel_values"][0]), frames["frames"][0]), "nothing is lost on the way"
    step = {name: batch[name][:, 0] for name in ("input_ids", "attention_mask", "pixel_values")}
    actions, response = policy.generate_action_verl(
        input_ids=step["input_ids"],
        pixel_values=step["pixel_values"],
        proprio=None,
        attention_mask=step["attention_mask"],
        padding_idx=32000,
        do_sample=False,
        unnorm_key="libero_spatial",
        temperature=1.6,
    )
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
    """A diffusion head with the parts of OpenVLA-OFT's, and a scheduler that takes
    away a tenth of the noise it is told of."""

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
        return policy.generate_action_verl(
            **asked, action_head=head, noisy_action_projector=projector, generator=draws
        )[0]

    once, again, other = denoised(projector), denoised(projector), denoised(torch.nn.Linear(1, 32))
    np.testing.assert_array_equal(once, again)
    assert once.shape == (2, policy.chunk, 7) and not np.allclose(once, other), "the noisy actions go through the model"
    for wrong in ({"noisy_action_projector": projector}, {"action_head": head}):
        with pytest.raises(ConfigError, match="go together: give both, or an L1 head alone"):
            policy.generate_action_verl(**asked, **wrong)
    with pytest.raises(ConfigError, match="read the slots of OpenVLA-OFT"):
        tiny(causal=True).generate_action_verl(**asked, action_head=head)

    listening = tiny(film=True)
    np.testing.assert_array_equal(
        *(listening.generate_action_verl(**asked, **film)[0] for film in ({}, {"use_film": True}))
    )
    for model, film in ((policy, True), (listening, False)):
        with pytest.raises(ConfigError, match=f"use_film={film}, and this checkpoint was trained with"):
            model.generate_action_verl(**asked, use_film=film)


def test_a_rollout_batch_goes_back_to_the_episodes_it_was_made_of():
    policy = tiny(use_proprio=True, proprio_dim=7)
    episodes = [episode_of(policy, 3, 0, True, state=7), episode_of(policy, 2, 1, False, state=7)]
    for pixel_values in (True, False):
        again = episodes_of(rollout_batch(episodes, policy, 256, pixel_values=pixel_values), policy, temperature=1.6)
        for one, other in zip(episodes, again, strict=True):
            assert (other.success, other.steps, other.executed.tolist()) == (
                one.success,
                one.steps,
                one.executed.tolist(),
            )
            for name in ("images", "tokens", "prompt_length", "temperature"):
                np.testing.assert_array_equal(other.record[name], one.record[name])
            with torch.no_grad():
                judged = [policy.evaluate(each.record).log_prob for each in (one, other)]
            np.testing.assert_allclose(*judged, atol=1e-5)


# --- 替换为自定义环境的步骤 ---


class Mine:
    """The interface that the document asks for, and nothing more."""

    step_lim = 4

    def __init__(self, seed: int):
        self.place, self.eval_success = seed % 3, False

    def get_obs(self) -> dict[str, Any]:
        return {"image": np.full((32, 32, 3), self.place, np.uint8), "joints": np.full(7, self.place, np.float32)}

    def get_instruction(self) -> str:
        return "go up"

    def take_action(self, action: np.ndarray) -> None:
        self.eval_success = bool(action[2] > 0.5)


def test_an_environment_with_the_documents_interface_is_a_task():
    actions = spaces.Box(-1, 1, (7,), np.float32)
    env = from_custom(Mine, actions, observe=lambda seen: {"full_image": seen["image"], "state": seen["joints"]})
    seen, _ = env.reset(seed=2)
    assert (env.get_wrapper_attr("instruction"), env.get_wrapper_attr("step_limit")) == ("go up", 4)
    assert seen["full_image"].shape == (32, 32, 3)
    _, _, done, _, info = env.step(np.zeros(7, np.float32))
    assert not done and not info["succeed"]
    _, reward, done, _, info = env.step(np.ones(7, np.float32))
    assert done and reward == 1 and info["succeed"]


# --- 训练与微批（PPO） ---


def test_gradient_accumulation_is_the_mini_batch_over_the_micro_batch():
    assert "gradient accumulation: 128 / 32 (ppo_micro_batch_size) = 4" in lines_of(f"{ACTOR}ppo_micro_batch_size=32")
    dynamic = lines_of(f"{ACTOR}use_dynamic_bsz=True", f"{ACTOR}ppo_max_token_len_per_gpu=20480")
    assert "a pass has 20,480 tokens at most at each rank" in dynamic


# --- 环境并行与封装 ---

PLACES = {
    "task_suite_name": "libero_goal",
    "max_prompt_length": 256,
    "num_images_in_input": 2,
    "use_proprio": True,
    "center_crop": True,
}
CONFIG = OmegaConf.create(
    {
        **PLACES,
        "micro_batch_size": 1,
        "val_micro_batch_size": 2,
        "num_steps_wait": 10,
        "unnorm_key": "libero_spatial",
        "temperature": 1.6,
        "do_sample": True,
        "vla": "openvla-oft",
        "model_family": "openvla",
    }
)
"""`actor_rollout_ref.rollout` of the tiny policy"""


class LiberoStandIn(StandIn):
    """Also begins in a state as LIBERO stores it, and takes the size of pictures."""

    def __init__(
        self, number: str, step_limit: int = 512, wait_steps: int = 10, image_size: int = 256, shadows: bool = False
    ):
        super().__init__(number, step_limit, wait_steps)

    def begin(self, flattened: Any) -> Any:
        return self.reset(options={"state": int(flattened[0])})[0]


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.TASKS, "libero_goal", LiberoStandIn)


@pytest.mark.usefixtures("simulator")
def test_env_worker_answers_by_its_queues():
    asked: queue.Queue[Any] = queue.Queue()
    answered: queue.Queue[Any] = queue.Queue()
    worker = threading.Thread(
        target=env_worker, args=("libero_goal", 3, 7, CONFIG, asked, answered, True, 0, 512), daemon=True
    )
    worker.start()
    first = answered.get(timeout=60)
    assert first["type"] == "init" and first["task_description"] == "push the plate"
    assert first["task_file_name"] == "libero_goal_task_3_trial_7"
    assert (first["active"], first["complete"], first["finish_step"]) == (True, False, 0) and first["obs"][
        "agentview_image"
    ][0, 0, 0] == 7
    assert len(first["valid_images"]) == 1
    up = np.zeros((8, 7), np.float32)
    up[:, 2] = 1
    asked.put(up)
    second = answered.get(timeout=60)
    assert (second["type"], second["active"], second["complete"], second["finish_step"]) == ("step", True, False, 8)
    asked.put(up)
    last = answered.get(timeout=60)
    assert (last["active"], last["complete"], last["finish_step"]) == (False, True, 10), (
        "two actions of the second chunk"
    )
    asked.put(None)
    worker.join(timeout=60)
    assert not worker.is_alive()


@pytest.mark.usefixtures("simulator")
def test_get_libero_env_begins_in_a_stored_state():
    env, words = get_libero_env("libero_goal/3", CONFIG.model_family, resolution=256)
    env.seed(0)
    env.reset()
    obs = env.set_init_state(np.full(79, 5.0))
    assert words == "push the plate" and obs["agentview_image"][0, 0, 0] == 5
    obs, reward, done, info = env.step([0, 0, 1, 0, 0, 0, -1])
    assert (reward, done) == (0.0, False) and set(obs) >= {"agentview_image", "robot0_eef_pos"} and "succeed" in info
    env.close()
    with pytest.raises(UnknownNameError, match="no model_family named 'pi0'"):
        get_libero_env("libero_goal/3", "pi0")


@pytest.mark.usefixtures("root")
def test_robotwin_env_wrapper_runs_an_episode():
    config = SimpleNamespace(twin2_task_config="demo_randomized", twin2_instruction_type="seen")
    for name, version, sentence in (("lift_pot", "2.0", "lift it"), ("robotwin_shoe_place", "1.0", "place the shoe")):
        wrapper = RobotwinEnvWrapper(name, 100_002, 100_002, config, version)
        with pytest.raises(ConfigError, match=r"call initialize\(\) first"):
            wrapper.get_obs()
        wrapper.initialize()
        assert wrapper.get_instruction() == sentence and set(wrapper.get_obs()) == {"observation", "joint_action"}
        obs, done = wrapper.step(np.full((2, 14), 0.5))
        assert not done and wrapper.active and wrapper.finish_step == 2 and set(obs["observation"]) >= {"head_camera"}
        _, done = wrapper.step(np.ones((3, 14)))
        assert done and wrapper.complete and not wrapper.active and 2 < wrapper.finish_step <= 5
        wrapper.close()
    with pytest.raises(ConfigError, match="expected one task, such as lift_pot, and its version"):
        RobotwinEnvWrapper("robotwin2_lift_pot", 0, 100_000, config, "1.0")


def test_center_crop_image_is_the_policys_own():
    from PIL import Image

    drawn = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    cropped = center_crop_image(Image.fromarray(drawn))
    assert cropped.size == (224, 224) and cropped.mode == "RGB"
    np.testing.assert_array_equal(np.array(cropped), center_crop(drawn))
    np.testing.assert_array_equal(center_crop_image(drawn), center_crop(drawn))


# --- 输入映射与输出批组织; 一步生成与模型调用 ---


@pytest.mark.usefixtures("simulator")
def test_the_parts_of_a_step_are_what_the_policy_does_itself():
    policy = tiny(
        use_proprio=True,
        proprio_dim=8,
        num_images=2,
        norm_stats={"libero_spatial_no_noops": {**statistics(), "proprio": statistics(8)["proprio"]}},
    )
    rollout = RobHFRollout(module=policy, config=CONFIG)
    assert rollout.unnorm_key == "libero_spatial_no_noops"
    raw, words = LiberoStandIn("0").reset(options={"state": 9})[0], "Push the plate"
    raw = {
        name: np.random.default_rng(0).integers(0, 256, value.shape).astype(value.dtype) for name, value in raw.items()
    }
    inputs = rollout._obs_to_input(raw)
    assert set(inputs) == {"full_image", "wrist_image", "state"} and inputs["state"].shape == (8,)
    batch = rollout.process_input([inputs, inputs], [words, words])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 256) and batch["pixel_values"].shape == (
        2,
        12,
        28,
        28,
    )
    assert torch.equal(batch["attention_mask"].ne(0), batch["input_ids"].ne(32000)), "as the document says"
    assert bool((batch["attention_mask"].int().diff(dim=1) >= 0).all()), "padded on the left"
    assert batch["proprio"].shape == (2, 8) and float(batch["proprio"].abs().max()) <= 1
    step = rollout._generate_one_step_oft({**batch, "do_sample": False})
    actions, record = policy.act([suite("libero_goal").observe(raw, words.lower())] * 2, sample=False)
    np.testing.assert_allclose(step["action"], actions, atol=1e-6)
    assert torch.equal(step["responses"], torch.from_numpy(record["tokens"]).flatten(1).long())
    records = [{"complete": True, "finish_step": 5}, {"complete": False, "finish_step": 6}]
    made = rollout._prepare_output_batch([step, step], records, 2)
    assert made.batch["responses"].shape == (2, 2, policy.slots) and made.batch["pixel_values"].shape == (
        2,
        2,
        12,
        28,
        28,
    )
    assert made.batch["proprio"].shape == (2, 2, 8) and made.batch["complete"].tolist() == [True, False]
    assert made.batch["finish_step"].tolist() == [5, 6] and "action" not in made.batch
    with pytest.raises(ConfigError, match="batch_size=3, and these steps are of 2 episodes"):
        rollout._prepare_output_batch([step], records, 3)


def test_obs_to_input_of_robotwin():
    policy = tiny(num_images=3)
    rollout = RobHFRollout(
        policy, OmegaConf.merge(CONFIG, {"task_suite_name": "robotwin2_lift_pot", "num_images_in_input": 3})
    )
    cameras = {name: {"rgb": np.zeros((6, 8, 3), np.uint8)} for name in ("head_camera", "left_camera", "right_camera")}
    joints = np.full(14, 0.045, np.float32)
    for version, told, gripper in (("1.0", joints, 1.0), ("2.0", {"vector": joints}, 0.045)):
        row = rollout._obs_to_input(
            {"observation": cameras, "joint_action": told}, is_robotwin=True, robotwin_version=version
        )
        assert set(row) == {"full_image", "left_wrist", "right_wrist", "state"}
        np.testing.assert_allclose(row["state"][[6, 13]], gripper, rtol=1e-5)
    assert joints[6] == np.float32(0.045), "what the environment holds is as it was"


@pytest.mark.usefixtures("simulator")
def test_generate_sequences_rolls_out_groups_and_validates_greedily():
    policy = tiny()
    rollout = RobHFRollout(policy, OmegaConf.merge(CONFIG, {"num_images_in_input": 1, "use_proprio": False}))
    rows = collate_fn([LIBERO_Dataset("libero_goal")[place] for place in (0, 51)])
    made = rollout.generate_sequences(Batch.from_single_dict(rows, meta_info={"n_samples": 2, "pixel_values": False}))
    assert len(made) == 4 and made.non_tensor_batch["uid"].tolist() == ["0", "0", "1", "1"]
    assert made.non_tensor_batch["task"].tolist() == ["libero_goal/0"] * 2 + ["libero_goal/1"] * 2
    assert made.batch["responses"].shape == (4, 171, policy.slots), (
        "512 actions in chunks of 3: batches of two calls can be joined"
    )
    assert made.batch["finish_step"].tolist() == [10] * 4 and made.meta_info["temperature"] == 1.6
    valid = [
        rollout.generate_sequences(Batch.from_single_dict(rows, meta_info={"pixel_values": False})) for _ in range(2)
    ]
    assert len(valid[0]) == 2 and torch.equal(valid[0].batch["responses"], valid[1].batch["responses"]), "no draws"
    Batch.concat([made, valid[0]])
    rollout.close()
