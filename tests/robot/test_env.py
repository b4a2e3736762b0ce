"""RobotEnv and DualRobotEnv over real HTTP: against a server that a test can spoil,
and against `hilt serve-robot`'s own."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from hilt.core.config import describe
from hilt.core.errors import (
    ConfigError,
    DeadlineError,
    EmergencyStopError,
    RefusedError,
    RequestError,
    UnknownNameError,
)
from hilt.envs.rate import Rate
from hilt.envs.rotations import from_euler, to_euler
from hilt.robot.cameras import CameraConfig
from hilt.robot.env import ArmConnection, DualRobotEnv, RobotConfig, RobotEnv, robot_task
from hilt.robot.robot_client import RobotClient
from tests.envs.toy_robot import ToyRobot, scene

STILL = np.zeros(7)
FAST: dict[str, Any] = {"hz": 50.0, "gripper_seconds": 0.0, "request_seconds": 60.0}
AWAY: dict[str, Any] = {"reset_pose": [0.5, 0.0, 0.3, np.pi - 1e-6, 0.0, 0.0], "reset_seconds": 0.1}


@pytest.fixture
def toy():
    with ToyRobot() as robot:
        yield robot


@pytest.fixture
def simulation():
    with ToyRobot(scene()) as robot:
        yield robot


def env_of(robot: ToyRobot, **settings: Any) -> RobotEnv:
    """One that goes to a reset pose before each episode, but for a simulation's, which stays where its scene has it."""
    return RobotEnv(RobotConfig(url=robot.url, **{**FAST, **({} if robot.scene else AWAY), **settings}))


def act(**numbers: float) -> np.ndarray:
    """``act(x=1, grip=-1)``"""
    return np.array([numbers.get(name, 0.0) for name in ("x", "y", "z", "rx", "ry", "rz", "grip")])


# --- requests ---


def test_requests_share_a_connection_and_its_loss_is_no_failure(toy: ToyRobot):
    client = RobotClient(toy.url, request_seconds=60)
    for _ in range(3):
        assert client.post("getstate")["gripper_pos"] == 1.0
    assert client.post("clearerr") == "done" and toy.connections == 1
    toy.drop_after_reply = True
    assert client.post("clearerr") == "done"
    toy.drop_after_reply = False
    assert client.post("clearerr") == "done" and toy.connections == 2


def test_every_request_has_a_deadline_and_a_late_reply_is_not_the_next_one(toy: ToyRobot):
    client = RobotClient(toy.url, request_seconds=0.2)
    toy.delays["clearerr"] = 1.0
    with pytest.raises(DeadlineError, match=f"{toy.url}/clearerr: no reply within 0.2 s"):
        client.post("clearerr")
    assert client.post("getstate", seconds=60)["pose"] == toy.pose
    toy.delays["jointreset"] = 0.4
    assert client.post("jointreset", seconds=60) == "done"
    # a byte every 0.05 s: no single wait is long, and all of them take more than ten seconds
    toy.trickle.add("getstate")
    with pytest.raises(DeadlineError, match="getstate"):
        client.post("getstate")


def test_a_request_that_was_interrupted_does_not_spoil_the_next(toy: ToyRobot):
    client = RobotClient(toy.url, request_seconds=60)
    client.post("clearerr")
    main, interrupted = threading.main_thread().ident, threading.Event()
    assert main is not None

    def wait() -> None:
        """Whoever asked is interrupted while it waits for the answer, which comes later."""
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(60)

    toy.waits["clearerr"] = SimpleNamespace(wait=wait)
    with pytest.raises(KeyboardInterrupt):
        client.post("clearerr", seconds=60)
    interrupted.set()
    assert client.post("getstate", seconds=60)["pose"] == toy.pose


def test_a_refusal_raises_with_the_servers_sentence(toy: ToyRobot):
    client = RobotClient(toy.url, request_seconds=60)
    toy.refusals["pose"] = (400, "arr: expected 7 numbers, got 6.")
    with pytest.raises(RequestError, match=r"/pose: refused with status 400: arr: expected 7 numbers, got 6\."):
        client.post("pose", {"arr": [0] * 6})
    toy.refusals["pose"] = (423, "arm 0 is controlled by 10.0.0.2.")
    with pytest.raises(RefusedError, match="controlled by 10"):
        client.post("pose", {"arr": [0] * 7})
    toy.refusals["pose"] = (401, "expected the header 'Authorization: Bearer TOKEN'.")
    with pytest.raises(RefusedError, match=r"TOKEN'\. Set token_file in the arm's settings"):
        client.post("pose", {"arr": [0] * 7})
    toy.refusals["pose"] = (422, '{"detail": "no such arm"}')
    with pytest.raises(RequestError, match="422: no such arm"):
        client.post("pose")
    assert client.post("scene", {}, missing_ok=True) is None
    toy.raw["getpos"] = ("application/json", b"<html>")
    with pytest.raises(RequestError, match="the reply is not application/json"):
        client.post("getpos")


