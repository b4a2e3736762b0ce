"""A SpaceMouse, through `pyspacemouse`: axes and buttons as HIL-SERL has them.

The person sits opposite the arm. The left button closes the gripper, the right one opens it, both together toggle. No
button is left for success and failure: the environment tells them.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from typing import Any

import numpy as np

from hilt.core.errors import DeviceError, optional_module
from hilt.core.platform import DEVICE_NODES, install_line
from hilt.envs.env_protocol import Env
from hilt.teleop.devices import Device, Reading, acting, arms_and_gripper

POLL_SECONDS = 0.002
REOPEN_SECONDS = 1.0
STALE_SECONDS = 0.5
"""A mouse that is pushed reports 60 times a second or more. One that falls silent
while pushed is out of reach: a wireless one."""
TOGETHER_SECONDS = 0.1
"""So long a button waits whether the other one follows, so that a toggle leaves the gripper alone."""
LIBRARY = "hidapi-hidraw" if DEVICE_NODES else "hidapi"
INSTALL = install_line("libhidapi-hidraw0", "hidapi")
UDEV_RULE = 'KERNEL=="hidraw*", ATTRS{idVendor}=="256f|046d", ATTRS{idProduct}=="c6*", MODE="0660", TAG+="uaccess"'
PERMISSION = (
    f"echo '{UDEV_RULE}' | sudo tee /etc/udev/rules.d/70-spacemouse.rules; sudo udevadm control "
    "--reload; then plug it in again"
)


class SpaceMouse(Device):
    """The mouse of that pyspacemouse name, or the first one.

    A thread of its own reads it: the kernel keeps 64 reports and drops those that come after, so that a mouse that is
    let go during a pause would seem to be pushed still.
    """

    name = "spacemouse"

    def __init__(self, device: str | None = None):
        super().__init__()
        self._device = device
        self._package = optional_module("pyspacemouse", "A SpaceMouse", "teleop")
        self._gone = (optional_module("easyhid", "A SpaceMouse", "teleop").HIDException, OSError)
        self._mouse: Any = self._open()
        self._motion, self._heard, self._lost = np.zeros(6), 0.0, False
        self._gripper, self._button, self._since, self._both = True, 0, 0.0, False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="spacemouse", daemon=True)
        self._thread.start()

    def attach(self, env: Env) -> None:
        _, self._gripper = arms_and_gripper(env)

    def read(self) -> Reading:
        now, motion, button = time.monotonic(), self._motion, self._button
        gripper = button if self._gripper and now - self._since >= TOGETHER_SECONDS else 0
        lost = self._lost or bool(motion.any() and now - self._heard > STALE_SECONDS)
        return Reading(motion, gripper, acting(motion, gripper), lost, self.take_events())

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=2)
        self._mouse.close()

    def _open(self) -> Any:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints what it found
                return self._package.open(device=self._device, axis_convention=self._package.AxisConvention.HID)
        except RuntimeError as error:
            raise DeviceError(cure(str(error))) from error
        except ValueError as error:
            raise DeviceError(f"no SpaceMouse is named {self._device!r}: {error}") from error

    def _listen(self) -> None:
        latest = -1.0
        try:
            while not self._closing.is_set():
                try:
                    state = self._mouse.read()
                except self._gone:
                    self._let_go()
                    self._again()
                    continue
                if state.t == latest:  # no report
                    self._closing.wait(POLL_SECONDS)
                    continue
                latest = state.t
                self._heard = time.monotonic()
                self._motion = np.clip([state.y, state.x, -state.z, state.pitch, state.roll, -state.yaw], -1, 1)
                self._buttons(*(bool(button) for button in [*state.buttons, 0, 0][:2]))
        finally:
            self._let_go()  # whatever ended it

    def _let_go(self) -> None:
        self._lost, self._motion, self._button = True, np.zeros(6), 0

    def _buttons(self, left: bool, right: bool) -> None:
        if left and right and not self._both:
            self.press("toggle")
        self._both = (left or right) if self._both else (left and right)  # until both are up again
        button = 0 if self._both else int(right) - int(left)
        if button != self._button:
            self._since, self._button = time.monotonic(), button

    def _again(self) -> None:
        """It was pulled out: wait until it is there again."""
        self._mouse.close()
        while not self._closing.wait(REOPEN_SECONDS):
            try:
                self._mouse = self._open()
            except DeviceError:
                continue
            self._lost = False
            return


def cure(trouble: str) -> str:
    """Returns the fix for an error of pyspacemouse."""
    if "HID API" in trouble:
        return f"a SpaceMouse needs the library hidapi, which is not there: {INSTALL}"
    if "open" in trouble and not DEVICE_NODES:
        return (
            f"the SpaceMouse is there, but may not be opened ({trouble}): end the maker's driver "
            "and any program that uses it"
        )
    if "open" in trouble:
        return f"the SpaceMouse is there, but may not be opened: {PERMISSION}"
    return (
        f"no SpaceMouse is found ({trouble}): plug it in; `lsusb -d 256f:` shows it on Linux; the "
        "device browser needs none"
    )
