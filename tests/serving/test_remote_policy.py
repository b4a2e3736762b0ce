"""A policy that runs elsewhere: behind our server, and behind one that behaves as openpi's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from hilt.core.errors import ConfigError, DeadlineError, HiltError, RefusedError, RequestError
from hilt.policies.base import Prefix
from hilt.serving import PolicyServer, RemotePolicy
from hilt.serving.observation_names import our_name
from hilt.serving.policy_server import ServerAccess
from hilt.serving.remote_policy import is_address
from tests.serving.served_toy import CHUNK, DIM, STATE, WAIT_S, Known, packed, seen, unpacked
from tests.wire.processes import free_port


def ours(number: float = 1.0) -> dict[str, Any]:
    return {our_name(name): value for name, value in seen(number).items()}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Known, PolicyServer]]:
    policy = Known()
    with PolicyServer(policy, 5, access=ServerAccess(port=0)) as server:
        yield policy, server


@contextlib.contextmanager
def openpi_server(answer: Callable[[dict[str, Any]], Any], metadata: Any = None) -> Iterator[str]:
    """Behaves as openpi's: an error is a traceback, and then the connection is closed."""

    def converse(socket: Any) -> None:
        socket.send(packed({"reset_pose": [0.0]} if metadata is None else metadata))
        with contextlib.suppress(ConnectionClosed):
            while True:
                try:
                    socket.send(packed(answer(unpacked(socket.recv(WAIT_S)))))
                except ZeroDivisionError as error:
                    socket.send(f"Traceback (most recent call last):\n  File x\nZeroDivisionError: {error}\n")
                    socket.close(1011, "Internal server error")
                    return

    server = serve(converse, "127.0.0.1", 0, compression=None)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
    finally:
        server.shutdown()
        thread.join(WAIT_S)


def test_it_acts_as_the_policy_does(served: tuple[Known, PolicyServer]):
    policy, server = served
    with contextlib.closing(RemotePolicy(server.url)) as remote:
        assert (remote.chunk, remote.action_dim, remote.version, remote.is_hilt) == (CHUNK, DIM, 5, True)
        assert remote.observed_fields() == policy.observed_fields() and remote.device == torch.device("cpu")
        given = [ours(1.0), ours(2.0)]
        actions, record = remote.act(given, sample=False)
        np.testing.assert_array_equal(actions, policy.act(given, sample=False)[0])
        assert actions.dtype == np.float32 and record == {}
        policy.settings.clear()
        remote.act([ours()], sample=True, temperature=0.5)
        assert policy.settings == [(True, 0.5)]


def test_a_prefix_is_sent_to_a_server_whose_policy_continues_it():
    policy = Known()
    policy.continues = True
    with (
        PolicyServer(policy, access=ServerAccess(port=0)) as server,
        contextlib.closing(RemotePolicy(server.url)) as far,
    ):
        given = np.arange(4, dtype=np.float32).reshape(1, 2, DIM)
        assert far.takes_prefix and far.max_delay == 0
        far.act([ours()], sample=False, prefix=Prefix(given, np.array([1])))
        np.testing.assert_array_equal(policy.prefixes[-1].actions, given)
        assert policy.prefixes[-1].frozen.tolist() == [1]
        with pytest.raises(ConfigError, match="a prefix and sample=True"):
            far.act([ours()], prefix=Prefix(given, np.array([1])))


def test_an_error_of_the_server_is_raised_and_the_next_answer_comes(served: tuple[Known, PolicyServer]):
    with contextlib.closing(RemotePolicy(served[1].url)) as remote:
        with pytest.raises(
            RequestError, match=r"ws://127.*: the request has no 'state' \(openpi: 'observation/state'\)"
        ):
            remote.act([{**ours(), "state": None}])
        assert (remote.act([ours(2.0)], sample=False)[0] == 2.0).all()


