"""The control loop's parts, in a clock of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, DeadlineError, EmergencyStopError, RefusedError
from hilt.envs.rotations import from_euler, inverse, multiply, to_rotation_vector
from hilt.robot.backends import RobotState, TabletopBackend, slew
from hilt.robot.control import ArmLimits, Board, ControlledArm, Loop, News, Periods, receive_line, send_line
from tests.effort import rounds
from tests.envs.toy_arm import HOME, ToyArm


class Bench:
    """One arm whose time passes only here."""

    def __init__(self, backend: Any, **limits: float):
        self.limits = ArmLimits(**limits)
        self.backend, self.now, self.arm = backend, 0.0, ControlledArm(backend, 0, self.limits)

    def follow(self, pose: Any) -> None:
        self.arm.heard = self.now
        self.arm.follow(pose)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * self.limits.rate)):
            self.now += 1 / self.limits.rate
            self.arm.tick(self.now, 1 / self.limits.rate)
            self.backend.tick(1 / self.limits.rate)


def test_the_simulated_arm_holds_still_within_half_a_second_of_silence() -> None:
    bench = Bench(TabletopBackend("reach"))
    goal = bench.backend.state(0).pose + np.array([0.1, 0.3, 0.0, 0, 0, 0, 0])
    bench.follow(goal)
    bench.run(0.25)
    assert bench.arm.mode == "follow" and np.abs(bench.backend.state(0).vel[:3]).max() > 0.3, "it moves"
    bench.run(0.25)
    held = bench.backend.state(0)
    assert bench.arm.mode == "hold" and np.linalg.norm(held.pose[:3] - goal[:3]) > 0.05, "and stopped on the way"
    for _ in range(100):
        bench.run(0.01)
        assert np.linalg.norm(bench.backend.state(0).pose[:3] - held.pose[:3]) < 0.01
        assert np.abs(bench.backend.state(0).vel).max() < 0.1
    bench.follow(goal)  # the next pose resumes
    bench.run(0.29)
    bench.follow(goal)
    bench.run(0.29)
    assert np.linalg.norm(bench.backend.state(0).pose[:3] - goal[:3]) < 0.01


def test_the_target_that_reaches_the_arm_obeys_speed_turn_and_workspace() -> None:
    bench = Bench(ToyArm(), max_speed=0.5, max_turn=2.0, heartbeat=10.0)
    bench.follow([5.0, 0.3, 0.1, *from_euler([np.pi, 0.3, 1.5])])
    bench.run(3.0)
    way = np.array([HOME, *bench.backend.commands])
    assert np.linalg.norm(np.diff(way[:, :3], axis=0), axis=1).max() <= 0.5 * 0.01 + 1e-12
    turns = [np.linalg.norm(to_rotation_vector(multiply(b[3:], inverse(a[3:])))) for a, b in itertools.pairwise(way)]
    assert max(turns) <= 2.0 * 0.01 + 1e-9
    assert way[-1][:3] == pytest.approx([0.8, 0.3, 0.1]) and (way[:, 0] <= 0.8).all()


def jerks(way: Any, rate: float) -> tuple[float, float]:
    """The largest change of acceleration of targets that follow each other, and of their turning."""
    turns = [to_rotation_vector(multiply(b[3:], inverse(a[3:]))) for a, b in itertools.pairwise(way)]
    found = [np.diff(np.diff(steps, axis=0), axis=0) * rate**3 for steps in (np.diff(way[:, :3], axis=0), turns)]
    return tuple(float(np.linalg.norm(jerk, axis=1).max()) for jerk in found)  # type: ignore[return-value]


@pytest.mark.parametrize("rate", [50.0, 100.0, 400.0])
def test_the_target_that_reaches_the_arm_obeys_the_limits_of_jerk(rate: float) -> None:
    """Goals that jump about, as a policy may give them: from the workspace's one end to the other, and turned."""
    goals, limits = np.random.default_rng(0), {"max_speed": 0.5, "max_turn": 2.0, "heartbeat": 10.0, "rate": rate}
    bench = Bench(ToyArm(), max_jerk=400.0, max_turn_jerk=1500.0, **limits)
    low, high = bench.backend.workspace(0)
    for _ in range(40):
        turn = [np.pi, *goals.uniform(-1, 1, 2)]
        bench.follow([*goals.uniform(low - 0.2, high + 0.2), *from_euler(turn)])
        bench.run(goals.uniform(0.02, 0.3))
    bench.run(2.0)
    way = np.array([HOME] * 3 + bench.backend.commands)
    jerk, turn_jerk = jerks(way, rate)
    assert 200 < jerk <= 400 and 300 < turn_jerk <= 1500
    assert np.linalg.norm(np.diff(way[:, :3], axis=0), axis=1).max() <= 0.5 / rate + 1e-12
    turns = [np.linalg.norm(to_rotation_vector(multiply(b[3:], inverse(a[3:])))) for a, b in itertools.pairwise(way)]
    assert max(turns) <= 2.0 / rate + 1e-9
    assert (way[:, :3] >= low - 1e-12).all() and (way[:, :3] <= high + 1e-12).all()
    assert way[-1] == pytest.approx(bench.arm._goal), "and it comes to its goal"
    rough = Bench(ToyArm(), max_jerk=1e9, max_turn_jerk=1e9, **limits)
    rough.follow([0.2, 0.4, 0.1, *from_euler([np.pi, 0.5, 0.5])])
    rough.run(0.5)
    assert min(jerks(np.array([HOME] * 3 + rough.backend.commands), rate)) > 1000, "without the limit it is larger"


