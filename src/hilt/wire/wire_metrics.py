"""Counters and gauges that Prometheus can read at ``http://127.0.0.1:PORT/metrics``.

    registry = CollectorRegistry(auto_describe=True)
    steps = Counter(registry, "hilt_wire_steps_received_total", "Steps that were stored.", ("actor",))
    steps.add(1, actor="arm-1")
    endpoint = serve(registry, 9100)

`prometheus_client` writes the page and answers requests. Its own counters are not used, because actors may come and go
for ever: of ours, each keeps the label sets that changed last.
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from hilt.core.errors import ConfigError

MAX_SERIES = 1_000
"""Label sets per metric. Beyond that the one that changed longest ago is forgotten."""
HOST = "127.0.0.1"
REQUEST_SECONDS = 5.0
MAX_CONNECTIONS = 16

_log = logging.getLogger("hilt.wire")


class Metric(Collector):
    """One number for each set of label values; safe to use from any thread."""

    family: ClassVar[type[CounterMetricFamily] | type[GaugeMetricFamily]]

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        read: Callable[[], float] | None = None,
    ):
        """A metric with `read`, which has no labels, is asked for its value when somebody looks."""
        self.name, self.help, self.labels = name, help, tuple(labels)
        self._read = read
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, n: float = 1, **labels: object) -> None:
        key = self._key(labels)
        with self._lock:
            self._put(key, self._values.get(key, 0) + n)

    def value(self, **labels: object) -> float:
        """0 for labels that were never given."""
        return self._snapshot().get(self._key(labels), 0)

    def total(self) -> float:
        """The sum over all labels."""
        return sum(self._snapshot().values())

    def remove(self, **labels: object) -> None:
        key = self._key(labels)
        with self._lock:
            self._values.pop(key, None)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The metric as the library writes it: `Collector`'s method."""
        family = self.family(self.name, self.help, labels=self.labels)
        # Without labels it is seen from the beginning, so that a rate over the first event is right.
        for key, value in (self._snapshot() or ({} if self.labels else {(): 0})).items():
            family.add_metric(key, value)
        yield family

    def _key(self, labels: dict[str, object]) -> tuple[str, ...]:
        if len(labels) != len(self.labels) or not all(label in labels for label in self.labels):
            raise ConfigError(
                f"metric {self.name}: labels {sorted(labels)} were given, expected {sorted(self.labels)}."
            )
        # lone surrogates have no encoding
        return tuple([str(labels[label]).encode("utf-8", "replace").decode() for label in self.labels])

    def _put(self, key: tuple[str, ...], value: float) -> None:
        self._values.pop(key, None)
        self._values[key] = value  # the newest is the last
        if len(self._values) > MAX_SERIES:
            del self._values[next(iter(self._values))]

    def _snapshot(self) -> dict[tuple[str, ...], float]:
        if self._read is not None:
            return {(): self._read()}
        with self._lock:
            return dict(self._values)


class Counter(Metric):
    """A number that only grows; its name ends with ``_total``."""

    family = CounterMetricFamily


class Gauge(Metric):
    """A number that goes up and down."""

    family = GaugeMetricFamily

    def set(self, value: float, **labels: object) -> None:
        key = self._key(labels)
        with self._lock:
            self._put(key, value)


class Endpoint:
    """The page, served until `close`."""

    def __init__(self, server: _Server):
        self._server = server
        self.port: int = server.server_address[1]
        self._thread = threading.Thread(target=server.serve_forever, name="hilt-wire-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port."""
        if self._thread.is_alive():
            # wakes the thread where the system does so; elsewhere it wakes by itself twice a second
            with suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)


def serve(registry: CollectorRegistry, port: int) -> Endpoint:
    """Shows the metrics on this machine, and nowhere else. Port 0 takes a free one."""
    try:
        server = _Server(registry, port)
    except OSError as error:
        raise ConfigError(
            f"metrics_port={port}: cannot listen on {HOST}:{port} ({os.strerror(error.errno or 0)}). "
            "Another program uses this port: stop it, choose another one, or leave metrics_port out."
        ) from None
    return Endpoint(server)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True  # a restarted learner need not wait for old connections to time out
    allow_reuse_port = False  # but two may not share it

    def __init__(self, registry: CollectorRegistry, port: int):
        self._since: dict[socket.socket, float] = {}
        super().__init__((HOST, port), _Handler.factory(registry))

    def verify_request(self, request: Any, client_address: object) -> bool:
        if len(self._since) >= MAX_CONNECTIONS:
            return False
        self._since[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Called twice a second: closes connections that take too long for one small
        page, even if a byte arrives now and then."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > REQUEST_SECONDS:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: object) -> None:
        _log.debug("metrics: a request failed", exc_info=True)


class _Handler(MetricsHandler):
    """The library's page, at one path. HTTP/1.0: one request per connection."""

    timeout = REQUEST_SECONDS
    server_version, sys_version = "hilt", ""

    def do_GET(self) -> None:
        if self.path.split("?")[0] == "/metrics":
            super().do_GET()
        else:
            self.send_error(404, "There is only /metrics here.")
