"""The settings of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hilt.algos.config import SCHEDULES
from hilt.algos.schedule import learning_rate_factor
from hilt.core.validate import Need, check, setting
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.observe.alarms import RunFacts, check_stop_on
from hilt.policies.io.tensor_files import check_device
from hilt.policies.registry import check_policy, document_of, is_new, policy_class
from hilt.vla.demonstrations import words
from hilt.vla.recap.recap_settings import Recap

_ADAPTERS = Need("{here}rank=N", lambda c: c.rank)


@dataclass
class Lora:
    """Adapters instead of all weights."""

    rank: int = setting(0, minimum=0)
    """Of the adapters; 0: none, and all weights are trained"""
    alpha: float = setting(16.0, above=0, needs=_ADAPTERS)
    """They count alpha / rank times"""
    targets: list[str] = setting(factory=list, needs=_ADAPTERS)
    """The ends of the names of layers that get one, such as q_proj, or gemma_expert.*_proj, where * stands for any
    letters; empty: all linear layers"""


_TASKS = Need("tasks=[NAME]", lambda c: c.tasks)
_DATA = Need("data=[PATH]", lambda c: c.data)
_NO_ROUNDS = Need("no recap.rounds, which collect their own episodes", lambda c: not c.recap.rounds)
_FOLDER = Need("policy=FOLDER: a new policy has none but those of the data", lambda c: not is_new(c.policy))
_VALIDATES = Need("validation", lambda c: c.validation)


@dataclass
class Sft:
    """A run of supervised fine-tuning."""

    policy: str = "small_vla"
    """The folder of a checkpoint; or small_vla, another name, or module:Class: a new one,
    whose sizes and statistics come from the data"""
    policy_options: dict[str, Any] = field(default_factory=dict)
    """What it is opened with, such as unnorm_key; a new one: its settings, such as chunk"""
    max_delay: int = setting(0, minimum=0)
    """The most actions at the start of a chunk that are given instead of learned, a random number in each sample, so
    that answers continue what a robot executes meanwhile (real-time chunking); 0: as the policy's folder has it"""
    statistics: str = setting("checkpoint", choices=("checkpoint", "data"), needs=_FOLDER)
    """By which numbers are normalized: the checkpoint's own, or those of the "data", where it is of another robot"""
    device: str = "cpu"
    """Where it is trained: cpu, cuda, cuda:1"""
    data: list[str] = field(default_factory=list)
    """Logs, recordings of `hilt record`, or datasets in any format that `hilt data convert` reads"""
    where: str = setting("", known=EpisodeFilter.parse, needs=(_DATA, _NO_ROUNDS))
    """Which episodes of `data` are learned from: a filter as `hilt data tag --where` takes, such as
    "success=true advantage_percentile>=60" or tag=good; empty: all. A resumed run keeps what it chose"""
    tasks: list[str] = field(default_factory=list)
    """Tasks that `hilt eval` tries the policy on, and whose scripts record the demonstrations"""
    task_options: dict[str, Any] = setting(factory=dict, needs=_TASKS)
    """What all of them are given"""
    demonstrations: int = setting(0, minimum=0, needs=_TASKS)
    """The number of episodes recorded for each task"""
    demonstration_options: dict[str, Any] = setting(
        factory=dict, needs=Need("demonstrations=N", lambda c: c.demonstrations)
    )
    """What their script is given, such as speed and noise"""
    suite: str = setting("", needs=Need("no columns beside it", lambda c: not c.columns))
    """Whose names the observations have, such as libero or tabletop; empty: those of the first task"""
    columns: dict[str, str] = field(default_factory=dict)
    """Instead of a suite: the policy's names to paths in the observations, full_image: images/top"""
    instruction: str = ""
    """The instruction of every episode; empty: from the data"""
    successes_only: bool = True
    """Episodes that failed are passed over; not with recap.threshold, which learns from them, too"""
    validation: float = setting(0.1, minimum=0, maximum=0.9)
    """Share of the episodes that is not learned from, but tells when to stop; 0: none, and max_steps is the end"""
    validation_period: int = setting(100, minimum=1, needs=_VALIDATES)
    """Steps between two validations"""
    patience: int = setting(5, minimum=1, needs=_VALIDATES)
    """Validations without a new minimum, in a row, after which it ends"""
    max_steps: int = setting(10_000, minimum=1)
    """Gradient steps at most"""
    batch_size: int = setting(64, minimum=1)
    """Samples in each: a step of an episode, and the actions that follow"""
    samples_at_once: int = setting(0, minimum=0)
    """Samples that go through the policy together; 0: the whole batch. Fewer need
    less memory, and give the same gradient"""
    learning_rate: float = setting(3e-4, minimum=0, maximum=1)
    """Of AdamW, at its highest"""
    warmup_steps: int = setting(0, minimum=0)
    """Steps in which it rises to that"""
    schedule: str = setting("constant", choices=SCHEDULES)
    """What follows: constant; or cosine, which falls until max_steps"""
    final_learning_rate: float = setting(
        0.0, minimum=0, maximum=1, needs=Need("schedule=cosine", lambda c: c.schedule == "cosine")
    )
    """Where cosine ends, as a share of the highest"""
    weight_decay: float = setting(0.0, minimum=0, maximum=10)
    """Of AdamW"""
    gradient_clip: float = setting(1.0, minimum=0)
    """The longest that a gradient may be; 0: as long as it is"""
    lora: Lora = field(default_factory=Lora)
    recap: Recap = field(default_factory=Recap)
    log_period: int = setting(10, minimum=1)
    """Steps between two records of metrics"""
    checkpoint_period: int = setting(0, minimum=0)
    """Steps between two checkpoints; 0: one with every validation"""
    sinks: list[str] = field(default_factory=list)
    """Where metrics go besides: tensorboard, wandb, trackio; or another one by name or module:Class"""
    stop_on: list[str] = field(default_factory=list)
    """Alarms that end the run when they are raised, with a checkpoint, such as [not_finite, plasticity]"""
    seed: int = setting(0, minimum=0)
    """Of the split, the first weights, the batches and the scripts"""

    def check(self) -> None:
        """Raises for what cannot work, and for what would change nothing."""
        check(self)
        words(self)
        check_device(self.device)
        check_policy(self.policy, self.policy_options)
        if self.max_delay:
            check_policy(self.policy, options_of(self))
        check_stop_on(self.stop_on, self.facts)

    @property
    def facts(self) -> RunFacts:
        """What alarms must know of these settings."""
        is_known = is_new(self.policy) or document_of(self.policy)  # what is none is refused when it is opened
        moves = self.recap.guidance == 1 and (not is_known or policy_class(self.policy).has_log_prob)
        validates = self.validation > 0
        return RunFacts("sft", validates=validates, moves=moves, conditioned=validates and self.recap.threshold > 0)

    def conflicts(self, here: str) -> Iterator[str]:
        if not self.policy:
            yield (
                f"{here}policy is {self.policy!r}; expected the folder of a policy, or the name of a new one. Give "
                "policy=FOLDER, such as RUN/policy of `hilt train sft`, or policy=small_vla."
            )
        if self.recap.rounds and not self.tasks:
            yield f"{here}recap.rounds={self.recap.rounds}: in which tasks does the policy act? Give tasks=[NAME]."
        if not self.data and not self.demonstrations and (not self.recap.rounds or is_new(self.policy)):
            yield "there is nothing to learn from: give data=[PATH], or tasks=[tabletop/pick] and demonstrations=20."
        if self.stop_on and self.recap.rounds:
            yield (
                f"{here}stop_on={self.stop_on} with recap.rounds: each round is a run of its own. Leave stop_on out, "
                "or give it when a round is resumed (hilt train sft --run RUN/rounds/N/sft --resume stop_on=[NAME])."
            )
        if "rollout_precision" in self.policy_options:
            yield f"{here}policy_options.rollout_precision would do nothing: imitation has no rollouts. Leave it out."


def options_of(config: Sft) -> dict[str, Any]:
    """The options of the policy that learns."""
    delay = policy_class(config.policy).delay_options(config.max_delay) if config.max_delay else {}
    return {**config.policy_options, **delay}


def learning_rate(config: Sft, step: int) -> float:
    """The learning rate of a step, which are counted from 0."""
    shares = (step + 1) / config.max_steps, config.warmup_steps / config.max_steps
    return config.learning_rate * learning_rate_factor(*shares, config.schedule, config.final_learning_rate)


__all__ = ["Lora", "Sft", "learning_rate", "options_of"]