def test_robot_env_reports_missing_server_and_address():
    with pytest.raises(
        RefusedError, match=r"/getstate: no robot server answers \(Connection refused\). Start one: hilt serve-robot"
    ):
        RobotClient("http://127.0.0.1:9").post("getstate")
    for wrong in ("127.0.0.1:5000", "ftp://robot", "http://"):
        with pytest.raises(ConfigError, match="something like http://"):
            RobotClient(wrong)


def test_the_token_is_sent_and_comes_from_a_file(toy: ToyRobot, tmp_path: Path):
    (tmp_path / "robot.token").write_text("sesame-open-please\n")
    env = env_of(toy, token_file=str(tmp_path / "robot.token"))
    env.reset()
    assert {headers.get("Authorization") for headers in toy.headers} == {"Bearer sesame-open-please"}


# --- making, resetting ---


def test_making_one_needs_no_server():
    """Upstream asks the server in its constructor, also for an environment that is only there for its spaces."""
    config = RobotConfig(
        url="http://127.0.0.1:9", cameras={"front": CameraConfig()}, image_size=32, instruction="do it", step_limit=5
    )
    env = RobotEnv(config)
    assert env.action_space.shape == (7,) and env.observation_space["images"]["front"].shape == (32, 32, 3)
    assert (env.instruction, env.step_limit, env.control_hz) == ("do it", 5, 10.0)
    assert env.initial_states == {"train": 50, "eval": 50, "test": 100}
    with pytest.raises(ConfigError, match="Call reset"):
        env.step(STILL)
    with pytest.raises(RefusedError, match="hilt serve-robot"):
        env.reset()
    env.close()


def test_reset_goes_to_the_reset_pose_by_small_steps(toy: ToyRobot):
    springs = {"precision": {"translational_Ki": 1.0}, "compliance": {"translational_Ki": 0.0}}
    env = env_of(toy, gripper_at_reset="open", reset_pose=[0.6, 0.1, 0.1, np.pi, 0.0, 0.5], **springs)
    obs, info = env.reset(options={"split": "eval", "state": 3})
    assert info == {"succeed": None, "split": "eval", "state": 3} and env.observation_space.contains(obs)
    assert toy.routes[:4] == ["scene", "clearerr", "update_param", "open_gripper"]
    assert toy.bodies("update_param") == [{"translational_Ki": 1.0}, {"translational_Ki": 0.0}]
    poses = toy.poses()
    assert len(poses) == 5 and np.abs(np.diff(poses[:, :3], axis=0)).max() < 0.03  # 0.1 m in 0.1 s at 50 Hz
    np.testing.assert_allclose(np.linalg.norm(poses[:, 3:], axis=1), 1.0)  # upstream's are shorter on the way
    np.testing.assert_allclose(
        poses[-1], [0.6, 0.1, 0.1, *Rotation.from_euler("xyz", [np.pi, 0, 0.5]).as_quat()], atol=1e-9
    )
    np.testing.assert_allclose(obs["state"]["tcp_pose"], poses[-1], rtol=1e-6, atol=1e-7)


