"""A distributed RLOO trainer's own set-up: pi0, made tiny, on two ranks over nine
tasks of the real libero_spatial, resumed once."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt.cli import app
from hilt.policies.vla.flow import Flow
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.normalize import statistics
from hilt.policies.vla.pi0 import Pi0, Pi0Config
from hilt.policies.vla.tokens import ByteTokenizer
from hilt.vla.episode_log import EpisodeLog
from tests.recipes.test_ript_run import PLAN

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_spec("robosuite") is None, reason="LIBERO is not installed: make test-peers installs it"),
    pytest.mark.skipif(
        not Path(os.environ.get("HILT_LIBERO_ASSETS", ""), "scenes").is_dir(),
        reason="LIBERO's assets are not here: set HILT_LIBERO_ASSETS to their folder",
    ),
]


def tiny_pi0(folder: Path) -> None:
    sizes: dict[str, Any] = {
        "vision": VisionConfig(16, 1, 2, 24, 14, 28),
        "vocabulary": 300,
        "tokenizer_max_length": 200,
    }
    sizes |= {
        "chunk_size": 4,
        "n_action_steps": 4,
        "max_action_dim": 8,
        "max_state_dim": 8,
        "action_dim": 7,
        "state_dim": 8,
    }
    sizes |= {"vlm": StackConfig(16, 2, 24, 4, 2, 4), "expert": StackConfig(12, 2, 16, 4, 2, 4), "flow": Flow(steps=2)}
    rows = np.random.default_rng(0).normal(0, 0.3, (50, 8))
    usual = {"state": statistics(rows), "action": statistics(rows[:, :7])}
    Pi0(Pi0Config(**sizes, images=("full_image", "wrist_image")), ByteTokenizer(), usual, 0).save_pretrained(folder)


def test_nine_tasks_two_ranks_two_iterations_resumed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_pi0(tmp_path / "pi0")
    (tmp_path / "plan.yaml").write_text(PLAN)
    here = ["policy=pi0", "placement.kind=processes", "placement.ranks=2", "pool.workers=0"]
    short = [
        "task_options.image_size=32",
        "task_options.step_limit=8",
        "validation.after=false",
        "validation.episodes=0",
    ]

    def train(*words: str) -> None:
        done = CliRunner().invoke(app, ["train", "rloo", "--config", "plan.yaml", *words])
        assert done.exit_code == 0, done.output

    train(*here, *short, "max_steps=1")
    train("--resume", "max_steps=2")
    for rank, tasks in enumerate(([0, 2], [1, 3])):
        log = EpisodeLog(tmp_path / "runs" / "rloo-plan" / "rollouts" / f"rank-{rank}")
        episodes = [log.read(number)[0] for number in range(8)]
        log.close()
        assert [episode.start.task for episode in episodes] == [
            f"libero_spatial/{task}" for task in tasks for _ in range(4)
        ]
        for low in range(0, 8, 4):
            drawn = sorted((episode.start.state, episode.first) for episode in episodes[low : low + 4])
            assert [state for state, _ in drawn] == [0, 1, 2, 3], "the first states of the task's ring"
            assert len({first for _, first in drawn}) == 4, "and another first frame for each"
        assert all(episode.steps == 8 and episode.version == (place >= 4) for place, episode in enumerate(episodes))
