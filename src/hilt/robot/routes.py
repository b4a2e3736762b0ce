"""The routes of the robot server: what each expects, checked before it comes near the arm, and what it answers.

They are those of HIL-SERL's ``franka_server.py`` and of its egg-flip variant, with their replies to the letter. All are
POST. What is wrong with a request is reported in one sentence, by `Refusal`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hilt.core.errors import HiltError, suggest
from hilt.core.tree import JsonObject
from hilt.envs.rotations import to_euler
from hilt.robot.backends import PARAMETERS, Box, RobotState

SHORTEST_QUATERNION, LONGEST_QUATERNION = 0.01, 1.1
"""HIL-SERL's client goes to its reset pose by linear steps between two quaternions:
these are shorter than 1, and mean a direction."""
ROUNDING = 1e-6  # meters: what float32 makes of a point on the workspace's edge
MAX_PIXELS = 1024


class Refusal(HiltError):
    """Raised when a request is answered by a status other than 200, and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


# --- reading
# ----------------------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[RobotState], dict[str, Any]]] = {
    "/getstate": lambda s: {
        **{name: getattr(s, name).tolist() for name in ("pose", "vel", "force", "torque", "q", "dq", "jacobian")},
        "gripper_pos": float(s.gripper_pos),
    },
    "/getpos": lambda s: {"pose": s.pose.tolist()},
    "/getpos_euler": lambda s: {"pose": [*s.pose[:3].tolist(), *to_euler(s.pose[3:]).tolist()]},
    "/getvel": lambda s: {"vel": s.vel.tolist()},
    "/getforce": lambda s: {"force": s.force.tolist()},
    "/gettorque": lambda s: {"torque": s.torque.tolist()},
    "/getq": lambda s: {"q": s.q.tolist()},
    "/getdq": lambda s: {"dq": s.dq.tolist()},
    "/getjacobian": lambda s: {"jacobian": s.jacobian.tolist()},
    "/get_gripper": lambda s: {"gripper": float(s.gripper_pos)},
}


# --- commanding
# -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """What is done, what is answered, and how the request's body becomes arguments of the control process."""

    do: str
    reply: str
    read: Callable[[Any, Box], dict[str, Any]] | None = None  # None: there is nothing to read in the body
    values: Mapping[str, Any] = field(default_factory=dict)  # arguments that are always the same


def _pose(body: Any, box: Box) -> dict[str, Any]:
    pose = _numbers(_object(body, "arr", "stands"), "arr", 7, "x y z and a quaternion x y z w")
    stands = _number(body.get("stands", 1.0), "stands")
    if stands <= 0:
        raise Refusal(400, f"stands: expected a number of seconds above 0, got {stands}.")
    length = math.hypot(*pose[3:])
    if not SHORTEST_QUATERNION <= length <= LONGEST_QUATERNION:
        raise Refusal(
            400,
            f"arr: expected a quaternion of length 1 in its last four numbers, got {pose[3:]} of length {length:.3g}.",
        )
    position = np.array(pose[:3])
    if (position < box[0] - ROUNDING).any() or (position > box[1] + ROUNDING).any():
        low, high = (" ".join(f"{x:g}" for x in side) for side in box)
        raise Refusal(
            400,
            f"arr: the position {pose[:3]} is outside the workspace; expected x y z from "
            f"({low}) to ({high}), in meters.",
        )
    seconds = {"stands": stands} if "stands" in body else {}
    return {"pose": [*np.clip(position, *box).tolist(), *(x / length for x in pose[3:])], **seconds}


def _wrench(body: Any, box: Box) -> dict[str, Any]:
    return {"wrench": _numbers(_object(body, "arr"), "arr", 6, "a force and a torque")}


def _gripper(body: Any, box: Box) -> dict[str, Any]:
    position = _number(_field(_object(body, "gripper_pos"), "gripper_pos"), "gripper_pos")
    return {"opening": 1 - min(max(int(position), 0), 255) / 255, "slow": False}


def _parameters(body: Any, box: Box) -> dict[str, Any]:
    values = {name: _number(value, name) for name, value in _object(body, *PARAMETERS).items()}
    for name, value in values.items():
        if value < 0:
            raise Refusal(400, f"{name}: expected a number of 0 or more, got {value}.")
    return {"values": values}


def _load(body: Any, box: Box) -> dict[str, Any]:
    mass = _number(_field(_object(body, "mass", "F_x_center_load", "load_inertia"), "mass"), "mass")
    if mass < 0:
        raise Refusal(400, f"mass: expected kilograms, 0 or more, got {mass}.")
    center = _numbers(body, "F_x_center_load", 3, "the load's center")
    return {
        "mass": mass,
        "center": center,
        "inertia": _numbers(body, "load_inertia", 9, "its inertia, column by column"),
    }


