"""An arm behind a robot server as a gymnasium task: ``RobotEnv`` for one, ``DualRobotEnv`` for two.

Observations and actions mean what they mean in ``hilt.envs.tabletop.suite_env``, so a recipe swaps
one for the other in one line. Making an environment needs no server; it is reached at the first
``reset``. What is done otherwise than upstream, and why:

- The rate is kept by absolute deadlines and measured: ``timing()``. The time that a policy takes is part of the period.
- A gripper command does not stop the loop for 0.6 s. The least time between two commands is kept all the same: one that
  comes too early is sent as soon as it may be, unless another one has come by then.
- An action is added to the last command, as tabletop does and for its reasons, but never further than `lead` from the
  measured pose; ``lead=[0, 0]`` is upstream's way.
- A pose stands for one control period and 50 ms: where the next one does not come, because this process or the network
  is gone, the arm holds. Upstream's arm goes on to the last pose.
- `truncated` at the step limit, `terminated` at success. Every request has a deadline,
  and a refusal raises with the server's sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from hilt.core.config import build
from hilt.core.errors import ConfigError, EmergencyStopError, HiltError, RequestError, UnknownNameError
from hilt.core.files import read
from hilt.core.tree import JsonObject, Observation, Tree
from hilt.core.validate import Need, check, defaults_of, setting
from hilt.envs.env_protocol import Info, StepResult, choose_state
from hilt.envs.rate import Rate
from hilt.envs.rotations import (
    Array,
    from_euler,
    from_rotation_vector,
    inverse,
    multiply,
    normalized,
    to_euler,
    to_rotation_vector,
)
from hilt.envs.task import STATES
from hilt.robot.cameras import Camera, CameraConfig, fitted, open_camera
from hilt.robot.robot_client import RobotClient

T = TypeVar("T")
STATE = {
    "tcp_pose": ("pose", 7),
    "tcp_vel": ("vel", 6),
    "gripper_pose": ("gripper_pos", 1),
    "tcp_force": ("force", 3),
    "tcp_torque": ("torque", 3),
}
"""Our names, the server's, and how many numbers each has."""
STEP_LIMIT = 100  # upstream's
LATE_S = 0.05
"""Seconds by which the next pose may be late before the arm holds"""
CONNECTION = ("url", "token_file", "request_seconds", "joint_reset_seconds")
"""Settings that an episode does not depend on"""


_RESETS = Need("reset_pose, to which it is the way", lambda c: c.reset_pose is not None)


