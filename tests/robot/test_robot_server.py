"""The robot server by real HTTP: every route, what is refused, who is in control,
and what happens when a process dies."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.errors import ConfigError, HiltError, RequestError
from hilt.core.web import own_address
from hilt.envs.rotations import from_euler, to_euler
from hilt.robot import http_server, robot_server
from hilt.robot import request_auth as door
from hilt.robot.control import ArmLimits
from hilt.robot.request_auth import MAKE_TOKEN
from hilt.robot.robot_server import RobotServer
from hilt.robot.routes import COMMANDS, READS, Refusal
from tests.effort import sampled
from tests.envs.robot_clients import HILT, Client, Refused, serve_robot
from tests.envs.robot_load import load
from tests.envs.toy_arm import HOME
from tests.wire.processes import free_ports_in_a_row

DEADLINE_S = 120.0  # only so that nothing hangs: the machine may be busy
TOY, DUAL = "tests.envs.toy_arm:ToyArm", "handover"
STATE = {
    "pose": (7,),
    "vel": (6,),
    "force": (3,),
    "torque": (3,),
    "q": (7,),
    "dq": (7,),
    "jacobian": (6, 7),
    "gripper_pos": (),
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy") / "journal"


@pytest.fixture(scope="module")
def toy_url(journal: Path) -> Iterator[str]:
    with RobotServer(TOY, {"journal": str(journal)}, port=0) as server:
        yield server.urls[0]


@pytest.fixture(scope="module")
def tabletop_url() -> Iterator[str]:
    with RobotServer("tabletop", {"task": "reach"}, port=0) as server:
        yield server.urls[0]


@pytest.fixture
def toy(toy_url: str) -> Iterator[Client]:
    client = Client(toy_url)
    yield client
    client.close()


@pytest.fixture
def tabletop(tabletop_url: str) -> Iterator[Client]:
    client = Client(tabletop_url)
    yield client
    client.close()


def refused(client: Client, path: str, body: Any = None, **how: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        client.post(path, body, **how)
    assert "\n" not in caught.value.sentence, "one sentence"
    return caught.value


# --- routes
# ----------------------------------------------------------------------------------------------------------------------


def test_the_requests_of_hil_serls_client_one_by_one(tabletop: Client) -> None:
    """Spec A8: constructor, reset, a step, a step that closes the gripper.
    Interpolated quaternions are not of length one."""
    stiff = {
        "translational_stiffness": 2000,
        "translational_damping": 89,
        "rotational_Ki": 0,
        "translational_clip_neg_x": 0.01,
    }

    def check_state() -> Any:
        state = tabletop.post("/getstate")
        assert {name: np.shape(value) for name, value in state.items()} == STATE
        return state

    def move(pose: Any) -> None:
        assert tabletop.post("/clearerr") == "Clear"
        assert tabletop.post("/pose", {"arr": np.asarray(pose, np.float32).tolist()}) == "Moved"

    start = np.array(check_state()["pose"])
    assert tabletop.post("/update_param", stiff) == "Updated compliance parameters"
    assert tabletop.post("/clearerr") == "Clear"
    check_state()
    move(start)
    assert tabletop.post("/update_param", stiff) == "Updated compliance parameters"
    check_state()
    # the far sign: the way between leads through short quaternions
    goal = np.array([0.5, 0.05, 0.2, *-from_euler([np.pi, 0, 0.4])])
    path = np.linspace(start, goal, 10)
    assert np.linalg.norm(path[:, 3:], axis=1).min() < 0.5
    for pose in path:
        move(pose)
        time.sleep(0.02)
    check_state()
    assert tabletop.post("/update_param", stiff) == "Updated compliance parameters"
    assert tabletop.post("/clearerr") == "Clear"
    check_state()
    move(goal)
    check_state()
    assert tabletop.post("/close_gripper") == "Closed"
    move(goal)
    check_state()


def test_every_route_is_asked_here() -> None:
    assert {path for path, *_ in GOOD} | {"/getpos_euler"} == {*READS, *COMMANDS}


GOOD: list[tuple[str, Any, Any, str]] = [
    # route, body, answer (a text, or the shapes of the values), what the backend was asked for
    ("/getstate", None, STATE, ""),
    ("/getpos", None, {"pose": (7,)}, ""),
    ("/getvel", None, {"vel": (6,)}, ""),
    ("/getforce", None, {"force": (3,)}, ""),
    ("/gettorque", None, {"torque": (3,)}, ""),
    ("/getq", None, {"q": (7,)}, ""),
    ("/getdq", None, {"dq": (7,)}, ""),
    ("/getjacobian", None, {"jacobian": (6, 7)}, ""),
    ("/get_gripper", None, {"gripper": ()}, ""),
    ("/clearerr", None, "Clear", "clear_errors"),
    ("/pose", {"arr": HOME.tolist()}, "Moved", ""),
    ("/pose", {"arr": [0.8000000119, 0.4, 0, 0, 0.9, 0, 0]}, "Moved", ""),  # the edge, as float32 has it
    ("/open_gripper", None, "Opened", "grip 1.0 False"),
    ("/close_gripper", None, "Closed", "grip 0.0 False"),
    ("/close_gripper_slow", None, "Closed", "grip 0.0 True"),
    ("/move_gripper", {"gripper_pos": 51}, "Moved Gripper", "grip 0.8 False"),
    ("/move_gripper", {"gripper_pos": 400}, "Moved Gripper", "grip 0.0 False"),
    ("/move_gripper", {"gripper_pos": -3.0}, "Moved Gripper", "grip 1.0 False"),
    ("/activate_gripper", None, "Activated", "activate_gripper"),
    ("/reset_gripper", None, "Reset", "grip 1.0 False"),
    ("/update_param", {}, "Updated compliance parameters", "set_parameters"),
    (
        "/update_param",
        {"rotational_clip_neg_z": 0.5},
        "Updated compliance parameters",
        "set_parameters ('rotational_clip_neg_z', 0.5)",
    ),
    (
        "/set_load",
        {"mass": 0.5, "F_x_center_load": [0, 0, 0.1], "load_inertia": [0] * 9},
        "Set Load",
        "set_load 0.5 [0.0, 0.0, 0.1] [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]",
    ),
    ("/jointreset", None, "Reset Joint", "reset_joints"),
    ("/reset", None, "Reset", "reset_joints"),
    ("/stopimp", None, "Stopped impedance", "stop"),
    ("/startimp", None, "Started impedance", "start"),
    ("/startwrench", None, "Started wrench", "start"),
    ("/wrench", {"arr": [0, 0, -5, 0, 0, 0]}, "Moved", ""),
    ("/stopwrench", None, "Stopped wrench", "hold"),
]


def test_every_route_answers_as_hil_serls_server_and_reaches_the_backend(toy: Client, journal: Path) -> None:
    for path, body, answer, asked in GOOD:
        journal.write_text("")
        given = toy.post(path, body)
        if isinstance(answer, str):
            assert given == answer, path
        else:
            assert {name: np.shape(value) for name, value in given.items()} == answer, path
        if asked:
            assert asked in journal.read_text().splitlines(), path
    assert toy.post("/getpos_euler")["pose"] == pytest.approx([*HOME[:3], *to_euler(HOME[3:])])


@pytest.mark.parametrize(
    ("path", "raw", "status", "sentence"),
    [
        ("/pose", "", 400, "expected a JSON object with 'arr', got {}"),
        ("/pose", "{", 400, "/pose: the body is not JSON"),
        ("/pose", "\xff", 400, "/pose: the body is not JSON"),
        ("/pose", "[" * 20000, 400, "/pose: the body is not JSON"),
        ("/pose", "[1, 2]", 400, "expected a JSON object, got [1, 2]"),
        (
            "/pose",
            '{"arr": [0.5, 0, 0.3, 1, 0, 0]}',
            400,
            "arr: expected a list of 7 numbers, x y z and a quaternion x y z w; got 6.",
        ),
        ("/pose", '{"arr": "0.5"}', 400, "got '0.5'"),
        ("/pose", '{"arr": [0.5, 0, NaN, 1, 0, 0, 0]}', 400, "arr[2]: expected a finite number, got nan."),
        ("/pose", '{"arr": [0.5, 0, 0.3, 1, 0, 0, -Infinity]}', 400, "arr[6]: expected a finite number, got -inf."),
        (
            "/pose",
            '{"arr": [1' + "0" * 400 + ", 0, 0.3, 1, 0, 0, 0]}",
            400,
            "arr[0]: expected a finite number, got an integer of hundreds",
        ),
        ("/pose", '{"arr": [0.5, 0, 0.3, 1e308, 1e308, 1e308, 0]}', 400, "arr[3]: expected a finite number"),
        ("/pose", '{"arr": [0.5, "a", 0.3, 1, 0, 0, 0]}', 400, "arr[1]: expected a number, got 'a'."),
        ("/pose", '{"arr": [0.5, true, 0.3, 1, 0, 0, 0]}', 400, "arr[1]: expected a number, got True."),
        ("/pose", '{"arr": [0.5, null, 0.3, 1, 0, 0, 0]}', 400, "arr[1]: expected a number, got None."),
        (
            "/pose",
            '{"arr": [0.5, 0, 0.3, 0, 0, 0, 0]}',
            400,
            "expected a quaternion of length 1 in its last four numbers, got [0.0, 0.0",
        ),
        ("/pose", '{"arr": [0.5, 0, 0.3, 2, 0, 0, 0]}', 400, "of length 2."),
        (
            "/pose",
            '{"arr": [0.9, 0, 0.3, 1, 0, 0, 0]}',
            400,
            "is outside the workspace; expected x y z from (0.2 -0.4 0) to (0.8 0.4 0.6)",
        ),
        (
            "/pose",
            '{"arr": [0.5, 0, 0.3, 1, 0, 0, 0], "stands": 0}',
            400,
            "stands: expected a number of seconds above 0",
        ),
        ("/wrench", '{"arr": [1, 2, 3]}', 400, "arr: expected a list of 6 numbers, a force and a torque; got 3."),
        ("/move_gripper", "{}", 400, "expected a JSON object with 'gripper_pos'"),
        ("/move_gripper", '{"gripper_pos": "open"}', 400, "gripper_pos: expected a number, got 'open'."),
        ("/update_param", '{"translational_stifness": 1}', 400, "did you mean 'translational_stiffness'?"),
        (
            "/update_param",
            '{"translational_stiffness": -1}',
            400,
            "translational_stiffness: expected a number of 0 or more, got -1.",
        ),
        ("/update_param", '{"rotational_Ki": 1}', 400, "rotational_Ki: the toy has none."),
        (
            "/pose",
            '{"arr": [0.5, 0, 0.3, 1, 0, 0, 0], "speed": 0.1}',
            400,
            "'speed' is not known here. Expected arr, stands.",
        ),
        ("/status", '{"second": 1}', 400, "'second' is not known here; did you mean 'seconds'? Expected seconds."),
        ("/status", '{"\\ud800\\n": 1}', 400, "'\\ud800\\n' is not known here"),
        ("/p%0Aose", "", 404, "no route '/p\\nose'; did you mean '/pose'?"),
        ("/set_load", '{"mass": -1}', 400, "mass: expected kilograms, 0 or more, got -1.0."),
        (
            "/set_load",
            '{"mass": 1, "F_x_center_load": [0, 0, 0], "load_inertia": [0]}',
            400,
            "load_inertia: expected a list of 9 numbers",
        ),
        ("/status", '{"seconds": 0}', 400, "seconds: expected a number above 0"),
        ("/image", '{"camera": "front", "height": 64, "width": 64}', 404, "/image: this backend is no simulation"),
        ("/scene", "{}", 404, "/scene: this backend is no simulation"),
        ("/psoe", "", 404, "no route '/psoe'; did you mean '/pose'?"),
        ("/pose", "x" * 70000, 413, "expected a body of at most 65536 bytes."),
    ],
)
def test_invalid_requests_are_refused_with_a_sentence(
    toy_url: str, path: str, raw: str, status: int, sentence: str
) -> None:
    client = Client(toy_url)
    before = client.post("/getpos")["pose"]
    problem = refused(client, path, raw=raw.encode("latin-1"))
    assert problem.status == status and sentence in problem.sentence
    assert Client(toy_url).post("/getpos")["pose"] == before


def test_routes_are_post_only(toy: Client) -> None:
    assert refused(toy, "/getstate", method="GET").sentence == "/getstate: expected POST, got GET."


def test_backend_without_a_method_gives_501(tabletop: Client) -> None:
    load = {"mass": 1, "F_x_center_load": [0, 0, 0], "load_inertia": [0] * 9}
    problem = refused(tabletop, "/set_load", load)
    assert (
        problem.status == 501
        and "TabletopBackend cannot make up for a load; expected mass 0, got 1.0." in problem.sentence
    )
    assert tabletop.post("/set_load", {**load, "mass": 0}) == "Set Load"


def test_a_stopped_arm_takes_no_pose(toy: Client) -> None:
    toy.post("/stopimp")
    problem = refused(toy, "/pose", {"arr": HOME.tolist()})
    assert (problem.status, problem.sentence) == (409, "arm 0 is in mode 'stopped': POST /startimp first.")
    toy.post("/startimp")
    found: list[Refused] = []

    def follows() -> bool:
        """A machine that stands still takes longer than the arm follows a pose: then a wrench is taken."""
        assert toy.post("/pose", {"arr": HOME.tolist()}) == "Moved"
        try:
            toy.post("/wrench", {"arr": [0] * 6})
        except Refused as problem:
            found.append(problem)
        toy.post("/startimp")
        return bool(found)

    wait_for(follows)
    assert found[0].status == 409 and "'follow': ask again when poses have ceased" in found[0].sentence


def test_emergency_stop_beats_who_controls_the_arm_until_it_is_released(toy: Client, toy_url: str) -> None:
    other = Client(toy_url, source="127.0.0.2")
    toy.post("/pose", {"arr": [0.6, *HOME[1:]]})
    assert other.post("/estop") == "Stopped", "without a lease"
    at = toy.post("/getpos")
    for path, body in (("/pose", {"arr": HOME.tolist()}), ("/clearerr", None), ("/open_gripper", None), ("/reset", {})):
        problem = refused(toy, path, body)
        assert problem.status == 412 and problem.sentence.startswith("the emergency stop is latched"), path
    assert toy.post("/status")["mode"] == "estop" and toy.post("/getpos") == at, "and it can be looked at"
    assert other.post("/release_estop") == "Released" and toy.post("/status")["mode"] == "hold"
    assert toy.post("/pose", {"arr": HOME.tolist(), "stands": 0.1}) == "Moved"
    other.close()


# --- by HTTP and in real time
# -----------------------------------------------------------------------------------------------------


def test_silence_holds_the_arm_and_the_next_pose_resumes(tabletop: Client) -> None:
    tabletop.post("/scene", {"split": "train", "state": 0})
    start = np.array(tabletop.post("/getpos")["pose"])
    goal = start + np.array([0.1, 0.3, 0, 0, 0, 0, 0])
    command(tabletop, goal, lambda at: np.linalg.norm(at - start[:3]) > 0.05)
    wait_for(lambda: tabletop.post("/status")["mode"] == "hold")  # nobody asked for it
    held = still(tabletop)
    assert np.linalg.norm(held - goal[:3]) > 0.03, "before it was there"
    time.sleep(0.5)
    assert tabletop.post("/getpos")["pose"][:3] == pytest.approx(held, abs=0.002)
    assert tabletop.post("/status")["mode"] == "hold"
    command(tabletop, goal, lambda at: np.linalg.norm(at - goal[:3]) < 0.01)


def command(client: Client, pose: Any, until: Callable[[Any], Any]) -> None:
    """Asks for a pose again and again until the arm is where it should be: on a
    busy machine that takes more than its time."""

    def there() -> bool:
        client.post("/pose", {"arr": np.asarray(pose).tolist()})
        time.sleep(0.02)
        return bool(until(np.array(client.post("/getpos")["pose"][:3])))

    wait_for(there)


def still(client: Client) -> Any:
    """Where the arm is when it has come to rest."""
    places: list[Any] = [np.full(3, np.inf)]

    def rests() -> bool:
        time.sleep(0.1)
        places.append(np.array(client.post("/getpos")["pose"][:3]))
        return bool(np.linalg.norm(places[-1] - places[-2]) < 1e-4)

    wait_for(rests)
    return places[-1]


def test_reading_is_no_command(toy: Client) -> None:
    """Whoever only reads does not keep the arm moving."""
    deadline = time.monotonic() + DEADLINE_S
    while toy.post("/status")["mode"] != "follow":
        toy.post("/pose", {"arr": [0.3, 0.3, 0.1, 1, 0, 0, 0]})
        assert time.monotonic() < deadline
    while toy.post("/status")["mode"] == "follow":
        toy.post("/getstate")
        assert time.monotonic() < deadline


def test_one_controller_at_a_time(toy_url: str) -> None:
    one, two = Client(toy_url), Client(toy_url, source="127.0.0.2")
    deadline = time.monotonic() + DEADLINE_S
    while True:  # a loaded machine may take longer than a heartbeat between the two
        one.post("/pose", {"arr": HOME.tolist()})
        try:
            two.post("/clearerr")
        except Refused as problem:
            assert problem.status == 423
            assert (
                "arm 0 is controlled by 127.0.0.1, for 0." in problem.sentence
                and "127.0.0.2 may have it after that" in problem.sentence
            )
            break
        assert time.monotonic() < deadline
        time.sleep(0.4)
    assert two.post("/getstate")["gripper_pos"] is not None, "reading is free"
    refused(two, "/pose", raw=b"{}")
    time.sleep(0.5)
    assert two.post("/status")["controller"] is None
    assert two.post("/pose", {"arr": HOME.tolist()}) == "Moved"
    time.sleep(0.5)


def test_the_scene_and_its_pictures(tabletop: Client) -> None:
    asked = time.monotonic()
    facts = tabletop.post("/scene", {"task": "reach", "split": "test", "state": 99})
    assert (facts["split"], facts["state"], facts["task"], facts["succeed"]) == ("test", 99, "reach", False)
    assert facts["step_limit"] > 0 and facts["instruction"] and facts["time"] < time.monotonic() - asked + 0.5
    assert tabletop.post("/scene")["state"] == 99
    pictures = {
        camera: tabletop.post("/image", {"camera": camera, "height": 48, "width": 64}) for camera in ("front", "wrist")
    }
    front = np.frombuffer(pictures["front"], np.uint8).reshape(48, 64, 3)
    assert front.std() > 5 and pictures["front"] != pictures["wrist"]
    for path, body, sentence in (
        ("/scene", {"split": "train"}, "expected split and state together"),
        ("/scene", {"split": "train", "state": 50}, "states 0 to 49, not 50"),
        ("/scene", {"split": "live", "state": 5}, "has no split 'live'"),
        ("/scene", {"split": "train", "state": "5"}, "expected split, a name, and state, a number"),
        (
            "/scene",
            {"task": "pick", "split": "train", "state": 5},
            "this server has 'reach'; start another one with --task pick",
        ),
        ("/scene", {"seed": 5}, "'seed' is not known here. Expected task, split, state."),
        ("/scene", {"task": "\ud800"}, r"start another one with --task \ud800"),
        ("/image", {"camera": "top", "height": 64, "width": 64}, "no camera named 'top'. Known: front, wrist."),
        ("/image", {"camera": "front", "height": 64, "width": 64, "quality": 5}, "'quality' is not known here"),
        (
            "/image",
            {"camera": "front", "height": 64, "width": 4096},
            "expected a height and a width of 1 to 1024 pixels, got 64 and 4096.",
        ),
    ):
        assert sentence in refused(tabletop, path, body).sentence
    assert tabletop.post("/scene")["state"] == 99


def test_a_joint_reset_brings_the_arm_home(tabletop: Client) -> None:
    tabletop.post("/scene", {"split": "train", "state": 0})
    home = tabletop.post("/getpos")["pose"][:3]
    command(tabletop, [0.55, 0.1, 0.2, 1, 0, 0, 0], lambda at: np.linalg.norm(at - home) > 0.03)
    assert tabletop.post("/jointreset") == "Reset Joint"
    assert tabletop.post("/getpos")["pose"][:3] == pytest.approx(home, abs=0.01)


def test_a_reset_whose_client_leaves_is_ended(tmp_path: Path) -> None:
    with RobotServer(TOY, {"home_ticks": "1000000"}, port=0) as server:
        one, two = Client(server.urls[0]), Client(server.urls[0])
        one._connection.request("POST", "/jointreset")
        deadline = time.monotonic() + DEADLINE_S
        while two.post("/status")["mode"] != "reset":
            assert time.monotonic() < deadline
        assert "arm 0 is in mode 'reset'" in refused(two, "/pose", {"arr": HOME.tolist()}).sentence
        one.close()
        while two.post("/status")["mode"] != "hold":
            assert time.monotonic() < deadline


def test_controller_in_a_long_call_keeps_the_arm_with_a_short_heartbeat() -> None:
    with RobotServer(TOY, {"home_ticks": "1000000"}, port=0, limits=ArmLimits(heartbeat=0.09)) as server:
        one, two = Client(server.urls[0]), Client(server.urls[0], source="127.0.0.2")
        one._connection.request("POST", "/jointreset")
        deadline = time.monotonic() + DEADLINE_S
        while two.post("/status")["mode"] != "reset":
            assert time.monotonic() < deadline
        refusals = [refused(two, "/open_gripper").status for _ in range(50) if time.sleep(0.01) is None]
        assert refusals == [423] * 50
        one.close()


def test_a_command_without_an_answer_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(door.time, "monotonic", lambda: now)
    lease = door.Lease(0, 0.3)
    with lease.command("anna"):
        now += 60  # this process was not scheduled
        assert lease.holder() == "anna"
        with pytest.raises(Refusal, match=r"controlled by anna, for 0.30 s more at least; ben may have it after that"):
            lease.take("ben")
    now += 0.2
    assert lease.holder() == "anna"
    now += 0.2
    lease.take("ben")
    assert lease.holder() == "ben"


def test_a_server_at_a_taken_port_does_not_come_near_the_arm(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve at 127.0.0.1:{port}: .*Choose another --port"):
            RobotServer(TOY, {"journal": str(tmp_path / "journal")}, port=port)
    assert not (tmp_path / "journal").exists()


def test_two_arms_at_two_ports_share_a_world() -> None:
    with at_two_free_ports() as server:
        at = server.urls[0].removesuffix("/").rpartition(":")
        assert server.urls[1] == f"{at[0]}:{int(at[2]) + 1}/", "the second arm has the next port"
        left, right = (Client(url) for url in server.urls)
        assert [c.post("/status")["arm"] for c in (left, right)] == [0, 1]
        before = np.array(right.post("/getpos")["pose"])
        goal = np.array(left.post("/getpos")["pose"]) + np.array([0.04, 0, -0.04, 0, 0, 0, 0])
        command(left, goal, lambda at: np.linalg.norm(at - goal[:3]) < 0.01)
        assert right.post("/getpos")["pose"][:3] == pytest.approx(before[:3], abs=0.005)
        assert right.post("/status")["mode"] == "hold"
        right.post("/scene", {"split": "train", "state": 4})
        assert left.post("/scene")["state"] == 4, "one world"
        assert {"front", "left/wrist", "right/wrist"} <= set(left.post("/status")["cameras"])


def at_two_free_ports() -> RobotServer:
    return RobotServer("tabletop", {"task": DUAL}, port=free_ports_in_a_row(2))


# --- who may ask
# ------------------------------------------------------------------------------------------------------------------


def test_a_web_page_cannot_move_the_arm(toy_url: str) -> None:
    for headers, sentence in (
        ({"Origin": "http://evil.example"}, "this request comes from a web page"),
        ({"Origin": "null"}, "this request comes from a web page"),
        ({"Sec-Fetch-Site": "same-origin"}, "this request comes from a web page"),
        ({"Host": "evil.example:5000"}, "Host: expected localhost or a loopback address, got 'evil.example:5000'."),
        ({"Host": "127.0.0.1.evil.example"}, "Host: expected localhost"),
        ({"Host": ""}, "Host: expected localhost"),
        *(
            ({"Host": f"{host}evil.example"}, "Host: expected localhost")
            for host in ("[::1].", "[::1]", "[::1", "::1", "localhost:1@")
        ),
    ):
        problem = refused(Client(toy_url, headers=headers), "/open_gripper")
        assert problem.status == 403 and sentence in problem.sentence
    for host in ("localhost:1", "127.0.0.3", "[::1]:5000"):
        assert Client(toy_url, headers={"Host": host}).post("/get_gripper")


def test_controller_identity_cannot_be_forged_by_a_header(toy_url: str) -> None:
    client = Client(toy_url, headers={"X-Forwarded-For": "10.0.0.7"})
    deadline = time.monotonic() + DEADLINE_S
    while (controller := client.post("/clearerr") and client.post("/status")["controller"]) is None:
        assert time.monotonic() < deadline
    assert controller == "127.0.0.1"


def token_file(path: Path, token: str, mode: int = 0o600) -> Path:
    path.write_text(token + "\n")
    path.chmod(mode)
    return path


def test_beyond_loopback_a_token_is_needed(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "robot.local", "::"):
        with pytest.raises(
            ConfigError, match="every client that reaches the server can move the arm: make a token with"
        ):
            RobotServer(TOY, host=host, port=0)
    tokens = [token_file(tmp_path / f"{name}.token", f"{name}-0123456789abcdef") for name in ("anna", "ben")]
    with RobotServer(TOY, host="0.0.0.0", port=0, tokens=tokens) as server:
        port = server.urls[0].rpartition(":")[2]
        assert server.urls[0] == f"http://{own_address()}:{port}", "what another machine can use"
        url = f"http://127.0.0.1:{port}"
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer "},
            {"Authorization": "Basic anna-0123456789abcdef"},
        ):
            problem = refused(Client(url, headers=headers), "/getstate")
            assert problem.status == 401 and "expected the header 'Authorization: Bearer TOKEN'" in problem.sentence
        anna, ben = (Client(url, headers={"Authorization": f"Bearer {path.read_text().strip()}"}) for path in tokens)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            anna.post("/open_gripper")
            try:
                ben.post("/open_gripper")
            except Refused as problem:
                assert "arm 0 is controlled by anna@127.0.0.1" in problem.sentence
                break
            assert time.monotonic() < deadline
            time.sleep(0.4)


def test_a_token_is_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"others can read this token; expected mode 0600: chmod 600"):
        RobotServer(TOY, port=0, tokens=[token_file(tmp_path / "open.token", "x" * 30, 0o644)])
    with pytest.raises(ConfigError, match="expected one token of 16 characters or more"):
        RobotServer(TOY, port=0, tokens=[token_file(tmp_path / "short.token", "secret")])
    (tmp_path / "b").mkdir()
    twins = [token_file(tmp_path / "a.token", "x" * 30), token_file(tmp_path / "b" / "a.token", "y" * 30)]
    with pytest.raises(ConfigError, match="two tokens of the name 'a'"):
        RobotServer(TOY, port=0, tokens=twins)
    subprocess.run(MAKE_TOKEN, shell=True, check=True, cwd=tmp_path)
    assert robot_server.read_tokens([tmp_path / "robot.token"])["robot"]


def test_connections_are_few_and_never_idle_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_PER_ADDRESS", 3)
    with RobotServer(TOY, port=0) as server:
        at = ("127.0.0.1", int(server.urls[0].split(":")[-1].strip("/")))
        few = [socket.create_connection(at, DEADLINE_S) for _ in range(3)]
        with socket.create_connection(at, DEADLINE_S) as fourth:
            fourth.sendall(
                b"POST /getstate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            assert _all_of(fourth).startswith(b"HTTP/1.1 200 ")
        assert _all_of(few[0]) == b"", "one too many: the oldest that asked for nothing"
        for connection in few:
            connection.close()
        monkeypatch.setattr(http_server, "MAX_PER_ADDRESS", 100)
        monkeypatch.setattr(http_server, "IDLE_S", 0.5)
        monkeypatch.setattr(http_server, "FIRST_S", 1.5)
        monkeypatch.setattr(robot_server, "BODY_S", 0.5)
        starts = (
            b"",
            b"POST /getstate HTTP/1.1\r\nHost: loc",
            b"POST /pose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
        )
        slow = [socket.create_connection(at, DEADLINE_S) for _ in starts]
        for connection, start in zip(slow, starts, strict=True):
            connection.sendall(start)
        answers = [_all_of(connection) for connection in slow]  # each comes to its end
        assert answers[:2] == [b"", b""] and answers[2].startswith(b"HTTP/1.1 408 ")
        assert b"the request's body did not come in" in answers[2]
        assert Client(server.urls[0]).post("/get_gripper")


DRIBBLE = b"POST /pose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{"


@pytest.mark.parametrize("start", sampled([b"", b"POST /pose HTTP/1.1\r\nHo", DRIBBLE], b"", DRIBBLE))
@pytest.mark.parametrize("with_token", [False, True])
def test_many_connections_from_one_address_do_not_block_its_clients(
    start: bytes, with_token: bool, tmp_path: Path
) -> None:
    tokens = [token_file(tmp_path / "me.token", "t" * 32)] if with_token else []
    headers = {"Authorization": "Bearer " + "t" * 32} if with_token else {}
    with RobotServer(TOY, port=0, tokens=tokens) as server, contextlib.ExitStack() as crowd:
        at = ("127.0.0.1", int(server.urls[0].split(":")[-1].strip("/")))
        before = Client(server.urls[0], headers=headers)
        assert before.post("/getstate")
        held = before._connection.sock
        for _ in range(300):
            one = crowd.enter_context(socket.create_connection(at, DEADLINE_S))
            with contextlib.suppress(ConnectionError):  # it has been ended already
                one.sendall(start)
        for _ in range(3):  # newcomers
            assert Client(server.urls[0], headers=headers).post("/getstate")
        assert before.post("/getstate") and before._connection.sock is held, (
            "and who was there before keeps its connection"
        )


def _all_of(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(4096):
            data += part
    except ConnectionResetError:
        pass
    return data


# --- processes
# --------------------------------------------------------------------------------------------------------------------


def test_the_server_knows_nothing_of_replay_and_wire() -> None:
    script = """
