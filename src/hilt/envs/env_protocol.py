"""What Hilt calls of an environment, and how an environment reports success."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import Observation

if TYPE_CHECKING:
    from gymnasium.spaces import Space

SUCCESS_KEYS = ("succeed", "is_success", "success")
"""Where ``info`` has the success of a step; the first that is present counts"""
TASK_SUCCESS = "task_success"
"""In ``info`` beside ``succeed``, where a classifier or a person decides that one: the success
reported by the task itself, None if it reports none"""
TASK_REWARD = "hilt/task_reward"
"""In ``info`` where a wrapper of Hilt adds a dense reward to that of the task: the reward of the task itself. No
environment has this name by itself"""


Info: TypeAlias = dict[str, object]
"""What an environment reports beside its observation, by name."""
StepResult: TypeAlias = tuple[Observation, float, bool, bool, Info]
"""What ``step`` returns: observation, reward, terminated, truncated, info."""


class HasSpaces(Protocol):
    """Whatever knows what a policy observes and which actions it takes: an environment, or the description of one."""

    @property
    def observation_space(self) -> Space: ...

    @property
    def action_space(self) -> Space: ...


class Env(HasSpaces, Protocol):
    """The methods of a ``gymnasium.Env`` that Hilt calls: every environment and every wrapper of gymnasium has them."""

    @property
    def unwrapped(self) -> Any: ...

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]: ...

    def step(self, action: npt.ArrayLike) -> StepResult: ...

    def has_wrapper_attr(self, name: str) -> bool: ...

    def get_wrapper_attr(self, name: str) -> Any: ...

    def close(self) -> None: ...

    def __enter__(self) -> Env: ...

    def __exit__(self, *error: Any) -> Any: ...


def success_of(info: Mapping[str, Any]) -> bool | None:
    """Success as an environment reports it: the first of `SUCCESS_KEYS` that is present. None if there is none."""
    for key in SUCCESS_KEYS:
        if (value := info.get(key)) is None:
            continue
        if np.size(value) != 1 or np.asarray(value).dtype.kind not in "biuf" or np.isnan(value).any():
            raise SchemaError(f"info[{key!r}] is {value!r}; expected True or False, for one environment.")
        return bool(np.asarray(value).item())
    return None


def choose_state(states: Mapping[str, int], split: str, state: int | None, rng: np.random.Generator) -> int:
    """The state of a split that was asked for, or a random one; the error for one
    that does not exist lists those that do."""
    if split not in states:
        raise UnknownNameError("split", str(split), states)
    if state is None:
        return int(rng.integers(states[split]))
    if not isinstance(state, int | np.integer) or isinstance(state, bool) or not 0 <= state < states[split]:
        raise ConfigError(
            f"state {state!r} of split {split!r} was asked for; it has the states 0 to {states[split] - 1}."
        )
    return int(state)
