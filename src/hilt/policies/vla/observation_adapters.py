"""Between an environment's own words and a policy's: one pair of functions for each suite, in one place.

    libero = suite("libero_goal")
    row = libero.observe(raw, "put the bowl on the plate")     # {full_image, wrist_image, state, instruction}
    env.step(libero.command(action))                           # of an action in the policy's units

`observe` takes one observation, or the columns of a whole episode: leading dimensions stay. `taught` is the inverse of
`command`: the actions of a demonstration, as a policy is to give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import MissingFieldError, UnknownNameError
from hilt.policies.io.preprocess import rotate180
from hilt.policies.vla.normalize import gripper_inverted, gripper_signs

Views = Callable[[Mapping[str, Any]], dict[str, Any]]
Hold = Callable[[Mapping[str, Any], np.ndarray | None, int], np.ndarray]
"""``hold(raw, last, action_dim)``: of an environment's observation, the policy's last action (None before the first
one), and the numbers in an action"""


@dataclass(frozen=True)
class Suite:
    """How observations of a suite get the names of a policy, and how actions of the one become actions of the other."""

    views: Views
    """Pictures and state by the policy's names"""
    command: Callable[[np.ndarray], np.ndarray] = np.asarray
    """The environment's action, of a policy's"""
    taught: Callable[[np.ndarray], np.ndarray] = np.asarray
    """The policy's action, of an environment's"""
    name: str = ""
    """None: the names are given by hand"""
    hold: Hold | None = None
    """The policy's action with which the arm stays as it is; None: it is not known"""

    def observe(self, raw: Mapping[str, object], instruction: str) -> dict[str, npt.ArrayLike]:
        return {**self.views(raw), "instruction": instruction}


def suite(name: str) -> Suite:
    """Returns the adapter of a suite, by its name or that of a task of it: ``libero_10``, ``robotwin2_lift_pot``,
    ``tabletop/pick``; the longest that fits counts."""
    known = _suite_name(name)
    if known is None:
        raise UnknownNameError("suite", name, SUITES)
    return replace(SUITES[known], name=known)


def _suite_name(name: str) -> str | None:
    return next((known for known in sorted(SUITES, key=len, reverse=True) if name.startswith(known)), None)


def same_suite(one: str, other: str) -> bool:
    """Whether two names are those of one suite, or of tasks of it."""
    known = _suite_name(one)
    return known is not None and known == _suite_name(other)


def known_suites() -> list[str]:
    """The names that `suite` knows, but for those of single tasks."""
    return sorted(name for name in SUITES if "/" not in name)


def columns(names: Mapping[str, str], hold: Hold | None = None) -> Suite:
    """A dataset of one's own: the policy's name to the path in its observations,
    ``{"full_image": "images/top", "state": "state"}``.

    Several paths joined by ``+`` are put after one another. Actions stay as they are. `hold`: how the arm holds, for
    policies that plan while it does; `no_motion` where actions are differences.
    """

    def views(raw: Mapping[str, object]) -> dict[str, npt.ArrayLike]:
        return {name: _joined(*(_at(raw, path.strip()) for path in paths.split("+"))) for name, paths in names.items()}

    return Suite(views, hold=hold)


# --- how an arm holds ---


def no_motion(raw: Mapping[str, object], last: np.ndarray | None, action_dim: int) -> np.ndarray:
    """Where actions are differences, and a gripper command of 0 leaves the gripper as it is."""
    return np.zeros(action_dim, np.float32)


def hold_of(tasks: Sequence[str]) -> Hold | None:
    """How the arm of these tasks holds, whatever names their observations have; None where it is not known."""
    known = _suite_name(tasks[0]) if tasks else None
    return None if known is None else SUITES[known].hold


def gripper_kept(raw: Mapping[str, object], last: np.ndarray | None, action_dim: int) -> np.ndarray:
    """Where actions are differences, and the last number always commands the gripper: 1 opens it, 0 closes it."""
    action = np.zeros(action_dim, np.float32)
    action[-1] = 1.0 if last is None else last[-1]
    return action