def test_a_numbered_state_is_always_the_same_one(toy: ToyRobot):
    env = env_of(toy, random_reset=[0.05, 0.3], initial_states={"train": 50, "eval": 3, "test": 9})

    def begun(**options: Any) -> np.ndarray:
        return env.reset(options=options)[0]["state"]["tcp_pose"]

    first, other, tested = begun(split="train", state=1), begun(split="train", state=2), begun(split="test", state=1)
    np.testing.assert_array_equal(begun(split="train", state=1), first)
    for one in (other, tested):
        assert 1e-3 < np.abs(one - first)[:2].max() <= 0.1 and one[2] == first[2]
    assert abs(to_euler(first[3:])[2]) <= 0.3
    seeded = [env.reset(seed=5)[1]["state"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    with pytest.raises(ConfigError, match="it has the states 0 to 2"):
        begun(split="eval", state=3)
    with pytest.raises(UnknownNameError, match="reset option named 'stat'"):
        begun(stat=1)


def test_joints_are_reset_every_so_often_and_when_asked(toy: ToyRobot):
    env = env_of(toy, joint_reset_period=2, joint_reset_seconds=60.0, request_seconds=2.0)
    toy.delays["jointreset"] = 2.5
    counts = []
    for options in ({}, {}, {}, {"joint_reset": True}):
        env.reset(options=options)
        counts.append(toy.routes.count("jointreset"))
    assert counts == [0, 1, 1, 2]


def test_robot_env_observes_anew_after_a_wait_following_reset(toy: ToyRobot):
    env = env_of(toy)
    obs, _ = env.reset()
    time.sleep(0.5)  # the scene is put in order
    toy.gripper, toy.asked = 0.25, []
    looked = time.monotonic()
    now = env.look()
    assert (obs["state"]["gripper_pose"][0], now["state"]["gripper_pose"][0]) == (1.0, 0.25) and toy.routes == [
        "getstate"
    ]
    assert env.step(STILL)[4]["period_seconds"] < time.monotonic() - looked, "the wait is no period"


def test_robot_env_settings_need_no_address(toy: ToyRobot):
    settings = env_of(toy, action_scale=[0.02, 0.1], cameras={"front": CameraConfig()}).settings
    assert (
        settings["action_scale"] == [0.02, 0.1]
        and settings["hz"] == 50.0
        and settings["cameras"]["front"]["kind"] == "simulation"
    )
    assert not {"url", "token_file", "request_seconds"} & settings.keys()
    dual = robot_task("a:1,b:2", cameras={"front": {}, "left/wrist": {}}).settings
    assert (
        set(dual["left/cameras"]) == {"front", "left/wrist"}
        and dual["right/cameras"] == {}
        and dual["right/hz"] == 10.0
    )


def test_robot_env_reports_an_arm_that_does_not_reach_its_pose(toy: ToyRobot):
    toy.blocked = True
    with pytest.raises(
        RequestError, match=r"the arm is 0\.100 m from its reset pose, and at most reset_tolerance=0\.05 m"
    ):
        env_of(toy, reset_pose=[0.5, 0.0, 0.3, np.pi, 0, 0]).reset()
    env_of(toy, reset_pose=[0.5, 0.0, 0.3, np.pi, 0, 0], reset_tolerance=0.2).reset()


def test_robot_env_resets_the_scene_of_a_simulation_and_takes_its_task(simulation: ToyRobot):
    with pytest.raises(
        ConfigError, match=r"has the task 'pick', and task='stack' was asked for: hilt serve-robot --task stack"
    ):
        env_of(simulation, task="stack").reset()
    simulation.asked.clear()
    env = env_of(simulation, compliance={"translational_Ki": 2.0}, task="pick")
    _, info = env.reset(options={"split": "test", "state": 99})
    assert info == {"succeed": False, "split": "test", "state": 99} and env.simulation is True
    assert simulation.bodies("scene")[1] == {"split": "test", "state": 99}
    assert (env.instruction, env.step_limit) == ("pick it up", 7)
    assert "pose" not in simulation.routes and simulation.bodies("update_param") == [{"translational_Ki": 2.0}]
    env.reset(options={"joint_reset": True})
    assert simulation.routes.count("jointreset") == 1
    moved = env_of(simulation, **{**AWAY, "reset_pose": [0.45, 0.1, 0.2, np.pi, 0, 0]}).reset()[0]
    np.testing.assert_allclose(moved["state"]["tcp_pose"][:3], [0.45, 0.1, 0.2], atol=1e-6)
    env.give_time(3)
    env.reset()
    assert env.step_limit == 21, "a person has three times a script's steps"
    own = env_of(simulation, instruction="mine", step_limit=3)
    own.give_time(3)
    own.reset()
    assert (own.instruction, own.step_limit) == ("mine", 3)


# --- stepping ---


def test_a_step_moves_turns_and_reads(toy: ToyRobot):
    env = env_of(toy, action_scale=[0.02, 0.15])
    env.reset()
    toy.asked.clear()
    start = np.array(toy.pose)
    obs, reward, terminated, truncated, info = env.step(act(x=1, y=-0.5, z=3, rx=0.2, rz=1))
    assert toy.routes == ["clearerr", "pose", "getstate"]
    np.testing.assert_allclose(toy.pose[:3], start[:3] + np.array([1, -0.5, 1]) * 0.02, atol=1e-9)
    turned = Rotation.from_euler("xyz", [0.03, 0, 0.15]) * Rotation.from_quat(start[3:])
    np.testing.assert_allclose(Rotation.from_quat(toy.pose[3:]).as_matrix(), turned.as_matrix(), atol=1e-6)
    assert env.observation_space.contains(obs)
    assert (reward, terminated, truncated, info["succeed"]) == (0.0, False, False, None)
    assert info["period_seconds"] > 0 and env.timing()["steps"] == 1


def test_an_action_that_is_none_moves_nothing(toy: ToyRobot):
    env = env_of(toy)
    env.reset()
    toy.asked.clear()
    for wrong in (np.zeros(6), act(x=np.nan)):
        with pytest.raises(ConfigError, match="an action here is 7 finite numbers"):
            env.step(wrong)
    assert toy.asked == []


def test_a_refused_pose_ends_the_step_with_the_servers_sentence(toy: ToyRobot):
    env = env_of(toy)
    env.reset()
    toy.refusals["pose"] = (400, "outside the workspace")
    with pytest.raises(RequestError, match="outside the workspace"):
        env.step(STILL)
    del toy.refusals["pose"]
    for wrong in (b'{"pose": [1, 2]}', b'{"pose": [1, [2]]}', b'{"vel": 0}', b"[]"):
        toy.raw["getstate"] = ("application/json", wrong)
        with pytest.raises(RequestError, match="/getstate: pose is not 7 finite numbers"):
            env.step(STILL)


def test_robot_env_reports_a_dead_server_and_continues_with_a_restarted_one():
    with ToyRobot() as toy:
        env = env_of(toy)
        env.reset()
        toy.drop_after_reply, port = True, int(toy.url.rpartition(":")[2])
        env.step(act(x=1))
    with pytest.raises(RefusedError, match=r"no robot server answers .* Start one: hilt serve-robot"):
        env.step(act(x=1))
    with ToyRobot(port=port):
        env.reset()
        assert env.step(act(x=1))[0]["state"]["tcp_pose"][0] > 0.5
    env.close()


def test_truncated_at_the_limit_terminated_at_the_target(toy: ToyRobot):
    """Upstream says done at both."""
    env = env_of(toy, step_limit=3, target_pose=[0.5, 0.0, 0.35, -np.pi, 0, 0], reward_threshold=[0.01] * 3 + [0.1] * 3)
    env.reset()
    ends = [env.step(STILL)[1:4] for _ in range(3)]
    assert ends == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]
    env.reset()
    env.step(act(z=1))
    _, reward, terminated, truncated, info = env.step(act(z=0.5))  # within 5 mm, and pi is -pi
    assert (reward, terminated, truncated, info["succeed"]) == (1.0, True, False, True)
    env.reset()
    env.step(act(z=1, ry=1))
    assert env.step(act(z=0.5))[4]["succeed"] is False  # 0.15 rad are too many


def test_robot_env_success_is_the_simulations(simulation: ToyRobot):
    env = env_of(simulation)
    env.reset()
    assert env.step(STILL)[1:3] == (0.0, False)
    assert simulation.scene is not None
    simulation.scene["succeed"] = True
    _, reward, terminated, truncated, info = env.step(STILL)
    assert (reward, terminated, truncated, info["succeed"]) == (1.0, True, False, True)


def test_the_command_stays_in_the_safety_box(toy: ToyRobot):
    low, high = [0.4, -0.1, 0.1, np.pi - 0.2, -0.1, -0.3], [0.6, 0.1, 0.35, np.pi + 0.1, 0.1, 0.3]
    env = env_of(toy, limit_low=low, limit_high=high)
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(20):
        direction = np.sign(rng.normal(size=7))
        for _ in range(2):
            env.step(direction)
    poses = toy.poses()
    assert (poses[:, :3] >= np.array(low[:3]) - 1e-9).all() and (poses[:, :3] <= np.array(high[:3]) + 1e-9).all()
    angles = np.array([to_euler(pose[3:]) for pose in poses])
    assert (np.abs(angles[:, 0]) >= low[3] - 1e-6).all() and (
        np.abs(angles[:, 1:]) <= np.array([0.1, 0.3]) + 1e-6
    ).all()
    assert (angles[:, 0] > 0).any() and (angles[:, 0] < 0).any()  # both sides of pi


def test_the_first_angles_size_is_limited_also_at_zero():
    """Upstream multiplies with the sign, and the sign of 0 is 0: a pose far outside passes as it is."""
    arm = ArmConnection(RobotConfig(), "", {}, 64)
    safe = arm.safe(np.array([0.5, 0, 0.3, *from_euler([0.0, 0, 0])]))
    np.testing.assert_allclose(to_euler(safe[3:])[0], 1.94)
    np.testing.assert_allclose(arm.safe(np.array([0.5, 0, 0.3, *from_euler([-1.0, 0, 0])]))[:3], [0.5, 0, 0.3])
    assert to_euler(arm.safe(np.array([0.5, 0, 0.3, *from_euler([-1.0, 0, 0])]))[3:])[0] == pytest.approx(-1.94)


@pytest.mark.parametrize(("lead", "most"), [([0.02, 0.1], 0.05), ([0.0, 0.0], 0.03)])
def test_the_command_does_not_run_away_from_a_blocked_arm(toy: ToyRobot, lead: list[float], most: float):
    env = env_of(toy, lead=lead)
    env.reset()
    toy.blocked, start = True, np.array(toy.pose)
    for _ in range(6):
        env.step(act(x=1, rz=1))
    command = toy.poses()[-1]
    assert command[0] - start[0] == pytest.approx(most)
    turn = Rotation.from_quat(command[3:]) * Rotation.from_quat(start[3:]).inv()
    assert turn.magnitude() == pytest.approx(lead[1] + 0.15, abs=1e-3)


def test_a_sagging_arm_does_not_sink(toy: ToyRobot):
    """Upstream counts from the measured pose: an arm that hangs 1 mm below its command goes down 1 mm a step."""
    sunk = {}
    for lead in (0.02, 0.0):
        env = env_of(toy, lead=[lead, lead])
        toy.sag = 0.0
        env.reset()
        toy.sag, start = 0.001, toy.pose[2]
        for _ in range(5):
            env.step(STILL)
        sunk[lead] = start - toy.poses()[-1][2]
    assert sunk[0.02] == pytest.approx(0, abs=1e-9) and sunk[0.0] == pytest.approx(0.004, abs=1e-6)


def test_the_gripper_does_not_stop_the_loop_and_is_not_hurried(toy: ToyRobot):
    """Upstream sleeps for 0.6 s in the middle of a step, and forgets what comes sooner than that."""
    env = env_of(toy, gripper_seconds=0.5)
    env.reset()
    grips = [-1.0, -1.0, -0.4, 1.0, -1.0, 1.0, *[0.0] * 30]
    for grip in grips:
        env.step(act(grip=grip))
    sent = [(route, began) for route, _, began, _ in toy.asked if "gripper" in route]
    assert [route for route, _ in sent] == ["close_gripper", "open_gripper"]  # once each; the newest wish counts
    assert sent[1][1] - sent[0][1] >= 0.49
    between = [began for route, _, began, _ in toy.asked if route == "pose" and sent[0][1] < began < sent[1][1]]
    assert between, "the arm was still commanded"


def test_the_rate_is_kept_whatever_the_policy_takes(toy: ToyRobot):
    """With a clock of its own: a busy machine has no part in it."""
    clock = itertools.count(100.0, 0.001)  # a millisecond goes by at each look
    late = [0.0]

    def sleep(seconds: float) -> None:
        late[0] += seconds

    env = env_of(toy, hz=20.0)
    env._rate = Rate(20.0, lambda: next(clock) + late[0], sleep)
    env.reset()
    began = next(clock) + late[0]
    for _ in range(10):
        late[0] += 0.02  # a policy thinks
        env.step(STILL)
    seconds, timing = next(clock) + late[0] - began, env.timing()
    assert (
        timing["steps"] == 10 and timing["nominal"] == 0.05 and timing["p50"] <= timing["p99"] <= timing["max"] < 0.06
    )
    assert 0.48 < seconds < 0.52 and not timing["missed"], "no drift: upstream's would take 0.7 s"


# --- cameras, settings ---


def test_images_are_cropped_and_resized(simulation: ToyRobot):
    cameras = {
        "front": CameraConfig(),
        "side": CameraConfig(source="a_long_name", height=40, width=60, crop=[8, 24, 10, 26]),
        "wrist": CameraConfig(height=64, width=32),
    }
    env = env_of(simulation, cameras=cameras, image_size=16)
    obs, _ = env.reset()
    assert env.observation_space.contains(obs)
    np.testing.assert_array_equal(obs["images"]["front"][:, 0, 0], np.arange(16) + len("front"))
    np.testing.assert_array_equal(obs["images"]["side"][:, 0, 0], np.arange(8, 24) + len("a_long_name"))
    np.testing.assert_allclose(obs["images"]["wrist"][:, 0, 0], np.arange(16) * 4 + 1.5 + len("wrist"), atol=1)
    assert simulation.bodies("image")[1] == {"camera": "a_long_name", "height": 40, "width": 60}


def test_robot_config_documents_every_setting():
    for kind in (RobotConfig, CameraConfig):
        assert [key for key, _, _, meaning in describe(kind) if not meaning] == []
        assert len(describe(kind)) == len(dataclasses.fields(kind))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"action_scale": [0.1]}, r"action_scale=\[0.1\]: expected 2 numbers"),
        ({"target_pose": [1.0] * 7}, "target_pose=.*: expected 6 numbers"),
        ({"limit_low": [0.9, 0, 0, 0, 0, 0]}, "low above high"),
        ({"reset_pose": [0.1, 0, 0.3, 3.14, 0, 0]}, "reset_pose=.* is outside"),
        ({"random_reset": [0.1, 0]}, "random_reset=.* would do nothing: it needs reset_pose"),
        ({"precision": {"translational_Ki": 1.0}}, "precision=.* would do nothing: it needs reset_pose"),
        ({"gripper_at_reset": "ajar"}, "no gripper_at_reset named 'ajar'. Known: close, leave, open"),
        ({"hz": 0.0}, "hz=0.0: expected a number above 0"),
        ({"image_size": 64}, "image_size=64 is of pictures, and there are no cameras"),
        ({"step_limit": 0}, "step_limit=0: expected a whole number of at least 1"),
        ({"request_seconds": float("nan")}, "request_seconds=nan: expected a number above 0"),
        ({"joint_reset_period": -1}, "joint_reset_period=-1: expected a whole number of at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], sentence: str):
    with pytest.raises((ConfigError, UnknownNameError), match=sentence):
        RobotEnv(RobotConfig(**settings))


def test_tasks_by_name(tmp_path: Path):
    env = robot_task("10.0.0.5:5000", hz=20, cameras=["front", "wrist"])
    assert isinstance(env, RobotEnv) and env.config.url == "http://10.0.0.5:5000" and env.config.hz == 20.0
    assert list(env.observation_space["images"]) == ["front", "wrist"]
    (tmp_path / "arm.yaml").write_text("url: https://arm:1\ncameras:\n  top: {kind: realsense, source: '1234'}\n")
    env = robot_task(str(tmp_path / "arm.yaml"), image_size=32)
    assert (
        isinstance(env, RobotEnv)
        and env.config.url == "https://arm:1"
        and env.observation_space["images"]["top"].shape == (32, 32, 3)
    )
    dual = robot_task("a:1,b:2", cameras={"front": {"height": 9}, "left/wrist": {}, "right/wrist": {}}, step_limit=9)
    assert isinstance(dual, DualRobotEnv) and [arm.config.url for arm in dual.arms] == ["http://a:1", "http://b:2"]
    assert list(dual.observation_space["images"]) == ["front", "left/wrist", "right/wrist"] and dual.step_limit == 9
    assert dual.arms[0].camera_configs["front"].height == 9
    with pytest.raises(ConfigError, match="no setting named 'hzz'; did you mean 'hz'"):
        robot_task("a:1", hzz=3)
    with pytest.raises(ConfigError, match="3 arms were given"):
        robot_task("a:1,b:2,c:3")
    with pytest.raises(ConfigError, match="http://a:1 is given for both arms"):
        robot_task("a:1,a:1/")


# --- two arms ---


@pytest.fixture
def two():
    with ToyRobot() as left, ToyRobot() as right:
        yield left, right


def dual_of(
    two: tuple[ToyRobot, ToyRobot], left: dict[str, Any] | None = None, right: dict[str, Any] | None = None
) -> DualRobotEnv:
    settings = [
        RobotConfig(url=robot.url, **{**FAST, **AWAY, **(own or {})})
        for robot, own in zip(two, (left, right), strict=True)
    ]
    return DualRobotEnv(settings[0], settings[1])


def test_two_arms_at_the_same_time(two: tuple[ToyRobot, ToyRobot]):
    env = dual_of(two)
    obs, _ = env.reset()
    assert env.observation_space.contains(obs) and env.action_space.shape == (14,)
    assert len(obs["state"]) == 10 and {key.split("/")[0] for key in obs["state"]} == {"left", "right"}
    starts, both = [np.array(robot.pose) for robot in two], threading.Barrier(2, timeout=60)
    for robot in two:
        robot.asked.clear()
        robot.delays["pose"] = 0.3
        robot.waits["pose"] = both
    obs, *_ = env.step(np.concatenate([act(x=1), act(y=-1)]))
    np.testing.assert_allclose(two[0].pose[:3] - starts[0][:3], [0.03, 0, 0], atol=1e-9)
    np.testing.assert_allclose(two[1].pose[:3] - starts[1][:3], [0, -0.03, 0], atol=1e-9)
    np.testing.assert_allclose(obs["state"]["right/tcp_pose"], two[1].pose, rtol=1e-6, atol=1e-7)
    left, right = (next((began, ended) for route, _, began, ended in robot.asked if route == "pose") for robot in two)
    assert max(left[0], right[0]) < min(left[1], right[1])  # one did not wait for the other


def test_the_reward_needs_both_arms_and_the_end_one(two: tuple[ToyRobot, ToyRobot]):
    env = dual_of(two, {"target_pose": [0.5, 0.0, 0.33, np.pi, 0, 0]}, {"target_pose": [0.5, 0.0, 0.27, np.pi, 0, 0]})
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.concatenate([act(z=1), STILL]))
    assert (reward, terminated, truncated, info["succeed"]) == (0.0, True, False, False)
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.concatenate([act(z=1), act(z=-1)]))
    assert (reward, terminated, truncated, info["succeed"]) == (1.0, True, False, True)
    one = dual_of(two, {"target_pose": [0.5, 0.0, 0.33, np.pi, 0, 0]})  # the other arm has no target, and no say
    one.reset()
    assert one.step(np.zeros(14))[1:3] == (0.0, False)
    assert one.step(np.concatenate([act(z=1), STILL]))[1:3] == (1.0, True)


