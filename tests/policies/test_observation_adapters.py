from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hilt.core.errors import MissingFieldError, UnknownNameError
from hilt.policies.vla.observation_adapters import axis_angle, columns, hold_of, no_motion, suite, two_columns

RNG = np.random.default_rng(0)


def image(*lead: int) -> Any:
    return RNG.integers(0, 256, (*lead, 4, 6, 3), dtype=np.uint8)


def libero(*lead: int) -> dict[str, Any]:
    quaternion = RNG.normal(size=(*lead, 4))
    return {
        "agentview_image": image(*lead),
        "robot0_eye_in_hand_image": image(*lead),
        "robot0_eef_pos": RNG.normal(size=(*lead, 3)),
        "robot0_eef_quat": quaternion / np.linalg.norm(quaternion, axis=-1, keepdims=True),
        "robot0_gripper_qpos": RNG.normal(size=(*lead, 2)),
    }


def test_libero_is_turned_round_and_its_gripper_too():
    raw = libero()
    seen = suite("libero_10").observe(raw, "open it")
    assert np.array_equal(seen["full_image"], raw["agentview_image"][::-1, ::-1])
    assert np.array_equal(seen["wrist_image"], raw["robot0_eye_in_hand_image"][::-1, ::-1])
    assert seen["instruction"] == "open it" and seen["state"].dtype == np.float32
    assert np.allclose(
        seen["state"],
        np.concatenate([raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]),
    )
    actions = np.array([[0.5, 1.0], [0.5, 0.0], [0.5, 0.7]])
    assert suite("libero").command(actions).tolist() == [[0.5, -1], [0.5, 1], [0.5, -1]]
    assert suite("libero").taught(np.array([[0.5, -1.0], [0.5, 1.0]])).tolist() == [[0.5, 1], [0.5, 0]]


def test_liberos_own_demonstrations_have_other_names():
    raw = {
        "agentview_rgb": image(2),
        "eye_in_hand_rgb": image(2),
        "ee_pos": np.ones((2, 3)),
        "ee_ori": np.zeros((2, 3)),
    }
    seen = suite("libero").views({**raw, "gripper_states": np.full((2, 2), 0.5)})
    assert np.array_equal(seen["full_image"], raw["agentview_rgb"][:, ::-1, ::-1])
    assert seen["state"].tolist() == [[1, 1, 1, 0, 0, 0, 0.5, 0.5]] * 2


def test_an_episode_is_seen_as_its_steps_are():
    episode = libero(5)
    whole = suite("libero_goal").views(episode)
    one = suite("libero_goal").views({name: column[3] for name, column in episode.items()})
    assert all(np.array_equal(whole[name][3], one[name]) for name in one)


def test_the_axis_and_the_angle():
    assert axis_angle([0, 0, 0, 1]).tolist() == [0, 0, 0] and axis_angle([0, 0, 0, 1.0000001]).tolist() == [0, 0, 0]
    half = np.sqrt(0.5)
    assert np.allclose(axis_angle([half, 0, 0, half]), [np.pi / 2, 0, 0])
    assert np.allclose(axis_angle([0, 0, 1, 0]), [0, 0, np.pi])
    assert np.allclose(two_columns([0, 0, half, half]), [0, 1, 0, -1, 0, 0])


def test_robotwin_in_both_versions():
    views = {"head_camera": {"rgb": image()}, "left_camera": {"rgb": image()}, "right_camera": {"rgb": image()}}
    joints = np.arange(14.0) * 0.045
    first = suite("robotwin_lift").observe({"observation": views, "joint_action": joints}, "lift")
    second = suite("robotwin2_lift").observe({"observation": views, "joint_action": {"vector": joints}}, "lift")
    assert list(second) == ["full_image", "left_wrist", "right_wrist", "state", "instruction"]
    assert (
        np.allclose(second["state"], joints)
        and np.allclose(first["state"][[6, 13]], [6, 13])
        and np.isclose(first["state"][5], 5 * 0.045)
    )
    assert joints[6] == 6 * 0.045  # the simulator's own array stays as it is
    assert list(
        suite("aloha").views({"observation": {"head_camera": views["head_camera"]}, "joint_action": {"vector": joints}})
    ) == [
        "full_image",
        "state",
    ]


def test_bridge_opens_or_closes():
    seen = suite("bridge_orig").observe({"image_0": image(), "state": np.ones(7)}, "put")
    assert seen["full_image"].shape == (4, 6, 3) and seen["state"].tolist() == [1] * 7
    assert suite("bridge").command(np.array([[0.1, 0.6], [0.1, 0.5]])).tolist() == [[0.1, 1], [0.1, 0]]


