"""Experience: one log, many views."""

from hilt.replay.limiter import MinSize, Queue, RateLimiter, SampleToInsertRatio
from hilt.replay.log import Log
from hilt.replay.mix import Mix, concat_batches
from hilt.replay.sample import Batch, Sampler
from hilt.replay.schema import Schema
from hilt.replay.view import View

__all__ = [
    "Batch",
    "Log",
    "MinSize",
    "Mix",
    "Queue",
    "RateLimiter",
    "SampleToInsertRatio",
    "Sampler",
    "Schema",
    "View",
    "concat_batches",
]
