"""What every device gives and takes: one reading a step, one status shown.

A device is keyboard, gamepad, SpaceMouse, browser, a script, or yours (docs/bring-your-own-device.md). It knows nothing
of who acts; :class:`hilt.teleop.intervene.TakeOver` decides that from its readings.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, HiltError, UnsafeError, require_module
from hilt.core.names import ExtensionPoint, load
from hilt.core.trajectory import Source
from hilt.core.tree import Observation
from hilt.envs.env_protocol import Env

ESTOP, RELEASE_ESTOP = "estop", "release_estop"
EVENTS = ("success", "fail", "reset", "stop", "toggle", ESTOP, RELEASE_ESTOP)

AT_REST = 1e-3
"""The norm of a motion up to which the device is at rest: HIL-SERL's number."""


@dataclass(frozen=True)
class Reading:
    """The current reading of a device."""

    motion: np.ndarray = field(default_factory=lambda: np.zeros(6))
    """x y z roll pitch yaw in [-1, 1], in the frame of the robot's base; given whether `engaged` or not."""
    gripper: int = 0
    """-1 close, 0 leave as it is, 1 open."""
    engaged: bool = False
    """A person is acting now: a stick is moved, a key or the dead-man button is held. Counts in mode "hold"."""
    lost: bool = False
    """Whether contact with the person is lost: the arm holds still."""
    events: tuple[str, ...] = ()
    """Buttons pressed since the last reading, of `EVENTS`, in order."""
    arm: int = 0
    """Which arm is meant, where there are two: 0 left, 1 right."""
    paused: bool = False
    """Whether a person has paused a simulation, where `Status.rewind` allows it"""
    rewind: int | None = None
    """The step of the running episode to go back to, from which it goes on; once"""
    action: np.ndarray | None = None
    """A whole action, from a device that knows the environment's actions (a
    script); motion and gripper do not count then."""
    estop: bool = False
    """Whether the emergency stop is latched; set by `TakeOver`, with `lost`, from the events"""


@dataclass(frozen=True)
class Status:
    """What a person should see."""

    who: str = "none"
    """Who acts: "policy", "human" or "none"."""
    instruction: str = ""
    episode: int = 0
    """Number of this episode, from 1."""
    successes: int = 0
    """How many of the episodes so far succeeded."""
    step: int = 0
    step_limit: int = 0
    """0 where there is none."""
    reward: float = 0.0
    """Sum of the episode so far."""
    gripper: tuple[float, ...] = ()
    """How far each arm's gripper is open, from 0 to 1; empty if unknown."""
    message: str = ""
    rewind: bool = False
    """Whether the person may pause, and go back to an earlier step of this episode"""
    estop: bool = False
    """Whether the emergency stop is latched"""
    path: dict[str, list[list[list[float]]]] = field(default_factory=dict)
    """Where the plan of the policy leads in the picture of each camera: for each arm a list of [x, y] from 0 to 1"""
    path_done: int = 0
    """How many sections of each path are behind the arm"""
    confidence: float | None = None
    """The share of its plans so far of which the policy was less sure; None: it does not say"""
    success_probability: float | None = None
    """The probability that the episode succeeds, by a value model; None: none watches"""
    alarm: bool = False
    """Whether that is so low that a person should look"""
    episodes_left: int | None = None
    """About how many more episodes the run has; None: that is not known"""


class Device:
    """The base of every device: `read` is what a new one must bring. The rest may stay as it is."""

    name = "device"
    source = Source.HUMAN
    """Whose steps these are, in the log."""
    gives_actions = False
    """Whether its readings carry whole actions, so that it works with any action space."""
    screen = False
    """Whether it shows images. Where it does not, `show` gets none."""
    rewinds = False
    """Whether a person can pause with it, and choose a step to go back to"""
    waited_for = True
    """Whether the policy holds still until it is answered, where it asks for help; not of a script, which acts with the
    next reading"""
    action_of: Callable[[Reading, Any], Any] | None = None
    """A person's action from a reading and the action space, where that is none
    that `TakeOver` knows. `open_device` sets it."""

    def __init__(self) -> None:
        self._pressed: deque[str] = deque()  # appended to by any thread

    def attach(self, env: Env) -> None:
        """Called once, with the environment that will be driven."""

    def reset(self) -> None:
        """An episode begins: what was pressed before no longer counts, but for "stop" and the emergency stop."""
        self._pressed.extend(event for event in self.take_events() if event in ("stop", ESTOP, RELEASE_ESTOP))

    def watch(self, action: npt.ArrayLike) -> None:
        """The policy's action, before each reading; for a device that judges it. A
        person judges by looking at the arm."""

    def asked(self) -> None:
        """The policy asks for help. A person is shown a message; a script may act."""

    def observe(self, observation: Observation) -> None:
        """Called after each reset and step with the observation; for a device that must know where the arm is."""

    def read(self) -> Reading:
        """What the person wants now. Returns at once: the arm waits for it."""
        raise NotImplementedError

    def halt(self) -> None:
        """The emergency stop is latched, and this reading moves nothing: for a device that gives whole actions, which
        must not catch up with what was missed."""

    def is_estop_pressed(self) -> bool:
        """Whether the emergency stop was pressed since the last reading. Asked by another thread than the one that
        reads, while that one waits for an arm that resets."""
        return ESTOP in self._pressed

    def show(self, images: Mapping[str, np.ndarray], status: Status) -> None:
        """Called after each reset and step, with images uint8 [H, W, 3]. Returns at once."""

    def close(self) -> None:
        """Give back what was opened; may be called twice."""

    def press(self, event: str) -> None:
        """Note an event for the next reading."""
        self._pressed.append(event)

    def take_events(self) -> tuple[str, ...]:
        """What was pressed since the last call."""
        return tuple(self._pressed.popleft() for _ in range(len(self._pressed)))

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def acting(motion: np.ndarray, gripper: int) -> bool:
    """HIL-SERL's rule for a device without a dead-man button: somebody acts who
    moves it or presses a gripper button."""
    return bool(np.linalg.norm(motion) > AT_REST or gripper)