def test_it_acts_and_does_nothing_else(served: tuple[Known, PolicyServer]):
    with contextlib.closing(RemotePolicy(served[1].url)) as remote:
        for call in (lambda: remote.evaluate({}), lambda: remote.supervised_loss([], np.zeros(1), np.zeros(1))):
            with pytest.raises(ConfigError, match="acts and does not learn here"):
                call()
        with pytest.raises(ConfigError, match="cannot continue one"):
            remote.act([ours()], prefix=Prefix(np.zeros((1, 1, DIM), np.float32), np.zeros(1, np.int64)))
        with pytest.raises(HiltError, match="no observation"):
            remote.act([])


def test_a_server_that_was_restarted_is_found_again_and_another_policy_refused():
    first = PolicyServer(Known(), 1, access=ServerAccess(port=0))
    first.start()
    port = int(first.url.rsplit(":", 1)[1])
    remote = RemotePolicy(first.url, timeout_s=WAIT_S)
    assert remote.act([ours(1.0)], sample=False)[0][0, 0, 0] == 1.0
    first.stop()
    with PolicyServer(Known(), 2, access=ServerAccess(port=port)):
        assert remote.act([ours(3.0)], sample=False)[0][0, 0, 0] == 3.0 and remote.version == 2
    other = Known()
    other.chunk = 7
    expected = "now serves chunks of 7 actions of 2 numbers, and before it was 3 of 2"
    with PolicyServer(other, 3, access=ServerAccess(port=port)), pytest.raises(RefusedError, match=expected):
        remote.act([ours()], sample=False)
    remote.close()


def test_nobody_there_and_silence_have_a_deadline():
    with PolicyServer(Known(), access=ServerAccess(port=0)) as server:
        url = server.url
        remote = RemotePolicy(url)
    remote._link.timeout_s = 0.3  # only now: to connect may take longer on a busy machine
    with pytest.raises((RefusedError, DeadlineError), match="no policy server"):
        remote.act([ours()])
    with pytest.raises(RefusedError, match=r"no policy server is reached \(.*\). Start one: hilt serve-policy FOLDER"):
        RemotePolicy(url)
    silent = threading.Event()
    with openpi_server(lambda seen: silent.wait(WAIT_S)) as url:
        remote = RemotePolicy(url)
        remote._link.timeout_s = 0.3
        with pytest.raises(DeadlineError, match=r"did not answer within 0\.3 s"):
            remote.act([ours()])
        silent.set()


def test_an_openpi_server_is_a_policy():
    asked: list[Any] = []

    def infer(given: dict[str, Any]) -> Any:
        asked.append(given)
        if given["prompt"] == "fail":
            raise ZeroDivisionError("their model")
        return {"actions": np.full((4, 6), given["observation/state"][0]), "server_timing": {"infer_ms": 1.0}}

    with openpi_server(infer) as url, contextlib.closing(RemotePolicy(url)) as remote:
        assert (remote.chunk, remote.is_hilt, remote.observed_fields()) == (0, False, None)
        actions, _ = remote.act([ours(0.5)])
        assert actions.shape == (1, 4, 6) and (actions == 0.5).all() and (remote.chunk, remote.action_dim) == (4, 6)
        assert asked[0].keys() == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
        with pytest.raises(RequestError, match=r"ws://.*: ZeroDivisionError: their model$"):
            remote.act([{**ours(), "instruction": "fail"}])
        assert (remote.act([ours(2.0)])[0] == 2.0).all(), "it has connected anew"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([1], "answered with the actions none; expected floating"),
        ({"actions": np.zeros(3)}, r"the actions float64 \[3\]; expected floating \[chunk, action_dim\]"),
        ({"actions": np.zeros((2, 2), np.int64)}, r"int64 \[2, 2\]"),
        ({"actions": np.full((2, 2), np.nan)}, "not finite"),
    ],
)
def test_an_answer_that_is_none(answer: Any, expected: str):
    with openpi_server(lambda seen: answer) as url:
        remote = RemotePolicy(url)
        with pytest.raises(RequestError, match=expected):
            remote.act([ours()])
        remote.close()


