"""The names of HIL-SERL and agentlace: its buffers, its queue, its client and server, its SpaceMouse wrapper, and its plan's simulator.

The first are implemented in `hilt.replay` and `hilt.wire` and can be imported from there too. `SpacemouseIntervention` and
`IsaacSimFrankaEnv` need gymnasium, which is imported with them.
"""

from typing import TYPE_CHECKING, Any

from hilt.core.names import load_own
from hilt.replay import MemoryEfficientReplayBufferDataStore, QueuedDataStore, ReplayBufferDataStore, concat_batches
from hilt.wire import TrainerClient, TrainerConfig, TrainerServer, make_trainer_config

if TYPE_CHECKING:
    from hilt.compat.isaac import IsaacSimFrankaEnv
    from hilt.compat.spacemouse import SpacemouseIntervention

LATE = {"IsaacSimFrankaEnv": "hilt.compat.isaac", "SpacemouseIntervention": "hilt.compat.spacemouse"}

__all__ = [
    "IsaacSimFrankaEnv",
    "MemoryEfficientReplayBufferDataStore",
    "QueuedDataStore",
    "ReplayBufferDataStore",
    "SpacemouseIntervention",
    "TrainerClient",
    "TrainerConfig",
    "TrainerServer",
    "concat_batches",
    "make_trainer_config",
]


def __getattr__(name: str) -> Any:
    if name in LATE:
        return load_own(f"{LATE[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
