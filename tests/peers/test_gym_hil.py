"""gym-hil as PyPI has it, unmodified: an arm of somebody else's simulator is
driven, recorded and played again by its name alone.

A scripted operator of ours acts through the environment's own actions; success is what the environment reports. Cameras
are left out but in the last test: as shipped, rendering with shadows takes it more than a second a step without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.trajectory import Source
from hilt.envs.task import check_task, make, success_of
from hilt.recording.record import Settings, record
from hilt.replay import Log
from hilt.teleop.operator import Script

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("gym_hil") is None, reason="gym-hil is not installed: make test-peers installs it"),
]

TASK = "gym_hil:gym_hil/PandaPickCubeBase-v0"
STEP = 0.03
"""Meters of one step: its actions are meters, and a whole unit would be one."""


def pick(env: Any) -> Callable[[], Any]:
    """Above the block, down, close, up: from where hand and block are now. Its gripper closes at +1."""
    data, phase, closing = env.unwrapped.data, "above", 0

    def act() -> Any:
        nonlocal phase, closing
        hand, block = (np.array(data.sensor(name).data) for name in ("2f85/pinch_pos", "block_pos"))
        goal = block + np.array([0, 0, {"above": 0.08, "down": 0.0, "close": 0.0, "up": 0.2}[phase]])
        error = goal - hand
        if phase == "above" and np.linalg.norm(error[:2]) < 0.01 and abs(error[2]) < 0.02:
            phase = "down"
        elif phase == "down" and np.linalg.norm(error) < 0.012:
            phase = "close"
        elif phase == "close" and (closing := closing + 1) == 5:
            phase = "up"
        move = np.array([0, 0, STEP]) if phase == "up" else np.clip(error, -STEP, STEP)
        return np.array([*move, 0, 0, 0, 1 if phase in ("close", "up") else -1], np.float32)

    return act


def test_gym_hil_env_is_a_task():
    env = make(TASK)
    assert env.step_limit == 100 and env.instruction == "panda pick cube base"
    (finding,) = check_task(env)
    assert "begin with one and the same observation" in finding, (
        "its block lies at one place unless told otherwise; nothing else is missing"
    )
    (finding,) = check_task(make(TASK, random_block_position=True))
    assert "two resets to state 0 of 'train' begin differently" in finding, (
        "and then it is drawn from numpy's global generator"
    )


def test_ten_scripted_episodes(tmp_path: Path, counted: Callable[[str], None]):
    options = {"random_block_position": True}
    env = make(TASK, **options)
    np.random.seed(0)  # the only seed that its block listens to
    started = time.perf_counter()
    done = record(env, Script(expert=pick), tmp_path / "gym-hil", Settings(TASK, options, episodes=10), videos=False)
    seconds = time.perf_counter() - started
    env.close()
    assert done.complete and done.attempts == 10, done.discarded
    log = Log.open(tmp_path / "gym-hil/log", "r")
    episodes = [log.read(log.trajectory_keys(number)) for number in log.trajectories()]
    facts = [log.facts.about(number) for number in log.trajectories()]
    log.close()
    assert [fact["success"] for fact in facts] == [True] * 10 and facts[0]["task"] == TASK
    blocks = set()
    for episode in episodes:
        assert set(episode["source"]) == {int(Source.DEMO)}
        assert (
            episode["terminated"].tolist() == [False] * (len(episode["rewards"]) - 1) + [True]
            and not episode["truncated"].any()
        )
        blocks.add(tuple(episode["observations"]["environment_state"][0]))
        assert episode["next_observations"]["environment_state"][-1, 2] > 0.1, "the block is in the air"
    assert len(blocks) == 10, "each at another place"

    again = make(TASK, **options)
    np.random.seed(0)
    for episode in episodes:
        observation, _ = again.reset()
        for t, action in enumerate(episode["actions"]):
            assert np.array_equal(observation["agent_pos"], episode["observations"]["agent_pos"][t])
            observation, _, _, _, info = again.step(action)
        assert np.array_equal(observation["agent_pos"], episode["next_observations"]["agent_pos"][-1]) and success_of(
            info
        )
    again.close()
    steps = sum(len(episode["rewards"]) for episode in episodes)
    counted(
        f"gym-hil {version('gym-hil')}: 10 of 10 episodes succeeded, {steps} steps in {seconds:.1f} s; "
        "played again to the last bit"
    )


def test_pictures_are_recorded(tmp_path: Path, counted: Callable[[str], None]):
    """The first steps of an episode with both cameras."""
    env = make(TASK, image_obs=True, step_limit=5)
    started = time.perf_counter()
    done = record(env, Script(expert=pick), tmp_path / "pictures", Settings(TASK, episodes=1, keep="all"), videos=False)
    env.close()
    assert done.complete and done.steps == 5
    log = Log.open(tmp_path / "pictures/log", "r")
    pixels = log.read(log.trajectory_keys(log.trajectories()[0]))["observations"]["pixels"]
    log.close()
    assert {name: images.shape for name, images in pixels.items()} == {
        "front": (5, 128, 128, 3),
        "wrist": (5, 128, 128, 3),
    }
    assert all(images.dtype == np.uint8 and images.std() > 5 for images in pixels.values())
    counted(f"5 steps with two pictures of 128 pixels in {time.perf_counter() - started:.1f} s")
