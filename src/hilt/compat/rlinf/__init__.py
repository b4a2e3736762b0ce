"""The names of RLinf: from the steps of a rollout to trajectories, the channel that
hands them over, and the buffer that stores them.

They can be imported from `hilt.replay` too. ``client.channel(name)`` of a
`hilt.wire.TrainerClient` is the same channel from another machine.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.compat.rlinf.buffer import TrajectoryReplayBuffer
    from hilt.compat.rlinf.rollout_result import (
        ChunkStepResult,
        EmbodiedRolloutResult,
        EmbodiedTrajectoryBuilder,
        convert_trajectories_to_batch,
    )
    from hilt.compat.rlinf.trajectory_cache import TrajectoryCache
    from hilt.formats.rlinf_trajectory import Trajectory
    from hilt.replay.transfer.channel import Channel

__all__ = [
    "TrajectoryReplayBuffer",
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "EmbodiedTrajectoryBuilder",
    "convert_trajectories_to_batch",
    "TrajectoryCache",
    "Trajectory",
    "Channel",
]
__getattr__ = lazy_exports(__name__, __file__)
