"""The vision-language-action policies by name. Wherever a policy is named, it is
named by folder, by name, or as ``module:Class``.

    policy=runs/sft/policy           a folder of any policy here: its config.json says which in ``model_type``
    policy=small_vla                 a new one, whose sizes come from the task or the data; or a name that a package
                                     has registered
    policy=my_package.policies:Mine  the same of a class of one's own: a subclass of `hilt.policies.base.Policy`

A ``model_type`` may be ``module:Class``, too. That is code which a file names: it
runs only if it may (`hilt.core.trust`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core import hub, trust
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.names import ExtensionPoint

if TYPE_CHECKING:
    from hilt.policies.base import Policy

POLICIES = ExtensionPoint(
    "policy",
    "hilt.policies",
    {
        "small_vla": "hilt.policies.vla.small_vla:SmallVLA",
        "act": "hilt.policies.act.act_policy:ACT",
        "openvla": "hilt.policies.vla.openvla:OpenVLAPolicy",
        "pi0": "hilt.policies.vla.pi0:Pi0",
        "smolvla": "hilt.policies.vla.smolvla:SmolVLA",
        "frozen_vla": "hilt.policies.frozen.frozen_policy:FrozenVlaPolicy",
        "conditioned": "hilt.policies.conditioned:ConditionedPolicy",
    },
)
PUBLISHED = ("openvla", "pi0", "smolvla", "frozen_vla", "conditioned")
"""Policies that are not made anew but by an option: with a folder of this name, the folder is meant"""
MODEL_TYPES = {"hilt_small_vla": "small_vla", "hilt_act": "act", "pi05": "pi0", "hilt_conditioned": "conditioned"}
"""The ``model_type`` of folders whose policy has another name here"""
CONFIG = "config.json"


def is_new(policy: str) -> bool:
    """Whether a setting asks for a new policy, by its name or as ``module:Class``, and not for the one in a folder."""
    return POLICIES.is_name(policy) and not (policy in PUBLISHED and Path(policy, CONFIG).is_file())


def policy_class(policy: str) -> type[Policy]:
    """The class of the policy that a setting names."""
    from hilt.policies.base import Policy

    return POLICIES.load_class(policy if is_new(policy) else kind_of(hub.local(policy)), Policy)


def check_policy(policy: str, options: Mapping[str, object], setting: str = "policy") -> None:
    """Refuses a policy that is not there, and a new one that cannot be made with these options."""
    if is_new(policy):
        policy_class(policy).check_options(options)
    elif not hub.local(policy).is_dir():
        raise ConfigError(
            f"{setting}={policy}: expected the folder of a checkpoint, or small_vla for a new one. Give a "
            "folder on this machine, a name that `hilt fetch` has shown, one of "
            f"{', '.join(POLICIES.known())}, or module:Class."
        )


def new_policy(policy: str, sizes: Mapping[str, object], options: Mapping[str, object], seed: int) -> Policy:
    """A policy that has learned nothing. `sizes`: see `policy_sizes`."""
    made = policy_class(policy).create(sizes, options, seed)
    for name in ("chunk", "action_dim"):
        if not isinstance(getattr(made, name, None), int):
            raise ConfigError(f"policy={policy}: it has no {name}; expected a whole number, see docs/extending.md.")
    return made


def load_policy(folder: str | os.PathLike[str], **options: Any) -> Policy:
    """The policy in a folder, or of a name that `hilt fetch` has shown, by its
    config.json. `options` are its `from_pretrained`'s."""
    from hilt.policies.base import Policy

    place = hub.local(folder)
    loaded: Policy = POLICIES.load_class(kind_of(place), Policy).from_pretrained(place, **options)
    return loaded


def kind_of(folder: Path) -> str:
    """The name of the policy that a folder holds. Code that the folder names is noted as named by a file."""
    if not (path := folder / CONFIG).exists():
        made = folder / "policy"
        cure = f"This is a run; its policy is {made}" if (made / CONFIG).exists() else "Give a checkpoint's folder"
        raise ConfigError(f"{folder}: there is no config.json in it. {cure}, or a name that `hilt fetch` has shown.")
    document = _read(path)
    kind = str(
        document.get("model_type") or document.get("type") or ("pi0" if "paligemma_variant" in document else None)
    )
    name = MODEL_TYPES.get(kind, kind)
    if name not in (known := POLICIES.known()):
        if not trust.NAME.fullmatch(name):
            raise UnknownNameError(f"policy, as {path} has it in model_type,", kind, [*known, "package.module:Class"])
        trust.came_from(path, path.read_bytes(), name)
    return name


def document_of(policy: str) -> dict[str, Any]:
    """The config.json of a policy's folder; empty for a new policy, and where there is none."""
    path = hub.local(policy) / CONFIG if not is_new(policy) else Path()
    return _read(path) if path.is_file() else {}


def policy_sizes(row: Mapping[str, Any], state_dim: int, action_dim: int) -> dict[str, object]:
    """What a new policy must know, from one observation: the names of its pictures, pixels of their longest side
    rounded up to a multiple of 16 (0 without pictures), and how many numbers states and actions have."""
    pictures = {name: value.shape for name, value in row.items() if np.ndim(value) == 3}
    side = max((16 * -(-max(shape[:2]) // 16) for shape in pictures.values()), default=0)
    return {"cameras": list(pictures), "image_size": side, "state_dim": state_dim, "action_dim": action_dim}


def _read(path: Path) -> dict[str, Any]:
    from hilt.policies.io.tensor_files import read_json  # needs torch, which settings do without

    return read_json(path)
