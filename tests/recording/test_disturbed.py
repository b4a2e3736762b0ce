"""Noise that moves the arm and is not in the log."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.envs.task import as_task
from hilt.recording.disturbed import Disturbed
from hilt.recording.record import Settings, record
from hilt.recording.recording_folder import replay_open_loop
from hilt.replay import Log
from hilt.teleop.operator import Script
from tests.hil.toy import SPEED, Toy


class Arm(gymnasium.Env):
    """Keeps the actions that it was given."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)

    def __init__(self) -> None:
        self.given: list[np.ndarray] = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.given.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def executed(action: list[float], std: float = 0.1, seed: int = 0, count: int = 2000) -> np.ndarray:
    arm = Arm()
    env = Disturbed(arm, std)
    env.reset(seed=seed)
    for _ in range(count):
        env.step(np.array(action, np.float32))
    return np.array(arm.given)


def test_motions_get_noise_and_the_gripper_and_unused_axes_do_not():
    given = executed([0.3, -0.2, 0.0, 0.0, 0.0, 0.1, 1.0])
    assert given.dtype == np.float32 and np.all(given[:, [2, 3, 4]] == 0) and np.all(given[:, 6] == 1)
    moved = given[:, [0, 1, 5]]
    assert moved.mean(0) == pytest.approx([0.3, -0.2, 0.1], abs=0.01)
    assert moved.std(0) == pytest.approx([0.1, 0.1, 0.1], rel=0.1)
    assert np.abs(np.corrcoef(moved.T)[np.triu_indices(3, 1)]).max() < 0.1, "each axis has noise of its own"


def test_what_is_executed_stays_in_the_action_space():
    given = executed([0.9, -0.9, 0.5, 0.5, 0.5, 0.5, -1.0], std=0.5)
    assert given.max() == 1 and given.min() == -1 and (given[:, 0] == 1).mean() > 0.2


def test_the_noise_follows_from_the_seed_of_the_episode():
    action = [0.3, -0.2, 0.1, 0.1, 0.1, 0.1, 1.0]
    assert np.array_equal(executed(action, seed=4, count=5), executed(action, seed=4, count=5))
    assert not np.array_equal(executed(action, seed=4, count=5), executed(action, seed=5, count=5))


def test_a_disturbed_recording_has_the_motions_without_the_noise(tmp_path: Path):
    """Each action leads to the goal from where noise has brought the point."""
    summary = record(
        Toy(), Script(), tmp_path / "a", Settings("Toy", episodes=3, keep="all", disturb=0.3, seed=1), videos=False
    )
    assert summary.have == 3
    with Log.open(tmp_path / "a" / "log") as log:
        noise = []
        for number in log.trajectories():
            assert log.facts.about(number)["disturb"] == 0.3
            steps = log.read(log.trajectory_keys(number), ["observations", "actions", "next_observations"])
            points, later = (steps[name]["state"]["left"]["point"] for name in ("observations", "next_observations"))
            goals = points + SPEED * steps["actions"]
            exact = np.abs(steps["actions"]).max(1) < 1
            assert np.allclose(goals[exact], goals[exact][-1], atol=1e-5), "the expert aims at the goal in each step"
            noise.append((later - points) / SPEED - steps["actions"])
        assert 0.1 < np.concatenate(noise).std() < 0.5
        again = {number: replay_open_loop(log, number, as_task(Toy())) for number in log.trajectories()}
        assert all(set(furthest.values()) == {0.0} for furthest in again.values()), "the same noise once more"


def test_a_recording_without_noise_says_nothing_of_it(tmp_path: Path):
    record(Toy(), Script(), tmp_path / "a", Settings("Toy", episodes=1), videos=False)
    with Log.open(tmp_path / "a" / "log") as log:
        assert "disturb" not in log.facts.about(log.trajectories()[0])


@pytest.mark.parametrize("std", [-0.1, float("nan")])
def test_a_standard_deviation_that_is_none_is_refused(std: float):
    with pytest.raises(ConfigError, match=f"--disturb {std:g}: expected a standard deviation above 0, such as 0.15"):
        Disturbed(Arm(), std)


def test_actions_without_motions_are_refused():
    with pytest.raises(
        ConfigError, match=r"--disturb 0.1: the action space is Discrete\(2\); motions are disturbed in"
    ):
        Disturbed(gymnasium.make("CartPole-v1"), 0.1)
