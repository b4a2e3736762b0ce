"""The names of RLinf: from the steps of a rollout to trajectories, the channel that hands them over, and the buffer that stores them.

They can be imported from `hilt.replay` too. ``client.channel(name)`` of a `hilt.wire.TrainerClient` is the same channel from another
machine.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.compat.rlinf.buffer import TrajectoryReplayBuffer as TrajectoryReplayBuffer
    from hilt.compat.rlinf.rollout_result import ChunkStepResult as ChunkStepResult
    from hilt.compat.rlinf.rollout_result import EmbodiedRolloutResult as EmbodiedRolloutResult
    from hilt.compat.rlinf.rollout_result import EmbodiedTrajectoryBuilder as EmbodiedTrajectoryBuilder
    from hilt.compat.rlinf.rollout_result import convert_trajectories_to_batch as convert_trajectories_to_batch
    from hilt.compat.rlinf.trajectory_cache import TrajectoryCache as TrajectoryCache
    from hilt.formats.rlinf_trajectory import Trajectory as Trajectory
    from hilt.replay.transfer.channel import Channel as Channel

MODULES = {
    "TrajectoryReplayBuffer": "hilt.compat.rlinf.buffer",
    "ChunkStepResult": "hilt.compat.rlinf.rollout_result",
    "EmbodiedRolloutResult": "hilt.compat.rlinf.rollout_result",
    "EmbodiedTrajectoryBuilder": "hilt.compat.rlinf.rollout_result",
    "convert_trajectories_to_batch": "hilt.compat.rlinf.rollout_result",
    "TrajectoryCache": "hilt.compat.rlinf.trajectory_cache",
    "Trajectory": "hilt.formats.rlinf_trajectory",
    "Channel": "hilt.replay.transfer.channel",
}
__getattr__ = lazy_exports(__name__, MODULES)