@dataclass
class RobotConfig:
    """An arm, its cameras and its task. Poses are ``[x y z rx ry rz]``: meters, and
    extrinsic xyz Euler angles in radians."""

    url: str = "http://127.0.0.1:5000"
    "The robot server"
    token_file: str = ""
    "A file with its token, which it asks for beyond loopback"
    request_seconds: float = setting(2.0, above=0)
    "Deadline of a request"
    joint_reset_seconds: float = setting(60.0, above=0)
    "Deadline of a joint reset, which answers when the arm is there"
    hz: float = setting(10.0, above=0)
    "Control steps in a second"
    action_scale: list[float] = setting(factory=lambda: [0.03, 0.15], length=2)
    "Meters and radians that an action of 1 moves and turns in one step"
    lead: list[float] = setting(factory=lambda: [0.02, 0.1], length=2)
    "Meters and radians, along each axis, that the command may be ahead of the measured pose before the action is added"
    limit_low: list[float] = setting(factory=lambda: [0.25, -0.35, 0.008, 1.94, -1.2, -1.8], length=6)
    """Lowest pose that is ever commanded; the first angle is meant without its sign,
    because a gripper that points down is at ±pi"""
    limit_high: list[float] = setting(factory=lambda: [0.75, 0.35, 0.5, 3.15, 1.2, 1.8], length=6)
    "Highest pose that is ever commanded"
    gripper_seconds: float = setting(0.6, minimum=0)
    "Least time between two gripper commands"
    gripper_at_reset: str = setting("leave", choices=("open", "close", "leave"))
    "``open``, ``close`` or ``leave``"
    reset_pose: list[float] | None = setting(None, length=6)
    """Where the arm goes before an episode; None: it stays where it is, which in
    simulation is its place in the initial state"""
    reset_seconds: float = setting(1.0, above=0, needs=_RESETS)
    "How long the way there takes"
    reset_tolerance: float = setting(0.05, above=0, needs=_RESETS)
    "Meters from the reset pose, beyond which an episode does not begin"
    random_reset: list[float] = setting(factory=lambda: [0.0, 0.0], length=2, needs=_RESETS)
    """Meters in x and y, and radians about z, by which the begin differs at most; a
    numbered initial state is always the same one"""
    joint_reset_period: int = setting(0, minimum=0)
    "The joints are reset every this many episodes; 0: never"
    compliance: dict[str, float] = field(default_factory=dict)
    "Impedance parameters of an episode, by upstream's names; empty: as they are"
    precision: dict[str, float] = setting(factory=dict, needs=_RESETS)
    "Impedance parameters of the way to the reset pose; empty: as they are"
    target_pose: list[float] | None = setting(None, length=6)
    "Success is this pose; None: as reported by the simulation; a real arm then reports no success"
    reward_threshold: list[float] = setting(factory=lambda: [0.01, 0.01, 0.01, 0.1, 0.1, 0.1], length=6)
    "How far from the target pose, in meters and radians, is still success"
    step_limit: int | None = setting(None, minimum=1)
    "Steps of an episode; None: the simulation's own once it is reached, else 100"
    instruction: str = ""
    "What is to be done, in words; empty: the simulation's own once it is reached"
    task: str = ""
    "The task that the simulation must have; empty: whichever it has"
    initial_states: dict[str, int] = field(default_factory=dict)
    "How many numbered initial states each split has; empty: tabletop's, 50 train, 50 eval, 100 test"
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    "By name"
    image_size: int = setting(128, minimum=1)
    "Pixels of an observation's image, which is square"

    def __post_init__(self) -> None:
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        low, high = self.limit_low, self.limit_high
        if any(least > most for least, most in zip(low, high, strict=True)) or low[3] < 0:
            yield f"{here}limit_low={low}, {here}limit_high={high}: low above high, or a first angle below 0."
        elif self.reset_pose is not None:
            begin = np.array([*self.reset_pose[:3], abs(self.reset_pose[3]), *self.reset_pose[4:]])
            if (begin < low).any() or (begin > high).any():
                yield (
                    f"{here}reset_pose={self.reset_pose} is outside {here}limit_low={low} and {here}limit_high={high}."
                )

    def given(self, key: str) -> bool:
        """Whether a setting differs from what it is by itself."""
        return bool(getattr(self, key) != defaults_of(type(self))[key])