def test_dual_arm_settings_are_shared_once_or_equal(two: tuple[ToyRobot, ToyRobot]):
    with pytest.raises(
        ConfigError, match=r"hz is 50.0 for the left arm and 20.0 for the right one; it belongs to both"
    ):
        dual_of(two, right={"hz": 20.0})
    assert dual_of(two, {"step_limit": 3}).step_limit == 3
    assert dual_of(two, {"step_limit": 3}, {"step_limit": 3}).step_limit == 3


def test_dual_arm_error_is_raised_when_both_arms_have_ended(two: tuple[ToyRobot, ToyRobot]):
    env = dual_of(two)
    env.reset()
    two[0].refusals["pose"], two[1].delays["pose"] = (409, "arm 0 is in mode 'reset'"), 0.3
    two[1].asked.clear()
    with pytest.raises(RefusedError, match="in mode 'reset'"):
        env.step(np.zeros(14))
    assert two[1].routes == ["clearerr", "pose"]
    env.close()
    two[0].refusals.clear()
    assert env.reset()[1]["split"] == "train", "closed, it may be used again"
    env.close()


# --- the real server ---


def test_the_simulated_bench_behind_its_server_is_the_tabletop_task():
    from hilt.envs.tabletop.suite_env import TabletopEnv
    from hilt.envs.task import make
    from hilt.robot.robot_server import RobotServer

    bench = TabletopEnv("pick", image_size=16)
    begun, _ = bench.reset(options={"split": "eval", "state": 3})
    moves = [act(x=1, y=-1, rz=0.5)] * 4 + [act(z=-1, grip=-1)] * 3 + [STILL] * 6
    for move in moves:
        expected, *_ = bench.step(move)
    cameras = {"front": {"deadline_seconds": 60}, "wrist": {"deadline_seconds": 60}}
    with RobotServer("tabletop", {"task": "pick"}, port=0) as server:
        # Slower than the bench, so that the arm has time to get there; and slower still when it was late all the same,
        # for a busy machine simulates slowly: an arm that is measured before it moved is given less motion, by `lead`.
        for hz in (5.0, 2.0, 1.0, 0.5):
            env = make(f"robot/{server.urls[0]}", cameras=cameras, image_size=16, hz=hz, request_seconds=60)
            obs, info = env.reset(options={"split": "eval", "state": 3})
            assert info == {"succeed": False, "split": "eval", "state": 3}
            np.testing.assert_allclose(obs["state"]["tcp_pose"], begun["state"]["tcp_pose"], atol=2e-3)
            for move in moves:
                obs, reward, terminated, truncated, info = env.step(move)
                assert env.observation_space.contains(obs)
            if np.abs(obs["state"]["tcp_pose"] - expected["state"]["tcp_pose"]).max() < 0.01:
                break
            env.close()
        assert (env.instruction, env.step_limit) == (bench.instruction, bench.step_limit)
        assert env.observation_space == bench.observation_space and env.action_space == bench.action_space
        np.testing.assert_allclose(obs["state"]["tcp_pose"], expected["state"]["tcp_pose"], atol=0.01)
        assert obs["state"]["gripper_pose"][0] < 0.5 and (reward, terminated, truncated) == (0.0, False, False)
        assert np.abs(obs["images"]["wrist"].astype(int) - expected["images"]["wrist"]).mean() < 20
        with pytest.raises(RequestError, match="state"):
            env.unwrapped.arms[0].client.post("scene", {"split": "eval", "state": 999})
        env.close()
    bench.close()


