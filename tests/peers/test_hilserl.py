"""HIL-SERL's own buffers take in what we wrote, by its own loading loop.

Give a checkout of HIL-SERL's public repository (its serl_launcher folder) and a
Python that has jax, flax, gymnasium and numpy:

    HILT_HILSERL=hil-serl/serl_launcher HILT_HILSERL_PYTHON=venv/bin/python python
    -m pytest -m peers tests/peers/test_hilserl.py
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hilt.core.tree import flatten
from hilt.formats import create, open_dataset
from tests.formats.test_hilserl import mixed
from tests.formats.toy_episodes import made, write

pytestmark = pytest.mark.peers

LOOP = """
import glob, pickle as pkl, sys
import numpy as np
from gymnasium.spaces import Box, Dict
from serl_launcher.data.replay_buffer import ReplayBuffer
from serl_launcher.data.memory_efficient_replay_buffer import MemoryEfficientReplayBuffer

folder, out = sys.argv[1:]
stacked = folder.endswith("stacked")
observations = Dict({"front": Box(0, 255, (*((1,) if stacked else ()), 20, 24, 3), np.uint8),
                     "state": Box(-np.inf, np.inf, (*((1,) if stacked else ()), 3), np.float32)})
actions = Box(-1, 1, (2,), np.float32)

def flat(tree, prefix=""):
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from flat(value, prefix + key + "/")
        else:
            yield prefix + key, value

kept = {}
for name in ("demo_data", "buffer", "demo_buffer"):
    buffer = ReplayBuffer(observations, actions, capacity=1000)
    keys = dict(capacity=1000, pixel_keys=("front",))
    efficient = MemoryEfficientReplayBuffer(observations, actions, **keys) if stacked else None
    files = sorted(glob.glob(f"{folder}/{name}/*.pkl"), key=lambda path: (len(path), path))
    for path in files:
        with open(path, "rb") as f:
            transitions = pkl.load(f)
            for transition in transitions:
                if "infos" in transition and "grasp_penalty" in transition["infos"]:
                    transition["grasp_penalty"] = transition["infos"]["grasp_penalty"]
                buffer.insert(transition)
                if efficient is not None:
                    efficient.insert(transition)
    print(name, len(files), "files", len(buffer), "transitions")
    if efficient is not None and len(buffer):
        batch = efficient.sample(8, pack_obs_and_next_obs=True)
        assert batch["observations"]["front"].shape == (8, 2, 20, 24, 3), batch["observations"]["front"].shape
    for path, value in flat(buffer.dataset_dict):
        kept[f"{name}/{path}"] = value[:len(buffer)]
np.savez(out, **kept)
"""


@pytest.mark.parametrize("kind", ["plain", "stacked"])
def test_hilserl_loading_loop_reads_our_pickles(kind: str, tmp_path: Path) -> None:
    checkout, python = os.environ.get("HILT_HILSERL"), os.environ.get("HILT_HILSERL_PYTHON")
    if not checkout or not python:
        pytest.skip("HILT_HILSERL and HILT_HILSERL_PYTHON do not name a checkout of HIL-SERL and a Python for it")
    folder, episodes = tmp_path / kind, mixed()
    if kind == "stacked":
        episodes = [made(5, 0), made(4, 1, source=0), made(6, 2, source=[0, 1, 1, 0, 0, 0])]
        for episode in episodes:
            for name in ("observations", "next_observations"):
                episode.columns[name] = {key: column[:, None] for key, column in episode.columns[name].items()}
    write(create(folder, "hil-serl", buffer_period=8), episodes)
    done = subprocess.run(
        [python, "-c", LOOP, folder, tmp_path / "out.npz"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": checkout},
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    steps = {"demo_data": [], "buffer": [], "demo_buffer": []}  # type: dict[str, list[tuple[dict[str, np.ndarray], int]]]
    for episode in open_dataset(folder, "hil-serl"):
        columns = flatten(episode.columns)
        demo = bool((columns["source"] == 2).all())
        for i in range(len(episode)):
            steps["demo_data" if demo else "buffer"].append((columns, i))
            if not demo and columns["source"][i] == 1:
                steps["demo_buffer"].append((columns, i))
    with np.load(tmp_path / "out.npz") as theirs:
        for name, ours in steps.items():
            assert len(theirs[f"{name}/rewards"]) == len(ours) > 0
            for row, (columns, i) in enumerate(ours):
                for path in (
                    "actions",
                    "rewards",
                    "observations/front",
                    "next_observations/front",
                    "next_observations/state",
                ):
                    assert np.array_equal(theirs[f"{name}/{path}"][row], columns[path][i]), (name, path, row)
                assert theirs[f"{name}/dones"][row] == (columns["terminated"][i] or columns["truncated"][i])
                assert theirs[f"{name}/masks"][row] == 1.0 - columns["terminated"][i]
