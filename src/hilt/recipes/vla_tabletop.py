"""The recipe of `hilt demo vla`: four buttons, whose colors change places, and words
that name one of them. For two cores, no GPU."""

from __future__ import annotations

from hilt.algos.config import Batching, Optimizer, PolicyGradient
from hilt.vla.collect import Collecting
from hilt.vla.config import SimulatorSettings, Validation, Vla

TASKS = [f"tabletop/press_{color}" for color in ("red", "green", "blue", "yellow")]
POLICY = {"width": 64, "depth": 2, "keypoints": 4, "chunk": 3, "smoothing": 0.7}
"""Of a small_vla: 0.2M parameters that look through the camera of the hand"""


def vla_tabletop() -> Vla:
    """GRPO from success alone: twelve groups of eight in a step, all of them with an advantage. Draws are a little
    cooler than the policy: at 1 its thirteen values cost even a good one a third of its successes. Give it `policy`
    and `imitation`, as `hilt demo vla` does."""
    return Vla(
        policy_options=dict(POLICY),
        tasks=list(TASKS),
        task_options={"image_size": 64, "cameras": ["wrist"], "control_hz": 5, "step_limit": 9},
        pool=SimulatorSettings(workers=2, slots=64),
        collect=Collecting(group_size=8, data_batch_size=96, temperature=0.8, dynamic_sampling=True),
        algorithm=PolicyGradient(
            dual_clip=3.0, reduction="token_mean", batch=Batching(trajectories_per_step=48, chunks_per_pass=144)
        ),
        optimizer=Optimizer(learning_rate=4e-4, weight_decay=0.0, warmup_ratio=0.02),
        validation=Validation(episodes=25, period=10, goal=0.98, hold=3),
        max_steps=400,
        checkpoint_period=40,
        rollouts_gb=2.0,
    )
