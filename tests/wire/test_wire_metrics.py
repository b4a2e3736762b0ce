"""What Prometheus reads: its own parser must find the numbers that were put in, and nobody may hold the page up."""

from __future__ import annotations

import http.client
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hilt.core.errors import ConfigError
from hilt.wire import wire_metrics as under_test
from hilt.wire.wire_metrics import CONTENT_TYPE, MAX_CONNECTIONS, MAX_SERIES, Endpoint, WireMetrics, serve


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As Prometheus' parser reads it: (name, sorted labels) → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def page():
    metrics = WireMetrics()
    endpoint = serve(metrics, 0)
    yield metrics, endpoint
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
    metrics = WireMetrics()
    steps = metrics.counter("hilt_steps_total", "Steps that were\nstored, \\ or so.", ("actor", "store"))
    depth = metrics.gauge("hilt_depth", "Depth.")
    steps.add(2, actor="arm-1", store="env")
    steps.add(actor="arm-1", store="env")
    steps.add(0.5, actor='a "quoted"\\ name\nin two lines', store="")
    depth.set(-1)
    assert metrics.render() == (
        "# HELP hilt_steps_total Steps that were\\nstored, \\\\ or so.\n"
        "# TYPE hilt_steps_total counter\n"
        'hilt_steps_total{actor="arm-1",store="env"} 3\n'
        'hilt_steps_total{actor="a \\"quoted\\"\\\\ name\\nin two lines",store=""} 0.5\n'
        "# HELP hilt_depth Depth.\n"
        "# TYPE hilt_depth gauge\n"
        "hilt_depth -1\n"
    )


@given(
    st.dictionaries(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(['"', "\\", "\n", "\\n", 'x="y",z="', "}", "é"])),
        st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False)),
        max_size=5,
    ),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_the_real_parser_finds_what_was_put_in(values: dict[tuple[str, str], float], help: str):
    metrics = WireMetrics()
    gauge = metrics.gauge("g", help, ("first", "second"))
    for (first, second), value in values.items():
        gauge.set(value, first=first, second=second)
    assert samples(metrics.render()) == {("g", (("first", a), ("second", b))): float(v) for (a, b), v in values.items()}


def test_numbers_that_are_not_finite():
    metrics = WireMetrics()
    gauge = metrics.gauge("g", "", ("of",))
    for value in (math.inf, -math.inf, math.nan):
        gauge.set(value, of=value)
    found = samples(metrics.render())
    assert found["g", (("of", "inf"),)] == math.inf and found["g", (("of", "-inf"),)] == -math.inf
    assert math.isnan(found["g", (("of", "nan"),)])


def test_values_totals_and_removal():
    metrics = WireMetrics()
    counter = metrics.counter("c_total", "", ("actor",))
    assert counter.value(actor="a") == 0 and counter.total() == 0
    counter.add(2, actor="a")
    counter.add(3, actor="b")
    assert (counter.value(actor="a"), counter.value(actor="b"), counter.total()) == (2, 3, 5)
    counter.remove(actor="a")
    counter.remove(actor="never there")
    assert samples(metrics.render()) == {("c_total", (("actor", "b"),)): 3}


def test_a_metric_without_labels_is_shown_from_the_beginning():
    metrics = WireMetrics()
    metrics.counter("c_total", "")
    metrics.counter("by_actor_total", "", ("actor",))
    assert samples(metrics.render()) == {("c_total", ()): 0}


def test_a_gauge_that_is_asked_and_one_that_fails(caplog: pytest.LogCaptureFixture):
    metrics = WireMetrics()
    now = {("a", "1"): 5.0}
    gauge = metrics.gauge("g", "", ("actor", "number"), read=lambda: now)
    metrics.gauge("broken", "", read=lambda: {(): 1 / 0})
    metrics.gauge("after", "").set(1)
    expected = {("g", (("actor", "a"), ("number", "1"))): 5, ("after", ()): 1}
    assert samples(metrics.render()) == expected
    assert "metric broken could not be read and is left out" in caplog.text
    now["a", "1"] = 6.0
    assert gauge.value(actor="a", number=1) == 6


