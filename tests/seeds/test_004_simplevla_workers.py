"""Document 004 (SimpleVLA-RL): the workers, the reward manager and the trainer that
its sections name, run with a tiny policy."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hilt.algos.config import Optimizer, PolicyGradient
from hilt.compat.simplevla import (
    CriticWorker,
    DataParallelPPOCritic,
    LIBERO_Dataset,
    RayTrainer,
    ResourcePoolManager,
    RobActorRolloutRefWorker,
    RobDataParallelPPOActor,
    RobRewardManager,
    Role,
    collate_fn,
    compute_advantage,
    rollout_batch,
)
from hilt.compat.simplevla.batch import Batch
from hilt.core.config import build
from hilt.core.errors import ConfigError, MissingFieldError, UnknownNameError
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.envs import task
from hilt.envs.pool import Pool
from hilt.policies.base import Evaluation, Policy
from hilt.policies.registry import POLICIES, load_policy, policy_class
from hilt.policies.vla.observation_adapters import suite
from hilt.policies.vla.tokens import load_tokenizer
from hilt.vla.config import Rewards, Vla
from hilt.vla.episode import RolloutEpisode, Start
from hilt.vla.rollout import roll_out
from hilt.vla.train import begin_run, train
from hilt.vla.update import Updater
from hilt.vla.worker import reward_of
from tests.policies.tiny_openvla import same_weights, tiny
from tests.seeds.test_004_simplevla import LiberoStandIn, episode_of

HILT = {"policy_options": {"allow_untrained": True}, "pool": {"workers": 0}, "validation": {"after": False}}
MODEL = {"vla": "openvla-oft", "action_token_len": 7, "action_chunks_len": 3}
ROLLOUT = {
    "task_suite_name": "libero_goal",
    "num_images_in_input": 1,
    "use_proprio": False,
    "center_crop": True,
    "temperature": 1.6,
    "micro_batch_size": 1,
    "val_micro_batch_size": 2,
    "log_prob_micro_batch_size": 4,
    "max_prompt_length": 256,
    "num_steps_wait": 10,
    "unnorm_key": "libero_spatial",
    "dtype": "float32",
    "do_sample": True,
    "name": "hf",
}
ACTOR = {
    "optim": {"lr": 0.001, "total_training_steps": 10},
    "ppo_mini_batch_size": 4,
    "ppo_micro_batch_size": 2,
    "grad_clip": 1.0,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.TASKS, "libero_goal", LiberoStandIn)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("ROBOT_PLATFORM", raising=False)


def config_of(checkpoint: Path, **model: Any) -> Any:
    """`actor_rollout_ref`"""
    ref = {"log_prob_micro_batch_size": 4}
    return OmegaConf.create(
        {
            "model": {**MODEL, "path": str(checkpoint), **model},
            "actor": ACTOR,
            "rollout": ROLLOUT,
            "ref": ref,
            "hilt": HILT,
        }
    )


def prompts(**meta: Any) -> Batch:
    rows = collate_fn([LIBERO_Dataset("libero_goal")[place] for place in (0, 51)])
    return Batch.from_single_dict(rows, meta_info={"pixel_values": False, **meta})


@pytest.fixture(scope="module")
def lessons(checkpoint: Path) -> Iterator[tuple[RobActorRolloutRefWorker, Batch]]:
    """A worker with adapters, and what it has rolled out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(task.TASKS, "libero_goal", LiberoStandIn)
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.delenv("ROBOT_PLATFORM", raising=False)
        worker = RobActorRolloutRefWorker(config_of(checkpoint, lora_rank=2), role="actor_rollout_ref")
        worker.init_model()
        yield worker, worker.generate_sequences(prompts(n_samples=2))
        worker.close()


# --- 组件职责与交互: RobActorRolloutRefWorker ---


def test_generate_sequences_recomputes_the_old_log_probs(lessons: Any):
    worker, data = lessons
    assert len(data) == 4 and data.batch["old_log_probs"].shape == (4, 171 * 21)
    done = torch.arange(171 * 21) < data.batch["finish_step"][:, None] * 7
    assert torch.equal(data.batch["old_log_probs"] != 0, done), "0 where nothing was carried out"
    again = worker.compute_ref_log_prob(data)
    assert set(again.batch) == {"ref_log_prob"}
    torch.testing.assert_close(again.batch["ref_log_prob"], data.batch["old_log_probs"], atol=1e-5, rtol=1e-5)
    entropy = worker.compute_entropy(data).meta_info["metrics"]["actor_after/entropy_loss_eval"]
    assert 0 < entropy <= np.log(256) + 1e-6


