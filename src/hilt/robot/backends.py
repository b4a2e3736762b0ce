"""What the robot server asks of an arm: `Backend`, the class to write for a new one, and the simulated bench as one.

A backend lives in the control process, and all of its methods are called there, from one thread, between
two ticks: none may wait. A command is checked before it comes here: poses are finite, inside the workspace,
their quaternions of length one, their speed limited.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, RequestError, UnknownNameError
from hilt.core.names import ExtensionPoint
from hilt.envs.rotations import Array, from_rotation_vector, inverse, multiply, normalized, to_rotation_vector

Box = tuple[Array, Array]
"""Lowest and highest x, y, z in meters."""

PARAMETERS = (
    *(f"{kind}_{what}" for kind in ("translational", "rotational") for what in ("stiffness", "damping", "Ki")),
    *(
        f"{kind}_clip_{side}{axis}"
        for kind in ("translational", "rotational")
        for side in ("", "neg_")
        for axis in "xyz"
    ),
)
"""The names that ``/update_param`` knows: those of HIL-SERL's impedance controller."""


@dataclass(frozen=True)
class RobotState:
    """What ``/getstate`` tells of one arm: meters, radians, seconds, newtons, in the frame of the arm's base."""

    pose: Array  # [7] x y z, then the quaternion x y z w
    vel: Array  # [6] of the tool point, linear and angular
    force: Array  # [3] that acts on the tool point, along its own axes
    torque: Array  # [3]
    q: Array  # [7] the joints
    dq: Array  # [7]
    jacobian: Array  # [6, 7]
    gripper_pos: float  # 0 is closed, 1 is open

    def __post_init__(self) -> None:
        for name, expected in SHAPES.items():
            if (shape := np.shape(getattr(self, name))) != expected:
                raise ConfigError(f"{name} of a RobotState has the shape {shape}; expected {expected}.")
            if not np.isfinite(getattr(self, name)).all():
                raise ConfigError(f"{name} of a RobotState is {getattr(self, name)}; expected finite numbers.")

    def to_vector(self) -> Array:
        return np.concatenate([np.ravel(getattr(self, name)) for name in SHAPES]).astype(np.float64)

    @staticmethod
    def from_vector(vector: Array) -> RobotState:
        parts: Any = np.split(vector, np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1])
        return RobotState(*(part.reshape(shape) for part, shape in zip(parts, SHAPES.values(), strict=True)))


SHAPES: dict[str, tuple[int, ...]] = dict(
    zip((f.name for f in fields(RobotState)), [(7,), (6,), (3,), (3,), (7,), (7,), (6, 7), ()], strict=True)
)
STATE_SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())


class Backend:
    """One arm, or several that share a world. The first four methods must be written; the
    others refuse, or do nothing, until they are.

    To refuse a value raise `ConfigError` with a sentence: the client gets it with status 400. Any other exception ends
    the control process, with the arms held and the traceback shown.
    """

    arms = 1
    simulation = False
    """Whether ``/scene`` and ``/image`` work."""
    cameras: tuple[str, ...] = ()

    def workspace(self, arm: int) -> Box:
        """Where the tool point may be sent."""
        raise NotImplementedError

    def state(self, arm: int) -> RobotState:
        raise NotImplementedError

    def command(self, pose: Array, arm: int) -> None:
        """The pose to be at now. It comes at every tick while the arm moves, and never
        further away than the speed limit allows."""
        raise NotImplementedError

    def grip(self, opening: float, slow: bool, arm: int) -> None:
        """Begins to move the fingers; 0 is closed, 1 is open."""
        raise NotImplementedError

    def hold(self, arm: int) -> None:
        """Stay where you are, and push no more: commands have ceased, or the server ends."""
        self.command(self.state(arm).pose, arm)

    def tick(self, seconds: float) -> None:
        """Called at the control rate, after the commands: a simulation goes on by so much."""

    def reset_joints(self, arm: int) -> None:
        """Begins to move all joints to the home posture; `busy` tells when it is there."""
        raise RequestError(f"{type(self).__name__} has no joint reset: move there with /pose.")

    def busy(self, arm: int) -> bool:
        """Whether the motion that `reset_joints` began is under way."""
        return False

    def start(self, arm: int) -> None:
        """Starts the impedance controller."""

    def stop(self, arm: int) -> None:
        """Stops the impedance controller; the arm must then stand still by itself."""

    def clear_errors(self, arm: int) -> None:
        """Leaves an error state, if there is one. HIL-SERL's client asks for it before every pose."""

    def activate_gripper(self, arm: int) -> None:
        """Makes the gripper ready, where that is needed."""

    def reset_gripper(self, arm: int) -> None:
        self.grip(1.0, False, arm)

    def set_parameters(self, values: Mapping[str, float], arm: int) -> None:
        """Impedance; the names are among `PARAMETERS`."""
        if values:
            raise RequestError(
                f"{type(self).__name__} has no impedance parameters to change, and {', '.join(values)} were given."
            )

    def set_load(self, mass: float, center: list[float], inertia: list[float], arm: int) -> None:
        """What hangs at the flange, in kilograms, meters and kg m²."""
        if mass:
            raise RequestError(f"{type(self).__name__} cannot make up for a load; expected mass 0, got {mass}.")

    def wrench(self, values: Array, arm: int) -> None:
        """Pushes with a force and a torque, ``[6]``, instead of following poses; it must bound them. `hold` ends it,
        and is called when the arm leaves the workspace or is faster than its limits."""
        raise RequestError(f"{type(self).__name__} does not take a wrench: send poses to /pose.")

    def close(self) -> None:
        """The last call, with the arms held."""

    # --- simulations only ---

    def scene(self, task: str | None, split: str | None, state: int | None) -> dict[str, Any]:
        """Resets the scene to a numbered initial state, if one is given, and tells about it."""
        raise NotImplementedError

    def snapshot(self) -> Array:
        """All that a picture of the scene needs."""
        return np.zeros(0)

    @classmethod
    def renderer(cls, options: Mapping[str, Any]) -> Callable[[Array, str, int, int], Array]:
        """A function of (snapshot, camera, height, width), for the process that answers
        ``/image``: control never waits for a picture."""
        raise NotImplementedError


