"""The learner's power is cut: steps that were acknowledged as process-safe only may
be gone from its disk, and come again.

The disk keeps, drops, tears and reorders what was not synced (`tests/replay/power.py`). The actor lives on: whatever it
inserted is in the log exactly once in the end, because a step stays in its spool until it is power-safe.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hilt.core.files import DISK
from hilt.replay import Log, QueuedDataStore
from hilt.replay.transfer.delivered import DeliveredSequence
from hilt.wire import TrainerClient, TrainerServer, make_trainer_config
from hilt.wire.ingest import Stream
from tests.effort import rounds
from tests.replay.power import Disk, Event, Recorder
from tests.wire.journal import wait_for
from tests.wire.processes import DEADLINE_S, free_port
from tests.wire.proxy import Proxy
from tests.wire.steps import STORES, Arrived, make_buffer, transition, wanted_in

CUTS = int(os.environ.get("HILT_POWER_CUTS", rounds(3, 40)))
SEED = int(os.environ.get("HILT_FAULT_SEED", "1"))


class Adopting(Recorder):
    """A recorder that begins with what a power cut left."""

    def __init__(self, root: Path, sync_seconds: float):
        super().__init__(root, sync_seconds)
        for path in sorted(root.rglob("*")):
            number = self._number[path] = self._take_number()
            self.events.append(Event("link", path, file=-number if path.is_dir() else number))
            if path.is_file():
                self.events.append(Event("write", file=number, data=path.read_bytes()))
                self.events.append(Event("sync", file=number, began=len(self.events)))
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            self.events.append(Event("sync folder", folder))


class Machine:
    """A learner on a disk that forgets."""

    def __init__(self, root: Path, port: int, broadcast: int, durability: str):
        self._files = Adopting(root, 0.01)
        self.buffers = {store: make_buffer(root / store, durability=durability, files=self._files) for store in STORES}
        self._root = root
        self.server = TrainerServer(make_trainer_config(port, broadcast))
        for store, buffer in self.buffers.items():
            self.server.register_data_store(store, buffer)
        self.server.start(threaded=True)

    def cut_power(self, proxy: Proxy, rng: np.random.Generator, target: Path) -> None:
        """First nobody hears of it any more, then what it did up to then is made into a disk."""
        proxy.refuse()
        disk = Disk(self._root)
        disk.play(list(self._files.events))
        disk.cut(rng, target)
        self.stop()

    def stop(self) -> None:
        self.server.stop()
        for buffer in self.buffers.values():
            buffer.close()


def test_steps_beyond_a_gap_become_power_safe_when_it_closes():
    stream = Stream("actor-1", "boot", DeliveredSequence(9, [12, 13]))
    stream.note(10, 1)
    stream.note(11, 2)
    assert stream.process_safe == 13
    assert stream.synced(1) and stream.power_safe == 10
    assert stream.synced(2) and stream.power_safe == 13
    assert not stream.awaits_sync


def test_the_number_of_a_sender_is_power_safe_before_any_of_its_steps(tmp_path: Path):
    """Else the steps might survive without it, and be taken for those of the next sender that gets this number."""
    files = Recorder(tmp_path)
    buffer = make_buffer(tmp_path / "log", durability="never", files=files)
    written = len(files.events)
    buffer.insert(transition(1, 0, 0), "actor-1", 0, boot="boot", store="store")
    events = files.events[written:]
    fact = next(i for i, event in enumerate(events) if event.what == "write" and b"actor-1" in event.data)
    row = next(i for i, event in enumerate(events) if event.what == "write" and i > fact)
    assert any(event.what == "sync" and event.file == events[fact].file for event in events[fact:row])
    buffer.close()


Which = tuple[int, int]
"""A step: the life of the actor, and n."""


class Sender:
    """An actor whose spools are in memory, or on a disk on which it is started again."""

    def __init__(self, ports: list[int], spool: Path | None):
        self._ports, self._spool = ports, spool
        self.inserted: dict[str, set[Which]] = {store: set() for store in STORES}
        self.power_safe: dict[str, set[Which]] = {store: set() for store in STORES}
        self.life = -1
        self.start()

    def start(self) -> None:
        self.life, self._n = self.life + 1, 0
        self.spools = {
            store: QueuedDataStore(100, path=self._spool / store if self._spool else None) for store in STORES
        }
        self._numbers: dict[str, dict[int, Which]] = {store: {} for store in STORES}
        config = make_trainer_config(*self._ports)
        self.client = TrainerClient("actor-1", "127.0.0.1", config, data_stores=self.spools, wait_for_server=True)

    def insert(self, count: int) -> None:
        for _ in range(count):
            for store, spool in self.spools.items():
                if wanted_in(store, self._n):
                    which = (self.life, self._n)
                    self._numbers[store][spool.insert(transition(1, self.life, self._n))] = which
                    self.inserted[store].add(which)
            self._n += 1
            time.sleep(0.001)

    def look(self) -> None:
        for store, spool in self.spools.items():
            up_to = spool.stats()["acknowledged"]
            self.power_safe[store].update(which for number, which in self._numbers[store].items() if number <= up_to)

    def flush(self) -> None:
        assert self.client.update(timeout_ms=DEADLINE_S * 1000), "the learner does not take steps again"

    def stop(self) -> None:
        self.client.stop()
        self.look()
        for spool in self.spools.values():
            spool.close()


@pytest.mark.parametrize("spool", ["memory", "disk"])
def test_the_power_of_the_learner_is_cut(memory_path: Path, counted: Callable[[str], None], spool: str):
    rng, np_rng = random.Random(SEED), np.random.default_rng(SEED)
    port, broadcast = free_port(), free_port()
    folder = memory_path / "disk-0"
    folder.mkdir()
    forgotten = 0
    machine = Machine(folder, port, broadcast, "at most 20 ms")
    with Proxy(port, broadcast) as proxy:
        actor = Sender(proxy.ports, memory_path / "spool" if spool == "disk" else None)
        for cut in range(CUTS):
            actor.insert(30)
            if rng.random() < 0.7:
                actor.flush()
            actor.insert(rng.randrange(1, 60))
            actor.look()
            folder = memory_path / f"disk-{cut + 1}"
            machine.cut_power(proxy, np_rng, folder)
            for store in STORES:
                kept = steps_in(folder / store)
                forgotten += len(actor.inserted[store] - set(kept))
                lost = sorted(actor.power_safe[store] - set(kept))
                assert not lost, f"{store}: power-safe steps are gone after cut {cut}: {lost[:5]}"
                assert max(kept.values(), default=1) == 1, f"{store}: steps are there twice after cut {cut}"
            if spool == "disk" and rng.random() < 0.5:
                actor.stop()
                machine = Machine(folder, port, broadcast, "at most 20 ms")
                proxy.heal()
                actor.start()
            else:
                machine = Machine(folder, port, broadcast, "at most 20 ms")
                proxy.heal()
        actor.flush()
        wait_for(
            lambda: not any(len(queue) for queue in actor.spools.values()), "everything to be power-safe", DEADLINE_S
        )
        actor.stop()
    machine.stop()
    for store in STORES:
        found = steps_in(folder / store)
        missing = sorted(actor.inserted[store] ^ set(found))
        assert not missing, f"{store}: {len(missing)} steps are lost or made up: {missing[:5]}"
        assert max(found.values()) == 1, (
            f"{store}: twice: {sorted(which for which, times in found.items() if times > 1)[:5]}"
        )
    steps, lives = sum(len(inserted) for inserted in actor.inserted.values()), actor.life + 1
    counted(
        f"{CUTS} power cuts, {lives} lives of the actor, {steps} steps exactly once; the disk "
        f"forgot a step {forgotten} times"
    )


def steps_in(path: Path) -> Counter[Which]:
    """The steps that a log shows, every field checked."""
    arrived = Arrived(path.name)
    with Log.open(path, "r", files=DISK) as log:
        arrived.look(log)
    return arrived.numbers()