def test_an_arm_holds_at_once_however_smooth_its_way_is() -> None:
    bench = Bench(ToyArm(), max_jerk=100.0, max_turn_jerk=500.0)
    bench.follow([0.8, 0.4, 0.1, *HOME[3:]])
    bench.run(0.25)
    sent = len(bench.backend.commands)
    bench.arm.estop()
    bench.run(1.0)
    assert len(bench.backend.commands) == sent > 20


def test_a_jerk_limit_that_would_make_the_arm_late_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_jerk=20: the arm would come 0.35 s after .* give 39 or more"):
        ArmLimits(max_jerk=20)
    with pytest.raises(ConfigError, match=r"max_turn_jerk=100: .* give 192 or more, or a lower speed"):
        ArmLimits(max_turn_jerk=100)
    assert ArmLimits().window_ticks == 5


def test_a_pose_stands_for_the_time_that_its_sender_gives() -> None:
    bench = Bench(ToyArm())
    for stands, ticks in ((0.1, 10), (5.0, 30), (None, 30)):  # never longer than a heartbeat
        bench.arm.heard = bench.now
        bench.arm.follow([0.8, 0.4, 0.1, *HOME[3:]], stands)
        sent = len(bench.backend.commands)
        bench.run(1.0)
        assert bench.arm.mode == "hold" and abs(len(bench.backend.commands) - sent - ticks) <= 1


UNIT = st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: np.linalg.norm(q) > 0.1)
POINT = st.lists(st.floats(-1, 1), min_size=3, max_size=3)


@given(POINT, UNIT, POINT, UNIT, st.floats(1e-4, 1.0), st.floats(1e-4, 4.0))
@settings(max_examples=rounds(30, 1000), deadline=None)
def test_slew_never_passes_its_limits_and_comes_nearer(
    p: Any, q: Any, p2: Any, q2: Any, meters: float, radians: float
) -> None:
    start, goal = (np.array([*a, *(np.array(b) / np.linalg.norm(b))]) for a, b in ((p, q), (p2, q2)))

    def apart(a: Any, b: Any) -> tuple[float, float]:
        turn = to_rotation_vector(multiply(a[3:], inverse(b[3:])))
        return float(np.linalg.norm(a[:3] - b[:3])), float(np.linalg.norm(turn))

    there = slew(start, goal, meters, radians)
    assert np.linalg.norm(there[3:]) == pytest.approx(1)
    for moved, whole, left, most in zip(
        apart(there, start), apart(goal, start), apart(goal, there), (meters, radians), strict=True
    ):
        assert moved <= most + 1e-6 and moved == pytest.approx(min(whole, most), abs=1e-5)
        assert left == pytest.approx(max(0.0, whole - most), abs=1e-5)


