"""A policy server is killed while it is asked, again and again: every request is answered, and with its own answer."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="a policy server needs websockets: pip install 'hilt[serve]'")

from hilt.serving import PolicyServer, RemotePolicy
from hilt.serving.policy_server import ServerAccess
from tests import effort
from tests.forked import with_torch
from tests.serving.served_toy import WAIT_S, Known
from tests.serving.test_remote_policy import ours
from tests.wire.processes import free_port


class Slow(Known):
    """Takes long enough to be killed in the middle of a call."""

    def act(self, observations: Any, *given: Any, **named: Any) -> Any:
        time.sleep(0.005)
        return super().act(observations, *given, **named)


def serve(port: int, version: int) -> None:
    """Runs in a process of its own, until that is killed."""
    with PolicyServer(Slow(), version, access=ServerAccess(port=port)):
        threading.Event().wait(10 * WAIT_S)


@pytest.fixture(scope="module")
def fork() -> Iterator[Any]:
    with with_torch() as fork:
        yield fork


def test_every_request_is_answered_although_the_server_is_killed(fork: Any, counted: Callable[[str], None]):
    port, kills, draws = free_port(), effort.rounds(3, 200), random.Random(0)
    process = fork.Process(target=serve, args=(port, 0), daemon=True)
    process.start()
    answered: list[tuple[float, float, int]] = []
    problems: list[Exception] = []
    ending = threading.Event()

    def ask() -> None:
        number = 0
        try:
            remote = connect(port)
            while not ending.is_set():
                number += 1
                actions, _ = remote.act([ours(number)], sample=False)
                answered.append((number, float(np.unique(actions).item()), remote.version))
            remote.close()
        except Exception as error:
            problems.append(error)
            raise

    client = threading.Thread(target=ask)
    client.start()
    for version in range(1, kills + 1):
        # not one of the server before, which was still to be noted
        wait(lambda version=version: problems or (answered and answered[-1][2] == version - 1))
        time.sleep(draws.uniform(0, 0.02))  # somewhere in a request
        process.kill()
        process.join(WAIT_S)
        process = fork.Process(target=serve, args=(port, version), daemon=True)
        process.start()
    wait(lambda: problems or (answered and answered[-1][2] == kills))
    ending.set()
    client.join(WAIT_S)
    process.kill()
    process.join(WAIT_S)
    counted(f"{kills} kills, {len(answered)} requests")
    assert not problems and not client.is_alive()
    assert [number for number, _, _ in answered] == list(range(1, len(answered) + 1))
    assert all(number == answer for number, answer, _ in answered), "each its own"
    versions = [version for _, _, version in answered]
    assert versions == sorted(versions) and set(versions) == set(range(kills + 1))


def connect(port: int) -> RemotePolicy:
    """The first server may not have begun yet."""
    for _ in range(int(WAIT_S / 0.05)):
        with contextlib.suppress(Exception):
            return RemotePolicy(f"ws://127.0.0.1:{port}", timeout_s=WAIT_S)
        time.sleep(0.05)
    raise AssertionError("the server did not begin in time")


def wait(met: Any) -> None:
    until = time.monotonic() + 2 * WAIT_S
    while not met():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.002)