def arms_and_gripper(env: Env) -> tuple[int, bool]:
    """How many arms an environment's actions move, and whether they have grippers,
    from their length: 6 and 12 have none."""
    length = (env.action_space.shape or (0,))[0]
    return (2 if length in (12, 14) else 1), length in (4, 7, 14)


KEYS = {
    **dict(w="+x", s="-x", a="+y", d="-y", e="+z", q="-z"),
    **dict(arrowup="+x", arrowdown="-x", arrowleft="+y", arrowright="-y"),
    **dict(u="+roll", o="-roll", i="+pitch", k="-pitch", j="+yaw", l="-yaw"),
    **dict(c="close", v="open", t="toggle", tab="arm"),
    **dict(enter="success", backspace="fail", r="reset", escape="stop"),
    **{" ": ESTOP, "g": RELEASE_ESTOP},
}
"""What each key does: its name as a browser gives it (`KeyboardEvent.key`), in lower case. On the page a letter is its
place on a QWERTY keyboard, whatever is printed there."""

AXES = ("x", "y", "z", "roll", "pitch", "yaw")


def motion_of_keys(held: Iterable[str]) -> tuple[np.ndarray, int]:
    """Motion and gripper of a reading, from the keys that are held; opposite ones cancel."""
    meant = {KEYS.get(key, "") for key in held}
    motion = [float(f"+{axis}" in meant) - float(f"-{axis}" in meant) for axis in AXES]
    return np.array(motion), int("open" in meant) - int("close" in meant)


DEVICES = ExtensionPoint(
    "device",
    "hilt.devices",
    {
        "browser": "hilt.teleop.browser:Browser",
        "keyboard": "hilt.teleop.keyboard:Keyboard",
        "gamepad": "hilt.teleop.gamepad:Gamepad",
        "spacemouse": "hilt.teleop.spacemouse:SpaceMouse",
        "script": "hilt.teleop.operator:Script",
        "leader": "hilt.teleop.leader:Leader",
    },
)
"""Name to class or function that makes a device. A program adds its own: ``DEVICES["mine"] = Mine``."""


PACKAGES = {
    "browser": ("nicegui", "The page"),
    "gamepad": ("pygame", "A gamepad"),
    "spacemouse": ("pyspacemouse", "A SpaceMouse"),
}
"""What a device of ours needs beside Hilt, and what needs it"""


def check_device(name: str, action_of: object = None, **options: Any) -> None:
    """Refuses what `open_device` would, as far as that is known without opening
    anything. Nothing of a user's is imported."""
    DEVICES.check(name)
    if name in PACKAGES:
        require_module(*PACKAGES[name], "teleop")
    if name in DEVICES:
        try:
            inspect.signature(DEVICES.load(name)).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"the device {name} cannot be made with the options {options}: {error}. Correct them."
            ) from error


def open_device(name: str, action_of: object = None, **options: Any) -> Device:
    """The device of that name, or of a class of yours as "module:Class", ready to
    be read. `action_of`: see `Device`."""
    factory = function(DEVICES.load(name, Device), "the device")
    try:
        device: Device = factory(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, HiltError) or not options:
            raise
        raise ConfigError(
            f"the device {name} cannot be made with the options {options}: {error}. Correct them."
        ) from error
    if not isinstance(device, Device):
        raise ConfigError(
            f"the device {name!r} is {device!r}: expected a hilt.teleop.devices.Device, see "
            "docs/bring-your-own-device.md"
        )
    device.action_of = None if action_of is None else function(action_of, "action_of", np.ndarray)
    return device


def function(given: object, what: str, *kinds: type) -> Callable[..., Any]:
    """A function or class: itself, or "module:name" of it, which is what a command line can
    give. `kinds`: see `hilt.core.names.load`."""
    found = given
    if isinstance(given, str):
        try:
            found = load(given, *kinds)
        except UnsafeError:
            raise
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{what} {given!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{what} is {found!r}: expected a function, or module:name of one")
    result: Callable[..., Any] = found
    return result