def test_actors_that_come_and_go_do_not_add_up():
    metrics = WireMetrics()
    counter = metrics.counter("c_total", "", ("actor",))
    for i in range(3 * MAX_SERIES):
        counter.add(1, actor="stays")
        counter.add(1, actor=i)
    found = samples(metrics.render())
    assert len(found) == MAX_SERIES
    assert found["c_total", (("actor", "stays"),)] == 3 * MAX_SERIES  # the oldest are forgotten, not the first
    metrics.gauge("g", "", ("n",), read=lambda: {(str(i),): i for i in range(3 * MAX_SERIES)})
    assert len(samples(metrics.render())) == 2 * MAX_SERIES


def test_threads_lose_no_count():
    metrics = WireMetrics()
    counter = metrics.counter("c_total", "", ("actor",))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(lambda: [counter.add(1, actor="a") for _ in range(5_000)])
        for _ in range(20):
            metrics.render()
    assert counter.value(actor="a") == 40_000


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda m: m.counter("1st", ""), "metric '1st': expected letters, digits, '_' and ':', and no digit first."),
        (lambda m: m.gauge("g", "", ("a-b",)), "metric g: label 'a-b': expected letters, digits and '_'"),
        (lambda m: m.gauge("g", "", ("__name__",)), "label '__name__'"),
        (lambda m: (m.gauge("g", ""), m.gauge("g", "")), "metric g: there is one of this name already. Choose another name."),
        (lambda m: m.counter("c", "").add(-1), r"metric c: add\(-1\): a counter only grows. Use a gauge."),
        (lambda m: m.gauge("g", "", ("a",)).set(1), r"metric g: labels \[\] were given, expected \['a'\]."),
        (lambda m: m.gauge("g", "", ("a",)).set(1, b=1), r"metric g: labels \['b'\] were given, expected \['a'\]."),
        (lambda m: m.gauge("g", "", ("a",)).set(1, a=1, b=1), r"metric g: labels \['a', 'b'\] were given, expected \['a'\]."),
    ],
)
def test_what_is_refused(wrong, text: str):
    with pytest.raises(ConfigError, match=text):
        wrong(WireMetrics())


def test_the_page(page):
    metrics, endpoint = page
    metrics.counter("c_total", "é", ("actor",)).add(1, actor="\udcff lone half")  # which no encoding has
    status, headers, text = ask(endpoint)
    assert (status, headers["Content-Type"]) == (200, CONTENT_TYPE) and "Python" not in headers["Server"]
    assert samples(text) == {("c_total", (("actor", "? lone half"),)): 1}
    assert ask(endpoint, "/metrics?name[]=c_total")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics/../etc", 404), ("GET", "/metricsx", 404), ("POST", "/metrics", 405), ("PUT", "/x", 405),
     ("DELETE", "/metrics", 405), ("OPTIONS", "*", 405)],
)  # fmt: skip
def test_anything_else_is_refused(page, method: str, path: str, status: int):
    got, headers, _ = ask(page[1], path, method)
    assert got == status and (status != 405 or headers["Allow"] == "GET")


def test_one_request_per_connection_and_bounded_headers(page):
    metrics, endpoint = page
    metrics.gauge("g", "").set(1)
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


def test_who_dawdles_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_test, "REQUEST_SECONDS", 1.0)
    endpoint = serve(WireMetrics(), 0)
    try:
        trickling = socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)
        silent = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) for _ in range(3 * MAX_CONNECTIONS)]
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
    metrics, endpoint = page
    held = socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)
    text = f"metrics_port={endpoint.port}: cannot listen on 127.0.0.1:{endpoint.port} .Address already in use.*choose another one, or leave"
    with pytest.raises(ConfigError, match=text):
        serve(metrics, endpoint.port)
    assert ask(endpoint)[0] == 200
    endpoint.close()
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        ask(endpoint)
    again = serve(metrics, endpoint.port)
    assert ask(again)[0] == 200
    again.close()
    held.close()
