"""Drawing by search and by table lead to the same steps, and a table is never used for a log that has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.replay import Log, Schema
from hilt.replay.key_ranges import Runs
from hilt.replay.sampling.uniform import UniformDraw
from tests.effort import rounds


def make_log(path: Path, lengths: list[int], **settings: Any) -> Log:
    log = Log.create(path, Schema.of({"number": np.int64(0)}), durability="never", **settings)
    for trajectory, length in enumerate(lengths):
        add(log, trajectory, length)
    return log


def add(log: Log, trajectory: int, length: int) -> None:
    log.add(
        {
            "number": (1000 * trajectory + np.arange(length))[:, None],
            "truncated": (np.arange(length) == length - 1)[:, None],
        }
    )


def numbers(keys: np.ndarray) -> list[int]:
    return (1000 * (keys >> 32) + (keys & 0xFFFFFFFF)).tolist()


def drawn_until_a_table(drawing: UniformDraw, log: Log, runs: Runs, places: np.ndarray) -> list[list[int]]:
    """What each of several draws gives; the later ones use the table."""
    found = []
    for _ in range(4):
        with log.reading() as steps:
            keys = drawing.draw(runs, places, steps)
            found.append(steps.gather(keys, ["number"])["number"].tolist())
            assert found[-1] == numbers(keys)
    assert drawing._table is not None
    return found


@settings(max_examples=rounds(20, 200), deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 4), st.integers(1, 90)), min_size=1, max_size=40), last=st.integers(0, 5)
)
def test_search_and_table_agree_for_every_place(
    lengths: list[int], last: int, tmp_path_factory: pytest.TempPathFactory
):
    with make_log(tmp_path_factory.mktemp("log") / "log", lengths, segment_bytes=1 << 12) as log:
        runs = log.last(last).runs() if last else log.all().runs()
        places = np.random.default_rng(0).permutation(len(runs))
        first, *others = drawn_until_a_table(UniformDraw(), log, runs, places)
        assert all(found == first for found in others) and len(set(first)) == len(runs)


def test_short_runs_in_a_crowd_are_found_too(tmp_path: Path):
    with make_log(tmp_path / "log", [900, *[1] * 90]) as log:
        runs = log.all().runs()
        first, *others = drawn_until_a_table(UniformDraw(), log, runs, np.arange(len(runs)))
        assert all(found == first for found in others)


def test_a_table_is_given_up_when_the_log_changes(tmp_path: Path):
    with make_log(tmp_path / "log", [50] * 8, capacity_steps=400, segment_bytes=1 << 12) as log:
        view = log.all()
        sampler = view.sampler(seed=0)
        for trajectory in range(8, 40):
            for _ in range(4):
                batch = sampler.sample(64)
                assert batch["number"].tolist() == numbers(batch.steps)
                assert np.all(view.runs().contains(batch.steps))
            assert sampler._drawing._table is not None
            add(log, trajectory, 50)


def test_a_running_episode_never_gets_a_table_too_early(tmp_path: Path):
    with make_log(tmp_path / "log", [20] * 3) as log:
        sampler = log.all().sampler(seed=0)
        with log.episode() as episode:
            for offset in range(50):
                episode.append({"number": 3000 + offset})
                batch = sampler.sample(32)
                assert sampler._drawing._table is None
                assert batch["number"].tolist() == numbers(batch.steps)


def test_addresses_follow_a_segment_that_was_compressed(tmp_path: Path):
    step = {"image": np.zeros((32, 32, 3), np.uint8), "number": np.int64(0)}
    with Log.create(tmp_path / "log", Schema.of(step), segment_bytes=1 << 18, compression={"image": "zlib"}) as log:
        for trajectory in range(40):
            values = 1000 * trajectory + np.arange(10)
            images = np.broadcast_to((values % 251).astype(np.uint8)[:, None, None, None], (10, 32, 32, 3))
            log.add({"number": values[:, None], "image": images[:, None]})
        sampler = log.all().sampler(seed=0)
        for _ in range(4):
            sampler.sample(8)
        log.compress()
        for _ in range(6):
            batch = sampler.sample(64)
            assert batch["number"].tolist() == numbers(batch.steps)
            assert (batch["image"] == (batch["number"] % 251).astype(np.uint8)[:, None, None, None]).all()
