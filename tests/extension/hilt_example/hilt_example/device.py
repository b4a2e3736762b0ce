"""A device: somebody who always pushes one way, by so much."""

from __future__ import annotations

import numpy as np

from hilt.teleop.devices import Device, Reading


class Pusher(Device):
    """Gives whole actions, for the lamp."""

    name = "pusher"
    gives_actions = True

    def __init__(self, by: float = 0.9):
        super().__init__()
        self._by = float(by)

    def read(self) -> Reading:
        return Reading(engaged=True, action=np.full(1, self._by), events=self.take_events())