def test_update_actor_makes_what_was_better_likelier(lessons: Any):
    worker, data = lessons
    data = data.select(deepcopy=True)
    data.batch["complete"] = torch.tensor([True, False, False, True])
    rewards, _ = RobRewardManager(0)(data)
    data.batch["token_level_rewards"] = rewards["all"]
    compute_advantage(data, adv_estimator="grpo")
    before = worker.actor.compute_log_prob(data).sum(1)
    metrics = worker.update_actor(data).meta_info["metrics"]
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/lr(1e-4)"] == pytest.approx(10)
    assert {"actor/pg_loss", "actor/ppo_kl"} <= set(metrics)
    moved = worker.actor.compute_log_prob(data).sum(1) - before
    better = data.batch["complete"]
    assert float(moved[better].sum()) > float(moved[~better].sum())
    reference = worker.compute_ref_log_prob(data).batch["ref_log_prob"].sum(1)
    torch.testing.assert_close(reference, before, atol=1e-3, rtol=1e-3)  # it stays as it was


def test_save_checkpoint_has_adapters_and_the_merged_model(lessons: Any, tmp_path: Path):
    worker, data = lessons
    worker.save_checkpoint(str(tmp_path / "global_step_1"))
    assert {path.name for path in (tmp_path / "global_step_1" / "lora_adapter").iterdir()} >= {"adapter_config.json"}
    merged = load_policy(tmp_path / "global_step_1", unnorm_key="libero_spatial", allow_untrained=True)
    own = RobDataParallelPPOActor(OmegaConf.create(ACTOR), merged)
    torch.testing.assert_close(own.compute_log_prob(data), worker.actor.compute_log_prob(data), atol=1e-3, rtol=1e-3)


def test_what_a_worker_is_not_for_is_refused(checkpoint: Path, lessons: Any):
    _, data = lessons
    with pytest.raises(UnknownNameError, match="no role named 'judge'"):
        RobActorRolloutRefWorker(config_of(checkpoint), role="judge")
    rollout = RobActorRolloutRefWorker(config_of(checkpoint), role="rollout")
    with pytest.raises(ConfigError, match="has the role 'rollout', which is no actor"):
        rollout.update_actor(data)
    with pytest.raises(ConfigError, match=r"call init_model\(\) first"):
        rollout.generate_sequences(prompts(n_samples=2))
    offloaded = config_of(checkpoint)
    offloaded.actor.fsdp_config = {"optimizer_offload": True}
    with pytest.raises(ConfigError, match="need ranks that share the weights"):
        RobActorRolloutRefWorker(offloaded).init_model()


# --- PPO 训练细节: RobDataParallelPPOActor, DataParallelPPOCritic, RobRewardManager ---


def rolled(policy: Any) -> Batch:
    return rollout_batch([episode_of(policy, 3, 0, True), episode_of(policy, 2, 1, False)], policy, 256)


def test_a_micro_batch_does_not_change_the_gradient():
    """`gradient_accumulation = M / m`: of M = 2 trajectories, m = 1 or 2 at a time."""
    made = []
    for micro in (1, 2):
        policy = tiny()
        data = rolled(policy)
        data.meta_info["temperature"] = 1.6
        data.batch["advantages"] = torch.tensor([[1.0], [-1.0]]) * (data.batch["old_log_probs"] != 0)
        config = {
            "optim": {"lr": 0.001},
            "ppo_mini_batch_size": 2,
            "ppo_micro_batch_size": micro,
            "traj_mini_batch_size": 1,
        }
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.002, betas=(0.9, 0.95), weight_decay=0.0)
        actor = RobDataParallelPPOActor(config, policy, optimizer)
        metrics = actor.update_policy(data)
        assert metrics["actor/lr(1e-4)"] == pytest.approx(20), "the optimizer's"
        made.append((policy, metrics["actor/grad_norm"]))
    assert made[0][1] == pytest.approx(made[1][1], rel=1e-3)
    assert not same_weights(made[0][0], tiny())
    with pytest.raises(MissingFieldError, match="the data has no 'advantages'"):
        actor.update_policy(rolled(policy))


