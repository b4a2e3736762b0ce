"""Advantage estimators, policy losses and off-policy algorithms by name: the properties of
each, and the tables to which one file adds another.

    algorithm.estimator=grpo  algorithm.loss=clipped               built in
    algorithm.estimator=my_package.advantages:TopK                 a subclass of `Estimator`
    algorithm.loss=sapo                                            an entry point of the group hilt.losses: a subclass
                                                                   of `PolicyLoss`
    algorithm=my_package.td3:TD3                                   of a run with a person: a subclass of
                                                                   `OffPolicyAlgorithm`

Without torch, as the settings are: the formulas are in `hilt.algos.advantage`, `hilt.algos.surrogate`,
`hilt.algos.gspo`, `hilt.algos.cispo`, `hilt.algos.nft` and `hilt.algos.rlpd`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hilt.core.errors import ConfigError
from hilt.core.names import ExtensionPoint

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from hilt.algos.config import PolicyGradient, Rlpd
    from hilt.algos.rlpd import Networks, Transitions

ESTIMATORS = ExtensionPoint(
    "estimator",
    "hilt.estimators",
    {
        "grpo": "hilt.algos.advantage:Grpo",
        "dr_grpo": "hilt.algos.advantage:DrGrpo",
        "rloo": "hilt.algos.advantage:Rloo",
        "reinforce_plus_plus": "hilt.algos.advantage:ReinforcePlusPlus",
        "remax": "hilt.algos.advantage:Remax",
        "gae": "hilt.algos.advantage:Gae",
    },
)
LOSSES = ExtensionPoint(
    "loss",
    "hilt.losses",
    {
        "clipped": "hilt.algos.surrogate:ClippedSurrogate",
        "gspo": "hilt.algos.gspo:SequenceSurrogate",
        "cispo": "hilt.algos.cispo:WeightedLogProbability",
        "nft": "hilt.algos.nft:NegativeAware",
    },
)
ALGORITHMS = ExtensionPoint("algorithm", "hilt.algorithms", {"rlpd": "hilt.algos.rlpd:SoftActorCritic"})
"""Of runs with a person: those that learn from rewards. Imitation (bc, hg-dagger) is the agent's own"""


@dataclass(frozen=True)
class ScoredEpisodes:
    """The input of an advantage estimator: B episodes of T chunks of this rank,
    with zeros after the end of each episode."""

    rewards: Tensor
    """[B, T]: of the task, less what each chunk pays for its divergence"""
    task: Tensor
    """[B, T]: of the task alone"""
    paid: Tensor
    """[B, T]: what each chunk pays"""
    returns: Tensor
    """[B, T]: the discounted sum of `rewards` from each chunk on"""
    mask: Tensor
    """[B, T]: 1 up to the end of an episode"""
    group: Tensor
    """[B]: the number of the group to which an episode belongs, whose members began in the same state"""
    normalization: str
    """The setting `normalize`, with "auto" replaced by the estimator's own. "batch" is
    done by the caller, "group" by the estimator"""
    values: Tensor | None = None
    """[B, T]: what the critic expects; for estimators with `needs_critic`"""
    baseline: Tensor | None = None
    """[B]: the score of a greedy episode from the same state; for estimators with `needs_greedy`"""
    beside: tuple[Tensor, Tensor] | None = None
    """Scores [M] and groups [M] of members that belong to other batches and are compared with, too"""


class Estimator(ABC):
    """How much better each chunk was than could be expected. A subclass declares what it needs, and computes them."""

    grouped: ClassVar[bool] = False
    """Whether it compares the members of a group: collect.group_size must be at least 2,
    and filters may drop groups by their outcome"""
    leave_one_out: ClassVar[bool] = False
    """Whether a member of a group is compared with the others alone; a process reward is compared in the same way"""
    needs_critic: ClassVar[bool] = False
    """Whether it needs values: the run has a critic then, which learns `value_targets`"""
    needs_greedy: ClassVar[bool] = False
    """Whether it needs the score of a greedy episode for each group, which the run collects then"""
    normalization: ClassVar[str] = "none"
    """What normalize=auto stands for: "none", "group" or "batch" """
    filtered: ClassVar[str] = "it does not compare the members of a group"
    """Unless `grouped`: what goes wrong when groups are chosen by their outcome, as a clause of an error"""

    @abstractmethod
    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        """Advantages [B, T]; what is after the end of an episode does not matter."""

    def value_targets(self, episodes: ScoredEpisodes, settings: PolicyGradient, advantages: Tensor) -> Tensor:
        """What a critic is to predict [B, T]."""
        return episodes.returns


