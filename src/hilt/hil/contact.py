"""Contact to the operator, when it is lost, and the emergency stop: the actor waits, and the learner's clock and
updates wait with it; and how the policy asks the operator for help.

It asks where a value model expects the episode to fail (`hilt.value.online_value`); and where its critics disagree
about the action that it has chosen, as EnsembleDAgger (Menda et al., 2019, arXiv 1807.08364) does where policies
disagree; the threshold is a quantile of the last values, as that of ThriftyDAgger (Hoque et al., 2021, arXiv
2109.08273), so that it follows what is learned and sets how often a person is asked:

    disagreement = standard deviation over i of Q_i(s, a),    asks if it is above the quantile of the last `window` ones

Of a vision-language-action policy it is the spread of some chunks that it draws beside each plan: `hilt.algos.chunks`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from hilt.envs.env_protocol import Env
from hilt.hil.config import Hil
from hilt.teleop.intervene import attribute

CONTACT = "contact to the operator"
"""The beginning of each message about it"""
LOST = "contact lost"
"""Who acts meanwhile"""
ESTOPPED = "emergency stop"
"""Who acts while that is latched"""
REPORT_AFTER_S = 1.0
"""A shorter loss is counted, and not mentioned: a page sends 20 times a second, and a network may stall"""
POLL_INTERVAL_S = 0.1
ASKING = "asks for help"
"""Who acts while the policy waits for the operator's help"""
HELP = "The policy asks for help: take over if it is about to fail."
"""What the operator sees then"""
EXPECTS_FAILURE = "The episode is expected to fail (probability of success {success:.0%}): take over."
"""What the operator sees when the value model asks for them"""
MIN_STEPS_BETWEEN = 10
"""Steps of the policy between two requests"""


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


class HelpAsker:
    """Asks for help where the policy's ensemble disagrees more than it mostly does, or where the value model expects a
    failure, and waits for the operator."""

    def __init__(self, env: Env, config: Hil, notify: Callable[[str], None]):
        self._env, self._settings, self._notify = env, config.help, notify
        self._asks = bool(config.help.quantile or config.value.alarm_below)
        self._alarm: Callable[[], float | None] = attribute(env, "value_alarm", lambda: None)
        self._last: deque[float] = deque(maxlen=config.help.window)
        self._since, self._shown = MIN_STEPS_BETWEEN, ""
        self._requests = self._answered = 0
        self._waited = 0.0

    def needed(self, disagreement: float | None) -> str:
        """Takes in the disagreement about an action of the policy, None where it made no decision. Returns what is to
        be asked, empty where nothing is. A message that is still shown goes with the next decision, or when the value
        model expects a failure no longer."""
        decided = disagreement is not None and np.isfinite(disagreement)
        if self._shown and (decided if self._shown == HELP else not attribute(self._env, "doubtful", 0)):
            self._ask("")
        differs = self._differs(disagreement)
        if (success := self._alarm()) is not None:
            return EXPECTS_FAILURE.format(success=success)
        return HELP if differs else ""

    def _differs(self, disagreement: float | None) -> bool:
        if not self._settings.quantile or disagreement is None or not np.isfinite(disagreement):
            return False
        full = len(self._last) == self._last.maxlen
        high = full and disagreement > float(np.quantile(self._last, self._settings.quantile))
        self._last.append(disagreement)
        self._since += 1
        return high and self._since > MIN_STEPS_BETWEEN

    def ask(self, text: str, ended: Callable[[], bool]) -> None:
        """Shows the message, and holds still until the operator takes over or presses a button, the time is over, or
        `ended()` is true."""
        self._since, self._requests = 0, self._requests + 1
        self._ask(text)
        began = time.monotonic()
        if self._env.get_wrapper_attr("device").waited_for and self._settings.wait_seconds:
            self._notify(f"{text} It waits for {self._settings.wait_seconds:g} s.")
            while not ended() and (waited := time.monotonic() - began) < self._settings.wait_seconds:
                reading = self._env.get_wrapper_attr("poll")()
                if reading.engaged or reading.events or reading.lost:
                    self._answered += not reading.lost
                    break
                time.sleep(min(POLL_INTERVAL_S, self._settings.wait_seconds - waited))
            self._ask("")
        self._waited += time.monotonic() - began

    def _ask(self, text: str) -> None:
        self._shown = text
        self._env.get_wrapper_attr("ask")(text)

    def stats(self) -> dict[str, object]:
        """The counters that are reported to the learner; none where it never asks."""
        if not self._asks:
            return {}
        counts = {"help_requests": self._requests, "help_answered": self._answered, "help_seconds": self._waited}
        return {**counts, **({"disagreement": self._last[-1]} if self._last else {})}
