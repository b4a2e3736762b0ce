"""Experience: one log, many views.

`Log`, `View`, `Sampler` and `Mix` are the store itself. The other names are those the field knows, as faces of a log.
"""

from hilt.replay.buffers import MemoryEfficientReplayBufferDataStore, ReplayBufferDataStore
from hilt.replay.channel import Channel
from hilt.replay.limiter import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
from hilt.replay.log import Log
from hilt.replay.mix import Mix, concat_batches
from hilt.replay.queued import QueuedDataStore
from hilt.replay.rlinf import TrajectoryReplayBuffer
from hilt.replay.rollout import ChunkStepResult, EmbodiedRolloutResult, EmbodiedTrajectoryBuilder, Trajectory, convert_trajectories_to_batch
from hilt.replay.sample import Batch, Sampler
from hilt.replay.schema import Schema
from hilt.replay.trajectory_cache import TrajectoryCache
from hilt.replay.view import View

__all__ = [
    "Log",
    "Schema",
    "View",
    "Sampler",
    "Batch",
    "Mix",
    "concat_batches",
    "RateLimiter",
    "MinSize",
    "SampleToInsertRatio",
    "Queue",
    "Stack",
    "ReplayBufferDataStore",
    "MemoryEfficientReplayBufferDataStore",
    "QueuedDataStore",
    "TrajectoryReplayBuffer",
    "TrajectoryCache",
    "Trajectory",
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "EmbodiedTrajectoryBuilder",
    "convert_trajectories_to_batch",
    "Channel",
]
