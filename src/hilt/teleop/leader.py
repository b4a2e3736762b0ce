"""A leader at the controls: a second arm, a tracker or a phone, anything that gives the pose or the joints that it has.

    def pose():                                  # yours: what the leader has now
        return LeaderState(position_and_quaternion, gripper=0.8, clutch=pedal.pressed)

    hilt train RECIPE operator=leader operator_options.source=my_leader:pose

While the clutch is held, the arm follows: what the leader has moved since the clutch closed, the arm moves from where
it was then. So control changes hands without a jump, in both directions, wherever the leader is held: at the first step
the arm is where it is to be, and afterwards the policy's actions, which are differences, go on from there. The gripper
follows once the leader's gripper was as the arm's is. Where the leader is faster than the arm may be, the arm comes
after it at its own limit. After an emergency stop it follows when the clutch was opened and closed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import Array, Observation
from hilt.envs.env_protocol import Env
from hilt.envs.rotations import inverse, multiply, normalized, to_rotation_vector
from hilt.teleop.devices import EVENTS, Device, Reading, function

POSE, GRIPPER = "state/tcp_pose", "state/gripper_pose"
"""Where an observation has the pose of the arm's hand, position and quaternion (x, y, z, w), and how far its gripper is
open, from 0 to 1"""
STALE_S = 0.5
"""Seconds after which a leader that gives nothing new to read is out of reach"""
ALIKE = 0.25
"""The difference up to which two grippers are as far open as each other"""


@dataclass(frozen=True)
class LeaderState:
    """What a leader has now."""

    pose: Any
    """Position in meters and quaternion (x, y, z, w), in any frame whose axes are those of the arm's base; or joints,
    of which `forward` makes that"""
    gripper: float | None = None
    """How far it is open, from 0 to 1; None: it has none, and the arm's stays as it is"""
    clutch: bool = True
    """Whether the arm is to follow"""
    events: tuple[str, ...] = ()
    """What was pressed since the last state, of `hilt.teleop.devices.EVENTS`: a pedal for "estop", for example"""