def test_the_critic_learns_the_returns(checkpoint: Path):
    config = OmegaConf.create(
        {
            "optim": {"lr": 0.01},
            "ppo_mini_batch_size": 2,
            "ppo_micro_batch_size": 2,
            "cliprange_value": 0.5,
            "hilt": HILT,
            "model": {"path": str(checkpoint), "action_token_len": 7, "action_chunks_len": 3},
        }
    )
    config.hilt = {**HILT, "policy_options": {"allow_untrained": True, "unnorm_key": "libero_spatial"}}
    worker = CriticWorker(config)
    worker.init_model()
    data = rolled(worker.critic_module)
    values = worker.compute_values(data).batch["values"]
    done = data.batch["old_log_probs"] != 0
    assert values.shape == done.shape and not values[~done].any()
    assert isinstance(worker.critic, DataParallelPPOCritic)
    losses = []
    for _ in range(4):
        data.batch["values"] = worker.compute_values(data).batch["values"]
        data.batch["returns"] = done.float()
        losses.append(worker.update_critic(data).meta_info["metrics"]["critic/vf_loss"])
    assert losses[0] == pytest.approx(0.5, abs=0.2) and losses[-1] < losses[0]


def test_the_reward_manager_verifies_and_rewards_the_last_number():
    data = rolled(tiny())
    manager = RobRewardManager(
        num_examine=0, config=OmegaConf.create({"verifier": {"reward_coef": 5}, "reward_model": {"rm_coef": 2}})
    )
    scores, success, form, both = manager.verify(data)
    assert scores == [1.0, 0.0] and success == {"all": 0.5} and form == {"all": 1.0} and both == {"all": 0.5}
    rewards, metrics = manager(data)
    last = int(data.batch["finish_step"][0]) * 7 - 1
    assert (
        rewards["gt_scores"].nonzero().tolist() == [[0, last]]
        and float(rewards["all"][0, last]) == 5
        and metrics["reward_all"] == 2.5
    )
    data.batch["rm_scores"] = torch.zeros_like(rewards["all"]).index_fill(1, torch.tensor([0]), 0.5)
    rewards, metrics = manager(data)
    assert float(rewards["all"][1].sum()) == 1.0 and metrics["reward_model"] == 0.5
    data.non_tensor_batch["ill_formed"][1] = "an action is not finite"
    assert manager.verify(data)[2] == {"all": 0.5}


