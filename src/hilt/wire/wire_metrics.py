"""Counters and gauges that Prometheus can read at ``http://127.0.0.1:PORT/metrics``.

    metrics = Metrics()
    steps = metrics.counter("hilt_wire_steps_received_total", "Steps that were stored.", ("actor",))
    steps.add(1, actor="arm-1")
    endpoint = serve(metrics, 9100)
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

from hilt.core.errors import ConfigError

MAX_SERIES = 1_000
"""Label sets per metric. Beyond that the one that changed longest ago is forgotten, so that actors may come and go for ever."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOST = "127.0.0.1"
REQUEST_SECONDS = 5.0
MAX_CONNECTIONS = 16

Read = Callable[[], Mapping[tuple[str, ...], float]]
"""Asked at scrape time: the values for each tuple of label values, in the order of the labels; ``()`` is the key without labels."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
_log = logging.getLogger("hilt.wire")


class WireMetrics:
    """A set of metrics; safe to use from any thread."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = (), read: Read | None = None) -> Counter:
        """A number that only grows."""
        return self._add(Counter(name, help, labels, read))

    def gauge(self, name: str, help: str, labels: Sequence[str] = (), read: Read | None = None) -> Gauge:
        """A number that goes up and down; with `read` it is asked for when somebody looks."""
        return self._add(Gauge(name, help, labels, read))

    def render(self) -> str:
        """All of them in Prometheus' text format 0.0.4."""
        lines = []
        for metric in list(self._metrics.values()):
            try:
                lines += metric.lines()
            except Exception:  # noqa: BLE001 - from somebody's `read`; the other metrics are shown all the same
                _log.warning("metric %s could not be read and is left out", metric.name, exc_info=True)
        return "".join(f"{line}\n" for line in lines)

    def _add(self, metric: _Metric) -> _Metric:
        if self._metrics.setdefault(metric.name, metric) is not metric:
            raise ConfigError(f"metric {metric.name}: there is one of this name already. Choose another name.")
        return metric


class Metric:
    """One number per set of label values."""

    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str], read: Read | None):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"metric {name!r}: expected letters, digits, '_' and ':', and no digit first.")
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise ConfigError(f"metric {name}: label {label!r}: expected letters, digits and '_', and neither a digit nor '__' first.")
        self.name, self.help, self.labels = name, help, tuple(labels)
        self._label_set = set(labels)
        self._read = read
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, n: float = 1, **labels: object) -> None:
        if n < 0 and self.kind == "counter":
            raise ConfigError(f"metric {self.name}: add({n}): a counter only grows. Use a gauge.")
        key = self._key(labels) if labels or self.labels else ()
        with self._lock:
            values = self._values
            values[key] = values.pop(key, 0) + n  # the newest is the last
            if len(values) > MAX_SERIES:
                self._forget_oldest()

    def value(self, **labels: object) -> float:
        """0 for labels that were never given."""
        return self._snapshot().get(self._key(labels), 0)

    def total(self) -> float:
        """Over all labels."""
        return sum(self._snapshot().values())

    def remove(self, **labels: object) -> None:
        key = self._key(labels)
        with self._lock:
            self._values.pop(key, None)

    def _key(self, labels: dict[str, object]) -> tuple[str, ...]:
        if labels.keys() != self._label_set:
            raise ConfigError(f"metric {self.name}: labels {sorted(labels)} were given, expected {sorted(self.labels)}.")
        return tuple([str(labels[label]) for label in self.labels])

    def _forget_oldest(self) -> None:
        while len(self._values) > MAX_SERIES:
            del self._values[next(iter(self._values))]

    def _snapshot(self) -> dict[tuple[str, ...], float]:
        if self._read is not None:
            return {tuple(map(str, key)): value for key, value in self._read().items()}
        with self._lock:
            return dict(self._values)

    def lines(self) -> list[str]:
        values = self._snapshot()
        if not self.labels and self._read is None:
            values = {(): values.get((), 0)}  # seen from the beginning, so that a rate over the first event is right
        lines = [f"# HELP {self.name} {self.help.translate(_HELP_ESCAPES)}", f"# TYPE {self.name} {self.kind}"]
        for key, value in list(values.items())[:MAX_SERIES]:
            labels = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in zip(self.labels, key, strict=True))
            lines.append(f"{self.name}{{{labels}}} {_number(value)}" if labels else f"{self.name} {_number(value)}")
        return lines


_Metric = TypeVar("_Metric", bound=Metric)


class Counter(Metric):
    kind = "counter"


class Gauge(Metric):
    kind = "gauge"

    def set(self, value: float, **labels: object) -> None:
        key = self._key(labels) if labels or self.labels else ()
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            self._forget_oldest()


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
            with suppress(OSError):  # wakes the thread where the system does so; elsewhere it wakes by itself twice a second
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)


def serve(metrics: WireMetrics, port: int) -> Endpoint:
    """Shows the metrics on this machine, and nowhere else. Port 0 takes a free one."""
    try:
        server = _Server(metrics, port)
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

    def __init__(self, metrics: WireMetrics, port: int):
        self.metrics = metrics
        self._since: dict[socket.socket, float] = {}
        super().__init__((HOST, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if len(self._since) >= MAX_CONNECTIONS:
            return False
        self._since[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Twice a second: whoever takes too long for one small page is cut off, even if a byte comes now and then."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > REQUEST_SECONDS:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("metrics: a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: one request per connection."""

    server: _Server
    timeout = REQUEST_SECONDS
    server_version, sys_version = "hilt", ""

    def do_GET(self) -> None:
        if self.path.split("?")[0] == "/metrics":
            self._answer(200, self.server.metrics.render(), CONTENT_TYPE)
        else:
            self._answer(404, "There is only /metrics here.\n")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other method
            return lambda: self._answer(405, "Only GET is answered here.\n", allow="GET")
        raise AttributeError(name)

    def _answer(self, status: int, text: str, content_type: str = "text/plain; charset=utf-8", allow: str = "") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("metrics: " + format, *args)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