class _Arms(gymnasium.Env[Any, Any]):
    """Any number of arms, by what stands before their keys, stepped at the same time with one deadline."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, arms: list[ArmConnection]):
        first = arms[0].config
        self.arms, self.control_hz, self.initial_states = arms, first.hz, dict(first.initial_states or STATES)
        self.step_limit, self.instruction = first.step_limit or STEP_LIMIT, first.instruction
        self.action_scale = tuple(
            max(scales) for scales in zip(*(arm.config.action_scale for arm in arms), strict=True)
        )
        """Meters and radians that an action of 1 moves and turns an arm in one step; of two arms the larger ones"""
        self._more_time = 1
        self.simulation: bool | None = None
        """Whether the server simulates; None until it was reached."""
        self._settings, self._rate = first, Rate(first.hz)
        self._pool: ThreadPoolExecutor | None = None
        self._steps = self._episodes = 0
        self.action_space = spaces.Box(-1.0, 1.0, (7 * len(arms),), np.float32)
        state = {
            arm.prefix + key: spaces.Box(-np.inf, np.inf, (size,), np.float32)
            for arm in arms
            for key, (_, size) in STATE.items()
        }
        images = {
            name: spaces.Box(0, 255, (arm.image_size, arm.image_size, 3), np.uint8)
            for arm in arms
            for name in arm.camera_configs
        }
        if first.given("image_size") and not images:
            raise ConfigError(
                f"image_size={first.image_size} is of pictures, and there are no cameras. Give "
                "cameras, or leave it out."
            )
        parts: dict[str, Any] = {"state": spaces.Dict(state), **({"images": spaces.Dict(images)} if images else {})}
        self.observation_space = spaces.Dict(parts)

    def give_time(self, factor: int) -> None:
        """Episodes may take this many times as long; a limit that the settings give stays as it is."""
        self._more_time = factor
        self.step_limit = self._settings.step_limit or factor * STEP_LIMIT

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begins in ``options={"split": "eval", "state": 7}``, or a random state;
        ``"joint_reset": True`` resets the joints too."""
        super().reset(seed=seed)
        options = dict(options or {})
        if unknown := set(options) - {"split", "state", "joint_reset"}:
            raise UnknownNameError("reset option", min(unknown), ["split", "state", "joint_reset"])
        split = str(options.get("split", next(iter(self.initial_states))))
        state = choose_state(self.initial_states, split, options.get("state"), self.np_random)
        self.connect()
        self._episodes += 1
        if self.simulation:
            scene = self.arms[0].client.post("scene", {"split": split, "state": state})
            self.instruction = self._settings.instruction or str(scene["instruction"])
            self.step_limit = self._settings.step_limit or self._more_time * int(scene["step_limit"])
        period, numbers = self._settings.joint_reset_period, (list(self.initial_states).index(split), state)
        joints = bool(options.get("joint_reset")) or (period > 0 and self._episodes % period == 0)
        self._each(lambda arm: arm.begin((*numbers, self.arms.index(arm)), joints))
        self._steps = 0
        return self.look(), {"succeed": _all(self._successes()), "split": split, "state": state}

    def step(self, action: npt.ArrayLike) -> StepResult:
        if self.simulation is None:
            raise ConfigError(
                "step() before reset(): the robot server is reached at the first reset. Call reset() first."
            )
        given = np.asarray(action, np.float64)
        if given.shape != self.action_space.shape or not np.isfinite(given).all():
            raise ConfigError(f"an action here is {self.action_space.shape[0]} finite numbers; given {given.tolist()}.")
        parts, stopped = dict(zip(self.arms, np.clip(given, -1.0, 1.0).reshape(-1, 7), strict=True)), False
        try:
            self._each(lambda arm: arm.act(parts[arm]))
        except EmergencyStopError:  # nothing moves, and what there is to see is shown
            stopped = True
        period = self._rate.wait()
        obs = self._observed()
        self._steps += 1
        successes = self._successes()
        info: Info = {"succeed": _all(successes), "period_seconds": period, **({"estop": True} if stopped else {})}
        return obs, float(bool(_all(successes))), any(successes), self._steps >= self.step_limit, info

    def estop(self) -> None:
        """Latches the emergency stop of the robot servers: no arm moves until it is released. From any thread, also
        during a reset, which then raises `EmergencyStopError`."""
        self._ask_servers("estop")

    def release_estop(self) -> None:
        """Releases it: for a person who has seen that it is safe."""
        self._ask_servers("release_estop")

    def is_estopped(self) -> bool:
        """Whether the emergency stop of a robot server is latched, by whomever."""
        return any((status or {}).get("mode") == "estop" for status in self._ask_servers("status"))

    def _ask_servers(self, route: str) -> list[Any]:
        """Asks each server on a connection of its own; all of them, before an error is raised."""
        answers, errors = [], []
        for arm in self.arms:
            client = arm.new_client()
            try:
                answers.append(client.post(route, missing_ok=True))
            except HiltError as error:
                errors.append(error)
            finally:
                client.close()
        if errors:
            raise errors[0]
        return answers

    def look(self) -> Tree:
        """Returns the current observation; the next period begins now. For a wait
        between a reset and the first step."""
        obs = self._observed()
        self._rate.restart()
        return obs

    @property
    def settings(self) -> JsonObject:
        """What an episode depends on, of each arm: all settings but those of the connection. A recording has them."""
        parts = [
            (arm.prefix, asdict(arm.config) | {"cameras": {n: asdict(c) for n, c in arm.camera_configs.items()}})
            for arm in self.arms
        ]
        return {prefix + key: value for prefix, part in parts for key, value in part.items() if key not in CONNECTION}

    def timing(self) -> dict[str, float]:
        """How well the rate was kept: the period's p50, p99 and maximum in seconds, and how many were lost."""
        return self._rate.timing()

    def close(self) -> None:
        self.simulation = None
        for arm in self.arms:
            arm.close()
        if self._pool:
            self._pool.shutdown()
            self._pool = None

    def connect(self) -> None:
        """Reaches the servers and cameras; nothing moves. The first reset does it too."""
        if self.simulation is not None:
            return
        if len(self.arms) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(len(self.arms), "arm")
        try:
            self._each(lambda arm: arm.connect())
            scene, task = self.arms[0].client.post("scene", {}, missing_ok=True), self._settings.task
            if task and (scene or {}).get("task") != task:
                other = f"the task {scene.get('task')!r}" if scene else "a real arm"
                raise ConfigError(
                    f"{self._settings.url} has {other}, and task={task!r} was asked for: hilt serve-robot --task {task}"
                )
        except HiltError:
            for arm in self.arms:
                arm.close()
            raise
        self.simulation = scene is not None

    def _observed(self) -> dict[str, Any]:
        parts = self._each(lambda arm: arm.observed())
        merged: dict[str, Any] = {"state": {key: value for state, _ in parts for key, value in state.items()}}
        images = {key: value for _, images in parts for key, value in images.items()}
        return {**merged, "images": images} if images else merged

    def _successes(self) -> list[bool]:
        """Returns the success of each arm that has a target pose; else that of the simulation; empty for a real arm
        without a target."""
        if targets := [(arm, target) for arm in self.arms if (target := arm.config.target_pose) is not None]:
            return [arm.is_at(target) for arm, target in targets]
        return [bool(self.arms[0].client.post("scene", {})["succeed"])] if self.simulation else []

    def _each(self, function: Callable[[ArmConnection], T]) -> list[T]:
        """For all arms at the same time; an error is raised when all have ended."""
        if self._pool is None:
            return [function(arm) for arm in self.arms]
        futures = [self._pool.submit(function, arm) for arm in self.arms]
        wait(futures)
        return [future.result() for future in futures]


