"""The moments of a running episode, to which a person may go back in simulation and try again.

What was rewound away ends there as an episode of its own: its last step is truncated, so that its value goes on with
what was seen after it, and the log has the fact ``rewound_to``. What follows begins another episode at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hilt.core.tree import Observation
from hilt.envs.env_protocol import Env
from hilt.envs.rewind import SavedState, restore_state, save_state, why_not_rewound
from hilt.teleop.intervene import attribute

MAX_MOMENTS = 2_000
"""So many of the newest moments of an episode are kept"""
PAUSE_TIMEOUT_S = 3_600.0
"""After these seconds a run that was paused goes on"""
POLL_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Moment:
    """What there was before a step was made."""

    step: int
    """How many steps were made before, in all tries of this episode"""
    observation: Any
    human: int
    total: float
    state: SavedState


class Moments:
    """The moments of the running episode. `offered`: whether a person may go back to them, which needs a simulation
    that can be rewound, and a device that shows them."""

    def __init__(self, env: Env, offer: bool):
        self._env = env
        device = attribute(env, "device", None)
        self.offered = offer and bool(getattr(device, "rewinds", False)) and not why_not_rewound(env)
        self._kept: dict[int, Moment] = {}
        if self.offered:
            env.get_wrapper_attr("offer_rewind")()

    def begin(self) -> None:
        """An episode begins: what was before it is over."""
        self._kept.clear()

    def note(self, step: int, observation: Observation, human: int, total: float) -> None:
        """Keeps the present moment."""
        if not self.offered:
            return
        self._kept[step] = Moment(step, observation, human, total, save_state(self._env))
        self._kept.pop(step - MAX_MOMENTS, None)

    def wait(self, ended: Callable[[], bool]) -> Moment | None:
        """Waits while the person has paused; returns the moment to go back to, None to go on as it is."""
        deadline = time.monotonic() + PAUSE_TIMEOUT_S
        while not ended() and time.monotonic() < deadline:
            reading = self._env.get_wrapper_attr("poll")()
            if reading.rewind in self._kept:
                return self._kept[reading.rewind]
            if not reading.paused or {*reading.events} - {"toggle"}:
                break
            time.sleep(POLL_INTERVAL_S)
        return None

    def restore(self, moment: Moment) -> None:
        """Goes back; the moments after it are forgotten."""
        restore_state(self._env, moment.state)
        self._kept = {step: kept for step, kept in self._kept.items() if step <= moment.step}
        self._env.get_wrapper_attr("rewound")()
