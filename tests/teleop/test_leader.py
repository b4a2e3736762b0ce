"""A leader: the arm follows what it moves, nothing jumps when control changes hands, and a leader that falls silent
holds the arm."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.envs.rotations import from_rotation_vector, inverse, multiply, to_rotation_vector
from hilt.envs.task import make
from hilt.teleop import leader as leaders
from hilt.teleop.devices import open_device
from hilt.teleop.intervene import TakeOver
from hilt.teleop.leader import Leader, LeaderState

AWAY = np.array([1.0, -2.0, 0.5, *from_rotation_vector(np.array([0.3, 0.2, -0.9]))])
"""Where a leader is held that has nothing to do with where the arm is"""


class Hand:
    """A leader that is moved by the test."""

    def __init__(self):
        self.state = LeaderState(AWAY, gripper=1.0, clutch=False)

    def __call__(self):
        return self.state

    def move(self, position=(0, 0, 0), turn=(0, 0, 0), **changes):
        pose = np.asarray(self.state.pose)
        moved = [pose[:3] + position, multiply(from_rotation_vector(np.array(turn, float)), pose[3:])]
        self.state = LeaderState(
            np.concatenate(moved), changes.get("gripper", self.state.gripper), changes.get("clutch", self.state.clutch)
        )


@pytest.fixture
def driven():
    hand = Hand()
    env = TakeOver(make("tabletop/reach", image_size=None, step_limit=400), Leader(hand))
    env.reset(seed=0, options={"split": "train", "state": 0})
    yield env, hand
    env.close()


def pose(observation) -> np.ndarray:
    return np.asarray(observation["state"]["tcp_pose"], float)


def steps(env, count: int, action=None) -> list:
    """(observation, info) after each step; the policy's action is no motion, unless it is given."""
    return [(made[0], made[4]) for made in (env.step(np.zeros(7) if action is None else action) for _ in range(count))]


def test_the_arm_moves_as_far_as_the_leader_from_where_each_of_them_was(driven):
    env, hand = driven
    (seen, info), *_ = steps(env, 1)
    assert info["source"] == Source.POLICY and "intervene_action" not in info
    start = pose(seen)
    hand.move(clutch=True)
    steps(env, 1)
    for _ in range(10):
        hand.move(position=(0.004, -0.003, 0.005), turn=(0, 0, 0.03))
        seen, info = steps(env, 1)[0]
        assert info["source"] == Source.HUMAN
    seen, _ = steps(env, 20)[-1]
    np.testing.assert_allclose(pose(seen)[:3] - start[:3], [0.04, -0.03, 0.05], atol=0.004)
    turned = to_rotation_vector(multiply(pose(seen)[3:], inverse(start[3:])))
    np.testing.assert_allclose(turned, [0, 0, 0.3], atol=0.03)


def test_nothing_jumps_when_control_changes_hands_in_either_direction(driven):
    """Wherever the leader is held: the arm holds still until it is moved, and goes on from where it is afterwards."""
    env, hand = driven
    forward = np.array([0.3, 0, 0, 0, 0, 0, 0])
    moving = steps(env, 5, forward)
    hand.move(position=(3, 3, 3), turn=(1, 0, 0), clutch=True)  # taken in hand, far away, and the clutch is closed
    held = steps(env, 5, forward)
    assert np.abs(held[0][1]["executed_action"]).max() < 1e-9
    assert all(np.abs(info["executed_action"][:3]).max() <= 1 for _, info in held)
    drift = np.linalg.norm(pose(held[-1][0])[:3] - pose(moving[-1][0])[:3])
    assert drift <= 0.3 * env.get_wrapper_attr("action_scale")[0] + 0.002  # the way that was commanded before
    hand.move(position=(0, 0.5, 0), clutch=False)  # let go: what it does now does not count
    after = steps(env, 3, forward)
    assert all(info["source"] == Source.POLICY for _, info in after)
    moved = [
        np.linalg.norm(pose(b)[:3] - pose(a)[:3]) for (a, _), (b, _) in zip([held[-1], *after], after, strict=False)
    ]
    assert max(moved) <= 1.5 * 0.3 * env.get_wrapper_attr("action_scale")[0]


def test_a_leader_faster_than_the_arm_is_followed_at_the_limit(driven):
    env, hand = driven
    hand.move(clutch=True)
    seen, _ = steps(env, 1)[0]
    start = pose(seen)
    hand.move(position=(0, 0, 0.15))
    infos = [info for _, info in steps(env, 3)]
    assert [float(info["executed_action"][2]) for info in infos] == [1.0] * 3
    seen, _ = steps(env, 30)[-1]
    assert abs(pose(seen)[2] - start[2] - 0.15) < 0.01


