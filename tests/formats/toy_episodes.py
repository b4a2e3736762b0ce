"""Small episodes for tests of readers and writers, and writers that are stopped."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.files import Files
from hilt.core.tree import equal, flatten
from hilt.formats.episodes import Episode, Writer, transitions
from tests.effort import some_of


def made(
    length: int, seed: int = 0, *, source: int | Sequence[int] = 2, ended: str = "terminated", **more: Any
) -> Episode:
    """An episode of random numbers, with a camera; `more` are further columns."""
    rng = np.random.default_rng(seed)
    seen = {
        "state": rng.normal(size=(length + 1, 3)).astype(np.float32),
        "front": rng.integers(0, 256, (length + 1, 20, 24, 3), np.uint8),
    }
    columns = {
        **transitions(seen),
        "actions": rng.normal(size=(length, 2)).astype(np.float32),
        "rewards": rng.normal(size=length).astype(np.float32),
        "terminated": np.zeros(length, bool),
        "truncated": np.zeros(length, bool),
        "source": np.broadcast_to(np.asarray(source, np.uint8), length).copy(),
        "policy_version": rng.integers(-1, 9, length),
        **more,
    }
    if ended:
        columns[ended][-1] = True
    return Episode(columns, {"success": bool(seed % 2), "language_instruction": f"put {seed} down"})


def assert_same(got: Episode, wanted: Episode) -> None:
    """The same columns, types, bytes and facts."""
    a, b = flatten(got.columns), flatten(wanted.columns)
    assert set(a) == set(b)
    for path in a:
        assert equal(np.ascontiguousarray(a[path]), np.ascontiguousarray(b[path])), path
    assert got.facts == wanted.facts


def assert_all_same(got: Sequence[Episode], wanted: Sequence[Episode]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert_same(a, b)


def write(writer: Writer, episodes: Sequence[Episode]) -> None:
    """Everything from where the writer goes on."""
    try:
        for number in range(writer.next, len(episodes)):
            writer.add(number, episodes[number])
        writer.finish()
    finally:
        writer.close()


class Stopped(BaseException):
    pass


def write_stopped_at_every_call(
    make: Callable[[Path], Writer],
    episodes: Sequence[Episode],
    check: Callable[[Path], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Stops a writer before its first change to the disk, another before its second,
    and so on; each is then completed, and checked.

    `make test` stops it before some of them only. Returns how many changes there are.
    """
    folder.mkdir(exist_ok=True)  # else the first writer has it to make
    calls: list[str] = []
    stop = -1

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            if len(calls) == stop + 1:
                raise Stopped
            return real(*arguments, **named)

        return call

    for name in ("create", "write", "truncate", "make_folder", "rename", "remove", "sync", "sync_folder"):
        monkeypatch.setattr(Files, name, counted(name, getattr(Files, name)))
    write(make(folder / "not stopped"), episodes)
    check(folder / "not stopped")
    whole = list(calls)
    for stop in some_of(whole, 10):
        calls.clear()
        place = folder / str(stop)
        with pytest.raises(Stopped):
            write(make(place), episodes)
        write(make(place), episodes)
        check(place)
        shutil.rmtree(place)
    return len(whole)


def write_killed(
    make: Callable[[Path], Writer], episodes: Sequence[Episode], check: Callable[[Path], None], folder: Path, kills: int
) -> None:
    """Kills `kills` writing processes from outside at random moments, completes what each
    left, and checks it.

    A kill that came too late, as on a machine with much to do, does not count: the next
    one comes earlier.
    """
    chance, hit, duration = random.Random(0), 0, 0.0
    for attempt in range(10 * kills):
        place, began = folder / f"killed-{attempt}", time.monotonic()
        child = os.fork()
        if not child:
            try:
                write(make(place), episodes)
            finally:
                os._exit(0)
        if attempt:
            time.sleep(chance.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        hit += killed
        # the first one is not killed, to see how long it takes
        duration = duration * (1.0 if killed else 0.7) if attempt else time.monotonic() - began
        if attempt:
            write(make(place), episodes)
        check(place)
        shutil.rmtree(place)
        if hit == kills:
            break
    assert hit == kills, f"{hit} of {kills} were killed at work"
