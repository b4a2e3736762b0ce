"""What a policy server counts, as Prometheus reads it at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from hilt.wire.wire_metrics import Counter, Gauge


class ServingMetrics:
    """The counters and gauges of one server; safe to use from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self.answers = Counter(registry, "hilt_serving_answers_total", "Requests that were answered with actions.")
        self.errors = Counter(
            registry, "hilt_serving_errors_total", "Requests that were answered with an error, by its kind.", ("kind",)
        )
        self.refused = Counter(
            registry, "hilt_serving_refused_connections_total", "Connections that were refused.", ("status",)
        )
        self.batches = Counter(registry, "hilt_serving_batches_total", "Calls of the policy.")
        self.rows = Counter(registry, "hilt_serving_batch_rows_total", "Observations in all calls of the policy.")
        self.act_seconds = Counter(registry, "hilt_serving_act_seconds_total", "Time in calls of the policy.")
        self.wait_seconds = Counter(
            registry, "hilt_serving_wait_seconds_total", "Time that requests waited for a call of the policy to begin."
        )
        self.swaps = Counter(registry, "hilt_serving_swaps_total", "Newer weights that were taken up.")

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Adds a gauge that is read when somebody looks."""
        Gauge(self.registry, f"hilt_serving_{name}", help, read=read)

    def page(self) -> str:
        """The text that Prometheus reads."""
        return generate_latest(self.registry).decode()
