"""The settings of the algorithms. This module does not import torch, so that
commands that only read settings are fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from hilt.algos.tables import FlowLoss, estimator, policy_loss
from hilt.core.errors import ConfigError
from hilt.core.validate import Need, check, setting

IMITATION_LOSSES = ("nll", "mse")
CONDITIONS = ("words", "embedding")
"""What a policy of RECAP can be conditioned with"""
GROUPED = ("grpo", "dr_grpo", "rloo")
"""The built-in estimators that compare the members of a group"""
KL_ESTIMATES = ("kl", "abs", "mse", "low_var_kl")
SCHEDULES = ("constant", "cosine")


_SOFT = Need("{here}actor=soft", lambda c: c.actor == "soft")
_CONSERVATIVE = Need("{here}conservative", lambda c: c.conservative)


@dataclass
class Rlpd:
    """Soft actor-critic as HIL-SERL has it, with RLPD's options; the formulas are in `hilt.algos.rlpd`."""

    discount: float = setting(0.97, minimum=0, maximum=1)
    """What a reward one step later is worth"""
    tau: float = setting(0.005, above=0, maximum=1)
    """Share of the critics that their slow copies take over at each update"""
    critics: int = setting(2, minimum=1)
    """How many critics"""
    subset: int = setting(0, minimum=0)
    """The number of critics whose minimum is the target, drawn for each update; 0: all"""
    learning_rate: float = setting(3e-4, minimum=0)
    """Of every network's own Adam"""
    temperature: float = setting(0.01, above=0, needs=_SOFT)
    """Weight of the entropy at the start; it is learned from there"""
    target_entropy: float | None = setting(None, needs=_SOFT)
    """Where the temperature steers the entropy of one action, in nats; none: minus half the number of continuous
    actions"""
    backup_entropy: bool = False
    """Whether the critics' target counts the entropy too"""
    reward_bias: float = 0.0
    """Added to every reward before any loss"""
    target_range: list[float] | None = setting(None, length=2, ascending=True)
    """The critics' target is kept within [low, high]; none: as it comes"""
    actor_q: str = setting("mean", choices=("mean", "min"))
    """What the actor climbs, or what the best of several actions has most of: the "mean" of the critics, or their
    "min"imum"""
    actor: str = setting("soft", choices=("soft", "behavior"), noun="actor")
    """What the actor learns: "soft": to maximize Q and entropy; "behavior": to imitate all that was executed, so that
    the choice among `samples` actions alone improves on it"""
    samples: int = setting(1, minimum=1)
    """The number of actions that are drawn in each state, of which the critics choose the best: to act, and in the
    critics' target; 1: there is no choice"""
    conservative: float = setting(0.0, minimum=0)
    """Weight of the conservative term (CQL) in the critics' loss, which keeps them from overrating actions that the
    data does not show; 0: there is none"""
    conservative_samples: int = setting(4, minimum=1, needs=_CONSERVATIVE)
    """The number of actions of each of three kinds (uniform, of the policy here, of the policy in the next state) that
    this term compares with what was done"""
    conservative_updates: int = setting(0, minimum=0, needs=_CONSERVATIVE)
    """The number of first updates of the agent that have this term, such as those of offline_updates, where a learner
    step has cta_ratio of them; 0: all of them"""
    calibrated: bool = setting(True, needs=_CONSERVATIVE)
    """Values of the policy are not pushed below the returns that the log has (Cal-QL); without: plain CQL"""
    actor_average: float = setting(0.0, minimum=0, maximum=1)
    """Share of the actor that its slow copy, the one that is evaluated, takes over at each update; 0: there is none"""
    critic_warmup: int = setting(0, minimum=0, needs=_SOFT)
    """The number of first updates of the actor that imitate demonstrations instead of maximizing Q; beside a frozen
    policy they leave the actor as it is"""
    imitation_weight: float = setting(0.0, minimum=0, needs=_SOFT)
    """Weight of imitating demonstrations beside climbing Q, at the start"""
    imitation_updates: int = setting(0, minimum=0, needs=Need("{here}imitation_weight", lambda c: c.imitation_weight))
    """The number of updates of the actor over which it fades to 0; 0: it is constant"""
    imitation_loss: str = setting("nll", choices=IMITATION_LOSSES, noun="imitation loss")
    """What imitating means: "nll", the actions are made likely, or "mse", the actor's mean comes near to them"""
    grasp_margin: float = 0.1
    """By how much a learned gripper's shown move should be worth more than others, when it is imitated"""
    random_crop: int = setting(4, minimum=0, off=0)
    """The maximum random shift of images in each update, in pixels; 0: none"""
    feature_noise: float = setting(0.0, minimum=0)
    """Deviation of the noise on what a frozen encoder made of the images, in each
    update; its numbers are from -1 to 1"""

    def conflicts(self, here: str) -> Iterator[str]:
        if self.subset > self.critics:
            yield (
                f"{here}subset={self.subset}: expected at most as many as there are critics, "
                f"{self.critics}, or 0 for all."
            )
        if self.actor == "behavior" and self.samples == 1:
            yield (
                f"{here}actor=behavior with {here}samples=1: the policy would only imitate. Give the number of actions "
                f"that the critics choose from, such as {here}samples=32, or {here}actor=soft."
            )
        if self.backup_entropy and self.samples > 1:
            yield (
                f"{here}backup_entropy=true with {here}samples={self.samples}: the best of several actions has no "
                f"log-probability that could be counted. Leave {here}backup_entropy out, or {here}samples."
            )


