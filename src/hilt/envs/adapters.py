"""Environments with other interfaces: one object per episode with ``get_obs`` and
``take_action``, and simulators that step many at once.

`from_custom` and `one_of` give tasks; `Batched` gives the single steps and episodes of each of N environments. Nothing
here catches an error of an environment: a missing driver is a traceback, not an episode that failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from hilt.core.errors import ConfigError
from hilt.core.tree import Observation
from hilt.envs.batched import Batched, OneOf, space_of, to_numpy
from hilt.envs.env_protocol import Env, Info, StepResult, success_of
from hilt.envs.task import as_task

__all__ = ["Batched", "from_custom", "one_of"]


def from_custom(
    make: Callable[[int], object],
    action_space: spaces.Box | None = None,
    *,
    chunk: int | None = None,
    observe: Callable[[Any], Observation] | None = None,
    states: Mapping[str, int] | None = None,
) -> Env:
    """A task from an interface that VLA code often has: ``get_obs()``, ``get_instruction()``, ``step(action)`` or
    ``take_action(action)``, ``eval_success`` (an attribute or a method), ``step_lim``.

    `make` gives the environment of one episode from a seed, ready to act in: ``lambda seed: MyEnv(seed)``,
    or, if it can begin again, ``lambda seed: (env.reset(seed), env)[1]``. With `chunk` an action is that many
    rows, handed over together, and each row counts as a step toward ``step_lim``. `observe` turns what
    ``get_obs`` gives into nested arrays, where it is not.
    """
    return as_task(_Custom(make, action_space, chunk, observe or (lambda observation: observation)), states=states)


class _Custom(gymnasium.Env):
    def __init__(self, make: Callable[[int], Any], action_space: Any, chunk: int | None, observe: Callable[[Any], Any]):
        self._make, self._observe, self._chunk = make, observe, chunk
        self._inner: Any = None
        inner = self._begin(0)
        self.step_limit = math.ceil(inner.step_lim / (chunk or 1))
        self.observation_space = space_of(self._look())
        space = action_space if action_space is not None else getattr(inner, "action_space", None)
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(
                f"{type(inner).__name__} has no action space; give one of a single action, such as "
                "spaces.Box(-1, 1, (14,))."
            )
        bounds = (np.stack([bound] * chunk) if chunk else bound for bound in (space.low, space.high))
        self.action_space = spaces.Box(*bounds, dtype=space.dtype)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._begin(int(self.np_random.integers(2**31)) if seed is None else seed)
        return self._look(), {"succeed": self._succeeded()}

    def step(self, action: npt.ArrayLike) -> StepResult:
        action = np.array(action, self.action_space.dtype)
        if self._chunk:
            action = action[: self._inner.step_lim - self._taken]  # upstream runs past the limit
        (self._inner.take_action if hasattr(self._inner, "take_action") else self._inner.step)(action)
        self._taken += len(action) if self._chunk else 1
        succeeded = self._succeeded()
        return self._look(), float(succeeded), succeeded, self._taken >= self._inner.step_lim, {"succeed": succeeded}

    def close(self) -> None:
        if hasattr(self._inner, "close"):
            self._inner.close()

    def _begin(self, seed: int) -> Any:
        inner = self._make(seed)
        lacking = [
            name for name in ("get_obs", "get_instruction", "eval_success", "step_lim") if not hasattr(inner, name)
        ]
        if not hasattr(inner, "step") and not hasattr(inner, "take_action"):
            lacking.append("step or take_action")
        if lacking:
            raise ConfigError(f"{type(inner).__name__} has no {', '.join(lacking)}; from_custom needs them.")
        if inner is not self._inner:
            self.close()
        self._inner, self._taken, self.instruction = inner, 0, str(inner.get_instruction())
        return inner

    def _look(self) -> Any:
        return to_numpy(self._observe(self._inner.get_obs()))

    def _succeeded(self) -> bool:
        given = self._inner.eval_success
        return bool(success_of({"succeed": given() if callable(given) else given}))


def one_of(env: Env, autoreset: str | None = None, **options: Any) -> Env:
    """A batched simulator that runs a single environment, as a task; further options are those of `as_task`."""
    return as_task(OneOf(env, autoreset), **options)
