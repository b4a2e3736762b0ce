"""The pool: what comes out is what one environment alone gives, and what fails costs an episode and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hilt.core import errors
from hilt.core.errors import ClosedError, ConfigError, DeadlineError, HiltError, UnknownNameError
from hilt.envs import pool as pools
from hilt.envs import task as tasks
from hilt.envs.pool import Pool
from tests.envs.pool_toys import DIES, HANGS, LIMIT, MADE_WRONG, RAISES, Counting

COUNTING, SAVING = "tests.envs.pool_toys:Counting", "tests.envs.pool_toys:Saving"


class Begin(NamedTuple):
    task: str
    state: int
    seed: int = 0
    split: str = "train"


def kept(reply: Any) -> Any:
    """What a reply says, with a copy of what it shows."""
    seen = {"sum": reply.observation["state"]["left/sum"].tolist(), "front": reply.observation["front"].tolist()}
    return seen, reply.rewards.tolist(), reply.executed, reply.terminated, reply.truncated, reply.success, reply.error


def episodes(pool: Pool, begins: list[Begin], chunk: int = 2) -> list[Any]:
    """All at once, in slots 0.., by actions that follow from the slot; everything that was replied."""
    told: list[Any] = [[] for _ in begins]
    for slot, begin in enumerate(begins):
        pool.start(slot, begin)
    going = list(range(len(begins)))
    for number in range(LIMIT):
        replies = pool.collect(going)
        for reply in replies:
            told[reply.slot].append(kept(reply))
        going = [reply.slot for reply in replies if not (reply.terminated or reply.truncated)]
        for slot in going:
            pool.step(slot, np.full((chunk, 1), 0.1 * (slot + 1) * (number + 1), np.float32))
    assert not going
    return told


BEGINS = [Begin((COUNTING, SAVING)[i % 2], i % 3, seed=i % 2) for i in range(6)]


def alone(begin: Begin, slot: int, chunk: int = 2) -> list[Any]:
    """The same episode by single steps of one environment."""
    env, done = tasks.make(begin.task), False
    shown, _ = env.reset(seed=begin.seed, options={"split": begin.split, "state": begin.state})
    told = [(shown["state"]["left/sum"].tolist(), 0)]
    while not done:
        action = np.full(1, 0.1 * (slot + 1) * len(told), np.float32)
        executed = 0
        while executed < chunk and not done:
            shown, _, terminated, truncated, _ = env.step(action)
            executed, done = executed + 1, terminated or truncated
        told.append((shown["state"]["left/sum"].tolist(), executed))
    return told


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_episodes_are_those_of_one_environment_alone_whatever_the_number_of_workers(workers: int) -> None:
    with Pool(workers, 6) as pool:
        told = episodes(pool, BEGINS)
        assert told == episodes(pool, BEGINS), "environments that are used again begin as new ones"
        assert pool.counts == {"episodes": 12, "lost": 0, "restarts": 0}
    assert [[(reply[0]["sum"], reply[2]) for reply in one] for one in told] == [
        alone(begin, i) for i, begin in enumerate(BEGINS)
    ]


def test_a_chunk_stops_where_the_episode_ends_and_is_observed_once() -> None:
    with Pool(0, 1) as pool:
        pool.start(0, Begin(COUNTING, 1))
        (first,) = pool.collect([0])
        assert first.instruction == "count" and first.executed == 0 and first.rewards.shape == (0,)
        pool.step(0, np.full((5, 1), 2.0))
        (reply,) = pool.collect([0])
        assert (reply.executed, reply.terminated, reply.truncated, reply.success) == (3, True, False, True)
        assert reply.rewards.tolist() == [2.0] * 3 and reply.rewards.dtype == np.float32
        with pytest.raises(ConfigError, match="slot 0 has no episode, or its episode is over"):
            pool.step(0, np.zeros((1, 1)))


def test_an_environment_with_a_step_chunk_of_its_own_is_asked_by_it() -> None:
    class Once(Counting):
        def step_chunk(self, actions: Any) -> Any:
            return "seen", np.ones(len(actions), np.float32), False, True, {}

    assert tasks.step_chunk(Once(), [1, 2, 3])[0] == "seen"
    env = Counting()
    env.reset(options={"state": 1})
    seen, rewards, terminated, truncated, info = tasks.step_chunk(env, np.ones((LIMIT + 3, 1)))
    assert (rewards.tolist(), terminated, truncated, info["succeed"]) == ([1.0] * 5, True, False, True)
    assert seen["state"]["left/sum"][1] == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_pool_replies_are_read_only_and_valid_until_the_next_request(workers: int) -> None:
    with Pool(workers, 2, task_options={"step_limit": 3}) as pool:
        for slot in (0, 1):
            pool.start(slot, Begin("tests.envs.pool_toys:Plain", slot))
        first, second = pool.collect([0, 1])
        was = first.observation.copy()
        with pytest.raises(ValueError, match="read-only"):
            first.observation[0] = 1.0
        pool.step(1, np.array([1, 2]))  # integers stay integers
        (moved,) = pool.collect([1])
        assert np.array_equal(first.observation, was)
        assert np.array_equal(moved.observation, second.observation) and moved.executed == 2, (
            "the second is written over now"
        )


def test_many_slots_share_an_environment_that_takes_snapshots_and_others_are_kept_within_the_limit(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    with Pool(0, 3, task_options={"folder": str(tmp_path)}) as pool:
        episodes(pool, [Begin(SAVING, 1)] * 3)
        assert notes.read_text().split() == ["made"]
        episodes(pool, [Begin(COUNTING, 1)] * 3)  # these need one each; three may be kept, so the shared one has to go
        assert notes.read_text().split() == ["made"] * 3 + ["closed", "made"]
    assert notes.read_text().split().count("closed") == 4
    with Pool(0, 1, task_options={"folder": str(tmp_path)}, envs_per_worker=2) as pool:
        notes.write_text("")
        for name in (SAVING, COUNTING, SAVING):
            episodes(pool, [Begin(name, 1)])
        assert notes.read_text().split() == ["made"] * 2


@pytest.mark.parametrize("given", ["", "2"])
def test_a_worker_has_one_thread_unless_somebody_asks_for_more(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_NUM_THREADS", given) if given else monkeypatch.delenv("LP_NUM_THREADS", raising=False)
    with Pool(1, 1) as pool:
        pool.describe(COUNTING)
        environment = Path(f"/proc/{pool._workers[0]._process.pid}/environ").read_text().split("\0")
    assert f"LP_NUM_THREADS={given or 0}" in environment and any(
        each.startswith("OMP_NUM_THREADS=") for each in environment
    )


def test_a_task_is_described_by_a_worker_and_once(tmp_path: Path) -> None:
    with Pool(1, 1, task_options={"folder": str(tmp_path)}) as pool:
        about = {
            "instruction": "save",
            "step_limit": LIMIT,
            "initial_states": {"train": 20, "eval": 20},
            "action_dim": 1,
        }
        assert pool.describe(SAVING) == pool.describe(SAVING) == about
        episodes(pool, [Begin(SAVING, 1)])
        assert (tmp_path / "notes").read_text().split() == ["made"]
        with pytest.raises(UnknownNameError, match="no task named 'pikc'"):
            pool.describe("pikc")
        with pytest.raises(ConfigError, match=r"tests.envs.pool_toys:Plain does not take task_options .*folder"):
            pool.describe("tests.envs.pool_toys:Plain")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ConfigError", "no scenes"),
        ("StorageError", "no scenes"),
        ("UnknownNameError", "no task named 'pick'"),
        ("MissingPackageError", "pick needs the package 'task'"),
    ],
)
def test_an_error_at_the_making_of_a_task_is_raised_as_it_was_in_the_worker(kind: str, text: str) -> None:
    assert kind in pools.ASKED_WRONGLY
    with Pool(1, 1, task_options={"kind": kind}) as pool, pytest.raises(getattr(errors, kind), match=text):
        pool.describe("tests.envs.pool_toys:without_assets")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_costs_its_episode_alone(workers: int) -> None:
    with Pool(workers, 3) as pool:
        begins = [Begin(SAVING, RAISES), Begin(SAVING, 1), Begin(COUNTING, MADE_WRONG)]
        for slot, begin in enumerate(begins):
            pool.start(slot, begin)
        fine, other, wrong = pool.collect([0, 1, 2])
        assert (
            not fine.error and not other.error and "the scene has no table" in wrong.error and wrong.observation == {}
        )
        for slot in (0, 1):
            pool.step(slot, np.full((2, 1), 0.5))
        lost, other = pool.collect([0, 1])
        assert "in step" in lost.error and "RuntimeError: the gripper fell off" in lost.error
        assert not other.error and other.observation["state"]["left/sum"][1] == 2
        pool.start(0, Begin(SAVING, 2))
        assert not pool.collect([0])[0].error
        pool.step(1, np.full((2, 1), 0.5))
        assert pool.collect([1])[0].observation["state"]["left/sum"][1] == 4
        assert pool.counts == {"episodes": 4, "lost": 2, "restarts": 0}


def test_pool_worker_that_dies_is_replaced_and_reports_where() -> None:
    """Slots 0 and 2 are its; 2 has an episode that nobody asks about in that moment, 1 is another worker's."""
    with Pool(2, 3) as pool:
        for slot, state in enumerate((DIES, 1, 2)):
            pool.start(slot, Begin(COUNTING, state))
        pool.collect([0, 1, 2])
        for slot in (0, 1):
            pool.step(slot, np.full((2, 1), 0.5))
        died, other = pool.collect([0, 1])
        assert "worker 0 died (SIGSEGV) while it did a step of slot 0" in died.error
        assert "Segmentation fault" in died.error and "pool_toys.py" in died.error and "in step" in died.error
        assert not other.error and other.executed == 2
        pool.step(2, np.ones((1, 1)))
        assert pool.collect([2])[0].error == died.error
        assert pool.counts == {"episodes": 3, "lost": 2, "restarts": 1}
        pool.start(0, Begin(COUNTING, 1))
        assert not pool.collect([0])[0].error


