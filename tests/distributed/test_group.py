"""Groups of workers: calls, errors that are those of the worker, ranks that die,
hang or raise while the others wait."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, RequestError, UnknownNameError
from hilt.distributed.group import Here, Processes, open_group
from hilt.distributed.placement import Placement, Sharding, rank_folder
from hilt.distributed.ranks import LostRankError
from hilt.distributed.remote_workers import LostWorkerError, Stopped, WorkerTraceback, size_of
from tests.distributed.toy_group import is_there
from tests.forked import with_torch

TOY = "tests.distributed.toy_group:Toy"


@pytest.fixture(scope="module")
def made():
    with with_torch():
        group = Processes(TOY, (10,), Placement(kind="processes", ranks=3, wait_seconds=60, call_seconds=60))
        yield group
        group.close()


@pytest.fixture
def group(made):
    if made._over:
        made.restart()
    return made


def test_all_ranks_answer_in_their_order(group):
    assert group.call("add", 5) == [18, 18, 18]
    assert group.call("add", 5, each=[100, 200, 300]) == [118, 218, 318]
    with pytest.raises(ConfigError, match="each has 1 arguments for 3 ranks"):
        group.call("add", 5, each=[1])


def test_how_far_a_call_is_is_told_by_rank(group, monkeypatch):
    heard = []
    monkeypatch.setattr(group, "watch", lambda rank, standing: heard.append((rank, standing)))
    group.call("count", 3)
    assert {rank for rank, _ in heard} == {0, 1, 2} and all(
        standing == ("counting", 1, 3, "by one") for _, standing in heard
    ), "not each"
    here = Here(TOY, (10,))
    here.watch = lambda rank, standing: heard.append((rank, standing))
    here.call("count", 2)
    assert heard[3:] == [(0, ("counting", 1, 2, "by one")), (0, ("counting", 2, 2, "by one"))]


def test_arrays_and_tensors_pass_and_are_counted(group):
    tree = {"a": np.arange(1000), "b": [torch.ones(5, dtype=torch.bfloat16)]}
    before = group.carried
    back = group.call("mirror", tree)[2]
    assert (back["a"] == tree["a"]).all() and back["b"][0].dtype == torch.bfloat16 and (back["b"][0] == 1).all()
    assert group.carried - before == 2 * 3 * size_of(tree) >= 6 * 8010


@pytest.mark.parametrize("kind", ["here", "processes"])
def test_a_start_is_stopped_and_no_rank_stays(kind: str, tmp_path: Path, made):
    placement = Placement(ranks=2, kind=kind, wait_seconds=600) if kind == "processes" else Placement()

    def begun() -> list[int]:
        return [int(path.name) for path in tmp_path.iterdir()]

    with pytest.raises(Stopped):
        open_group(
            placement,
            "tests.distributed.toy_group:NeverReady",
            (tmp_path,),
            stop=lambda: len(begun()) == placement.ranks,
        )
    gone_by = time.monotonic() + 60
    while kind == "processes" and any(map(is_there, begun())):
        assert time.monotonic() < gone_by, "a rank is still there"
        time.sleep(0.05)


def test_an_exception_arrives_as_itself_with_its_place(group):
    with pytest.raises(ZeroDivisionError, match="rank 1 divides by zero") as raised:
        group.call("raise_at", 1)
    cause = str(raised.value.__cause__)
    assert isinstance(raised.value.__cause__, WorkerTraceback)
    assert "rank 1 of 3, in raise_at()" in cause and "toy_group.py" in cause and "raise ZeroDivisionError" in cause
    with pytest.raises(ClosedError, match=r"ZeroDivisionError: rank 1 divides by zero; restart\(\) it"):
        group.call("add", 1)
    group.restart()
    assert group.call("add", 5) == [18, 18, 18]


def test_an_exception_that_cannot_travel_is_told_in_words(group):
    with pytest.raises(RequestError, match="OddError: 1 and 2"):
        group.call("odd")


def test_an_answer_that_cannot_travel_is_said(group):
    with pytest.raises(RequestError, match=r"what unsendable\(\) answered at rank \d cannot be sent: .*lambda"):
        group.call("unsendable")


def test_a_killed_rank_is_the_cause_and_not_that_others_lost_it(group):
    with pytest.raises(
        LostWorkerError, match=r"rank 2 of 3 is gone: its process was killed by SIGKILL; .* memory"
    ) as raised:
        group.call("die_at", 2)
    assert raised.value.rank == 2


def test_a_rank_that_hangs_is_named_at_the_deadline(group):
    with pytest.raises(DeadlineError, match=r"rank 0 and rank 1 and rank 2 did not answer hang_at\(\) within 1 s"):
        group.call("hang_at", 1, timeout=1)


def test_a_lost_rank_is_told_when_there_is_no_other_cause(group, monkeypatch):
    monkeypatch.setattr("hilt.distributed.remote_workers.GRACE_SECONDS", 0.2)
    with pytest.raises(LostRankError, match="rank 2 is gone"):
        group.call("lose")


def test_stop_reaches_a_worker_inside_a_call(group):
    for rank in range(3):
        group._send(rank, "until_stopped", ())
    group.stop()
    assert group._answers("until_stopped", 60) == ["stopped"] * 3
    group.restart()  # a new start is not a stopped one
    assert group.call("add", 1) == [14, 14, 14]


def test_a_worker_ends_when_its_parent_is_gone(group):
    for rank in range(3):
        group._send(rank, "hang_at", (rank,))
    group._lives[1].close()  # as the system does at the death of a process
    with pytest.raises(LostWorkerError, match="rank 1 of 3 is gone: its process ended with exit status 1"):
        group._answers("hang_at", 60)


def test_a_worker_that_cannot_be_made(made):
    with pytest.raises(ConfigError, match="this worker cannot be made"):
        Processes(TOY, ("broken",), Placement(kind="processes", ranks=1))


def test_here_is_the_same_in_this_process():
    group = open_group(Placement(), TOY, (10,))
    assert isinstance(group, Here) and group.call("add", 5) == [15] and group.call("add", 5, each=[1]) == [16]
    with pytest.raises(ZeroDivisionError):
        group.call("raise_at", 0)
    group.stop()
    assert group.call("until_stopped") == ["stopped"]
    group.restart()
    assert group.worker.stop() is False
    group.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "rays"}, "no kind of placement named 'rays'; did you mean 'ray'?"),
        ({"kind": "ray", "strategy": "pack"}, "no strategy of placement named 'pack'"),
        ({"ranks": 2}, "placement.ranks=2 needs placement.kind=processes or ray"),
        ({"kind": "processes", "ranks": 0}, "placement.ranks=0: expected a whole number of at least 1."),
        ({"address": "auto"}, "placement.address=auto would do nothing: it needs placement.kind=ray"),
        ({"kind": "processes", "gpus": 1.0}, "placement.gpus=1.0 would do nothing"),
        ({"restarts": 1}, "placement.restarts=1 would do nothing: it needs placement.kind=processes or ray."),
    ],
)
def test_a_placement_that_cannot_work(settings, message):
    with pytest.raises((ConfigError, UnknownNameError)) as raised:
        Placement(**settings).check()
    assert message in str(raised.value)


def test_a_sharding_that_would_do_nothing():
    with pytest.raises(ConfigError, match=r"sharding.offload_optimizer=True would do nothing"):
        Sharding(offload_optimizer=True).check()
    with pytest.raises(UnknownNameError, match="no precision named 'bf16'"):
        Sharding(enabled=True, precision="bf16").check()
    with pytest.raises(ConfigError, match=r"sharding.precision=bfloat16 is that of units"):
        Sharding(enabled=True, precision="bfloat16").check()
    Sharding(enabled=True, precision="bfloat16", units=["Block"], offload_gradients=True).check()


def test_the_folder_of_a_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert rank_folder(Placement(), Path("runs/a"), 1) == Path("runs/a")
    assert rank_folder(Placement(kind="ray", folder="$SCRATCH/x"), Path("runs/a"), 1) == tmp_path / "x" / "a"
    with pytest.raises(ConfigError, match="rank 1's machine does not have this variable"):
        rank_folder(Placement(kind="ray", folder="$NOT_THERE"), Path("runs/a"), 1)
