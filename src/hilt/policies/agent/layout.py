"""What an agent sees and what it moves, from spaces and settings alone. Without
torch, so that what does not fit is refused early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import ArraySpec, flatten
from hilt.core.validate import check
from hilt.policies.agent.config import SETUP_MODES, AgentConfig
from hilt.replay.schema import spec_of_space

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from torch import Tensor


class Seen(NamedTuple):
    """The observations that an agent sees, and the number of values of an action."""

    shapes: dict[str, ArraySpec]
    images: list[str]
    """The paths that are looked at, and"""
    proprio: list[str]
    """what else is seen"""
    actions: int


def fit(
    observation_space: Space,
    action_space: Space,
    config: AgentConfig,
    image_keys: Sequence[str] = (),
    proprio_keys: Sequence[str] = (),
) -> Seen:
    """What an agent of these settings has to do with in these spaces (Gymnasium's, or specs).
    Keys are paths such as ``images/front``; empty: all there are. An image is uint8 ``[(stack,)
    H, W, 3]``; everything else is proprioception."""
    check(config, "agent", idle=False)
    spec = (
        observation_space
        if isinstance(observation_space, Mapping)
        else spec_of_space(observation_space, "observations")
    )
    if not isinstance(spec, Mapping):
        cure = "Put it under a name, such as state, with a wrapper."
        raise ConfigError(f"expected observations by name (a Dict space), got one array of {spec}. {cure}")
    shapes: dict[str, ArraySpec] = flatten(spec)
    images = [
        path
        for path, leaf in shapes.items()
        if leaf.dtype == np.uint8 and len(leaf.shape) in (3, 4) and leaf.shape[-1] == 3
    ]
    others = [path for path in shapes if path not in images]
    actions = action_space if isinstance(action_space, ArraySpec) else spec_of_space(action_space, "actions")
    if not isinstance(actions, ArraySpec) or len(actions.shape) != 1:
        raise ConfigError(f"expected actions of one axis, got {actions}.")
    low, high = getattr(action_space, "low", -1.0), getattr(action_space, "high", 1.0)
    if not np.all(np.equal(low, -1)) or not np.all(np.equal(high, 1)):
        cure = "Rescale them in the environment: gymnasium.wrappers.RescaleAction(env, -1, 1)."
        raise ConfigError(f"expected actions from -1 to 1, got {np.min(low)} to {np.max(high)}. {cure}")
    ActionLayout(config.setup_mode, actions.shape[0], config.action_indices)
    looks, feels = (
        _chosen("image_keys", "image", image_keys, images),
        _chosen("proprio_keys", "proprioception", proprio_keys, others),
    )
    seen = Seen(shapes, looks, feels, actions.shape[0])
    _check_paths(seen, config)
    return seen


def _check_paths(seen: Seen, config: AgentConfig) -> None:
    """Refuses settings that name what is not seen."""
    looks = bool(seen.images) and config.encoder.kind != "none"
    if not looks and not seen.proprio:
        raise ConfigError(
            "the policy sees nothing: there is no proprioception, and no image or encoder.kind=none. Check the keys."
        )
    if config.rlpd.feature_noise and not (looks and config.encoder.training == "frozen"):
        given = (
            f"rlpd.feature_noise={config.rlpd.feature_noise} is for the features of a frozen encoder, and there is none"
        )
        raise ConfigError(f"{given}. Set encoder.training=frozen, or leave it out.")
    foreseen = [config.encoder.pretrain_predict] if config.encoder.pretrain_predict else []
    for what, paths in (
        ("in pose_keys", config.pose_keys),
        ("in proprio_floor", config.proprio_floor),
        ("to predict", foreseen),
    ):
        for path in paths:
            if path not in seen.proprio:
                raise UnknownNameError(f"proprioception {what}", path, seen.proprio)
    for path in config.pose_keys:
        if seen.shapes[path].shape[-1:] != (7,):
            raise ConfigError(
                f"pose_keys: {path} is {seen.shapes[path]}; a pose has 7 numbers, position and quaternion."
            )


def _chosen(setting: str, what: str, keys: Sequence[str], known: Sequence[str]) -> list[str]:
    for key in keys:
        if key not in known:
            raise UnknownNameError(f"{what} among the observations", key, known, setting=setting)
    return sorted(keys or known)


class ActionLayout:
    """The numbers of an action that are continuous, and those that are a gripper's:
    the last of each arm, when it is learned.

    A gripper closes (-1), holds (0) or opens (1); two of them have nine outcomes together, ``3 * first + second``.
    """

    def __init__(self, setup_mode: str, actions: int, indices: Sequence[int] = ()):
        if setup_mode not in SETUP_MODES:
            raise UnknownNameError("setup_mode", setup_mode, SETUP_MODES)
        arms = 2 if setup_mode.startswith("dual") else 1
        self.grippers: list[int] = []
        if setup_mode.endswith("learned-gripper"):
            if actions % arms or actions // arms < 2:
                raise ConfigError(
                    f"setup_mode={setup_mode} needs actions of 7 numbers for each arm (at least 2), got {actions}."
                )
            self.grippers = [actions // arms * (arm + 1) - 1 for arm in range(arms)]
        self.moving = [i for i in sorted(set(indices) or range(actions)) if i not in self.grippers]
        if not self.moving or not 0 <= self.moving[0] <= self.moving[-1] < actions:
            raise ConfigError(
                f"action_indices is {list(indices)}; expected some of 0 to {actions - 1} that are no learned gripper's."
            )
        self.actions, self.continuous, self.outcomes = (
            actions,
            len(self.moving),
            3 ** len(self.grippers) if self.grippers else 0,
        )

    def split(self, actions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The continuous numbers ``[B, C]``, and what the grippers did as one number ``[B]``."""
        if actions.ndim != 2 or actions.shape[1] != self.actions:
            raise SchemaError(f"actions: expected [B, {self.actions}], got {tuple(actions.shape)}.")
        continuous = actions[:, self.moving].float()
        if not self.grippers:
            return continuous, None
        moves = actions[:, self.grippers].round().clamp(-1, 1).long() + 1
        number = moves[:, 0] if len(self.grippers) == 1 else 3 * moves[:, 0] + moves[:, 1]
        return continuous, number

    def unlocked(self, action: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """An action ``[actions]`` that somebody else made, such as a random one,
        with 0 where the policy never moves."""
        kept = [*self.moving, *self.grippers]
        whole = np.zeros_like(action)
        whole[kept] = action[kept]
        return whole

    def join(self, continuous: Tensor, outcomes: Tensor | None = None) -> Tensor:
        """Returns the action of both; numbers that neither controls are 0."""
        whole = continuous.new_zeros(len(continuous), self.actions)
        whole[:, self.moving] = continuous
        if outcomes is not None:
            moves = [outcomes] if len(self.grippers) == 1 else [outcomes // 3, outcomes % 3]
            for gripper, move in zip(self.grippers, moves, strict=True):
                whole[:, gripper] = move.to(whole.dtype) - 1
        return whole