class RobotEnv(_Arms):
    """One arm: 7 actions, the keys ``tcp_pose``, ``tcp_vel``, ``gripper_pose``,
    ``tcp_force``, ``tcp_torque``, and its cameras."""

    def __init__(self, config: RobotConfig | None = None):
        self.config = config or RobotConfig()
        super().__init__([ArmConnection(self.config, "", self.config.cameras, self.config.image_size)])


class DualRobotEnv(_Arms):
    """Two arms: 14 actions, left first, keys with ``left/`` and ``right/``. The
    reward needs both arms, the end of an episode one.

    What belongs to both (`TOGETHER`) is taken from `left`; `right` may have the same values, or none. `cameras` are
    those that belong to no arm; an arm's own are seen as ``left/NAME`` and ``right/NAME``.
    """

    TOGETHER = ("hz", "step_limit", "instruction", "task", "initial_states", "image_size", "joint_reset_period")

    def __init__(self, left: RobotConfig, right: RobotConfig, cameras: Mapping[str, CameraConfig] | None = None):
        if other := [key for key in self.TOGETHER if right.given(key) and getattr(right, key) != getattr(left, key)]:
            values = f"{getattr(left, other[0])!r} for the left arm and {getattr(right, other[0])!r} for the right one"
            raise ConfigError(
                f"{other[0]} is {values}; it belongs to both. Give it for the left one, or alike for both."
            )
        if left.url.rstrip("/") == right.url.rstrip("/"):
            raise ConfigError(
                f"{left.url} is given for both arms; each arm has a server, or a port, of its own. Correct one of them."
            )
        own = [
            {side + name: camera for name, camera in arm.cameras.items()}
            for side, arm in (("left/", left), ("right/", right))
        ]
        size = left.image_size
        super().__init__(
            [
                ArmConnection(left, "left/", {**(cameras or {}), **own[0]}, size),
                ArmConnection(right, "right/", own[1], size),
            ]
        )