def test_a_worker_that_was_killed_while_it_had_nothing_to_do_costs_no_new_episode() -> None:
    with Pool(1, 2) as pool:
        pool.start(0, Begin(COUNTING, 1))
        pool.collect([0])
        process = pool._workers[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        pool.start(1, Begin(COUNTING, 2))
        pool.step(0, np.zeros((1, 1)))
        fine, lost = pool.collect([1, 0])
        assert not fine.error and "worker 0 died (SIGKILL) while it did nothing" in lost.error
        assert pool.counts == {"episodes": 2, "lost": 1, "restarts": 1}


def test_a_worker_that_hangs_is_replaced_within_its_deadline_and_what_it_had_not_begun_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "ABORT_S", 60.0)  # a busy machine takes its time for the traceback
    with Pool(1, 3, step_s=3) as pool:
        pool.start(0, Begin(COUNTING, HANGS))
        pool.start(1, Begin(COUNTING, 1))
        pool.collect([0, 1])
        pool.step(0, np.zeros((2, 1)))
        pool.step(1, np.zeros((2, 1)))
        pool.start(2, Begin(COUNTING, 3))
        with pytest.raises(DeadlineError, match=r"slots \[0\] have not answered in time"):
            pool.collect([0], timeout=0.1)
        hung, lost, begun = pool.collect([0, 1, 2])
        assert "worker 0 did not answer within 3 s (SIGABRT)" in hung.error and "in wait_for_ever" in hung.error
        assert lost.error == hung.error
        assert not begun.error and begun.observation["state"]["left/sum"][0] >= 3
        assert pool.counts == {"episodes": 3, "lost": 2, "restarts": 1}


