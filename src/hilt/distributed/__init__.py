"""Training on many ranks: how they are started, how they reduce and shard, and where they run.

A `Group` of workers is opened from a `Placement`: in this process, in processes of this machine, or on a Ray cluster.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.distributed.group import open_group
    from hilt.distributed.optimizer import DataParallelOptimizer
    from hilt.distributed.placement import Placement, Sharding
    from hilt.distributed.ranks import Ranks
    from hilt.distributed.remote_workers import Group
    from hilt.distributed.shard import Sharded

__all__ = [
    "DataParallelOptimizer",
    "Group",
    "Placement",
    "Ranks",
    "Sharded",
    "Sharding",
    "open_group",
]
__getattr__ = lazy_exports(__name__, __file__)
