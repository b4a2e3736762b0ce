"""HIL-SERL's own train_rlpd.py, as it stands in its repository but for the lines below, learns here as
two processes; its tasks' own configs are recipes.

Give a checkout of HIL-SERL's public repository, and a Python that has this package, absl-py, tqdm and natsort:

    HILT_HILSERL=hil-serl python -m pytest -s -m peers tests/peers/test_hil_serl_script.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_hil_serl_script import file_of_the_page, record_demos
from tests.wire.processes import free_port

pytestmark = pytest.mark.peers

IMPORTS = {
    "import jax\n": "",
    "import jax.numpy as jnp\n": "",
    "from flax.training import checkpoints\n": "from hilt.compat.serl.launcher import checkpoints\n",
    "from gymnasium.wrappers.record_episode_statistics import": "from gymnasium.wrappers import",
    "from serl_launcher.agents.continuous.sac import": "from hilt.compat.serl.launcher import",
    "from serl_launcher.agents.continuous.sac_hybrid_single import": "from hilt.compat.serl.launcher import",
    "from serl_launcher.agents.continuous.sac_hybrid_dual import": "from hilt.compat.serl.launcher import",
    "from serl_launcher.utils.train_utils import": "from hilt.replay import",
    "from agentlace.trainer import": "from hilt.wire import make_trainer_config,",
    "from agentlace.data.data_store import": "from hilt.replay import",
    "from serl_launcher.utils.launcher import": "from hilt.compat.serl.launcher import",
    "    make_trainer_config,\n    make_wandb_logger,\n": "",
    "from serl_launcher.data.data_store import": "from hilt.replay import",
    "from experiments.mappings import CONFIG_MAPPING": "import my_task\n"
    "CONFIG_MAPPING = {'reach': my_task.TrainConfig}",
}
JAX = {
    r"devices = jax.local_devices\(\)\nnum_devices = len\(devices\)\nsharding = .*\n": "num_devices = 1\n",
    r"rng = jax.random.PRNGKey\(FLAGS.seed\)": "rng = sampling_rng = None",
    r" *(rng, sampling_rng|sampling_rng, key) = jax.random.split\(.*\)\n": "",
    r"jax.device_put\(obs\)": "obs",
    r" *seed=key,?\n": "",
    r"jax.device_get\(actions\)": "actions",
    r"sharding.replicate\(\),\n": "None,\n",
    r" *agent = jax.block_until_ready\(agent\)\n": "",
    r"( *)agent = jax.device_put\(\n.*\n *\)\n": "",
    r" *sampling_rng = jax.device_put\(.*\)\n": "",
    r"make_wandb_logger\([^)]*\)": "None",
}


# What stands in for jax, for the arm's server and for hardware. The configs, FrankaEnv and the wrappers are HIL-SERL's.
CONFIGS = """
import json, sys
from unittest.mock import MagicMock
names = "jax jax.numpy flax flax.core requests gym pyquaternion pyrealsense2 pynput"
names += " serl_launcher.networks.reward_classifier"
sys.modules.update({name: MagicMock() for name in names.split()})
state = dict(pose=[.5, 0, .3, 1, 0, 0, 0], vel=[0] * 6, force=[0] * 3, torque=[0] * 3)
state |= dict(jacobian=[0] * 42, gripper_pos=1.0, q=[0] * 7, dq=[0] * 7)
sys.modules["requests"].post.return_value.json.return_value = state
from hilt.envs.task import make
from hilt.recipes.migrate import from_hil_serl
found = {}
for name in ("ram_insertion", "usb_pickup_insertion", "object_handover"):
    hil = from_hil_serl(name, encoder_type="small")
    env = make(hil.task, **hil.task_options)
    found[name] = [hil.agent.setup_mode, hil.agent.rlpd.discount, hil.checkpoint_period, hil.buffer_period,
                   hil.image_keys, env.step_limit, list(env.observation_space["state"].shape),
                   list(env.action_space.shape)]
print("found", json.dumps(found))
"""


def checkout() -> Path:
    if not os.environ.get("HILT_HILSERL"):
        pytest.skip("HILT_HILSERL is not set: give a checkout of https://github.com/rail-berkeley/hil-serl")
    return Path(os.environ["HILT_HILSERL"]).resolve()


def test_the_configs_of_its_tasks_are_recipes():
    parts = [str(checkout() / part) for part in ("examples", "serl_launcher", "serl_robot_infra")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*parts, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", CONFIGS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert json.loads(done.stdout.partition("found ")[2]) == {
        "ram_insertion": ["single-arm-fixed-gripper", 0.97, 5000, 1000, ["wrist_1", "wrist_2"], 100, [1, 19], [6]],
        "usb_pickup_insertion": [
            "single-arm-learned-gripper",
            0.98,
            2000,
            1000,
            ["side_policy", "wrist_1", "wrist_2"],
            120,
            [1, 19],
            [7],
        ],
        "object_handover": [
            "dual-arm-learned-gripper",
            0.97,
            5000,
            1000,
            ["left/wrist", "right/wrist", "left/side"],
            200,
            [1, 26],
            [14],
        ],
    }


def changed(script: str) -> str:
    for theirs, ours in IMPORTS.items():
        assert theirs in script, theirs
        script = script.replace(theirs, ours)
    for pattern, ours in JAX.items():
        script, count = re.subn(pattern, ours, script)
        assert count, pattern
    assert "jax" not in script.replace("flax", ""), [line for line in script.splitlines() if "jax" in line]
    return script


def test_train_rlpd_as_it_stands_there(tmp_path: Path):
    upstream = checkout()
    for name in ("absl", "natsort", "tqdm"):
        pytest.importorskip(name)
    script = changed((upstream / "examples" / "train_rlpd.py").read_text())
    ports = f"make_trainer_config(port_number={free_port()}, broadcast_port={free_port()})"
    (tmp_path / "train_rlpd.py").write_text(script.replace("make_trainer_config()", ports))
    task = file_of_the_page("my_task.py").replace("max_steps = 60", "max_steps = 130")
    # what DefaultTrainingConfig has
    more = "buffer_period = 50\n    log_period = 10\n    replay_buffer_capacity = 1000"
    (tmp_path / "my_task.py").write_text(task.replace("buffer_period = 0", more))
    record_demos(tmp_path / "demo_data" / "reach_2_demos_2026-11-15_10-00-00.pkl", 2)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(upstream / "serl_launcher"), *sys.path]),
    }
    demos = next((tmp_path / "demo_data").iterdir())
    flags = {"learner": [f"--demo_path={demos}", "--checkpoint_path=learned"], "actor": ["--checkpoint_path=acted"]}
    running = {
        role: subprocess.Popen(
            [sys.executable, "train_rlpd.py", f"--{role}", "--exp_name=reach", "--debug", *given],
            **{
                "cwd": tmp_path,
                "env": environment,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
            },
        )
        for role, given in flags.items()
    }
    try:
        for role, process in running.items():
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, f"{role}: {said}"
    finally:
        for process in running.values():
            process.kill()
    assert {path.name for path in (tmp_path / "learned").iterdir()} == {
        "checkpoint_30",
        "checkpoint_60",
        "checkpoint_90",
        "checkpoint_120",
    }
    assert {path.name for path in (tmp_path / "acted" / "buffer").iterdir()} == {
        "transitions_50.pkl",
        "transitions_100.pkl",
    }
    lines = len(script.splitlines())
    print(
        f"train_rlpd.py: {lines} lines, {len(IMPORTS)} imports and {len(JAX)} kinds of lines of jax "
        "changed; it learned and acted"
    )
