"""Scripted experts: they succeed, they move as a person could, and all they can do is act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hilt.envs.tabletop.experts import CLOSE, SCRIPTS, Hand, expert, yaw_of
from hilt.envs.tabletop.suite import BATON, HOLE_DEPTH, POST, SPLITS, SUITE, lower_end, position, post
from hilt.envs.tabletop.suite_env import TabletopEnv
from tests.effort import rounds

Array = np.ndarray[Any, Any]
EVERY_TASK = pytest.mark.parametrize("name", SUITE)


def demonstrate(env: TabletopEnv, split: str, state: int) -> tuple[bool, list[Array]]:
    """Whether the expert succeeds, and what it did."""
    env.reset(options={"split": split, "state": state})
    act, actions = expert(env.task, env.world), []
    while True:
        before = env.world.snapshot()
        actions.append(act())
        assert np.array_equal(env.world.snapshot(), before), "an expert reads the world and never writes it"
        _, _, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            return bool(info["succeed"]), actions


def test_every_task_has_an_expert() -> None:
    assert set(SCRIPTS) == set(SUITE)


@EVERY_TASK
def test_the_expert_succeeds_and_moves_as_a_person_could(name: str) -> None:
    env = TabletopEnv(name, image_size=None)
    for split, state in (("train", 11), ("test", 99), ("eval", 22), ("test", 33))[: rounds(1, 4)]:
        succeeded, actions = demonstrate(env, split, state)
        assert succeeded, (split, state)
        motion = np.stack(actions).reshape(len(actions), -1, 7)[..., :6]
        assert all(env.action_space.contains(action) for action in actions)
        assert 8 <= len(actions) <= 110
        for part in (motion[..., :3], motion[..., 3:]):  # speed grows and fades little by little, from rest
            changes = np.linalg.norm(np.diff(part, axis=0, prepend=0.0), axis=-1)
            assert changes.max() <= Hand.EAGERNESS + 1e-6


def test_experts_leave_a_solved_task_solved() -> None:
    """Frames of success for a classifier are wanted of it: pictures after the end."""
    stayed = {}
    for name in list(SUITE)[:: rounds(3, 1)]:
        env = TabletopEnv(name, image_size=None)
        env.reset(options={"split": "train", "state": 11})
        act, succeeded = expert(env.task, env.world), False
        while not succeeded:
            succeeded = env.step(act())[4]["succeed"]
        stayed[name] = sum(env.step(act())[4]["succeed"] for _ in range(20))
        env.close()
    assert min(stayed.values()) >= 18, stayed


@pytest.mark.parametrize("state", [3, 11, 24])
def test_a_peg_on_the_rim_of_its_hole_is_lifted_and_lined_up_again(state: int) -> None:
    """Somebody pushes the hand aside while the peg goes down, for longer than a second."""
    env = TabletopEnv("peg", image_size=None, step_limit=300)
    env.reset(options={"split": "train", "state": state})
    act, heights, succeeded, pushed = expert(env.task, env.world), [], False, 0
    while not succeeded:
        action, low = act(), lower_end(env.world) - position(env.world, "hole")
        heights.append(low[2])
        if np.linalg.norm(low[:2]) < 0.03 and low[2] < 0.065 and pushed < 12:
            action[:3], pushed = (0.25 if pushed < 2 else 0.0, 0.0, -0.2), pushed + 1
        *_, truncated, info = env.step(action)
        succeeded = info["succeed"]
        assert succeeded or not truncated, heights[-30:]
    assert pushed == 12, "it was on its way down"
    rested = len(heights) - 1 - next(i for i, low in enumerate(reversed(heights)) if low > HOLE_DEPTH + 0.015)
    assert any(abs(low - HOLE_DEPTH) < 0.006 for low in heights[:rested]), "it met the rim, and was lifted from it"


@pytest.mark.parametrize("name", ["stack", "handover"])
def test_the_actions_alone_do_it(name: str) -> None:
    """Replayed without the expert they end in the same state, to the last bit, in a world that nobody has changed."""
    env = TabletopEnv(name, image_size=None)
    parameters, model = [dict(p) for p in env.world.parameters], _model(env)
    succeeded, actions = demonstrate(env, "eval", 4)
    end = env.world.snapshot()
    assert succeeded and env.world.parameters == parameters and np.array_equal(_model(env), model)
    env.reset(options={"split": "eval", "state": 4})
    for action in actions:
        _, _, terminated, _, _ = env.step(action)
    assert terminated and np.array_equal(env.world.snapshot(), end)


def _model(env: TabletopEnv) -> Array:
    m = env.world.model
    return np.concatenate(
        [part.ravel() for part in (m.body_pos, m.body_mass, m.geom_size, m.geom_pos, m.geom_friction, m.jnt_range)]
    )


def test_an_expert_begins_again_when_it_has_failed() -> None:
    env = TabletopEnv("pick", image_size=None)
    env.reset(options={"split": "test", "state": 3})
    act = expert(env.task, env.world)
    for _ in range(16):
        env.step(act())
    away = np.array([-0.05, 0.12, 0, 0, 0, 0, 0])  # somebody takes it from under the hand
    env.world.place("cube", env.world.body_pose("cube") + away)
    done = False
    for _ in range(90):
        _, _, done, _, _ = env.step(act())
        if done:
            break
    assert done


@pytest.mark.parametrize("hz", [5, 20])
def test_an_expert_follows_the_rate_of_the_environment(hz: int) -> None:
    scale = (0.3 / hz, 1.5 / hz)
    env = TabletopEnv("peg", image_size=None, control_hz=hz, action_scale=scale)
    env.reset(options={"split": "train", "state": 8})
    act, steps, done = expert(env.task, env.world, scale), 0, False
    while not done and steps < env.step_limit:
        _, _, done, _, _ = env.step(act())
        steps += 1
    assert done and 3.5 < steps / hz < 9.0  # seconds


def test_an_expert_bears_noise_and_takes_over_anywhere() -> None:
    env, rng = TabletopEnv("place", image_size=None), np.random.default_rng(0)
    for state in range(3):
        env.reset(options={"split": "test", "state": state})
        drift = rng.uniform(-0.6, 0.6, 7) * [1, 1, 1, 0.3, 0.3, 0.5, 1]
        for _ in range(15):
            env.step(np.clip(drift + rng.normal(0, 0.3, 7), -1, 1))
        act, done = expert(env.task, env.world), False
        for _ in range(env.step_limit):
            action = act()
            action[:6] += rng.normal(0, 0.1, 6)
            _, _, done, _, _ = env.step(action)
            if done:
                break
        assert done, state


def test_the_right_hand_cannot_take_the_baton_alone() -> None:
    env = TabletopEnv("handover", image_size=None)
    for state in range(3):
        env.reset(options={"split": "train", "state": state})
        left, right = Hand(env.world, 0), Hand(env.world, 1)
        for action in right.grasp(lambda: post(env.world, "baton", 1, BATON, POST), lambda: yaw_of(env.world, "baton")):
            env.step(np.concatenate([left.toward(left.position), action]))
        above = right.position + np.array([0.0, 0.0, 0.1])
        for action in right.go(lambda up=above: up, grip=CLOSE):
            env.step(np.concatenate([left.toward(left.position), action]))
        assert env.world.pose(1)[2] > 0.1 and env.world.body_pose("baton")[2] < 0.01


@pytest.mark.peers
@EVERY_TASK
def test_the_expert_succeeds_in_nineteen_of_twenty_states_of_each_split(
    name: str, counted: Callable[[str], None]
) -> None:
    env, rates, lengths = TabletopEnv(name, image_size=None), {}, []
    for split, count in SPLITS.items():
        runs = [demonstrate(env, split, state) for state in range(count)]
        rates[split] = sum(succeeded for succeeded, _ in runs) / count
        lengths += [len(actions) for succeeded, actions in runs if succeeded]
    steps = f"steps {min(lengths)}-{int(np.median(lengths))}-{max(lengths)} of {env.step_limit}"
    counted(" ".join(f"{split} {rate:.1%}" for split, rate in rates.items()) + f", {steps}")
    assert min(rates.values()) >= 0.95, rates


@pytest.mark.parametrize("side", [(0.05, 0.0), (-0.04, 0.03)])
def test_a_hand_that_is_low_beside_a_button_rises_before_it_presses(side: tuple[float, float]):
    env = TabletopEnv("press_yellow", image_size=None, control_hz=5, step_limit=40)
    env.reset(seed=0, options={"split": "test", "state": 1})
    beside = env.world.body_pose("yellow base")[:3] + np.array([*side, 0.03])
    action = np.zeros(7, np.float32)
    for _ in range(8):
        action[:3] = ((beside - env.world.pose()[:3]) / env.action_scale[0]).clip(-0.8, 0.8)
        assert not env.step(action)[2]
    assert env.world.pose()[2] < 0.06
    expert = env.expert()
    assert any(env.step(expert())[2] for _ in range(12))
    env.close()


def test_plan_that_begins_over_a_button_goes_on_down():
    """As the plan does that began above it: an operator who takes over here must not teach the contrary."""
    env = TabletopEnv("press_yellow", image_size=None, control_hz=10, step_limit=80)
    env.reset(seed=0, options={"split": "test", "state": 1})
    over = env.world.body_pose("yellow base")[:3] + np.array([0.005, 0.0, 0.055])
    action = np.zeros(7, np.float32)
    for height in (0.12, 0.0):
        for _ in range(20):
            way = over + np.array([0, 0, height]) - env.world.pose()[:3]
            action[:3] = (way / env.action_scale[0]).clip(-0.8, 0.8)
            assert not env.step(action)[2]
    assert np.linalg.norm(env.world.pose()[:3] - over) < 0.01
    assert env.expert()()[2] < -0.1
    env.close()
