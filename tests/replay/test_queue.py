"""An actor's outbox: nothing is lost unless it was told to, and what is spilled comes back as it was."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, DeadlineError, SchemaError
from hilt.core.files import Files
from hilt.core.tree import flatten, unflatten
from hilt.replay import QueuedDataStore
from hilt.replay.step_encoder import PackedBlock
from tests.compat.test_buffers import make, transition
from tests.effort import rounds


def number(transition: Any) -> int:
    return int(transition["rewards"])


def same(a: Any, b: Any) -> bool:
    left, right = flatten(a), flatten(b)
    return set(left) == set(right) and all(np.array_equal(left[path], right[path]) for path in left)


# -- numbers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["spill", "block", "drop_oldest"])
def test_ids_are_those_of_agentlace(full: str):
    store = QueuedDataStore(10, full=full)
    assert (store.latest_data_id(), store.get_latest_data(-1), len(store)) == (-1, [], 0)
    assert [store.insert(transition(t)) for t in range(3)] == [0, 1, 2]
    store.batch_insert([transition(3), transition(4)])
    assert store.latest_data_id() == 4
    for from_id, wanted in [(-1, [0, 1, 2, 3, 4]), (2, [3, 4]), (4, []), (99, [])]:
        assert [number(t) for t in store.get_latest_data(from_id)] == wanted
        assert [(i, number(t)) for i, t in store.get_since(from_id)] == [(w, w) for w in wanted]
    store.close()


def test_acknowledged_transitions_are_let_go():
    store = QueuedDataStore(10)
    store.batch_insert(transition(t) for t in range(6))
    store.acknowledge(2)
    assert len(store) == 3
    assert [number(t) for t in store.get_latest_data(-1)] == [3, 4, 5]
    store.acknowledge(1)  # late news
    store.acknowledge(99)
    assert (len(store), store.latest_data_id()) == (0, 5)
    assert store.insert(transition(6)) == 6
    assert store.stats() == {
        "inserted": 7,
        "dropped": 0,
        "spilled": 0,
        "kept": 1,
        "on_disk": 0,
        "latest": 6,
        "acknowledged": 5,
    }
    store.close()


# -- when it is full
# -------------------------------------------------------------------------------------------------------------------


def test_spilled_transitions_come_back_as_they_were():
    store = QueuedDataStore(3)
    inserted = [
        transition(t, done=t % 4 == 3, mask=float(t % 8 != 3), source=t % 3, policy_version=t) for t in range(20)
    ]
    for one in inserted:
        store.insert(one)
    assert store.stats()["spilled"] == 17 == store.stats()["on_disk"]
    back = store.get_latest_data(-1)
    assert len(back) == 20 == len(store)
    for got, wanted in zip(back, inserted, strict=True):
        assert same(got, wanted)  # not one key more: a learner reads ends from dones and masks unless it is told them
    buffer = make("plain")
    buffer.batch_insert(back)
    ends = buffer.log.read(buffer.view.keys(), ["terminated", "truncated"])
    assert ends["terminated"].tolist() == [bool(t["dones"] and not t["masks"]) for t in inserted]
    assert ends["truncated"].tolist() == [bool(t["dones"] and t["masks"]) for t in inserted]
    buffer.close()
    store.close()


def test_transitions_that_differ_in_what_is_built_in():
    store = QueuedDataStore(1)
    inserted = [
        transition(t) | ({"source": 1} if t % 3 == 0 else {}) | ({"terminated": True} if t % 4 == 0 else {})
        for t in range(12)
    ]
    store.batch_insert(inserted)
    assert all(same(a, b) for a, b in zip(store.get_latest_data(-1), inserted, strict=True))
    store.close()


@settings(max_examples=rounds(8, 100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5), st.lists(st.one_of(st.integers(1, 6), st.integers(-8, -1)), max_size=14))
def test_spilling_keeps_everything_that_is_not_acknowledged(capacity: int, moves: list[int]):
    """Positive: so many inserts. Negative: the oldest so many are acknowledged."""
    store, kept, fresh = QueuedDataStore(capacity), [], 0
    for move in moves:
        for _ in range(max(0, move)):
            store.insert(transition(fresh))
            kept.append(fresh)
            fresh += 1
        if move < 0 and kept:
            up_to = kept[min(-move, len(kept)) - 1]
            store.acknowledge(up_to)
            kept = [k for k in kept if k > up_to]
        assert [(i, number(t)) for i, t in store.get_since(-1)] == [(k, k) for k in kept]
        assert len(store) == len(kept)
    store.close()


def test_queue_deletes_acknowledged_steps_from_disk(tmp_path: Path):
    """Also when the queue never runs empty."""
    store = QueuedDataStore(2, path=tmp_path / "spool")
    sizes = []
    for t in range(500):  # 25 MB in all
        store.insert({"rewards": t, "picture": np.full(50_000, t % 251, np.uint8)})
        store.acknowledge(t - 20)
        sizes.append(sum(f.stat().st_size for f in (tmp_path / "spool").rglob("*") if f.is_file()))
    assert [number(t) for t in store.get_latest_data(-1)] == list(range(480, 500))
    assert max(sizes) < 16e6
    store.close()


def test_blocking_waits_for_room():
    store = QueuedDataStore(3, full="block")
    store.batch_insert(transition(t) for t in range(3))
    said = (
        r"waited 0 s for room: 3 of 3 transitions are not acknowledged\. Is the learner running\? Or use full='spill'\."
    )
    with pytest.raises(DeadlineError, match=said):
        store.insert(transition(3), timeout=0)
    assert store.latest_data_id() == 2
    done = threading.Event()

    def insert() -> None:
        store.insert(transition(3), timeout=60)
        done.set()

    thread = threading.Thread(target=insert)
    thread.start()
    time.sleep(0.02)
    assert not done.is_set()
    store.acknowledge(0)
    thread.join(60)
    assert [number(t) for t in store.get_latest_data(-1)] == [1, 2, 3]
    store.close()


def test_dropping_the_oldest_is_counted():
    """What agentlace does without a word: capacity 3 and 10 inserts leave 7, 8, 9."""
    store = QueuedDataStore(3, full="drop_oldest")
    store.batch_insert(transition(t) for t in range(10))
    assert [(i, number(t)) for i, t in store.get_since(-1)] == [(7, 7), (8, 8), (9, 9)]
    assert [number(t) for t in store.get_latest_data(3)] == [7, 8, 9]
    assert store.stats()["dropped"] == 7
    store.close()


# -- on disk
# ----------------------------------------------------------------------------------------------------------------------


def test_a_path_that_was_used_before_gives_back_what_was_not_acknowledged(tmp_path: Path):
    store = QueuedDataStore(2, path=tmp_path / "spool")
    store.batch_insert(transition(t) for t in range(9))
    store.acknowledge(2)
    store.close()
    again = QueuedDataStore(2, path=tmp_path / "spool")
    pending = [i for i, _ in again.get_since(-1)]
    assert pending[-6:] == [3, 4, 5, 6, 7, 8]
    assert all(number(t) == i for i, t in again.get_since(-1))
    assert again.insert(transition(50)) == 9
    again.batch_insert(transition(t) for t in (51, 52, 53))
    assert [number(t) for t in again.get_latest_data(8)] == [50, 51, 52, 53]
    again.acknowledge(12)
    assert len(again) == 0
    again.close()


def test_a_transition_keeps_the_boot_of_the_process_that_inserted_it(tmp_path: Path):
    """So that the learner knows it again, whoever sends it."""
    boots, sent = [], []
    for first in (0, 3):
        store = QueuedDataStore(2, path=tmp_path / "spool")
        boots.append(store.boot)
        store.batch_insert(transition(first + t) for t in range(3))
        store.close()
    store = QueuedDataStore(10, path=tmp_path / "spool")
    store.insert(transition(6))
    after = -1
    while (parcel := store.parcel(after)) is not None:
        assert parcel.packed is not None
        steps = [int(step["rewards"]) for step in PackedBlock(parcel.packed)]
        sent += [
            (parcel.boot, first, value)
            for first, value in zip(range(parcel.first, parcel.last + 1), steps, strict=True)
        ]
        after = parcel.last
    assert boots[0] != boots[1]
    assert sent == [(boots[0], i, i) for i in range(3)] + [(boots[1], i, i) for i in range(3, 6)] + [(store.boot, 6, 6)]
    store.close()


def test_a_killed_process_leaves_all_that_insert_returned(tmp_path: Path):
    script = "\n".join(
        [
            "import sys, numpy as np",
            "from hilt.replay import QueuedDataStore",
            "store = QueuedDataStore(4, path=sys.argv[1])",
            "for t in range(10**9):",
            "    store.insert({'rewards': t, 'picture': np.full(3000, t % 251, np.uint8)})",
            "    print(t, flush=True)",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "spool")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = -1
    while last < 150:
        last = int(process.stdout.readline())
    process.kill()
    last = max([last, *(int(line) for line in process.stdout.read().splitlines() if line)])
    process.wait(60)
    again = QueuedDataStore(4, path=tmp_path / "spool")
    found = again.get_latest_data(-1)
    assert last + 1 <= len(found) <= last + 2
    assert all(number(t) == i and (t["picture"] == i % 251).all() for i, t in enumerate(found))
    again.close()


@pytest.mark.parametrize("on_disk", [True, False])
def test_transitions_of_several_layouts(tmp_path: Path, on_disk: bool):
    """A reward that is 1 now and 0.5 then, an observation that comes and goes: nothing stops, nothing is changed."""
    store = QueuedDataStore(2, path=tmp_path / "spool" if on_disk else None)
    kinds = [{"rewards": 3}, {"rewards": 0.5}, {"rewards": 3, "extra": np.arange(4)}, {"rewards": np.float32(0.25)}]
    inserted = [kinds[t * 7 % 4] for t in range(40)]
    store.batch_insert(inserted)
    if on_disk:
        store.close()
        store = QueuedDataStore(2, path=tmp_path / "spool")
    back = store.get_latest_data(-1)
    assert len(back) == 40 and all(same(a, b) for a, b in zip(back, inserted, strict=True))
    after = -1
    while (parcel := store.parcel(after)) is not None:
        assert parcel.packed is not None and parcel.first == after + 1
        assert all(
            same(unflatten(a), b) for a, b in zip(PackedBlock(parcel.packed), inserted[parcel.first :], strict=False)
        )
        store.acknowledge(after := parcel.last)
    assert len(store) == 0
    store.close()


class _KilledError(BaseException):
    """Ends a call as a signal would: nothing after it is done."""


def test_killed_at_any_write_a_step_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A person's last step is never the policy's, and its end is never lost: the
    row and which columns it has are one."""
    write, left = Files.write, [0]

    def dies(self: Files, fd: int, data: Any, offset: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise _KilledError
        write(self, fd, data, offset)

    last = {
        "state": np.arange(3, dtype=np.float32),
        "terminated": np.True_,
        "source": np.uint8(1),
        "policy_version": np.int64(7),
    }
    kept = []
    for calls in range(20):
        path = tmp_path / str(calls)
        left[0] = 1000
        store = QueuedDataStore(4, path=path)
        store.insert({**last, "terminated": np.False_})
        store.insert(last)
        left[0] = calls
        with monkeypatch.context() as patch, contextlib.suppress(_KilledError):
            patch.setattr(Files, "write", dies)
            store.insert(last)  # begins a trajectory, since the one before has ended
        copied = shutil.copytree(path, tmp_path / f"{calls}-left")
        store.close()
        again = QueuedDataStore(4, path=copied)
        steps = again.get_latest_data(-1)
        assert len(steps) in (2, 3)
        assert all(step.keys() == last.keys() and (step["source"], step["policy_version"]) == (1, 7) for step in steps)
        assert [bool(step["terminated"]) for step in steps] == [False, True, True][: len(steps)]
        again.close()
        kept.append(len(steps))
    assert {2, 3} == set(kept)


def test_a_program_that_inserts_something_else_may_use_an_empty_spool(tmp_path: Path):
    for kind in ({"rewards": 1}, {"picture": np.zeros(3000, np.uint8)}):
        store = QueuedDataStore(2, path=tmp_path / "spool")
        store.batch_insert([kind] * 3)
        assert all(same(a, kind) for a in store.get_latest_data(-1))
        store.acknowledge(2)
        store.close()
    assert len(list((tmp_path / "spool").iterdir())) == 1


def test_queue_copies_inserted_steps():
    store, picture = QueuedDataStore(10), np.zeros(5000, np.uint8)
    for t in range(3):
        picture[:] = t  # as an environment that uses its buffers again
        store.insert({"rewards": t, "picture": picture})
    assert [int(t["picture"][0]) for t in store.get_latest_data(-1)] == [0, 1, 2]


def test_a_frame_is_packed_once():
    """The observation that equals the next observation before it is not kept again."""
    store = QueuedDataStore(100)
    store.batch_insert(transition(t) for t in range(10))
    parcel = store.parcel(-1)
    assert parcel is not None and parcel.packed is not None
    for name, frames in parcel.packed["frames"].items():
        assert len(frames) == 11, name
    later = store.parcel(4)
    assert later is not None and later.packed is not None and (later.first, later.last) == (5, 9)
    assert [int(step["rewards"]) for step in PackedBlock(later.packed)] == [5, 6, 7, 8, 9]


def test_the_version_that_acts_is_noted():
    store = QueuedDataStore(10)
    store.insert(transition(0))
    store.policy_version = 7
    store.insert(transition(1))
    store.insert(transition(2) | {"policy_version": 3})
    assert [int(t.get("policy_version", -1)) for t in store.get_latest_data(-1)] == [-1, 7, 3]


def test_queue_keeps_other_objects():
    """agentlace's own tests insert plain numbers."""
    store = QueuedDataStore(3, full="drop_oldest")
    store.batch_insert([1, 2, "three", {"infos": None}])
    assert store.get_latest_data(-1) == [2, "three", {"infos": None}]
    parcel = store.parcel(1)
    assert parcel is not None and parcel.items == ["three", {"infos": None}] and parcel.first == 2


def test_queue_copies_other_objects_if_possible():
    store, picture = QueuedDataStore(10), np.zeros(5)
    for t in range(2):
        picture[:] = t
        store.insert({"picture": picture, "note": None})
    store.insert({"lock": threading.Lock()})
    kept = store.get_latest_data(-1)
    assert [float(step["picture"][0]) for step in kept[:2]] == [0, 1] and "lock" in kept[2]


def test_a_temporary_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = QueuedDataStore(1)
    store.insert(transition(0))
    assert list(tmp_path.iterdir()) == []  # nothing is written before it has to be
    store.insert(transition(1))
    assert list(tmp_path.iterdir())
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_transition_that_cannot_be_spilled_is_named_and_kept():
    store = QueuedDataStore(1)
    store.insert(transition(0) | {"infos": {"who": None}})
    with pytest.raises(ConfigError, match="infos/who: dtype object cannot be stored"):
        store.insert(transition(1))
    assert [number(t) for t in store.get_latest_data(-1)] == [0]
    assert store.latest_data_id() == 0
    store.close()


def test_queue_cannot_spill_what_is_no_mapping():
    store = QueuedDataStore(1)
    store.insert(np.zeros(3))
    with pytest.raises(
        SchemaError, match="a transition of type ndarray cannot be kept on disk; expected a mapping of arrays"
    ):
        store.insert(np.zeros(3))
    assert store.latest_data_id() == 0
    store.close()


def test_a_strange_source_is_named_and_leaves_nothing(tmp_path: Path):
    store = QueuedDataStore(10, path=tmp_path / "spool")
    for _ in range(3):
        with pytest.raises(SchemaError, match="source: expected one of 0"):
            store.insert(transition(0) | {"source": np.uint8(9)})
    assert store.insert(transition(0) | {"source": np.uint8(2)}) == 0
    assert len(list((tmp_path / "spool").iterdir())) == 1
    store.close()


# -- arguments
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "options", "said"),
    [
        (0, {}, "capacity: expected a whole number from 1 on, .*; got 0"),
        (1, {"full": "wait"}, "full='wait': expected one of spill, block, drop_oldest"),
        (1, {"durability": "every step"}, "durability='every step' is for transitions on disk; give a path= too"),
        (
            1,
            {"full": "block", "path": "x"},
            "path= is where full='spill' keeps transitions; with full='block' nothing is written",
        ),
    ],
)
def test_arguments_that_cannot_work(capacity: int, options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        QueuedDataStore(capacity, **options)


def test_many_threads():
    store = QueuedDataStore(5)
    received: list[int] = []

    def insert(first: int) -> None:
        for t in range(60):
            store.insert(transition(first + t))

    def take() -> None:
        done = -1
        while done < 179:
            for i, one in store.get_since(done):
                received.append(number(one))
                done = i
            store.acknowledge(done)

    threads = [threading.Thread(target=insert, args=(1000 * i,)) for i in range(3)] + [threading.Thread(target=take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(received) == sorted(1000 * i + t for i in range(3) for t in range(60))
    for i in range(3):
        mine = [n for n in received if n // 1000 == i]
        assert mine == sorted(mine)
    store.close()
