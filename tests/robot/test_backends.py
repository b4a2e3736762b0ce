"""The simulated bench as a backend, and how a backend is named."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.core.errors import ConfigError, RequestError, UnknownNameError
from hilt.envs.tabletop import world
from hilt.robot.backends import PARAMETERS, Backend, RobotState, TabletopBackend, open_backend
from tests.envs.toy_arm import ToyArm
from tests.robot.test_control import Bench


def test_a_wrench_ends_with_silence() -> None:
    bench = Bench(TabletopBackend("reach"))
    high = bench.backend.state(0).pose[2]
    bench.arm.wrench([0, 0, -8.0, 0, 0, 0])
    bench.run(0.3)
    assert bench.backend.state(0).pose[2] < high - 0.01, "pushed down"
    bench.run(0.2)
    assert bench.arm.mode == "hold"
    assert not bench.backend._world.data.xfrc_applied.any(), "nothing pushes any more"
    low = bench.backend.state(0).pose
    bench.run(1.0)
    assert bench.backend.state(0).pose[:3] == pytest.approx(low[:3], abs=0.01)
    bench.follow(low + np.array([0.05, 0, 0, 0, 0, 0, 0]))
    bench.run(0.29)
    assert bench.backend.state(0).pose[0] == pytest.approx(low[0] + 0.05, abs=0.01), "and follows poses as before"
    with pytest.raises(RequestError, match="does not take a wrench: send poses"):
        Backend.wrench(ToyArm(), np.zeros(6), 0)


def test_the_routes_and_the_simulation_know_the_same_parameters() -> None:
    assert set(PARAMETERS) == set(world.PARAMETERS)


def test_tabletop_backend_takes_softer_parameters() -> None:
    bent = []
    for stiffness in (2000.0, 300.0):
        bench = Bench(TabletopBackend("reach"), heartbeat=10.0)
        bench.backend.set_parameters({"translational_stiffness": stiffness}, 0)
        bench.follow(bench.backend.state(0).pose + np.array([0, 0.1, 0, 0, 0, 0, 0]))
        bench.run(0.2)
        bent.append(bench.backend.state(0).pose[1])
    assert bent[0] > bent[1] + 0.01


def test_a_slow_grip_takes_longer() -> None:
    opening = []
    for slow in (False, True):
        bench = Bench(TabletopBackend("reach"))
        bench.backend.grip(0.0, slow, 0)
        bench.run(0.4)
        opening.append(bench.backend.state(0).gripper_pos)
    assert opening[0] < 0.1 < 0.3 < opening[1]


def test_a_state_of_the_wrong_shape_is_named_before_anybody_moves() -> None:
    """The size alone would do for a Jacobian that is turned: its numbers would be mixed up."""
    good = ToyArm().state(0)
    for name, wrong in (("pose", np.zeros(6)), ("jacobian", np.zeros((7, 6))), ("gripper_pos", [1.0])):
        with pytest.raises(ConfigError, match=rf"{name} of a RobotState has the shape \(.*\); expected \("):
            RobotState(**{**good.__dict__, name: wrong})
    with pytest.raises(ConfigError, match=r"vel of a RobotState is \[nan .*\]; expected finite numbers"):
        RobotState(**{**good.__dict__, "vel": np.full(6, np.nan)})


def test_an_arm_that_knows_no_hold_is_commanded_the_pose_that_it_has() -> None:
    toy = ToyArm()
    Backend.hold(toy, 0)
    assert len(toy.commands) == 1 and toy.commands[0] is toy.state(0).pose


def test_a_stopped_arm_is_commanded_no_more() -> None:
    bench = Bench(ToyArm())
    holds: list[int] = []
    bench.backend.hold = holds.append
    bench.arm.stop()
    bench.arm.stop()
    bench.arm.release()
    assert holds == [0], "before it was stopped, and not after"


class HalfArm(Backend):
    state, command = ToyArm.state, ToyArm.command


@pytest.mark.parametrize(
    ("backend", "options", "text"),
    [
        ("tablettop", {}, r"no backend named 'tablettop'; did you mean 'tabletop'\?"),
        ("tabletop", {"task": "pik"}, r"no tabletop task named 'pik'; did you mean 'pick'\?"),
        ("tabletop", {"task": "tabletop/pik"}, r"no tabletop task named 'pik'"),
        ("tabletop", {"robot_ip": "1"}, r"unexpected keyword argument 'robot_ip'; it takes \(task"),
        ("no.such:Arm", {}, r"there is no module 'no', installed or in this folder"),
        (
            f"{__name__}:HalfArm",
            {},
            r"HalfArm has no workspace, no grip: write them, see 'An arm of your own' in docs/robot.md",
        ),
        ("json:dumps", {}, r"expected a subclass of hilt.robot.backends.Backend"),
    ],
)
def test_a_backend_is_named_rightly(backend: str, options: dict[str, str], text: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=text):
        open_backend(backend, options)
