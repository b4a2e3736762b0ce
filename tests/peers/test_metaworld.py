"""The real Meta-World: its tasks through our environment, its scripts as experts, its images, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hilt.envs.task import check_task, make

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("metaworld") is None, reason="needs metaworld: make test-peers installs it"),
]
TASKS = ("button-press-topdown", "window-open", "drawer-open", "door-open", "pick-place")


def test_every_task_of_metaworld_can_be_made() -> None:
    from metaworld.policies import ENV_POLICY_MAP

    assert len(ENV_POLICY_MAP) == 50
    for task in ENV_POLICY_MAP:
        env = make(f"metaworld/{task.removesuffix('-v3')}")
        observation, _ = env.reset(options={"split": "test", "state": 49})
        assert env.observation_space.contains(observation), task
        env.close()


@pytest.mark.parametrize("task", TASKS)
def test_a_script_of_metaworld_solves_its_task_from_numbered_states(task: str) -> None:
    env = make(f"metaworld/{task}")
    assert check_task(env) == []
    succeeded = 0
    for state in range(5):
        env.reset(options={"split": "train", "state": state})
        act, over = env.get_wrapper_attr("expert")(), False
        while not over:
            *_, terminated, truncated, info = env.step(act())
            over = terminated or truncated
        succeeded += bool(info["succeed"])
    assert succeeded >= 4


def test_images_of_metaworld_show_the_scene_and_hide_the_objects_from_the_numbers() -> None:
    env = make("metaworld/door-open", image_size=48)
    first, _ = env.reset(options={"split": "train", "state": 0})
    other, _ = env.reset(options={"split": "train", "state": 1})
    assert set(first["images"]) == {"workspace", "gripperPOV"} and first["state"].shape == (4,)
    assert all(image.shape == (48, 48, 3) and image.std() > 10 for image in first["images"].values())
    assert (first["images"]["workspace"] != other["images"]["workspace"]).any(), "the door stands elsewhere"
    assert np.allclose(first["state"], other["state"], atol=0.02), "the hand begins at the same place"
    assert env.render().shape == (256, 256, 3)


def test_draft_images_of_metaworld_show_the_same_scene_and_change_no_motion() -> None:
    seen = []
    for quality in ("full", "draft"):
        env = make("metaworld/drawer-open", image_size=48, quality=quality)
        env.reset(options={"split": "train", "state": 0})
        for number in range(20):
            observation, *_, info = env.step(np.array([0.3, -0.2, 0.1 * number, 1.0]))
        seen.append((observation, info["dense_reward"]))
    (full, reward), (draft, same) = seen
    assert reward == same and (full["state"] == draft["state"]).all()
    for name, image in full["images"].items():
        assert 0 < abs(image.astype(int) - draft["images"][name]).mean() < 12, name


def test_a_run_of_metaworld_by_state_needs_its_task_and_demonstrations_alone(tmp_path: Path) -> None:
    (tmp_path / "button.yaml").write_text("task: metaworld/button-press-topdown\ndemonstrations: 3\n")
    short = ["max_steps=60", "training_starts=100", "agent.encoder.pretrain_updates=20", "wire.port=0"]
    train = ["train", "button.yaml", *short, "wire.broadcast_port=0", "--run", "run"]
    for words in (train, ["eval", "run", "--episodes", "2", "--json", "out.json"]):
        done = subprocess.run(
            [sys.executable, "-m", "hilt", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "state only: the policy sees 39 numbers" in (tmp_path / "run/run.json").read_text() + done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["episodes"] == 2
