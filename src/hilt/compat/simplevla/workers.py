"""SimpleVLA-RL's workers, actor and critic, over our policies, our update and our
checkpoints. Each lives in the process that makes it.

    worker = RobActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout_ref")
    worker.init_model()
    data = worker.generate_sequences(prompts)          # rollouts, with old_log_probs
    data.batch["advantages"] = ...                     # `compute_advantage`
    metrics = worker.update_actor(data).meta_info["metrics"]

`RayTrainer.fit` and `hilt train simplevla` do the same with many ranks, filters, validation, checkpoints and resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.algos.config import Optimizer, PolicyGradient
from hilt.algos.surrogate import value_loss
from hilt.compat.simplevla.batch import Batch
from hilt.compat.simplevla.batches import by_chunk, by_token, episodes_of
from hilt.compat.simplevla.hf_rollout import RobHFRollout, get
from hilt.compat.simplevla.script_settings import tree_of, worker_run_of
from hilt.core.errors import ConfigError, MissingFieldError, UnknownNameError
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.policies.base import Policy, join, select
from hilt.policies.copies import ReferencePolicy
from hilt.policies.float8 import SAME
from hilt.vla.config import Vla
from hilt.vla.episode import RolloutEpisode
from hilt.vla.exports import save_checkpoint
from hilt.vla.update import Updater
from hilt.vla.worker import attach_adapters, first_policy

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")
METRICS = {"policy_loss": "pg_loss", "clip_fraction": "pg_clipfrac", "ppo_kl": "ppo_kl", "gradient_norm": "grad_norm"}
"""Our figures of an update by the names that they have there, behind ``actor/``"""


class RobActorRolloutRefWorker:
    """A policy that acts (rollout), learns (actor), and is compared with itself as
    it was at the start (ref), by its `role`."""

    def __init__(self, config: Any, role: str = "actor_rollout_ref"):
        """`config` is ``actor_rollout_ref``; ``config.hilt`` may have settings of ours."""
        if role not in ROLES:
            raise UnknownNameError("role", role, ROLES)
        self.config, self.role = config, role
        self._is_actor, self._is_rollout, self._is_ref = (part in role for part in ("actor", "rollout", "ref"))

    def init_model(self) -> None:
        """Loads the checkpoint, with adapters where ``model.lora_rank`` asks for them."""
        self.settings = _one_process(worker_run_of("actor_rollout_ref", self.config).config)
        self.actor_module = first_policy(self.settings, {})
        attach_adapters(self.actor_module, self.settings)
        if self._is_ref:
            offload = bool(get(get(get(self.config, "ref", {}), "fsdp_config", {}), "param_offload", False))
            self.ref_module = ReferencePolicy(self.actor_module, offload)
        if self._is_actor:
            self.actor = RobDataParallelPPOActor(self.settings, self.actor_module)
        if self._is_rollout:
            self.rollout = RobHFRollout(
                self.actor_module,
                self.config.rollout,
                self.settings.pool.workers,
                self.settings.task_options,
                self.settings.seed,
            )

    def generate_sequences(self, prompts: Batch) -> Batch:
        """`RobHFRollout.generate_sequences`; as an actor with `old_log_probs` computed anew,
        unless ``recompute_log_prob`` is False."""
        self._check(self._is_rollout, "rollout")
        output = self.rollout.generate_sequences(prompts)
        if self._is_actor and prompts.meta_info.get("recompute_log_prob", True):
            output.batch["old_log_probs"] = self.actor.compute_log_prob(output)
        return output.to("cpu")

    def update_actor(self, data: Batch) -> Batch:
        """One update from `advantages` and `old_log_probs`; ``meta_info["metrics"]`` has its figures."""
        self._check(self._is_actor, "actor")
        return Batch({}, meta_info={"metrics": self.actor.update_policy(data)})

    def compute_ref_log_prob(self, data: Batch) -> Batch:
        """`ref_log_prob` [B, T]: the log-probabilities of the policy as it was at the
        start; 0 where nothing was carried out."""
        self._check(self._is_ref, "ref")
        episodes = episodes_of(data, self.actor_module, temperature_of(data, self.settings))
        return Batch({"ref_log_prob": log_probs(self.ref_module, episodes, data, rows_of(self.settings.algorithm))})

    def compute_entropy(self, data: Batch) -> Batch:
        """``meta_info["metrics"]`` has the mean entropy of the numbers that were carried
        out, in nats, under the policy of now."""
        self._check(self._is_actor, "actor")
        return Batch({}, meta_info={"metrics": {"actor_after/entropy_loss_eval": self.actor.compute_entropy(data)}})

    def save_checkpoint(self, local_path: str, hdfs_path: str | None = None) -> None:
        """A complete folder: with adapters these alone in ``lora_adapter`` and merged;
        `hdfs_path`, any URL of fsspec, gets a copy."""
        save_checkpoint(self.actor_module, local_path, hdfs_path)

    def close(self) -> None:
        """Ends the simulators."""
        if hasattr(self, "rollout"):
            self.rollout.close()

    def _check(self, is_one: bool, part: str) -> None:
        if not is_one:
            raise ConfigError(
                f"this worker has the role {self.role!r}, which is no {part}: make one with role='actor_rollout_ref'."
            )
        if not hasattr(self, "actor_module"):
            raise ConfigError("this worker has no model yet: call init_model() first.")


class RobDataParallelPPOActor:
    """The update of a policy from advantages that come with the data, by our `Updater`."""

    def __init__(self, config: Any, actor_module: Any, actor_optimizer: torch.optim.Optimizer | None = None):
        """`config` is ``actor_rollout_ref.actor``. Of a torch optimizer its rate,
        betas and decay are taken, for our AdamW."""
        if (precision := getattr(actor_module, "rollout_precision", SAME)) != SAME:
            raise ConfigError(
                f"rollout_precision={precision}: this actor learns from log-probabilities that come with the data, and "
                "nothing corrects for another precision of acting. Leave it out, or train with `hilt train simplevla`."
            )
        if not isinstance(config, Vla):
            model = {"path": str(actor_module.source or "policy"), "action_chunks_len": actor_module.chunk}
            tree = {"actor": tree_of(config), "model": {**model, "action_token_len": actor_module.action_dim}}
            config = _one_process(worker_run_of("actor_rollout_ref", tree).config)
        self.settings, self.actor_module = config, actor_module
        batch = replace(config.algorithm.batch, log_prob_chunks_per_pass=0)
        # log-probabilities come with the data
        learning = replace(config.algorithm, recompute_log_prob=False, batch=batch)
        self._trainee = DataParallelOptimizer(actor_module, _optimizer(config.optimizer, actor_optimizer))
        self._updater = Updater(learning, self._trainee, seed=config.seed)

    def compute_log_prob(self, data: Batch) -> Tensor:
        """float32 [B, T], 0 where nothing was carried out."""
        episodes = episodes_of(data, self.actor_module, temperature_of(data, self.settings))
        return log_probs(self.actor_module, episodes, data, rows_of(self.settings.algorithm))

    def compute_entropy(self, data: Batch) -> float:
        """The mean over the numbers that were carried out, in nats."""
        episodes = episodes_of(data, self.actor_module, temperature_of(data, self.settings))
        found = judged(self.actor_module, episodes, rows_of(self.settings.algorithm), "entropy")
        done = [mask_of(episode, self.actor_module) for episode in episodes]
        return float(np.concatenate([values[mask] for values, mask in zip(found, done, strict=True)]).mean())

    def update_policy(self, data: Batch) -> dict[str, float]:
        """`ppo_epochs` over the trajectories, `ppo_mini_batch_size` in each step of the
        optimizer; figures by the names there."""
        for name in ("advantages", "old_log_probs"):
            if name not in data.batch:
                raise MissingFieldError(
                    f"the data has no {name!r}, which an update needs; it has {', '.join(data.batch)}."
                )
        episodes = episodes_of(data, self.actor_module, temperature_of(data, self.settings))
        given = by_chunk("advantages", data.batch["advantages"], episodes, self.actor_module)
        progress = min(1.0, (self._updater.updates + 1) / max(self.settings.max_steps, 1))
        figures = self._updater.update(
            episodes, [np.zeros(e.rows, np.float32) for e in episodes], progress=progress, given=given
        )
        metrics = {f"actor/{there}": figures[ours] for ours, there in METRICS.items() if ours in figures}
        return metrics | {"actor/lr(1e-4)": figures["learning_rate"] * 1e4} if "learning_rate" in figures else metrics


class CriticWorker:
    """A critic: a policy of its own with a value head, begun from the checkpoint of the actor."""

    def __init__(self, config: Any):
        """`config` is ``critic``; ``config.hilt`` may have settings of ours."""
        self.config = config

    def init_model(self) -> None:
        run = worker_run_of("critic", self.config, **{"algorithm.adv_estimator": "gae"})
        self.settings = _one_process(run.config)
        self.critic_module = first_policy(self.settings, {}, value="shared")
        attach_adapters(self.critic_module, self.settings)
        self.critic = DataParallelPPOCritic(self.settings, self.critic_module)

    def compute_values(self, data: Batch) -> Batch:
        """`values` [B, T]: for each token that of its chunk; 0 where nothing was carried out."""
        return Batch({"values": self.critic.compute_values(data)})

    def update_critic(self, data: Batch) -> Batch:
        """One update from `returns` and `values`; ``meta_info["metrics"]`` has its figures."""
        return Batch({}, meta_info={"metrics": self.critic.update_critic(data)})

    def save_checkpoint(self, local_path: str, hdfs_path: str | None = None) -> None:
        save_checkpoint(self.critic_module, local_path, hdfs_path)


class DataParallelPPOCritic:
    """The update of a critic by the clipped value loss of `hilt.algos.surrogate`."""

    def __init__(self, config: Any, critic_module: Any, critic_optimizer: torch.optim.Optimizer | None = None):
        """`config` is ``critic``; `critic_module` is a policy with a value head. An
        optimizer is taken as the actor's is."""
        if not isinstance(config, Vla):
            tree = tree_of(config)
            tree["model"] = {"path": str(critic_module.source or "policy"), **tree.get("model", {})}
            more = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.model.action_chunks_len": critic_module.chunk}
            config = _one_process(worker_run_of("critic", tree, **more).config)
        if critic_module.value_head is None:
            raise ConfigError("critic_module has no value head: open it with value_head=True.")
        self.settings, self.critic_module = config, critic_module
        self._trainee, self._updates = (
            DataParallelOptimizer(critic_module, _optimizer(config.critic.optimizer, critic_optimizer)),
            0,
        )

    def compute_values(self, data: Batch) -> Tensor:
        """float32 [B, T]: for each token the value of its chunk; 0 where nothing was carried out."""
        episodes = episodes_of(data, self.critic_module)
        values = judged(self.critic_module, episodes, rows_of(self.settings.algorithm), "value")
        found = [
            np.where(mask_of(e, self.critic_module), each[:, None, None], 0)
            for e, each in zip(episodes, values, strict=True)
        ]
        return by_token(found, data.batch["responses"].flatten(1).shape[1])

    def update_critic(self, data: Batch) -> dict[str, float]:
        """`ppo_epochs` over the trajectories, `ppo_mini_batch_size` in each optimizer step:
        0.5 max((v - R)^2, (clipped v - R)^2)."""
        algorithm, episodes = self.settings.algorithm, episodes_of(data, self.critic_module)
        columns = [by_chunk(name, data.batch[name], episodes, self.critic_module) for name in ("values", "returns")]
        progress, size = (
            min(1.0, (self._updates + 1) / max(self.settings.max_steps, 1)),
            algorithm.batch.trajectories_per_step,
        )
        losses, norms = list[float](), list[float]()
        self.critic_module.train()
        for _ in range(algorithm.epochs):
            for low in range(0, len(episodes), size or len(episodes)):
                chosen = slice(low, low + (size or len(episodes)))
                record = join([e.record for e in episodes[chosen] if e.rows])
                old, returns = (
                    torch.from_numpy(np.concatenate(column[chosen])).to(self.critic_module.device) for column in columns
                )
                for part in range(0, len(old), rows := algorithm.batch.chunks_per_pass):
                    value = self.critic_module.evaluate(select(record, slice(part, part + rows))).value
                    loss, _ = value_loss(
                        value, old[part : part + rows], returns[part : part + rows], algorithm.value_clip
                    )
                    self._trainee.backward(loss.sum() / len(old))
                    losses.append(float(loss.detach().sum()) / len(old))
                norms.append(self._trainee.step(progress)["gradient_norm"])
                self._trainee.clear()
        self._updates += 1
        self.critic_module.eval()
        return {"critic/vf_loss": sum(losses) / len(norms), "critic/grad_norm": sum(norms) / len(norms)}

    update_policy = update_critic


