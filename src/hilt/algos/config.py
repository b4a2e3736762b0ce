"""The settings of the algorithms. This module does not import torch, so that commands that only read settings are fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from hilt.algos.tables import estimator, policy_loss
from hilt.core.errors import ConfigError, UnknownNameError

IMITATION_LOSSES = ("nll", "mse")
GROUPED = ("grpo", "dr_grpo", "rloo")
"""The built-in estimators that compare the members of a group"""
CLIPPING = ("clip_low", "clip_high", "dual_clip")
CHOICES = {
    "normalize": ("auto", "none", "group", "batch"),
    "reduction": ("token_mean", "trajectory_mean", "trajectory_sum"),
    "ratio": ("token", "action", "chunk"),
    "where": ("none", "reward", "loss"),
    "estimate": ("kl", "abs", "mse", "low_var_kl"),
    "controller": ("fixed", "adaptive"),
    "schedule": ("constant", "cosine"),
    "granularity": ("chunk", "token", "whole"),
    "scale": ("batch", "none"),
    "update": ("after", "before", "none"),
    "reference": ("frozen", "policy"),
}


@dataclass
class Rlpd:
    """Soft actor-critic as HIL-SERL has it, with RLPD's options; the formulas are in `hilt.algos.rlpd`."""

    discount: float = 0.97
    """What a reward one step later is worth"""
    tau: float = 0.005
    """Share of the critics that their slow copies take over at each update"""
    critics: int = 2
    """How many critics"""
    subset: int = 0
    """The number of critics whose minimum is the target, drawn for each update; 0: all"""
    learning_rate: float = 3e-4
    """Of every network's own Adam"""
    temperature: float = 0.01
    """Weight of the entropy at the start; it is learned from there"""
    target_entropy: float | None = None
    """Where the temperature steers the entropy, in nats; none: minus half the number of continuous actions"""
    backup_entropy: bool = False
    """Whether the critics' target counts the entropy too"""
    reward_bias: float = 0.0
    """Added to every reward before any loss"""
    target_range: list[float] | None = None
    """The critics' target is kept within [low, high]; none: as it comes"""
    actor_q: str = "mean"
    """What the actor climbs: the "mean" of the critics, or their "min"imum"""
    actor_average: float = 0.0
    """Share of the actor that its slow copy, the one that is evaluated, takes over at each update; 0: there is none"""
    critic_warmup: int = 0
    """The number of first updates of the actor that imitate demonstrations instead of maximizing Q"""
    imitation_weight: float = 0.0
    """Weight of imitating demonstrations beside climbing Q, at the start"""
    imitation_updates: int = 0
    """The number of updates of the actor over which it fades to 0; 0: it is constant"""
    imitation_loss: str = "nll"
    """What imitating means: "nll", the actions are made likely, or "mse", the actor's mean comes near to them"""
    grasp_margin: float = 0.1
    """By how much a learned gripper's shown move should be worth more than others, when it is imitated"""
    random_crop: int = 4
    """The maximum random shift of images in each update, in pixels; 0: none"""
    feature_noise: float = 0.0
    """Deviation of the noise on what a frozen encoder made of the images, in each update; its numbers are from -1 to 1"""


def check(settings: Rlpd) -> None:
    """Refuse what cannot work, with a sentence."""
    rules = (
        ("discount", 0 <= settings.discount <= 1, "a number from 0 to 1"),
        ("tau", 0 < settings.tau <= 1, "above 0 and at most 1"),
        ("critics", settings.critics >= 1, "at least 1"),
        ("subset", 0 <= settings.subset <= settings.critics, "0 for all, or at most as many as there are critics"),
        ("learning_rate", settings.learning_rate >= 0, "0 or more"),
        ("temperature", settings.temperature > 0, "above 0"),
        ("actor_average", 0 <= settings.actor_average <= 1, "a number from 0 to 1"),
        ("critic_warmup", settings.critic_warmup >= 0, "0 or more"),
        ("imitation_weight", settings.imitation_weight >= 0, "0 or more"),
        ("imitation_updates", settings.imitation_updates >= 0, "0 or more"),
        ("random_crop", settings.random_crop >= 0, "0 or more pixels"),
        ("feature_noise", settings.feature_noise >= 0, "0 or more"),
    )
    for name, fits, wanted in rules:
        if not fits:
            raise ConfigError(f"rlpd.{name} is {getattr(settings, name)}; expected {wanted}.")
    bounds = settings.target_range
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ConfigError(f"rlpd.target_range is {bounds}; expected [low, high] with low < high, or none.")
    if settings.actor_q not in ("mean", "min"):
        raise UnknownNameError("actor_q", settings.actor_q, ("mean", "min"))
    if settings.imitation_loss not in IMITATION_LOSSES:
        raise UnknownNameError("imitation loss", settings.imitation_loss, IMITATION_LOSSES)


