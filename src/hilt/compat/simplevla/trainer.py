"""SimpleVLA-RL's trainer and reward manager, over our post-training."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf, open_dict
from torch import Tensor
from torch.utils.data import DataLoader

from hilt.algos.advantage import advantages
from hilt.algos.config import PolicyGradient
from hilt.compat.simplevla.batch import Batch
from hilt.compat.simplevla.dataloader import BufferedDataLoader, LIBERO_Dataset, Robotwin_Dataset, collate_fn
from hilt.compat.simplevla.hf_rollout import get
from hilt.compat.simplevla.script_settings import run_of
from hilt.compat.simplevla.workers import CriticWorker, RobActorRolloutRefWorker
from hilt.core.errors import ConfigError
from hilt.core.platform import environment
from hilt.policies.vla.tokens import load_tokenizer, openvla_prompt
from hilt.recipes.simplevla_names import UnknownSuiteError, suites
from hilt.vla.config import Rewards
from hilt.vla.episode import RolloutEpisode, Start
from hilt.vla.train import TrainSummary, begin_run, is_run, resume_run, train
from hilt.vla.worker import reward_of

logger = logging.getLogger("hilt.compat")

SENTENCE = "put the 2 jars, a quick brown fox and my vizier's black bowl on the glossy whiteboard"
"""With every letter: two tokenizers that write it in the same ids are taken for the same"""


class Role(Enum):
    """What a worker is in SimpleVLA-RL."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6


WORKERS: dict[str, type] = {
    "ActorRollout": RobActorRolloutRefWorker,
    "RefPolicy": RobActorRolloutRefWorker,
    "Critic": CriticWorker,
}


@dataclass
class ResourcePoolManager:
    """The pool of GPUs that each role has, as in SimpleVLA-RL's ``main_ppo``: all share
    one of ``n_gpus_per_node`` on each machine."""

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]


