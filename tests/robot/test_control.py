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

from hilt.core.errors import ConfigError, DeadlineError, RefusedError
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


UNIT = st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: np.linalg.norm(q) > 0.1)
POINT = st.lists(st.floats(-1, 1), min_size=3, max_size=3)


@given(POINT, UNIT, POINT, UNIT, st.floats(1e-4, 1.0), st.floats(1e-4, 4.0))
@settings(max_examples=rounds(60, 1000), deadline=None)
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
