"""Smooths the targets of an arm: a limit of their jerk, the change of acceleration, beside that of their speed.

A target that moves at most at the speed V is averaged over a window of T seconds, and the result once more. The third
derivative of what comes out is ``(v(t) - 2 v(t - T) + v(t - 2 T)) / T²``, where v is the speed of what comes in: it is
at most ``4 V / T²``. An average of points lies between them: it is never faster, never leaves a convex workspace,
and does not swing past its goal. It comes T seconds later.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from hilt.envs.rotations import Array, normalized

MAX_WINDOW_S = 0.25
"""The longest window: an arm that comes later than this after its target is hard to drive"""


def window_seconds(speed: float, jerk: float) -> float:
    """The window that keeps the jerk of a target below the limit, if it moves at most at this speed."""
    return math.sqrt(4 * speed / jerk)


class JerkLimit:
    """Averages poses, one for each tick, over a window of a number of ticks, and the averages once more."""

    def __init__(self, ticks: int):
        self.ticks = max(1, ticks)
        self._stages = [deque[Array](maxlen=self.ticks) for _ in range(2)]

    def restart(self, pose: Array) -> None:
        """The target stands still here."""
        for stage in self._stages:
            stage.extend([pose.copy()] * self.ticks)

    def next(self, pose: Array) -> Array:
        """The smoothed target of this tick."""
        for stage in self._stages:
            # a quaternion and its negative are the same rotation, whose average would be nothing
            pose = np.concatenate([pose[:3], pose[3:] * (1.0 if pose[3:] @ stage[-1][3:] >= 0 else -1.0)])
            stage.append(pose)
            mean = np.mean(stage, axis=0)
            pose = np.concatenate([mean[:3], normalized(mean[3:])])
        return pose

    def turn_share(self, radians_per_tick: float) -> float:
        """The share of a turning speed at which the average of rotations is not faster than that speed: it lies inside
        the circle that they lie on, and to be made a rotation it is moved outward."""
        return math.cos(min(self.ticks * radians_per_tick / 4, 1.5)) ** 2
