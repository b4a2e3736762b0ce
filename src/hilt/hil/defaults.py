"""Defaults by the size of the problem: settings without a value are chosen when a
run begins, from the observations of the policy.

The defaults of `Hil` are HIL-SERL's, for images on an arm. A policy that sees numbers alone needs none of that
machinery: its networks are the two MLPs of soft actor-critic without a branch in front of them, one update for each
step of a simulation is affordable, and twenty demonstrations are imitated in seconds. With `defaults=auto` such a run
has the settings below wherever they were not given (see `hilt.core.config.given`) and are still `Hil`'s own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from hilt.core import validate
from hilt.core.checksums import read_json
from hilt.core.config import build, given
from hilt.core.tree import unflatten
from hilt.core.validate import value_of
from hilt.hil.config import Hil
from hilt.policies.agent.config import FROZEN_VLA
from hilt.policies.agent.layout import fit
from hilt.recording.recording_folder import nested
from hilt.replay.schema import spec_of_space

STATE: dict[str, Any] = {
    "agent.encoder.kind": "none",
    "agent.proprio_width": 0,
    "agent.activation": "relu",
    "cta_ratio": 1,
    "steps_per_update": 10,
    "log_period": 50,
}
"""Of a policy that sees no images: no encoder and no branch for proprioception; every update is one of all networks"""
SHOWN: dict[str, Any] = {
    "agent.normalize_proprio": True,
    "agent.encoder.pretrain_updates": 1_000,
    "agent.actor_scale": 0.1,
    "agent.initial_std": 0.2,
    "agent.std_range": [0.0183, 1.65],
    "agent.rlpd.learning_rate": 5e-4,
    "agent.rlpd.tau": 0.01,
    "agent.rlpd.actor_q": "min",
    "agent.rlpd.actor_average": 0.005,
    "agent.rlpd.critic_warmup": 1_000,
    "agent.rlpd.imitation_loss": "mse",
    "agent.rlpd.imitation_weight": 2.0,
    "agent.rlpd.imitation_updates": 20_000,
    "n_step": 3,
    "batch_size": 128,
}
"""Where there are demonstrations, too: they are imitated first, and on while the critics
learn, as the recipes of the tabletop suite have it"""
FROZEN: dict[str, Any] = {
    "agent.encoder.kind": "none",
    "agent.proprio_width": 0,
    "agent.activation": "relu",
    "agent.actor_scale": 0.01,
    "agent.initial_std": 0.1,
    "agent.std_range": [0.0183, 0.3],
    "agent.rlpd.actor_q": "min",
    "cta_ratio": 1,
    "steps_per_update": 10,
    "log_period": 50,
}
"""Beside a frozen policy, of which the agent sees numbers: it begins as that policy acts"""
SIMULATED_AHEAD = 200
"""The number of steps that a simulation may be ahead of the learner, with which it shares the processor"""


class DefaultsChoice(NamedTuple):
    """The defaults of a run, the reason for them, and the settings that follow."""

    name: str
    why: str
    changed: dict[str, Any]

    def __str__(self) -> str:
        if not self.changed:
            return f"defaults: {self.name}, {self.why}"
        return (
            f"{self.why}: {', '.join(f'{key}={value}' for key, value in self.changed.items())} "
            "(defaults=images leaves them as they are)"
        )

    def described(self) -> dict[str, object]:
        """What run.json has of it."""
        return {"defaults": self.name, "defaults_why": self.why, "defaults_changed": self.changed}


def chosen(config: Hil, made: Any) -> tuple[Hil, DefaultsChoice]:
    """The settings with `defaults` replaced by what is chosen, and the choice. `made`:
    the environment's spaces, and `keeps_rate`."""
    seen = nested(spec_of_space(made.observation_space, "observation_space"))
    sees = fit(seen, made.action_space, config.agent, config.image_keys, config.proprio_keys)
    looks = bool(sees.images) and config.agent.encoder.kind != "none"
    frozen = config.agent.kind == FROZEN_VLA
    if config.agent.kind != "actor_critic" and not frozen and config.defaults == "auto":
        return replace(config, defaults="images"), DefaultsChoice(
            "images", f"agent.kind={config.agent.kind} is another agent", {}
        )
    name = config.defaults if config.defaults != "auto" else "images" if looks and not frozen else "state"
    if name != "state":
        return replace(config, defaults=name), DefaultsChoice(
            name, f"the policy sees {len(sees.images)} images" if looks else "as set", {}
        )
    wanted = {**STATE, **(SHOWN if config.demonstrations or config.demo_path else {})} if not frozen else dict(FROZEN)
    if (
        not made.keeps_rate
        and not config.control_hz
        and config.operator in ("", "script")
        and not 0 < config.update_to_data < 1
    ):
        wanted["max_ahead"] = max(SIMULATED_AHEAD, config.training_starts)
    plain, width = Hil(), sum(_size(sees.shapes[path].shape) for path in sees.proprio)
    unset = [key for key in wanted if key not in given(config) and value_of(config, key) == value_of(plain, key)]
    changed = {key: wanted[key] for key in unset if wanted[key] != value_of(config, key)}
    tried = build(config, _tree(changed))
    for key, need in validate.needs(Hil):
        if not need.there(tried):
            changed.pop(key, None)
    why = f"state only: the policy sees {width} numbers and no images"
    why = "the policy sees what the frozen one computes" if frozen else why
    return replace(build(config, _tree(changed)), defaults=name), DefaultsChoice(name, why, changed)


def lines(run: Path) -> list[str]:
    """What a command shows of a run's choice: the settings that follow, if there are any."""
    metadata = read_json(run / "run.json")
    if not metadata.get("defaults_changed"):
        return []
    return [str(DefaultsChoice(metadata["defaults"], metadata["defaults_why"], metadata["defaults_changed"]))]


def _tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted keys as a tree of them."""
    return unflatten({key.replace(".", "/"): value for key, value in settings.items()})


def _size(shape: tuple[int, ...]) -> int:
    return reduce(lambda a, b: a * b, shape, 1)
