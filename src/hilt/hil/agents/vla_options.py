"""The options of a vision-language-action policy in a run with a person, and the policy that they describe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hilt.core.config import build
from hilt.core.validate import Need, check, setting
from hilt.envs.chunk_executor import MODES
from hilt.policies.base import Policy
from hilt.policies.conditioned import Condition
from hilt.policies.registry import check_policy, is_new, load_policy
from hilt.serving.remote_policy import is_address

_ADAPTERS = Need("lora_rank=N", lambda c: c.lora_rank)
_SAMPLES = Need("sample=true", lambda c: c.sample)


@dataclass
class VlaOptions:
    """``agent.options`` of an agent of this kind."""

    policy: str = ""
    """The folder of the policy to begin with, such as RUN/policy of `hilt train sft`"""
    policy_options: dict[str, Any] = field(default_factory=dict)
    """What it is loaded with, such as precision"""
    server: str = ""
    """Where actors ask for actions: the address of `hilt serve-policy RUN`; empty: they compute them, with the
    weights that the learner sends"""
    server_key: str = setting("", needs=Need("{here}server=ws://HOST:PORT", lambda c: c.server))
    """The file with the key that the server asks for; for hilt://HOST:PORT the folder of keys; empty: none"""
    suite: str = ""
    """Whose names observations and actions have, as for `hilt train sft`; empty: the task's"""
    columns: dict[str, str] = field(default_factory=dict)
    """Instead of a suite: the policy's names to paths in the observations, such as {full_image: images/front, state:
    state/tcp_pose+state/gripper_pose}"""
    instruction: str = ""
    """What is to be done, in words; empty: what the task says"""
    mode: str = setting("synchronous", choices=MODES)
    """What the arm does while the policy plans: see `hilt.envs.chunk_executor`"""
    execute: int = setting(0, minimum=0)
    """Number of actions of each chunk that are executed before the next plan; 0: all"""
    ensemble_decay: float = setting(
        0.01, minimum=-10, maximum=10, needs=Need("{here}mode=ensemble", lambda c: c.mode == "ensemble")
    )
    """How much less a chunk weighs than the one before it, where several are averaged"""
    sample: bool = False
    """Whether an actor samples its actions; otherwise they are the likeliest ones"""
    temperature: float = setting(1.0, above=0, needs=_SAMPLES)
    """The temperature of these samples"""
    learning_rate: float = setting(1e-4, above=0)
    """The learning rate of AdamW"""
    halved_after: int = setting(0, minimum=0)
    """Number of updates after which the learning rate has fallen to a half; after n updates it is learning_rate /
    sqrt(1 + 3 n / halved_after). 0: it is constant"""
    weight_decay: float = setting(0.0, minimum=0)
    """The weight decay of AdamW"""
    gradient_clip: float = setting(1.0, minimum=0)
    """The largest norm of a gradient; 0: no limit"""
    average: float = setting(0.0, minimum=0, maximum=1)
    """The policy that acts and is evaluated is a moving average of the one that is trained, and takes over this share
    of it at each update; 0: it is the trained one itself"""
    lora_rank: int = setting(0, minimum=0)
    """The rank of adapters, which then are all that is trained and sent to actors; 0: all weights are"""
    lora_alpha: float = setting(16.0, above=0, needs=_ADAPTERS)
    """Adapters count alpha / rank times"""

    def learning_rate_after(self, updates: int) -> float:
        """Returns the learning rate after this number of updates."""
        if not self.halved_after:
            return self.learning_rate
        return self.learning_rate / math.sqrt(1 + 3 * updates / self.halved_after)

    def conflicts(self, here: str) -> Iterator[str]:
        if not self.policy or is_new(self.policy):
            yield (
                f"{here}policy is {self.policy!r}; expected the folder of a policy that has imitated "
                "demonstrations, which `hilt train sft` makes."
            )
        if "rollout_precision" in self.policy_options:
            yield (
                f"{here}policy_options.rollout_precision: with a person nothing corrects for another precision "
                "of acting. Leave it out."
            )
        if self.server and self.mode == "ensemble":
            yield (
                f"{here}mode=ensemble with {here}server: while the server is lost, earlier chunks would go on in the "
                "mean. Leave server out, or give mode=asynchronous."
            )
        if self.server and not is_address(self.server):
            yield f"{here}server is {self.server!r}; expected ws://HOST:PORT, wss://HOST:PORT or hilt://HOST:PORT."


def check_options(options: Mapping[str, object]) -> VlaOptions:
    """The options of an agent, checked as far as possible without loading its policy."""
    made = build(VlaOptions(), options)
    check(made, "agent.options")
    check_policy(made.policy, made.policy_options, "agent.options.policy")
    return made


def open_policy(
    options: VlaOptions,
    device: str = "cpu",
    seed: int = 0,
    trained: Mapping[str, Any] | None = None,
    condition: Condition | None = None,
) -> Policy:
    """The policy of these options, with adapters if it has some. `trained`: weights that a run has trained since.
    `condition`: what it is conditioned with, in a run with algorithm=recap."""
    policy: Policy = load_policy(options.policy, device=device, **options.policy_options)
    if options.lora_rank:
        from hilt.policies.io.lora import attach

        attach(policy, options.lora_rank, options.lora_alpha, seed=seed, dtype=torch.float32)
    policy = policy if condition is None else condition.of(policy)
    parameters = dict(policy.named_parameters())
    with torch.no_grad():
        for name, tensor in (trained or {}).items():
            parameters[name].copy_(tensor.to(parameters[name].device, parameters[name].dtype))
    return policy
