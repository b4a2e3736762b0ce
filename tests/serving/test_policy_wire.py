"""A policy on the keyed wire: the same answers, the same errors, and nobody without a key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")

from hilt.core.errors import ConfigError, HiltError, RefusedError, RequestError
from hilt.serving import PolicyServer, PolicyWire, RemotePolicy
from hilt.serving.policy_server import ServerAccess
from hilt.wire.keys import new_keys
from tests.serving.served_toy import CHUNK, DIM, Known
from tests.serving.test_remote_policy import ours
from tests.wire.processes import free_port, free_ports_in_a_row


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    new_keys(folder, ["learner", "robot"])
    return folder


@pytest.fixture(scope="module")
def wired(keys: Path) -> Iterator[tuple[Known, PolicyWire]]:
    policy = Known()
    with PolicyServer(policy, 5, access=ServerAccess(port=0)) as server, wire_of(server, keys) as wire:
        yield policy, wire


def wire_of(server: PolicyServer, keys: Path) -> PolicyWire:
    return PolicyWire(server, free_ports_in_a_row(2), str(keys))


def test_a_policy_answers_on_the_wire(wired: tuple[Known, PolicyWire], keys: Path):
    policy, wire = wired
    with contextlib.closing(RemotePolicy(wire.url, key=str(keys))) as remote:
        assert (remote.chunk, remote.action_dim, remote.version, remote.is_hilt) == (CHUNK, DIM, 5, True)
        given = [ours(1.0), ours(2.0)]
        np.testing.assert_array_equal(remote.act(given, sample=False)[0], policy.act(given, sample=False)[0])
        with pytest.raises(RequestError, match=r"hilt://127.0.0.1:\d+: 'state' has nan at place 0"):
            remote.act([ours(float("nan"))], sample=False)
        with pytest.raises(RequestError, match="the policy failed: ZeroDivisionError: the model is broken"):
            remote.act([{**ours(), "instruction": "fail"}], sample=False)
        assert (remote.act([ours(3.0)], sample=False)[0] == 3.0).all(), "it goes on"


def test_nobody_without_a_key_is_answered(wired: tuple[Known, PolicyWire]):
    with pytest.raises(HiltError, match=r"hilt://127.0.0.1"):
        RemotePolicy(wired[1].url, timeout_s=1.0)


def test_nobody_there():
    with pytest.raises(RefusedError, match=r"hilt://127\.0\.0\.1"):
        RemotePolicy(f"hilt://127.0.0.1:{free_port()}", timeout_s=0.5)


def test_beyond_this_machine_keys_are_needed():
    server: Any = None
    with pytest.raises(
        ConfigError, match=r"the wire at 0\.0\.0\.0 port 5590 is reached from other machines, and has no"
    ):
        PolicyWire(server, 5590, host="0.0.0.0")
    with pytest.raises(ConfigError, match="port 65535 of the wire: expected 1 to 65534"):
        PolicyWire(server, 65535)
