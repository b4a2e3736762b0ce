"""TakeOver: one wrapper that decides who acts, the policy or a person.

It stands where HIL-SERL has its SpacemouseIntervention (directly around the robot, under the other wrappers), and means
the same: while a person acts, the environment gets the person's action, ``info["intervene_action"]`` is that action,
and the episode's interventions are counted. Never put it around an environment that is evaluated.

The hand-over does not make the arm jump:

- Actions are differences, so the person goes on from where the arm is, and so does the policy afterwards,
  whose actions are used unblended.
- An axis or gripper button that was already held when control changed hands (a stick deflected at the toggle, a key
  held over a reset) counts as released until it has been released once.
- A person who presses no gripper button leaves the gripper as it is.
- The policy's first motion after a person moves the arm by at most `first_command`.

What is executed is decided here, for the policy, a person, a leader and a script alike: nothing, while the emergency
stop is latched (`hilt.teleop.emergency_stop`). Workspace, speed and jerk are limited below, where the arm is: by the
task, and by the robot server for every client.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.trajectory import Source
from hilt.core.tree import Observation
from hilt.envs.env_protocol import Info, StepResult, success_of
from hilt.teleop.devices import Device, Reading, Status
from hilt.teleop.emergency_stop import LATCHED, EmergencyStop
from hilt.teleop.plan_view import PlanView

if TYPE_CHECKING:
    from gymnasium.spaces import Space

    from hilt.envs.chunk_executor import ExecutedChunk

DEFLECTED = 0.05
"""From here on an axis counts as held at a hand-over; less is the drift of a stick at rest."""

LET_GO = "Let go, then press again: what was held before you took over moves nothing."
LET_GO_CONTACT = "Let go, then press again: contact was lost, and what was held meanwhile moves nothing."
LET_GO_ESTOP = "Let go, then press again: the emergency stop was released, and what was held meanwhile moves nothing."
LET_GO_ARM = "Let go, then press again: what was held for the other arm moves nothing."
"""The messages shown to a person meanwhile, by reason."""

BRIEF_SECONDS = 1.0
"""After contact was lost for no longer than this, what the person still holds moves the arm on: they know what they
hold, and they have seen the arm stop. After longer it must be released first, as at a hand-over."""

FIRST_COMMAND = (0.01, 0.05)
"""Meters and radians that the policy's first motion after a person moves and turns the arm at most, where the
environment has its `action_scale`"""

ActionOf = Callable[[Reading, Any], Any]


class TakeOver(gymnasium.Wrapper):
    """A person acts while they hold the device ("hold"), or from one toggle event to the next ("toggle").

    Every step's info has:

    - ``source``: who chose the action, of :class:`~hilt.core.trajectory.Source`.
    - ``executed_action``: what the environment got: clipped to the action space, in its dtype.
    - ``intervene_action``: the same, only when a person acted.
    - ``intervention_count``, ``intervention_steps``: how often and how long a person acted in this episode so far.
    - ``lost``: only when contact to the device is lost. Nothing moves then; the source is the person,
      whose ``intervention_steps`` do not count it. The caller may wait until contact is back (`poll`), or
      let the policy continue without it (`release`).
    - ``estop``: only while the emergency stop is latched, with ``lost``. It is not released by `release`, but by a
      person; until then `reset` raises `EmergencyStopError`.

    Events: *success* ends the episode (terminated, reward 1, ``succeed``), *fail* too (reward 0), and
    ``info["marked"]`` is there, True or False, where a person decided; *reset* truncates it, *stop* truncates it and
    sets ``info["stop"]``, for the loop around to end. ``info["paused"]`` is there when a person has paused, after
    `offer_rewind`: the loop around waits with `poll`, and may go back to an earlier step (`hilt.envs.rewind`).
    """

    episode_state = ("_count", "_steps", "_step", "_return", "_seen")

    def __init__(
        self,
        env: gymnasium.Env,
        device: Device,
        mode: Literal["hold", "toggle"] = "hold",
        action_indices: Sequence[int] | None = None,
        action_of: ActionOf | None = None,
        policy: bool = True,
        clock: Callable[[], float] = time.monotonic,
        first_command: Sequence[float] | None = None,
    ):
        """`action_indices`: the only dimensions that a person moves, the others are 0. `action_of(reading,
        action_space)`: a person's action, for action spaces other than the known ones. `policy`: False where none acts,
        as in recording; the actions given to `step` are then the person's too, who chose to do nothing. `clock`:
        seconds, by which lost contact is timed. `first_command`: meters and radians, in place of `FIRST_COMMAND`."""
        super().__init__(env)
        if mode not in ("hold", "toggle"):
            raise ConfigError(
                f"mode is {mode!r}: it is 'hold' (acts while the device is held) or 'toggle' (an event switches)"
            )
        action_of = action_of or device.action_of
        if action_of is None and not device.gives_actions:
            check_space(env.action_space)
        self.device, self.mode, self.policy = device, mode, policy
        self.message = ""
        """A line for the person, shown by devices with a screen."""
        self._action_of = action_of or motion_action
        self._kept = None if action_indices is None else kept_dimensions(action_indices, env.action_space)
        self._episode = self._successes = 0
        self._seen: Any = None  # what was shown last
        self._released = self._still = False
        self._clock, self._lost_since = clock, 0.0
        self._rewinds = False
        self._estop, self._estopped = EmergencyStop(env, device), False
        self._first_command = first_limits(env, first_command)
        self._plan = PlanView()
        self._steps_left: Callable[[], int | None] = lambda: None
        self._expected: Callable[[], float | None] = lambda: None
        self._alarm_below = 0.0
        self._steps_made = 0
        self._begin()
        device.attach(env)

    def _begin(self) -> None:
        # of the last step: a person acted, has taken over, was out of reach
        self._human = self._toggled = self._lost = False
        self._first = False  # the next motion of the policy is its first one after a person
        self._arm = 0
        # [6 axes, gripper] of the last reading; before the first: whatever is held was held before
        self._held = np.ones(7, bool)
        self._muted = np.zeros(7, bool)  # held at the last hand-over and not released since,
        self._why = LET_GO  # and why that is muted
        self._count = self._steps = self._step = 0
        self._polled: tuple[str, ...] = ()  # events of readings between two steps
        self._return = 0.0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Observation, Info]:
        self._estop.refuse()
        with self._estop.watched():
            observation, info = self.env.reset(seed=seed, options=options)
        self._begin()
        self._plan.clear()
        self._episode += 1
        self.device.reset()
        self._show(observation, "policy" if self.policy else "none")
        return observation, info

    def step(self, action: npt.ArrayLike) -> StepResult:
        self.device.watch(action)
        reading = self._read()
        reading, self._still = replace(reading, lost=reading.lost or self._still), False
        before = self._human
        human = self._decide(reading)
        if human:
            action = self._persons_action(reading)
            self._steps += not reading.lost
            self._count += not before
        executed = executable(action, self.env.action_space)
        if not human and self._first and self._first_command:
            executed, self._first = self._limited(executed)
        self._first = human or self._first
        self._plan.clear() if human else self._plan.note()
        # an environment may change it in place, and info has the action as it was given
        given = copy.deepcopy(executed)
        observation, reward, terminated, truncated, info = self.env.step(given)

        info = dict(info)
        if info.get("estop") and not reading.estop:  # pressed at the robot server: this action was not executed
            self._estop.pressed_elsewhere()
            reading, human = replace(reading, lost=True, estop=True), True
            executed = executable(self._persons_action(reading), self.env.action_space)
        info["source"] = int(self.device.source if human or not self.policy else Source.POLICY)
        info["executed_action"] = executed
        if human:
            info["intervene_action"] = executed
        info["intervention_count"], info["intervention_steps"] = self._count, self._steps
        if reading.lost:
            info["lost"] = True
        if reading.estop:
            info["estop"] = True
        if reading.paused and self._rewinds:
            info["paused"] = True
        for event in reading.events:
            if event in ("success", "fail"):
                terminated, reward = True, float(event == "success")
                info["succeed"] = info["marked"] = event == "success"
            elif event in ("reset", "stop"):
                truncated = True
        if "stop" in reading.events:
            info["stop"] = True

        self._step += 1
        self._steps_made += 1
        self._return += float(reward)
        self._successes += bool((terminated or truncated) and success_of(info))
        self._show(observation, "none" if reading.lost else "human" if human else "policy" if self.policy else "none")
        return observation, reward, terminated, truncated, info

    def show_plans(self, planned: Callable[[], ExecutedChunk | None]) -> None:
        """From now on the person sees what the policy has planned: `planned` is called before each step."""
        self._plan = PlanView(planned, *(attribute(self.env, name, None) for name in ("planned_points", "project")))

    def count_down(self, steps_left: Callable[[], int | None]) -> None:
        """From now on the person sees about how many episodes are left. `steps_left()`: None where that is unknown."""
        self._steps_left = steps_left

    def show_expectation(self, success: Callable[[], float | None], alarm_below: float = 0.0) -> None:
        """From now on the person sees the probability that the episode succeeds: `success()`, which knows the step
        before the newest one, None where it knows none; below `alarm_below` it is marked."""
        self._expected, self._alarm_below = success, alarm_below

    def poll(self) -> Reading:
        """What the device gives between two steps. Nothing moves, and its events count in the next step. Where contact
        was lost, nothing moves in that one either: after a pause the next action is chosen from a new observation."""
        reading = self._read()
        self._polled, self._still = reading.events, self._still or reading.lost
        self._show(self._seen, "none")
        return reading

    def ask(self, text: str) -> None:
        """The policy asks for help: the person sees this line, until it is empty."""
        if text:
            self.device.asked()
        self.message = text
        self._show(self._seen, "policy" if self.policy else "none")

    def offer_rewind(self) -> None:
        """From now on a person may pause and go back: the loop around this environment can do that."""
        self._rewinds = True

    def rewound(self) -> None:
        """An earlier moment was restored: it is shown, and what is held now must be released first."""
        self._human, self._held, self._muted = False, np.ones(7, bool), np.zeros(7, bool)
        self._plan.clear()  # it led on from what is undone
        self._show(self._seen, "none")

    def release(self) -> None:
        """The policy acts although contact is lost; when contact is back, the person has what they had."""
        self._released = True

    def _read(self) -> Reading:
        reading = checked(self.device.read(), self.device)
        self._released &= reading.lost
        here = not self._released
        events, self._polled = self._estop.counted((*self._polled, *reading.events)), ()
        stopped = self._estop.latched
        if stopped:
            self.device.halt()
        lost, engaged = (reading.lost and here) or stopped, reading.engaged and here
        return replace(reading, lost=lost, estop=stopped, engaged=engaged, events=events)

    def close(self) -> None:
        try:
            self.device.close()
        finally:
            self.env.close()

    def _decide(self, reading: Reading) -> bool:
        """Whether the person acts now, and what of the device must be released first."""
        self._toggled ^= bool(reading.events.count("toggle") % 2)
        toggled = self._toggled and not self._released
        human = (reading.engaged if self.mode == "hold" else toggled) or reading.lost
        held = np.append(np.abs(reading.motion) > DEFLECTED, reading.gripper != 0)
        self._muted &= held
        if reading.lost and not self._lost:
            self._lost_since = self._clock()
        if reading.arm != self._arm:
            self._mute(held, LET_GO_ARM)
        elif self._estopped and not reading.estop:
            self._mute(held, LET_GO_ESTOP)
        elif self._lost and not reading.lost and self._clock() - self._lost_since > BRIEF_SECONDS:
            self._mute(held, LET_GO_CONTACT)
        elif human and not self._human:
            self._mute(held & self._held, LET_GO)
        self._human, self._held, self._lost, self._arm = human, held, reading.lost, reading.arm
        self._estopped = reading.estop
        return human

    def _mute(self, held: np.ndarray, why: str) -> None:
        if held.any():
            self._muted, self._why = self._muted | held, why

    def _persons_action(self, reading: Reading) -> Any:
        if reading.action is not None and not reading.lost:
            action = np.array(reading.action)
        else:
            muted = self._muted | reading.lost
            still = replace(
                reading, motion=np.where(muted[:6], 0, reading.motion), gripper=0 if muted[6] else reading.gripper
            )
            action = self._action_of(still, self.env.action_space)
        return action if self._kept is None else np.where(self._kept, action, 0)

    def _limited(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """The policy's action, scaled down where it moves or turns an arm farther than a first command may; and whether
        the first one is still to come, because this one moves nothing."""
        arms, axes = arms_and_axes(len(action))
        limited, still = action.copy(), True
        for one in limited.reshape(arms, -1):
            for part, limit in zip((one[:3], one[3:axes]), self._first_command, strict=True):
                norm = float(np.linalg.norm(part))
                part *= min(1.0, limit / norm) if norm else 1.0
                still = still and not norm
        return limited, still

    def _show(self, observation: Any, who: str) -> None:
        self._seen, expected = observation, self._expected()
        self.device.observe(observation)
        status = Status(
            who=who,
            instruction=str(attribute(self.env, "instruction", "")),
            episode=self._episode,
            successes=self._successes,
            step=self._step,
            step_limit=int(attribute(self.env, "step_limit", 0) or 0),
            reward=self._return,
            gripper=grippers_of(observation),
            message=self._message(who),
            rewind=self._rewinds,
            estop=self._estop.latched,
            episodes_left=self._episodes_left(),
            success_probability=expected,
            alarm=expected is not None and expected < self._alarm_below,
            **self._plan.shown(),
        )
        images: dict[str, np.ndarray] = {}
        if self.device.screen:
            views = attribute(self.env, "views", None)
            images = images_of(observation) if views is None else views()
            if not images and self.env.render_mode == "rgb_array":
                images = {"view": np.asarray(self.env.render())}
        self.device.show(images, status)

    def _episodes_left(self) -> int | None:
        """Returns how many more episodes there are if they are as long as those so far."""
        left, ended = self._steps_left(), self._episode - 1
        if left is None or ended < 1:
            return None
        return round(left / max(1.0, (self._steps_made - self._step) / ended))

    def _message(self, who: str) -> str:
        if self._estop.latched:
            return LATCHED
        return self._why if who == "human" and self._muted.any() else self.message


def first_limits(env: gymnasium.Env, given: Sequence[float] | None) -> tuple[float, float] | tuple[()]:
    """The norms, in units of an action, of the policy's first motion after a person: of its translation and rotation.
    Empty where the environment does not have its `action_scale`, and none were asked for."""
    limits, scale = FIRST_COMMAND if given is None else tuple(given), attribute(env, "action_scale", None)
    if len(limits) != 2 or not all(np.isfinite(limit) and limit > 0 for limit in limits):
        raise ConfigError(f"first_command is {given}: expected [METERS, RADIANS], both above 0.")
    if scale is None and given is not None:
        raise ConfigError(
            f"first_command={list(limits)}: {type(env.unwrapped).__name__} has no action_scale, the meters and radians "
            "of an action of 1. Give it one, or leave first_command out."
        )
    return () if scale is None else (limits[0] / float(scale[0]), limits[1] / float(scale[1]))


def checked(reading: object, device: Device) -> Reading:
    """The reading, if it is one."""
    if not isinstance(reading, Reading) or np.shape(reading.motion) != (6,) or reading.gripper not in (-1, 0, 1):
        raise SchemaError(
            f"the device {device.name} gave {reading!r}: expected a Reading with a motion of six numbers "
            "and a gripper of -1, 0 or 1"
        )
    return reading


def motion_action(reading: Reading, space: gymnasium.spaces.Box) -> np.ndarray:
    """A person's action where the space is one of the known ones, in units of [-1, 1].

    Length 3 is xyz, 4 xyz and gripper, 6 xyz and rotation, 7 that and gripper; 12 and 14 are two of 6 or
    7, and the arm that is not meant holds still. The gripper's command is -1 or 1 exactly. HIL-SERL draws
    it between 0.9 and 1, which makes a recording differ from its replay for no gain: full deflection of
    an axis is 1, too, so a policy sees 1 anyway.
    """
    (length,) = space.shape
    arms, axes = arms_and_axes(length)
    action = np.zeros((arms, length // arms))
    one = action[min(reading.arm, arms - 1)]
    one[:axes] = reading.motion[:axes]
    one[axes:] = reading.gripper
    return action.reshape(-1)


def arms_and_axes(length: int) -> tuple[int, int]:
    """The arms that an action of a known length moves, and the numbers of each that move it: 3, or 6 with rotation."""
    return (2 if length in (12, 14) else 1), {3: 3, 4: 3}.get(length, 6)


def check_space(space: Space) -> None:
    """Refuse an action space that `motion_action` does not know."""
    box = isinstance(space, gymnasium.spaces.Box)
    if (
        not box
        or space.shape not in [(n,) for n in (3, 4, 6, 7, 12, 14)]
        or (space.low > -1).any()
        or (space.high < 1).any()
    ):
        raise ConfigError(
            f"the action space is {space}: a device drives a Box of 3, 4, 6, 7, 12 or 14 numbers in [-1, "
            f"1]; for another one give TakeOver(action_of=lambda reading, space: ...), or -d action_of=module:function"
        )


def kept_dimensions(indices: Sequence[int], space: Space) -> np.ndarray:
    length = space.shape[0] if len(space.shape or ()) == 1 else 0
    if wrong := [index for index in indices if not 0 <= index < length]:
        raise ConfigError(
            f"action_indices has {wrong}: the action space is {space}, its dimensions are 0 to {length - 1}"
        )
    return np.isin(np.arange(length), list(indices))


def executable(action: npt.ArrayLike, space: Space) -> Any:
    """The action as the environment gets it: in the space's dtype and, in a Box, inside it."""
    if not isinstance(space, gymnasium.spaces.Box):
        # a number can be a key, an array not
        return action[()] if isinstance(action, np.ndarray) and action.ndim == 0 else action
    given = np.asarray(action, np.float64)
    if given.shape != space.shape or not np.isfinite(given).all():
        raise SchemaError(
            f"the action is {np.asarray(action).tolist()}: expected "
            f"{space.shape[0] if space.shape else 1} finite numbers"
        )
    return np.clip(given, space.low, space.high).astype(space.dtype)


def images_of(observation: Observation, name: str = "") -> dict[str, np.ndarray]:
    """The images in an observation, by name: every uint8 array [H, W, 3]."""
    if isinstance(observation, Mapping):
        parts = [
            images_of(value, key if name in ("", "images") else f"{name}/{key}") for key, value in observation.items()
        ]
        return {key: image for part in parts for key, image in part.items()}
    image = np.asarray(observation) if isinstance(observation, np.ndarray) else None
    if image is not None and image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3:
        return {name or "image": image}
    return {}


def grippers_of(observation: Any) -> tuple[float, ...]:
    """Returns how far the grippers are open, left arm first, if the state has `gripper_pose`, or one for each arm."""
    state = observation.get("state") if isinstance(observation, Mapping) else None
    found = (
        {name: value for name, value in state.items() if name.endswith("gripper_pose")}
        if isinstance(state, Mapping)
        else {}
    )
    return tuple(float(np.ravel(found[name])[0]) for name in sorted(found))


def attribute(env: gymnasium.Env, name: str, otherwise: object) -> Any:
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else otherwise
