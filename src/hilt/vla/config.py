"""The settings of post-training: a policy rolls out groups of episodes over tasks and learns from their outcomes.

Sizes are named with their unit: an *episode* is one rollout, a *group* is `collect.group_size` episodes from
one initial state, a *row* is one chunk that the policy was asked for. `Vla.arithmetic` describes the
resulting sizes in text, before anything starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hilt.algos import prime
from hilt.algos.config import GROUPED, Optimizer, PolicyGradient, Prime
from hilt.algos.tables import Estimator, FlowLoss, estimator, policy_loss
from hilt.core import validate
from hilt.core.errors import ConfigError, MissingPackageError, Problems
from hilt.core.hub import local
from hilt.core.url_folder import UrlFolder
from hilt.core.validate import Need, setting
from hilt.distributed.placement import Placement, Sharding
from hilt.envs.rewards import REWARDS
from hilt.envs.task import ready
from hilt.observe.alarms import RunFacts, check_stop_on
from hilt.observe.sinks import check_sinks
from hilt.policies.base import Policy
from hilt.policies.float8 import SAME, check_float8
from hilt.policies.io.tensor_files import check_device
from hilt.policies.registry import check_policy, document_of, is_new, kind_of, policy_class
from hilt.policies.vla.flow import check_entropy, check_flow
from hilt.value.rollout_watch import RolloutValue, RolloutWatch
from hilt.vla.collect import Collecting
from hilt.vla.demonstrations import words
from hilt.vla.sft import Lora

BY_OUTCOME = ("dynamic_sampling", "filter_accuracy", "filter_truncated")
"""Filters of collect that drop groups by how their episodes ended"""
ADAPTER_RATE = 1e-4
"""The learning rate of adapters where none is given: RLinf's for OpenVLA and OFT
with LoRA. Of all weights: `Policy.learning_rate`"""
CRITIC_RATE = 1e-4
"""Of a critic, at least: pi_RL's for the value head of pi0"""

_PROCESSES = Need("{here}workers above 0; without, start_s=120 step_s=60 restarts=3 are neutral", lambda c: c.workers)


@dataclass
class SimulatorSettings:
    """The environments of each rank."""

    workers: int = setting(0, minimum=0)
    """Processes of each rank; 0: in the rank's own process. The results are the same with any number"""
    slots: int = setting(8, minimum=1)
    """Environments that are in flight at each rank. While one half of them is
    simulated, the policy answers the other"""
    envs_per_worker: int = setting(0, minimum=0)
    """Environments that a process keeps for later, at most; 0: as many as it has slots"""
    start_s: float = setting(120.0, minimum=0.1, needs=_PROCESSES)
    """Seconds within which a process must have made its environment. This and the next two need workers above 0"""
    step_s: float = setting(60.0, minimum=0.1, needs=_PROCESSES)
    """Seconds within which a chunk must have been simulated"""
    restarts: int = setting(3, minimum=0, needs=_PROCESSES)
    """Times that a process that died or hung is started again, in a row"""


@dataclass
class Critic:
    """The critic, which estimates values for algorithm.estimator=gae."""

    kind: str = setting("none", choices=("none", "shared", "detached", "separate"), noun="critic")
    """ "shared": a head on the policy's trunk, which it trains too; "detached": the head alone is trained; "separate":
    a policy of its own, begun from the same weights; "none" """
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Of the critic, a head or a policy of its own. Its learning rate, where none is
    given: 1e-4, or the policy's if that is higher"""
    warmup_steps: int = setting(0, minimum=0)
    """Training steps at the beginning in which the critic learns alone; of a policy with a head, that head"""


@dataclass
class Reference:
    """The policy as it was at the start: for algorithm.kl and prime."""

    offload: bool = False
    """Its weights lie in the host's memory, and go to the device only while they are needed"""


@dataclass
class Rewards:
    """What an episode earns: the sum of these, each times its coefficient, 0 for none."""

    success: float = 1.0
    """At the last row of an episode that succeeded"""
    format: float = 0.0
    """At the last row of one without an ill-formed chunk; for collect.filter_format=false"""
    environment: float = 0.0
    """Of the environment's own reward, at each row"""
    classifier: str = setting("", needs=Need("a coefficient, {here}learned=1", lambda c: c.learned))
    """The folder of a reward classifier (`hilt train classifier`), or a reward by name or
    module:function, which judges the last frame"""
    learned: float = setting(0.0, needs=Need("{here}classifier=FOLDER", lambda c: c.classifier))
    """At the last row: of what the classifier says, 0 or 1"""