_CATEGORICAL = Need("{here}head=hl_gauss or c51", lambda c: c.head != "scalar")
_HL_GAUSS = Need("{here}head=hl_gauss", lambda c: c.head == "hl_gauss")
_RESIDUAL = Need("{here}network=simba or bro", lambda c: c.network != "mlp")
_RESETS = Need("{here}reset_period", lambda c: c.reset_period > 0)


@dataclass
class CriticConfig:
    """The critics of an agent; the formulas are in `hilt.algos.value_heads` and
    `hilt.policies.agent.residual_critics`."""

    head: str = setting("scalar", choices=("scalar", "hl_gauss", "c51"), noun="critic head")
    """How a critic states a value: "scalar", one number, by squared errors; or probabilities of `bins` values, by
    cross-entropy: "hl_gauss", with a Gaussian around the target, or "c51", with the next state's own distribution"""
    bins: int = setting(101, minimum=2, needs=_CATEGORICAL)
    """The number of values that have a probability"""
    value_range: list[float] | None = setting(None, length=2, ascending=True, needs=_CATEGORICAL)
    """The lowest and the highest value that the critics can state; none: agent.rlpd.target_range, or what
    `reward_range` and the discount allow"""
    reward_range: list[float] | None = setting(None, length=2, ascending=True, needs=_CATEGORICAL)
    """The lowest and the highest reward of a step, from which `value_range` follows if neither it nor
    agent.rlpd.target_range is given"""
    sigma: float = setting(0.75, above=0, needs=_HL_GAUSS)
    """The deviation of the Gaussian of "hl_gauss", in widths of a bin"""
    network: str = setting("mlp", choices=("mlp", "simba", "bro"), noun="critic network")
    """"mlp": the layers of agent.hidden; or residual blocks with LayerNorm, as in "simba" or in "bro" """
    width: int = setting(256, minimum=1, needs=_RESIDUAL)
    """Numbers between the residual blocks"""
    depth: int = setting(2, minimum=1, needs=_RESIDUAL)
    """The number of residual blocks"""
    weight_decay: float = setting(0.0, minimum=0, maximum=10)
    """Share of each weight matrix of the critics that goes, times the learning rate, at each update; biases, norms and
    the encoder keep theirs"""
    reset_period: int = setting(0, minimum=0)
    """Updates between two resets, after each of which the critics and their target networks begin anew; 0: never"""
    reset_hold: int = setting(500, minimum=0, needs=_RESETS)
    """Updates after a reset in which the actor and the temperature stay as they are: critics that have learned
    nothing yet cannot tell them anything"""

    def conflicts(self, here: str) -> Iterator[str]:
        if self.reset_period and self.reset_hold >= self.reset_period:
            yield (
                f"{here}reset_hold={self.reset_hold} is not less than {here}reset_period={self.reset_period}: the "
                f"actor would never learn again. Give a shorter {here}reset_hold, or a longer period."
            )
        if self.head == "hl_gauss" and self.bins <= 2 * margin_bins(self.sigma):
            yield (
                f"{here}bins={self.bins}: {here}sigma={self.sigma:g} needs more than {2 * margin_bins(self.sigma)} "
                "bins, for as many lie outside of the value range. Give more bins, or a smaller sigma."
            )


