"""The names of HIL-SERL and agentlace: its buffers and queue, its client and server, its SpaceMouse wrapper, and its plan's simulator.

The buffers and the queue can be imported from `hilt.replay` too, the client and the server from `hilt.wire`.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.compat.serl.buffers import MemoryEfficientReplayBufferDataStore as MemoryEfficientReplayBufferDataStore
    from hilt.compat.serl.buffers import ReplayBufferDataStore as ReplayBufferDataStore
    from hilt.compat.serl.intervention import SpacemouseIntervention as SpacemouseIntervention
    from hilt.compat.serl.isaac import IsaacSimFrankaEnv as IsaacSimFrankaEnv
    from hilt.replay.sampling.mix import concat_batches as concat_batches
    from hilt.replay.transfer.queue import QueuedDataStore as QueuedDataStore
    from hilt.wire import TrainerClient as TrainerClient
    from hilt.wire import TrainerConfig as TrainerConfig
    from hilt.wire import TrainerServer as TrainerServer
    from hilt.wire import make_trainer_config as make_trainer_config

MODULES = {
    "MemoryEfficientReplayBufferDataStore": "hilt.compat.serl.buffers",
    "ReplayBufferDataStore": "hilt.compat.serl.buffers",
    "SpacemouseIntervention": "hilt.compat.serl.intervention",
    "IsaacSimFrankaEnv": "hilt.compat.serl.isaac",
    "concat_batches": "hilt.replay.sampling.mix",
    "QueuedDataStore": "hilt.replay.transfer.queue",
    "TrainerClient": "hilt.wire",
    "TrainerConfig": "hilt.wire",
    "TrainerServer": "hilt.wire",
    "make_trainer_config": "hilt.wire",
}
__getattr__ = lazy_exports(__name__, MODULES)
