"""RoboTwin's tasks on a stand-in: a folder with RoboTwin's layout, whose classes
have its method names. The real one was not run."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ConfigError, DeadlineError, StorageError, UnknownNameError
from hilt.envs import robotwin
from hilt.envs.robotwin import FIRST_SEED, TASKS, RobotwinEnv, seeds
from hilt.envs.task import check_task, make, ready
from hilt.policies.vla.observation_adapters import suite

# What the scenes of RoboTwin do as far as we see it: joints follow actions, the
# task succeeds when the first joint is past 0.9.
SCENE = """
import os, random, threading, time
import numpy as np

class UnStableError(Exception):
    pass

class Scene:
    step_lim, version, unstable, said = 6, 2, (), []

    def setup_demo(self, now_ep_num, seed, is_test, **args):
        assert os.path.isdir("task_config")  # RoboTwin finds its files from its own folder
        np.random.seed(seed); random.seed(seed)
        self.said.append(seed)
        if seed in self.unstable:
            raise UnStableError("it fell over")
        self.args, self.joints, self.eval_success = args, np.full(14, np.random.uniform(0, 0.045)), False
        self.using = threading.Lock()

    def take_action(self, action):
        assert self.using.acquire(blocking=False), "two threads in one scene"
        time.sleep(0.005)  # another thread would come in between
        assert action.shape == (14,)
        self.joints += 0.5 * (action - self.joints)
        action[:] = -1
        self.eval_success = bool(self.joints[0] > 0.9)
        self.using.release()

    def get_obs(self):
        picture = np.full((6, 8, 3), int(self.joints[0] * 1000) % 256, np.uint8)
        cameras = {name: {"rgb": picture} for name in ("head_camera", "left_camera", "right_camera", "front_camera")}
        return {"observation": cameras, "joint_action": self.joints if self.version == 1 else {"vector": self.joints}}

    def get_instruction(self):
        return "place the shoe"

    def close_env(self):
        self.said.append("closed")