def margin_bins(sigma: float) -> int:
    """The number of bins of "hl_gauss" outside of the value range, at either side."""
    return math.ceil(3 * sigma)


def value_range(critic: CriticConfig, rlpd: Rlpd, here: str = "agent.") -> tuple[float, float]:
    """The lowest and the highest value that categorical critics can state. With rewards (the bias included) from a to
    b, returns are from a / (1 - discount) where a is negative, else from a on, for an episode may end at once; and up
    to b / (1 - discount) where b is positive, else to b."""
    if critic.value_range is not None:
        return critic.value_range[0], critic.value_range[1]
    missing = f"{here}critic.head={critic.head}: the range of its values is not known"
    if rlpd.backup_entropy:
        raise ConfigError(
            f"{missing}, for {here}rlpd.backup_entropy=true adds entropy, which has no bound, to the rewards. Give "
            f"{here}critic.value_range=[LOW,HIGH], or leave backup_entropy out."
        )
    if rlpd.target_range is not None:
        return rlpd.target_range[0], rlpd.target_range[1]
    if critic.reward_range is None:
        raise ConfigError(
            f"{missing}. Give {here}critic.reward_range=[LOW,HIGH], the bounds of a step's reward, from which it "
            f"follows by the discount; or {here}rlpd.target_range, or {here}critic.value_range, that of the returns: "
            "[0,1] where success alone is rewarded with 1 and ends the episode."
        )
    low, high = (bound + rlpd.reward_bias for bound in critic.reward_range)
    if rlpd.discount == 1:
        raise ConfigError(
            f"{missing}: with {here}rlpd.discount=1 rewards from {low:g} to {high:g} add up to anything. Give "
            f"{here}critic.value_range=[LOW,HIGH], or a discount below 1."
        )
    horizon = 1 / (1 - rlpd.discount)
    return low * horizon if low < 0 else low, high * horizon if high > 0 else high


# --- on-policy: a vision-language-action policy learns from its own rollouts; every
# formula is in docs/algorithms.md ---


_PAYS = Need("{here}where=reward or loss", lambda c: c.where != "none")
_ADAPTIVE = Need("{here}controller=adaptive", lambda c: c.controller == "adaptive")


@dataclass
class Kl:
    """How far the policy may go from a reference, which is the policy as it was at the start."""

    where: str = setting("none", choices=("none", "reward", "loss"))
    """What pays for the distance: the "reward" of each chunk, the "loss", or "none" """
    estimate: str = setting("kl", choices=KL_ESTIMATES, needs=_PAYS)
    """Of the divergence, from log-probabilities: "kl" and "abs" (its size), "mse" (half
    its square), "low_var_kl" (never below 0)"""
    coefficient: float = setting(0.001, minimum=0, needs=_PAYS)
    """What one nat costs; with the adaptive controller, at the start"""
    controller: str = setting("fixed", choices=("fixed", "adaptive"), needs=_PAYS)
    """The coefficient stays "fixed", or is "adaptive": it follows the divergence to `target`"""
    target: float = setting(6.0, above=0, needs=_ADAPTIVE)
    """Of "adaptive": nats for each number of an action"""
    horizon: int = setting(10_000, minimum=1, needs=_ADAPTIVE)
    """Of "adaptive": trajectories over which the coefficient can change by a fifth"""

    def conflicts(self, here: str) -> Iterator[str]:
        if self.where == "loss" and self.estimate == "kl":
            yield (
                f"{here}estimate=kl in the loss has a gradient that is 0 on average. Give mse, whose gradient "
                "is on average that of the divergence KL(p || p_ref); that of low_var_kl is KL(p_ref || p)'s."
            )


