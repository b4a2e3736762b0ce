"""The names of HIL-SERL and agentlace: its buffers and queue, its client and server,
its SpaceMouse wrapper, and its plan's simulator.

The buffers and the queue can be imported from `hilt.replay` too, the client and the server from `hilt.wire`.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.compat.serl.buffers import MemoryEfficientReplayBufferDataStore, ReplayBufferDataStore
    from hilt.compat.serl.intervention import SpacemouseIntervention
    from hilt.compat.serl.isaac import IsaacSimFrankaEnv
    from hilt.replay.sampling.assembly import concat_batches
    from hilt.replay.transfer.queue import QueuedDataStore
    from hilt.wire import TrainerClient, TrainerConfig, TrainerServer, make_trainer_config

__all__ = [
    "MemoryEfficientReplayBufferDataStore",
    "ReplayBufferDataStore",
    "SpacemouseIntervention",
    "IsaacSimFrankaEnv",
    "concat_batches",
    "QueuedDataStore",
    "TrainerClient",
    "TrainerConfig",
    "TrainerServer",
    "make_trainer_config",
]
__getattr__ = lazy_exports(__name__, __file__)
