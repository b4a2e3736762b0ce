"""An arm for tests that is wherever it is told to be, writes down what it was asked for, and breaks on request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError
from hilt.robot.backends import Backend, Box, RobotState

Array = np.ndarray[Any, Any]
HOME = np.array([0.5, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0])


class ToyArm(Backend):
    """`journal` is a file that gets a line for each call but `state` and `tick`, and for `command` where
    `moves` is given; `home_ticks` is how long a reset takes, and `tick_s` how long a tick does; `fails` is how
    it does: "open" is an error, "state" never comes."""

    def __init__(self, journal: str = "", moves: str = "", home_ticks: str = "3", tick_s: str = "0", fails: str = ""):
        if fails == "open":
            raise OSError("no route to 192.0.2.10")
        self._fails = fails
        self._journal, self._moves = journal, moves
        self._home_ticks, self._tick_s = int(home_ticks), float(tick_s)
        self._pose, self._gripper, self._left = HOME.copy(), 1.0, 0
        self.commands: list[Array] = []
        self.pushing = np.zeros(6)

    def _note(self, *words: object) -> None:
        if self._journal:
            with open(self._journal, "a") as file:
                file.write(" ".join(map(str, words)) + "\n")

    def workspace(self, arm: int) -> Box:
        return np.array([0.2, -0.4, 0.0]), np.array([0.8, 0.4, 0.6])

    def state(self, arm: int) -> RobotState:
        if self._fails == "state":
            time.sleep(600)
        return RobotState(
            self._pose,
            np.zeros(6),
            self.pushing[:3],
            self.pushing[3:],
            np.arange(7.0),
            np.zeros(7),
            np.eye(6, 7),
            self._gripper,
        )

    def command(self, pose: Array, arm: int) -> None:
        self.commands.append(pose)
        if self._moves:
            self._note("move", *pose[:3])
        self._pose = pose

    def hold(self, arm: int) -> None:
        self._note("hold")
        self.pushing = np.zeros(6)
        self._left = 0

    def grip(self, opening: float, slow: bool, arm: int) -> None:
        self._note("grip", round(opening, 3), slow)
        self._gripper = opening

    def reset_joints(self, arm: int) -> None:
        self._note("reset_joints")
        self._left = self._home_ticks

    def busy(self, arm: int) -> bool:
        return self._left > 0

    def tick(self, seconds: float) -> None:
        time.sleep(self._tick_s)
        self._left = max(0, self._left - 1)
        if not self._left:
            return
        self._pose = HOME.copy()

    def start(self, arm: int) -> None:
        self._note("start")

    def stop(self, arm: int) -> None:
        self._note("stop")

    def clear_errors(self, arm: int) -> None:
        self._note("clear_errors")

    def activate_gripper(self, arm: int) -> None:
        self._note("activate_gripper")

    def set_parameters(self, values: Mapping[str, float], arm: int) -> None:
        self._note("set_parameters", *values.items())
        if values.get("rotational_Ki") == 13:
            raise ZeroDivisionError("thirteen")
        if values.get("rotational_Ki"):
            raise ConfigError("rotational_Ki: the toy has none.")

    def set_load(self, mass: float, center: list[float], inertia: list[float], arm: int) -> None:
        self._note("set_load", mass, center, inertia)

    def wrench(self, values: Array, arm: int) -> None:
        self.pushing = values

    def close(self) -> None:
        self._note("close")
