"""What a run reports: metrics on disk and in other tools, learning curves, a live
table, alarms, and intervals of success rates."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.observe.alarms import Alarm, Alarms
    from hilt.observe.live import Live, Standing
    from hilt.observe.metrics import Metrics, read_metrics
    from hilt.observe.plots import plot
    from hilt.observe.sinks import Sink, open_sinks
    from hilt.observe.statistics import wilson

__all__ = [
    "Alarm",
    "Alarms",
    "Live",
    "Metrics",
    "Sink",
    "Standing",
    "open_sinks",
    "plot",
    "read_metrics",
    "wilson",
]
__getattr__ = lazy_exports(__name__, __file__)