# --- on-policy: a vision-language-action policy learns from its own rollouts; every formula is in docs/algorithms.md ---


@dataclass
class Kl:
    """How far the policy may go from a reference, which is the policy as it was at the start."""

    where: str = "none"
    """What pays for the distance: the "reward" of each chunk, the "loss", or "none" """
    estimate: str = "kl"
    """Of the divergence, from log-probabilities: "kl" and "abs" (its size), "mse" (half its square), "low_var_kl" (never below 0)"""
    coefficient: float = 0.001
    """What one nat costs; with the adaptive controller, at the start"""
    controller: str = "fixed"
    """The coefficient stays "fixed", or is "adaptive": it follows the divergence to `target`"""
    target: float = 6.0
    """Of "adaptive": nats for each number of an action"""
    horizon: int = 10_000
    """Of "adaptive": trajectories over which the coefficient can change by a fifth"""

    def check(self) -> None:
        _known(self, "where", "estimate", "controller")
        _within(self, "algorithm.kl", coefficient=(0, 1e6), target=(1e-9, 1e6), horizon=(1, 1e12))
        on, adaptive = ("kl.where=reward or loss", self.where != "none"), ("kl.controller=adaptive", self.controller == "adaptive")
        others = dict.fromkeys(("estimate", "coefficient", "controller"), on)
        _effective(self, {**others, "target": adaptive, "horizon": adaptive}, "kl.")
        if self.where == "loss" and self.estimate == "kl":
            raise ConfigError(
                "kl.estimate=kl in the loss has a gradient that is 0 on average. Give mse, whose gradient is on average that of the "
                "divergence KL(p || p_ref); that of low_var_kl is KL(p_ref || p)'s."
            )


@dataclass
class Batching:
    """How the trajectories of an update become steps of the optimizer, and passes through the policy."""

    trajectories_per_step: int = 0
    """Trajectories of all ranks together in one step of the optimizer; 0: all, one step in each epoch"""
    chunks_per_pass: int = 64
    """Chunks that go through the policy together, at each rank; fewer need less memory, and give the same gradient"""
    tokens_per_pass: int = 0
    """Instead: as many chunks as have no more tokens than this, those of the prompt and the action counted; 0: chunks_per_pass"""
    log_prob_chunks_per_pass: int = 0
    """Chunks that go together where no gradient is taken: reference, separate critic, recomputed log-probabilities; 0: chunks_per_pass"""
    shuffle: bool = True
    """Trajectories are dealt to the steps of each epoch anew; without: in their order"""

    def check(self) -> None:
        bounds = dict.fromkeys(("trajectories_per_step", "tokens_per_pass", "log_prob_chunks_per_pass"), (0, 1e12))
        _within(self, "algorithm.batch", **bounds, chunks_per_pass=(1, 1e12))
        instead = ("tokens_per_pass=0, which counts instead of it", not self.tokens_per_pass)
        steps = ("trajectories_per_step=N: there is one step, of all", self.trajectories_per_step > 0)
        _effective(self, {"chunks_per_pass": instead, "shuffle": steps}, "batch.")


