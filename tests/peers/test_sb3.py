"""Stable-Baselines3's SAC in ``python -m bench learn`` has what ours has:
environment, demonstrations, the size of the encoder.

How to run it:

    pip install -c constraints.txt '.[learn-bench]' && python -m pytest -m peers tests/peers/test_sb3.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.sides import Side

from hilt.hil.evaluate import load_agent
from hilt.replay import Log
from tests.wire.processes import free_port

pytestmark = pytest.mark.peers


def test_sb3_setup_equals_ours(tmp_path: Path):
    pytest.importorskip("stable_baselines3")
    run = tmp_path / "run"
    settings = [
        "task_options.image_size=32",
        "demonstrations=2",
        "agent.encoder.pretrain_updates=5",
        "training_starts=50",
        "max_steps=5",
    ]
    ports = [f"wire.port={free_port()}", f"wire.broadcast_port={free_port()}"]
    words = [sys.executable, "-m", "hilt", "train", "tabletop_pick", *settings, *ports, "--run", str(run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with Log.open(run / "demos", "r") as log:
        demonstrated = len(log)
    ours = sum(parameter.numel() for parameter in load_agent(run).encoder.parameters())
    with Side("bench.learn_sides", "sb3") as side:
        about = side.ask("start", run=str(run), learning_rate=3e-4, updates_per_step=1.0, seed=0)
        assert about["demonstrated_steps"] == demonstrated and about["encoder_parameters"] == ours
        trained = side.ask("train", timeout=240, seconds=8.0)
        assert trained["steps"] > 0 and trained["seconds"] < 60
        tried = side.ask("evaluate", timeout=240, states=2)
        assert len(tried) == 2 and all(0 <= steps <= 60 for steps in tried)
    with Side("bench.learn_sides", "operator") as side:
        assert all(0 <= steps <= 60 for steps in side.ask("alone", run=str(run), states=2))