def test_a_worker_that_fails_again_and_again_is_an_error() -> None:
    with (
        Pool(1, 1, restarts=1) as pool,
        pytest.raises(HiltError, match=r"2 failures of a worker[\s\S]*Segmentation fault"),
    ):
        for _ in range(2):
            pool.start(0, Begin(COUNTING, DIES))
            pool.collect([0])
            pool.step(0, np.zeros((2, 1)))
            assert pool.collect([0])[0].error
    with pytest.raises(ClosedError, match="the pool is closed"):
        pool.start(0, Begin(COUNTING, 1))


def test_no_worker_outlives_its_caller_even_when_it_hangs(tmp_path: Path) -> None:
    script = f"""
from tests.envs.test_pool import COUNTING, HANGS, Begin, Pool
pool = Pool(2, 2, task_options={{"folder": {str(tmp_path)!r}}})
for slot, state in enumerate((HANGS, 1)):
    pool.start(slot, Begin(COUNTING, state))
pool.collect([0, 1])
pool.step(0, [[0.0], [0.0]])
print("steps", *(worker._process.pid for worker in pool._workers), flush=True)
pool.collect([0])
"""
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    word, *pids = caller.stdout.readline().split()
    assert word == "steps" and len(pids) == 2
    wait_until(lambda: "hangs" in (tmp_path / "notes").read_text())
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    caller.send_signal(signal.SIGKILL)
    caller.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_closing_closes_the_environments_and_ends_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "CLOSE_S", 60.0)
    pool = Pool(1, 1, task_options={"folder": str(tmp_path)})
    pool.start(0, Begin(COUNTING, 1))
    pool.collect([0])
    pid = str(pool._workers[0]._process.pid)  # type: ignore[union-attr]
    before = len(os.listdir("/proc/self/fd"))
    pool.close()
    assert not is_alive(pid) and (tmp_path / "notes").read_text().split() == ["made", "closed"]
    del pool
    assert len(os.listdir("/proc/self/fd")) < before


