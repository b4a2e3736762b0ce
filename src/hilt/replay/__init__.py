"""Experience: one log, many views.

`Log`, `View`, `Sampler` and `Mix` are the store itself. The names that HIL-SERL's and RLinf's users know are
implemented over it in `hilt.compat`, and can be imported from here too.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports
from hilt.replay.edits import Edits
from hilt.replay.log import Log
from hilt.replay.sampling.assembly import Batch, concat_batches
from hilt.replay.sampling.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
from hilt.replay.sampling.sampler import JointSampler, Mix, Sampler
from hilt.replay.schema import Schema
from hilt.replay.transfer.channel import Channel
from hilt.replay.transfer.queue import QueuedDataStore
from hilt.replay.view import View

if TYPE_CHECKING:
    from hilt.compat.rlinf import (
        ChunkStepResult,
        EmbodiedRolloutResult,
        EmbodiedTrajectoryBuilder,
        Trajectory,
        TrajectoryCache,
        TrajectoryReplayBuffer,
        convert_trajectories_to_batch,
    )
    from hilt.compat.serl import MemoryEfficientReplayBufferDataStore, ReplayBufferDataStore

__all__ = [
    "Log",
    "Edits",
    "Schema",
    "View",
    "Sampler",
    "Batch",
    "Mix",
    "JointSampler",
    "concat_batches",
    "RateLimiter",
    "MinSize",
    "SampleToInsertRatio",
    "Queue",
    "Stack",
    "QueuedDataStore",
    "Channel",
    # of HIL-SERL
    "ReplayBufferDataStore",
    "MemoryEfficientReplayBufferDataStore",
    # of RLinf
    "TrajectoryReplayBuffer",
    "TrajectoryCache",
    "Trajectory",
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "EmbodiedTrajectoryBuilder",
    "convert_trajectories_to_batch",
]
__getattr__ = lazy_exports(__name__, __file__)
