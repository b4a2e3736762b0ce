"""The tabletop suite as gymnasium environments: ``TabletopEnv("pick")``.

Actions are HIL-SERL's, ``[dx dy dz drx dry drz grip]`` in [-1, 1] for each arm: a step in the table's axes of at most
``ACTION_SCALE[0]`` meters along each, a turn about them of at most ``ACTION_SCALE[1]`` radians, and a gripper that
closes at -0.5 and below, opens at 0.5 and above, and else stays as it is. Observations have HIL-SERL's keys.

A step is added to the **last command**, not to the measured pose as upstream does it: an arm that holds a weight then
hangs a millimeter below its command and stays there, where upstream's sinks a millimeter at every step. So that the
command cannot run away from an arm that is blocked, it is first brought back to where the impedance pushes hardest,
``clip`` from the measured pose; one step back is then enough to relieve it.

Two arms share one world and one episode: the reward is 1 when both have done their
part, and what ends it for one ends it for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.tree import Observation
from hilt.core.validate import check_values
from hilt.envs.env_protocol import Info, StepResult, choose_state
from hilt.envs.rotations import DOWN, Array, from_euler, from_rotation_vector, inverse, multiply, to_rotation_vector
from hilt.envs.tabletop.experts import expert
from hilt.envs.tabletop.suite import ACTION_SCALE, SUITE, TabletopTask
from hilt.envs.tabletop.world import TIMESTEP, World

BOX_LOW = np.array([0.25, -0.35, 0.008, -1.2, -1.2, -1.8])
BOX_HIGH = np.array([0.75, 0.35, 0.5, 1.2, 1.2, 1.8])
"""Where commands stay: x y z in meters, then the rotation vector from the gripper's pointing down, in radians."""
STATE = {"tcp_pose": 7, "tcp_vel": 6, "gripper_pose": 1, "tcp_force": 3, "tcp_torque": 3}
SETTLE_SECONDS = 0.2


