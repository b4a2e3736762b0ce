"""How much of the forward pass is computed once more for the gradient, chosen from the estimate of memory.

``policy_options.checkpointed=auto`` (OpenVLA) and ``policy_options.gradient_checkpointing=auto`` (pi0, SmolVLA) take
the least share of the layers, in eighths, with which a training step fits into the memory that is given:
`memory_limit_gb`, or what the device has free. A run decides when it begins and freezes the share with its settings.
Gradients are the same with any share; only their time and memory differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError
from hilt.policies.io.memory import Estimate, free_bytes, readable_size
from hilt.policies.registry import document_of, is_new, policy_class
from hilt.vla.config import Vla
from hilt.vla.footprint import needs, new_sizes

AUTO = "auto"
STEPS = 8
"""The shares that are tried are multiples of 1 / STEPS"""
USABLE = 0.9
"""The part of the given memory that an estimate may take: the allocator, the driver and the compiler need the rest"""
WHY = "recomputation_why"
"""The key of run.json"""


@dataclass(frozen=True)
class RecomputationChoice:
    """The share of the layers that are computed twice, and the reason in words."""

    name: str
    """The option of the policy"""
    share: float
    why: str
    roles: Mapping[str, Estimate] = field(default_factory=dict, compare=False)
    """The estimates with this share"""

    def __str__(self) -> str:
        return f"recomputation: policy_options.{self.name}={self.share:g} ({self.why})"


def settle(config: Vla) -> tuple[Vla, RecomputationChoice | None]:
    """The settings with `auto` replaced by a share, and the choice; None where no `auto` was given. Raises
    `ConfigError` where even the largest share does not fit."""
    name = _auto_option(config)
    if not name:
        return config, None
    given, sizes, found = given_bytes(config), new_sizes(config), dict[int, int]()
    roles: dict[int, dict[str, Estimate]] = {}

    def fits(step: int) -> bool:
        roles[step] = needs(_with_share(config, name, step / STEPS), sizes)
        found[step] = on_device(config, roles[step])
        return found[step] <= given

    low, high = 0, STEPS  # the first does not fit, and the second does
    if fits(low):
        high = low
    elif not fits(high):
        raise ConfigError(
            f"policy_options.{name}=auto: with all layers computed twice a training step needs "
            f"{readable_size(found[high])}, and {_given(config, given)}. Give fewer algorithm.batch.chunks_per_pass "
            f"than {config.algorithm.batch.chunks_per_pass}, adapters (lora.rank=32), or more memory."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    less = f"; {low / STEPS:g} would need {readable_size(found[low])}" if high else ""
    why = f"auto: a training step needs {readable_size(found[high])}, and {_given(config, given)}{less}"
    return _with_share(config, name, high / STEPS), RecomputationChoice(name, high / STEPS, why, roles[high])


def with_all(config: Vla) -> Vla:
    """The settings with all layers computed twice in place of `auto`."""
    name = _auto_option(config)
    return _with_share(config, name, 1.0) if name else config


def check_limit(config: Vla, choice: RecomputationChoice | None = None) -> None:
    """Raises `ConfigError` for settings that need more than `memory_limit_gb` by their estimate, which the `choice` has
    if there was one."""
    if not config.memory_limit_gb:
        return
    kind = policy_class(config.policy)
    if not kind.__module__.startswith("hilt."):
        if config.device.startswith("cuda"):
            return  # the allocator keeps to it
        raise ConfigError(
            f"memory_limit_gb={config.memory_limit_gb:g}: the memory of {kind.__name__}, a policy of another package, "
            f"is not estimated, and nothing limits it on {config.device}. Leave it out."
        )
    roles = needs(config, new_sizes(config)) if choice is None else choice.roles
    if (needed := on_device(config, roles)) > config.memory_limit_gb * 1e9:
        option = kind.recomputation_option
        auto = f"policy_options.{option}=auto, " if option else ""
        raise ConfigError(
            f"memory_limit_gb={config.memory_limit_gb:g}: a training step needs {readable_size(needed)}. Give {auto}"
            f"fewer algorithm.batch.chunks_per_pass than {config.algorithm.batch.chunks_per_pass}, adapters "
            "(lora.rank=32), or a higher limit."
        )


def described(choice: RecomputationChoice | None) -> dict[str, Any]:
    """What run.json has of it."""
    return {} if choice is None else {"recomputation": choice.share, WHY: str(choice)}


def lines(run: Path) -> list[str]:
    """What a command shows of a run that has chosen."""
    metadata = read_json(run / "run.json")
    return [str(metadata[WHY])] if WHY in metadata else []


def given_bytes(config: Vla) -> int:
    """The bytes that an estimate may take on the device of a rank."""
    limit = int(config.memory_limit_gb * 1e9) or free_bytes(config.device)
    return int(USABLE * limit)


def on_device(config: Vla, roles: Mapping[str, Estimate]) -> int:
    """The bytes that all roles of a rank have on its device at the worst moment. A reference on the host comes for
    its passes, when no activations of training are there."""
    ranks = config.placement.ranks if config.sharding.enabled else 1
    here = [one for role, one in roles.items() if not (role.startswith("reference") and config.reference.offload)]
    away = [one.total for role, one in roles.items() if role.startswith("reference") and config.reference.offload]
    kept = sum(one.weights + one.optimizer for one in here) // ranks
    return kept + max(sum(one.gradients // ranks + one.activations for one in here), *away, 0)


def _auto_option(config: Vla) -> str:
    """The option of the policy that is to be chosen; empty where there is none."""
    if not (is_new(config.policy) or document_of(config.policy)):
        return ""
    name = policy_class(config.policy).recomputation_option
    return name if name and config.policy_options.get(name) == AUTO else ""


def _with_share(config: Vla, name: str, share: float) -> Vla:
    return replace(config, policy_options={**config.policy_options, name: share})


def _given(config: Vla, given: int) -> str:
    where = "memory_limit_gb" if config.memory_limit_gb else f"{config.device}'s free memory"
    return f"{readable_size(given)} may be used ({USABLE:.0%} of {where})"
