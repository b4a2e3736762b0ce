"""A gamepad below pygame: SDL's virtual joystick, moved through SDL itself."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ConfigError, DeviceError, MissingPackageError
from hilt.teleop.devices import open_device
from hilt.teleop.gamepad import DEAD_ZONE, Gamepad, missing
from tests.teleop.played import Noting

pygame = pytest.importorskip("pygame")

# axes and buttons of SDL's virtual game controller
LEFT_X, LEFT_Y, RIGHT_X, RIGHT_Y, LEFT_TRIGGER, RIGHT_TRIGGER = range(6)
A, B, X, Y, BACK, GUIDE, START, LEFT_STICK, RIGHT_STICK, LEFT_SHOULDER, RIGHT_SHOULDER, UP, DOWN, LEFT, RIGHT = range(
    15
)
GAME_CONTROLLER, WHEEL = 1, 2


class Pad:
    """What a hand does to a gamepad."""

    def __init__(self, kind: int = GAME_CONTROLLER):
        library = next((Path(pygame.__file__).parent.parent / "pygame.libs").glob("libSDL2-2*"))
        self._sdl = ctypes.CDLL(str(library))
        self._sdl.SDL_JoystickOpen.restype = ctypes.c_void_p
        self._sdl.SDL_JoystickSetVirtualAxis.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int16]
        self._sdl.SDL_JoystickSetVirtualButton.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint8]
        self.plug(kind)

    def plug(self, kind: int = GAME_CONTROLLER) -> None:
        pygame.joystick.init()
        self.index = self._sdl.SDL_JoystickAttachVirtual(kind, 6, 15, 0)
        assert self.index >= 0
        self._stick = self._sdl.SDL_JoystickOpen(self.index)
        for axis in (LEFT_TRIGGER, RIGHT_TRIGGER):
            self.axis(axis, -1)

    def unplug(self) -> None:
        self._sdl.SDL_JoystickDetachVirtual(self.index)

    def update(self) -> None:
        """What the kernel does when something is moved: SDL notes it."""
        self._sdl.SDL_JoystickUpdate()

    def axis(self, axis: int, value: float) -> None:
        assert self._sdl.SDL_JoystickSetVirtualAxis(self._stick, axis, int(value * 32767)) == 0

    def button(self, button: int, down: bool = True) -> None:
        assert self._sdl.SDL_JoystickSetVirtualButton(self._stick, button, down) == 0


@pytest.fixture
def pad() -> Iterator[Pad]:
    pad = Pad()
    yield pad
    pad.unplug()


@pytest.fixture
def gamepad(pad: Pad) -> Iterator[Gamepad]:
    with open_device("gamepad") as device:
        device.attach(Noting(7))
        yield device  # type: ignore[misc]


@pytest.mark.parametrize(
    ("axis", "value", "motion"),
    [
        (LEFT_Y, -1, [1, 0, 0, 0, 0, 0]),
        (LEFT_X, -1, [0, 1, 0, 0, 0, 0]),
        (RIGHT_Y, 1, [0, 0, -1, 0, 0, 0]),
        (RIGHT_X, 1, [0, 0, 0, 0, 0, -1]),
        (LEFT_X, DEAD_ZONE, [0] * 6),
        (LEFT_X, (1 + DEAD_ZONE) / 2, [0, -0.5, 0, 0, 0, 0]),
    ],
)
def test_sticks(gamepad: Gamepad, pad: Pad, axis: int, value: float, motion: list[float]):
    pad.axis(axis, value)
    np.testing.assert_allclose(gamepad.read().motion, motion, atol=1e-3)


def test_cross_and_triggers(gamepad: Gamepad, pad: Pad):
    assert gamepad.read().gripper == 0
    pad.button(UP)
    pad.button(RIGHT)
    pad.axis(RIGHT_TRIGGER, 1)
    reading = gamepad.read()
    assert (reading.motion.tolist(), reading.gripper) == ([0, 0, 0, 1, -1, 0], -1)
    pad.axis(RIGHT_TRIGGER, -1)
    pad.axis(LEFT_TRIGGER, 1)
    assert gamepad.read().gripper == 1
    gamepad.attach(Noting(6))
    assert gamepad.read().gripper == 0, "there is no gripper"


def test_gamepad_acts_while_the_dead_man_button_is_held(gamepad: Gamepad, pad: Pad):
    pad.axis(LEFT_Y, -1)
    assert not gamepad.read().engaged
    pad.button(RIGHT_SHOULDER)
    assert gamepad.read().engaged
    pad.button(RIGHT_SHOULDER, False)
    assert not gamepad.read().engaged


def test_each_press_is_one_event(gamepad: Gamepad, pad: Pad):
    found = []
    for button in (A, B, X, BACK, START, LEFT_SHOULDER, LEFT_STICK):
        pad.button(button)
        found += [gamepad.read().events, gamepad.read().events]
        pad.button(button, False)
        found.append(gamepad.read().events)
    names = ("success", "fail", "reset", "stop", "toggle", "estop", "release_estop")
    assert [events for events in found if events] == [(name,) for name in names]
    pad.button(LEFT_SHOULDER)
    assert gamepad.is_estop_pressed() and gamepad.read().events == ("estop",) and not gamepad.is_estop_pressed()


def test_a_tap_between_two_readings_counts(gamepad: Gamepad, pad: Pad):
    pad.button(A)
    pad.update()
    pad.button(A, False)
    pad.update()
    assert gamepad.read().events == ("success",)


def test_the_other_arm(gamepad: Gamepad, pad: Pad):
    gamepad.attach(Noting(14))
    arms = []
    for down in (True, False, True, False):
        pad.button(Y, down)
        arms.append(gamepad.read().arm)
    assert arms == [1, 1, 0, 0]


def test_pulled_out_and_in_again(gamepad: Gamepad, pad: Pad, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.teleop.gamepad.REOPEN_SECONDS", 0.0)
    pad.axis(LEFT_Y, -1)
    pad.unplug()
    reading = gamepad.read()
    assert reading.lost and not reading.motion.any()
    pad.plug()
    pad.axis(LEFT_Y, -1)
    gamepad.read()
    pad.button(X)
    reading = gamepad.read()
    assert not reading.lost and reading.motion[0] == 1 and reading.events == ("reset",)


# --- what is lacking, with its cure
# -----------------------------------------------------------------------------------------------


def test_no_gamepad():
    with pytest.raises(DeviceError, match="no gamepad is connected: plug one in"):
        open_device("gamepad")


def test_options_that_cannot_work():
    for options in ({"index": -1}, {"dead_zone": 1.0}, {"dead_zone": -0.1}):
        with pytest.raises(ConfigError, match="expected a number from 0 and a share below 1"):
            open_device("gamepad", **options)


def test_no_such_number(pad: Pad):
    with pytest.raises(DeviceError, match="there is no gamepad number 3: 1 connected, counted from 0"):
        open_device("gamepad", index=3)


def test_a_stick_whose_buttons_are_unknown(pad: Pad):
    pad.unplug()
    pad.plug(WHEEL)
    with pytest.raises(
        DeviceError, match=r"SDL does not know the buttons of 'Virtual.*': set SDL_GAMECONTROLLERCONFIG"
    ):
        open_device("gamepad")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        (tmp_path / f"event{number}").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).endswith("0"))
    assert missing(0, 0, tmp_path) == (
        f"no gamepad is seen, and 2 of 3 devices in {tmp_path} may not be read: sudo usermod -aG "
        "input $USER, then log in again"
    )


def test_pygame_is_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'hilt\[teleop\]'"):
        open_device("gamepad")