_BY_CHUNKS = Need("{here}tokens_per_pass=0, which counts instead of it", lambda c: not c.tokens_per_pass)


@dataclass
class Batching:
    """How the trajectories of an update become steps of the optimizer, and passes through the policy."""

    trajectories_per_step: int = setting(0, minimum=0)
    """Trajectories of all ranks together in one step of the optimizer; 0: all, one step in each epoch"""
    chunks_per_pass: int = setting(64, minimum=1, needs=_BY_CHUNKS)
    """Chunks that go through the policy together, at each rank; fewer need less memory, and give the same gradient"""
    tokens_per_pass: int = setting(0, minimum=0)
    """Instead: as many chunks as have no more tokens than this, those of the prompt
    and the action counted; 0: chunks_per_pass"""
    log_prob_chunks_per_pass: int = setting(0, minimum=0)
    """Chunks that go together where no gradient is taken: reference, separate critic,
    recomputed log-probabilities; 0: chunks_per_pass"""
    shuffle: bool = setting(
        True, needs=Need("{here}trajectories_per_step=N: there is one step, of all", lambda c: c.trajectories_per_step)
    )
    """Trajectories are dealt to the steps of each epoch anew; without: in their order"""


_SEVERAL_STEPS = Need(
    "several steps in an update, {here}epochs=2 or {here}batch.trajectories_per_step=N",
    lambda c: c.epochs > 1 or c.batch.trajectories_per_step,
)
_WITHOUT_GRADIENT = Need(
    "{here}kl.where, {here}recompute_log_prob=true, {here}estimator=gae or {here}loss=nft",
    lambda c: (
        c.kl.where != "none"
        or c.recompute_log_prob
        or estimator(c.estimator).needs_critic
        or isinstance(policy_loss(c.loss), FlowLoss)
    ),
    of=("log_prob_chunks_per_pass",),
)
_CRITIC = Need("{here}estimator=gae, or another with a critic", lambda c: estimator(c.estimator).needs_critic)


def _read_by_the_loss(name: str) -> Need:
    return Need(f"another {{here}}loss, one that reads {name}", lambda c: name in policy_loss(c.loss).uses)


@dataclass
class Nft:
    """The loss nft, of flows: the formulas are in `hilt.algos.nft`."""

    beta: float = setting(1.0, above=0)
    """How far the implicit positive and negative policies are on either side of the old one"""
    max_advantage: float = setting(5.0, above=0)
    """The advantage that counts as fully optimal; larger ones are clipped. Times beta, it also weighs how much the
    velocity is held at that of the old policy"""
    draws: int = setting(4, minimum=1)
    """Noises and times for each chunk in each epoch, at which velocities are compared"""
    weighting: str = setting("adaptive", choices=("adaptive", "uniform"))
    """Of the squared errors: "adaptive", over their mean size in the chunk, as published; or "uniform" """