@dataclass
class PolicyGradient:
    """How a policy learns from its own rollouts: advantages of chunks, and a clipped surrogate of numbers, actions or chunks."""

    estimator: str = "grpo"
    """Of advantages: grpo, dr_grpo, rloo (compare the members of a group), reinforce_plus_plus, remax (a greedy rollout), gae (a critic);
    or another by name or module:Class"""
    discount: float = 1.0
    """What a reward one chunk later is worth"""
    lam: float = 1.0
    """Of gae: 1 trusts returns, 0 trusts the critic"""
    normalize: str = "auto"
    """Advantages: "none", over the deviation of their "group", or whitened over the "batch"; "auto": as the estimator is published"""
    clip_low: float = 0.2
    """A ratio below 1 - clip_low gains nothing more"""
    clip_high: float = 0.28
    """Nor one above 1 + clip_high"""
    dual_clip: float = 0.0
    """What went badly costs as if its ratio were this at most, above 1; 0: whatever its ratio is"""
    entropy: float = 0.0
    """What a nat of entropy of each number earns in the loss"""
    epochs: int = 1
    """How often each trajectory is learned from"""
    target_kl: float = 0.0
    """An update ends before a step in which the policy is further than this (ppo_kl, in nats) from the one that collected; 0: never"""
    reduction: str = "trajectory_mean"
    """How terms become a loss: "token_mean": each counts the same; "trajectory_mean": each trajectory; "trajectory_sum": a long one more"""
    horizon: int = 1000
    """Of "trajectory_sum": terms that a trajectory's sum is divided by"""
    ratio: str = "token"
    """What one ratio is of: a "token" (one number of an action), an "action", or a "chunk" """
    loss: str = "clipped"
    """What is minimized: clipped, PPO's surrogate of the ratio; or another one by name or module:Class"""
    value_coefficient: float = 0.5
    """Of gae: weight of the critic's loss where the policy has its value head"""
    value_clip: float = 0.5
    """Of gae: how far a value may move in an update before it gains nothing more; 0: any way"""
    recompute_log_prob: bool = False
    """Ratios begin with log-probabilities that are computed anew before an update; those of the rollout give each term a weight"""
    importance_cap: float = 2.0
    """Of recompute_log_prob: the weight, p before the update / p of the rollout, is truncated at this (decoupled PPO)"""
    kl: Kl = field(default_factory=Kl)
    batch: Batching = field(default_factory=Batching)

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        _known(self, "normalize", "reduction", "ratio")
        chosen, loss = estimator(self.estimator), policy_loss(self.loss)
        share: tuple[float, float] = (0, 1)
        _within(self, "algorithm", discount=share, lam=share, clip_low=share, clip_high=(0, 1e6), dual_clip=(0, 1e6))
        _within(self, "algorithm", entropy=(-1e6, 1e6), epochs=(1, 1e6), horizon=(1, 1e12), value_coefficient=(0, 1e6), value_clip=(0, 1e6))
        _within(self, "algorithm", importance_cap=(1, 1e6), target_kl=(0, 1e6))
        if 0 < self.dual_clip <= 1:
            raise ConfigError(f"algorithm.dual_clip is {self.dual_clip:g}; expected above 1, such as 3, or 0 for none.")
        if self.normalize == "group" and not chosen.grouped:
            raise ConfigError(f"algorithm.normalize=group: {self.estimator} has no groups; take batch, or one of {', '.join(GROUPED)}.")
        if chosen.needs_greedy and self.discount != 1:
            why = f"{self.estimator} compares whole scores with a greedy episode's"
            raise ConfigError(f"algorithm.discount is {self.discount:g}; {why}: expected 1.")
        critic = ("estimator=gae, or another with a critic", chosen.needs_critic)
        needs = dict.fromkeys(("lam", "value_coefficient", "value_clip"), critic)
        needs |= {name: (f"a loss that reads it; loss={self.loss} does not", name in loss.uses) for name in CLIPPING}
        needs["importance_cap"] = ("recompute_log_prob=true", self.recompute_log_prob)
        needs |= {"horizon": ("reduction=trajectory_sum", self.reduction == "trajectory_sum")}
        several = self.epochs > 1 or self.batch.trajectories_per_step > 0
        _effective(self, {**needs, "target_kl": ("several steps in an update, epochs=2 or batch.trajectories_per_step=N", several)})
        self.kl.check()
        self.batch.check()
        first = self.kl.where != "none" or self.recompute_log_prob or chosen.needs_critic
        if self.batch.log_prob_chunks_per_pass and not first:
            raise ConfigError(
                f"batch.log_prob_chunks_per_pass={self.batch.log_prob_chunks_per_pass} would do nothing: it needs kl.where, "
                "recompute_log_prob=true or estimator=gae. Give one, or leave it out."
            )


