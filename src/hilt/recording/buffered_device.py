"""What recording puts between a device and the take-over, and around the task below and above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.tree import Array, Observation, Tree
from hilt.envs.env_protocol import Env, Info, StepResult, success_of
from hilt.envs.wrappers import ChunkingWrapper, GripperPenaltyWrapper, Quat2EulerWrapper, RelativeFrame, SERLObsWrapper
from hilt.teleop.devices import Device, Reading, Status
from hilt.teleop.intervene import DEFLECTED, attribute, checked, images_of


class BufferedDevice(Device):
    """A device that one may look at before an episode begins, and whose *success* may
    mark a step instead of ending the episode."""

    def __init__(self, device: Device, marks: bool, toggles: bool):
        super().__init__()
        calls = ("attach", "watch", "asked", "observe", "close", "is_estop_pressed", "halt")
        for name in ("name", "source", "gives_actions", "action_of", "screen", *calls):
            setattr(self, name, getattr(device, name))
        self._device, self._marks, self._toggles, self.marked = device, marks, toggles, False
        self._ahead: list[Reading] = []
        self._on = False  # somebody has taken over
        self.hint = ""
        """What a person must do to begin"""
        self._shown: tuple[Mapping[str, Any], Status] = ({}, Status())

    def reset(self) -> None:
        self._ahead, self._on = [], False
        self._device.reset()

    def show(self, images: Mapping[str, Array], status: Status) -> None:
        self._shown = images, status
        self._device.show(images, status)

    def tell(self, message: str) -> None:
        """The same once more, with another message."""
        images, status = self._shown
        self._device.show(images, replace(status, message=message))

    def see(self, images: Tree) -> None:
        """Newer images, to be shown from now on."""
        self._shown = images, self._shown[1]

    def begins(self) -> bool:
        """Whether somebody takes over, moves or presses something. What was held all the time does not count, for
        `TakeOver` lets it move nothing, nor does who is out of reach. The first steps get this reading and the one
        before, by which `TakeOver` tells the same."""
        reading, first = checked(self._device.read(), self._device), not self._ahead
        before = reading if first else self._ahead[-1]
        if len(self._ahead) == 2:  # what is forgotten must not turn a toggle around
            toggles = [event for event in self._ahead[0].events if event == "toggle"]
            before = replace(before, events=(*toggles, *before.events))
        self._ahead = [reading] if first else [before, reading]
        was = self._on
        self._on = was ^ bool(reading.events.count("toggle") % 2) if self._toggles else reading.engaged
        now, earlier = _held(reading), _held(before)
        new = now & ~earlier & (not before.lost and before.arm == reading.arm)
        takes_over = self._on and not was and not first and not now.any()
        acts = self._on and not reading.lost and (takes_over or new.any() or reading.action is not None)
        presses = {*reading.events} & {"stop"} if reading.lost else {*reading.events} - {"toggle"}
        if acts or presses:
            return True
        on = self._on and not reading.lost
        self.hint = f"{'Take over' if not on else 'Let go, then press again' if now.any() else 'Move'} to begin"
        self.tell(f"{self._shown[1].message.removesuffix('.')}. {self.hint}.")
        return False

    def read(self) -> Reading:
        reading = self._ahead.pop(0) if self._ahead else self._device.read()
        self.marked = self._marks and "success" in reading.events
        return (
            replace(reading, events=tuple(event for event in reading.events if event != "success"))
            if self._marks
            else reading
        )


def _held(reading: Reading) -> np.ndarray:
    """[6 axes, gripper]"""
    return np.append(np.abs(reading.motion) > DEFLECTED, reading.gripper != 0)


class Waits(gymnasium.Wrapper):
    """A reset ends when somebody begins to act. An arm's environment has `look()`, what
    is seen now: the episode begins with that."""

    def __init__(self, env: Env, seat: BufferedDevice, begun: Callable[[], bool], hz: float):
        super().__init__(env)
        self._seat, self._begun, self._seconds = seat, begun, 1 / hz

    def reset(self, **given: Any) -> tuple[Observation, Info]:
        observation, info = self.env.reset(**given)
        look = attribute(self.env, "look", None)
        plain = self.env.observation_space == self.env.unwrapped.observation_space  # no wrapper has changed it
        while not self._begun():
            time.sleep(self._seconds)
            if look is not None:
                seen = look()
                observation = seen if plain else observation
                self._seat.see(images_of(seen))
        return observation, info


class GoesOn(gymnasium.Wrapper):
    """Success does not end the episode, or only this number of steps later, to record images of it."""

    def __init__(self, env: Env, steps: int | None):
        super().__init__(env)
        self._steps, self._since = steps, 0

    def reset(self, **given: Any) -> tuple[Observation, Info]:
        self._since = 0
        observation, info = self.env.reset(**given)
        return observation, info

    def step(self, action: npt.ArrayLike) -> StepResult:
        observation, reward, terminated, truncated, info = self.env.step(action)
        succeeded = bool(success_of(info))
        self._since += succeeded or self._since > 0
        late = self._steps is not None and self._since >= self._steps
        return observation, reward, bool(terminated) and not succeeded, bool(truncated) or late, info


def as_hil_serl(env: Env) -> Env:
    """The wrappers of HIL-SERL's tasks that stand above the take-over: ``{"state": [1, 19], camera: [1,
    H, W, 3]}``, poses relative to the first one, actions in the gripper's frame, and the gripper's
    penalty where there is a gripper to command."""
    env = ChunkingWrapper(SERLObsWrapper(Quat2EulerWrapper(RelativeFrame(env))), obs_horizon=1, act_exec_horizon=None)
    return env if env.action_space.shape[0] % 7 else GripperPenaltyWrapper(env)
