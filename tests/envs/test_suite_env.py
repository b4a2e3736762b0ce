"""The tabletop suite as gymnasium environments: contract, actions, determinism, open-loop replay, two arms."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.envs.rotations import inverse, multiply, to_rotation_vector
from hilt.envs.tabletop.suite import ACTION_SCALE, SUITE
from hilt.envs.tabletop.suite_env import BOX_HIGH, BOX_LOW, TabletopEnv
from hilt.envs.tabletop.world import DOWN, TIMESTEP
from tests.effort import rounds


def action(arms: int = 1, **parts: float) -> np.ndarray:
    found = np.zeros((arms, 7), np.float32)
    for name, value in parts.items():
        found[:, ["x", "y", "z", "roll", "pitch", "yaw", "grip"].index(name)] = value
    return found.reshape(-1)


def flat(tree: dict) -> dict:
    return {f"{part}/{key}": value for part in tree for key, value in tree[part].items()}


@pytest.mark.parametrize("task", ["pick", "lift_tray"])
def test_gymnasiums_checker_finds_nothing(task):
    env = TabletopEnv(task)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(infinity|alternative render modes).*")
        check_env(env)
    env.close()


def test_observations_have_the_keys_of_hil_serl():
    env = TabletopEnv("pick")
    observation, info = env.reset(seed=0)
    assert {key: value.shape for key, value in observation["state"].items()} == {
        "tcp_pose": (7,),
        "tcp_vel": (6,),
        "gripper_pose": (1,),
        "tcp_force": (3,),
        "tcp_torque": (3,),
    }
    assert {key: value.shape for key, value in observation["images"].items()} == {
        "front": (64, 64, 3),
        "wrist": (64, 64, 3),
    }
    assert info["succeed"] is False and info["split"] == "train" and 0 <= info["state"] < 50
    assert env.instruction == SUITE["pick"].instruction and env.step_limit == SUITE["pick"].step_limit
    assert env.initial_states == {"train": 50, "eval": 100, "test": 100}
    assert env.render().shape == (256, 256, 3)
    assert "images" not in TabletopEnv("pick", image_size=None).reset(seed=0)[0]


def test_two_arms_have_their_own_keys_and_halves_of_the_action():
    env = TabletopEnv("lift_tray")
    observation, _ = env.reset(seed=0)
    assert set(observation["images"]) == {"front", "left/wrist", "right/wrist"}
    assert set(observation["state"]) == {
        f"{side}/{key}" for side in ("left", "right") for key in TabletopEnv("pick").reset()[0]["state"]
    }
    assert env.action_space.shape == (14,)
    for _ in range(3):
        after, *_ = env.step(np.concatenate([action(z=1.0), action(x=1.0, grip=-1.0)]))
    moved = {
        side: (after["state"][f"{side}/tcp_pose"] - observation["state"][f"{side}/tcp_pose"])[:3]
        for side in ("left", "right")
    }
    np.testing.assert_allclose(moved["left"], [0, 0, 0.08], atol=0.02)
    np.testing.assert_allclose(moved["right"], [0.08, 0, 0], atol=0.02)
    assert after["state"]["left/gripper_pose"] > 0.95 > after["state"]["right/gripper_pose"]


# ---- actions


@pytest.mark.parametrize("name, index", [("x", 0), ("y", 1), ("z", 2), ("roll", 3), ("pitch", 4), ("yaw", 5)])
def test_a_step_is_along_or_about_one_axis_of_the_table(name, index):
    env = TabletopEnv("reach", image_size=None)
    env.reset(seed=0)
    start = env.world.pose()
    env.step(action(**{name: 1.0}))
    for _ in range(5):
        env.step(action())
    now = env.world.pose()
    moved = np.concatenate([now[:3] - start[:3], to_rotation_vector(multiply(now[3:], inverse(start[3:])))])
    expected = np.zeros(6)
    expected[index] = ACTION_SCALE[index // 3]
    np.testing.assert_allclose(moved, expected, atol=0.003)


def test_the_gripper_closes_opens_and_else_stays():
    env = TabletopEnv("reach", image_size=None)
    env.reset(seed=0)
    openings = []
    for grip in (-0.4, -0.5, 0.4, -0.4, 0.5, 0.0):
        for _ in range(5):
            observation, *_ = env.step(action(grip=grip))
        openings.append(round(float(observation["state"]["gripper_pose"][0])))
    assert openings == [1, 0, 0, 0, 1, 1]


def test_holding_a_weight_does_not_sink():
    env = TabletopEnv("reach", image_size=None)
    env.reset(seed=0)
    env.world.data.xfrc_applied[env.world.model.body("hand").id][2] = -5.0
    for _ in range(10):
        env.step(action())
    start = env.world.pose()
    for _ in range(50):
        env.step(action())
    np.testing.assert_allclose(env.world.pose(), start, atol=1e-4)


def test_a_blocked_arm_does_not_wind_up():
    """Its command waits where it pushes hardest, so that one step back relieves it."""
    reach = SUITE["reach"]
    wall = '<geom type="box" size=".2 .01 .2" pos=".45 .2 .2"/>'
    env = TabletopEnv(dataclasses.replace(reach, objects=reach.objects + wall), image_size=None)
    env.reset(seed=0)
    for _ in range(20):
        observation, *_ = env.step(action(y=1.0))
    pushing = np.linalg.norm(observation["state"]["tcp_force"])
    assert pushing == pytest.approx(40, abs=4)
    assert (env.world.commanded() - env.world.pose())[1] <= 0.02 + ACTION_SCALE[0] + 0.005
    observation, *_ = env.step(action(y=-1.0))
    assert np.linalg.norm(observation["state"]["tcp_force"]) < 0.1 * pushing


def test_commands_stay_in_the_box():
    rng = np.random.default_rng(0)
    env = TabletopEnv("reach", image_size=None)
    env.reset(seed=0)
    for corner in rng.choice([-1.0, 1.0], (4, 6)):
        for _ in range(30):
            env.step(np.array([*corner, 0], np.float32))
            pose = env.world.commanded()
            inside = np.concatenate([pose[:3], to_rotation_vector(multiply(pose[3:], inverse(DOWN)))])
            assert (inside >= BOX_LOW - 1e-9).all() and (inside <= BOX_HIGH + 1e-9).all()


def test_actions_that_cannot_be_are_refused_and_large_ones_clipped():
    env = TabletopEnv("reach", image_size=None)
    env.reset(seed=0)
    for wrong in (np.zeros(6), np.full(7, np.nan)):
        with pytest.raises(ConfigError, match=r"an action here is \(7,\) finite numbers"):
            env.step(wrong)
    start = env.world.commanded()
    env.step(action(x=9.0))
    np.testing.assert_allclose(env.world.commanded()[0] - start[0], ACTION_SCALE[0])


@pytest.mark.parametrize("hz", [5, 10, 15, 20, 30])
def test_tabletop_env_keeps_speed_and_time_at_other_control_rates(hz):
    env = TabletopEnv("reach", image_size=None, control_hz=hz)
    env.reset(seed=0)
    start, began = env.world.pose(), env.world.data.time
    for _ in range(hz):
        env.step(action(y=0.5))
    assert env.world.data.time - began == pytest.approx(1.0, abs=TIMESTEP)
    assert (env.world.commanded() - start)[1] == pytest.approx(0.15, abs=1e-3)
    assert env.step_limit == SUITE["reach"].step_limit * hz // 10 and env.metadata["render_fps"] == hz
    with pytest.raises(ConfigError, match="between 1 and 250"):
        TabletopEnv("reach", control_hz=0)


# ---- episodes


def test_an_episode_is_truncated_at_its_limit_and_succeeds_with_the_expert():
    env = TabletopEnv("pick", image_size=None, step_limit=3)
    env.reset(seed=0)
    assert [env.step(action())[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]

    env = TabletopEnv("pick", image_size=None)
    env.reset(options={"split": "eval", "state": 3})
    expert = env.expert()
    for _ in range(env.step_limit):
        _, reward, terminated, truncated, info = env.step(expert())
        assert reward == float(info["succeed"]) == float(terminated)
        if terminated:
            break
    assert terminated and reward == 1.0 and not truncated


def test_a_numbered_state_is_one_state_and_a_seed_draws_among_them():
    env = TabletopEnv("stack", image_size=32)

    def begin(**how) -> tuple[str, dict]:
        observation, info = env.reset(**how)
        return hashlib.sha256(
            b"".join(v.tobytes() for v in flat(observation).values()) + env.world.snapshot().tobytes()
        ).hexdigest(), info

    seven, info = begin(options={"split": "train", "state": 7})
    assert (info["split"], info["state"]) == ("train", 7)
    env.step(action(x=1.0))
    others = [begin(options={"split": split, "state": 7})[0] for split in ("eval", "test")] + [
        begin(options={"state": 8})[0]
    ]
    assert len({seven, *others}) == 4
    assert begin(options={"split": "train", "state": 7})[0] == seven
    drawn = [begin(seed=1)[1]["state"]] + [begin()[1]["state"] for _ in range(5)]
    assert [begin(seed=1)[1]["state"]] + [begin()[1]["state"] for _ in range(5)] == drawn and len(set(drawn)) > 2
    with pytest.raises(UnknownNameError, match="Known: eval, test, train"):
        env.reset(options={"split": "dev"})
    with pytest.raises(UnknownNameError, match="no reset option named 'stat'"):
        env.reset(options={"stat": 3})
    for state in (50, 1.5):
        with pytest.raises(
            ConfigError, match=rf"state {state} of split 'train' was asked for; it has the states 0 to 49"
        ):
            env.reset(options={"state": state})


@pytest.mark.parametrize("task", ["stack", "lift_tray"])
def test_recorded_actions_replayed_open_loop_reach_the_recorded_states(task):
    """The record is what a log holds: observations and float32 actions."""
    env = TabletopEnv(task, image_size=32)
    record = [flat(env.reset(options={"split": "train", "state": 1})[0])]
    actions, expert = [], env.expert()
    for _ in range(rounds(15, 40)):
        actions.append(np.asarray(expert(), np.float32))
        record.append(flat(env.step(actions[-1])[0]))
    other = TabletopEnv(task, image_size=32)
    again = [flat(other.reset(options={"split": "train", "state": 1})[0])] + [flat(other.step(a)[0]) for a in actions]
    for step, (was, now) in enumerate(zip(record, again, strict=True)):
        for key, value in was.items():
            np.testing.assert_array_equal(now[key], value, err_msg=f"{key} at step {step}")
    np.testing.assert_array_equal(other.world.snapshot(), env.world.snapshot())


def story() -> str:
    """States and pixels of some random steps from a seed, as one number."""
    env, rng, summed = TabletopEnv("stack"), np.random.default_rng(5), hashlib.sha256()
    observations = [env.reset(seed=3)[0]] + [env.step(rng.uniform(-1, 1, 7))[0] for _ in range(10)]
    for observation in observations:
        for value in flat(observation).values():
            summed.update(value.tobytes())
    env.close()
    return summed.hexdigest()


def test_the_same_seed_gives_the_same_pixels_in_another_process():
    code = "import tests.envs.test_suite_env as t; print(t.story())"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=600
    )
    assert (ended.stdout.strip(), ended.stderr) == (story(), "")


def test_many_of_them_run_side_by_side():
    envs = gymnasium.vector.SyncVectorEnv([lambda: TabletopEnv("pick", image_size=32)] * 2)
    observation, _ = envs.reset(seed=[4, 4])
    np.testing.assert_array_equal(observation["images"]["front"][0], observation["images"]["front"][1])
    observation, *_ = envs.step(np.stack([action(x=1.0), action(x=-1.0)]))
    assert (observation["images"]["front"][0] != observation["images"]["front"][1]).any()
    envs.close()


def test_tabletop_env_reports_unknown_names():
    with pytest.raises(UnknownNameError, match="did you mean 'pick'"):
        TabletopEnv("pik")
    with pytest.raises(ConfigError, match="image_size=0: expected a number of at least 1"):
        TabletopEnv("pick", image_size=0)
    with pytest.raises(ConfigError, match="rgb_array"):
        TabletopEnv("pick", render_mode="human")


def test_the_expert_knows_the_environments_rate():
    env = TabletopEnv("peg", image_size=None, control_hz=30)
    env.reset(options={"split": "train", "state": 0})
    expert, over = env.expert(), False
    while not over:
        _, _, terminated, truncated, info = env.step(expert())
        over = terminated or truncated
    assert info["succeed"]


def test_a_chunk_is_its_steps_with_one_observation_and_one_environment_carries_on_two_episodes() -> None:
    """Bit for bit: what single steps show, and what two episodes show that take turns in one world."""
    single, chunked = TabletopEnv("pick", image_size=16), TabletopEnv("pick", image_size=16)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (2, 3, 4, 7)).astype(np.float32)  # two episodes, three chunks of four
    expected = [
        [episode_start(single, state)] + [stepped(single, chunk) for chunk in actions[state]] for state in (0, 1)
    ]
    found, saved = [[], []], [None, None]
    for turn in range(4):
        for state in (0, 1):
            if turn:
                chunked.restore(saved[state])
                seen = chunked.step_chunk(actions[state][turn - 1])
                assert seen[1].shape == (4,) and seen[1].dtype == np.float32
                found[state].append(seen[0])
            else:
                found[state].append(episode_start(chunked, state))
            saved[state] = chunked.snapshot()
    flat = [
        [np.concatenate([leaf.ravel() for part in one.values() for leaf in part.values()]) for one in ep]
        for ep in expected + found
    ]
    assert np.array_equal(flat[:2], flat[2:])


def episode_start(env, state):
    return env.reset(options={"split": "train", "state": state})[0]


def stepped(env, actions):
    return [env.step(action) for action in actions][-1][0]


def test_a_chunk_ends_with_its_episode_and_success_is_that_of_steps() -> None:
    alone, env = TabletopEnv("pick", image_size=None), TabletopEnv("pick", image_size=None, step_limit=10)
    alone.reset(options={"split": "train", "state": 3})
    env.reset(options={"split": "train", "state": 3})
    expert, actions, done = alone.expert(), [], False
    while not done:
        actions.append(expert())
        _, reward, done, _, _ = alone.step(actions[-1])
    env.step_limit = len(actions) + 2
    _, rewards, terminated, truncated, info = env.step_chunk([*actions, *actions])
    assert (reward, terminated, truncated, info["succeed"]) == (1.0, True, False, True)
    assert rewards.tolist() == [0.0] * (len(actions) - 1) + [1.0]
    env.reset(options={"split": "train", "state": 3})
    env.step_limit = 3
    assert [len(env.step_chunk(actions)[1]), env.step_chunk(actions[:1])[3]] == [3, True]


def test_the_cameras_of_an_observation_are_chosen() -> None:
    env = TabletopEnv("pick", image_size=16, cameras=["wrist"])
    assert list(env.reset()[0]["images"]) == list(env.observation_space["images"]) == ["wrist"]
    with pytest.raises(UnknownNameError, match="cameras: no camera named 'back'"):
        TabletopEnv("pick", cameras=["back"])


def test_planned_points_are_where_the_arm_goes_and_lie_in_the_picture_where_it_is_seen() -> None:
    env = TabletopEnv("press_red", control_hz=5)
    env.reset(seed=0, options={"split": "test", "state": 0})
    expert = env.expert()
    actions = np.repeat(expert()[None], 3, 0)
    points = env.planned_points(actions)
    assert points.shape == (1, 4, 3) and np.allclose(points[0, 0], env.world.pose()[:3])
    for one in actions:
        env.step(one)
    assert np.linalg.norm(points[0, 3] - env.world.pose()[:3]) < 0.3 * np.linalg.norm(points[0, 3] - points[0, 0])
    colors = {"red": 0, "green": 1, "blue": 2}
    for color, channel in colors.items():  # a button is where its color is
        place = np.add(env.world.body_pose(color)[:3], (0, 0, 0.025))
        for camera, where in env.project(place[None]).items():
            x, y = (where[0] * 200).astype(int)
            if 0 <= x < 200 and 0 <= y < 200:
                pixel = env.world.render(camera, 200, 200)[y, x].astype(int)
                assert camera != "front" or pixel.argmax() == channel, (camera, color, pixel)
    behind = 2 * env.world.data.cam_xpos[0] - place
    assert np.isnan(env.project(behind[None])[env.world.cameras[0]]).all()
    env.close()


def test_more_train_states_go_on_from_those_of_the_task():
    few, many = TabletopEnv("peg", image_size=None), TabletopEnv("peg", image_size=None, train_states=60)
    assert many.initial_states == {**few.initial_states, "train": 60}
    poses = {}
    for state in (7, 49, 50, 59):
        many.reset(options={"split": "train", "state": state})
        poses[state] = many.world.data.qpos.tolist()
    for state in (7, 49):
        few.reset(options={"split": "train", "state": state})
        assert few.world.data.qpos.tolist() == poses[state]
    assert len({tuple(pose) for pose in poses.values()}) == 4
    with pytest.raises(ConfigError, match="state 50 of split 'train' was asked for; it has the states 0 to 49"):
        few.reset(options={"split": "train", "state": 50})
    with pytest.raises(ConfigError, match="train_states=0: expected a number of at least 1"):
        TabletopEnv("peg", train_states=0)