"""
TWO = "from envs._scene import Scene\nclass lift_pot(Scene):\n    said = []\n"
TWO += (
    "    def get_info(self): return {'{A}': 'pot'}\n    def set_instruction(self, instruction): "
    "self.told = instruction\n"
)
FILES = {
    "envs/__init__.py": "",
    "envs/_scene.py": SCENE,
    "envs/lift_pot.py": TWO,
    "envs/click_bell.py": "import sapien_is_not_here",
    "envs/shoe_place.py": "from envs._scene import Scene\nclass shoe_place(Scene):\n    said, version = [], 1\n",
    "description/utils/generate_episode_instructions.py": (
        "def generate_episode_descriptions(task, episodes, count):\n"
        "    return [{'seen': ['lift it'], 'unseen': [f'{word} the ' + episodes[0]['{A}'] for word in "
        "('raise', 'hoist', 'lift')]}]\n"
    ),
    "task_config/_camera_config.yml": "D435: {fovy: 37, w: 8, h: 6}\n",
    "task_config/_embodiment_config.yml": "aloha: {file_path: ./assets/aloha}\n",
    "task_config/demo_randomized.yml": "embodiment: [aloha]\ncamera: {head_camera_type: D435}\n",
    "task_config/demo_clean.yml": "embodiment: [aloha, aloha, 0.6]\ncamera: {head_camera_type: D435}\n",
    "task_config/shoe_place.yml": "head_camera_type: D435\nwrist_camera_type: D435\nfront_camera_type: D435\n",
    "assets/aloha/config.yml": "arm_joints_name: [[a], [b]]\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("HILT_ROBOTWIN", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("envs", "generate_episode_instructions")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["robotwin/shoe_place", "robotwin2/lift_pot"])
def test_robotwin_env_is_a_task(root: Path, name: str) -> None:
    ready([name])
    drawn, here, path = (np.random.get_state()[1].copy(), random.getstate()), Path.cwd(), [*sys.path]
    env = make(name)
    assert isinstance(env, RobotwinEnv) and check_task(env, act=lambda seen: np.zeros(14, np.float32)) == []
    assert (np.random.get_state()[1] == drawn[0]).all() and random.getstate() == drawn[1]
    assert Path.cwd() == here and sys.path == path
    assert env.step_limit == 6 and env.initial_states == {"train": 1000, "eval": 128}
    assert env.render().shape == (6, 8, 3)
    env.close()
    assert env.unwrapped._sim is None


def test_joints_of_1_are_divided_on_a_copy_and_2_has_a_vector(root: Path) -> None:
    one, two = make("robotwin/shoe_place"), make("robotwin2/lift_pot")
    for env in (one, two):
        seen, info = env.reset(options={"split": "eval", "state": 3})
        assert info == {"succeed": False, "split": "eval", "state": 3, "seed": FIRST_SEED["eval"] + 3}
        row = suite(f"{env.version}/x").observe(seen, env.instruction)
        joints = env._sim.joints
        wanted = joints.copy()
        if env is one:
            wanted[[6, 13]] /= 0.045
        # what the simulator holds is as it was
        assert np.allclose(row["state"], wanted) and (joints == joints[0]).all()
        assert {key for key in row if key != "state"} == {"full_image", "left_wrist", "right_wrist", "instruction"}
        row["state"][:] = 9
        assert (seen["joint_action"] if env is one else seen["joint_action"]["vector"]).max() < 1
    assert one.instruction == "place the shoe"


def test_a_sentence_belongs_to_its_seed(root: Path) -> None:
    env = make("robotwin2/lift_pot")
    said = []
    for state in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4):
        env.reset(options={"split": "train", "state": state})
        said.append(env.instruction)
        assert env._sim.told == env.instruction
    assert said[:5] == said[5:] and len(set(said)) > 1 and all(words.endswith("the pot") for words in said)
    assert make("robotwin2/lift_pot", instruction_type="seen").instruction == "lift it"
    with pytest.raises(UnknownNameError, match=r"instruction_type.*seen, unseen"):
        make("robotwin2/lift_pot", instruction_type="heard")
    two_arms = make("robotwin2/lift_pot", task_config="demo_clean")._sim.args
    assert (
        two_arms["embodiment_dis"] == 0.6 and two_arms["dual_arm_embodied"] is False and two_arms["head_camera_w"] == 8
    )
    assert make("robotwin/shoe_place")._sim.args["wrist_camera_fovy"] == 37


def test_an_episode_ends_with_success_or_at_the_limit(root: Path) -> None:
    env = make("robotwin2/lift_pot")
    env.reset()
    go = np.ones((8, 14))
    _, rewards, terminated, truncated, info = env.step_chunk(go)
    assert rewards.tolist() == [0, 0, 0, 1] and terminated and not truncated and info["succeed"] and (go == 1).all()
    with pytest.raises(ConfigError, match="is over"):
        env.step(go[0])
    env.reset()
    rewards, truncated = env.step_chunk(np.zeros((8, 14)))[1::2]
    assert len(rewards) == 6 and truncated
    short = make("robotwin2/lift_pot", step_limit=2)
    short.reset()
    assert short.step(go[0])[3] is False and short.step(go[0])[3] is True
    with pytest.raises(ConfigError, match="after 6 actions"):
        make("robotwin2/lift_pot", step_limit=7)
    env.reset()
    for wrong in (np.zeros((2, 7)), np.full((1, 14), np.inf)):
        with pytest.raises(ConfigError, match="14 finite numbers"):
            env.step_chunk(wrong)


def test_an_unstable_seed_gives_way_to_the_next_that_no_other_state_has(root: Path, tmp_path: Path) -> None:
    files = {}
    for split, numbers in (("train", [5, 6, 9]), ("eval", [17, 71])):
        files[f"{split}_seeds"] = str(tmp_path / f"{split}.json")
        Path(files[f"{split}_seeds"]).write_text(json.dumps({"lift_pot": {"success_seeds": numbers}}))
    env = make("robotwin2/lift_pot", **files)
    scene = type(env._sim)
    assert env.initial_states == {"train": 3, "eval": 2}
    scene.unstable, scene.said[:] = (6, 11), []
    # 10, 11, 12 would be first, then 13, 14, 15
    assert env.reset(options={"split": "train", "state": 1})[1]["seed"] == 14
    assert [said for said in scene.said if said != "closed"] == [6, 11, 14]
    scene.unstable = (6, 11, 14)
    assert env.reset(options={"split": "train", "state": 1})[1]["seed"] == 20  # 17 is one of evaluation
    scene.unstable = range(1000)
    with pytest.raises(ConfigError, match="20 scenes for state 0 of 'eval' fell over"):
        env.reset(options={"split": "eval", "state": 0})
    scene.unstable = ()
    Path(files["eval_seeds"]).write_text(json.dumps({"lift_pot": {"success_seeds": [9, 71]}}))
    with pytest.raises(ConfigError, match="seed 9 is both in training and in evaluation"):
        ready(["robotwin2/lift_pot"], **files)
    for text in ("[]", "{", '{"lift_pot": {"success_seeds": []}}'):
        Path(files["eval_seeds"]).write_text(text)
        with pytest.raises(ConfigError, match="eval_seeds="):
            make("robotwin2/lift_pot", **files)


def test_one_thread_at_a_time_uses_a_scene(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("robotwin2/lift_pot")
    env.reset()
    failed: list[BaseException] = []

    def step() -> None:
        try:
            env.step_chunk(np.zeros((1, 14)))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failed.append(error)

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    monkeypatch.setattr(robotwin, "_LOCK_TIMEOUT_S", 0.01)
    with env._lock, pytest.raises(DeadlineError, match=r"another thread that uses this scene of robotwin2/lift_pot"):
        env.render()


def test_robotwin_reports_what_is_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'robotwin2/lift_pot'"):
        ready(["robotwin2/lift_pod"])
    with pytest.raises(StorageError, match=r"no envs/place_shoe.py in .*clone RoboTwin"):
        ready(["robotwin2/place_shoe"])
    with pytest.raises(StorageError, match=r"cannot be imported \(No module named 'sapien_is_not_here'\)"):
        make("robotwin2/click_bell")
    with pytest.raises(StorageError, match=r"demo_odd.yml is not there"):
        make("robotwin2/lift_pot", task_config="demo_odd")
    monkeypatch.delenv("HILT_ROBOTWIN")
    assert make("robotwin2/lift_pot", root=root).step_limit == 6
    with pytest.raises(
        StorageError, match=r"needs RoboTwin, which is not a package: .*root=FOLDER or set HILT_ROBOTWIN"
    ):
        ready(["robotwin2/lift_pot"])
    assert (len(TASKS["robotwin"]), len(TASKS["robotwin2"])) == (17, 21)
    assert not set(seeds("robotwin", "shoe_place")["train"]) & set(seeds("robotwin", "shoe_place")["eval"])
