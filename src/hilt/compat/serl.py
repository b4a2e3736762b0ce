"""The names of HIL-SERL and agentlace: its buffers, its queue, its client and server.

They are implemented in `hilt.replay` and `hilt.wire` and can be imported from there too.
"""

from hilt.replay import MemoryEfficientReplayBufferDataStore, QueuedDataStore, ReplayBufferDataStore, concat_batches
from hilt.wire import TrainerClient, TrainerConfig, TrainerServer, make_trainer_config

__all__ = [
    "MemoryEfficientReplayBufferDataStore",
    "QueuedDataStore",
    "ReplayBufferDataStore",
    "TrainerClient",
    "TrainerConfig",
    "TrainerServer",
    "concat_batches",
    "make_trainer_config",
]
