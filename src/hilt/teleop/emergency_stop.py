"""The emergency stop, as `TakeOver` has it: latched by one press, until a person releases it.

While it is latched nothing moves, whatever the policy, the person at the device or a policy server wants; neither
success, fail nor reset counts. Where the environment has an arm behind a robot
server, the server's own emergency stop is latched, too, which refuses every client.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import gymnasium

from hilt.core.errors import EmergencyStopError, HiltError
from hilt.teleop.devices import ESTOP, RELEASE_ESTOP, Device

LATCHED = "Emergency stop: nothing moves until you release it."
"""The message that is shown meanwhile"""
POLL_INTERVAL_S = 0.02
"""Between two looks at the device while the environment resets"""
JOIN_S = 10.0
CHECK_INTERVAL_S = 0.5
"""Between two questions whether a robot server's emergency stop, which was pressed elsewhere, is released"""

_log = logging.getLogger("hilt.teleop")


class EmergencyStop:
    """The latch. `env`: what it stops; `device`: by which it is pressed and released."""

    def __init__(self, env: gymnasium.Env[Any, Any], device: Device):
        self._env, self._device = env, device
        self.latched = False
        self._elsewhere, self._next_check = False, 0.0  # whether it was pressed at the robot server

    def counted(self, events: tuple[str, ...]) -> tuple[str, ...]:
        """Takes up what was pressed, and returns the events that count besides."""
        counted = []
        for event in events:
            if event == ESTOP:
                self.press()
            elif event == RELEASE_ESTOP:
                self.release()
            elif event in ("stop", "toggle") or not self.latched:  # who drives may change: nothing moves by that
                counted.append(event)
        if self._elsewhere and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_INTERVAL_S
            reached, stopped = self._asked("is_estopped")
            self.latched = self._elsewhere = not reached or stopped
        return tuple(counted)

    def press(self) -> None:
        if not self.latched:
            _log.warning("the emergency stop was pressed: nothing moves until a person releases it.")
        self.latched, self._elsewhere = True, False
        self._asked("estop")

    def pressed_elsewhere(self) -> None:
        """The environment reports that its arm is stopped: it is released there, or with the device."""
        self._elsewhere = self._elsewhere or not self.latched
        self.latched = True

    def release(self) -> None:
        """Stays latched where the robot server cannot be reached: what it does is not known."""
        if self.latched and self._asked("release_estop")[0]:
            self.latched = self._elsewhere = False
            _log.warning("the emergency stop is released.")

    def refuse(self) -> None:
        """Raises an error if it is latched, or pressed just now: before the environment is reset."""
        if self._device.is_estop_pressed():
            self.press()
        if self.latched:
            raise EmergencyStopError(
                "the emergency stop is latched: call poll() until a person has released it, and reset again then."
            )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Looks at the device meanwhile: an arm that goes to where an episode begins is stopped at once, and the
        environment raises an error."""
        if not self._env.has_wrapper_attr("estop"):
            yield
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_INTERVAL_S):
                if self._device.is_estop_pressed():
                    self.press()
                    return

        thread = threading.Thread(target=watch, name="hilt-estop", daemon=True)
        thread.start()
        try:
            yield
        except EmergencyStopError:
            self.pressed_elsewhere()
            raise
        finally:
            ended.set()
            thread.join(JOIN_S)

    def _asked(self, name: str) -> tuple[bool, Any]:
        """Whether the robot server was reached, and what it answers; where there is none, nothing."""
        if not self._env.has_wrapper_attr(name):
            return True, None
        try:
            return True, self._env.get_wrapper_attr(name)()
        except HiltError as error:  # no command is sent any more, and without commands the arm holds
            _log.warning("%s: %s", name, error)
            return False, None