BACKENDS = ExtensionPoint("backend", "hilt.backends", {"tabletop": "hilt.robot.backends:TabletopBackend"})


def backend_class(name: str) -> type[Backend]:
    """``tabletop``, a name that an installed package has registered, or
    ``package.module:Class`` for one of your own."""
    return BACKENDS.load_class(name, Backend)


def open_backend(name: str, options: Mapping[str, Any]) -> Backend:
    kind = backend_class(name)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigError(f"backend {name!r}: {error}; it takes {inspect.signature(kind)}.") from None
    needed = ("workspace", "state", "command", "grip", *(("scene", "renderer") if kind.simulation else ()))
    if missing := [method for method in needed if next(c for c in kind.__mro__ if method in vars(c)) is Backend]:
        raise ConfigError(
            f"{kind.__name__} has no {', no '.join(missing)}: write them, see 'An arm of your own' in docs/robot.md."
        )
    return kind(**options)


def slew(start: Array, goal: Array, most_meters: float, most_radians: float) -> Array:
    """From one pose toward another, by at most so much."""
    way = goal[:3] - start[:3]
    turn = to_rotation_vector(multiply(goal[3:], inverse(start[3:])))
    distance, angle = float(np.linalg.norm(way)), float(np.linalg.norm(turn))
    position = start[:3] + way * min(1.0, most_meters / distance) if distance else goal[:3]
    rotation = multiply(from_rotation_vector(turn * min(1.0, most_radians / angle)), start[3:]) if angle else goal[3:]
    return np.concatenate([position, normalized(rotation)])