_SOME = Need("one of {here}before, period and after", lambda c: c.before or c.period or c.after)
_PERIODIC = Need("{here}period, so that it can be reached", lambda c: c.period)
_HAS_GOAL = Need("{here}goal", lambda c: c.goal)


@dataclass
class Validation:
    """How good the policy is, on initial states that training never sees. Every episode counts."""

    split: str = setting("eval", needs=_SOME)
    """Whose initial states: another than collect.split"""
    episodes: int = setting(0, minimum=0, needs=_SOME)
    """Of each task, from the first state on; 0: every state once"""
    at_most: int = setting(0, minimum=0, needs=_SOME)
    """Of all tasks together, which take turns, so that some may have none; 0: no limit"""
    before: bool = True
    """Before the first step"""
    period: int = setting(10, minimum=0)
    """Training steps between two; 0: none meanwhile"""
    after: bool = True
    """After the last step"""
    sample: bool = setting(False, needs=_SOME)
    """Actions are drawn as in training, not the likeliest"""
    goal: float = setting(0.0, minimum=0, maximum=1, needs=_PERIODIC)
    """Share of successful episodes, over all tasks, at which training ends; 0: success does not end it"""
    hold: int = setting(2, minimum=1, needs=_HAS_GOAL)
    """Number of validations in a row that must reach the goal"""
    videos: int = setting(0, minimum=0, needs=_SOME)
    """The number of episodes with a video at each validation, one image per chunk"""


_IMITATES = Need("{here}weight and {here}data together", lambda c: c.weight and c.data)


@dataclass
class Imitation:
    """A term of the loss that keeps the policy near demonstrations."""

    weight: float = setting(0.0, minimum=0, needs=_IMITATES)
    """Of their loss, beside the policy gradient"""
    data: list[str] = setting(factory=list, needs=_IMITATES)
    """Logs or datasets, as `hilt train sft` takes them"""
    batch_size: int = setting(32, minimum=1, needs=_IMITATES)
    """Samples in each optimizer step at each rank"""


_NEAR = Need(
    "placement.rollout_ranks=0: who trains has no simulators to reset meanwhile",
    lambda c: not c.placement.rollout_ranks,
    of=("prefetch",),
)
_ILL_FORMED = Need(
    "collect.filter_format=false, without which every episode that is learned from earns it",
    lambda c: not c.collect.filter_format,
    of=("format",),
)
_CRITIC = Need(
    "algorithm.estimator=gae, or another with a critic", lambda c: estimator(c.algorithm.estimator).needs_critic
)
_REFERENCE = Need(
    "algorithm.kl.where=reward or loss, or prime.coefficient with prime.reference=frozen",
    lambda c: c.has_reference,
    of=("offload",),
)
_SUCCESS_ALONE = Need(
    "rewards.environment=0, rewards.learned=0, prime.coefficient=0 and algorithm.discount=1; without, "
    "solved_steps=5 is neutral",
    lambda c: c.may_be_solved,
)


