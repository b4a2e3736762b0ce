"""An arm: it is at once where it is sent."""

from __future__ import annotations

import numpy as np

from hilt.robot.backends import Backend, RobotState


class ExampleArm(Backend):
    def __init__(self, height: str = "0.2"):
        self._pose, self._opening = np.array([0.5, 0.0, float(height), 1.0, 0.0, 0.0, 0.0]), 1.0

    def workspace(self, arm: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0.3, -0.2, 0.05]), np.array([0.7, 0.2, 0.4])

    def state(self, arm: int) -> RobotState:
        sensed = {"vel": np.zeros(6), "force": np.zeros(3), "torque": np.zeros(3)}
        joints = {"q": np.zeros(7), "dq": np.zeros(7), "jacobian": np.zeros((6, 7))}
        return RobotState(pose=self._pose, gripper_pos=self._opening, **sensed, **joints)

    def command(self, pose: np.ndarray, arm: int) -> None:
        self._pose = pose

    def grip(self, opening: float, slow: bool, arm: int) -> None:
        self._opening = opening