@dataclass
class Optimizer:
    """AdamW, and how fast it goes."""

    learning_rate: float | None = None
    """At its highest; none, in a run: by what is trained, 3e-4 for a small_vla, 1e-4 for adapters, 5e-6 for all of another"""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """How much of the mean gradient, and of the mean square, is kept at each step"""
    weight_decay: float = 0.01
    """Share of each weight that goes, times the learning rate, at each step"""
    gradient_clip: float = 1.0
    """The longest that a gradient may be; 0: as long as it is"""
    warmup_ratio: float = 0.0
    """Share of the run in which the learning rate rises from 0"""
    schedule: str = "constant"
    """What follows: constant; or cosine, which falls until the end of the run"""
    min_lr_ratio: float = 0.0
    """Where cosine ends, as a share of the highest"""

    def check(self) -> None:
        _known(self, "schedule")
        share: tuple[float, float] = (0, 1)
        rate = ("learning_rate",) if self.learning_rate is not None else ()
        _within(self, "optimizer", **dict.fromkeys((*rate, "warmup_ratio", "min_lr_ratio"), share))
        _within(self, "optimizer", weight_decay=(0, 10), gradient_clip=(0, 1e12))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas}; expected two numbers from 0 to below 1, such as [0.9, 0.999].")
        _effective(self, {"min_lr_ratio": ("schedule=cosine", self.schedule == "cosine")})


@dataclass
class Prime:
    """PRIME's implicit process reward, from a reward policy that learns from outcomes; the formulas are in `hilt.algos.prime`."""

    coefficient: float = 0.0
    """Of the process reward, beside the others; 0: there is none"""
    beta: float = 0.05
    """What a nat of the log-ratio counts, in the log-odds of success and, with scale=none, in the reward"""
    granularity: str = "chunk"
    """What is rewarded: each "chunk", each "token" (one number of an action), or the "whole" episode at its end"""
    scale: str = "batch"
    """"batch": log-ratios over the largest return of the batch, where that is above 1; "none": beta times the log-ratio"""
    update: str = "after"
    """The reward policy learns from the outcomes of a step "after" it gave rewards for it, "before", or not at all ("none")"""
    policy: str = ""
    """The folder that the reward policy begins from; empty: it begins as the policy does"""
    reference: str = "frozen"
    """What the log-ratio is to: a "frozen" policy, or the "policy" that is trained, as it was before the update"""
    reference_policy: str = ""
    """Of "frozen": its folder; empty: the policy as it was at the start"""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(weight_decay=0.0))
    """Of the reward policy. Its learning rate, where none is given, is the policy's"""

    def check(self) -> None:
        _known(self, "granularity", "scale", "update", "reference")
        _within(self, "prime", coefficient=(0, 1e6), beta=(1e-9, 1e6))
        on, learns = ("prime.coefficient above 0", self.coefficient > 0), ("prime.update=after or before", self.update != "none")
        names = ("beta", "granularity", "scale", "update", "policy", "reference", "reference_policy", "optimizer")
        _effective(self, dict.fromkeys(names, on), "prime.")
        counts = (f"{learns[0]} or prime.scale=none", learns[1] or self.scale == "none")
        frozen = ("prime.reference=frozen", self.reference == "frozen")
        _effective(self, {"optimizer": learns, "beta": counts, "reference_policy": frozen}, "prime.")
        if self.coefficient and self.update == "none" and self.policy == self.reference_policy and self.reference == "frozen":
            raise ConfigError(
                "prime.update=none and a reward policy that is its own reference: every reward would be 0. Give prime.update=after, or "
                "prime.policy=FOLDER, one that was trained before."
            )
        self.optimizer.check()


def _known(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) not in CHOICES[name]:
            raise UnknownNameError(name, getattr(settings, name), CHOICES[name])


def _within(settings: Any, section: str, **bounds: tuple[float, float]) -> None:
    for name, (low, high) in bounds.items():
        if not low <= getattr(settings, name) <= high:
            raise ConfigError(f"{section}.{name} is {getattr(settings, name):g}; expected a number from {low:g} to {high:g}.")


def _effective(settings: Any, needs: Mapping[str, tuple[str, bool]], section: str = "") -> None:
    """Raises for a field that is not its default and would do nothing. `needs`: what each needs, and whether it is there."""
    for each in fields(settings):
        needed, there = needs.get(each.name, ("", True))
        usual, value = each.default if each.default_factory is MISSING else each.default_factory(), getattr(settings, each.name)
        if not there and value != usual:
            raise ConfigError(f"{section}{each.name}={value} would do nothing: it needs {needed}. Give that, or leave it out.")
