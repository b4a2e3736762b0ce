"""Simulators that step many environments at once: the single steps and episodes of
each, and a batch of one as an environment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import Step
from hilt.core.tree import Observation
from hilt.envs.env_protocol import Env, Info, StepResult, success_of

if TYPE_CHECKING:
    from gymnasium.spaces import Space


class BatchedEpisode(NamedTuple):
    """One episode of one environment of a batch."""

    env: int
    """Which of the N"""
    steps: list[Step]
    success: bool | None
    """As reported by its last step"""


class Batched:
    """Simulators that step N environments at once and begin new episodes inside ``step``, as Isaac Lab,
    ManiSkill and gymnasium's vector environments do. Arrays or tensors come in, on any device; the
    output is numpy arrays that are not overwritten.

    The last step of an episode has that episode's last observation, never the first of the next one. When a new episode
    begins is read from ``metadata["autoreset_mode"]``, and defaults to the same step; `autoreset` overrides it.
    """

    def __init__(self, env: Env, autoreset: str | None = None):
        self.env = env
        names = ("num_envs", "single_observation_space", "single_action_space")
        if missing := [name for name in names if _attribute(env, name, None) is None]:
            kind = type(getattr(env, "unwrapped", env)).__name__
            raise ConfigError(
                f"{kind} has no {', '.join(missing)}: it steps one environment, and Batched takes "
                "many; use as_task for one."
            )
        self.num_envs, self.observation_space, self.action_space = (_attribute(env, name) for name in names)
        mode = autoreset or (getattr(env, "metadata", None) or {}).get("autoreset_mode", "SameStep")
        self.autoreset = str(getattr(mode, "value", mode))
        if self.autoreset not in (modes := ("NextStep", "SameStep", "Disabled")):
            raise ConfigError(f"autoreset={mode!r}: expected one of {', '.join(modes)}.")
        self.observation: Any = None
        """What to act on, ``[N, ...]``"""
        self.infos: list[dict[str, Any]] = []
        """Of the last step, or of reset, by environment; it has ``succeed`` if success was reported."""
        self.over = np.zeros(self.num_envs, bool)
        """Whose episode ended in the last step"""
        self._a_leaf: Any = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, object] | None = None) -> Any:
        raw, infos = self.env.reset(seed=seed, options=options)
        self._a_leaf = _a_leaf(raw)
        self.over[:] = False
        self.infos = [_info(infos, i, self.num_envs) for i in range(self.num_envs)]
        self.observation = to_numpy(raw)
        return self.observation

    def step(self, actions: Any) -> list[Step | None]:
        """A step of each environment. None for one that began a new episode in this call instead, and did not act."""
        before, actions = self.observation, to_numpy(actions)
        raw, rewards, terminated, truncated, infos = self.env.step(self._as_given(actions))
        after, rewards, terminated, truncated = (to_numpy(x) for x in (raw, rewards, terminated, truncated))
        began = self.over if self.autoreset == "NextStep" else np.zeros(self.num_envs, bool)
        over = np.logical_or(terminated, truncated) & ~began
        steps: list[Step | None] = []
        self.infos = []
        for i in range(self.num_envs):
            observation, info = _row(after, i), infos
            if over[i] and self.autoreset == "SameStep":
                observation, info = self._final(infos, i)
            self.infos.append(_info(info, i, self.num_envs))
            ends = bool(terminated[i]), bool(truncated[i])
            steps.append(None if began[i] else Step(_row(before, i), actions[i], float(rewards[i]), observation, *ends))
        if over.any() and self.autoreset == "Disabled":
            after = to_numpy(self.env.reset(options={"reset_mask": over.copy()})[0])
        self.observation, self.over = after, over
        return steps

    def episodes(self, act: Callable[[Any], Any], per_env: int, seed: int | None = None) -> Iterator[BatchedEpisode]:
        """Yields this number of episodes of each environment, as they end; `act` gives ``[N,
        ...]`` actions for ``[N, ...]`` observations.

        Equally many of each: the first that end among all would be the short ones.
        """
        self.reset(seed=seed)
        running: list[list[Step]] = [[] for _ in range(self.num_envs)]
        left = np.full(self.num_envs, per_env)
        while left.any():
            for i, step in enumerate(self.step(act(self.observation))):
                if step is None or not left[i]:
                    continue
                running[i].append(step)
                if step.terminated or step.truncated:
                    yield BatchedEpisode(i, running[i], success_of(self.infos[i]))
                    running[i] = []
                    left[i] -= 1

    def close(self) -> None:
        self.env.close()

    def _as_given(self, actions: Any) -> Any:
        """Returns tensors, on their device, where observations are tensors: torch is loaded then."""
        return (
            sys.modules["torch"].as_tensor(actions, device=self._a_leaf.device)
            if hasattr(self._a_leaf, "detach")
            else actions
        )

    def _final(self, infos: Mapping[str, Any], i: int) -> tuple[Any, Any]:
        """Returns the last observation and info of environment i."""
        seen = next((infos[key] for key in ("final_obs", "final_observation") if infos.get(key) is not None), None)
        if seen is None:
            raise SchemaError(
                f"{type(self.env).__name__} begins a new episode inside step, and its info has no 'final_obs': "
                "what an episode ended with is lost. Make it tell (Isaac Lab: compute_final_obs=True "
                "in its config; ManiSkill: ManiSkillVectorEnv), or give autoreset."
            )
        given = infos.get("final_info", infos)
        return to_numpy(_row(seen, i)), given[i] if isinstance(given, np.ndarray | list | tuple) else given


class OneOf(gymnasium.Env):
    """What `one_of` and `as_task` make of a batch of one."""

    def __init__(self, env: Env, autoreset: str | None = None):
        self._batch = Batched(env, autoreset)
        if (count := self._batch.num_envs) != 1:
            raise ConfigError(
                f"a task is one environment, and this simulator runs {count}: make it with one, or use Batched."
            )
        self.observation_space, self.action_space = self._batch.observation_space, self._batch.action_space
        self.spec = getattr(env, "spec", None)
        # Isaac Lab has the first
        if limit := _attribute(env, "max_episode_length", None) or (self.spec and self.spec.max_episode_steps):
            self.step_limit = int(limit)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]:
        return _row(self._batch.reset(seed=seed, options=options), 0), self._batch.infos[0]

    def step(self, action: npt.ArrayLike) -> StepResult:
        if self._batch.over[0]:
            raise ConfigError("the episode is over; call reset() before the next step.")
        (step,) = self._batch.step(np.asarray(action)[None])
        assert step is not None
        return step.next_observation, step.reward, step.terminated, step.truncated, self._batch.infos[0]

    def close(self) -> None:
        self._batch.close()


def to_numpy(tree: Any) -> Any:
    """Arrays or tensors, nested, as numpy arrays of their own: simulators write into theirs again."""
    if isinstance(tree, Mapping):
        return {key: to_numpy(value) for key, value in tree.items()}
    if hasattr(tree, "detach"):
        tree = tree.detach().cpu().numpy()
    array = np.array(tree)
    if array.dtype == object or array.dtype.kind in "US":
        raise SchemaError(
            f"an observation has {tree!r:.60} in it; expected numbers, arrays or tensors, in nested dictionaries."
        )
    return array


def space_of(observation: Any) -> Space:
    """The space of observations like this one."""
    if isinstance(observation, Mapping):
        return spaces.Dict({key: space_of(value) for key, value in observation.items()})
    if observation.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype)
    bounds = (
        (0, 1) if observation.dtype.kind == "b" else (np.iinfo(observation.dtype).min, np.iinfo(observation.dtype).max)
    )
    return spaces.Box(*bounds, observation.shape, observation.dtype)


def _row(tree: Any, i: int) -> Any:
    return {key: _row(value, i) for key, value in tree.items()} if isinstance(tree, Mapping) else tree[i]


def _a_leaf(tree: Any) -> Any:
    return _a_leaf(next(iter(tree.values()))) if isinstance(tree, Mapping) else tree


def _attribute(env: Env, name: str, *otherwise: Any) -> Any:
    return getattr(env, name) if hasattr(env, name) else getattr(getattr(env, "unwrapped", env), name, *otherwise)


def _info(infos: Mapping[str, Any], i: int, count: int) -> dict[str, Any]:
    """Returns the info of environment i: its rows of batched values, and shared values. ``_key``
    marks the environments that have ``key``."""
    info: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith(("_", "final_")) or (f"_{key}" in infos and not infos[f"_{key}"][i]):
            continue
        if isinstance(value, Mapping):
            info[key] = _info(value, i, count)
        elif getattr(value, "shape", ())[:1] == (count,):
            info[key] = to_numpy(value[i]) if hasattr(value, "detach") else value[i]
        else:
            info[key] = value
    if (succeeded := success_of(info)) is not None:
        info["succeed"] = succeeded
    return info