@dataclass
class PolicyGradient:
    """How a policy learns from its own rollouts: advantages of chunks, and a
    clipped surrogate of numbers, actions or chunks."""

    estimator: str = setting("grpo", known=estimator)
    """Of advantages: grpo, dr_grpo, rloo (compare the members of a group), reinforce_plus_plus, remax (a greedy
    rollout), gae (a critic); or another by name or module:Class"""
    discount: float = setting(1.0, minimum=0, maximum=1)
    """What a reward one chunk later is worth"""
    lam: float = setting(1.0, minimum=0, maximum=1, needs=_CRITIC)
    """Of gae: 1 trusts returns, 0 trusts the critic"""
    normalize: str = setting("auto", choices=("auto", "none", "group", "batch"))
    """Advantages: "none", over the deviation of their "group", or whitened over the
    "batch"; "auto": as the estimator is published"""
    clip_low: float = setting(0.2, minimum=0, maximum=1, needs=_read_by_the_loss("clip_low"))
    """A ratio below 1 - clip_low gains nothing more"""
    clip_high: float = setting(0.28, minimum=0, needs=_read_by_the_loss("clip_high"))
    """Nor one above 1 + clip_high"""
    dual_clip: float = setting(0.0, minimum=0, needs=_read_by_the_loss("dual_clip"))
    """What went badly costs as if its ratio were this at most, above 1; 0: whatever its ratio is"""
    entropy: float = 0.0
    """What a nat of entropy of each number earns in the loss"""
    epochs: int = setting(1, minimum=1)
    """How often each trajectory is learned from"""
    target_kl: float = setting(0.0, minimum=0, needs=_SEVERAL_STEPS)
    """An update ends before a step in which the policy is further than this (ppo_kl, in
    nats) from the one that collected; 0: never"""
    reduction: str = setting("trajectory_mean", choices=("token_mean", "trajectory_mean", "trajectory_sum"))
    """How terms become a loss: "token_mean": each counts the same; "trajectory_mean": each
    trajectory; "trajectory_sum": a long one more"""
    horizon: int = setting(
        1000, minimum=1, needs=Need("{here}reduction=trajectory_sum", lambda c: c.reduction == "trajectory_sum")
    )
    """Of "trajectory_sum": terms that a trajectory's sum is divided by"""
    ratio: str = setting("token", choices=("token", "action", "chunk"))
    """What one ratio is of: a "token" (one number of an action), an "action", or a "chunk" """
    loss: str = setting("clipped", known=policy_loss)
    """What is minimized: clipped, PPO's surrogate of the ratio; gspo, the same of the mean ratio of an action or a
    chunk; cispo, the log-probability weighted by a truncated ratio; nft, of flows, the velocity, without
    log-probabilities; or another one by name or module:Class"""
    value_coefficient: float = setting(0.5, minimum=0, needs=_CRITIC)
    """Of gae: weight of the critic's loss where the policy has its value head"""
    value_clip: float = setting(0.5, minimum=0, needs=_CRITIC)
    """Of gae: how far a value may move in an update before it gains nothing more; 0: any way"""
    recompute_log_prob: bool = False
    """Ratios begin with log-probabilities that are computed anew before an update;
    those of the rollout give each term a weight"""
    importance_cap: float = setting(
        2.0, minimum=1, needs=Need("{here}recompute_log_prob=true", lambda c: c.recompute_log_prob)
    )
    """Of recompute_log_prob: the weight, p before the update / p of the rollout, is
    truncated at this (decoupled PPO)"""
    nft: Nft = setting(factory=Nft, needs=Need("{here}loss=nft", lambda c: isinstance(policy_loss(c.loss), FlowLoss)))
    kl: Kl = field(default_factory=Kl)
    batch: Batching = setting(factory=Batching, needs=_WITHOUT_GRADIENT)

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "algorithm")

    def conflicts(self, here: str) -> Iterator[str]:
        if 0 < self.dual_clip <= 1:
            yield f"{here}dual_clip={self.dual_clip}: expected above 1, such as 3, or 0 for none."
        yield from policy_loss(self.loss).conflicts(self, here)
        chosen = estimator(self.estimator)
        if self.normalize == "group" and not chosen.grouped:
            yield f"{here}normalize=group: {self.estimator} has no groups; take batch, or one of {', '.join(GROUPED)}."
        if chosen.needs_greedy and self.discount != 1:
            yield (
                f"{here}discount={self.discount}: {self.estimator} compares whole scores with a "
                "greedy episode's: expected 1."
            )