def last_force_kept(raw: Mapping[str, object], last: np.ndarray | None, action_dim: int) -> np.ndarray:
    """Where actions are differences, and the last number is the force of the gripper: before the first one, none."""
    action = np.zeros(action_dim, np.float32)
    action[-1] = 0.0 if last is None else last[-1]
    return action


def joints_kept(views: Views, raw: Mapping[str, object], last: np.ndarray | None, action_dim: int) -> np.ndarray:
    """Where actions are the joints of two arms: the last command, before the first one the joints as they are."""
    return np.array(views(raw)["state"] if last is None else last, np.float32)


# --- the suites ---


def _libero(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Its cameras hang upside down. The simulator and the files of its demonstrations have other names for the same."""
    simulated = "robot0_eef_pos" in raw
    full, wrist = ("agentview_image", "robot0_eye_in_hand_image") if simulated else ("agentview_rgb", "eye_in_hand_rgb")
    if simulated:
        state = _joined(
            _at(raw, "robot0_eef_pos"), axis_angle(_at(raw, "robot0_eef_quat")), _at(raw, "robot0_gripper_qpos")
        )
    else:
        state = _joined(_at(raw, "ee_pos"), _at(raw, "ee_ori"), _at(raw, "gripper_states"))
    # one of them may be left out: task_options.cameras
    named = {name: path for name, path in (("full_image", full), ("wrist_image", wrist)) if _has(raw, path)}
    pictures = {name: rotate180(np.asarray(_at(raw, path))) for name, path in named.items()}
    return {**pictures, "state": state}


def _libero_taught(actions: np.ndarray) -> np.ndarray:
    """-1 opens and +1 closes there; 1 is open and 0 closed here."""
    taught = np.array(actions, copy=True)
    taught[..., -1] = (1 - taught[..., -1].clip(-1, 1)) / 2
    return taught


def _aloha(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Two arms of seven numbers, of which the last of each is the gripper, 0 to 1."""
    pictures = {
        name: _at(raw, f"observation/{camera}/rgb")
        for name, camera in ARM_CAMERAS.items()
        if camera in _at(raw, "observation")
    }
    return {**pictures, "state": _joined(_at(raw, "joint_action/vector"))}


def _robotwin_1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The first version has its joints as one array, and its grippers in meters."""
    joints = np.array(_at(raw, "joint_action"), np.float32)
    joints[..., [6, 13]] /= 0.045
    return _aloha({**raw, "joint_action": {"vector": joints}})


def _bridge(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "full_image": _at(raw, "full_image" if "full_image" in raw else "image_0"),
        "state": _joined(_at(raw, "state")),
    }


def _bridge_command(actions: np.ndarray) -> np.ndarray:
    """The gripper opens (1) or closes (0), nothing between."""
    commands = np.array(actions, copy=True)
    commands[..., -1] = commands[..., -1] > 0.5
    return commands


def _tabletop(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns for each arm its position, two columns of its rotation (which neither
    wrap nor change their sign), and its gripper."""
    state = _at(raw, "state")
    arms = [arm for arm in ("", "left/", "right/") if _has(state, f"{arm}tcp_pose")] or [""]
    parts = []
    for arm in arms:
        pose = np.asarray(_at(state, f"{arm}tcp_pose"))
        parts += [pose[..., :3], two_columns(pose[..., 3:]), _at(state, f"{arm}gripper_pose")]
    cameras = {"full_image": "front", "wrist_image": "wrist", "left_wrist": "left/wrist", "right_wrist": "right/wrist"}
    pictures = {name: _at(raw["images"], path) for name, path in cameras.items() if _has(raw.get("images", {}), path)}
    return {**pictures, "state": _joined(*parts)}


def _press(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the hand sees, and how high it is: where on the table it is does not
    matter to one that looks from the hand."""
    return {"wrist_image": _at(raw, "images/wrist"), "state": _joined(np.asarray(_at(raw, "state/tcp_pose"))[..., 2:3])}


def _press_command(actions: np.ndarray) -> np.ndarray:
    """The policy moves the hand and does not turn it; its fingers are closed."""
    commands = np.zeros((*np.shape(actions)[:-1], 7), np.float32)
    commands[..., :3], commands[..., 6] = actions, -1.0
    return commands


def _metaworld(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The camera of the table and that of the gripper, and the hand's position and opening."""
    names = {"full_image": "images/workspace", "wrist_image": "images/gripperPOV"}
    return {**{name: _at(raw, path) for name, path in names.items()}, "state": _joined(_at(raw, "state"))}


ARM_CAMERAS = {"full_image": "head_camera", "left_wrist": "left_camera", "right_wrist": "right_camera"}
SUITES = {
    "libero": Suite(
        _libero, lambda actions: gripper_inverted(gripper_signs(actions)), _libero_taught, hold=gripper_kept
    ),
    "robotwin": Suite(_robotwin_1, hold=partial(joints_kept, _robotwin_1)),
    "robotwin2": Suite(_aloha, hold=partial(joints_kept, _aloha)),
    "aloha": Suite(_aloha, hold=partial(joints_kept, _aloha)),
    "bridge": Suite(_bridge, _bridge_command, hold=gripper_kept),
    "metaworld": Suite(_metaworld, hold=last_force_kept),
    "tabletop": Suite(_tabletop, hold=no_motion),
    "robot": Suite(_tabletop, hold=no_motion),
    "tabletop/press_": Suite(_press, _press_command, lambda actions: np.asarray(actions)[..., :3], hold=no_motion),
}
"""By the beginning of their tasks' names."""


# --- helpers ---


def axis_angle(quaternion: npt.ArrayLike) -> np.ndarray:
    """Returns the axis-angle of [x y z w], as robosuite computes it: nothing for next
    to no turn, and angles up to a whole one."""
    quaternion = np.asarray(quaternion, np.float64)
    w = quaternion[..., 3:].clip(-1, 1)
    sine = np.sqrt(1 - w * w)
    none = np.isclose(sine, 0.0)
    return np.where(none, 0.0, quaternion[..., :3] * 2 * np.arccos(w) / np.where(none, 1.0, sine))


def two_columns(quaternion: npt.ArrayLike) -> np.ndarray:
    """The first two columns of the rotation's matrix, of [x y z w]."""
    x, y, z, w = np.moveaxis(np.asarray(quaternion, np.float64), -1, 0)
    first = 1 - 2 * (y * y + z * z), 2 * (x * y + z * w), 2 * (x * z - y * w)
    second = 2 * (x * y - z * w), 1 - 2 * (x * x + z * z), 2 * (y * z + x * w)
    return np.stack([*first, *second], -1)


def _joined(*parts: Any) -> np.ndarray:
    """Pictures as they are; numbers side by side in float32."""
    arrays = [np.asarray(part) for part in parts]
    return arrays[0] if arrays[0].dtype == np.uint8 else np.concatenate(arrays, -1).astype(np.float32)


def _has(tree: Any, path: str) -> bool:
    if not isinstance(tree, Mapping):
        return False
    if path in tree:
        return True
    first, _, rest = path.partition("/")
    return bool(rest) and first in tree and _has(tree[first], rest)


def _at(tree: Any, path: str) -> Any:
    """What is at a path, whether its slashes are part of a name (gymnasium) or go into dictionaries (a log)."""
    if not isinstance(tree, Mapping):
        raise MissingFieldError(f"this observation has no {path!r}, but an array in its place.")
    if path in tree:
        return tree[path]
    first, _, rest = path.partition("/")
    if not rest or first not in tree:
        raise MissingFieldError(f"this observation has no {path!r}; it has: {', '.join(map(str, tree)) or 'nothing'}.")
    return _at(tree[first], rest)
