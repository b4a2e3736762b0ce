"""The names of RLinf: from the steps of a rollout to trajectories, the channel that hands them over, and the buffer that stores them.

They are implemented in `hilt.replay` and can be imported from there too. ``client.channel(name)`` of a `hilt.wire.TrainerClient` is the
same channel from another machine.
"""

from hilt.replay import (
    Channel,
    ChunkStepResult,
    EmbodiedRolloutResult,
    EmbodiedTrajectoryBuilder,
    Trajectory,
    TrajectoryCache,
    TrajectoryReplayBuffer,
    convert_trajectories_to_batch,
)

__all__ = [
    "Channel",
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "EmbodiedTrajectoryBuilder",
    "Trajectory",
    "TrajectoryCache",
    "TrajectoryReplayBuffer",
    "convert_trajectories_to_batch",
]
