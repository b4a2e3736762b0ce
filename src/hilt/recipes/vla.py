"""Recipes for post-training: complete settings of runs that a command line changes in places."""

from __future__ import annotations

from hilt.algos.config import Batching, Optimizer, PolicyGradient
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla


def vla_debug() -> Vla:
    """Every part at work, in seconds: too short to learn anything."""
    return Vla(
        tasks=["tabletop/reach", "tabletop/button"],
        task_options={"image_size": 32, "step_limit": 12},
        policy_options={"width": 32, "depth": 1, "chunk": 4},
        pool=SimulatorSettings(slots=4),
        collect=Collecting(group_size=2, data_batch_size=4),
        algorithm=PolicyGradient(batch=Batching(trajectories_per_step=2, chunks_per_pass=8)),
        optimizer=Optimizer(learning_rate=1e-4),
        validation=Validation(episodes=2, period=2),
        max_steps=3,
        checkpoint_period=1,
    )
