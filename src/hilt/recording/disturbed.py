"""Noise on the motions of a recording, which the recording itself does not contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError
from hilt.core.tree import Observation
from hilt.envs.env_protocol import Info
from hilt.teleop.operator import gripper_dimensions


class Disturbed(gymnasium.ActionWrapper):
    """Adds normal noise with the standard deviation `std` to each motion before it is executed, and clips it to the
    action space.

    A recorder above this wrapper logs the action as it was given. So the log shows the right motion in states into
    which errors have brought the arm, and the noise itself is not imitated
    (`DART <https://arxiv.org/abs/1703.09327>`_). Grippers are not disturbed, and neither are numbers that are exactly
    0: an axis that nobody uses stays as it is. The noise follows from the seed that `reset` is given."""

    episode_state: ClassVar[tuple[str, ...]] = ("_rng",)

    def __init__(self, env: gymnasium.Env, std: float):
        super().__init__(env)
        if not std > 0:
            raise ConfigError(f"--disturb {std:g}: expected a standard deviation above 0, such as 0.15.")
        space = env.action_space
        if not (isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1):
            raise ConfigError(
                f"--disturb {std:g}: the action space is {space}; motions are disturbed in a Box with one axis."
            )
        self.action_space: gymnasium.spaces.Box = space
        self._std, self._rng = std, np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self._rng = np.random.default_rng(seed)
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, info

    def action(self, action: npt.ArrayLike) -> npt.NDArray[Any]:
        action, space = np.asarray(action), self.action_space
        moves = (action != 0) & ~gripper_dimensions(len(action))
        noise = self._std * self._rng.standard_normal(len(action))
        disturbed: npt.NDArray[Any] = np.clip(np.where(moves, action + noise, action), space.low, space.high)
        return disturbed.astype(space.dtype)


def disturbed_as_recorded(env: gymnasium.Env, facts: Mapping[str, Any]) -> gymnasium.Env:
    """Returns `env` with the noise that an episode with these facts was recorded with, if there was any."""
    return Disturbed(env, float(facts["disturb"])) if facts.get("disturb") else env
