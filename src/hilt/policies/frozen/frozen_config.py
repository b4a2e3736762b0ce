"""The settings of an agent beside a frozen policy, and the names that its columns have. This module does not import
torch, so that commands that only read settings are fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hilt.core.config import build
from hilt.core.errors import ConfigError
from hilt.core.validate import Need, check, setting
from hilt.policies.agent.config import FROZEN_VLA as FROZEN_VLA
from hilt.policies.registry import check_policy, is_new

BASE_POLICY = "base_policy"
"""Observations have the columns of a frozen policy under this name, and under the hash of its weights below it"""
FEATURES, ACTIONS, STATE = "features", "actions", "state"
"""What it computes before an action is chosen; the first actions of its chunk, from -1 to 1; and the state that it was
shown, if it looks at one"""
NOISE, NOISE_ACTIONS = "noise", "noise_actions"
"""Draws of the noise of its flow, and the actions that they become: `hilt.policies.frozen.acted_noise`"""
STEP_NOISE = "noise"
"""A column of steps: the noise ``start`` that the actor began a plan with in this step, if that is ``known``"""
SPACES = ("residual", "edit", "noise")
GRADIENTS = ("auto", "flow", "critic")
_RESIDUAL = Need("{here}space=residual", lambda c: c.space == "residual")
_NOISE = Need("{here}space=noise", lambda c: c.space == "noise")
_CRITIC = Need(
    "a critic of noise ({here}space=noise, and {here}noise_gradient=critic or a policy that needs one)",
    lambda c: c.space == "noise" and c.noise_gradient != "flow",
)
_PULL = Need("{here}pull", lambda c: c.pull > 0)


@dataclass
class FrozenOptions:
    """``agent.options`` of an agent of this kind."""

    policy: str = ""
    """The folder of the policy that stays as it is, such as RUN/policy of `hilt train sft`"""
    policy_options: dict[str, Any] = field(default_factory=dict)
    """What it is loaded with, such as precision"""
    suite: str = ""
    """Whose names observations and actions have, as for `hilt train sft`; empty: the task's"""
    columns: dict[str, str] = field(default_factory=dict)
    """Instead of a suite: the policy's names to paths in the observations, such as {full_image: images/front, state:
    state/tcp_pose+state/gripper_pose}"""
    instruction: str = ""
    """What is to be done, in words; empty: what the task says"""
    space: str = setting("residual", choices=SPACES, noun="space of a frozen policy")
    """What the agent decides: "residual": a correction of the policy's actions, within a bound; "edit": any action,
    from the policy's on; "noise": the initial noise of the policy's flow"""
    bound: float = setting(0.3, above=0, maximum=2, needs=_RESIDUAL)
    """The largest correction of each number of an action, which ranges from -1 to 1"""
    pull: float = setting(2.0, minimum=0)
    """Weight of the mean squared distance from the policy's actions in the actor's loss"""
    pull_halved_after: int = setting(0, minimum=0, needs=_PULL)
    """The number of updates of the actor, after those of agent.rlpd.critic_warmup, by which the pull halves, again and
    again; 0: it stays as it is"""
    noise_bound: float = setting(1.5, above=0, needs=_NOISE)
    """The largest initial noise of each number, in standard deviations of the noise that the flow was trained with"""
    noise_gradient: str = setting("auto", choices=GRADIENTS, noun="gradient of noise", needs=_NOISE)
    """What the actor of noise learns by: "flow": the gradient of the critics through the policy's flow, of a small_vla;
    "critic": a critic of noise, which the critics of actions teach; "auto": flow where that can be, or else critic"""
    noise_samples: int = setting(1, minimum=0, needs=_CRITIC)
    """The number of draws of noise that are decoded with each frame, besides the actor's, to teach a critic of noise;
    each takes as long as a plan of the policy. 0: it learns from what the actor has executed alone"""
    repeat_noise: bool = setting(True, needs=_CRITIC)
    """Whether all actions of a plan begin with the same noise, so that the actor of noise decides few numbers; without,
    each of them has its own"""

    def conflicts(self, here: str) -> Iterator[str]:
        if not self.policy or is_new(self.policy):
            yield (
                f"{here}policy is {self.policy!r}; expected the folder of a policy that has imitated "
                "demonstrations, which `hilt train sft` makes."
            )


def frozen_options(options: Mapping[str, object]) -> FrozenOptions:
    """The options of an agent, checked as far as possible without loading its policy."""
    made = build(FrozenOptions(), options)
    check(made, "agent.options")
    check_policy(made.policy, made.policy_options, "agent.options.policy")
    return made


def base_path(weights: str, name: str) -> str:
    """The path of a column in observations, such as ``base_policy/0f3a/features``; `weights` is the hash."""
    return f"{BASE_POLICY}/{weights}/{name}"


def base_hash(paths: Iterable[str]) -> str:
    """Returns the hash of the weights whose columns are among these paths, of observations or of a log; empty if there
    are none."""
    for path in paths:
        parts = path.split("/")
        if BASE_POLICY in parts[:-2]:
            return parts[parts.index(BASE_POLICY) + 1]
    return ""


def check_same_weights(found: str, wanted: str, what: str) -> None:
    """Refuses columns that were computed with other weights: they would mean something else."""
    if found and found != wanted:
        raise ConfigError(
            f"{what} has features and actions of a policy whose weights have the hash {found}, and those of this run's "
            f"agent.options.policy have {wanted or 'none'}. Give the policy with which they were computed, or "
            "data without them, in a new run (hilt data convert LOG NEW --drop observations/base_policy)."
        )
