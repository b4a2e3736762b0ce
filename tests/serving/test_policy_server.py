"""The server over real websockets: openpi's protocol, errors that are their sender's alone, and who may ask."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")
from websockets.exceptions import ConnectionClosed, InvalidStatus

from hilt.core.errors import ConfigError
from hilt.serving import BatcherSettings, PolicyServer, ServerLimits
from hilt.serving.policy_server import ServerAccess
from tests.serving.served_toy import CHUNK, DIM, STATE, WAIT_S, Known, connected, seen

CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUfIVfBBTj3uCYbTcwlXENkTlQGEgwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTExNzEyMjI0M1oYDzIxMjYxMDI0
MTIyMjQzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASP9mOPwLGeR4O8AlS0ubepAVhuzG8QbX+0xwcqKVdEcEV2QQ9vPXG6
mAT87ngjXXYLn5Tf8APpCToZ92mEWUz0o28wbTAdBgNVHQ4EFgQUcDS2s5u+Vfjo
0Zyz6zPQCw/0AB0wHwYDVR0jBBgwFoAUcDS2s5u+Vfjo0Zyz6zPQCw/0AB0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSQAwRgIhAJYyCy62B78zVjWPymN1QrZclufKfs2/Chzg9CW3+3txAiEA
1Y6OQEOT01I5IhbTPounDNm3Mrbm5mrMMJK9dE1/xWs=
-----END CERTIFICATE-----
"""
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgzBkXLBHA8d8Ryt2y
hZxGTkeRC0IPtg0T+0tr4enPXQ6hRANCAASP9mOPwLGeR4O8AlS0ubepAVhuzG8Q
bX+0xwcqKVdEcEV2QQ9vPXG6mAT87ngjXXYLn5Tf8APpCToZ92mEWUz0
-----END PRIVATE KEY-----
"""
"""Of a certificate for localhost that is trusted by nobody but these tests"""


@pytest.fixture(scope="module")
def policy() -> Known:
    return Known()


@pytest.fixture(scope="module")
def server(policy: Known) -> Iterator[PolicyServer]:
    limits = ServerLimits(max_connections=6, max_message_bytes=100_000)
    access, batching = ServerAccess(port=0), BatcherSettings(max_batch=4, max_wait_s=0.2)
    with PolicyServer(policy, 5, access=access, batching=batching, limits=limits, name="known") as server:
        yield server


def get(server: PolicyServer, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(server.url.replace("ws", "http", 1) + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metadata_come_first(server: PolicyServer):
    with connected(server.url) as client:
        assert client.metadata.pop("server").startswith("hilt ")
        assert client.metadata == {
            "protocol": 1,
            "policy": "known",
            "version": 5,
            "chunk": CHUNK,
            "action_dim": DIM,
            "sample": False,
            "takes_prefix": False,
            "max_delay": 0,
            "cameras": ["full_image", "wrist_image"],
            "state_dim": STATE,
            "all_cameras": True,
        }


def test_an_observation_is_answered_with_a_chunk(server: PolicyServer):
    with connected(server.url) as client:
        for number in (1.0, 2.5):
            answer = client.ask(seen(number))
            assert answer["actions"].dtype == np.float32 and answer["actions"].shape == (CHUNK, DIM)
            assert (answer["actions"] == number).all() and answer["version"] == 5
        assert answer["server_timing"]["batch"] == 1
        assert answer["server_timing"]["infer_ms"] >= answer["policy_timing"]["infer_ms"] >= 0


def test_an_error_is_a_sentence_and_the_connection_stays_usable(server: PolicyServer):
    broken: list[tuple[Any, str]] = [
        (b"\xc1", "is not msgpack"),
        ("hello", "a text of 5 characters is no request; expected msgpack in bytes"),
        (seen(**{"observation/wrist_image": None}), "no 'wrist_image' (openpi: 'observation/wrist_image')"),
        (seen(math.nan), "'observation/state' has nan at place 0"),
        (seen(protocol=9), "of protocol 9; this server speaks 1"),
        (seen(prefix=np.zeros((1, DIM), np.float32), frozen=1), "this Known cannot continue one"),
        (seen(prompt="fail"), "the policy failed: ZeroDivisionError: the model is broken"),
        (seen(prompt="nan"), "not finite"),
    ]
    with connected(server.url) as client:
        for message, expected in broken:
            error = client.ask(message)
            assert isinstance(error, str) and expected in error and "\n" not in error and "Traceback" not in error
        assert (client.ask(seen(3.0))["actions"] == 3.0).all()


def test_several_clients_share_a_call_and_an_error_is_its_senders_alone(server: PolicyServer, policy: Known):
    policy.calls.clear(), policy.begun.clear()
    with connected(server.url) as a, connected(server.url) as b, connected(server.url) as c:
        policy.go.clear()
        a.send(seen(1.0))
        b.send(seen(2.0, prompt="fail"))
        c.send(seen(3.0))
        deadline = time.monotonic() + WAIT_S
        while sum(policy.begun) + len(server.batcher._waiting) < 3:  # all have arrived
            assert time.monotonic() < deadline
            time.sleep(0.01)
        policy.go.set()
        assert (a.answer()["actions"] == 1.0).all()
        assert "the model is broken" in b.answer()
        answer = c.answer()
        assert (answer["actions"] == 3.0).all()
    assert max(policy.calls) > 1


def test_a_client_that_is_silent_is_not_waited_for():
    batching = BatcherSettings(max_wait_s=10.0)
    with (
        PolicyServer(Known(), access=ServerAccess(port=0), batching=batching) as server,
        connected(server.url),
        connected(server.url) as client,
    ):
        assert client.ask(seen(1.0))["server_timing"]["wait_ms"] < 10_000


def test_a_message_beyond_the_limit_closes_its_connection_alone(server: PolicyServer):
    with connected(server.url) as other, connected(server.url) as client:
        client.send(seen(**{"observation/image": np.zeros((200, 200, 3), np.uint8)}))
        with pytest.raises(ConnectionClosed) as closed:
            client.answer()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert (other.ask(seen(1.0))["actions"] == 1.0).all()


def test_one_client_too_many_is_refused(server: PolicyServer):
    clients = []
    try:
        while True:  # those of other tests may still be closing
            clients.append(connected(server.url))
            clients[-1].__enter__()
    except InvalidStatus as refused:
        assert refused.response.status_code == 503 and b"clients already" in refused.response.body
        assert len(clients) - 1 <= 6
    finally:
        for client in clients[:-1]:
            client.__exit__(None, None, None)


def test_connections_that_send_nothing_are_bounded():
    limits = ServerLimits(max_connections=1)
    with PolicyServer(Known(), access=ServerAccess(port=0), limits=limits) as server, contextlib.ExitStack() as stack:
        address = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        first, _, third = [stack.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(3)]
        with contextlib.suppress(ConnectionResetError):
            assert third.recv(1) == b""
        first.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is still open: the third was not closed by its timeout
            first.recv(1)


def test_health_and_metrics(server: PolicyServer):
    with connected(server.url) as client:
        client.ask(seen())
        client.ask(b"\xc1")
        assert get(server, "/healthz") == (200, "OK\n")
        status, page = get(server, "/metrics")
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert status == 200 and float(found["hilt_serving_answers_total"]) >= 1
    assert float(found['hilt_serving_errors_total{kind="FormatError"}']) >= 1
    assert float(found["hilt_serving_weights_version"]) == 5 and float(found["hilt_serving_connections"]) >= 1
    assert get(server, "/other")[0] == 404


def test_a_web_page_is_refused(server: PolicyServer):
    assert get(server, "/metrics", Origin="http://evil.example") == (
        403,
        "This request comes from a web page; a page may not use the policy.\n",
    )
    status, text = get(server, "/metrics", Host="evil.example")
    assert status == 403 and "expected localhost or a loopback address, got 'evil.example'" in text
    with pytest.raises(InvalidStatus, match="403"), connected(server.url, origin="http://evil.example"):
        pass


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_key_is_needed_where_there_is_one_and_tls_encrypts(tmp_path: Path):
    secret = "a-key-of-some-length"
    access = ServerAccess(
        port=0,
        keys=[written(tmp_path / "arm.key", secret)],
        certificate=written(tmp_path / "cert.pem", CERTIFICATE),
        key=written(tmp_path / "key.pem", KEY),
    )
    trusted = ssl.create_default_context(cadata=CERTIFICATE)
    with PolicyServer(Known(), access=access) as server:
        assert server.url.startswith("wss://127.0.0.1:")
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": f"Basic {secret}"}):
            with (
                pytest.raises(InvalidStatus, match="401"),
                connected(server.url, ssl=trusted, additional_headers=headers),
            ):
                pass
        header = {"Authorization": f"Api-Key {secret}"}
        with connected(server.url, ssl=trusted, additional_headers=header) as client:
            assert (client.ask(seen(4.0))["actions"] == 4.0).all()
        assert server.metrics.refused.value(status=401) == 3


def test_beyond_this_machine_a_key_or_tls_is_needed(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"host 0.0.0.0 is reached from other machines.*--key-file policy.key; or"):
        PolicyServer(Known(), access=ServerAccess("0.0.0.0", 0))
    key = written(tmp_path / "k.key", "a-key-of-some-length")
    ServerAccess("0.0.0.0", 0, keys=[key]).check()
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read this token"):
        PolicyServer(Known(), access=ServerAccess(port=0, keys=[key]))
    with pytest.raises(ConfigError, match="belong together"):
        PolicyServer(Known(), access=ServerAccess(port=0, certificate=key))
    with pytest.raises(ConfigError, match="expected a certificate and its key as PEM files"):
        PolicyServer(Known(), access=ServerAccess(port=0, certificate=key, key=key))


def test_a_policy_that_does_not_answer_in_time():
    policy = Known()
    policy.go.clear()
    limits = ServerLimits(answer_s=0.05)
    with PolicyServer(policy, access=ServerAccess(port=0), limits=limits) as server, connected(server.url) as client:
        assert "the policy did not answer within 0.05 s" in client.ask(seen())
        policy.go.set()
        answer: Any = ""
        for _ in range(1000):  # the call that was late may still be under way
            answer = client.ask(seen(2.0))
            if not isinstance(answer, str):
                break
            threading.Event().wait(0.01)
        assert (answer["actions"] == 2.0).all()
