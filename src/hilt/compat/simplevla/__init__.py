"""The names of SimpleVLA-RL (verl), over Hilt's own tasks, rollouts and workers; docs/simplevla.md describes them."""

from hilt.compat.simplevla.data import BufferedDataLoader, LIBERO_Dataset, Robotwin_Dataset, collate_fn, rollout_batch, starts
from hilt.runtime.batch import Batch

DataProto = Batch

__all__ = [
    "Batch",
    "BufferedDataLoader",
    "DataProto",
    "LIBERO_Dataset",
    "Robotwin_Dataset",
    "collate_fn",
    "rollout_batch",
    "starts",
]