class ArmConnection:
    """One arm's connection, cameras and last command."""

    client: RobotClient
    pose: Array  # [7] as measured last

    def __init__(self, config: RobotConfig, prefix: str, cameras: Mapping[str, CameraConfig], image_size: int):
        self.config, self.prefix, self.camera_configs, self.image_size = config, prefix, dict(cameras), image_size
        self._cameras: dict[str, Camera] = {}
        self._command: Array | None = None
        self._wanted, self._gripped, self._gripped_at = "leave", "leave", -np.inf

    def connect(self) -> None:
        self.client = self.new_client()
        for name, camera in self.camera_configs.items():
            self._cameras[name] = open_camera(name, camera, self.image_size, self.new_client)

    def close(self) -> None:
        while self._cameras:
            self._cameras.popitem()[1].close()
        if hasattr(self, "client"):
            self.client.close()

    def begin(self, numbers: tuple[int, ...], joints: bool) -> None:
        """An episode begins; the arm goes to its reset pose, if it has one, always
        to the same place for the same numbers."""
        config, goal = self.config, None
        self.client.post("clearerr")
        self._update(config.precision)
        if joints:
            self.client.post("jointreset", seconds=config.joint_reset_seconds)
        if config.gripper_at_reset != "leave":
            self._grip(config.gripper_at_reset)
        if config.reset_pose is not None:
            sway = np.random.default_rng(numbers).uniform(-1, 1, 3) * np.repeat(config.random_reset, [2, 1])
            begin = np.add(config.reset_pose, [*sway[:2], 0, 0, 0, sway[2]])
            goal = self.safe(np.concatenate([begin[:3], from_euler(begin[3:])]))
            self._move(goal)
        self._wanted, self._gripped, self._command = "leave", "leave", goal
        self._update(config.compliance)

    def observed(self) -> tuple[dict[str, Array], dict[str, Array]]:
        reply = self._measured()
        state = {self.prefix + key: reply[name].astype(np.float32) for key, (name, _) in STATE.items()}
        images = {}
        for name, camera in self._cameras.items():
            images[name] = fitted(name, camera.read().image, self.camera_configs[name].crop, self.image_size)
        return state, images

    def act(self, action: Array) -> None:
        """Sends the next pose, and the gripper's command if there is one that may be sent now."""
        if abs(action[6]) >= 0.5:
            self._wanted = "open" if action[6] > 0 else "close"
        if self._wanted != self._gripped and time.monotonic() - self._gripped_at >= self.config.gripper_seconds:
            self._grip(self._wanted)
        self._send(self.target(action))

    def target(self, action: Array) -> Array:
        """The pose to command for an action, from the last command, the measured pose and the limits."""
        (meters, radians), now = self.config.lead, self.pose
        last = now if self._command is None else self._command
        ahead = np.clip(to_rotation_vector(multiply(last[3:], inverse(now[3:]))), -radians, radians)
        position = np.clip(last[:3], now[:3] - meters, now[:3] + meters) + action[:3] * self.config.action_scale[0]
        rotation = multiply(from_rotation_vector(ahead), now[3:])
        return self.safe(
            np.concatenate([position, multiply(from_euler(action[3:6] * self.config.action_scale[1]), rotation)])
        )

    def safe(self, pose: Array) -> Array:
        """The nearest pose inside the limits. The first angle jumps from pi to -pi where a
        gripper points down: its size is limited."""
        low, high, angles = np.array(self.config.limit_low), np.array(self.config.limit_high), to_euler(pose[3:])
        angles[0] = np.copysign(np.clip(abs(angles[0]), low[3], high[3]), angles[0])
        angles[1:] = np.clip(angles[1:], low[4:], high[4:])
        return np.concatenate([np.clip(pose[:3], low[:3], high[:3]), from_euler(angles)])

    def is_at(self, target: list[float]) -> bool:
        """Upstream's test: position, and the angles of the rotation that is left, each within its threshold."""
        left = to_euler(multiply(inverse(self.pose[3:]), from_euler(target[3:])))
        return bool(np.all(np.abs([*(self.pose[:3] - target[:3]), *left]) < self.config.reward_threshold))

    def _move(self, goal: Array) -> None:
        """Goes straight to a pose, waits until the arm is there, and raises an error if it does not get there."""
        start, rate = self._measured()["pose"], Rate(self.config.hz)
        turn = to_rotation_vector(multiply(goal[3:], inverse(start[3:])))
        steps = max(1, round(self.config.reset_seconds * self.config.hz))
        for share in [*(np.arange(steps) + 1) / steps, *[1.0] * steps]:
            position = start[:3] + share * (goal[:3] - start[:3])
            self._send(self.safe(np.concatenate([position, multiply(from_rotation_vector(share * turn), start[3:])])))
            rate.wait()
            away = float(np.linalg.norm(self._measured()["pose"][:3] - goal[:3]))
            if share == 1.0 and away < 0.005:
                break
        if away > self.config.reset_tolerance:
            raise RequestError(
                f"{self.config.url}: the arm is {away:.3f} m from its reset pose, and at most reset_tolerance="
                f"{self.config.reset_tolerance:g} m are allowed. Is it blocked, or in error? "
                "Clear its way and reset again."
            )

    def _measured(self) -> dict[str, Array]:
        """Returns the state of the arm from the server, each part as a flat array."""
        reply, values = self.client.post("getstate"), {}
        for name, size in STATE.values():
            try:
                values[name] = np.ravel(np.array(reply[name], np.float64))
            except (KeyError, TypeError, ValueError):
                values[name] = np.empty(0)
            if values[name].size != size or not np.isfinite(values[name]).all():
                raise RequestError(
                    f"{self.config.url}/getstate: {name} is not {size} finite numbers. Is it a robot server?"
                )
        self.pose = np.concatenate([values["pose"][:3], normalized(values["pose"][3:])])
        return values

    def _send(self, pose: Array) -> None:
        self._command = None  # unless it is taken, the next one begins where the arm is
        self.client.post("clearerr")  # as upstream, so that a reflex of the arm does not end the episode
        self.client.post("pose", {"arr": pose.tolist(), "stands": 1 / self.config.hz + LATE_S})
        self._command = pose

    def _grip(self, command: str) -> None:
        self.client.post(f"{command}_gripper")
        self._gripped, self._gripped_at = command, time.monotonic()

    def _update(self, parameters: Mapping[str, float]) -> None:
        if parameters:
            self.client.post("update_param", dict(parameters))

    def new_client(self) -> RobotClient:
        token = read(Path(self.config.token_file)).decode().strip() if self.config.token_file else ""
        return RobotClient(self.config.url, token, self.config.request_seconds)


