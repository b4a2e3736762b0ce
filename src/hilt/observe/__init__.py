"""What a run tells: its metrics on the disk, the same elsewhere, curves of it, and a table while it goes on."""

from hilt.observe.metrics import Metrics, read_metrics

__all__ = ["Metrics", "read_metrics"]
