"""Checkpoints: whole or absent, whenever the process is killed; a damaged one is passed over and said."""

from __future__ import annotations

import multiprocessing
import shutil
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, CorruptError, StorageError
from hilt.core.files import Files
from hilt.replay.tensors import map_tree
from hilt.runs.checkpoint import Saver, latest, load, numbers, save
from tests.replay import writers
from tests.replay.writers import DEADLINE_S, Announcing, Writer


def weights(update: int) -> dict[str, Any]:
    return {"networks": {"actor": {"w": torch.full((50,), float(update))}}, "updates": update, "text": "a"}


def write(run: Path, *updates: int, keep: int = 10, **options: Any) -> None:
    for update in updates:
        save(run, update, weights(update), {"elapsed": update / 2, "experience": {"seen": [update]}}, keep, **options)


def check(run: Path, update: int) -> None:
    found = load(run, update)
    assert (found.agent["networks"]["actor"]["w"] == update).all() and found.agent["updates"] == found.update == update
    assert found.state == {"elapsed": update / 2, "experience": {"seen": [update]}}


def test_checkpoints_are_saved_loaded_and_limited(memory_path: Path):
    assert latest(memory_path) is None and numbers(memory_path) == []
    write(memory_path, 0, 5, 10, 100, keep=2)
    assert numbers(memory_path) == [0, 10, 100]  # the one from before learning stays
    check(memory_path, 10)
    found = latest(memory_path)
    assert found is not None and found.update == 100
    save(memory_path, 100, weights(99), {"elapsed": 70}, keep=2)  # is there already: what else is known is told anew
    assert (load(memory_path, 100).state, load(memory_path, 100).agent["updates"]) == ({"elapsed": 70}, 100)
    write(memory_path, 100)
    check(memory_path, 100)
    with pytest.raises(StorageError, match=r"there is no checkpoint 5. There are: 0, 10, 100"):
        load(memory_path, 5)
    with pytest.raises(ConfigError, match="checkpoint_keep=0"):
        write(memory_path, 101, keep=0)


@pytest.mark.parametrize("file", ["agent.pt", "state.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damaged_checkpoint_is_skipped_with_a_warning(memory_path: Path, file: str, how: str):
    write(memory_path, 1, 2)
    path = memory_path / "checkpoints" / "2" / file
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "gone":
        path.unlink()
    said: list[str] = []
    found = latest(memory_path, said.append)
    assert found is not None and found.update == 1
    assert len(said) == 1 and said[0].startswith("checkpoint 2 is skipped") and file in said[0]
    write(memory_path, 2)  # made again
    check(memory_path, 2)
    shutil.rmtree(memory_path / "checkpoints" / "1")
    (memory_path / "checkpoints" / "2" / "agent.pt").write_bytes(b"")
    with pytest.raises(CorruptError, match="none of its 1 checkpoints is whole"):
        latest(memory_path, said.append)


def test_a_thread_writes_a_copy(memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = multiprocessing.Event()

    class Slow(Files):
        def sync(self, fd: int) -> None:
            assert held.wait(DEADLINE_S)
            super().sync(fd)

    saver, given = Saver(memory_path, 3, Slow()), weights(7)
    assert saver.save(7, given, {"elapsed": 3.5, "experience": {"seen": [7]}})
    given["networks"]["actor"]["w"].fill_(-1)
    assert saver.busy and not saver.save(8, given, {})  # nobody waits for it
    with pytest.raises(StorageError, match=r"was not written within 0.01 s"):
        saver.wait(0.01)
    held.set()
    saver.wait(DEADLINE_S)
    check(memory_path, 7)

    class Full(Files):
        why: Exception = StorageError("no room")

        def create(self, path: Path) -> int:
            raise self.why

    saver = Saver(memory_path, 3, Full())
    for Full.why in (StorageError("no room"), MemoryError("nor there")):
        saver.save(9, given, {})
        with pytest.raises(type(Full.why), match=str(Full.why)):
            saver.wait(DEADLINE_S)
    assert numbers(memory_path) == [7] and not list((memory_path / "checkpoints").glob(".*"))


def save_until_killed(pipe: Connection, run: Path, stop_at: int) -> None:
    try:
        files = Announcing(pipe, stop_at)
        files.armed = True
        write(run, 3, keep=2, files=files)
        files.armed = False
        pipe.send(("done",))
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise


def test_killed_before_every_system_call(
    memory_path: Path, counted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    # all is imported here: a child starts in milliseconds
    monkeypatch.setattr(writers, "_context", multiprocessing.get_context("fork"))
    places: Counter[str] = Counter()
    newest: Counter[int] = Counter()
    stop_at, done = 0, False
    while not done:
        stop_at += 1
        run = memory_path / str(stop_at)
        write(run, 1, 2)
        writer = Writer(save_until_killed, run, stop_at)
        writer.listen(DEADLINE_S, "call", "done", "failed")
        writer.kill()
        assert not writer.failures(), writer.failures()
        done = writer.reports[-1][0] == "done"
        if not done:
            places[writer.reports[-1][1].split()[0]] += 1
        said: list[str] = []
        found = latest(run, said.append)
        assert found is not None and not said  # what has its name is whole
        newest[found.update] += 1
        for update in numbers(run):
            check(run, update)
        write(run, 4, keep=2)  # goes on, and nothing is left of the one that was not finished
        assert numbers(run)[-1] == 4 and not list((run / "checkpoints").glob(".*"))
        shutil.rmtree(run)
    assert newest[2] and newest[3] and places["write"] and places["rename"] and places["remove"]
    counted(f"{sum(places.values())} kills: {dict(places)}; newest whole checkpoint: {dict(newest)}")


def test_copies_share_nothing():
    given = {"a": torch.zeros(2), "b": {"c": 1, "d": np.ones(2)}}
    from hilt.runs.checkpoint import _copied

    made = map_tree(_copied, given)
    given["a"].fill_(1)
    given["b"]["d"][:] = 0  # type: ignore[index]
    assert (made["a"] == 0).all() and (made["b"]["d"] == 1).all() and made["b"]["c"] == 1