def test_emergency_stop_of_the_server_is_seen_pressed_and_released():
    from hilt.robot.robot_server import RobotServer

    with RobotServer("tests.envs.toy_arm:ToyArm", {"home_ticks": "1000000"}, port=0) as server:
        env = RobotEnv(RobotConfig(url=server.urls[0], hz=50, request_seconds=60))
        start, _ = env.reset()
        assert "estop" not in env.step(act(y=1))[4] and not env.is_estopped()
        env.estop()
        at = env.look()["state"]["tcp_pose"]
        for move in (act(y=1), act(y=1, grip=-1), act(z=1)):
            now, _, terminated, truncated, info = env.step(move)
            assert info["estop"] and not terminated and not truncated
            np.testing.assert_array_equal(now["state"]["tcp_pose"], at)
        assert env.is_estopped() and now["state"]["gripper_pose"] == start["state"]["gripper_pose"]
        with pytest.raises(EmergencyStopError, match="refused with status 412: the emergency stop is latched"):
            env.reset()
        env.release_estop()
        assert "estop" not in env.step(act(y=1))[4]
        stopper = threading.Timer(0.2, env.estop)  # by another thread, while the joints are reset for ever
        stopper.start()
        with pytest.raises(EmergencyStopError, match="412"):
            env.reset(options={"joint_reset": True})
        stopper.join(60)
        env.close()


