"""A whole training step of a vision-language-action model at full size on one GPU, by the command that a user gives:
OpenVLA-OFT by `hilt train simplevla` and pi0 by `hilt train pi0_rloo`, with random weights. Each row is a step after
the first of a run, which compiles; where the time goes, the most memory, and what `--dry-run` predicts from the
calibration of this machine are beside it. With --quick, or without a GPU, a tiny OpenVLA-OFT on the CPU.

LIBERO needs assets that a bench does not have, so that OpenVLA-OFT acts in a stand-in of its observations: images of
256 pixels that do not change, and 512 steps. All episodes of the first of three groups fail, so that it is dropped and
another one is made in its place; the others have both outcomes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from bench.lab import Lab
from bench.report import Row, Target, at_most
from bench.sides import ROOT

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
SUITE = "libero_10"
STEP_LIMIT = 512
PREDICTION = re.compile(r"time of a training step on .*: ([0-9.]+) s")
PART = re.compile(r"^  (acting|simulation|learning|optimizer) +([0-9.]+) s", re.MULTILINE)
SECONDS = 900.0
"""That a run may take, with compiling"""
OFT = [
    *(f"data.task_suite_name={SUITE}", "data.n_samples=4", "data.train_batch_size=2", "data.filter_accuracy=True"),
    *("data.accuracy_lower_bound=0.1", "data.accuracy_upper_bound=0.9", f"{MODEL}vla=openvla-oft"),
    *(f"{MODEL}lora_rank=32", f"{ROLLOUT}unnorm_key=libero_bench", f"{ROLLOUT}temperature=1.6"),
    *(f"{ACTOR}ppo_mini_batch_size=8", f"{ACTOR}ppo_micro_batch_size=1", f"{ACTOR}traj_mini_batch_size=16"),
    *(f"{ACTOR}optim.lr=1e-6", "algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0"),
    *("trainer.logger=[console]", "trainer.save_freq=-1"),
    *("hilt.policy_options.allow_untrained=true", "hilt.validation.after=false"),
]
"""As SimpleVLA-RL's scripts have it, but for eight episodes in a step"""
PI0 = [
    *("policy=pi0", "policy_options.random_weights=true", "tasks=[tabletop/pick]"),
    *("task_options={image_size: 64, step_limit: 60}", "validation={before: false, period: 0, after: false}"),
]


