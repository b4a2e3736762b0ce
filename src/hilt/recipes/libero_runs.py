"""Recipes for LIBERO's five suites: ``hilt train libero_spatial policy=FOLDER``, a
policy that has been fine-tuned on its demonstrations.

A policy that never succeeds has nothing to learn from: a new one (policy=small_vla) only shows that everything works.
Files that a suite lacks are named before anything starts.
"""

from __future__ import annotations

from hilt.algos.config import Batching, PolicyGradient
from hilt.envs.libero import SUITES
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla


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
