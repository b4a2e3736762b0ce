"""Policies over the network: a server that speaks openpi's protocol and answers several robots in one batch, and a
policy of ours that asks such a server."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.serving.array_messages import pack, unpack
    from hilt.serving.batcher import Batcher, BatcherSettings
    from hilt.serving.policy_server import PolicyServer, ServerLimits
    from hilt.serving.policy_wire import PolicyWire
    from hilt.serving.remote_policy import RemotePolicy
    from hilt.serving.weight_watcher import WeightWatcher

__all__ = [
    "Batcher",
    "BatcherSettings",
    "PolicyServer",
    "PolicyWire",
    "RemotePolicy",
    "ServerLimits",
    "WeightWatcher",
    "pack",
    "unpack",
]
__getattr__ = lazy_exports(__name__, __file__)