class StandIn(gymnasium.Env[Any, Any]):
    """LIBERO's observations without LIBERO. All environments are of one process, and know the groups from each other by
    their initial states."""

    groups: ClassVar[list[tuple[str, int]]] = []
    """The task and the state of each, in the order in which they were begun"""
    made: ClassVar[itertools.count[int]] = itertools.count()
    initial_states = {"train": 30, "eval": 10, "test": 10}  # noqa: RUF012
    instruction = "put both moka pots on the stove"
    pixels = 256

    def __init__(self, number: str, step_limit: int = STEP_LIMIT, wait_steps: int = 0, **options: Any):
        self.step_limit, self._task, self._number = step_limit, number, next(self.made)
        sizes = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}
        parts: dict[str, Any] = {name: spaces.Box(-9, 9, (size,), np.float32) for name, size in sizes.items()}
        cameras = ("agentview_image", "robot0_eye_in_hand_image")
        image = spaces.Box(0, 255, (self.pixels, self.pixels, 3), np.uint8)
        self.observation_space = spaces.Dict(parts | dict.fromkeys(cameras, image))
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        begun = self._task, int((options or {}).get("state", 0))
        if begun not in self.groups:
            self.groups.append(begun)
        self._steps, self._succeeds = 0, self.groups.index(begun) % 3 > 0 and self._number % 2 > 0
        draws = np.random.default_rng(begun[1])
        self._seen = {
            name: draws.integers(0, 256, box.shape, np.uint8) if box.dtype == np.uint8 else np.full(box.shape, 0.5)
            for name, box in self.observation_space.spaces.items()
        }
        self._seen = {name: value.astype(self.observation_space[name].dtype) for name, value in self._seen.items()}
        return self._seen, {"succeed": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        done = self._steps == self.step_limit
        success = done and self._succeeds
        return self._seen, float(success), done, False, {"succeed": success}


class Case(NamedTuple):
    words: Sequence[str]
    what: str
    targets: tuple[Target, ...] = ()
    steps: int = 2
    """Of a run. The row is the median of all but the first, and of what overlaps with the next one all but the last"""
    overlaps: bool = False


BFLOAT16 = "hilt.policy_options.dtype=bfloat16"
PASSES = [f"{ACTOR}traj_mini_batch_size=32"]
ALONE, AHEAD = ["hilt.pool.workers=0"], ["hilt.pool.workers=1", "hilt.collect.ahead=1"]
OFT_WHAT = "OpenVLA-OFT, adapters of rank 32, 8 of 12 episodes of 64 chunks learned from"
CASES = {
    "step_oft": Case([BFLOAT16, *ALONE], f"{OFT_WHAT}; passes of 16", (at_most(40),)),
    "step_oft_larger": Case([BFLOAT16, *PASSES, *ALONE], f"{OFT_WHAT}; passes of 32", (at_most(40),)),
    "step_oft_ahead": Case(
        [BFLOAT16, *AHEAD], f"{OFT_WHAT}; passes of 16, rolled out during the update before", steps=4, overlaps=True
    ),
    "step_pi0": Case(["pi0_rloo"], "pi0, all weights, products in bfloat16, 32 episodes of 12 chunks"),
    "step_pi0_float32": Case(
        ["pi0_rloo", "policy_options.compute=float32"],
        "pi0, all weights, products in float32, 32 episodes of 12 chunks",
    ),
    "step_pi0_24gb": Case(["pi0_rloo_24gb"], "pi0, adapters on the expert, 24 GB, 32 episodes of 12 chunks"),
}


def steps(lab: Lab) -> Iterator[Row]:
    import torch

    tiny = lab.quick or not torch.cuda.is_available()
    wanted = [name for name in CASES if lab.wants("steps", name)]
    if tiny:  # there is no tiny pi0 by name
        wanted = [name for name in wanted if name.startswith("step_oft")]
    folder = None
    if any(name.startswith("step_oft") for name in wanted):
        folder = _checkpoint(lab, tiny)
    for name in wanted:  # each takes minutes
        yield _row(lab, name, folder, tiny)


def _checkpoint(lab: Lab, tiny: bool) -> Path:
    import torch

    from bench.vla_sizes import bare

    folder = lab.new("openvla")
    policy = bare(tiny).initialize(0, "cpu" if tiny else "cuda", torch.float32 if tiny else torch.bfloat16)
    policy.save_pretrained(folder)
    del policy
    if not tiny:
        torch.cuda.empty_cache()  # the run needs the card
    return folder


def _row(lab: Lab, name: str, folder: Path | None, tiny: bool) -> Row:
    run, case = lab.new(name), CASES[name]
    if name.startswith("step_oft"):
        words = ["train", "simplevla", *OFT, f"{MODEL}path={folder}", *case.words]
        words += [f"trainer.total_training_steps={case.steps}", f"trainer.n_gpus_per_node={0 if tiny else 1}"]
        words += [f"{ROLLOUT}dtype=float32"] if tiny else []
        words = [word for word in words if not (tiny and word.endswith("dtype=bfloat16"))]
        words += ["hilt.task_options.step_limit=16"] if tiny else []
    else:
        words = ["train", *case.words, *PI0, f"max_steps={case.steps}", "device=cuda"]
    predicted = _hilt([*words, "--run", str(run), "--dry-run"])
    lab.progress(f"{name}: hilt {' '.join(words)}")
    _hilt([*words, "--run", str(run)])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *later = [record for record in records if record["kind"] == "update"][: case.steps]
    later = sorted(later[: len(later) - case.overlaps], key=lambda record: float(record["step_seconds"]))
    second = later[(len(later) - 1) // 2]  # the middle one
    seconds = float(second["step_seconds"])
    shares = {part: seconds * second[f"{part}_share"] for part in ("model", "update", "simulator", "other")}
    note = [f"acting {shares['model']:.1f} s, learning {shares['update']:.1f}, simulator {shares['simulator']:.1f}, "]
    note[0] += f"the rest {shares['other']:.1f}; {second['rows']:,.0f} chunks acted, {second['chunks']:,.0f} learned"
    note.append(f"first step {first['step_seconds']:.0f} s")
    if len(later) > 1:
        note.append(f"steps of {', '.join(format(record['step_seconds'], '.1f') for record in later)} s")
    if "gpu_memory_gb" in second:
        most = max(record["gpu_memory_gb"] for record in (first, *later))
        note.append(f"GPU memory at most {most:.1f} GB")
    if found := PREDICTION.search(predicted):
        parts = ", ".join(f"{part} {value}" for part, value in PART.findall(predicted))
        note.append(f"--dry-run predicts {found[1]} s ({parts})")
    note += [line.strip() for line in predicted.splitlines() if line.startswith("memory of the ")]
    note.append(f"command: hilt {' '.join(words)}")
    size = "a tiny model on the CPU" if tiny else ""
    return Row(name, seconds, "s", case.what, case.targets, size=size, note="; ".join(note))


def _hilt(words: Sequence[str]) -> str:
    """Returns what a command prints. It runs in a process of this module, which knows the stand-in."""
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": places + os.pathsep + os.environ.get("PYTHONPATH", ""), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.vla_steps", *words],
        env={**env, "ROBOT_PLATFORM": "LIBERO"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"hilt {' '.join(words)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    from hilt import cli
    from hilt.envs import register

    register(SUITE, "bench.vla_steps:StandIn")  # by its name, as simulators may have processes of their own
    cli.app(sys.argv[1:])
