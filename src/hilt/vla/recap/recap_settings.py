"""The settings of RECAP, as a section of those of fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from hilt.core.validate import Need, setting
from hilt.policies.base import Policy
from hilt.policies.conditioned import ConditionedPolicy

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

    def conditioned(self, policy: Policy) -> Policy:
        """The policy with the condition, if there is one."""
        if not self.threshold:
            return policy
        inside = policy.policy if isinstance(policy, ConditionedPolicy) else policy
        return ConditionedPolicy(inside, self.guidance, self.dropout)
