"""From a view to batches: samplers, selectors, rate limiters, mixes, prefetching and torch datasets.

online, demo = log.all().sampler(seed=0, n_step=3), JointSampler({"shown": demos.all(), "human": human}, seed=1)
with closing(Mix({"online": online, "demo": demo}).batches(256)) as batches:
    batch = next(batches)
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.replay.sampling.assembly import (
        Assembly,
        Batch,
        Chunks,
        Episodes,
        NStep,
        Sequences,
        Stacked,
        Steps,
        concat_batches,
    )
    from hilt.replay.sampling.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio, Stack
    from hilt.replay.sampling.prefetch import Prefetch
    from hilt.replay.sampling.sampler import JointSampler, Mix, Sampler
    from hilt.replay.sampling.selectors import Fifo, Lifo, MaxHeap, MinHeap, Prioritized, Selector, Uniform
    from hilt.replay.sampling.torch_dataset import StepBatches, StepDataset, StepLoader

__all__ = [
    # what draws, and what it draws
    "Sampler",
    "JointSampler",
    "Mix",
    "Batch",
    "Prefetch",
    "concat_batches",
    # what an element of a batch is
    "Assembly",
    "Steps",
    "NStep",
    "Sequences",
    "Chunks",
    "Stacked",
    "Episodes",
    # who waits for whom
    "RateLimiter",
    "MinSize",
    "SampleToInsertRatio",
    "Queue",
    "Stack",
    # which item comes next
    "Selector",
    "Uniform",
    "Prioritized",
    "Fifo",
    "Lifo",
    "MinHeap",
    "MaxHeap",
    # datasets of torch.utils.data
    "StepDataset",
    "StepBatches",
    "StepLoader",
]
__getattr__ = lazy_exports(__name__, __file__)
