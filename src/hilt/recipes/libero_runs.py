"""Recipes for LIBERO's five suites: ``hilt train libero_spatial policy=FOLDER``, a
policy that has been fine-tuned on its demonstrations.

A policy that never succeeds has nothing to learn from: a new one (policy=small_vla) only shows that everything works.
Files that a suite lacks are named before anything starts.
"""

from __future__ import annotations

from typing import Any

from hilt.algos.config import Batching, Optimizer, PolicyGradient
from hilt.envs.libero import SUITES
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla
from hilt.vla.sft import Sft

LEARNED = ["libero_goal/6"]
"""Put the cream cheese in the bowl: both stand in other places in each state"""
LEARNED_OPTIONS: dict[str, Any] = {
    "image_size": 64,
    "cameras": ["robot0_eye_in_hand"],
    "quality": "draft",
    "reflections": False,
    "step_limit": 170,
}
"""One small image a chunk, so that most of the time is physics; the scripted expert takes 90 to 130 steps"""
LEARNED_POLICY: dict[str, Any] = {"width": 64, "depth": 2, "keypoints": 8, "chunk": 10, "smoothing": 0.7}
"""Of a small_vla: 0.3M parameters"""
SIX = [f"libero_goal/{number}" for number in (1, 6, 8)] + [f"libero_spatial/{number}" for number in (0, 2, 7)]
"""Tasks of two suites that the scripted expert solves from all of 20 training states (docs/libero.md)"""
SIX_OPTIONS: dict[str, Any] = {"image_size": 64, "reflections": False, "step_limit": 170}
"""Two small images a chunk; the scripted expert takes 100 to 130 steps"""
SIX_POLICY: dict[str, Any] = {"width": 256, "depth": 4, "keypoints": 8, "chunk": 10, "smoothing": 0.7}
"""Of a small_vla: 4M parameters"""


def libero(suite: str) -> Vla:
    """All tasks of a suite, with the settings of SimpleVLA-RL where it has them: groups of 8, only
    those that neither all succeed nor all fail, four steps of the optimizer of 128 episodes;
    validated on states that are not trained on."""
    return Vla(
        tasks=[f"{suite}/{number}" for number in range(SUITES[suite])],
        # a simulator takes a gigabyte, and seconds to be made: a process keeps two
        pool=SimulatorSettings(workers=4, slots=8, envs_per_worker=2, start_s=600, step_s=300),
        collect=Collecting(
            group_size=8, data_batch_size=512, dynamic_sampling=True, oversample_factor=1.25, max_sampling_attempts=20
        ),
        algorithm=PolicyGradient(batch=Batching(trajectories_per_step=128, chunks_per_pass=16)),
        validation=Validation(period=4),
        max_steps=100,
        checkpoint_period=5,
    )


def libero_spatial() -> Vla:
    """LIBERO-Spatial: one bowl, in ten places."""
    return libero("libero_spatial")


def libero_object() -> Vla:
    """LIBERO-Object: ten things, one place."""
    return libero("libero_object")


def libero_goal() -> Vla:
    """LIBERO-Goal: one scene, ten things to do."""
    return libero("libero_goal")


def libero_10() -> Vla:
    """LIBERO-Long: ten long tasks."""
    return libero("libero_10")


def libero_90() -> Vla:
    """LIBERO-90: ninety short tasks."""
    return libero("libero_90")


def sft_libero() -> Sft:
    """A new small policy from a few demonstrations of one task of LIBERO, from which `libero_learned` goes on. For two
    cores without a GPU."""
    return Sft(
        tasks=list(LEARNED),
        task_options=dict(LEARNED_OPTIONS),
        demonstrations=4,
        demonstration_options={"noise": 0.1},
        policy_options={**LEARNED_POLICY, "shift": 2},
        validation=0.0,
        max_steps=300,
        batch_size=64,
        learning_rate=2e-3,
        warmup_steps=30,
        schedule="cosine",
    )


def libero_learned() -> Vla:
    """GRPO from the success of one task of LIBERO, after `sft_libero`: give it `policy`. Six groups of eight episodes
    in a step, and two passes over them, because learning takes little time beside the simulator. A quarter of the
    decisions are drawn: where all are, most episodes fail. For two cores without a GPU."""
    return Vla(
        policy_options=dict(LEARNED_POLICY),
        tasks=list(LEARNED),
        task_options=dict(LEARNED_OPTIONS),
        pool=SimulatorSettings(workers=2, slots=8, start_s=600, step_s=300),
        collect=Collecting(
            group_size=8,
            data_batch_size=48,
            temperature=0.8,
            drawn_share=0.25,
            dynamic_sampling=True,
            max_sampling_attempts=4,
            when_exhausted="partial",
        ),
        algorithm=PolicyGradient(
            dual_clip=3.0,
            reduction="token_mean",
            epochs=2,
            batch=Batching(trajectories_per_step=16, chunks_per_pass=104),
        ),
        optimizer=Optimizer(learning_rate=3e-4, weight_decay=0.0, warmup_ratio=0.02),
        validation=Validation(period=4, goal=1.0, hold=2),
        max_steps=60,
        checkpoint_period=5,
    )


def sft_libero_six() -> Sft:
    """One policy for six tasks of two suites, from a few demonstrations of each. For a GPU."""
    return Sft(
        tasks=list(SIX),
        task_options=dict(SIX_OPTIONS),
        demonstrations=5,
        demonstration_options={"noise": 0.1},
        policy_options={**SIX_POLICY, "shift": 2},
        validation=0.0,
        max_steps=2_000,
        batch_size=256,
        learning_rate=1e-3,
        warmup_steps=100,
        schedule="cosine",
    )


def libero_six() -> Vla:
    """GRPO from the success of six tasks, after `sft_libero_six`: give it `policy`. For a GPU and 16 cores: each of 14
    processes keeps a simulator of every task, because a new one takes seconds."""
    return Vla(
        policy_options=dict(SIX_POLICY),
        tasks=list(SIX),
        task_options=dict(SIX_OPTIONS),
        pool=SimulatorSettings(workers=14, slots=84, envs_per_worker=6, start_s=600, step_s=300),
        collect=Collecting(
            group_size=8,
            data_batch_size=192,
            temperature=0.8,
            dynamic_sampling=True,
            oversample_factor=1.25,
            max_sampling_attempts=4,
            when_exhausted="partial",
        ),
        algorithm=PolicyGradient(
            dual_clip=3.0,
            reduction="token_mean",
            epochs=2,
            batch=Batching(trajectories_per_step=96, chunks_per_pass=512),
        ),
        optimizer=Optimizer(learning_rate=3e-4, weight_decay=0.0, warmup_ratio=0.02),
        validation=Validation(period=5, goal=0.95, hold=2),
        max_steps=60,
        checkpoint_period=5,
    )


def libero_debug() -> Vla:
    """Every part at work in the real simulator, in a few minutes of one core: too short to learn anything."""
    return Vla(
        tasks=["libero_spatial/0", "libero_goal/0"],
        task_options={"image_size": 64, "step_limit": 8, "wait_steps": 2, "reflections": False},
        policy_options={"width": 32, "depth": 1, "chunk": 4},
        pool=SimulatorSettings(workers=1, slots=2, envs_per_worker=2, start_s=600, step_s=300),
        collect=Collecting(group_size=2, data_batch_size=4),
        # all episodes fail: only entropy moves it
        algorithm=PolicyGradient(entropy=0.01, batch=Batching(chunks_per_pass=8)),
        validation=Validation(episodes=1, before=False, period=0),
        max_steps=2,
        checkpoint_period=1,
    )
