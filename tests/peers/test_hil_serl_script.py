"""HIL-SERL's own train_rlpd.py, as it stands in its repository but for the lines below, learns here as two processes.

Give a checkout of HIL-SERL's public repository, and a Python that has this package, absl-py, tqdm and natsort:

    HILT_HILSERL=hil-serl python -m pytest -s -m peers tests/peers/test_hil_serl_script.py
"""

from __future__ import annotations

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
    "from flax.training import checkpoints\n": "from hilt.policies.launcher import checkpoints\n",
    "from gymnasium.wrappers.record_episode_statistics import": "from gymnasium.wrappers import",
    "from serl_launcher.agents.continuous.sac import": "from hilt.policies.launcher import",
    "from serl_launcher.agents.continuous.sac_hybrid_single import": "from hilt.policies.launcher import",
    "from serl_launcher.agents.continuous.sac_hybrid_dual import": "from hilt.policies.launcher import",
    "from serl_launcher.utils.train_utils import": "from hilt.replay import",
    "from agentlace.trainer import": "from hilt.wire import make_trainer_config,",
    "from agentlace.data.data_store import": "from hilt.replay import",
    "from serl_launcher.utils.launcher import": "from hilt.policies.launcher import",
    "    make_trainer_config,\n    make_wandb_logger,\n": "",
    "from serl_launcher.data.data_store import": "from hilt.replay import",
    "from experiments.mappings import CONFIG_MAPPING": "import my_task\nCONFIG_MAPPING = {'reach': my_task.TrainConfig}",
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
    if not os.environ.get("HILT_HILSERL"):
        pytest.skip("HILT_HILSERL is not set: give a checkout of https://github.com/rail-berkeley/hil-serl")
    for name in ("absl", "natsort", "tqdm"):
        pytest.importorskip(name)
    upstream = Path(os.environ["HILT_HILSERL"]).resolve()
    script = changed((upstream / "examples" / "train_rlpd.py").read_text())
    ports = f"make_trainer_config(port_number={free_port()}, broadcast_port={free_port()})"
    (tmp_path / "train_rlpd.py").write_text(script.replace("make_trainer_config()", ports))
    task = file_of_the_page("my_task.py").replace("max_steps = 60", "max_steps = 130")
    more = "buffer_period = 50\n    log_period = 10\n    replay_buffer_capacity = 1000"  # what DefaultTrainingConfig has
    (tmp_path / "my_task.py").write_text(task.replace("buffer_period = 0", more))
    record_demos(tmp_path / "demo_data" / "reach_2_demos_2026-11-15_10-00-00.pkl", 2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(upstream / "serl_launcher"), *sys.path])}
    demos = next((tmp_path / "demo_data").iterdir())
    flags = {"learner": [f"--demo_path={demos}", "--checkpoint_path=learned"], "actor": ["--checkpoint_path=acted"]}
    running = {
        role: subprocess.Popen(
            [sys.executable, "train_rlpd.py", f"--{role}", "--exp_name=reach", "--debug", *given],
            **{"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
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
    assert {path.name for path in (tmp_path / "learned").iterdir()} == {"checkpoint_30", "checkpoint_60", "checkpoint_90", "checkpoint_120"}
    assert {path.name for path in (tmp_path / "acted" / "buffer").iterdir()} == {"transitions_50.pkl", "transitions_100.pkl"}
    lines = len(script.splitlines())
    print(f"train_rlpd.py: {lines} lines, {len(IMPORTS)} imports and {len(JAX)} kinds of lines of jax changed; it learned and acted")
