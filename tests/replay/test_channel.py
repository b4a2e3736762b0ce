"""A channel hands over in order, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hilt.core.errors import ClosedError, ConfigError, DeadlineError
from hilt.replay.transfer import channel as module
from hilt.replay.transfer.channel import Channel


def test_items_come_out_in_the_order_they_went_in() -> None:
    channel: Channel[int] = Channel()
    for i in range(5):
        channel.put(i)
    assert (channel.qsize(), len(channel)) == (5, 5)
    assert [channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert channel.qsize() == 0


def test_a_wait_for_an_item_ends() -> None:
    with pytest.raises(
        DeadlineError,
        match=r"channel 'rollouts': waited 0\.05 s for an item, and 0 items .* Check that the other side is alive",
    ):
        Channel(name="rollouts").get(timeout=0.05)


def test_a_wait_for_room_ends() -> None:
    channel: Channel[int] = Channel(maxsize=1, name="rollouts")
    channel.put(1)
    with pytest.raises(DeadlineError, match=r"channel 'rollouts': waited 0\.05 s for room for an item, and 1 items"):
        channel.put(2, timeout=0.05)
    with pytest.raises(DeadlineError, match="waited 0 s"):
        channel.put(2, timeout=0)
    assert channel.get(timeout=0) == 1


@pytest.mark.parametrize("deed", ("put", "get"))
def test_without_a_timeout_there_is_a_deadline_all_the_same(deed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.DEADLINE_S == 60.0
    monkeypatch.setattr(module, "DEADLINE_S", 0.02)
    channel: Channel[int] = Channel(maxsize=1)
    if deed == "put":
        channel.put(0)
    with pytest.raises(DeadlineError, match=r"waited 0\.02 s"):
        channel.put(1) if deed == "put" else channel.get()


def test_a_waiter_is_woken_by_the_other_side() -> None:
    channel: Channel[str] = Channel(maxsize=1)
    with ThreadPoolExecutor(2) as pool:
        taken = pool.submit(channel.get, timeout=60)
        channel.put("a", timeout=60)
        assert taken.result(timeout=60) == "a"
        channel.put("b")
        waiting = pool.submit(channel.put, "c", timeout=60)
        assert channel.get(timeout=60) == "b"
        waiting.result(timeout=60)
        assert channel.get(timeout=60) == "c"


def test_closing_lets_out_what_is_in_and_nothing_more_in() -> None:
    channel: Channel[int] = Channel(name="rollouts")
    channel.put(1)
    channel.close()
    assert channel.closed
    with pytest.raises(ClosedError, match="channel 'rollouts' is closed: nothing can be put into it"):
        channel.put(2)
    assert channel.get() == 1
    with pytest.raises(ClosedError, match="all that was put into it has been taken"):
        channel.get()
    channel.close()


@pytest.mark.parametrize("deed", ("put", "get"))
def test_closing_wakes_everyone_who_waits(deed: str) -> None:
    channel: Channel[int] = Channel(maxsize=1)
    if deed == "put":
        channel.put(0)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(channel.put, 1, timeout=60) if deed == "put" else pool.submit(channel.get, timeout=60)
            for _ in range(3)
        ]
        time.sleep(0.05)
        channel.close()
        for future in waiting:
            with pytest.raises(ClosedError):
                future.result(timeout=60)


@pytest.mark.parametrize("timeout", (-1, float("nan"), float("inf")))
def test_an_endless_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="A wait always has an end"):
        Channel().get(timeout=timeout)


@pytest.mark.parametrize("maxsize", (-1, 1.5, None, True))
def test_a_strange_size_is_refused(maxsize: Any) -> None:
    with pytest.raises(ConfigError, match="pass how many items may wait"):
        Channel(maxsize=maxsize)


def test_many_threads_lose_and_double_nothing() -> None:
    channel: Channel[tuple[int, int]] = Channel(maxsize=3)
    taken: list[list[tuple[int, int]]] = [[] for _ in range(4)]

    def produce(who: int) -> None:
        for i in range(500):
            channel.put((who, i), timeout=60)

    def consume(into: list[tuple[int, int]]) -> None:
        try:
            while True:
                into.append(channel.get(timeout=60))
        except ClosedError:
            return

    consumers = [threading.Thread(target=consume, args=(into,), daemon=True) for into in taken]
    producers = [threading.Thread(target=produce, args=(who,), daemon=True) for who in range(4)]
    for thread in consumers + producers:
        thread.start()
    for thread in producers:
        thread.join(60)
    channel.close()
    for thread in consumers:
        thread.join(60)
    assert sorted(item for into in taken for item in into) == [(who, i) for who in range(4) for i in range(500)]
    for into in taken:  # each consumer sees each producer's items in order
        for who in range(4):
            numbers = [i for producer, i in into if producer == who]
            assert numbers == sorted(numbers)
