"""`IsaacSimFrankaEnv`: the interface of HIL-SERL's ``FrankaEnv`` over Isaac Lab, or
over any simulator that steps a batch.

    app = AppLauncher(headless=True, enable_cameras=True)               # Isaac Lab; import nothing of it before
    simulator = gymnasium.make("My-Franka-Task-v0", cfg=config)         # num_envs=1
    env = IsaacSimFrankaEnv(simulator, quaternion="xyzw")
    env = SpacemouseIntervention(env)                                   # and so on, as around FrankaEnv

Nothing of Isaac is imported here. The wrappers, the queues, the wire, the buffers
and the learner are those of the real arm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import Observation, flatten
from hilt.envs.batched import OneOf, space_of
from hilt.envs.env_protocol import Env, Info, StepResult, success_of

STATE = {"tcp_pose": 7, "tcp_vel": 6, "gripper_pose": 1, "tcp_force": 3, "tcp_torque": 3}
"""What ``FrankaEnv`` reports of the arm, and of how many numbers each part is."""
GRIPPER = 0.5
"""``FrankaEnv`` closes at a command of -0.5 or less, opens at 0.5 or more, and
leaves the gripper as it is in between."""

Part = str | Callable[[Any], Any]


class IsaacSimFrankaEnv(gymnasium.Env):
    """``{"state": {tcp_pose, tcp_vel, gripper_pose, tcp_force, tcp_torque}, "images": {camera: [H, W, 3] uint8}}`` and
    actions of seven numbers in [-1, 1] (translation, rotation, gripper), as ``FrankaEnv`` has them.

    The simulator has ``num_envs``, ``single_observation_space``, ``single_action_space``, ``reset()`` and a ``step()``
    with five results; observations are nested dictionaries of tensors or arrays with an axis of environments in front,
    and `num_envs` is 1: one actor drives one arm. (`hilt.envs.adapters.Batched` gives the transitions of many at once.)
    """

    render_mode = None

    def __init__(
        self,
        env: Env,
        *,
        quaternion: Literal["wxyz", "xyzw"],
        state: Mapping[str, Part] | Sequence[str] = tuple(STATE),
        images: Mapping[str, Part] | Sequence[str] | None = None,
        success: Callable[[Any], bool] | None = None,
        step_limit: int | None = None,
        autoreset: str | None = None,
    ):
        """Describe what stands where in the simulator's observations.

        `quaternion`: the order in the simulator's ``tcp_pose``: "wxyz" up to Isaac Lab 2, "xyzw" from Isaac Lab 3 on.
        `state`: by part a path in an observation (``policy/eef_pose``, or its last part where only one path ends so),
        or a function of one environment's observation; a list names parts that have their own names there.
        `images`: the same for cameras; without it, every uint8 leaf ``[H, W, 3]``, by its last name.
        `success`: a function of one environment's observation (the simulator's own). With it the reward is 1 at success
        and 0 before, and success ends the episode, as ``FrankaEnv`` does; without it, rewards and ends are the
        simulator's. `step_limit`: an episode is truncated after this number of steps; without it, the simulator's own
        limit counts. `autoreset`: see `hilt.envs.adapters.Batched`.

        Isaac Lab 2 resets inside ``step`` and does not report what an episode ended with. Leave the terminations of its
        config empty, and give `success` and `step_limit` here; or use Isaac Lab 3 with ``compute_final_obs=True``.
        """
        if quaternion not in ("wxyz", "xyzw"):
            raise ConfigError(f"quaternion is {quaternion!r}: expected 'wxyz' (Isaac Lab 2) or 'xyzw' (Isaac Lab 3).")
        self._one = OneOf(env, autoreset)
        if (shape := self._one.action_space.shape) != (7,):
            raise ConfigError(
                f"the simulator's actions have the shape {shape}: expected (7,), a relative motion "
                "and the gripper's command. In Isaac Lab: DifferentialInverseKinematicsActionCfg with "
                "use_relative_mode=True, and a BinaryJointPositionActionCfg."
            )
        self._first = quaternion == "wxyz"
        self._success = success
        self.step_limit = int(step_limit or getattr(self._one, "step_limit", 0) or 0)
        self._limit = step_limit
        self._command, self._steps = 1.0, 0
        observation, _ = self._one.reset()
        self._state, self._images = (
            _parts("state", state, observation),
            _parts("images", _cameras(observation, images), observation),
        )
        seen = self._seen(observation)
        self._check(seen)
        self.observation_space = space_of(seen)
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        observation, info = self._one.reset(seed=seed, options=options)
        self._command, self._steps = 1.0, 0
        return self._seen(observation), {**info, "succeed": bool(success_of(info))}

    def step(self, action: npt.ArrayLike) -> StepResult:
        action = np.clip(np.asarray(action, np.float32), -1, 1)
        # Isaac Lab's binary action closes below 0 and opens from 0 on: it has no "as it is"
        if abs(action[6]) >= GRIPPER:
            self._command = float(np.sign(action[6]))
        observation, reward, terminated, truncated, info = self._one.step(
            np.append(action[:6], np.float32(self._command))
        )
        self._steps += 1
        if self._success is not None:
            succeeded = bool(self._success(observation))
            reward, terminated, info = float(succeeded), terminated or succeeded, {**info, "succeed": succeeded}
        truncated = truncated or (self._limit is not None and self._steps >= self._limit)
        return self._seen(observation), reward, terminated, truncated, info

    def close(self) -> None:
        self._one.close()

    def _seen(self, observation: Any) -> dict[str, Any]:
        state = {name: np.ravel(np.asarray(part(observation))).astype(np.float32) for name, part in self._state.items()}
        if self._first and state.get("tcp_pose", np.empty(0)).shape == (7,):
            state["tcp_pose"] = state["tcp_pose"][[0, 1, 2, 4, 5, 6, 3]]
        return {"state": state, "images": {name: np.asarray(part(observation)) for name, part in self._images.items()}}

    def _check(self, seen: Mapping[str, Any]) -> None:
        for name, value in seen["state"].items():
            if len(value) != STATE.get(name, len(value)):
                raise SchemaError(
                    f"state: {name} has {len(value)} numbers in the simulator's observation; expected {STATE[name]}."
                )
        for name, value in seen["images"].items():
            if value.dtype != np.uint8 or value.ndim != 3 or value.shape[-1] != 3:
                raise SchemaError(
                    f"images: {name} is {value.dtype} {list(value.shape)}; expected uint8 [H, W, 3]. In Isaac Lab: "
                    "mdp.image with normalize=False and data_type='rgb'."
                )


def _cameras(observation: Any, images: Mapping[str, Part] | Sequence[str] | None) -> Mapping[str, Part] | Sequence[str]:
    if images is not None or not isinstance(observation, Mapping):
        return images or ()
    paths = [
        path
        for path, value in flatten(observation).items()
        if value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] == 3
    ]
    return {path.rpartition("/")[2]: path for path in paths}


def _parts(
    setting: str, given: Mapping[str, Part] | Sequence[str], observation: Any
) -> dict[str, Callable[[Any], Any]]:
    """Returns for each name the function that takes this part out of an observation."""
    if not isinstance(observation, Mapping):
        raise ConfigError(
            "the simulator's observations are a single array; expected a dictionary, such as {'policy': {...}}."
        )
    leaves = flatten(observation)
    found: dict[str, Callable[[Any], Any]] = {}
    for name, part in (given if isinstance(given, Mapping) else {name: name for name in given}).items():
        if callable(part):
            found[name] = part
            continue
        paths = [part] if part in leaves else [path for path in leaves if path.endswith(f"/{part}")]
        if not paths:
            raise UnknownNameError(
                f"part of the simulator's observations (for {name}; give a path or a function)",
                str(part),
                leaves,
                setting=setting,
            )
        if len(paths) > 1:
            raise ConfigError(f"{setting}: {part!r} was given, and {', '.join(paths)} all end so; give the whole path.")
        found[name] = partial(_leaf, paths[0])
    return found


def _leaf(path: str, observation: Any) -> Any:
    return flatten(observation)[path]