COMMANDS: dict[str, Command] = {
    "/pose": Command("follow", "Moved", _pose),
    "/clearerr": Command("clear_errors", "Clear"),
    "/startimp": Command("start", "Started impedance"),
    "/stopimp": Command("stop", "Stopped impedance"),
    "/jointreset": Command("reset", "Reset Joint"),
    "/open_gripper": Command("grip", "Opened", values={"opening": 1.0, "slow": False}),
    "/close_gripper": Command("grip", "Closed", values={"opening": 0.0, "slow": False}),
    "/close_gripper_slow": Command("grip", "Closed", values={"opening": 0.0, "slow": True}),
    "/move_gripper": Command("grip", "Moved Gripper", _gripper),
    "/activate_gripper": Command("activate_gripper", "Activated"),
    "/reset_gripper": Command("reset_gripper", "Reset"),
    "/update_param": Command("set_parameters", "Updated compliance parameters", _parameters),
    "/set_load": Command("set_load", "Set Load", _load),
    # the egg-flip variant
    "/startwrench": Command("start", "Started wrench"),
    "/stopwrench": Command("release", "Stopped wrench"),
    "/wrench": Command("wrench", "Moved", _wrench),
    "/reset": Command("reset", "Reset"),
}


# --- our own
# ----------------------------------------------------------------------------------------------------------------------


def read_scene(body: object) -> JsonObject:
    """``{}`` asks; with split and state, the scene is reset to that initial state."""
    given = _object(body, "task", "split", "state")
    split, state = given.get("split"), given.get("state")
    if (split is None) != (state is None):
        raise Refusal(400, 'expected split and state together, such as {"split": "train", "state": 7}, or neither.')
    if split is not None and not (isinstance(split, str) and isinstance(state, int) and not isinstance(state, bool)):
        raise Refusal(400, f"expected split, a name, and state, a number; got {_shown(split)} and {_shown(state)}.")
    return {"task": given.get("task"), "split": split, "state": state}


def read_image(body: object, cameras: list[str]) -> tuple[str, int, int]:
    names = ("camera", "height", "width")
    camera, *sizes = (_field(_object(body, *names), name) for name in names)
    if camera not in cameras:
        raise Refusal(400, f"no camera named {_shown(camera)}. Known: {', '.join(cameras)}.")
    if not all(isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MAX_PIXELS for size in sizes):
        raise Refusal(
            400, f"expected a height and a width of 1 to {MAX_PIXELS} pixels, got {' and '.join(map(_shown, sizes))}."
        )
    return camera, sizes[0], sizes[1]


def read_seconds(body: object) -> float:
    seconds = _number(_object(body, "seconds").get("seconds", 120), "seconds")
    if seconds <= 0:
        raise Refusal(400, f"seconds: expected a number above 0, got {seconds}.")
    return seconds


# --- JSON
# ----------------------------------------------------------------------------------------------------------------------


def parse(data: bytes, path: str) -> object:
    try:
        return json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"{path}: the body is not JSON: {error}.") from None


def _object(body: Any, *known: str) -> dict[str, Any]:
    """A JSON object with no other names than these: one that does nothing would be thought to do something."""
    if not isinstance(body, dict):
        raise Refusal(400, f"expected a JSON object, got {_shown(body)}.")
    for name in body:
        if name not in known:
            raise Refusal(400, f"{_shown(name)} is not known here{suggest(name, known)} Expected {', '.join(known)}.")
    return body


def _field(body: dict[str, Any], name: str) -> Any:
    if name not in body:
        raise Refusal(400, f"expected a JSON object with {name!r}, got {_shown(body)}.")
    return body[name]


def _numbers(body: dict[str, Any], name: str, count: int, what: str) -> list[float]:
    given = _field(body, name)
    if not isinstance(given, list) or len(given) != count:
        length = f"{len(given)}" if isinstance(given, list) else _shown(given)
        raise Refusal(400, f"{name}: expected a list of {count} numbers, {what}; got {length}.")
    return [_number(value, f"{name}[{i}]") for i, value in enumerate(given)]


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refusal(400, f"{name}: expected a number, got {_shown(value)}.")
    if abs(value) > 1e300 or not math.isfinite(value):  # JSON's integers have no end
        raise Refusal(400, f"{name}: expected a finite number, got {_shown(value)}.")
    return float(value)


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 1e300:
        return "an integer of hundreds of digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