def test_the_gripper_follows_once_it_was_as_the_arms_is(driven):
    env, hand = driven
    hand.move(gripper=0.0, clutch=True)  # the arm's is open
    assert [float(info["executed_action"][6]) for _, info in steps(env, 2)] == [0, 0]
    hand.move(gripper=1.0)
    steps(env, 1)
    hand.move(gripper=0.0)
    (_, info), *_ = steps(env, 1)
    assert info["executed_action"][6] == -1
    seen, info = steps(env, 10)[-1]
    assert float(np.ravel(seen["state"]["gripper_pose"])[0]) < 0.3 and info["executed_action"][6] == 0


def test_a_leader_that_falls_silent_holds_the_arm_and_one_that_never_led_is_not_missed(driven, monkeypatch):
    env, hand = driven
    now = [100.0]
    monkeypatch.setattr(leaders.time, "monotonic", lambda: now[0])
    hand.move(clutch=True)
    steps(env, 1)
    before, hand.state = hand.state, None
    now[0] += 0.4
    assert "lost" not in steps(env, 1)[0][1]
    now[0] += 0.2
    _, info = steps(env, 1, np.ones(7))[0]
    assert info["lost"] and np.abs(info["executed_action"]).max() == 0
    hand.state = before
    hand.move(position=(0.5, 0, 0))  # back, elsewhere: it begins anew from there
    _, info = steps(env, 1)[0]
    assert "lost" not in info and np.abs(info["executed_action"][:3]).max() < 1e-9
    hand.move(clutch=False)
    steps(env, 1)
    hand.state = None
    now[0] += 10
    assert steps(env, 1)[0][1]["source"] == Source.POLICY


def test_after_an_emergency_stop_the_arm_does_not_catch_up_with_the_leader(driven):
    env, hand = driven
    hand.move(clutch=True)
    (seen, _), *_ = steps(env, 1)
    hand.state = replace(hand.state, events=("estop",))  # a pedal
    seen, info = steps(env, 1)[0]
    start = pose(seen)
    for _ in range(5):
        hand.move(position=(0.02, 0.02, 0))
        seen, info = steps(env, 1)[0]
        assert info["estop"] and not np.any(info["executed_action"])
    hand.state = replace(hand.state, events=("release_estop",))
    steps(env, 1)
    hand.move(position=(0.02, 0, 0))
    seen, info = steps(env, 5)[-1]
    assert "estop" not in info and info["source"] == Source.HUMAN and not np.any(info["executed_action"][:6])
    np.testing.assert_allclose(pose(seen)[:3], start[:3], atol=0.003)
    hand.move(clutch=False)
    steps(env, 1)
    hand.move(clutch=True)
    steps(env, 1)
    hand.move(position=(0, 0.02, 0))
    seen, _ = steps(env, 10)[-1]
    np.testing.assert_allclose(pose(seen)[:3] - start[:3], [0, 0.02, 0], atol=0.004)


def test_joints_become_a_pose_by_forward():
    def forward(joints):
        return [joints[0], joints[1], 0.0, 0, 0, 0, 1]

    states = iter([LeaderState([0.1, 0.2]), LeaderState([0.12, 0.2])])
    device = open_device("leader", source=lambda: next(states), forward=forward, action_scale=(0.04, 0.1))
    device.observe({"state/tcp_pose": np.array([0.5, 0, 0.2, 0, 0, 0, 1.0])})
    assert device.read().action[:3].tolist() == [0, 0, 0]
    np.testing.assert_allclose(device.read().action[:3], [0.5, 0, 0], atol=1e-9)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"motion_scale": 0}, "motion_scale=0, stale_seconds=0.5: expected numbers above 0"),
        ({"source": "no_such_module:pose"}, "source 'no_such_module:pose' cannot be imported"),
    ],
)
def test_options_that_cannot_work(options, error):
    with pytest.raises(ConfigError, match=error):
        Leader(**{"source": Hand(), **options})


def test_what_does_not_fit_is_refused_with_both_sides_named():
    class Cart(gymnasium.Env):
        action_space, observation_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Box(-1, 1, (2,))

    class Arm(Cart):
        action_space = gymnasium.spaces.Box(-1, 1, (6,))

    with pytest.raises(ConfigError, match=r"Box\(-1.0, 1.0, \(2,\).*a leader drives one arm, by actions of 6 numbers"):
        Leader(Hand()).attach(Cart())
    with pytest.raises(ConfigError, match=r"Arm does not say how far .* give the leader action_scale="):
        Leader(Hand()).attach(Arm())
    with pytest.raises(UnknownNameError, match=r"estopp"):
        Leader(lambda: LeaderState(AWAY, events=("estopp",)), action_scale=(0.1, 0.1)).read()
    device = Leader(lambda: LeaderState([1, 2]), action_scale=(0.1, 0.1))
    with pytest.raises(SchemaError, match=r"pose is \[1.0, 2.0\]: expected seven finite numbers.* Give forward="):
        device.read()
    with pytest.raises(SchemaError, match=r"source gave 7: expected a hilt.teleop.leader.LeaderState"):
        Leader(lambda: 7, action_scale=(0.1, 0.1)).read()
    with pytest.raises(SchemaError, match="seven numbers at state/tcp_pose of the observation; found nothing"):
        device.observe({"state": {"q": np.zeros(3)}})
