"""The settings of RECAP, as a section of those of fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hilt.algos.config import CONDITIONS
from hilt.core.config import build
from hilt.core.errors import HiltError
from hilt.core.validate import Need, check, setting
from hilt.policies.base import Policy
from hilt.policies.conditioned import Condition
from hilt.value.value_config import ValueConfig

_ROUNDS = Need("{here}rounds above 0", lambda c: c.rounds)
_RECAP = Need("{here}threshold above 0", lambda c: c.threshold)


@dataclass
class Recap:
    """Learning from good and bad episodes by the advantages that a value model has written into their logs: the policy
    is conditioned on which steps are good, and acts as in good ones (`hilt.algos.offline.recap`)."""

    threshold: float = setting(0.0, minimum=0, below=1)
    """The share of what the policy did in each task that counts as bad, such as 0.6; what a person did is always good.
    0: all of it is imitated alike"""
    dropout: float = setting(0.3, minimum=0, below=1, needs=_RECAP)
    """The share of samples that are learned without the condition"""
    guidance: float = setting(1.0, above=0, maximum=20, needs=_RECAP)
    """How much the condition counts when the policy acts: 1 as it was learned, more for less of what was bad"""
    condition: str = setting("words", choices=CONDITIONS, needs=_RECAP)
    """What the policy is told it by: "words" behind the instruction; or an "embedding", which is learned and added to
    the token of the state, for policies that make little of words (small_vla, SmolVLA, pi0, OpenVLA-OFT)"""
    rounds: int = setting(0, minimum=0, maximum=100, needs=_RECAP)
    """How often the policy acts in its tasks, its episodes are labeled, and it learns from all of them; 0: it learns
    once, from data that has advantages"""
    episodes: int = setting(50, minimum=1, needs=_ROUNDS)
    """Episodes of each task in a round, from the states of the split train"""
    temperature: float = setting(1.0, above=0, needs=_ROUNDS)
    """The temperature at which the policy samples its actions in them"""
    value: dict[str, Any] = setting(factory=dict, needs=_ROUNDS)
    """Settings of the value model, as of `hilt train value`, such as {steps: 200}"""

    def conflicts(self, here: str) -> Iterator[str]:
        try:
            settings = build(ValueConfig(), self.value)
            check(settings)
        except HiltError as error:
            yield f"{here}value: {error}"
            return
        if settings.actions:
            yield f"{here}value.actions={settings.actions}: values of chunks give no advantages. Leave it out."
        if settings.stop_on:
            yield (
                f"{here}value.stop_on={settings.stop_on}: alarms of the value model are said, and end no round. "
                "Leave it out."
            )

    def conditioned(self, policy: Policy) -> Policy:
        """The policy with the condition, if there is one."""
        return Condition(self.guidance, self.dropout, self.condition).of(policy) if self.threshold else policy