class RobRewardManager:
    """Computes the reward of an episode, as in our runs (`hilt.vla.worker.reward_of`): ``verifier.reward_coef`` where
    it succeeded, and ``hilt.rewards.format`` where no chunk was ill-formed, at the last number that was carried out."""

    def __init__(self, num_examine: int = 0, config: Any = None):
        """`num_examine`: that many outcomes of each batch are logged. `config` is the whole tree."""
        self.num_examine, self.config = num_examine, config

    def verify(self, data: Batch) -> tuple[list[float], dict[str, float], dict[str, float], dict[str, float]]:
        """The scores, and three dictionaries with their means over all: of success, of the format, and of both.

        Adds `acc` and `format_correctness` [B] to the data: whether it succeeded, and whether no chunk was ill-formed
        (a number that is not finite, a token that is no action).
        """
        device, ill = data.batch["complete"].device, data.non_tensor_batch.get("ill_formed", [""] * len(data))
        success = data.batch["complete"].float()
        formed = torch.tensor([float(not reason) for reason in ill], device=device)
        data.batch |= {"acc": success, "format_correctness": formed}
        for row in range(min(self.num_examine, len(data))):
            logger.info("%s: success %d", data.non_tensor_batch.get("task", [""] * len(data))[row], success[row])
        means = [{"all": float(values.mean())} for values in (success, formed, success * formed)]
        return success.tolist(), means[0], means[1], means[2]

    def __call__(self, data: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Rewards [B, T] by source (``gt_scores``, and ``rm_scores`` of the data) and their
        sum, ``all``; and means over episodes."""
        if "acc" not in data.batch:
            self.verify(data)
        format_coef, environment = (
            float(get(_at(self.config, "hilt", "rewards"), name, 0.0)) for name in ("format", "environment")
        )
        if environment:
            raise ConfigError(
                f"hilt.rewards.environment={environment:g}, and this data has no rewards of the "
                "environment: leave it at 0 here. RayTrainer.fit() rewards episodes where they are made, "
                "and there it takes effect."
            )
        success_coef = float(get(_at(self.config, "verifier"), "reward_coef", 5.0))
        verified = self._earned(data, Rewards(success=1.0))
        total = self._earned(data, Rewards(success=success_coef, format=format_coef))
        sources, metrics = {"gt_scores": verified}, {"verifier": float(verified.sum(1).mean())}
        if "rm_scores" in data.batch:
            sources["rm_scores"] = data.batch["rm_scores"]
            total = total + float(get(_at(self.config, "reward_model"), "rm_coef", 0.0)) * sources["rm_scores"]
            metrics["reward_model"] = float(sources["rm_scores"].sum(1).mean())
        return {**sources, "all": total}, metrics | {"reward_all": float(total.sum(1).mean())}

    def _earned(self, data: Batch, rewards: Rewards) -> Tensor:
        """`reward_of` each episode, float32 [B, T]: what a chunk earned, at the
        last number of it that was carried out."""
        chunks, slots = data.batch["responses"].shape[1:]
        tokens = int(get(_at(self.config, "actor_rollout_ref", "model"), "action_token_len", 7))
        found = torch.zeros(len(data), chunks * slots)
        for row, steps in enumerate(data.batch["finish_step"].tolist()):
            # actions up to each chunk's end
            ends = np.arange(slots // tokens, steps + slots // tokens, slots // tokens).clip(max=steps)
            executed, success = np.diff(ends, prepend=0), bool(data.batch["acc"][row])
            ill_formed = "" if data.batch["format_correctness"][row] else "an ill-formed chunk"
            none = np.zeros(len(ends), np.float32)
            episode = RolloutEpisode(
                Start("", "train", 0, 0), {}, executed, none, success, steps, not success, 0, b"", ill_formed
            )
            found[row, ends * tokens - 1] = torch.from_numpy(reward_of(episode, rewards))
        return found.to(data.batch["acc"].device)


def compute_advantage(
    data: Batch, gamma: float = 1.0, lam: float = 1.0, adv_estimator: str = "grpo", config: object = None
) -> Batch:
    """Adds `advantages` and `returns` [B, T], of `token_level_rewards` (or
    ``gt_scores``) [B, T] and the groups of ``uid``, in place.

    `config`, the whole tree, has ``action_token_len``; without it an action has 7 numbers. The estimators are ours
    (`hilt.algos.advantage`), chunk by chunk: all numbers of a chunk have the advantage of that chunk.
    """
    given = data.batch["token_level_rewards" if "token_level_rewards" in data.batch else "gt_scores"]
    rows, chunks, slots = data.batch["responses"].shape
    rewards = given.view(rows, chunks, slots).sum(2).double()
    tokens = int(get(_at(config, "actor_rollout_ref", "model"), "action_token_len", 7))
    # [B, S, slots]
    done = torch.arange(chunks * slots).view(chunks, slots) < (data.batch["finish_step"] * tokens)[:, None, None]
    uids = {uid: number for number, uid in enumerate(dict.fromkeys(data.non_tensor_batch["uid"].tolist()))}
    group = torch.tensor([uids[uid] for uid in data.non_tensor_batch["uid"].tolist()])
    values = data.batch["values"].view(rows, chunks, slots)[..., 0].double() if "values" in data.batch else None
    settings = PolicyGradient(estimator=adv_estimator, discount=gamma, lam=lam)
    baseline = data.batch["reward_baselines"].double() if "reward_baselines" in data.batch else None
    found = advantages(settings, rewards, done.any(2), group, values, baseline)
    for name, each in zip(("advantages", "returns"), found, strict=True):
        data.batch[name] = (each[..., None].expand_as(done) * done).float().flatten(1)
    return data


class RayTrainer:
    """The whole run: dataloaders as there, and `fit`, which is our post-training with this tree of settings."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Mapping[Any, Any] | None = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
    ):
        """`config` is the whole tree; ``config.hilt`` may have settings of ours. The tokenizer is the checkpoint's own
        (`init_workers` compares the given one with it), and the ranks and their workers are Hilt's: other arguments are
        only accepted if they agree with them."""
        for role, worker in (role_worker_mapping or {}).items():
            name, ray = getattr(role, "name", str(role)), getattr(worker, "__ray_metadata__", None)
            found = ray.class_name if ray is not None else getattr(worker, "__name__", repr(worker))
            if name in WORKERS and found != WORKERS[name].__name__:
                raise ConfigError(
                    f"role_worker_mapping has {found} for {name}: give {WORKERS[name].__name__}, or no mapping."
                )
        for name, given in (("reward_fn", reward_fn), ("val_reward_fn", val_reward_fn)):
            if given is not None and not isinstance(given, RobRewardManager):
                raise ConfigError(
                    f"{name} is {given!r}: episodes are rewarded where they are made, by rewards.* of ours; "
                    "give a RobRewardManager. A learned reward is reward_model.rm_type=normal."
                )
        if resource_pool_manager is not None:
            pools = [sorted(gpus) for gpus in resource_pool_manager.resource_pool_spec.values()]
            asked = [int(config.trainer.n_gpus_per_node)] * int(get(config.trainer, "nnodes", 1))
            if pools != [asked]:
                raise ConfigError(
                    f"resource_pool_manager has {pools} and trainer asks for {[asked]} GPUs of "
                    "each machine: give these."
                )
        if ray_worker_group_cls is not None:
            raise ConfigError(
                "ray_worker_group_cls would do nothing: ranks are our processes, or actors of Ray. Leave it out."
            )
        self.config, self.tokenizer = config, tokenizer
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self._run: Any = None
        self._create_dataloader()

    def _create_dataloader(self) -> None:
        """`train_dataset`, `val_dataset`, their dataloaders, and
        `total_training_steps` in the settings of the optimizers."""
        data = self.config.data
        name = str(data.task_suite_name)
        if "libero" not in name and "robotwin" not in name:
            raise UnknownSuiteError("task suite", name, suites(), all_listed=True)
        dataset: Any = LIBERO_Dataset if "libero" in name else Robotwin_Dataset
        trials = int(get(data, "num_trials_per_task", 50))
        self.train_dataset, self.val_dataset = (
            dataset(name, num_trials_per_task=trials, train_val=part) for part in ("train", "valid")
        )
        drawn = int(data.train_batch_size * get(data, "oversample_factor", 1))
        options: dict[str, Any] = {"shuffle": True, "drop_last": True, "collate_fn": collate_fn}
        self.train_dataloader = BufferedDataLoader(DataLoader(self.train_dataset, batch_size=drawn, **options))
        self.val_dataloader = DataLoader(self.val_dataset, batch_size=int(data.val_batch_size), **options)
        for key, loader, rows in (
            ("train", self.train_dataloader, self.train_dataset),
            ("val", self.val_dataloader, self.val_dataset),
        ):
            if not len(loader):
                raise ConfigError(
                    f"data.{key}_batch_size={loader.batch_size}, and {name} has {len(rows)} rows: give at most as many."
                )
        self.total_training_steps = len(self.train_dataloader) * int(get(self.config.trainer, "total_epochs", 30))
        if OmegaConf.is_config(self.config):
            with open_dict(self.config):
                self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps
                if "critic" in self.config:
                    self.config.critic.optim.total_training_steps = self.total_training_steps

    def init_workers(self) -> None:
        """Looks whether the run can start: settings, checkpoint and its tokenizer,
        simulator, device. `fit` starts the ranks."""
        self._run = run_of(self.config)
        self._run.config.check()
        if self.tokenizer is not None:
            _check_tokenizer(self.tokenizer, self._run.config.policy)

    def fit(self) -> TrainSummary:
        """Collects, filters, updates, validates and saves, in
        ``trainer.default_local_dir``; a run that is there goes on."""
        if self._run is None:
            self.init_workers()
        run = self._run
        for line in run.lines:
            logger.info("%s", line)
        config = (
            resume_run(run.folder, "simplevla", ())
            if is_run(run.folder)
            else begin_run(run.folder, "simplevla", run.config)
        )
        # its processes inherit it
        with environment({name: os.environ.get(name, value) for name, value in run.environment.items()}):
            return train(config, run.folder, notify=lambda text: logger.info("%s", text))


def _check_tokenizer(given: Any, checkpoint: str) -> None:
    """Whether it writes a prompt as the checkpoint's own does, which is the one that the ranks use."""
    cure = f"Give the tokenizer of {checkpoint} (hf_tokenizer of that folder), or leave it out."
    text, own = openvla_prompt(SENTENCE), load_tokenizer(checkpoint)
    if isinstance(given, str) or not callable(getattr(given, "encode", None)):
        raise ConfigError(f"tokenizer is {given!r}: expected a tokenizer with encode(text). {cure}")
    encoded = given.encode(text)
    ids = list(getattr(encoded, "ids", encoded))
    if ids and ids[-1] == getattr(given, "eos_token_id", None):
        ids.pop()
    if ids != own.encode(text):
        raise ConfigError(
            f"tokenizer={type(given).__name__} writes a prompt in other ids than the checkpoint's own would. {cure}"
        )


def _at(config: Any, *names: str) -> Any:
    """A part of a tree; an empty one where it has none."""
    for name in names:
        config = get(config, name, {}) if config is not None else {}
    return config if config is not None else {}