# --- what they share ---


def judged(module: Policy, episodes: Sequence[RolloutEpisode], rows: int, name: str) -> list[np.ndarray]:
    """`log_prob`, `entropy` or `value` of the chunks of each episode, under a policy of now, without gradients."""

    def parts(episode: RolloutEpisode) -> Iterator[np.ndarray]:
        for low in range(0, episode.rows, rows):
            yield getattr(module.evaluate(select(episode.record, slice(low, low + rows))), name).float().cpu().numpy()

    module.eval()
    with torch.no_grad():
        return [np.concatenate([*parts(episode)]) for episode in episodes]


def log_probs(module: Any, episodes: Sequence[RolloutEpisode], data: Batch, rows: int) -> Tensor:
    """float32 [B, T] as there: 0 where nothing was carried out."""
    policy = getattr(module, "module", module)
    found = [
        np.where(mask_of(e, policy), values, 0)
        for e, values in zip(episodes, judged(module, episodes, rows, "log_prob"), strict=True)
    ]
    return by_token(found, data.batch["responses"].flatten(1).shape[1])


def mask_of(episode: RolloutEpisode, policy: Policy) -> np.ndarray:
    """bool [rows, chunk, action_dim]: what was carried out."""
    done = np.arange(policy.chunk) < episode.executed[:, None]
    return np.repeat(done[..., None], policy.action_dim, axis=-1)


