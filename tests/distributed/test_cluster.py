"""Ray for real: two machines as separate raylets, each with an object store and a folder
of its own; ranks that raise, die and are late."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hilt.core.errors import DeadlineError
from hilt.distributed.group import open_group
from hilt.distributed.placement import Placement
from hilt.distributed.remote_workers import LateWorkerError, LostWorkerError, Stopped, WorkerTraceback
from hilt.observe.metrics import read_metrics
from hilt.vla.train import begin_run, train
from tests.distributed.toy_group import is_there
from tests.effort import need
from tests.vla.toy_vla import config

need("ray")
pytestmark = pytest.mark.peers  # a cluster takes a quarter of a minute and 0.7 GB to start

ROLLER = "tests.distributed.toy_group:Roller"
ROWS, PIXELS = 64, 224  # a trajectory: 9.6 MB
STEPS = ["max_steps=3", "collect.data_batch_size=8", "validation.period=2", "checkpoint_period=1"]

SHARDED = "sharding.units=[TransformerBlock]"


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two, and the one of this process, which has no room for ranks."""
    import ray
    from ray.cluster_utils import Cluster

    cluster, path = Cluster(), f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    cluster.add_node(num_cpus=0, object_store_memory=80_000_000, include_dashboard=False)
    for name in ("one", "two"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "machine.txt").write_text(name)
        cluster.add_node(
            num_cpus=2, object_store_memory=80_000_000, env_vars={"HILT_NODE_FOLDER": str(folder), "PYTHONPATH": path}
        )
    ray.init(cluster.address, logging_level="warning")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def placed(machines):
    opened = []

    def place(**settings):
        settings = {"wait_seconds": 60, "call_seconds": 120, **settings}
        opened.append(open_group(Placement(kind="ray", address=machines.address, **settings), ROLLER, ("runs/a",)))
        return opened[-1]

    yield place
    for group in opened:
        group.close()


def test_ranks_on_two_machines_join_fail_and_start_again(placed):
    group = placed(ranks=2, strategy="STRICT_SPREAD")
    assert sorted(answer["machine"] for answer in group.call("collect", 1)) == ["one", "two"]
    group.call("update")
    assert [float(weights["weight"][0]) for _, weights in group.call("weights")] == [2.0, 2.0]  # the sum over both

    with pytest.raises(ZeroDivisionError, match="in mid-update") as raised:
        group.call("update", "raise")
    assert isinstance(raised.value.__cause__, WorkerTraceback)
    assert "rank 1 of 2, in update()" in str(raised.value.__cause__) and "toy_group.py" in str(raised.value.__cause__)

    group.restart()
    with pytest.raises(
        LostWorkerError, match=r"rank 1 of 2 \(both\) is gone, process \d+ on \S+: its worker process has died"
    ):
        group.call("update", "die")

    group.restart()
    threading.Timer(1.0, group.stop).start()
    assert [answer["version"] for answer in group.call("collect", 1, 0, True)] == [0, 0]


@pytest.mark.parametrize("rollout_ranks", [0, 1])
def test_a_start_is_stopped_and_no_rank_stays(machines, tmp_path, rollout_ranks):
    """In the worker's own start: of ranks that train, which come first, and those that roll out are not begun."""
    import ray

    def begun():
        return [int(path.name) for path in tmp_path.iterdir()]

    placement = Placement(kind="ray", address=machines.address, ranks=2, rollout_ranks=rollout_ranks, wait_seconds=600)
    with pytest.raises(Stopped):
        open_group(placement, "tests.distributed.toy_group:NeverReady", (tmp_path,), stop=lambda: len(begun()) == 2)
    end = time.monotonic() + 60
    while any(map(is_there, begun())) or ray.available_resources().get("CPU") != 4:
        assert time.monotonic() < end, "a rank is still there, or has its place"
        time.sleep(0.05)


def test_a_start_is_stopped_while_it_waits_for_a_place(machines):
    asked = []
    placement = Placement(kind="ray", address=machines.address, ranks=99, wait_seconds=600)
    with pytest.raises(Stopped):
        open_group(placement, ROLLER, ("runs/a",), stop=lambda: asked.append(1) or len(asked) > 2)


