"""A device that plays given readings, an environment that notes what it got, and
the first reading that is as wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hilt.teleop.devices import Device, Reading, Status


class Played(Device):
    """Gives one reading after the other, then readings of nobody."""

    name = "played"
    screen = True

    def __init__(self, readings: Iterable[Reading] = ()):
        super().__init__()
        self.readings = list(readings)
        self.shown: list[tuple[dict[str, np.ndarray], Status]] = []
        self.closed = 0

    def read(self) -> Reading:
        return self.readings.pop(0) if self.readings else Reading()

    def show(self, images: Any, status: Status) -> None:
        self.shown.append((dict(images), status))

    def close(self) -> None:
        self.closed += 1


class Noting(gymnasium.Env):
    """Keeps the actions; an episode ends after `limit` of them."""

    instruction = "note what comes"

    def __init__(self, length: int = 7, limit: int = 100, action_space: Any = None):
        self.action_space = action_space or spaces.Box(-1, 1, (length,), np.float32)
        self.observation_space = spaces.Dict(
            {"images": spaces.Dict({"front": spaces.Box(0, 255, (4, 6, 3), np.uint8)})}
        )
        self.step_limit = limit
        self.got: list[Any] = []

    def _see(self) -> Any:
        return {
            "images": {"front": np.full((4, 6, 3), len(self.got), np.uint8)},
            "state": {"mask": np.zeros((4, 6), np.uint8)},
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.got = []
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.got.append(np.copy(action))
        return self._see(), 0.25, False, len(self.got) >= self.step_limit, {"is_success": False}


def push(x: float = 0, y: float = 0, z: float = 0, *turn: float, **rest: Any) -> Reading:
    """Somebody pushes the stick."""
    return Reading(np.array([x, y, z, *turn, *[0.0] * (3 - len(turn))]), **{"engaged": True, **rest})


def until(
    device: Device, wanted: Callable[[Reading], bool], seconds: float = 120, each: Callable[[], None] = lambda: None
) -> Reading:
    """The first reading that is as wanted."""
    deadline = time.monotonic() + seconds
    while not wanted(reading := device.read()):
        assert time.monotonic() < deadline, reading
        each()
        time.sleep(0.005)
    return reading
