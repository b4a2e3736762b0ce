"""Steps of an episode, and the source of each action."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.tree import Json, Tree

INSTRUCTION = "language_instruction"
"""The fact with the instruction of an episode, whatever a format calls it."""
ESTIMATES = "estimates"
"""The fact with what a value model found about every step of an episode."""
STOPPED = "stopped_by_value"
"""The fact of an episode that a value model ended as hopeless, before its outcome was known: the probability of success
then."""
STARTS = "starts.json"
"""How often the learner of a run with a person was started: a file of the run, beside its log"""
VERSIONS_PER_START = 1_000_000
"""Each start numbers its weights from a million on that none before it had: no number ever means two sets of weights"""


class Source(enum.IntEnum):
    """Who chose a step's action."""

    POLICY = 0
    HUMAN = 1
    DEMO = 2
    RANDOM = 3

    @classmethod
    def parse(cls, value: Source | int | str) -> Source:
        """``"human"``, ``1`` or ``Source.HUMAN``."""
        if isinstance(value, str):
            if value.upper() not in cls.__members__:
                raise UnknownNameError("source", value, (s.name.lower() for s in cls))
            return cls[value.upper()]
        if value not in list(cls):
            raise ConfigError(
                f"source {value!r} is not one of {', '.join(f'{s.value} ({s.name.lower()})' for s in cls)}."
            )
        return cls(value)


@dataclass(frozen=True)
class Step:
    """One transition: an observation, an action, its reward and the next observation."""

    observation: Tree
    """The observation before the action."""
    action: npt.ArrayLike
    """The action that was executed."""
    reward: float
    """The reward of the step."""
    next_observation: Tree
    """The observation after the action."""
    terminated: bool = False
    """The task came to its end: nothing follows, so nothing is bootstrapped."""
    truncated: bool = False
    """The episode was cut short (time limit, operator): values are bootstrapped from the next observation."""
    source: Source = Source.POLICY
    """Who acted."""
    policy_version: int = -1
    """Version of the weights that chose the action; -1 when no policy did."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the epoch at which the step was ``observed``, its action ``sent`` and ``applied``."""
    extra: Tree = field(default_factory=dict)
    """Any further columns."""

    def columns(self) -> Tree:
        """The step as the nested columns a log stores."""
        times = {"times": {k: np.float64(v) for k, v in self.times.items()}} if self.times else {}
        return {
            "observations": self.observation,
            "actions": self.action,
            "rewards": self.reward,
            "next_observations": self.next_observation,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "source": int(self.source),
            "policy_version": self.policy_version,
            **times,
            **self.extra,
        }


def ends_from_done_and_mask(done: bool, mask: float) -> tuple[bool, bool]:
    """(terminated, truncated) from HIL-SERL's fields: done with mask 0 is terminated, done with mask 1 is truncated."""
    return bool(done and mask == 0.0), bool(done and mask != 0.0)


def text_fact(texts: Sequence[str]) -> Json:
    """A text of each step as one fact: the text itself where it stays the same, or
    else the texts and the steps they begin at."""
    begins = [i for i, text in enumerate(texts) if not i or text != texts[i - 1]]
    if len(begins) == 1:
        return texts[0]
    return {"texts": [texts[i] for i in begins], "begins": begins}


def texts_of(fact: Any, length: int) -> list[str]:
    """The text of each step from what `text_fact` made of them; empty where the fact is something else."""
    if isinstance(fact, str):
        return [fact] * length
    try:
        ends = [*fact["begins"][1:], length]
        pieces = zip(fact["texts"], fact["begins"], ends, strict=True)
        texts = [str(text) for text, begin, end in pieces for _ in range(begin, min(end, length))]
    except (KeyError, TypeError, ValueError):
        texts = []
    return [*texts, *[""] * length][:length]
