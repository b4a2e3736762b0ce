"""``hilt train simplevla`` as a person meets it: a tiny OpenVLA-OFT of the golden
files, from rollouts to a merged policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from typer.testing import CliRunner

from hilt import cli
from hilt.envs import task
from hilt.policies.io.tensor_files import Tensors
from hilt.policies.vla.tokens import ByteTokenizer
from tests.golden.kinds.openvla import made

GOLDEN = Path(__file__).parents[1] / "golden/openvla/svla_1img.npz"
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
COMMAND = f"""
  data.task_suite_name=libero_goal data.n_samples=4 data.train_batch_size=2 data.filter_accuracy=True
  data.accuracy_lower_bound=0.1 data.accuracy_upper_bound=0.9 {MODEL}vla=openvla-oft {MODEL}lora_rank=2
  {MODEL}target_modules=[q_proj]
  {ROLLOUT}unnorm_key=tiny {ROLLOUT}dtype=float32 {ROLLOUT}temperature=1.6 {ROLLOUT}log_prob_micro_batch_size=2
  {ACTOR}ppo_mini_batch_size=4 {ACTOR}ppo_micro_batch_size=2 {ACTOR}optim.lr=0.01 algorithm.adv_estimator=grpo
  algorithm.kl_ctrl.kl_coef=0 trainer.n_gpus_per_node=0 trainer.save_freq=1 trainer.logger=[console]
  hilt.policy_options.allow_untrained=true hilt.pool.workers=0 hilt.validation.after=false
""".split()


class StandIn(gymnasium.Env[Any, Any]):
    """LIBERO's words without LIBERO: success is a second action that goes up, whatever is seen."""

    initial_states = {"train": 30, "eval": 10, "test": 10}  # noqa: RUF012
    instruction = "push the plate"

    def __init__(self, number: str, step_limit: int, wait_steps: int):
        self.step_limit, self._steps = step_limit, 0
        parts: dict[str, Any] = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}
        parts = {name: spaces.Box(-9, 9, (size,), np.float32) for name, size in parts.items()}
        pictures = ("agentview_image", "robot0_eye_in_hand_image")
        self.observation_space = spaces.Dict(
            parts | {name: spaces.Box(0, 255, (32, 32, 3), np.uint8) for name in pictures}
        )
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps, state = 0, (options or {}).get("state", 0)
        self._seen = {name: np.full(box.shape, state, box.dtype) for name, box in self.observation_space.spaces.items()}
        self._seen["robot0_eef_quat"][:] = 0.5
        return self._seen, {"succeed": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        done = self._steps == 10  # the second of the second chunk
        success = bool(done and action[2] > 0)
        return self._seen, float(success), done, False, {"succeed": success}


def checkpoint(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """The folder of a checkpoint, below another, with a stand-in for LIBERO."""
    patch.setitem(task.TASKS, "libero_goal", StandIn)
    with np.load(GOLDEN) as file:
        policy = made(json.loads(str(file["config"])), json.loads(str(file["keys"])), int(file["seed"]))
    policy.tokenizer = ByteTokenizer()
    policy.save_pretrained(folder / "sft")
    return folder / "sft"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return checkpoint(tmp_path, monkeypatch)


def run(*words: object, code: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(
        cli.app,
        ["train", "simplevla", *map(str, words)],
        env={"COLUMNS": "200", "ROBOT_PLATFORM": "LIBERO", **environment},
    )
    assert result.exit_code == code, result.output
    return result.output


def test_rollout_filter_grpo_lora_merge_resume(folder: Path, tmp_path: Path):
    given = [*COMMAND, f"{MODEL}path={folder}"]
    said = run(*given, "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'run'}")
    assert "training step: 2 groups (train_batch_size) x 4 (n_samples) = 8 episodes, 8 at each rank" in said
    said = run(*given, "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}", "--resume")
    assert "2 training steps" in said
    run(*given, "trainer.total_training_steps=2", "--run", tmp_path / "whole")
    before, resumed, whole = (Tensors(path) for path in (folder, tmp_path / "run/policy", tmp_path / "whole/policy"))
    assert set(before) == set(resumed) == set(whole)
    assert all(np.array_equal(resumed[name].numpy(), whole[name].numpy()) for name in whole), "resumed bit for bit"
    changed = {name for name in before if not np.array_equal(before[name].numpy(), resumed[name].numpy())}
    assert changed == {name for name in before if "q_proj" in name}, "adapters were trained, and merged"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "run/adapter").iterdir()
    }
    assert "checkpoint" not in {path.name for path in folder.iterdir()} and not list(folder.glob("*.back*")), (
        "the user's folder is as it was"
    )


def test_what_would_be_done_is_shown_and_what_is_wrong_told_in_a_line(folder: Path, tmp_path: Path):
    given = [*COMMAND, "trainer.total_training_steps=2"]
    said = run(*given, "--dry-run", "--run", tmp_path / "new", SFT_MODEL_PATH=str(folder))
    for words in (
        "group_size: 4",
        "gradient accumulation: 4 / 2 (ppo_micro_batch_size) = 2",
        "memory of the policy, in training",
        "would begin in",
    ):
        assert words in said
    assert not (tmp_path / "new").exists()
    assert "did you mean 'data.n_samples'?" in run("data.n_sample=8", code=1)
    assert "ROBOT_PLATFORM=ALOHA has chunks of 25 actions" in run(
        *given, f"{MODEL}path={folder}", code=1, ROBOT_PLATFORM="ALOHA"
    )
    assert "give the keys of SimpleVLA-RL" in run(code=1)


def test_a_dry_run_of_the_eight_gpu_command_shows_everything_on_a_machine_without_a_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The command of document 004, "运行示例"."""
    from tests.seeds.test_004_simplevla import COMMAND as EIGHT

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    # of the tiny checkpoint's statistics; and the stand-in has no other suite
    small = [
        f"{ROLLOUT}unnorm_key=tiny",
        "hilt.policy_options.allow_untrained=true",
        "data.task_suite_name=libero_goal",
    ]
    said = run(*EIGHT, *small, "--dry-run", "--run", tmp_path / "new", SFT_MODEL_PATH=str(folder))
    for words in (
        "group_size: 8", "step_limit: 512", "kind: processes", "would begin in",
        "64 groups (train_batch_size) x 8 (n_samples) = 512 episodes, 64 at each rank", "700 training steps",
        "memory of the policy, in training", "of which each of 8 ranks has a part",
        "this machine lacks, for a start:\n  - device 'cuda' is not on this machine, which has 0 CUDA devices",
    ):  # fmt: skip
        assert words in said, words
    assert not (tmp_path / "new").exists()
    said = run(*EIGHT, "--dry-run", "--run", tmp_path / "new", SFT_MODEL_PATH=str(tmp_path / "absent"))
    assert "device 'cuda' is not on this machine" in said and "expected the folder of a checkpoint" in said
    assert "is not on this machine" in run(
        *EIGHT, *small, "--run", tmp_path / "new", SFT_MODEL_PATH=str(folder), code=1
    )
    wrong = run(*EIGHT, "hilt.collect.group_size=1", "--dry-run", SFT_MODEL_PATH=str(folder), code=1)
    assert "collect.group_size" in wrong and "this machine lacks" not in wrong, "what cannot work anywhere is an error"