def test_the_reward_manager_gives_what_a_run_gives():
    """`reward_of`, with the coefficients of the tree, for each length of an episode and each outcome."""
    policy = tiny()
    config = OmegaConf.create({"verifier": {"reward_coef": 4}, "hilt": {"rewards": {"format": 0.5}}})
    for steps in (0, 1, policy.chunk, policy.chunk + 1, 3 * policy.chunk):
        for success, ill_formed in ((True, ""), (False, ""), (False, "an action is not finite")):
            data = rolled(policy)
            data.batch["finish_step"][0], data.batch["complete"][0] = steps, success
            data.non_tensor_batch["ill_formed"][0] = ill_formed
            rewards = RobRewardManager(0, config)(data)[0]["all"][0].view(-1, policy.chunk * policy.action_dim)
            rows = -(-steps // policy.chunk)
            expected = reward_of(
                RolloutEpisode(
                    Start("", "train", 0, 0),
                    {},
                    np.zeros(rows),
                    np.zeros(rows),
                    success,
                    steps,
                    False,
                    0,
                    b"",
                    ill_formed,
                ),
                Rewards(success=4, format=0.5),
            )
            np.testing.assert_allclose(rewards.sum(1)[:rows], expected)
            assert not rewards[rows:].any() and rewards.flatten().nonzero().tolist() == [[steps * 7 - 1]] * bool(
                expected.any()
            )
    with pytest.raises(
        ConfigError, match="environment=1, and this data has no rewards of the environment: leave it at 0"
    ):
        RobRewardManager(0, OmegaConf.create({"hilt": {"rewards": {"environment": 1}}}))(data)


def test_compute_advantage_compares_the_members_of_a_group():
    policy = tiny()
    data = Batch.concat([rolled(policy), rolled(policy)])
    data.non_tensor_batch["uid"][:] = ["a", "a", "b", "b"]
    data.batch["token_level_rewards"] = RobRewardManager(0)(data)[0]["all"]
    compute_advantage(data, adv_estimator="grpo")
    first, second = data.batch["advantages"][:2]
    done = data.batch["old_log_probs"][:2] != 0
    wanted = 2.5 / (np.std([5, 0], ddof=1) + 1e-6)
    np.testing.assert_allclose(first[done[0]], wanted, rtol=1e-5)
    np.testing.assert_allclose(second[done[1]], -wanted, rtol=1e-5)
    assert not first[~done[0]].any() and data.batch["returns"].shape == data.batch["advantages"].shape


# --- RayTrainer.fit ---


def test_ray_trainer_fits_with_a_tree_of_settings(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = OmegaConf.create(
        {
            "data": {
                "task_suite_name": "libero_goal",
                "num_trials_per_task": 50,
                "n_samples": 2,
                "train_batch_size": 2,
                "val_batch_size": 496,
                "oversample_factor": 1,
                "filter_accuracy": False,
            },
            "actor_rollout_ref": config_of(checkpoint, lora_rank=2),
            "critic": {"optim": {"lr": 1e-5}},
            "algorithm": {"adv_estimator": "grpo", "kl_ctrl": {"kl_coef": 0.0}},
            "trainer": {
                "n_gpus_per_node": 0,
                "total_epochs": 100,
                "total_training_steps": 1,
                "default_local_dir": str(tmp_path / "run"),
                "logger": ["console"],
                "test_freq": -1,
                "save_freq": 1,
            },
            "hilt": HILT,
        }
    )
    del tree.actor_rollout_ref["hilt"]
    manager = RobRewardManager(num_examine=0, config=tree)
    # what ray.remote(...) gives
    remote = SimpleNamespace(__ray_metadata__=SimpleNamespace(class_name="RobActorRolloutRefWorker"))
    roles = {Role.ActorRollout: remote, Role.RefPolicy: RobActorRolloutRefWorker, Role.Critic: CriticWorker}
    pools = ResourcePoolManager(resource_pool_spec={"global_pool": [0]}, mapping=dict.fromkeys(roles, "global_pool"))
    trainer = RayTrainer(
        config=tree,
        tokenizer=load_tokenizer(checkpoint),
        role_worker_mapping=roles,
        resource_pool_manager=pools,
        reward_fn=manager,
        val_reward_fn=manager,
    )
    assert len(trainer.train_dataloader) == 250 and trainer.total_training_steps == 25_000
    assert tree.actor_rollout_ref.actor.optim.total_training_steps == 25_000
    trainer.init_workers()
    trainer._run.environment["HILT_OF_A_SCRIPT"] = "1"
    found: list[str | None] = []

    def noting(*given: Any, **named: Any) -> Any:
        found.append(os.environ.get("HILT_OF_A_SCRIPT"))
        return train(*given, **named)

    monkeypatch.setattr("hilt.compat.simplevla.trainer.train", noting)
    done = trainer.fit()
    assert found == ["1"] and "HILT_OF_A_SCRIPT" not in os.environ, "it is for the processes of the run"
    assert (
        done.step == 1
        and (tmp_path / "run" / "policy" / "config.json").is_file()
        and (tmp_path / "run" / "adapter").is_dir()
    )
    for wrong, expected in (
        ({"reward_fn": lambda data: 0}, "rewarded where they are made, by rewards"),
        ({"role_worker_mapping": {Role.Critic: RobActorRolloutRefWorker}}, "give CriticWorker, or no mapping"),
        (
            {"resource_pool_manager": ResourcePoolManager({"a": [8, 8]}, {})},
            "trainer asks for .* GPUs of each machine: give these",
        ),
        ({"ray_worker_group_cls": object}, "ray_worker_group_cls would do nothing"),
    ):
        with pytest.raises(ConfigError, match=expected):
            RayTrainer(tree, **wrong)
    for tokenizer, expected in (
        (
            SimpleNamespace(encode=lambda text: [1, 2, 3]),
            "writes a prompt in other ids than .* Give the tokenizer of .*sft0",
        ),
        ("llama", "tokenizer is 'llama': expected a tokenizer with encode"),
    ):
        with pytest.raises(ConfigError, match=expected):
            RayTrainer(tree, tokenizer=tokenizer).init_workers()
    with pytest.raises(ValueError, match="no task suite named 'meta_world'"):
        RayTrainer(OmegaConf.merge(tree, {"data": {"task_suite_name": "meta_world"}}))


# --- 模型支持与兼容性: a model of one's own ---


class Own(Policy):
    """A Gaussian around a mean that is linear in the robot's state: no tokens, no prompt."""

    chunk, action_dim = 3, 7

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Linear(8, self.chunk * self.action_dim)
        torch.nn.init.zeros_(self.mean.weight)
        torch.nn.init.zeros_(self.mean.bias)

    def _normal(self, states: np.ndarray) -> torch.distributions.Normal:
        return torch.distributions.Normal(
            self.mean(torch.from_numpy(states)).view(-1, self.chunk, self.action_dim), 1.0
        )

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        states = np.stack([np.asarray(row["state"], np.float32) for row in observations])
        with torch.no_grad():
            normal = self._normal(states)
            noise = torch.randn(normal.mean.shape, generator=generator) if sample else torch.zeros_like(normal.mean)
            actions = normal.mean + noise
        return actions.numpy(), {
            "state": states,
            "actions": actions.numpy(),
            "log_prob": normal.log_prob(actions).numpy(),
        }

    def evaluate(self, record: Any) -> Evaluation:
        normal = self._normal(record["state"])
        return Evaluation(normal.log_prob(torch.from_numpy(record["actions"])), normal.entropy(), None)

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        raise NotImplementedError

    @classmethod
    def create(cls, sizes: Any, options: Any, seed: int) -> Own:
        assert (sizes["state_dim"], sizes["action_dim"]) == (8, 7) and not options
        return cls()

    def save_pretrained(self, folder: Any) -> None:
        Path(folder).mkdir(parents=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "mine"}))

    @classmethod
    def from_pretrained(cls, folder: Any, device: str = "cpu", **options: Any) -> Own:
        policy = cls()
        policy.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True))
        return policy.to(device)