class TabletopBackend(Backend):
    """A task of the simulated bench, in real time."""

    simulation = True
    HOME_SPEED, HOME_TURN = 0.3, 1.0  # meters and radians per second
    HOME_NEAR, HOME_STILL = 0.003, 0.01  # meters or radians; the same per second
    SLOW_GRIP = 1.25  # openings per second, as Franka's gripper at 0.1 m/s
    MAX_FORCE, MAX_TORQUE = 30.0, 5.0  # newtons, newton meters

    def __init__(self, task: str = "pick"):
        from hilt.envs.tabletop.suite import SUITE
        from hilt.envs.tabletop.world import World

        task = task.removeprefix("tabletop/")  # as `make` names it
        if task not in SUITE:
            raise UnknownNameError("tabletop task", task, SUITE)
        self._task = SUITE[task]
        self._world = World(self._task.objects, arms=self._task.arms)
        self.arms, self.cameras = self._world.arms, self._world.cameras
        self._homes = [self._world.pose(arm) for arm in range(self.arms)]
        self._homing: set[int] = set()
        self._closing: set[int] = set()  # slowly
        self._pushes: dict[int, Array] = {}  # arm: the wrench
        self._springs: dict[int, dict[str, float]] = {}  # arm: the stiffness that it had before
        self._owed = 0.0  # seconds that have passed, and not yet in the simulation
        self._begin("train", 0)

    def _begin(self, split: str, state: int) -> None:
        """Begins as `TabletopEnv` does."""
        from hilt.envs.tabletop.suite_env import SETTLE_SECONDS

        self._task.begin(self._world, split, state)
        self._world.advance(SETTLE_SECONDS)
        self._begun = (split, state)

    def workspace(self, arm: int) -> Box:
        from hilt.envs.tabletop.suite_env import BOX_HIGH, BOX_LOW

        return BOX_LOW[:3], BOX_HIGH[:3]

    def state(self, arm: int) -> RobotState:
        s = self._world.arm(arm)
        return RobotState(s.pose, s.vel, s.force, s.torque, s.q, s.dq, s.jacobian, s.gripper)

    def command(self, pose: Array, arm: int) -> None:
        self._world.command(pose, arm)

    def grip(self, opening: float, slow: bool, arm: int) -> None:
        self._closing.discard(arm)
        if slow and opening == 0.0:
            self._closing.add(arm)
        else:
            self._world.grip(opening, arm)

    def hold(self, arm: int) -> None:
        self._homing.discard(arm)
        if self._pushes.pop(arm, None) is not None:
            self._push(np.zeros(6), arm)
            self.set_parameters({}, arm)
        self._world.command(self._world.pose(arm), arm)

    def reset_joints(self, arm: int) -> None:
        self._homing.add(arm)

    def busy(self, arm: int) -> bool:
        if arm not in self._homing:
            return False
        state, home = self._world.arm(arm), self._homes[arm]
        turned = to_rotation_vector(multiply(state.pose[3:], inverse(home[3:])))
        away = max(float(np.abs(state.pose[:3] - home[:3]).max()), float(np.abs(turned).max()))
        return away > self.HOME_NEAR or float(np.abs(state.vel).max()) > self.HOME_STILL

    def set_parameters(self, values: Mapping[str, float], arm: int) -> None:
        self._world.set_parameters({**self._springs.pop(arm, {}), **values}, arm)
        if arm in self._pushes:
            self._let_go(arm)

    def _let_go(self, arm: int) -> None:
        """The springs of a pushed arm; its dampers stay."""
        names = ("translational_stiffness", "rotational_stiffness")
        self._springs[arm] = {name: self._world.parameters[arm][name] for name in names}
        self._world.set_parameters(dict.fromkeys(names, 0.0), arm)

    def wrench(self, values: Array, arm: int) -> None:
        if arm not in self._pushes:
            self._let_go(arm)
        most = np.repeat([self.MAX_FORCE, self.MAX_TORQUE], 3)
        self._pushes[arm] = np.clip(values, -most, most)

    def _push(self, wrench: Array, arm: int) -> None:
        """MuJoCo pushes at the hand's center of mass; the wrench is meant at the tool point."""
        hand = self._world.model.body(f"{self._world.prefixes[arm]}hand").id
        lever = self._world.pose(arm)[:3] - self._world.data.xipos[hand]
        self._world.data.xfrc_applied[hand] = [*wrench[:3], *(wrench[3:] + np.cross(lever, wrench[:3]))]

    def tick(self, seconds: float) -> None:
        from hilt.envs.tabletop.world import TIMESTEP

        for arm in self._homing:
            start = self._world.commanded(arm)
            self._world.command(slew(start, self._homes[arm], self.HOME_SPEED * seconds, self.HOME_TURN * seconds), arm)
        for arm in self._closing:
            self._world.grip(max(0.0, self._world.gripping(arm) - self.SLOW_GRIP * seconds), arm)
        for arm, wrench in self._pushes.items():
            self._push(wrench, arm)
        self._owed += seconds
        steps = int(self._owed / TIMESTEP + 1e-9)
        self._owed -= steps * TIMESTEP
        self._world.advance(steps * TIMESTEP)

    def scene(self, task: str | None, split: str | None, state: int | None) -> dict[str, Any]:
        if task not in (None, self._task.name):
            raise ConfigError(
                f"task {task!r}: this server has {self._task.name!r}; start another one with --task {task}."
            )
        if split is not None and state is not None:
            self._begin(split, state)
            self._homing.clear()
            self._closing.clear()
        facts = {"task": self._task.name, "instruction": self._task.instruction, "step_limit": self._task.step_limit}
        facts |= {"split": self._begun[0], "state": self._begun[1], "succeed": bool(self._task.success(self._world))}
        return {**facts, "time": float(self._world.data.time)}

    def snapshot(self) -> Array:
        return self._world.snapshot()

    @classmethod
    def renderer(cls, options: Mapping[str, Any]) -> Callable[[Array, str, int, int], Array]:
        world = cls(**options)._world

        def render(snapshot: Array, camera: str, height: int, width: int) -> Array:
            world.restore(snapshot)
            return world.render(camera, height, width)

        return render
