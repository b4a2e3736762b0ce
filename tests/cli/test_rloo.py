"""``hilt train rloo``: a trainer's YAML, overrides, and a run that goes on."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hilt.cli import app

PLAN = """
task: {benchmark_name: tabletop, task_names_to_use: [reach, button, pick_red], num_parallel_envs: 2,
       max_episode_length: 8}
algo: {rloo_batch_size: 2, data_batch_size: 4, num_epochs: 1, gradient_accumulation_steps: 1}
training: {num_train_steps: 2}
"""
SMALL = [
    "task_options.image_size=16",
    "policy_options.image_size=16",
    "policy_options.width=16",
    "policy_options.depth=1",
]
SMALL += ["policy_options.chunk=4", "pool.workers=0"]


@pytest.fixture
def hilt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return lambda *words: CliRunner().invoke(app, ["train", "rloo", *words])


def test_a_dry_run_shows_what_the_file_comes_to(hilt, tmp_path):
    shown = hilt("--config", "plan.yaml", "--dry-run", "optimizer.learning_rate=0.002", *SMALL)
    assert shown.exit_code == 0, shown.output
    for line in (
        "estimator: rloo",
        "group_size: 2",
        "data_batch_size: 4",
        "tasks_per_step: 1",
        "learning_rate: 0.002",
        "step_limit: 8",
    ):
        assert line in shown.output
    assert (
        "would begin in runs/rloo-plan" in shown.output and "a new small_vla, which has learned nothing" in shown.output
    )
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_is_one_line(hilt, tmp_path):
    assert "error: give --config FILE" in hilt().output
    assert "error: which run goes on?" in hilt("--resume").output
    (tmp_path / "plan.yaml").write_text(
        PLAN.replace("data_batch_size: 4", "data_batch_size: 5, max_sampling_attempts: 1")
    )
    failed = hilt("--config", "plan.yaml")
    assert failed.exit_code == 1 and "data_batch_size=5 needs 3" in failed.output
    assert "error: plan.yaml: no setting named 'algo.rloo'" in _with(hilt, tmp_path, "num_epochs", "rloo").output


def _with(hilt, folder, old, new):
    (folder / "plan.yaml").write_text(PLAN.replace(old, new))
    return hilt("--config", "plan.yaml")


def test_it_trains_and_goes_on(hilt, tmp_path):
    first = hilt("--config", "plan.yaml", *SMALL, "collect.data_batch_size=5")
    assert first.exit_code == 0, first.output
    assert "max_steps is reached: 2 training steps" in first.output
    assert "iteration 1, rank 0: task tabletop/reach, target 5 episodes, collected 5" in first.output
    assert (
        "iteration 2, rank 0: task tabletop/reach, tabletop/button, target 5 episodes, collected 5 (3 of them"
        in first.output
    )
    again = hilt("--config", "plan.yaml", "--resume", "max_steps=3")
    assert again.exit_code == 0 and "max_steps is reached: 3 training steps" in again.output
