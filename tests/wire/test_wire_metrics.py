"""What Prometheus reads: its own parser must find the numbers that were put in, and nobody may hold the page up."""

from __future__ import annotations

import http.client
import math
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hilt.core.errors import ConfigError
from hilt.wire import wire_metrics as under_test
from hilt.wire.wire_metrics import MAX_CONNECTIONS, MAX_SERIES, Counter, Endpoint, Gauge, serve


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As Prometheus' parser reads it: (name, sorted labels) → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def made() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)


def written(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


@pytest.fixture
def page():
    registry = made()
    endpoint = serve(registry, 0)
    yield registry, endpoint
    endpoint.close()


def ask(endpoint: Endpoint, path: str = "/metrics", method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def test_the_format_to_the_letter():
    registry = made()
    steps = Counter(registry, "hilt_steps_total", "Steps that were\nstored, \\ or so.", ("actor", "store"))
    depth = Gauge(registry, "hilt_depth", "Depth.")
    steps.add(2, actor="arm-1", store="env")
    steps.add(actor="arm-1", store="env")
    steps.add(0.5, actor='a "quoted"\\ name\nin two lines', store="")
    depth.set(-1)
    assert written(registry) == (
        "# HELP hilt_steps_total Steps that were\\nstored, \\\\ or so.\n"
        "# TYPE hilt_steps_total counter\n"
        'hilt_steps_total{actor="arm-1",store="env"} 3.0\n'
        'hilt_steps_total{actor="a \\"quoted\\"\\\\ name\\nin two lines",store=""} 0.5\n'
        "# HELP hilt_depth Depth.\n"
        "# TYPE hilt_depth gauge\n"
        "hilt_depth -1.0\n"
    )


@given(
    st.dictionaries(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"])),
            st.sampled_from(['"', "\\", "\n", "\\n", 'x="y",z="', "}", "é"]),
        ),
        st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False)),
        max_size=5,
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_the_real_parser_finds_what_was_put_in(values: dict[tuple[str, str], float], help: str):
    registry = made()
    gauge = Gauge(registry, "g", help, ("first", "second"))
    for (first, second), value in values.items():
        gauge.set(value, first=first, second=second)
    assert samples(written(registry)) == {
        ("g", (("first", a), ("second", b))): float(v) for (a, b), v in values.items()
    }


def test_numbers_that_are_not_finite():
    registry = made()
    gauge = Gauge(registry, "g", "", ("of",))
    for value in (math.inf, -math.inf, math.nan):
        gauge.set(value, of=value)
    found = samples(written(registry))
    assert found["g", (("of", "inf"),)] == math.inf and found["g", (("of", "-inf"),)] == -math.inf
    assert math.isnan(found["g", (("of", "nan"),)])


def test_values_totals_and_removal():
    registry = made()
    counter = Counter(registry, "c_total", "", ("actor",))
    assert counter.value(actor="a") == 0 and counter.total() == 0
    counter.add(2, actor="a")
    counter.add(3, actor="b")
    assert (counter.value(actor="a"), counter.value(actor="b"), counter.total()) == (2, 3, 5)
    counter.remove(actor="a")
    counter.remove(actor="never there")
    assert samples(written(registry)) == {("c_total", (("actor", "b"),)): 3}


def test_a_metric_without_labels_is_shown_from_the_beginning():
    registry = made()
    Counter(registry, "c_total", "")
    Counter(registry, "by_actor_total", "", ("actor",))
    assert samples(written(registry)) == {("c_total", ()): 0}


def test_a_counter_that_is_asked_when_somebody_looks():
    registry, now = made(), [5.0]
    counter = Counter(registry, "c_total", "", read=lambda: now[0])
    assert samples(written(registry)) == {("c_total", ()): 5}
    now[0] = 6.0
    assert counter.value() == 6 and samples(written(registry)) == {("c_total", ()): 6}


def test_actors_that_come_and_go_do_not_add_up():
    registry = made()
    counter = Counter(registry, "c_total", "", ("actor",))
    for i in range(3 * MAX_SERIES):
        counter.add(1, actor="stays")
        counter.add(1, actor=i)
    found = samples(written(registry))
    assert len(found) == MAX_SERIES
    assert found["c_total", (("actor", "stays"),)] == 3 * MAX_SERIES  # the oldest are forgotten, not the first


def test_threads_lose_no_count():
    registry = made()
    counter = Counter(registry, "c_total", "", ("actor",))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [counter.add(1, actor="a") for _ in range(5_000)])
        for _ in range(20):
            written(registry)
    assert counter.value(actor="a") == 40_000