class PolicyLoss(ABC):
    """The loss of each term of an update; a term is a number, an action or a chunk, depending on `ratio`."""

    uses: ClassVar[frozenset[str]] = frozenset()
    """The settings clip_low, clip_high and dual_clip that it reads; others are refused, for they would do nothing"""
    mean_ratio: ClassVar[bool] = False
    """Whether the log-ratio of a term is the mean over its numbers, and not their sum; the importance weight of
    recompute_log_prob is of the same mean"""

    def conflicts(self, settings: PolicyGradient, here: str) -> Iterator[str]:
        """Sentences about settings that do not go with it. `here` stands before their names."""
        yield from ()

    def figures(self, settings: PolicyGradient) -> list[str]:
        """The names of the figures that `terms` gives besides the loss: the same ones each time."""
        return []

    @abstractmethod
    def terms(
        self, log_ratio: Tensor, advantage: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of each term, with gradients, and figures of each term by name. `log_ratio`: log p - log p_old, with
        gradients; `advantage`: of the same shape, without."""


class FlowLoss(PolicyLoss):
    """A loss of the velocity of a flow, which needs no log-probabilities. A term is one number of a chunk; the settings
    `nft.*` say where the velocity is looked at."""

    @abstractmethod
    def flow_terms(
        self, error: Tensor, old_error: Tensor, times: Tensor, advantage: Tensor, mask: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of each number [R, chunk, action_dim], with gradients, and figures of each number by name. `error`
        [R, K, chunk, action_dim]: the velocity at K draws of noise and times [R, K], less the one of the action that
        was drawn, with gradients; `old_error`: that of the policy before the update; `advantage` [R]; `mask`: the
        numbers that were carried out."""

    def terms(
        self, log_ratio: Tensor, advantage: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        raise ConfigError(f"algorithm.loss={settings.loss} is of a flow's velocity, and has no ratio. Give clipped.")


class OffPolicyAlgorithm(ABC):
    """How the networks of the built-in agent learn from transitions. It is made with
    the setting algorithm_options as arguments."""

    def setup(self, networks: Networks, width: int, actions: int, seed: int) -> None:  # noqa: B027
        """Called once, before the first update, and again when the agent begins anew: for networks of its own, of
        states ``[B, width]`` and continuous actions ``[B, actions]``."""

    @abstractmethod
    def update(
        self,
        networks: Networks,
        batch: Transitions,
        settings: Rlpd,
        generator: Generator,
        which: frozenset[str],
        actor_updates: int,
        target_entropy: float,
    ) -> dict[str, float]:
        """One gradient step of each network in `which`, by its optimizer; gives figures for the metrics.
        `settings` are agent.rlpd's, of which it may use some; `actor_updates`: how many the actor has had. All
        that is random comes from `generator`."""

    def state_dict(self) -> dict[str, object]:
        """Tensors and numbers of its own that a checkpoint has to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:  # noqa: B027
        """Takes over what `state_dict` gave."""


def off_policy_algorithm(name: str, options: Mapping[str, object]) -> OffPolicyAlgorithm:
    """The algorithm of this name with these options, if its code may be run."""
    kind: Callable[..., OffPolicyAlgorithm] = ALGORITHMS.load_class(name, OffPolicyAlgorithm)
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(
            f"algorithm={name} cannot be made with algorithm_options={dict(options)}: {error}. Correct them."
        ) from error


def estimator(name: str) -> Estimator:
    """The estimator of this name, if its code may be run."""
    return ESTIMATORS.load_class(name, Estimator)()


def policy_loss(name: str) -> PolicyLoss:
    """The loss of this name, if its code may be run."""
    return LOSSES.load_class(name, PolicyLoss)()
