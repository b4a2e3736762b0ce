"""Any gymnasium environment of numbers as policies expect one: named observations, and actions from -1 to 1."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.spaces import Box
from gymnasium.wrappers import RescaleAction

from hilt.core.errors import ConfigError
from hilt.core.tree import Observation, Tree
from hilt.envs.env_protocol import Env
from hilt.envs.task import make


def open_task(name: str, options: Mapping[str, object]) -> Env:
    """Makes the environment of this name (`hilt.envs.task.make`) and fits its spaces."""
    try:
        env = make(name, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ConfigError(f"{name} cannot be made with task_options={dict(options)}: {error}.") from error
    return fitted(env, name)


def fitted(env: Env, name: str) -> Env:
    """An environment that shows one array and takes actions in bounds of its own, as most of gymnasium's: the array
    gets a name, and the actions go from -1 to 1."""
    seen, moves = env.observation_space, env.action_space
    for what, space, good in (("shows", seen, Box | gym_spaces.Dict), ("takes", moves, Box)):
        if not isinstance(space, good):
            raise ConfigError(
                f"{name} {what} {space}; expected numbers (a Box). Wrap it in a function of yours: docs/recipes.md."
            )
    if isinstance(seen, Box):
        env = NamedObservation(env)
    if not (np.isfinite(moves.low).all() and np.isfinite(moves.high).all()):
        raise ConfigError(
            f"{name} takes actions without bounds, {moves}; expected finite ones. Wrap it in a function of yours."
        )
    return (
        env
        if (moves.low == -1).all() and (moves.high == 1).all()
        else RescaleAction(env, np.float32(-1), np.float32(1))
    )


class NamedObservation(gymnasium.ObservationWrapper):
    """The one array that an environment shows is ``state``, or ``images/front`` if it is a picture."""

    episode_state = ()

    def __init__(self, env: Env):
        super().__init__(env)
        space = env.observation_space
        self._picture = space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[-1] == 3
        self.observation_space = gym_spaces.Dict(
            {"images": gym_spaces.Dict(front=space)} if self._picture else {"state": space}
        )

    def observation(self, observation: Observation) -> Tree:
        return {"images": {"front": observation}} if self._picture else {"state": observation}