def test_a_reset_that_never_ends_is_given_up() -> None:
    bench = Bench(ToyArm(home_ticks="1000000"))
    bench.arm.reset()
    with pytest.raises(RefusedError, match="arm 0 is in mode 'reset': ask again when it is at home"):
        bench.follow(HOME)
    bench.run(29.0)
    assert bench.arm.mode == "reset"
    bench.run(1.5)
    assert bench.arm.mode == "hold" and isinstance(bench.arm.outcome, DeadlineError)


def test_a_wrench_pushes_only_inside_the_workspace_and_not_too_fast() -> None:
    bench = Bench(TabletopBackend("reach"))
    low, high = bench.backend.workspace(0)

    def push(*wrench: float) -> bool:
        bench.arm.heard = bench.now
        bench.arm.wrench([*wrench, 0, 0, 0])
        bench.run(0.1)
        return bench.arm.mode == "wrench"

    while push(0, 20, 0):
        assert bench.now < 10
    with pytest.raises(RefusedError, match=r"arm 0 is outside the workspace or faster than its limits: .* with /pose"):
        push(0, 20, 0)
    bench.run(0.5)
    pose = bench.backend.state(0).pose
    assert high[1] - 0.05 < pose[1] < high[1] + 0.05, "it was held at the edge"
    bench.follow([*np.clip(pose[:3], low + 0.05, high - 0.05), *pose[3:]])  # and comes back
    bench.run(0.3)
    bench.backend.set_parameters({"translational_damping": 0.0}, 0)
    bench.run(0.2)
    while push(0, -30, 0):
        assert np.linalg.norm(bench.backend.state(0).vel[:3]) < bench.limits.max_speed
    assert low[1] + 0.05 < bench.backend.state(0).pose[1], "it was held for its speed, far from the other edge"


def test_a_pushed_arm_keeps_the_stiffness_that_it_is_given_meanwhile() -> None:
    backend = TabletopBackend("reach")
    backend.wrench(np.zeros(6), 0)
    backend.set_parameters({"translational_stiffness": 1234.0, "rotational_damping": 5.0}, 0)
    assert backend._world.parameters[0]["translational_stiffness"] == 0, "a spring would hold it back"
    backend.hold(0)
    known = backend._world.parameters[0]
    assert (known["translational_stiffness"], known["rotational_stiffness"], known["rotational_damping"]) == (
        1234,
        150,
        5,
    )


def test_an_emergency_stop_holds_all_arms_and_refuses_everything_until_it_is_released() -> None:
    ours, theirs = socket.socketpair()
    backend = ToyArm(home_ticks="1000000")
    backend.arms = 2
    loop = Loop(backend, ArmLimits(), ours, Board(Board.create()))
    left, right = loop.arms

    def do(what: str, arm: int = 0, **values: Any) -> Any:
        return loop._do(7, what, arm, **values)

    right.stop()
    do("follow", pose=[0.8, 0.4, 0.1, *HOME[3:]])
    loop._move(time.monotonic(), 0.01)
    moved = len(backend.commands)
    assert moved and do("estop", arm=1) is None and [arm.mode for arm in loop.arms] == ["estop", "estop"]
    commands: list[tuple[str, dict[str, Any]]] = [
        ("follow", {"pose": HOME.tolist()}),
        ("wrench", {"wrench": [0.0] * 6}),
        ("grip", {"opening": 1.0, "slow": False}),
        *((name, {}) for name in ("reset", "start", "stop", "clear_errors", "activate_gripper", "reset_gripper")),
        ("set_parameters", {"values": {}}),
        ("scene", {"task": None, "split": "train", "state": 0}),
    ]
    for arm, (name, values) in itertools.product((0, 1), commands):
        with pytest.raises(EmergencyStopError, match="nothing moves until a person has seen that it is safe"):
            do(name, arm, **values)
    do("release")  # of a client that has gone
    do("estop")  # pressed again
    for _ in range(50):
        loop._move(time.monotonic(), 0.01)
    assert len(backend.commands) == moved and [arm.mode for arm in loop.arms] == ["estop", "estop"]
    do("release_estop")
    assert [arm.mode for arm in loop.arms] == ["hold", "stopped"], "as they were"
    do("reset")
    do("estop")
    assert isinstance(left.outcome, EmergencyStopError) and not backend.busy(0)
    loop._move(time.monotonic(), 0.01)
    assert receive_line(theirs, 60.0)["status"] == 412, "who waits for the reset is answered"
    do("release_estop")
    do("follow", pose=HOME.tolist())
    assert left.mode == "follow"