@dataclass
class Vla:
    """A run of post-training."""

    policy: str = "small_vla"
    """The folder of a checkpoint; or small_vla, another name, or module:Class: a new one that has learned
    nothing, whose sizes come from the first task"""
    policy_options: dict[str, Any] = field(default_factory=dict)
    """What it is opened with, such as unnorm_key; a new one: its settings, such as chunk"""
    device: str = "cpu"
    """Where it is: cpu, cuda (each rank on a machine has its own), cuda:1"""
    memory_limit_gb: float = setting(0.0, minimum=0)
    """Gigabytes of the device that a rank may use. A run whose estimate is above it does not begin; on CUDA the
    allocator keeps to it, too; "auto" recomputation chooses by it. 0: no limit"""
    lora: Lora = field(default_factory=Lora)
    tasks: list[str] = field(default_factory=list)
    """By their full names: tabletop/pick_red, libero_spatial/3"""
    task_options: dict[str, Any] = field(default_factory=dict)
    """What all of them are given"""
    suite: str = setting("", needs=Need("no columns beside it", lambda c: not c.columns))
    """Whose names the observations have; empty: those of the first task"""
    columns: dict[str, str] = field(default_factory=dict)
    """Instead of a suite: the policy's names to paths in the observations, full_image: images/top"""
    pool: SimulatorSettings = field(default_factory=SimulatorSettings)
    collect: Collecting = setting(factory=Collecting, needs=_NEAR)
    value: RolloutValue = field(default_factory=RolloutValue)
    """A value model that looks at the rollouts, and may end those that it expects to fail"""
    rewards: Rewards = setting(factory=Rewards, needs=_ILL_FORMED)
    algorithm: PolicyGradient = field(default_factory=PolicyGradient)
    optimizer: Optimizer = field(default_factory=Optimizer)
    critic: Critic = setting(factory=Critic, needs=_CRITIC)
    prime: Prime = field(default_factory=Prime)
    reference: Reference = setting(factory=Reference, needs=_REFERENCE)
    imitation: Imitation = field(default_factory=Imitation)
    validation: Validation = field(default_factory=Validation)
    placement: Placement = field(default_factory=Placement)
    sharding: Sharding = field(default_factory=Sharding)
    max_steps: int = setting(100, minimum=0)
    """Training steps: each collects episodes and learns from them. A step whose groups only wait
    for the next one does not count; after as many of these in a row, 20 at least, the run ends.
    0: the policy is validated, and that is all"""
    max_seconds: float = setting(0.0, minimum=0)
    """A cap: it ends after the step in which this number of seconds has passed; 0: only max_steps applies. The learning
    rate's schedule follows whichever of the two comes first"""
    solved_steps: int = setting(5, minimum=0, needs=_SUCCESS_ALONE)
    """It ends as solved after this number of training steps in a row, of 256 episodes at least, in
    which all members of all groups succeeded; 0:
    never. For runs that reward success alone, and late success as much (algorithm.discount=1)"""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that end the run when they are raised, with a checkpoint, such as
    [ppo_kl, validation]: docs/observe.md lists them"""
    checkpoint_period: int = setting(10, minimum=1)
    """Training steps between two checkpoints"""
    checkpoint_keep: int = setting(1, minimum=1)
    """The number of newest ones that are kept"""
    export_period: int = setting(0, minimum=0)
    """Training steps between two complete checkpoint folders of the policy, RUN/actor/global_step_N, with adapters
    merged and, in its lora_adapter, alone; 0: none but RUN/policy, when the run ends or is stopped"""
    export_keep: int = setting(0, minimum=0, needs=Need("export_period=N", lambda c: c.export_period))
    """The number of newest folders that are kept; 0: all"""
    copy_to: str = ""
    """A URL of any file system that fsspec knows (hdfs, s3, gs, file), to which each checkpoint is copied, checked, and
    from which a run can be resumed; empty: none"""
    rollouts_gb: float = setting(20.0, minimum=0)
    """The gigabytes of newest collected episodes that each rank keeps on its disk; 0: all"""
    sinks: list[str] = field(default_factory=list)
    """Where metrics go besides: tensorboard, wandb, trackio; or another one by name or module:Class"""
    seed: int = setting(0, minimum=0)
    """Of the first weights, the starts and all that is drawn"""

    def check(self, here: bool = True) -> None:
        """Raises for what cannot work, and for what would change nothing: for all of it at once. Without
        `here`, what this machine lacks is left out."""
        problems = Problems()
        problems.check(validate.check, self)
        if not problems.errors:
            problems.check(prime.check, self.algorithm, self.prime)
            problems.check(self._check_flow)
            problems.check(check_stop_on, self.stop_on, self.facts)
        problems.check(words, self)
        if here:
            problems.check(self.check_place)
        problems.report()

    def check_place(self) -> None:
        """Raises for what this machine lacks: a device, a package, a folder, a simulator."""
        problems = Problems()
        problems.check(check_device, self.device)
        problems.check(check_float8, self.policy_options.get("rollout_precision", SAME), self.device)
        problems.check(check_sinks, self.sinks)
        problems.check(self._check_there)
        if self.copy_to:
            problems.check(UrlFolder(self.copy_to).check)
        problems.report()

    def conflicts(self, here: str) -> Iterator[str]:
        validation = self.validation
        if not self.tasks:
            yield (
                "there is nothing to try: give tasks=[tabletop/pick_red, tabletop/pick_blue], or another list of tasks."
            )
        if len(set(self.tasks)) != len(self.tasks):
            twice = next(task for task in self.tasks if self.tasks.count(task) > 1)
            yield f"tasks names {twice} twice: name each once; all are visited in turn."
        if self._estimator.needs_critic and self.critic.kind == "none":
            yield (
                f"algorithm.estimator={self.algorithm.estimator} needs a critic: give "
                "critic.kind=shared, detached or separate."
            )
        if self.collect.drawn_share < 1 and self.learns_velocity:
            yield (
                f"collect.drawn_share={self.collect.drawn_share:g} with algorithm.loss={self.algorithm.loss}, which "
                "learns from every answer and needs no draws. Leave collect.drawn_share out."
            )
        yield from self._wrong_filters()
        if validation.split == self.collect.split:
            yield (
                f"validation.split={validation.split} are the states that are trained on "
                "(collect.split): give another split."
            )
        if not self.max_steps and not validation.before:
            yield "max_steps=0 and validation.before=false: there is nothing to do. Give one of them."
        rewards = (
            self.rewards.success,
            self.rewards.format,
            self.rewards.environment,
            self.rewards.learned,
            self.prime.coefficient,
        )
        if not any(rewards):
            yield "all coefficients of rewards are 0, so that there is nothing to learn: give rewards.success=1."
        yield from self._wrong_sizes()
        yield from self._wrong_precision()
        if self.collect.ahead and not self.placement.rollout_ranks:
            apart = "or give ranks of their own to rollouts, placement.kind=ray placement.rollout_ranks=1."
            if self.sharding.enabled:
                yield f"collect.ahead=1 with sharding.enabled: no rank has all weights to act by; give 0, {apart}"
            if not self.pool.workers:
                yield f"collect.ahead=1: simulators need processes of their own, pool.workers=1 or more; {apart}"

    def _wrong_precision(self) -> Iterator[str]:
        """What weights that are not float32, and rollouts in another precision than that of learning, need."""
        kind = str(self.policy_options.get("dtype", "float32"))
        if kind.removeprefix("torch.") != "float32" and is_new(self.policy) and not self.lora.rank:
            yield (
                f"policy_options.dtype={kind}: weights that are trained are float32. Leave it out "
                "(policy_options.compute=bfloat16 is for products), or train adapters (lora.rank=32)."
            )
        if (precision := self.policy_options.get("rollout_precision", SAME)) == SAME:
            return
        if not (self.algorithm.recompute_log_prob or self.learns_velocity):
            yield (
                f"policy_options.rollout_precision={precision}: the policy that acts is then not quite the one that "
                "learns, which must be corrected for: give algorithm.recompute_log_prob=true."
            )
        if self.sharding.enabled:
            yield (
                f"policy_options.rollout_precision={precision} with sharding.enabled: no rank keeps whole weights, of "
                "which float8 copies are made. Leave one of them out."
            )

    def _wrong_sizes(self) -> Iterator[str]:
        """What has to fit together in numbers."""
        episodes, each, collect = self.episodes, self.algorithm.batch.trajectories_per_step, self.collect
        if each and episodes and (each > episodes or episodes % each):
            fits = [n for n in range(1, episodes + 1) if episodes % n == 0]
            yield (
                f"algorithm.batch.trajectories_per_step={each}: a training step has {episodes} episodes "
                f"({self._factors}), which are not whole steps of the optimizer; give "
                f"{min(fits, key=lambda n: abs(n - each))}, or 0 for all in one."
            )
        compares = self._estimator.grouped
        if compares and collect.group_size < 2:
            yield (
                f"collect.group_size={collect.group_size}: {self.algorithm.estimator} compares the members "
                "of a group; give 2 or more."
            )
        if collect.data_batch_size % collect.group_size and compares and self.algorithm.kl.where == "reward":
            yield (
                f"collect.data_batch_size={collect.data_batch_size} cuts groups of "
                f"collect.group_size={collect.group_size}, and algorithm.kl.where=reward compares what all members of "
                "a group paid: give a multiple, or algorithm.kl.where=loss."
            )
        tried = self.validation.episodes * len(self.tasks)
        if tried and self.validation.videos > tried:
            yield f"validation.videos={self.validation.videos}: a validation has {tried} episodes."
        if self.validation.videos and importlib.util.find_spec("av") is None:
            yield str(MissingPackageError("av", "validation.videos", "formats"))

    def _wrong_filters(self) -> Iterator[str]:
        """Filters choose groups by how they ended: only what compares the members of a group
        with each other is not misled by that."""
        filters = [f"collect.{name}=true" for name in BY_OUTCOME if getattr(self.collect, name)]
        if filters and not self._estimator.grouped:
            yield (
                f"{' and '.join(filters)} with algorithm.estimator={self.algorithm.estimator}: groups are "
                f"kept by how they ended, and {self._estimator.filtered}, so that advantages would "
                f"be wrong. Give false for {'it' if len(filters) == 1 else 'them'}, or take one of "
                f"{', '.join(GROUPED)}, which compare the members of a group."
            )

    def _check_flow(self) -> None:
        """Checks what depends on a flow for a policy that is made here; one of a folder is checked when it is
        opened."""
        if not (self.algorithm.entropy or self.learns_velocity) or not is_new(self.policy):
            return
        kind = policy_class(self.policy).flow_kind(self.policy_options)
        if kind is not None:
            check_entropy(self.algorithm.entropy, kind)
        if self.learns_velocity:
            check_flow(self.algorithm.loss, kind)

    @property
    def learns_velocity(self) -> bool:
        """Whether the loss is one of a flow's velocity, for which records keep the answers of the model."""
        return isinstance(policy_loss(self.algorithm.loss), FlowLoss)

    def settled(self) -> Vla:
        """With learning rates as numbers, chosen by what is trained where none was given."""
        policy, critic = self.optimizer, self.critic
        rate = self._usual_rate[1] if policy.learning_rate is None else policy.learning_rate
        judged = max(rate, CRITIC_RATE) if critic.optimizer.learning_rate is None else critic.optimizer.learning_rate
        if critic.kind != "none":
            critic = replace(critic, optimizer=replace(critic.optimizer, learning_rate=judged))
        process = self.prime
        if process.coefficient and process.update != "none" and process.optimizer.learning_rate is None:
            process = replace(process, optimizer=replace(process.optimizer, learning_rate=rate))
        return replace(self, optimizer=replace(policy, learning_rate=rate), critic=critic, prime=process)

    @property
    def _estimator(self) -> Estimator:
        return estimator(self.algorithm.estimator)

    @property
    def has_reference(self) -> bool:
        """Whether a policy is kept as it was: to measure a divergence, or the log-ratio of a process reward."""
        return self.algorithm.kl.where != "none" or bool(self.prime.coefficient and self.prime.reference == "frozen")

    @property
    def _usual_rate(self) -> tuple[str, float]:
        """What is trained, in words, and its learning rate where none is given."""
        if self.lora.rank:
            return "adapters", ADAPTER_RATE
        # else there is no folder, as when only settings are shown
        known = is_new(self.policy) or document_of(self.policy)
        rate = policy_class(self.policy).learning_rate if known else Policy.learning_rate
        if not known or rate == Policy.learning_rate:
            return "all weights of a large policy", rate
        return f"a {self.policy if is_new(self.policy) else kind_of(local(self.policy))}", rate

    def _check_there(self) -> None:
        """Folders that are named exist."""
        problems = Problems()
        for part in (self._check_policy, self._check_folders):
            problems.check(part)
        if self.placement.kind != "ray":  # its machines have simulators of their own
            with problems.collected():
                ready(self.tasks, **self.task_options)
        problems.report()

    def _check_policy(self) -> None:
        check_policy(self.policy, self.policy_options)
        if (is_new(self.policy) or document_of(self.policy)) and not policy_class(self.policy).has_log_prob:
            raise ConfigError(
                f"policy={self.policy}: this {policy_class(self.policy).__name__} has no log-probabilities of its "
                "actions, which post-training needs. Give another policy, such as a small_vla."
            )

    def _check_folders(self) -> None:
        if REWARDS.is_name(self.rewards.classifier):
            REWARDS.check(self.rewards.classifier)
        elif self.rewards.classifier and not Path(self.rewards.classifier, "classifier.json").is_file():
            raise ConfigError(
                f"rewards.classifier={self.rewards.classifier}: no classifier is there. Make one "
                "with: hilt train classifier"
            )
        if self.value.model:
            RolloutWatch(self.value, self.tasks)
        for name, folder in (
            ("prime.policy", self.prime.policy),
            ("prime.reference_policy", self.prime.reference_policy),
        ):
            if folder:
                check_policy(folder, self.policy_options, name)
        for path in self.imitation.data:
            if not local(path).exists():
                raise ConfigError(f"imitation.data: there is no {path}. Give the path of a log or a dataset.")

    @property
    def may_be_solved(self) -> bool:
        """Whether nothing more can be earned where every episode succeeds."""
        others = self.rewards.environment or self.rewards.learned or self.prime.coefficient
        return not others and self.algorithm.discount == 1

    @property
    def facts(self) -> RunFacts:
        """What alarms must know of these settings."""
        algorithm, compares = self.algorithm, self._estimator.grouped
        compares = compares and not self.rewards.environment and not self.rewards.learned and not self.prime.coefficient
        validates, gae = self.validation.period > 0, self._estimator.needs_critic
        ratio = (
            "token" if policy_loss(algorithm.loss).mean_ratio else algorithm.ratio
        )  # a mean moves as one number does
        return RunFacts(
            "vla",
            gae=gae,
            ratio=ratio,
            target_kl=algorithm.target_kl,
            compares=compares,
            validates=validates,
            reference=algorithm.kl.where != "none",
            value_model=bool(self.value.model),
        )

    # Sizes, in words

    @property
    def episodes(self) -> int:
        """The number of episodes of a training step, of all ranks together."""
        return self.collect.data_batch_size * self._working

    @property
    def _working(self) -> int:
        """Ranks that collect and have a task; idle ones count with weight zero, unless they steal."""
        collecting = self.placement.rollout_ranks or self.placement.ranks
        return collecting if self.collect.idle_ranks == "steal" else min(collecting, len(self.tasks))

    @property
    def _factors(self) -> str:
        return f"{self.collect.data_batch_size} of each of {_many(self._working, 'rank')} with work"

    def _rates_in_words(self) -> str:
        (trained, usual), settled = self._usual_rate, self.settled()
        rate = settled.optimizer.learning_rate
        compared = f"as is usual for {trained}" if rate == usual else f"where {usual:g} is usual for {trained}"
        head = f"; of the critic {settled.critic.optimizer.learning_rate:g}" if self.critic.kind != "none" else ""
        return f"learning rate: {rate:g}, {compared}{head}"

    def arithmetic(self) -> list[str]:
        """What the sizes come to, a line for each part of a training step."""
        collect, batch, epochs = self.collect, self.algorithm.batch, self.algorithm.epochs
        ranks, collecting = self.placement.ranks, self.placement.rollout_ranks or self.placement.ranks
        groups, left = divmod(collect.data_batch_size, collect.group_size)
        each = batch.trajectories_per_step or self.episodes
        steps = epochs * (self.episodes // each)
        more = ", and what is rolled out beyond that" if collect.oversample_factor > 1 or collect.groups_at_once else ""
        many = f"{groups * self._working} groups of {collect.group_size}"
        if left:
            many = (
                f"at each {groups} groups of {collect.group_size} and {left} of the next one, the others of "
                "which are in the next step"
            )
        passes = f"{batch.tokens_per_pass:,} tokens" if batch.tokens_per_pass else f"{batch.chunks_per_pass} chunks"
        where = f"{self.pool.workers} processes" if self.pool.workers else "the rank's own process"
        lines = [
            (
                f"tasks: {len(self.tasks)}, over {_many(collecting, 'rank')}; in flight at each "
                f"{self.pool.slots} environments in {where}"
            ),
            f"training step: {self._factors} = {self.episodes} episodes = {many}{more}",
            f"update: {_many(epochs, 'epoch')} of {self.episodes} episodes, {each} in each step of the optimizer "
            f"= {_many(steps, 'step')}; passes of at most {passes} at each of {_many(ranks, 'rank')}",
            self._rates_in_words(),
            f"run: {self.max_steps} training steps = {self.max_steps * self.episodes:,} episodes to learn from, "
            f"{self.max_steps * steps:,} steps of the optimizer"
            + f", or {self.max_seconds:g} s"
            * bool(self.max_seconds),
        ]
        each = self.validation.episodes
        times = self.validation.before + self.validation.after
        times += (self.max_steps - 1) // self.validation.period if self.validation.period else 0
        tried = f"{each * len(self.tasks)} episodes" if each else f"every {self.validation.split} state of every task"
        tried += f", at most {self.validation.at_most} of all tasks" if self.validation.at_most else ""
        return [*lines, f"validation: {times} times {tried}" if times else "validation: none"]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


__all__ = ["Critic", "Imitation", "Lora", "Rewards", "SimulatorSettings", "Validation", "Vla"]
