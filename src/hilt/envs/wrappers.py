"""Wrappers with the names and meanings of HIL-SERL's, in the order in which they are put on.

    env = GripperCloseEnv(env)                       # a task whose gripper stays as it is
    env = TakeOver(env, device)                      # hilt.teleop: a person may act
    env = RelativeFrame(env)
    env = Quat2EulerWrapper(env)
    env = SERLObsWrapper(env)
    env = ChunkingWrapper(env, obs_horizon=1, act_exec_horizon=None)
    env = MultiCameraBinaryRewardClassifierWrapper(env, reward)      # hilt.envs.rewards
    env = GripperPenaltyWrapper(env)
    env = EpisodeStatistics(env)

Two arms have the keys ``left/tcp_pose``, ``right/tcp_pose`` and so on: the same classes work on them, arm
by arm. No wrapper changes an array, a dictionary or a space of the environment below it; its own spaces
are true; `truncated` is never made `terminated`.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.tree import Observation
from hilt.envs.env_protocol import Info, StepResult
from hilt.envs.rotations import Array, from_matrix, to_euler, to_matrix

ACTIONS = ("intervene_action", "executed_action")
"""The keys that ``TakeOver`` adds to info for outer wrappers: a person's action, and the executed action."""


class RelativeFrame(gymnasium.Wrapper):
    """Actions and velocities in the frame of the gripper, poses relative to the pose at reset.

    With the adjoint of a pose, ``Ad = [[R, 0], [p× R, R]]``: the action's first six numbers go below as ``Ad a``,
    ``tcp_vel`` comes up as ``Ad⁻¹ v``, ``tcp_pose`` as ``T_reset⁻¹ T``. ``intervene_action`` and ``executed_action``,
    which are in the base frame below, come up as ``Ad⁻¹ a`` with the adjoint of the pose before the step, the one that
    turned the policy's action: so the same numbers mean the same motion. They are exact, and may therefore lie outside
    the box. ``info["original_state_obs"]`` has the state as it was below.

    `coupled=False` leaves ``p× R`` out. Upstream has it, and data recorded with upstream has it: a motion along an axis
    then turns the gripper too, the more the farther it is from the base.
    """

    episode_state = ("_adjoints", "_inverses", "_origins")

    def __init__(self, env: gymnasium.Env, include_relative_pose: bool = True, coupled: bool = True):
        super().__init__(env)
        self.include_relative_pose, self.coupled = include_relative_pose, coupled
        self._arms = _arms(env.observation_space, "tcp_pose")
        self._per_arm = _numbers_per_arm(env.action_space, len(self._arms))
        free = {key: (7,) for key in self._keys("tcp_pose")} | {key: (6,) for key in self._keys("tcp_vel")}
        self.observation_space = _with_state_space(env.observation_space, free)
        self._adjoints: list[Array] = []
        self._inverses: list[Array] = []
        self._origins: list[Array] = []

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        obs, info = self.env.reset(**options)
        self._origins = [np.linalg.inv(homogeneous(obs["state"][key])) for key in self._keys("tcp_pose")]
        return self._seen(obs, info)

    def step(self, action: npt.ArrayLike) -> StepResult:
        if not self._adjoints:
            raise ConfigError("step() before reset(): the frame is that of the pose at reset. Call reset() first.")
        obs, reward, terminated, truncated, info = self.env.step(self._turned(action, self._adjoints))
        info = {**info, **{key: self._turned(info[key], self._inverses) for key in ACTIONS if key in info}}
        obs, info = self._seen(obs, info)
        return obs, reward, terminated, truncated, info

    def _seen(self, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The observation from the gripper's point of view, from where the next action counts too."""
        state = obs["state"]
        self._adjoints = [adjoint(state[key], self.coupled) for key in self._keys("tcp_pose")]
        self._inverses = [np.linalg.inv(matrix) for matrix in self._adjoints]
        changed = {
            key: inverse @ state[key] for key, inverse in zip(self._keys("tcp_vel"), self._inverses, strict=True)
        }
        if self.include_relative_pose:
            for key, origin in zip(self._keys("tcp_pose"), self._origins, strict=True):
                relative = origin @ homogeneous(state[key])
                changed[key] = np.concatenate([relative[:3, 3], from_matrix(relative[:3, :3])])
        original = {key: np.array(value) for key, value in state.items()}
        return _with_state(obs, changed), {**info, "original_state_obs": original}

    def _turned(self, action: Any, adjoints: list[Array]) -> Array:
        # a copy: the caller keeps what was asked for
        turned: Array = np.array(action, np.result_type(np.asarray(action), np.float32))
        for start, matrix in zip(range(0, len(turned), self._per_arm), adjoints, strict=True):
            turned[start : start + 6] = matrix @ turned[start : start + 6]
        return turned

    def _keys(self, name: str) -> list[str]:
        return [arm + name for arm in self._arms]


class _PoseWrapper(gymnasium.ObservationWrapper):
    """Writes every ``tcp_pose``, which is a position and a quaternion, in another way."""

    numbers: int
    episode_state = ()

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._poses = [arm + "tcp_pose" for arm in _arms(env.observation_space, "tcp_pose")]
        for key in self._poses:
            if (shape := env.observation_space["state"][key].shape) != (7,):
                raise ConfigError(
                    f"{type(self).__name__}: {key} has the shape {shape}; a position and a "
                    "quaternion, (7,), were expected."
                )
        self.observation_space = _with_state_space(env.observation_space, dict.fromkeys(self._poses, (self.numbers,)))

    def observation(self, observation: dict[str, Any]) -> Any:
        return _with_state(observation, {key: self.converted(observation["state"][key]) for key in self._poses})

    def converted(self, pose: Array) -> Array:
        raise NotImplementedError


class Quat2EulerWrapper(_PoseWrapper):
    """``tcp_pose`` as 6 numbers: position, and the Euler angles that scipy calls ``xyz``."""

    numbers = 6

    def converted(self, pose: Array) -> Array:
        return np.concatenate([pose[:3], to_euler(pose[3:])])


class Quat2R2Wrapper(_PoseWrapper):
    """``tcp_pose`` as 9 numbers: position, and the first two columns of the rotation
    matrix, row by row; continuous, unlike angles."""

    numbers = 9

    def converted(self, pose: Array) -> Array:
        return np.concatenate([pose[:3], to_matrix(pose[3:])[:, :2].ravel()])


class SERLObsWrapper(gymnasium.ObservationWrapper):
    """``{"state": flat vector, camera: image, ...}``.

    The vector has the chosen parts of the state in alphabetical order, as upstream: ``gripper_pose``, ``tcp_force``,
    ``tcp_pose``, ``tcp_torque``, ``tcp_vel``, 19 numbers after ``Quat2EulerWrapper``. `proprio_space` tells the parts.
    """

    episode_state = ()

    def __init__(self, env: gymnasium.Env, proprio_keys: Sequence[str] | None = None):
        super().__init__(env)
        state: Any = env.observation_space["state"]
        for key in proprio_keys or ():
            if key not in state.spaces:
                raise UnknownNameError("part of the state", key, state.spaces)
        self.proprio_keys = sorted(state.spaces if proprio_keys is None else proprio_keys)
        self.proprio_space = spaces.Dict({key: state[key] for key in self.proprio_keys})
        bounds = [[np.ravel(getattr(state[key], end)) for key in self.proprio_keys] for end in ("low", "high")]
        flat = spaces.Box(
            *(np.concatenate(parts or [np.empty(0)]).astype(np.float32) for parts in bounds), dtype=np.float32
        )
        images = env.observation_space.spaces["images"].spaces if "images" in env.observation_space.spaces else {}
        if "state" in images:
            raise ConfigError("a camera is named 'state', which is the name of the state vector. Rename the camera.")
        self.observation_space = spaces.Dict({"state": flat, **images})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        parts = [np.ravel(observation["state"][key]) for key in self.proprio_keys]
        return {"state": np.concatenate(parts or [np.empty(0)]).astype(np.float32), **observation.get("images", {})}


class ChunkingWrapper(gymnasium.Wrapper):
    """The last `obs_horizon` observations, stacked; `act_exec_horizon` actions
    executed one after the other in one step.

    At reset the first observation is repeated. A chunk stops where the episode ends; its reward is the sum over the
    steps that were executed, ``info["executed"]`` of them, and so is ``grasp_penalty``. When a person acted within a
    chunk, ``info["intervene_action"]`` is the whole chunk as it was executed, and ``source`` is the person.
    ``act_exec_horizon=None``: a step takes one action as it is.
    """

    episode_state = ("_recent",)

    def __init__(self, env: gymnasium.Env, obs_horizon: int, act_exec_horizon: int | None):
        super().__init__(env)
        if obs_horizon < 1 or (act_exec_horizon is not None and act_exec_horizon < 1):
            raise ConfigError(
                f"horizons are at least 1: obs_horizon={obs_horizon}, act_exec_horizon={act_exec_horizon} were given."
            )
        self.obs_horizon, self.act_exec_horizon = obs_horizon, act_exec_horizon
        self._recent: deque[Any] = deque(maxlen=obs_horizon)
        self.observation_space = batch_space(env.observation_space, obs_horizon)
        if act_exec_horizon is not None:
            self.action_space = batch_space(env.action_space, act_exec_horizon)

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        obs, info = self.env.reset(**options)
        self._recent.extend([copy.deepcopy(obs)] * self.obs_horizon)
        return _stacked(list(self._recent)), info

    def step(self, action: Array) -> StepResult:
        horizon = self.act_exec_horizon or 1
        asked = [action] if self.act_exec_horizon is None else list(action)
        if len(asked) < horizon:
            raise ConfigError(
                f"a chunk of {len(asked)} actions was given; act_exec_horizon={horizon} are executed in a step."
            )
        total, infos = 0.0, []
        for one in asked[:horizon]:
            obs, reward, terminated, truncated, info = self.env.step(one)
            self._recent.append(copy.deepcopy(obs))  # an environment may use its arrays again for the next one
            total += float(reward)
            infos.append(info)
            if terminated or truncated:
                break
        info = {**info, "executed": len(infos)}
        if self.act_exec_horizon is not None:
            for key in ACTIONS:
                if any(key in one for one in infos):
                    done = [one.get(key, given) for one, given in zip(infos, asked, strict=False)]
                    info[key] = np.stack([*done, *asked[len(done) : horizon]])
            if persons := [one for one in infos if "intervene_action" in one and "source" in one]:
                info["source"] = persons[-1]["source"]
            if "grasp_penalty" in info:
                info["grasp_penalty"] = sum(one["grasp_penalty"] for one in infos)
        return _stacked(list(self._recent)), total, terminated, truncated, info


class GripperCloseEnv(gymnasium.ActionWrapper):
    """A task that leaves the gripper as it is: an action has 6 numbers for each arm, and the gripper's, 0, is added."""

    episode_state = ()

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        box: Any = env.action_space
        if len(box.shape) != 1 or box.shape[0] % 7:
            raise ConfigError(
                f"GripperCloseEnv: actions have the shape {box.shape}; 7 numbers for each arm, "
                "(7,) or (14,), were expected."
            )
        self._kept = np.arange(box.shape[0]) % 7 != 6
        self.action_space = spaces.Box(box.low[self._kept], box.high[self._kept], dtype=box.dtype)

    def action(self, action: npt.ArrayLike) -> Array:
        whole = np.zeros(self._kept.shape, self.action_space.dtype)
        whole[self._kept] = action
        return whole

    def step(self, action: npt.ArrayLike) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(self.action(action))
        info = {**info, **{key: np.asarray(info[key])[self._kept] for key in ACTIONS if key in info}}
        return obs, reward, terminated, truncated, info


class GripperPenaltyWrapper(gymnasium.Wrapper):
    """``info["grasp_penalty"]``: `penalty` for each gripper that is commanded to
    close while open or to open while closed, else 0.

    The action is the executed one. Open is what is above `open_above`: 0.9 in upstream's tasks with
    one arm, 0.85 in its task with two. The gripper is found by name in whatever ``SERLObsWrapper``
    chose, and in the newest observation of a stack.
    """

    episode_state = ("_were",)

    def __init__(self, env: gymnasium.Env, penalty: float = -0.02, open_above: float = 0.9):
        super().__init__(env)
        self.penalty, self.open_above = penalty, open_above
        state: Any = env.observation_space["state"]
        self._parts: spaces.Dict = state if isinstance(state, spaces.Dict) else env.get_wrapper_attr("proprio_space")
        self._arms = _arms(spaces.Dict({"state": self._parts}), "gripper_pose")
        if env.action_space.shape != (7 * len(self._arms),):
            raise ConfigError(
                f"GripperPenaltyWrapper: actions have the shape {env.action_space.shape}, and the state has "
                f"{len(self._arms)} gripper(s); 7 numbers for each were expected. Put it below ChunkingWrapper when "
                "that executes several actions."
            )
        self._were: list[float] = []

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        obs, info = self.env.reset(**options)
        self._were = self._openings(obs)
        return obs, info

    def step(self, action: npt.ArrayLike) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        commands, were = np.asarray(info.get("intervene_action", action))[6::7], np.array(self._were)
        changes = np.count_nonzero(
            ((commands < -0.5) & (were > self.open_above)) | ((commands > 0.5) & (were < self.open_above))
        )
        self._were = self._openings(obs)
        return (
            obs,
            reward,
            terminated,
            truncated,
            {**info, "grasp_penalty": float(changes * self.penalty if changes else 0)},
        )

    def _openings(self, obs: Any) -> list[float]:
        state = obs["state"]
        if not isinstance(state, Mapping):
            newest, state, start = np.reshape(state, (-1, spaces.flatdim(self._parts)))[-1], {}, 0
            for key in self._parts.spaces:
                size = spaces.flatdim(self._parts[key])
                state[key], start = newest[start : start + size], start + size
        return [float(np.ravel(state[arm + "gripper_pose"])[-1]) for arm in self._arms]


class EpisodeStatistics(gymnasium.Wrapper):
    """``info["episode"]`` at an episode's end: return ``r``, length in executed steps
    ``l``, seconds ``t``, and the interventions in it.

    ``intervention_count`` and ``intervention_steps`` are what ``TakeOver`` counted, 0 without ``TakeOver``.
    """

    episode_state = ("_return", "_length", "_began")

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._return, self._length, self._began = 0.0, 0, time.perf_counter()

    def reset(self, **options: Any) -> tuple[Observation, Info]:
        result: tuple[Any, dict[str, Any]] = self.env.reset(**options)
        self._return, self._length, self._began = 0.0, 0, time.perf_counter()
        return result

    def step(self, action: npt.ArrayLike) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        self._length += int(info.get("executed", 1))
        if terminated or truncated:
            episode = {"r": self._return, "l": self._length, "t": round(time.perf_counter() - self._began, 6)}
            episode |= {key: int(info.get(key, 0)) for key in ("intervention_count", "intervention_steps")}
            info = {**info, "episode": {**info.get("episode", {}), **episode}}
        return obs, reward, terminated, truncated, info


DualRelativeFrame, DualQuat2EulerWrapper = RelativeFrame, Quat2EulerWrapper  # upstream's names for two arms


def adjoint(pose: Array, coupled: bool = True) -> Array:
    """``[6, 6]`` ``[[R, 0], [p× R, R]]`` of a pose."""
    rotation, (x, y, z), matrix = to_matrix(pose[3:]), np.asarray(pose[:3], np.float64), np.zeros((6, 6))
    matrix[:3, :3] = matrix[3:, 3:] = rotation
    if coupled:
        matrix[3:, :3] = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ rotation
    return matrix


def homogeneous(pose: Array) -> Array:
    """``[4, 4]`` of a pose."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = to_matrix(pose[3:]), pose[:3]
    return matrix


def _arms(space: Any, name: str) -> list[str]:
    """What stands before `name` in the state, arm by arm: ``[""]``, or ``["left/", "right/"]``."""
    state: Any = space["state"] if isinstance(space, spaces.Dict) and "state" in space.spaces else None
    keys = sorted(state.spaces) if isinstance(state, spaces.Dict) else []
    if arms := [key.removesuffix(name) for key in keys if key == name or key.endswith(f"/{name}")]:
        return arms
    raise ConfigError(
        f"no {name} in the state, which has {', '.join(keys) or 'no named parts'}. Put this "
        "wrapper where the state has it."
    )


def _numbers_per_arm(space: Any, arms: int) -> int:
    size = space.shape[0] if len(space.shape) == 1 else 0
    if size not in (6 * arms, 7 * arms):
        raise ConfigError(
            f"RelativeFrame: actions have the shape {space.shape}; 6 or 7 numbers for each of "
            f"{arms} arm(s) were expected."
        )
    return size // arms


def _with_state_space(space: Any, shapes: Mapping[str, tuple[int, ...]]) -> spaces.Dict:
    """The space with other shapes, and no bounds, for some parts of the state; the one given is left as it is."""
    free = {key: spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in shapes.items()}
    return spaces.Dict({**space.spaces, "state": spaces.Dict({**space["state"].spaces, **free})})


def _with_state(obs: Any, changed: Mapping[str, Array]) -> Any:
    return {**obs, "state": {**obs["state"], **{key: value.astype(np.float32) for key, value in changed.items()}}}


def _stacked(observations: list[Any]) -> Any:
    first = observations[0]
    if isinstance(first, Mapping):
        return {key: _stacked([one[key] for one in observations]) for key in first}
    return np.stack(observations)
