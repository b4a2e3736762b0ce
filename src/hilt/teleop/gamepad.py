"""A gamepad, through SDL (`pygame`), which knows the buttons of the common ones. No window and no screen are needed.

Controls:

    left stick      x (up: forward) and y (left: left)          A  success      B  fail      X  reset
    right stick     z (up: up) and yaw (left: left)             start  toggle   back  stop
    cross           pitch (up, down) and roll (left, right)     Y  the other arm
    left trigger    open the gripper                            right shoulder  dead-man button: hold it to act
    right trigger   close it                                    left shoulder   emergency stop
                                                                left stick pressed  releases it
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import ConfigError, DeviceError, optional_module
from hilt.core.platform import DEVICE_NODES, environment
from hilt.envs.env_protocol import Env
from hilt.teleop.devices import ESTOP, RELEASE_ESTOP, Device, Reading, arms_and_gripper

DEAD_ZONE = 0.12
"""Of a stick's way, so much is nothing: worn sticks do not come back to 0."""
FULL = 32767
# SDL's numbers for the parts of a game controller, whatever the maker's are
STICKS, TRIGGERS = (0, 1, 2, 3), (4, 5)
BUTTONS = {0: "success", 1: "fail", 2: "reset", 3: "arm", 4: "stop", 6: "toggle", 7: RELEASE_ESTOP, 9: ESTOP}
DEAD_MAN, UP, DOWN, LEFT, RIGHT = 10, 11, 12, 13, 14
REOPEN_SECONDS = 1.0
PERMISSION = "sudo usermod -aG input $USER, then log in again"


class Gamepad(Device):
    """The pad number `index`. Read it in the thread that opened it, as SDL asks."""

    name = "gamepad"

    def __init__(self, index: int = 0, dead_zone: float = DEAD_ZONE):
        super().__init__()
        if index < 0 or not 0 <= dead_zone < 1:
            raise ConfigError(
                f"gamepad {index} with the dead zone {dead_zone}: expected a number from 0 and a share below 1"
            )
        self._index, self._dead_zone = index, dead_zone
        self._arms, self._gripper, self._arm = 1, True, 0
        # SDL gives a joystick's events only to the program with the focused window by default
        settings = {"SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS": "1", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
        with environment({name: os.environ.get(name, value) for name, value in settings.items()}):
            self._pygame = optional_module("pygame", "A gamepad", "teleop")
            self._controller = optional_module("pygame._sdl2.controller", "A gamepad", "teleop", "pygame")
            if not self._pygame.display.get_init():
                with environment({"SDL_VIDEODRIVER": "dummy"}):
                    self._pygame.display.init()  # SDL hands out joystick events with those of a display
            self._controller.init()
        # presses come as events, so that a tap between two readings counts; others would only fill the queue
        names = [name for name in dir(self._pygame) if name.startswith(("JOY", "CONTROLLER")) and "_" not in name]
        self._pygame.event.set_blocked([getattr(self._pygame, name) for name in names if "BUTTON" not in name])
        self._presses = [getattr(self._pygame, name) for name in names if "BUTTON" in name]
        self._pad: Any = self._open()
        self._next_try = 0.0

    def attach(self, env: Env) -> None:
        self._arms, self._gripper = arms_and_gripper(env)

    def read(self) -> Reading:
        self._press_buttons()
        if not self._pad.attached() and not self._again():
            return Reading(lost=True, events=self.take_events(), arm=self._arm)
        button = self._pad.get_button
        left_x, left_y, right_x, right_y = (self._stick(axis) for axis in STICKS)
        roll, pitch = button(RIGHT) - button(LEFT), button(DOWN) - button(UP)
        # SDL's y points down, and a stick to the left is y and yaw to the left, which is positive
        motion = np.array([-left_y, -left_x, -right_y, roll, pitch, -right_x], float)
        opens, closes = (self._pad.get_axis(axis) > FULL / 2 for axis in TRIGGERS)
        gripper = (int(opens) - int(closes)) * self._gripper
        return Reading(motion, gripper, bool(button(DEAD_MAN)), events=self.take_events(), arm=self._arm)

    def is_estop_pressed(self) -> bool:
        self._press_buttons()
        return super().is_estop_pressed()

    def close(self) -> None:
        self._pad.quit()

    def _stick(self, axis: int) -> float:
        """In [-1, 1], 0 in the dead zone and steady at its edge."""
        value = float(np.clip(self._pad.get_axis(axis) / FULL, -1, 1))
        return float(np.sign(value)) * max(0.0, abs(value) - self._dead_zone) / (1 - self._dead_zone)

    def _press_buttons(self) -> None:
        for event in self._pygame.event.get(self._presses):  # this also brings the state up to date
            if (
                event.type == self._pygame.CONTROLLERBUTTONDOWN
                and event.instance_id == self._id
                and event.button in BUTTONS
            ):
                if BUTTONS[event.button] == "arm":
                    self._arm = (self._arm + 1) % self._arms
                else:
                    self.press(BUTTONS[event.button])

    def _open(self) -> Any:
        pads = self._controller.get_count()
        if self._index >= pads:
            raise DeviceError(missing(pads, self._index))
        if not self._controller.is_controller(self._index):
            name = self._pygame.joystick.Joystick(self._index).get_name()
            raise DeviceError(
                f"SDL does not know the buttons of {name!r}: set SDL_GAMECONTROLLERCONFIG to its line of the "
                "public SDL_GameControllerDB"
            )
        pad = self._controller.Controller(self._index)
        self._joystick = pad.as_joystick()  # kept: pygame fails on events of a joystick that it does not know
        self._id = self._joystick.get_instance_id()
        return pad

    def _again(self) -> bool:
        """The pad was pulled out: look for it now and then."""
        if time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + REOPEN_SECONDS
            try:
                self._pad = self._open()
                return True
            except DeviceError:
                pass
        return False


def missing(pads: int, index: int, folder: Path = Path("/dev/input")) -> str:
    """Why there is no pad of that number, and the cure."""
    nodes = sorted(folder.glob("event*")) if DEVICE_NODES else []
    closed = [node for node in nodes if not os.access(node, os.R_OK)]
    if not pads and closed:
        return (
            f"no gamepad is seen, and {len(closed)} of {len(nodes)} devices in {folder} may not be read: {PERMISSION}"
        )
    if not pads:
        return (
            "no gamepad is connected: plug one in, or use the device browser, which also takes "
            "the gamepad of that computer"
        )
    return f"there is no gamepad number {index}: {pads} connected, counted from 0"