@pytest.mark.parametrize("joined", [True, False])
def test_tabletop_with_one_arm_and_with_two(joined: bool):
    pose = np.array([1.0, 2, 3, 0, 0, 0, 1])
    one = suite("tabletop/pick").views(
        {"state": {"tcp_pose": pose, "gripper_pose": np.ones(1)}, "images": {"front": image(), "wrist": image()}}
    )
    assert list(one) == ["full_image", "wrist_image", "state"] and one["state"].tolist() == [
        1,
        2,
        3,
        1,
        0,
        0,
        0,
        1,
        0,
        1,
    ]
    arms = {
        f"{arm}/{name}": value
        for arm in ("left", "right")
        for name, value in (("tcp_pose", pose), ("gripper_pose", np.ones(1)))
    }
    views = {"front": image(), "left/wrist": image(), "right/wrist": image()}
    if not joined:  # as a log nests them
        arms = {
            arm: {name: arms[f"{arm}/{name}"] for name in ("tcp_pose", "gripper_pose")} for arm in ("left", "right")
        }
        views = {
            "front": views["front"],
            "left": {"wrist": views["left/wrist"]},
            "right": {"wrist": views["right/wrist"]},
        }
    two = suite("tabletop").views({"state": arms, "images": views})
    assert list(two) == ["full_image", "left_wrist", "right_wrist", "state"] and two["state"].shape == (20,)


def test_pressing_needs_the_hand_alone():
    press, pose = suite("tabletop/press_red"), np.array([1.0, 2, 3, 0, 0, 0, 1])
    seen = press.observe({"state": {"tcp_pose": pose}, "images": {"wrist": image()}}, "go")
    assert list(seen) == ["wrist_image", "state", "instruction"] and seen["state"].tolist() == [3]
    told = press.command(np.array([[0.1, 0.2, 0.3]] * 4, np.float32))
    assert told.shape == (4, 7) and told[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0, 0, 0, -1]), (
        "no turn, and closed fingers"
    )
    assert press.taught(told).tolist() == told[:, :3].tolist()


def test_a_dataset_of_ones_own():
    mine = columns({"full_image": "images/top", "state": "arm/pose + arm/grip"})
    seen = mine.observe({"images": {"top": image()}, "arm": {"pose": np.ones(3), "grip": np.zeros(1)}}, "go")
    assert seen["state"].tolist() == [1, 1, 1, 0] and seen["full_image"].dtype == np.uint8
    with pytest.raises(MissingFieldError, match="this observation has no 'top'; it has: side"):
        mine.observe({"images": {"side": image()}}, "go")
    for name in ("aloha", "tabletop", "bridge", "libero"):
        with pytest.raises(MissingFieldError, match=r"this observation has no '.*'; it has: nothing"):
            suite(name).observe({}, "go")


def test_an_unknown_suite():
    with pytest.raises(
        UnknownNameError,
        match=r"no suite named 'liber'.*Known: aloha, bridge, libero, metaworld, robot, robotwin, robotwin2, tabletop",
    ):
        suite("liber")


def test_how_an_arm_holds():
    last = np.arange(7, dtype=np.float32)
    assert suite("tabletop/pick").hold({}, last, 7).tolist() == [0] * 7, "a gripper command of 0 changes nothing"
    libero = suite("libero_goal")
    assert libero.hold({}, last, 7).tolist() == [0] * 6 + [6] and libero.hold({}, None, 7).tolist() == [0] * 6 + [1]
    assert libero.command(libero.hold({}, None, 7))[-1] == -1, "the gripper is opened, as LIBERO does before an episode"
    joints = np.arange(14, dtype=np.float32)
    raw = {"observation": {}, "joint_action": {"vector": joints}}
    two = suite("robotwin2_lift_pot")
    assert two.hold(raw, None, 14).tolist() == joints.tolist() and two.hold(raw, joints + 1, 14)[0] == 1
    first = suite("robotwin/lift").hold({"observation": {}, "joint_action": joints}, None, 14)
    assert first[13] == pytest.approx(13 / 0.045), "in the units of the policy"


def test_how_an_arm_holds_is_known_by_its_task_where_its_observations_have_other_names():
    assert hold_of(["robot/127.0.0.1:5000"]) is no_motion and hold_of(["tabletop/pick"]) is no_motion
    assert hold_of(["libero_10/3"]) is suite("libero_10").hold
    assert hold_of([]) is None and hold_of(["CartPole-v1"]) is None
    assert columns({"state": "state"}).hold is None