def robot_task(name: str, **options: Any) -> gymnasium.Env:
    """``make("robot/NAME")``: NAME is ``HOST:PORT``, an address or a YAML file of
    settings; two with a comma, left first, are two arms.

    Options are settings of ``RobotConfig``, for both arms where there are two. ``cameras=["front", "wrist"]``, names
    alone, are a simulation's cameras; with two arms, ``left/NAME`` belongs to the left one, and ``NAME`` to none.
    """
    cameras = options.pop("cameras", {})
    cameras = dict(cameras) if isinstance(cameras, Mapping) else {camera: CameraConfig() for camera in cameras}
    places = name.split(",")
    sides = [""] if len(places) == 1 else ["left/", "right/"]
    if len(places) > 2:
        raise ConfigError(
            f"robot/{name}: {len(places)} arms were given; one, or two with a comma between them, were expected."
        )
    configs = []
    for side, place in zip(sides, places, strict=True):
        own = {key.removeprefix(side): cameras.pop(key) for key in list(cameras) if key.startswith(side)}
        where: Any = (
            Path(place)
            if place.endswith((".yaml", ".yml"))
            else {"url": place if "://" in place else f"http://{place}"}
        )
        # empty would take a file's away
        configs.append(build(RobotConfig(), where, options, *([{"cameras": own}] if own else [])))
    shared = build(RobotConfig(), {"cameras": cameras}).cameras
    return RobotEnv(configs[0]) if len(configs) == 1 else DualRobotEnv(configs[0], configs[1], shared)


def _all(successes: list[bool]) -> bool | None:
    """Whether all succeeded; None if unknown."""
    return all(successes) if successes else None