def test_weights_and_frames_go_from_machine_to_machine(placed):
    group = placed(ranks=2, rollout_ranks=2)
    before, shared = group.carried, _shared_memory()
    for step in range(2):
        cards = group.call("collect", ROWS, PIXELS)
        assert [card["version"] for card in cards] == [step, step] and group.version == step
        frames = ROWS * PIXELS * PIXELS * 3
        assert group.call("update") == [[(0, frames, step)], [(1, frames, step)]]
    assert group.carried - before < 4 * 100_000  # bytes, of four trajectories
    assert _shared_memory() - shared < 1_000_000  # nor has this process looked at the store where they are

    pid = int(group.rollouts.where[1].split()[1])
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(
        LostWorkerError, match=r"rank 1 of 2 \(roll_out\) is gone, process \d+ on \S+: its worker process has died"
    ) as raised:
        group.call("collect", ROWS, PIXELS, True)
    assert raised.value.rank == 1
    group.restart()
    group.call("load_shared", 7)
    assert [card["version"] for card in group.call("collect", 1)] == [7, 7]


def test_weights_that_do_not_arrive_are_late(placed):
    group = placed(ranks=1, rollout_ranks=1, wait_seconds=20)
    group.call("collect", 1, 2)
    group.call("update", "slow")
    with pytest.raises(LateWorkerError, match=r"rank 0 did not answer take_weights\(\) within 20 s"):
        group.call("collect", 1)


def test_what_finds_no_place(placed):
    with pytest.raises(
        DeadlineError,
        match=r"3 ranks with 2 CPU and 0 GPU each, PACK, found no place within 2 s: the cluster has 4 CPU on 3",
    ):
        placed(ranks=3, cpus=2.0, wait_seconds=2)


def _shared_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssShmem:")[1].split()[0])


def ran(run, *changes, fails="", said=None):
    """A whole run of two ranks, where one fails in the first step; its figures by
    training step, as they were last told."""
    settings = config(*STEPS, "placement.ranks=2", *changes)
    begin_run(run, "toy", settings)

    said = [] if said is None else said

    def notify(line):
        if fails and line.startswith("step 0:") and not any(before.startswith("step 0:") for before in said):
            (run / fails).touch()  # once: without a checkpoint, it is validated again
        said.append(line)

    train(settings, run, notify=notify)
    names = ("episodes", "successes", "policy_loss", "gradient_norm", "validation_success", "staleness")
    found = {}
    for record in read_metrics(run, ["update"]):
        found.setdefault(record["update"], {}).update({name: record[name] for name in names if name in record})
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return ran(tmp_path_factory.mktemp("runs") / "plain", "placement.kind=processes")


@pytest.mark.parametrize(
    ("fails", "changes"),
    [
        ("", ["placement.kind=processes", "sharding.enabled=true", SHARDED, "algorithm.batch.chunks_per_pass=3"]),
        ("die-in-update", ["placement.kind=processes"]),
        ("die-in-rollout", ["placement.kind=ray", "placement.rollout_ranks=2"]),
        ("die-in-update", ["placement.kind=ray", "sharding.enabled=true"]),
    ],
)
def test_a_run_is_the_same_wherever_its_ranks_are_and_goes_on_when_one_dies(
    fails, changes, machines, undisturbed, tmp_path, monkeypatch
):
    monkeypatch.setattr("hilt.vla.train.WORKER", "tests.vla.toy_placed:make_worker")
    said = []
    address = [f"placement.address={machines.address}"] if "placement.kind=ray" in changes else []
    figures = ran(tmp_path / "run", *changes, *address, fails=fails, said=said)
    again = [line for line in said if "started again" in line]
    assert len(again) == bool(fails) and all("rank 1 of 2" in line and " is gone" in line for line in again)
    assert list(figures) == list(undisturbed) == [0, 1, 2, 3]
    for step, theirs in undisturbed.items():
        assert figures[step] == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_ranks_that_collect_beside_an_update_collect_the_same_wherever_they_are(machines, undisturbed, tmp_path):
    ahead, apart = "collect.ahead=1", ["placement.kind=ray", "placement.rollout_ranks=2"]
    beside = ran(tmp_path / "beside", "placement.kind=processes", "pool.workers=1", ahead)
    figures = ran(tmp_path / "apart", *apart, f"placement.address={machines.address}", ahead)
    for step, theirs in beside.items():
        assert figures[step] == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert beside[1] == undisturbed[1] and beside[2]["policy_loss"] != undisturbed[2]["policy_loss"]
    assert [figures[step]["staleness"] for step in (1, 2, 3)] == [0, 1, 0], "not beside a validation"


def test_what_a_rank_raises_ends_a_run_as_itself(machines, tmp_path, monkeypatch):
    monkeypatch.setattr("hilt.vla.train.WORKER", "tests.vla.toy_placed:make_worker")
    with pytest.raises(ZeroDivisionError, match="in mid-update") as raised:
        ran(tmp_path / "run", "placement.kind=ray", f"placement.address={machines.address}", fails="raise-in-update")
    assert "rank 1 of 2, in update()" in str(raised.value.__cause__)