@pytest.mark.parametrize("labels", [{}, {"b": 1}, {"a": 1, "b": 1}])
def test_labels_other_than_those_of_the_metric_are_refused(labels: dict[str, int]):
    with pytest.raises(
        ConfigError, match=rf"metric g: labels {re.escape(str(sorted(labels)))} were given, expected \['a'\]"
    ):
        Gauge(made(), "g", "", ("a",)).set(1, **labels)


def test_two_metrics_of_one_name_are_refused():
    registry = made()
    Gauge(registry, "g", "")
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Gauge(registry, "g", "")


def test_the_page(page):
    registry, endpoint = page
    Counter(registry, "c_total", "é", ("actor",)).add(1, actor="\udcff lone half")  # which no encoding has
    status, headers, text = ask(endpoint)
    assert (
        status == 200
        and headers["Content-Type"].startswith("text/plain; version=")
        and "Python" not in headers["Server"]
    )
    assert samples(text) == {("c_total", (("actor", "? lone half"),)): 1}
    Counter(registry, "d_total", "")
    assert samples(ask(endpoint, "/metrics?name[]=d_total")[2]) == {("d_total", ()): 0}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/../etc", 404),
        ("GET", "/metricsx", 404),
        ("POST", "/metrics", 501),
        ("PUT", "/x", 501),
        ("DELETE", "/metrics", 501),
        ("OPTIONS", "*", 501),
    ],
)
def test_metrics_server_refuses_other_requests(page, method: str, path: str, status: int):
    assert ask(page[1], path, method)[0] == status


def test_one_request_per_connection_and_bounded_headers(page):
    registry, endpoint = page
    Gauge(registry, "g", "").set(1)
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n"
    assert exchange(endpoint, request * 3).count(b"HTTP/1.0 200") == 1
    assert b" 414 " in exchange(endpoint, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert b" 431 " in exchange(endpoint, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n")
    assert ask(endpoint)[0] == 200


def exchange(endpoint: Endpoint, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) as connection:
        got = b""
        try:
            connection.sendall(request)
            while part := connection.recv(65536):
                got += part
        except ConnectionError:  # it is closed before all was read
            pass
        return got


def test_metrics_server_closes_slow_connections(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_test, "REQUEST_SECONDS", 1.0)
    endpoint = serve(made(), 0)
    try:
        trickling = socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)
        silent = [
            socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) for _ in range(3 * MAX_CONNECTIONS)
        ]
        deadline = time.monotonic() + 120
        with pytest.raises(ConnectionError), trickling:  # a byte now and then does not help
            while time.monotonic() < deadline:
                trickling.sendall(b"G")
                time.sleep(0.05)
        for connection in silent:  # the first few had their time, the others none
            assert connection.recv(1) == b""
            connection.close()
        assert ask(endpoint)[0] == 200
    finally:
        endpoint.close()


def test_close_frees_the_port_and_a_taken_one_is_an_error(page):
    registry, endpoint = page
    held = socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)
    text = (
        f"metrics_port={endpoint.port}: cannot listen on 127.0.0.1:{endpoint.port} .Address already in "
        "use.*choose another one, or leave"
    )
    with pytest.raises(ConfigError, match=text):
        serve(registry, endpoint.port)
    assert ask(endpoint)[0] == 200
    endpoint.close()
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        ask(endpoint)
    again = serve(registry, endpoint.port)
    assert ask(again)[0] == 200
    again.close()
    held.close()