class TabletopEnv(gymnasium.Env[Any, Any]):
    """One task of the suite.

    ``image_size`` is in pixels, None for no images; ``cameras`` are those that an observation shows, None for all.
    ``action_scale`` is meters and radians for each control step, and ``step_limit`` counts those; None takes the
    suite's, which are made for 10 steps a second, in proportion to ``control_hz``. ``train_states`` is the number of
    initial states of the split train, None for the suite's; those that both have are the same.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium has it so

    def __init__(
        self,
        task: str | TabletopTask = "pick",
        *,
        image_size: int | None = 64,
        cameras: Sequence[str] | None = None,
        control_hz: float = 10.0,
        step_limit: int | None = None,
        action_scale: tuple[float, float] | None = None,
        train_states: int | None = None,
        render_mode: str | None = "rgb_array",
        render_size: int = 256,
    ):
        if isinstance(task, str):
            if task not in SUITE:
                raise UnknownNameError("tabletop task", task, SUITE)
            task = SUITE[task]
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode={render_mode!r}: tabletop renders 'rgb_array' or None.")
        sizes = {"image_size": image_size, "render_size": render_size}
        check_values(minimum=1, step_limit=step_limit, train_states=train_states, **sizes)
        if train_states is not None:
            task = replace(task, states={**task.states, "train": train_states})
        if not 1 <= control_hz <= 1 / TIMESTEP:
            raise ConfigError(
                f"control_hz={control_hz}: between 1 and {1 / TIMESTEP:g} control steps a second are possible."
            )
        self.metadata = {**self.metadata, "render_fps": control_hz}
        self.task, self.control_hz, self.image_size, self.render_mode = task, control_hz, image_size, render_mode
        self.instruction, self.initial_states = task.instruction, dict(task.states)
        slower = 10.0 / control_hz
        self.step_limit = round(task.step_limit / slower) if step_limit is None else step_limit
        self.action_scale = (
            (ACTION_SCALE[0] * slower, ACTION_SCALE[1] * slower) if action_scale is None else action_scale
        )
        self.world = World(task.objects, arms=task.arms)
        self._cameras = self.world.cameras if cameras is None else tuple(cameras)
        if unknown := set(self._cameras) - set(self.world.cameras):
            raise UnknownNameError("camera", min(unknown), self.world.cameras, setting="cameras")
        self._render_size, self._steps = render_size, 0
        prefixes = self.world.prefixes
        self.action_space = spaces.Box(-1.0, 1.0, (7 * task.arms,), np.float32)
        state = {
            f"{p}{key}": spaces.Box(-np.inf, np.inf, (size,), np.float32)
            for p in prefixes
            for key, size in STATE.items()
        }
        parts: dict[str, spaces.Space[Any]] = {"state": spaces.Dict(state)}
        if image_size is not None:
            image = (image_size, image_size, 3)
            parts["images"] = spaces.Dict({camera: spaces.Box(0, 255, image, np.uint8) for camera in self._cameras})
        self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begin in ``options={"split": "train", "state": 7}``; without a state, a random one of the split."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"split", "state"}:
            raise UnknownNameError("reset option", min(unknown), ["split", "state"])
        split = options.get("split", "train")
        state = choose_state(self.initial_states, split, options.get("state"), self.np_random)
        self.task.begin(self.world, split, state)
        self.world.advance(SETTLE_SECONDS)
        self._steps = 0
        return self.observation(), {"succeed": self.succeeded(), "split": split, "state": state}

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, rewards, terminated, truncated, info = self.step_chunk([action])
        return observation, float(rewards[0]), terminated, truncated, info

    def step_chunk(self, actions: Sequence[npt.ArrayLike] | Array) -> tuple[Observation, Array, bool, bool, Info]:
        """Steps with each of these actions until the episode ends; what is observed, and
        rendered, is what there is to be seen then."""
        rewards: list[float] = []
        for action in actions:
            rewards.append(float(succeed := self._act(action)))
            if succeed or self._steps >= self.step_limit:
                break
        return (
            self.observation(),
            np.array(rewards, np.float32),
            succeed,
            self._steps >= self.step_limit,
            {"succeed": succeed},
        )

    def snapshot(self) -> tuple[int, Array]:
        """All that the rest of the episode depends on; ``restore`` continues from it bit for bit."""
        return self._steps, self.world.snapshot()

    def restore(self, snapshot: tuple[int, Array]) -> None:
        self._steps = snapshot[0]
        self.world.restore(snapshot[1])

    def _act(self, action: Any) -> bool:
        """One control step; whether the task is done."""
        action = np.asarray(action, np.float64).clip(-1.0, 1.0)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise ConfigError(f"an action here is {self.action_space.shape} finite numbers; given {action.tolist()}.")
        for arm, part in enumerate(action.reshape(-1, 7)):
            self.world.command(self._target(part, arm), arm)
            if abs(part[6]) >= 0.5:
                self.world.grip(float(part[6] > 0), arm)
        # whole physics steps, and not one too few or too many in the long run
        before, after = (round(n / self.control_hz / TIMESTEP) for n in (self._steps, self._steps + 1))
        self.world.advance((after - before) * TIMESTEP)
        self._steps += 1
        return self.succeeded()

    def give_time(self, factor: int) -> None:
        """Episodes may take this many times as long."""
        self.step_limit *= factor

    def expert(self) -> Callable[[], Array]:
        """A scripted expert for this episode: each call gives the next action, from the state as it is now."""
        return expert(self.task, self.world, self.action_scale)

    def succeeded(self) -> bool:
        return bool(self.task.success(self.world))

    def observation(self) -> dict[str, Array]:
        state: dict[str, Array] = {}
        for i, prefix in enumerate(self.world.prefixes):
            arm = self.world.arm(i)
            values = (arm.pose, arm.vel, arm.gripper, arm.force, arm.torque)
            state |= {
                f"{prefix}{key}": np.array(value, np.float32).reshape(-1)
                for key, value in zip(STATE, values, strict=True)
            }
        found: dict[str, Any] = {"state": state}
        if (size := self.image_size) is not None:
            found["images"] = {camera: self.world.render(camera, size, size) for camera in self._cameras}
        return found

    def render(self) -> Array | None:
        """The front camera at ``render_size``, for people."""
        return self.world.render("front", self._render_size, self._render_size) if self.render_mode else None

    def views(self) -> dict[str, Array]:
        """All cameras at ``render_size``, for a person who drives; pictures of 64 pixels are for policies."""
        return {
            camera: self.world.render(camera, self._render_size, self._render_size) for camera in self.world.cameras
        }

    def planned_points(self, actions: Sequence[npt.ArrayLike] | Array) -> Array:
        """The places that the arms would go through with these actions, ``[arms, actions + 1, 3]`` in meters."""
        moves = np.asarray(actions, np.float64).clip(-1, 1).reshape(len(actions), -1, 7)[:, :, :3].swapaxes(0, 1)
        starts = np.array([self.world.pose(arm)[:3] for arm in range(len(moves))])[:, None]
        ahead = starts + np.cumsum(moves * self.action_scale[0], 1)
        return np.concatenate([starts, ahead.clip(BOX_LOW[:3], BOX_HIGH[:3])], 1)

    def project(self, points: npt.ArrayLike) -> dict[str, Array]:
        """Where points are in the picture of each camera; see `World.project`."""
        return {camera: self.world.project(points, camera) for camera in self.world.cameras}

    def close(self) -> None:
        self.world.close()

    def _target(self, action: Array, arm: int) -> Array:
        """The next command of one arm."""
        now, last, (low, high) = self.world.pose(arm), self.world.commanded(arm), self.world.clips(arm)
        position = last[:3].clip(now[:3] - low[:3], now[:3] + high[:3]) + action[:3] * self.action_scale[0]
        ahead = to_rotation_vector(multiply(last[3:], inverse(now[3:]))).clip(-low[3:], high[3:])
        rotation = multiply(
            multiply(from_euler(action[3:6] * self.action_scale[1]), from_rotation_vector(ahead)), now[3:]
        )
        turn = to_rotation_vector(multiply(rotation, inverse(DOWN)))
        inside = np.concatenate([position, turn]).clip(BOX_LOW, BOX_HIGH)
        return np.concatenate([inside[:3], multiply(from_rotation_vector(inside[3:]), DOWN)])