class Leader(Device):
    """Drives the arm by an absolute pose. `source` is a function without arguments that gives a `LeaderState`, or None
    while there is nothing new, or "module:name" of it; `forward` makes a pose of the leader's joints. `motion_scale` is
    how far the arm goes for a meter of the leader. `action_scale`: the meters and radians of an action of 1, where the
    environment does not have them."""

    name = "leader"
    gives_actions = True

    def __init__(
        self,
        source: Callable[[], LeaderState | None] | str,
        forward: Callable[[Any], Any] | str | None = None,
        motion_scale: float = 1.0,
        action_scale: tuple[float, float] | None = None,
        stale_seconds: float = STALE_S,
    ):
        super().__init__()
        if motion_scale <= 0 or stale_seconds <= 0:
            raise ConfigError(
                f"motion_scale={motion_scale}, stale_seconds={stale_seconds}: expected numbers above 0 for a leader."
            )
        self._source = function(source, "source", Callable)  # type: ignore[arg-type]  # a class for isinstance
        self._forward = None if forward is None else function(forward, "forward", Callable)  # type: ignore[arg-type]
        self._motion_scale, self._action_scale, self._stale_s = motion_scale, action_scale, stale_seconds
        self._length = 7
        self._arm: tuple[Array, float | None] | None = None  # the pose and the gripper of the arm
        self._state: LeaderState | None = None
        self._heard = -np.inf
        self._began: tuple[Array, Array] | None = None  # poses of leader and arm when the clutch closed
        self._grips = False
        self._halted = False  # until the clutch is opened

    def attach(self, env: Env) -> None:
        self._length = (env.action_space.shape or (0,))[0]
        if self._length not in (6, 7):
            raise ConfigError(
                f"the action space is {env.action_space}: a leader drives one arm, by actions of 6 numbers, or of 7 "
                "with a gripper."
            )
        if self._action_scale is None:
            if not env.has_wrapper_attr("action_scale"):
                raise ConfigError(
                    f"{type(env.unwrapped).__name__} does not say how far an action of 1 moves the arm: give the "
                    "leader action_scale=[METERS, RADIANS]."
                )
            meters, radians = env.get_wrapper_attr("action_scale")
            self._action_scale = float(meters), float(radians)

    def reset(self) -> None:
        super().reset()
        self._began, self._grips = None, False

    def observe(self, observation: Observation) -> None:
        pose = _found(observation, POSE)
        if pose is None or np.shape(pose) != (7,):
            raise SchemaError(
                f"a leader needs the pose of the arm's hand, seven numbers at {POSE} of the observation; found "
                f"{'nothing' if pose is None else list(np.shape(pose))}."
            )
        gripper = _found(observation, GRIPPER)
        self._arm = np.asarray(pose, np.float64), None if gripper is None else float(np.ravel(gripper)[0])

    def read(self) -> Reading:
        now = time.monotonic()
        if (state := self._source()) is not None:
            self._state, self._heard = self._checked(state), now
            for event in state.events:
                self.press(event)
        lost = now - self._heard > self._stale_s
        if lost or self._state is None or self._arm is None or not self._state.clutch:
            self._began, self._grips = None, False
            self._halted = self._halted and (lost or self._state is None or self._state.clutch)
            held = self._state is not None and self._state.clutch
            # a leader that falls silent while it leads is lost; one that never led is not missed
            return Reading(lost=lost and held, events=self.take_events(), action=np.zeros(self._length))
        if self._halted:
            return Reading(engaged=True, events=self.take_events(), action=np.zeros(self._length))
        return Reading(engaged=True, events=self.take_events(), action=self._follow(self._state))

    def halt(self) -> None:
        self._began, self._grips, self._halted = None, False, True

    def _follow(self, state: LeaderState) -> Array:
        assert self._arm is not None and self._action_scale is not None, "attach and observe come first"
        leader, (arm, opened) = np.asarray(state.pose, np.float64), self._arm
        if self._began is None:
            self._began = leader, arm
        leader_then, arm_then = self._began
        position = arm_then[:3] + self._motion_scale * (leader[:3] - leader_then[:3])
        turned = multiply(leader[3:], inverse(leader_then[3:]))
        rotation = multiply(turned, arm_then[3:])
        meters, radians = self._action_scale
        turn = to_rotation_vector(multiply(rotation, inverse(arm[3:])))
        action = np.zeros(self._length)
        action[:6] = np.clip(np.concatenate([(position - arm[:3]) / meters, turn / radians]), -1, 1)
        if self._length == 7 and state.gripper is not None and opened is not None:
            self._grips = self._grips or abs(state.gripper - opened) <= ALIKE
            if self._grips and abs(state.gripper - opened) > ALIKE:
                action[6] = 1.0 if state.gripper > opened else -1.0
        return action

    def _checked(self, state: Any) -> LeaderState:
        if not isinstance(state, LeaderState):
            raise SchemaError(
                f"the leader's source gave {state!r}: expected a hilt.teleop.leader.LeaderState, or None."
            )
        pose = np.asarray(state.pose if self._forward is None else self._forward(state.pose), np.float64)
        if pose.shape != (7,) or not np.isfinite(pose).all() or np.linalg.norm(pose[3:]) < 0.5:
            cure = " Give forward=module:function, which makes a pose of joints." if self._forward is None else ""
            raise SchemaError(
                f"the leader's pose is {pose.tolist()}: expected seven finite numbers, position and quaternion "
                f"(x, y, z, w).{cure}"
            )
        if unknown := [event for event in state.events if event not in EVENTS]:
            raise UnknownNameError("event of a leader", unknown[0], EVENTS)
        return LeaderState(np.concatenate([pose[:3], normalized(pose[3:])]), state.gripper, state.clutch)


def _found(observation: Any, path: str) -> Any:
    """What an observation has at a path, whether its slashes are part of a name or go into dictionaries."""
    for name in path.split("/"):
        if isinstance(observation, dict) and path in observation:
            return observation[path]
        if not isinstance(observation, dict) or name not in observation:
            return None
        observation = observation[name]
    return observation
