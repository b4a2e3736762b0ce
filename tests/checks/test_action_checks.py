"""Actions that are constant, saturated or shifted, and those that only look so."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.checks.arm import arm, arms, found, looked_at, smooth


def test_constant_actions_while_the_robot_moves():
    report = looked_at([arm(), arm(seed=1, actions=np.full((60, 3), 0.5, np.float32))], "constant-actions")
    assert found(report) == [("warning", "constant-actions", "episode 1, actions")]


def test_constant_actions_in_all_episodes_are_an_error():
    report = looked_at(arms(2, change=lambda n: {"actions": np.zeros((60, 3))}), "constant-actions")
    assert ("error", "constant-actions", "actions") in found(report)


def test_constant_actions_are_not_those_of_one_joint_or_of_a_robot_that_waits():
    def change(number: int) -> dict[str, Any]:
        actions = smooth(np.random.default_rng(number), 60, 3)
        actions[:, 2] = number  # a gripper that stays as it is
        return {"actions": actions}

    waits = arm(actions=np.zeros((60, 3)), state=np.zeros((61, 3)))
    assert found(looked_at([*arms(3, change=change), waits], "constant-actions")) == []


def test_constant_actions_of_an_unused_dimension_are_mentioned():
    unused = np.c_[smooth(np.random.default_rng(0), 60, 2), np.zeros(60)]
    (finding,) = looked_at([arm(actions=unused)], "constant-actions").findings
    assert finding.severity == "info" and "Dimension 2 of 3" in finding.what


def test_saturated_actions_are_found():
    report = looked_at(
        arms(3, change=lambda n: {"actions": np.clip(smooth(np.random.default_rng(n), 60, 3) * [4, 0.1, 0.1], -1, 1)}),
        "saturated-actions",
    )
    assert found(report) == [("warning", "saturated-actions", "actions")]
    assert "Dimension 0 is at its limit of -1 or 1" in report.findings[0].what


def test_saturated_actions_are_not_grippers_keys_or_slow_turns():
    time = np.arange(60)
    gripper, keys, turn = np.sign(np.sin(time / 9)), np.round(np.sin(time / 7)), np.sin(time / 5)
    actions = np.stack([gripper, keys, turn], axis=1)
    assert found(looked_at([arm(actions=actions), arm(seed=1, actions=actions * 1.0)], "saturated-actions")) == []


def shifted(number: int, steps: int, absolute: bool = False, noise: float = 0.0) -> dict[str, Any]:
    """Actions that belong to the motion of so many steps before (or, if negative, later)."""
    rng = np.random.default_rng(number)
    path = smooth(rng, 80, 3) + 0.03 * np.cumsum(rng.normal(size=(80, 3)), axis=0)
    commands = path[1:] if absolute else np.diff(path, axis=0)
    commands = commands + noise * rng.normal(size=commands.shape)
    return {"state": path[8:69], "actions": commands[8 - steps : 68 - steps]}


def test_shifted_actions_are_found():
    for absolute in (False, True):
        report = looked_at(arms(4, change=lambda n, a=absolute: shifted(n, 1, a)), "shifted-actions")
        assert found(report) == [("warning", "shifted-actions", "actions")], absolute
        assert "the motion of 1 step before" in report.findings[0].what


def test_shifted_actions_that_take_effect_later_are_only_mentioned():
    report = looked_at(arms(4, change=lambda n: shifted(n, -2)), "shifted-actions")
    assert found(report) == [("info", "shifted-actions", "actions")]
    assert "2 steps later" in report.findings[0].what


def test_shifted_actions_are_not_smooth_noisy_or_unrelated_ones():
    rng = np.random.default_rng(7)
    for change in (
        lambda n: shifted(n, 0),
        lambda n: shifted(n, 0, absolute=True),
        lambda n: shifted(n, 0, noise=0.02),
        lambda n: {"actions": rng.normal(size=(60, 3))},
        lambda n: {},
    ):
        assert found(looked_at(arms(4, change=change), "shifted-actions")) == []


def test_shifted_actions_are_not_those_of_a_controller():
    """A policy that steers toward a goal by what it sees."""

    def change(number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        path, actions = [rng.normal(size=3)], []
        for _ in range(60):
            actions.append(0.1 * (0.2 - path[-1]) + 0.02 * rng.normal(size=3))
            path.append(path[-1] + actions[-1])
        return {"state": np.array(path), "actions": np.array(actions)}

    assert found(looked_at(arms(4, change=change), "shifted-actions")) == []
