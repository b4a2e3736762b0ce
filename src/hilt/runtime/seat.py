"""What recording puts between a device and the take-over, and around the task below and above it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium

from hilt.envs.task import success_of
from hilt.envs.wrappers import ChunkingWrapper, GripperPenaltyWrapper, Quat2EulerWrapper, RelativeFrame, SERLObsWrapper
from hilt.teleop.devices import Device, Reading, Status


class Seat(Device):
    """A device that one may look at before an episode begins, and whose *success* may mark a step instead of ending the episode."""

    def __init__(self, device: Device, marks: bool, toggles: bool):
        super().__init__()
        for name in ("name", "source", "gives_actions", "screen", "attach", "watch", "close"):
            setattr(self, name, getattr(device, name))
        self._device, self._marks, self._toggles, self.marked = device, marks, toggles, False
        self._ahead: list[Reading] = []
        self._shown: tuple[Mapping[str, Any], Status] = ({}, Status())

    def reset(self) -> None:
        self._ahead = []
        self._device.reset()

    def show(self, images: Mapping[str, Any], status: Status) -> None:
        self._shown = images, status
        self._device.show(images, status)

    def begins(self) -> bool:
        """Whether somebody acts now, or presses something. The first steps get this reading, after the one before: `TakeOver` tells by
        that one what was held all the time."""
        images, status = self._shown
        self._device.show(images, replace(status, message=f"{status.message}. Take over to begin."))
        self._ahead = [*self._ahead[-1:], self._device.read()]
        return bool(self._ahead[-1].events) or (self._ahead[-1].engaged and not self._toggles)

    @property
    def stops(self) -> bool:
        """Whether *stop* was pressed while nobody had begun."""
        return any("stop" in reading.events for reading in self._ahead)

    def read(self) -> Reading:
        reading = self._ahead.pop(0) if self._ahead else self._device.read()
        self.marked = self._marks and "success" in reading.events
        return replace(reading, events=tuple(event for event in reading.events if event != "success")) if self._marks else reading


class GoesOn(gymnasium.Wrapper):
    """Success does not end the episode, or so many steps later: pictures of it are wanted."""

    def __init__(self, env: Any, steps: int | None):
        super().__init__(env)
        self._steps, self._since = steps, 0

    def reset(self, **given: Any) -> Any:
        self._since = 0
        return self.env.reset(**given)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        succeeded = bool(success_of(info))
        self._since += succeeded or self._since > 0
        late = self._steps is not None and self._since >= self._steps
        return observation, reward, bool(terminated) and not succeeded, bool(truncated) or late, info


def as_hil_serl(env: Any) -> Any:
    """The wrappers of HIL-SERL's tasks that stand above the take-over: ``{"state": [1, 19], camera: [1, H, W, 3]}``, poses relative to
    the first one, actions in the gripper's frame, and the gripper's penalty where there is a gripper to command."""
    env = ChunkingWrapper(SERLObsWrapper(Quat2EulerWrapper(RelativeFrame(env))), obs_horizon=1, act_exec_horizon=None)
    return env if env.action_space.shape[0] % 7 else GripperPenaltyWrapper(env, penalty=-0.02)  # as its tasks give it