def test_a_pose_stands_for_a_control_period_and_a_little(toy: ToyRobot):
    """An arm whose client or network is gone holds before the heartbeat."""
    env = env_of(toy, hz=20.0)
    env.reset()
    env.step(act(x=1))
    assert toy.bodies("pose")[-1]["stands"] == pytest.approx(0.1)


def test_two_simulated_arms_behind_two_ports():
    from hilt.envs.task import check_task
    from hilt.robot.robot_server import RobotServer

    with RobotServer("tabletop", {"task": "lift_tray"}, port=0) as server:
        env = robot_task(
            ",".join(server.urls),
            hz=20,
            step_limit=10,
            image_size=16,
            request_seconds=60,
            cameras={"front": {"deadline_seconds": 60}},
        )
        for _ in range(20):  # on a busy machine, which simulates slowly, again
            obs, _ = env.reset(options={"split": "train", "state": 0})
            assert env.observation_space.contains(obs)
            for _ in range(8):
                now, *_ = env.step(np.concatenate([act(z=1), act(z=1, grip=-1)]))
            rises = [now["state"][f"{at}/tcp_pose"][2] - obs["state"][f"{at}/tcp_pose"][2] for at in ("left", "right")]
            if min(rises) > 0.05 and now["state"]["right/gripper_pose"][0] < 0.9:
                break
        assert min(rises) > 0.05
        assert now["state"]["right/gripper_pose"][0] < 0.9 < now["state"]["left/gripper_pose"][0]
        assert check_task(env, tolerance=1e-3) == []
        env.close()
