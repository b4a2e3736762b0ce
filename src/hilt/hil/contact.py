"""Contact to the operator, when it is lost, and the emergency stop: the actor waits, and the learner's clock and
updates wait with it."""

from __future__ import annotations

import time
from collections.abc import Callable

from hilt.envs.env_protocol import Env
from hilt.hil.config import Hil

CONTACT = "contact to the operator"
"""The beginning of each message about it"""
LOST = "contact lost"
"""Who acts meanwhile"""
ESTOPPED = "emergency stop"
"""Who acts while that is latched"""
REPORT_AFTER_S = 1.0
"""A shorter loss is counted, and not mentioned: a page sends 20 times a second, and a network may stall"""
POLL_INTERVAL_S = 0.1


class Contact:
    """Waits for an operator who is out of reach. Nothing moves and no step is made;
    `lost` is reported to the learner."""

    def __init__(self, env: Env, config: Hil, notify: Callable[[str], None]):
        self._env, self._notify = env, notify
        self._seconds = config.lost_contact_seconds if config.lost_contact == "policy" else float("inf")
        self.lost, self._times, self._waited = False, 0, 0.0

    def wait(self, ended: Callable[[], bool]) -> None:
        """Waits until contact is back, a button is pressed, the time after which the policy
        continues is over, or `ended()` is true. While the emergency stop is latched only its release counts, and
        *stop*."""
        began, said = time.monotonic(), False
        self.lost, waits = True, False
        while self.lost and not ended():
            reading = self._env.get_wrapper_attr("poll")()
            waited = time.monotonic() - began
            if reading.estop and "stop" not in reading.events:
                self._wait_for_release(ended)
                began = time.monotonic()  # contact may have been lost meanwhile
            elif not reading.lost or {*reading.events} - {"toggle"}:
                self.lost = False
                self._notify(f"{CONTACT} is back after {waited:.0f} s: the run goes on") if said else None
            elif waited >= self._seconds:
                self._env.get_wrapper_attr("release")()
                self.lost = False
                self._notify(f"{CONTACT} has been lost for {waited:.0f} s: the policy goes on. {self._address()}")
            else:
                # not for the step after a pause, which is marked as lost, too
                self._times, waits = self._times + (not waits), True
                if waited >= REPORT_AFTER_S and not said:
                    said = True
                    self._notify(
                        f"{CONTACT} is lost: nothing moves, the run is paused{self._until()}. {self._address()}"
                    )
                time.sleep(POLL_INTERVAL_S)
        self._waited += time.monotonic() - began
        self.lost = False

    def _wait_for_release(self, ended: Callable[[], bool]) -> None:
        """Waits until a person has released the emergency stop, or presses *stop*."""
        began, poll = time.monotonic(), self._env.get_wrapper_attr("poll")
        self._notify(f"{CONTACT}: the emergency stop is pressed. Nothing moves until it is released. {self._address()}")
        while not ended() and (reading := poll()).estop and "stop" not in reading.events:
            time.sleep(POLL_INTERVAL_S)
        self._notify(f"{CONTACT}: the emergency stop was pressed for {time.monotonic() - began:.0f} s")

    def stats(self) -> dict[str, object]:
        """The counters that are reported to the learner."""
        return {"contact_lost": self.lost, "contact_losses": self._times, "contact_lost_seconds": self._waited}

    def _until(self) -> str:
        return "" if self._seconds == float("inf") else f", and after {self._seconds:g} s the policy goes on"

    def _address(self) -> str:
        url = getattr(self._env.get_wrapper_attr("device"), "url", "")
        return f"To take over again, open {url}" if url else "Connect the device again to take over."