def test_a_chunk_that_changes_its_length_is_refused():
    lengths = iter([3, 5])
    with openpi_server(lambda seen: {"actions": np.zeros((next(lengths), 2))}) as url:
        remote = RemotePolicy(url)
        remote.act([ours()])
        with pytest.raises(RequestError, match=r"answered with \[5, 2\] numbers; expected \[3, 2\]"):
            remote.act([ours()])
        remote.close()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ([1], "sent no metadata first"),
        ({"protocol": 2, "chunk": 3, "action_dim": 2}, "speaks protocol 2; this client speaks 1"),
        ({"protocol": np.ones(2), "chunk": 3, "action_dim": 2}, "speaks protocol array"),
        ({"cameras": 3}, "announces the cameras 3; expected a list of names"),
        ({"protocol": 1, "chunk": 0, "action_dim": 2}, "announces chunks of 0 actions of 2 numbers"),
    ],
)
def test_a_server_of_something_else(metadata: Any, expected: str):
    with openpi_server(lambda seen: {}, metadata) as url, pytest.raises(RefusedError, match=expected):
        RemotePolicy(url)


def test_a_key_is_sent_and_its_absence_reported(tmp_path: Path):
    file = tmp_path / "arm.key"
    file.write_text("a-key-of-some-length")
    file.chmod(0o600)
    with PolicyServer(Known(), access=ServerAccess(port=0, keys=[file])) as server:
        with pytest.raises(
            RefusedError, match="refused the connection: 401 Expected the header 'Authorization: Api-Key"
        ):
            RemotePolicy(server.url)
        remote = RemotePolicy(server.url, key="a-key-of-some-length")
        assert remote.act([ours(STATE)], sample=False)[0].shape == (1, CHUNK, DIM)
        remote.close()


def test_addresses():
    assert is_address("ws://x:1") and is_address("wss://x") and not is_address("runs/ws")
    for url in ("http://x:1", "ws://", "hilt://x", "ws://x:y", "runs/mine"):
        with pytest.raises(ConfigError, match="expected ws://HOST:PORT, wss://HOST:PORT, or hilt://HOST:PORT"):
            RemotePolicy(url)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        RemotePolicy("ws://x:1", timeout_s=0)


def wait(met: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_a_server_gives_signs_of_life_while_it_computes_and_none_when_it_is_gone():
    policy, port = Known(), free_port()
    with PolicyServer(policy, access=ServerAccess(port=port)) as server:
        remote = RemotePolicy(server.url, timeout_s=WAIT_S)
        assert remote.is_alive(WAIT_S)
        policy.go.clear()
        asking = threading.Thread(target=remote.act, args=([ours()],))
        asking.start()
        computing = time.monotonic()
        wait(lambda: remote._link._heard > computing)  # a ping that was sent meanwhile is answered meanwhile
        policy.go.set()
        asking.join(WAIT_S)
    wait(lambda: not remote.is_alive(float("inf")))
    with PolicyServer(policy, access=ServerAccess(port=port)):
        remote.act([ours()])
        assert remote.is_alive(WAIT_S)
        remote.close()
    assert not remote.is_alive(float("inf"))
    remote.close()
    assert "hilt-server-pings" not in {thread.name for thread in threading.enumerate()}


def test_openpis_server_is_alive_for_as_long_as_it_is_connected():
    with openpi_server(lambda asked: {"actions": np.zeros((2, 2), np.float32)}) as url:
        remote = RemotePolicy(url, timeout_s=WAIT_S)
        assert remote.is_alive(1e-9), "it computes where it would answer pings"
        remote._link._socket.close()
        wait(lambda: not remote.is_alive(WAIT_S))
        remote.close()
