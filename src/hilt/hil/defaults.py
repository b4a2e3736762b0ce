"""Defaults by the size of the problem: settings without a value are chosen when a
run begins, from the observations of the policy.

The defaults of `Hil` are HIL-SERL's, for images on an arm. A policy that sees numbers alone needs none of that
machinery: its networks are the two MLPs of soft actor-critic without a branch in front of them, one update for each
step of a simulation is affordable, and twenty demonstrations are imitated in seconds. With `defaults=auto` such a run
has the settings below wherever they were not given (see `hilt.core.config.given`) and are still `Hil`'s own.

An encoder of images that is trained all along needs a GPU: a CPU makes one update in a second or two. With
demonstrations, and on a CPU, the encoder is therefore trained by imitating them, and then frozen, as in the recipes of
the tabletop suite.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from hilt.core import validate
from hilt.core.checksums import read_json
from hilt.core.config import build, given
from hilt.core.errors import ConfigError
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
FROZEN_ENCODER: dict[str, Any] = {
    **{key: value for key, value in STATE.items() if key != "agent.encoder.kind"},
    **SHOWN,
    "agent.encoder.training": "frozen",
    "agent.encoder.pretrain_crop": 3,
    "agent.encoder.kept_shifts": 8,
}
"""Of a policy that sees images, where a CPU learns and there are demonstrations: features of eight shifts of each image
are kept, so that an update reads numbers"""
OWN_ENCODER = (*(f"agent.encoder.{name}" for name in ("kind", "weights", "training", "pretrain_updates")),)
OWN_ENCODER += ("agent.rlpd.random_crop",)
"""Settings with which a run has chosen for itself how its encoder is trained"""
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
    if config.agent.kind not in ("actor_critic", FROZEN_VLA) and config.defaults == "auto":
        why = f"agent.kind={config.agent.kind} is another agent"
        return replace(config, defaults="images"), DefaultsChoice("images", why, {})
    name, why = _named(config, sees)
    if name == "images":
        return replace(config, defaults=name), DefaultsChoice(name, why, {})
    wanted = dict(FROZEN if config.agent.kind == FROZEN_VLA else FROZEN_ENCODER if name == "frozen_encoder" else STATE)
    if name == "state" and _is_shown(config) and config.agent.kind != FROZEN_VLA:
        wanted |= SHOWN
    if not sees.proprio:
        wanted = {key: value for key, value in wanted.items() if "proprio" not in key}
    if (
        not made.keeps_rate
        and not config.control_hz
        and config.operator in ("", "script")
        and not 0 < config.update_to_data < 1
    ):
        wanted["max_ahead"] = max(SIMULATED_AHEAD, config.training_starts)
    if "agent.encoder.pretrain_crop" in given(config):  # there may be no room for several shifts
        wanted.pop("agent.encoder.kept_shifts", None)
    changed = _unset(config, wanted)
    if name == "frozen_encoder":
        _check_frozen_encoder(build(config, _tree(changed)))
    return replace(build(config, _tree(changed)), defaults=name), DefaultsChoice(name, why, changed)


def _named(config: Hil, sees: Any) -> tuple[str, str]:
    """The name of the defaults, and why these: as they are set, or what fits what the policy sees."""
    looks = bool(sees.images) and config.agent.encoder.kind != "none"
    pictures = f"the policy sees {len(sees.images)} image{'s' * (len(sees.images) != 1)}"
    name = config.defaults
    if config.agent.kind == FROZEN_VLA and name != "images":
        return "state", "the policy sees what the frozen one computes"
    if name == "frozen_encoder" and not (looks and _is_shown(config)):
        raise ConfigError(
            "defaults=frozen_encoder trains an encoder of images by imitating demonstrations: expected a task with "
            f"images, and demonstrations=N or demo_path=[...]. Here {pictures}, and there are "
            f"{'some' if _is_shown(config) else 'no'} demonstrations."
        )
    if name == "frozen_encoder" or (name == "auto" and looks and _is_shown(config) and _leaves_encoder(config)):
        by_cpu = " and learns on a CPU" if name == "auto" else ""
        return "frozen_encoder", f"{pictures}{by_cpu}, so that demonstrations train its encoder first"
    if name == "images" or (name == "auto" and looks):
        return "images", pictures if looks else "as set"
    width = sum(_size(sees.shapes[path].shape) for path in sees.proprio)
    return "state", f"state only: the policy sees {width} numbers and no images"


def _is_shown(config: Hil) -> bool:
    """Whether there are demonstrations."""
    return bool(config.demonstrations or config.demo_path)


def _leaves_encoder(config: Hil) -> bool:
    """Whether a run learns by RLPD on a CPU, and has not chosen how its encoder is trained."""
    plain = Hil()
    own = any(key in given(config) or value_of(config, key) != value_of(plain, key) for key in OWN_ENCODER)
    return config.algorithm == "rlpd" and config.agent.device == "cpu" and not own


def _check_frozen_encoder(config: Hil) -> None:
    """Raises where a setting that was given contradicts ``defaults=frozen_encoder``."""
    agent = config.agent
    if agent.kind != "actor_critic" or agent.encoder.training != "frozen" or not agent.encoder.pretrain_updates:
        raise ConfigError(
            "defaults=frozen_encoder freezes the encoder of agent.kind=actor_critic once demonstrations have trained "
            f"it: agent.kind={agent.kind}, agent.encoder.training={agent.encoder.training} and "
            f"agent.encoder.pretrain_updates={agent.encoder.pretrain_updates} do not go together with that. Leave them "
            "out, or give defaults=images."
        )


def _unset(config: Hil, wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of the settings that nobody has given, that differ, and that do something in this run."""
    plain = Hil()
    unset = [key for key in wanted if key not in given(config) and value_of(config, key) == value_of(plain, key)]
    changed = {key: wanted[key] for key in unset if wanted[key] != value_of(config, key)}
    tried = build(config, _tree(changed))
    idle = {key for key, need in validate.needs(Hil) if not need.there(tried)}
    return {key: value for key, value in changed.items() if key not in idle}


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