def test_a_model_of_ones_own_rolls_out_and_learns(tmp_path: Path):
    """A class of the protocol, in a script."""
    policy = Own()
    draws = torch.Generator().manual_seed(0)
    begun = [Start("libero_goal/0", "train", 0, 0, group, member) for group in range(4) for member in range(4)]
    with contextlib.closing(Pool(0, 8, task_options={"step_limit": 512, "wait_steps": 10})) as pool:
        outcomes = [*roll_out(policy, pool, begun, suite=suite("libero_goal"), generator=draws)]
    episodes = sorted(
        (one for one in outcomes if isinstance(one, RolloutEpisode)),
        key=lambda one: (one.start.group, one.start.member),
    )
    assert len(episodes) == 16 and len({one.success for one in episodes}) == 2
    before = policy.mean.bias.detach().clone()
    rewards = [reward_of(one, Rewards()) for one in episodes]
    figures = Updater(PolicyGradient(), DataParallelOptimizer(policy, Optimizer(learning_rate=0.01))).update(
        episodes, rewards
    )
    assert figures["gradient_norm"] > 0 and not torch.equal(policy.mean.bias, before)
    up = policy.mean.bias.detach().view(3, 7)[0, 2]
    assert float(up) > 0, "the tenth action, the first of its chunk, succeeds where it goes up"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    with pytest.raises(UnknownNameError, match=r"'mine'.*Known: .*openvla"):
        load_policy(tmp_path)


@pytest.mark.parametrize("name", ["mine", f"{__name__}:Own"])
def test_a_model_of_ones_own_is_named_in_the_settings_of_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By registration, as in the document's `registry.py`, and as module:Class; the
    folder of the run opens by the registered name."""
    with pytest.raises(ConfigError, match="policy=mine: expected the folder of a checkpoint"):
        build(Vla(), {"policy": "mine", "tasks": ["libero_goal/0"]}).check()
    monkeypatch.setitem(POLICIES, "mine", f"{__name__}:Own")
    quiet = ["validation.before=false", "validation.period=0", "validation.after=false", "optimizer.learning_rate=0.01"]
    sizes = ["collect.group_size=4", "collect.data_batch_size=8", "max_steps=2", "pool.workers=0"]
    config = build(
        Vla(), f"policy={name}", "tasks=[libero_goal/0]", "task_options={step_limit: 20, wait_steps: 0}", *quiet, *sizes
    )
    begin_run(tmp_path / "run", "own", config)
    assert train(config, tmp_path / "run").reason == "max_steps"
    kept = load_policy(tmp_path / "run/policy")
    assert type(kept) is policy_class(name) and any(bool(weight.abs().max() > 0) for weight in kept.parameters()), (
        "it began with zeros"
    )
