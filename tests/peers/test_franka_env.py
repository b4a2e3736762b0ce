"""HIL-SERL's own client, the real FrankaEnv as it stands in its repository, drives an arm behind `hilt serve-robot`.

Give a checkout of HIL-SERL's public repository and a Python that has gymnasium 0.29.1, numpy<2, scipy, requests,
opencv-python-headless, pyquaternion and gym 0.26.2:

    HILT_HILSERL=hil-serl HILT_HILSERL_PYTHON=venv/bin/python python -m pytest -s -m
    peers tests/peers/test_franka_env.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.envs.robot_clients import serve_robot

pytestmark = pytest.mark.peers

# What stands in for hardware: no RealSense camera, no keyboard. Everything else is HIL-SERL's.
CLIENT = """
import json, sys, types
from unittest.mock import MagicMock
sys.modules["pyrealsense2"] = types.ModuleType("pyrealsense2")
sys.modules["pynput"] = types.ModuleType("pynput")
sys.modules["pynput"].keyboard = MagicMock()
import numpy as np
import requests
from franka_env.envs.franka_env import DefaultEnvConfig, FrankaEnv

answers = []
post = requests.post
def watched(url, *args, **kwargs):
    answer = post(url, *args, **kwargs)
    answers.append((url.rsplit("/", 1)[1], answer.status_code, answer.text))
    return answer
requests.post = watched

class Camera:
    def read(self): return np.zeros((128, 128, 3), np.uint8)
    def close(self): pass

class Env(FrankaEnv):
    def init_cameras(self, name_serial_dict=None): self.cap = {"wrist_1": Camera()}

stiff = {"translational_stiffness": 2000, "translational_damping": 89, "rotational_stiffness": 150,
         "rotational_damping": 7, "translational_Ki": 0, "rotational_Ki": 0,
         **{f"translational_clip_{n}{a}": 0.01 for n in ("", "neg_") for a in "xyz"},
         **{f"rotational_clip_{n}{a}": 0.03 for n in ("", "neg_") for a in "xyz"}}

class Config(DefaultEnvConfig):
    SERVER_URL = sys.argv[1]
    REALSENSE_CAMERAS = {"wrist_1": {}}
    TARGET_POSE = np.array([0.55, 0.1, 0.05, np.pi, 0, 0])
    RESET_POSE = np.array([0.5, 0.05, 0.25, np.pi, 0, 0])
    REWARD_THRESHOLD = np.array([0.001] * 6)
    ACTION_SCALE = np.array([0.02, 0.1, 1])
    ABS_POSE_LIMIT_LOW = np.array([0.3, -0.3, 0.02, np.pi - 0.5, -0.5, -0.5])
    ABS_POSE_LIMIT_HIGH = np.array([0.7, 0.3, 0.4, np.pi + 0.01, 0.5, 0.5])
    COMPLIANCE_PARAM = stiff
    PRECISION_PARAM = {**stiff, "rotational_stiffness": 250, "rotational_damping": 9}
    DISPLAY_IMAGE = False
    MAX_EPISODE_LENGTH = 14

env = Env(config=Config())
rows = {"constructor": [a[0] for a in answers]}
answers.clear()
obs, info = env.reset()
rows["reset"] = [a[0] for a in answers]
print("reset", np.round(obs["state"]["tcp_pose"], 3), "gripper", obs["state"]["gripper_pose"], info)
everything, poses, grips = list(answers), [], []
actions = [("forward", [1, 0, 0, 0, 0, 0, 0], 4), ("close", [0, 0, 0, 0, 0, 0, -1], 1),
           ("up and turn", [0, 0, 1, 0, 0, 1, 0], 4),
           ("open", [0, 0, 0, 0, 0, 0, 1], 1), ("still", [0] * 7, 4)]
for name, action, times in actions:
    for _ in range(times):
        answers.clear()
        obs, reward, done, truncated, info = env.step(np.array(action, float))
        everything += answers
    rows[name] = [a[0] for a in answers]
    poses.append(obs["state"]["tcp_pose"].tolist())
    grips.append(float(obs["state"]["gripper_pose"]))
    print(name, np.round(poses[-1], 3), "gripper", round(grips[-1], 2), "reward", reward, "done", done, info)
env.reset(joint_reset=True)
env.close()
bad = [a for a in everything + answers if a[1] != 200]
print(json.dumps({"rows": rows, "poses": poses, "grips": grips, "done": bool(done), "bad": bad}))
"""


def test_the_real_client_resets_steps_and_grips() -> None:
    checkout, python = os.environ.get("HILT_HILSERL"), os.environ.get("HILT_HILSERL_PYTHON")
    if not checkout or not python:
        pytest.skip("HILT_HILSERL and HILT_HILSERL_PYTHON do not name a checkout of HIL-SERL and a Python for it")
    # the checkout, or a part of it
    places = [place / "serl_robot_infra" for place in (Path(checkout), Path(checkout).parent)]
    code = next(filter(Path.is_dir, places), None)
    if code is None:
        pytest.skip(f"HILT_HILSERL={checkout} has no folder serl_robot_infra in it or beside it")
    environment = {**os.environ, "PYTHONPATH": str(code)}
    with serve_robot("--task", "reach") as urls:
        command = [python, "-c", CLIENT, urls[0]]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    moving = ["clearerr", "pose"]
    assert found["bad"] == []
    assert found["rows"]["constructor"] == ["getstate"]
    assert found["rows"]["reset"] == [
        *["update_param", "clearerr", "getstate", "clearerr", "pose", "update_param", "getstate"], *(moving * 10),
        *["getstate", "update_param", "clearerr", "getstate"],
    ]  # fmt: skip
    assert found["rows"]["forward"] == [*moving, "getstate"]
    assert found["rows"]["close"] == ["close_gripper", *moving, "getstate"]
    assert found["rows"]["open"] == ["open_gripper", *moving, "getstate"]
    forward, closed, up, opened, still = np.array(found["poses"])
    assert forward[0] > 0.54 and up[2] > closed[2] + 0.04, "four steps of 2 cm each way"
    assert np.linalg.norm(opened[:3] - still[:3]) < 0.02
    assert found["grips"][1] < 0.1 < 0.9 < found["grips"][3] and found["done"]