@dataclass
class Optimizer:
    """AdamW, and how fast it goes."""

    learning_rate: float | None = setting(None, minimum=0, maximum=1)
    """At its highest; none, in a run: by what is trained, 3e-4 for a small_vla,
    1e-4 for adapters, 5e-6 for all of another"""
    betas: list[float] = setting(factory=lambda: [0.9, 0.999], length=2, minimum=0, below=1)
    """How much of the mean gradient, and of the mean square, is kept at each step"""
    weight_decay: float = setting(0.01, minimum=0, maximum=10)
    """Share of each weight that goes, times the learning rate, at each step"""
    gradient_clip: float = setting(1.0, minimum=0)
    """The longest that a gradient may be; 0: as long as it is"""
    warmup_ratio: float = setting(0.0, minimum=0, maximum=1)
    """Share of the run in which the learning rate rises from 0"""
    schedule: str = setting("constant", choices=SCHEDULES)
    """What follows: constant; or cosine, which falls until the end of the run"""
    min_lr_ratio: float = setting(
        0.0, minimum=0, maximum=1, needs=Need("{here}schedule=cosine", lambda c: c.schedule == "cosine")
    )
    """Where cosine ends, as a share of the highest"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "optimizer")


_ON = Need("{here}coefficient above 0", lambda c: c.coefficient > 0)
_LEARNS = Need("{here}update=after or before", lambda c: c.update != "none")
_COUNTS = Need("{here}update=after or before, or {here}scale=none", lambda c: c.update != "none" or c.scale == "none")
_FROZEN = Need("{here}reference=frozen", lambda c: c.reference == "frozen")


@dataclass
class Prime:
    """PRIME's implicit process reward, from a reward policy that learns from
    outcomes; the formulas are in `hilt.algos.prime`."""

    coefficient: float = setting(0.0, minimum=0)
    """Of the process reward, beside the others; 0: there is none"""
    beta: float = setting(0.05, above=0, needs=(_ON, _COUNTS))
    """What a nat of the log-ratio counts, in the log-odds of success and, with scale=none, in the reward"""
    granularity: str = setting("chunk", choices=("chunk", "token", "whole"), needs=_ON)
    """What is rewarded: each "chunk", each "token" (one number of an action), or the "whole" episode at its end"""
    scale: str = setting("batch", choices=("batch", "none"), needs=_ON)
    """"batch": log-ratios over the largest return of the batch, where that is above
    1; "none": beta times the log-ratio"""
    update: str = setting("after", choices=("after", "before", "none"), needs=_ON)
    """The reward policy learns from the outcomes of a step "after" it gave rewards
    for it, "before", or not at all ("none")"""
    policy: str = setting("", needs=_ON)
    """The folder that the reward policy begins from; empty: it begins as the policy does"""
    reference: str = setting("frozen", choices=("frozen", "policy"), needs=_ON)
    """What the log-ratio is to: a "frozen" policy, or the "policy" that is trained, as it was before the update"""
    reference_policy: str = setting("", needs=(_ON, _FROZEN))
    """Of "frozen": its folder; empty: the policy as it was at the start"""
    optimizer: Optimizer = setting(factory=lambda: Optimizer(weight_decay=0.0), needs=(_ON, _LEARNS))
    """Of the reward policy. Its learning rate, where none is given, is the policy's"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self, "prime")

    def conflicts(self, here: str) -> Iterator[str]:
        if (
            self.coefficient
            and self.update == "none"
            and self.policy == self.reference_policy
            and self.reference == "frozen"
        ):
            yield (
                f"{here}update=none and a reward policy that is its own reference: every reward would be 0. "
                f"Give {here}update=after, or {here}policy=FOLDER, one that was trained before."
            )