import sys
from hilt.cli.servers import serve_robot
from hilt.robot import robot_server
from hilt.robot.backends import TabletopBackend
TabletopBackend("pick").tick(0.1)
print([name for name in sys.modules if name.startswith(("hilt.replay", "hilt.wire", "hilt.formats", "zmq"))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "[]\n"


def test_robot_server_errors_before_and_after_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` raises the first; the second is reported by the thread."""
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    server = RobotServer(TOY, port=0)
    try:

        async def serve(ready: Any = None) -> None:
            if serves:
                ready()
            raise ZeroDivisionError("no loop")

        monkeypatch.setattr(server, "serve", serve)
        serves = False
        with pytest.raises(ZeroDivisionError, match="no loop"):
            server.start()
        assert not reported
        serves = True
        server.start()
        assert server._thread is not None
        server._thread.join(DEADLINE_S)
        assert [str(one.exc_value) for one in reported] == ["no loop"]
    finally:
        server.stop()


def test_a_control_process_that_fails_is_reported_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with RobotServer(TOY, port=0) as server, caplog.at_level(logging.ERROR, "hilt.envs"):
        client = Client(server.urls[0])
        assert client.post("/getstate")
        problem = refused(client, "/update_param", {"rotational_Ki": 13})
        assert problem.status == 503 and "ZeroDivisionError: thirteen" in problem.sentence
        for path in ("/getstate", "/clearerr", "/status"):
            problem = refused(client, path)
            assert problem.status == 503
            assert "the control process has ended, and the arm is held: ZeroDivisionError: thirteen" in problem.sentence
        assert server.control.failure is not None and 'toy_arm.py", line' in server.control.failure
        assert "Traceback" in caplog.text and "in set_parameters" in caplog.text


def test_a_control_process_that_is_killed_or_hangs_is_reported() -> None:
    with RobotServer(TOY, port=0) as server:
        client, process = Client(server.urls[0]), server.control._process
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                client.post("/getstate")
            except Refused as problem:
                assert problem.status == 503 and "has published no state for" in problem.sentence
                break
            assert time.monotonic() < deadline
        process.kill()
        while "it was ended by signal 9" not in (said := refused(client, "/getstate").sentence):
            assert time.monotonic() < deadline
        assert "and did not report that the arm is held: check it" in said


def test_a_machine_that_was_paused_is_not_mistaken_for_a_backend_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robot_server, "LOOKS", int(100 * DEADLINE_S))
    with RobotServer(TOY, port=0) as server, ThreadPoolExecutor(1) as other:
        process = server.control._process
        process.send_signal(signal.SIGSTOP)
        time.sleep(robot_server.STALE_S + 0.1)
        asked = other.submit(Client(server.urls[0]).post, "/getstate")
        time.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        assert "pose" in asked.result(DEADLINE_S)


def test_control_process_that_ends_in_order_reports_that_the_arm_is_held() -> None:
    with RobotServer(TOY, port=0) as server:
        client, deadline = Client(server.urls[0]), time.monotonic() + DEADLINE_S
        server.control._process.terminate()
        while server.control.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "and the arm is held: it ended with code 0" in refused(client, "/getstate").sentence


def test_commands_of_disconnected_clients_are_not_executed_after_a_stall(tmp_path: Path) -> None:
    command = [*HILT, "serve-robot", "--backend", TOY, "--port", "0", "--set", f"journal={tmp_path / 'journal'}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        assert Client(url).post("/getstate")
        server.send_signal(signal.SIGSTOP)
        late = Client(url)
        late._connection.request("POST", "/close_gripper", b"{}")
        late.close()
        server.send_signal(signal.SIGCONT)
        assert Client(url).post("/open_gripper") == "Opened"
        assert [line for line in (tmp_path / "journal").read_text().splitlines() if "grip" in line] == [
            "grip 1.0 False"
        ]
    finally:
        server.kill()
        server.wait(DEADLINE_S)


def test_image_that_cannot_be_rendered_is_an_error(tabletop_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *_: Any) -> bytes:
        raise HiltError("no picture can be rendered.")

    monkeypatch.setattr(robot_server.Pictures, "_take", broken)
    problem = refused(Client(tabletop_url), "/image", {"camera": "front", "height": 8, "width": 8})
    assert (problem.status, problem.sentence) == (500, "no picture can be rendered.")


def test_slow_backend_still_gets_commands_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with RobotServer(TOY, {"tick_s": "0.03"}, port=0) as server, caplog.at_level(logging.WARNING, "hilt.envs"):
        client = Client(server.urls[0])
        for _ in range(10):
            assert client.post("/pose", {"arr": HOME.tolist()}) == "Moved"
        period = client.post("/status")["period"]
        assert period["p50"] > period["nominal"] and period["late"] > 0
        wait_for(lambda: any("tick() took" in text for text in caplog.messages))
        told = next(text for text in caplog.messages if "tick() took" in text)
        assert "a tick of the control loop is 0.01 s" in told
    assert server.control._process.returncode == 0, "it noticed the end by itself"


def test_backend_that_does_not_open_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^no tabletop task named 'pik'; did you mean 'pick'\?"):
        RobotServer("tabletop", {"task": "pik"}, port=0)
    with pytest.raises(
        RequestError, match=rf"^the backend '{TOY}' did not start: OSError: no route to 192.0.2.10$"
    ) as caught:
        RobotServer(TOY, {"fails": "open"}, port=0)
    assert "Traceback" in str(caught.value.__cause__) and "toy_arm.py" in str(caught.value.__cause__), (
        "all of it, for --debug"
    )


def test_when_the_server_ends_a_backend_that_hangs_goes_too() -> None:
    command = [*HILT, "serve-robot", "--backend", TOY, "--port", "0", "--set", "fails=state"]
    servers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    controls = []
    for server, how in zip(servers, (signal.SIGINT, signal.SIGKILL), strict=True):
        assert server.stderr is not None
        assert (
            server.stderr.readline() == f"waiting for the backend {TOY!r} to tell its first state, for 60 s at most\n"
        )
        controls += children(server.pid)
        server.send_signal(how)
    assert [server.wait(DEADLINE_S) for server in servers] == [130, -signal.SIGKILL] and len(controls) == 2
    wait_for(lambda: all(map(gone, controls)))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


LIMITS = [
    "--max-speed",
    "0.2",
    "--max-turn",
    "1",
    "--max-jerk",
    "300",
    "--max-turn-jerk",
    "2000",
    "--heartbeat",
    "0.25",
    "--rate",
    "50",
]
LATE = ("a tick of the control loop is", "waiting for the backend")
"""What a busy machine may make the server say"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_when_the_server_ends_the_arm_is_held_and_no_process_stays(how: signal.Signals, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    command = [
        *HILT,
        "serve-robot",
        "--backend",
        TOY,
        "--port",
        "0",
        "--set",
        f"journal={journal}",
        "--set",
        "moves=yes",
        *LIMITS,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stderr is not None
    client = Client(server.stdout.readline().split()[-1])
    assert "control at 50 Hz" in server.stdout.readline()
    status = client.post("/status")
    assert [status[name] for name in ("max_speed", "max_turn", "max_jerk", "max_turn_jerk", "heartbeat", "rate")] == [
        *(0.2, 1.0, 300.0, 2000.0, 0.25, 50.0)
    ]
    assert status["period"]["nominal"] == 0.02
    (control,) = children(server.pid)

    def moves() -> bool:
        client.post("/pose", {"arr": [0.3, 0.3, 0.1, 1, 0, 0, 0]})
        return "move" in journal.read_text()

    wait_for(moves)
    server.send_signal(how)
    assert server.wait(DEADLINE_S) == (-how if how == signal.SIGKILL else 0)
    wait_for(lambda: gone(control))
    asked = journal.read_text().splitlines()
    assert asked[-2:] == ["hold", "close"], "nothing moves it after the hold"
    x, y, z = (float(value) for value in [line for line in asked if line.startswith("move")][-1].split()[1:])
    assert x > 0.3 and y < 0.3 and z > 0.1, "it is held on its way: nobody brought it to where it was to go"
    errors = [line for line in server.stderr if not any(words in line for words in LATE)]
    assert not errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "error: host 0.0.0.0 is reached from other machines"),
        (["--backend", TOY, "--set", "journal"], "error: --set 'journal': expected NAME=VALUE, once for each name."),
        (["--task", "pick", "--set", "task=peg"], "error: --set 'task=peg': expected NAME=VALUE, once for each name."),
        (["--heartbeat", "-1"], "error: heartbeat=-1.0: expected a number above 0."),
        (["--rate", "2000"], "error: rate=2000.0: expected at most 1000 ticks per second."),
        (["--token", "no.token"], "error: no.token: "),
    ],
)
def test_serve_robot_command_prints_errors_in_one_line(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(cli.app, ["serve-robot", *arguments])
    assert done.exit_code == 1 and done.stderr.startswith(text), done.stderr


# --- load
# ----------------------------------------------------------------------------------------------------------------------


def test_many_connections_are_answered(toy_url: str) -> None:
    found = load(toy_url, connections=20, requests=20)
    assert found["answers"] == {200: 360, 400: 40}
    assert found["period"]["count"] > 0


@pytest.mark.peers
def test_fifty_connections_do_not_disturb_the_control_rate(counted: Callable[[str], None]) -> None:
    with serve_robot() as urls:
        found = load(urls[0], connections=50, requests=1000)
        realtime = Client(urls[0]).post("/status")["realtime"]
    counted(f"{json.dumps(found)} real-time priority: {realtime}")
    assert found["answers"] == {200: 45000, 400: 5000}
    if realtime:
        assert found["p99_of_nominal"] <= 1.2