def rows_of(algorithm: PolicyGradient) -> int:
    """Chunks that go through a policy together where no gradient is taken."""
    return algorithm.batch.log_prob_chunks_per_pass or algorithm.batch.chunks_per_pass


def temperature_of(data: Batch, settings: Vla) -> float:
    """That of the rollout, which `generate_sequences` leaves in the data."""
    return float(data.meta_info.get("temperature", settings.collect.temperature))


def _optimizer(settings: Optimizer, given: torch.optim.Optimizer | None) -> Optimizer:
    if given is None:
        return settings
    group = given.param_groups[0]
    if missing := [name for name in ("betas", "weight_decay") if name not in group]:
        raise ConfigError(
            f"{type(given).__name__} has no {', '.join(missing)}: AdamW is what moves the weights; give one, or none."
        )
    return replace(
        settings,
        learning_rate=float(group["lr"]),
        betas=list(group["betas"]),
        weight_decay=float(group["weight_decay"]),
    )


def _one_process(settings: Vla) -> Vla:
    if settings.sharding.enabled:
        raise ConfigError(
            "fsdp_config's param_offload, grad_offload and optimizer_offload need ranks that share the weights, "
            "which RayTrainer.fit() and `hilt train simplevla` have: give False to a worker of your own."
        )
    return settings.settled()