def test_a_backend_slower_than_its_rate_leaves_some_of_its_core_to_others() -> None:
    ours, theirs = socket.socketpair()
    loop = Loop(ToyArm(), ArmLimits(rate=1000), ours, Board(Board.create()))
    waits: list[float] = []
    clock = itertools.count()

    def listen(until: float) -> None:
        waits.append(until - time.monotonic())
        loop.ended = next(clock) == 5

    loop._listen, loop._backend.tick = listen, lambda seconds: time.sleep(0.003)  # type: ignore[method-assign]
    loop.run()
    assert min(waits) > 0 and theirs.close() is None


def test_backend_call_that_is_slow_once_is_not_reported() -> None:
    ours, theirs = socket.socketpair()
    loop = Loop(ToyArm(), ArmLimits(rate=100), ours, Board(Board.create()))
    theirs.setblocking(False)

    def told(*ticks: float) -> list[str]:
        for now in ticks:
            loop._backend.slowest = (0.05, "tick")
            loop._tell(now, 0.01)
        with contextlib.suppress(BlockingIOError):
            return theirs.recv(1 << 16).decode().splitlines()
        return []

    assert told(1.0, 2.0, 20.0, 21.0) == []
    assert len(told(22.0, 23.0, 24.0)) == 1, "the third in ten seconds, and the others not again"
    assert len(told(40.0, 41.0, 42.0)) == 1


def test_a_line_is_read_and_no_more() -> None:
    """A backend that fails at its first tick says so right behind its greeting."""
    ours, theirs = socket.socketpair()
    for number in range(2):
        send_line(theirs, {"number": number})
    assert [receive_line(ours, 1.0) for _ in range(2)] == [{"number": 0}, {"number": 1}]


def test_limits_are_numbers_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"heartbeat=0: expected a number above 0"):
        ArmLimits(heartbeat=0)
    with pytest.raises(ConfigError, match=r"max_speed=nan"):
        ArmLimits(max_speed=float("nan"))


def test_shared_state_is_read_again_when_written_meanwhile() -> None:
    file = Board.create()
    board = Board(file)
    state = ToyArm().state(0)
    with pytest.raises(DeadlineError, match="no whole state was published"):
        board.read(0.01)
    board.write(News(1.5, ("follow",), (state,), np.arange(3.0)))
    news = board.read()
    assert (news.time, news.modes, news.snapshot.tolist()) == (1.5, ("follow",), [0, 1, 2])
    assert all(np.array_equal(getattr(news.states[0], f), getattr(state, f)) for f in RobotState.__dataclass_fields__)
    board._memory[40] ^= 1  # as if a write were half done
    with pytest.raises(DeadlineError):
        board.read(0.01)
    os.close(file)


def test_periods_are_of_the_last_seconds() -> None:
    periods = Periods(0.01)
    assert periods.summary(10)["count"] == 0
    for value in [0.5] * 100 + [0.01] * 98 + [0.013, 0.02]:
        periods.add(value)
    found = periods.summary(1.0)
    assert (found["count"], found["late"], found["max"], found["p50"]) == (100, 2, 0.02, 0.01)
    assert periods.summary(100)["max"] == 0.5