def test_pool_refuses_wrong_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, message in [
        ({"workers": -1}, "workers=-1: expected a number of at least 0"),
        ({"slots": 0}, "slots=0: expected a number of at least 1"),
        ({"restarts": -1}, "restarts=-1"),
        ({"step_s": 0}, "step_s=0: expected a number above 0"),
        ({"envs_per_worker": 1}, "envs_per_worker=1: a worker has 2 slots"),
        ({"task_options": {"size": object()}}, "task_options: .* a worker process gets plain values"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Pool(**{"workers": 0, "slots": 2, **given})
    monkeypatch.setitem(tasks.TASKS, "mine", lambda rest: Counting())
    monkeypatch.setitem(tasks.TASKS, "theirs", Counting)
    assert tasks.factory_names()["theirs"] == COUNTING and tasks.factory_names()["mine"] is None
    with Pool(1, 2) as pool:
        with pytest.raises(ConfigError, match="slot 2: this pool has the slots 0 to 1"):
            pool.start(2, Begin(COUNTING, 1))
        with pytest.raises(ConfigError, match="mine/x: a worker process cannot import what makes it; register"):
            pool.start(0, Begin("mine/x", 1))
        with pytest.raises(ConfigError, match="slot 0 was asked nothing"):
            pool.collect([0])
        pool.start(0, Begin("tabletop/pick", 1000))
        with pytest.raises(ConfigError, match="slot 0 has an answer that was not collected"):
            pool.start(0, Begin(COUNTING, 1))
        with pytest.raises(ConfigError, match="name it once"):
            pool.collect([0, 0])
        # as it was raised in the worker
        with pytest.raises(ConfigError, match="state 1000 of split 'train' was asked for"):
            pool.collect([0])
        for slot in (0, 1):
            pool.start(slot, Begin("tabletop/pick", 1000 - slot))
        with pytest.raises(ConfigError, match="state 1000"):
            pool.collect([0, 1])
        pool.start(1, Begin(COUNTING, 1))  # its answer was collected too
        assert not pool.collect([1])[0].error
        with pytest.raises(ConfigError, match="expected numbers"):
            pool.step(0, np.zeros(0))
    assert pool.counts["lost"] == 2


def is_alive(pid: str) -> bool:
    """Neither gone nor a zombie that waits for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(true: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [0, 1])
def test_whether_a_worker_is_busy_is_known_without_waiting(workers: int):
    with Pool(workers, 2) as pool:
        assert not pool.busy([0, 1]), "nothing was asked"
        pool.start(0, Begin(COUNTING, 0))
        processes = [worker._process for worker in pool._workers if worker._process is not None]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        pool.start(1, Begin(COUNTING, 1))
        assert pool.busy([0, 1]) == bool(workers), "it cannot have answered; without a process all is done at once"
        for process in processes:
            process.send_signal(signal.SIGCONT)
        assert [kept(reply) for reply in pool.collect([0, 1])] and not pool.busy([0, 1])
