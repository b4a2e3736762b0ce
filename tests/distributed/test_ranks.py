"""Ranks over gloo: worlds of one to four, one that leaves, one that is late, one
that dies; nothing hangs, and the rank is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hilt.core.errors import ClosedError, ConfigError, DeadlineError
from hilt.distributed.group import Processes
from hilt.distributed.placement import Placement
from hilt.distributed.ranks import Alone, Joined, LateRankError, LostRankError, Unjoined, host_meeting, join
from tests.forked import with_torch

TOY = "tests.distributed.toy_group:Toy"
WAIT_S = 15
"""How long ranks wait for each other, also while they start on a busy machine"""


def test_alone():
    ranks = Alone()
    assert ranks.sum_(torch.tensor([2.0])) == 2 and ranks.max(3) == 3 and ranks.any(True) and not ranks.any(False)
    assert ranks.gather({"a": (1, None)}) == [{"a": [1, None]}]  # as JSON is
    ranks.barrier()


def test_a_rank_that_joined_nobody_adds_nothing_up():
    ranks = Unjoined(1, 3)
    for call in (
        lambda: ranks.sum_(torch.ones(1)),
        lambda: ranks.max(1),
        lambda: ranks.any(True),
        lambda: ranks.gather(1),
        ranks.barrier,
    ):
        with pytest.raises(ClosedError, match="rank 1 of 3 only rolls out"):
            call()


@pytest.fixture(scope="module")
def made():
    with with_torch():
        group = Processes(TOY, (0,), Placement(kind="processes", ranks=4, wait_seconds=WAIT_S, call_seconds=300))
        yield group
        group.close()


@pytest.fixture
def group(made):
    made.restart()
    return made


def test_worlds_of_one_to_four(made):
    made.meetings = [host_meeting() for _ in range(4)]
    for size in (1, 2, 3, 4):
        answers = made.call("in_world", made.meetings[size - 1][1], size)
        gathered = [{"rank": rank, "text": "é" * rank, "none": None} for rank in range(size)]
        assert answers[:size] == [(size * size / 2, 0, size - 1, size > 1, gathered)] * size
        assert answers[size:] == [None] * (4 - size)


def test_who_leaves_is_named_to_those_who_wait(group):
    answers = group.call("leave_in_turn", 1)
    assert answers.pop(1) == "" and all(answer.startswith("LostRankError: ") for answer in answers)
    assert all("rank 1 left: ZeroDivisionError: by zero" in answer for answer in answers)


def test_who_is_late_is_named_at_the_deadline(group, tmp_path: Path):
    answers = group.call("wait_for", 2, str(tmp_path))
    assert answers.pop(2) == "" and all(
        f"waited {WAIT_S} s for rank 2 (last seen in join)." in answer for answer in answers
    )
    # who hears of it from another, lost that one
    assert any(answer.startswith("LateRankError: rank ") for answer in answers)


def test_who_is_killed_is_named(group):
    for rank in range(4):
        group._send(rank, "die_at", (3,))
    errors = {}
    while len(errors) < 4:
        errors.update({rank: answer.error for rank, answer in group._ready(set(range(4)) - set(errors), 60).items()})
    assert "rank 3 of 4 is gone: its process was killed by SIGKILL" in str(errors[3])
    assert all(isinstance(errors[rank], LostRankError) for rank in range(3))
    assert any("rank 3 (last seen in join) is gone" in str(errors[rank]) for rank in range(3))


def test_who_never_came_is_named():
    store, address = host_meeting()
    with pytest.raises(LateRankError, match=r"rank 0 waited 1 s at 127.0.0.1:\d+: rank 1, 2 of 3 did not come"):
        join(address, 0, 3, timeout_seconds=1)
    with pytest.raises(ConfigError, match="rank 3 of 3: ranks are numbered from 0"):
        join(address, 3, 3)
    del store


def test_errors_of_others_who_use_torch_distributed(monkeypatch):
    monkeypatch.setattr("hilt.distributed.ranks.REASON_SECONDS", 0)

    def failed(error):
        ranks = Joined(Store(), 0, 2, 5)
        return ranks.fail("update", error), ranks._store.said["left/0"]

    kept = ValueError("not of gloo's class")
    assert failed(kept) == (kept, "ValueError: not of gloo's class")
    lost, told = failed(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    assert str(lost) == "rank 0 in update: rank 1 (last seen in nothing) is gone: the connection closed."
    assert told == f"it lost another: {lost}"
    late, _ = failed(RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:91] Timed out waiting 5000ms for recv"))
    assert isinstance(late, DeadlineError) and "waited 5 s for rank 1" in str(late)


def test_a_rank_whose_connection_closes_waits_for_the_reason():
    """gloo closes the connections of a rank that waited too long before that rank can give its reason."""

    class LateReason(Store):
        asked = 0

        def check(self, keys):
            self.asked += keys == ["left/1"]
            return keys == ["left/1"] and self.asked > 3

        def get(self, key):
            return b"it lost another: rank 1 in barrier waited 5 s for rank 2 (last seen in join)."

    ranks = Joined(LateReason(), 0, 3, 5)
    error = ranks.fail("barrier", RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert str(error).startswith("rank 0 in barrier: rank 1 left: rank 1 in barrier waited 5 s for rank 2")


def test_the_meeting_is_at_no_other_address_than_its_own():
    store, address = host_meeting()
    port = int(address.rpartition(":")[2])
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening
    del store


def test_joining_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch):
    found = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append(os.environ["GLOO_SOCKET_IFNAME"]))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store, address = host_meeting()
    join(address, 0, 1)
    assert len(found) == 1 and found[0].startswith("lo")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    del store


class Store:
    """Where nobody has said anything yet."""

    def __init__(self):
        self.said = {}

    def check(self, keys):
        return False

    def set(self, key, value):
        self.said[key] = value
