"""The index of episodes: what it knows of each, filters and orders, and a log that grows meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.app.episodes import episode_index
from hilt.app.episodes.episode_index import EpisodeIndex, find_sources
from hilt.app.episodes.episode_lanes import episode_lanes
from hilt.core.errors import UnknownNameError
from hilt.core.trajectory import STARTS, VERSIONS_PER_START
from hilt.formats.convert import convert
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.replay import Log, Schema
from hilt.replay.edits import Edits
from tests.app.episode_samples import BEGAN, facts, make_log, trajectory


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("index") / "log", images=False)


@pytest.fixture(scope="module")
def index(log: Path) -> Iterator[EpisodeIndex]:
    index = opened(log)
    yield index
    index.close()


def opened(*paths: Path) -> EpisodeIndex:
    index = EpisodeIndex(paths)
    assert index.wait_until_read(60)
    return index


def numbers(index: EpisodeIndex, text: str = "", **order: Any) -> list[int]:
    return [row["number"] for row in index.page(EpisodeFilter.parse(text), **order).rows]


def test_index_knows_every_episode_of_a_log(index: EpisodeIndex):
    page = index.page(EpisodeFilter())
    assert (page.matched, page.total, page.unread) == (8, 8, 0)
    row = page.rows[3]
    assert (row["number"], row["length"], row["return"], row["success"]) == (3, 9, 1.0, True)
    assert row["sources"] == {"policy": 6, "human": 3} and row["version"] == 30 and row["end"] == "terminated"
    assert (row["task"], row["instruction"], row["date"]) == ("place", "pick up the red cube", BEGAN + 3 * 3600)
    assert page.rows[2]["end"] == "truncated" and page.rows[5]["tags"] == ["grasp", "slow"]


def test_index_sorts_by_any_column_and_pages(index: EpisodeIndex):
    assert numbers(index, sort="length", descending=True) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert numbers(index, sort="task") == [0, 1, 4, 5, 2, 3, 6, 7]
    assert numbers(index, sort="human", descending=True)[:3] == [0, 3, 6]
    assert numbers(index, sort="return", descending=True, first=2, count=3) == [5, 7, 0]
    with pytest.raises(UnknownNameError, match="column to sort by"):
        numbers(index, sort="colour")


def test_index_knows_the_neighbors_of_an_episode(index: EpisodeIndex):
    key, failures = index.sources[0].key, EpisodeFilter.parse("success=no")
    beside = index.neighbors(key, 4, 0, failures, "length", True)
    assert beside.position == 1 and beside.matched == 4 and beside.previous and beside.next
    assert (beside.previous["number"], beside.next["number"]) == (6, 2)
    left = index.neighbors(key, 5, 0, failures)  # as after an edit that takes it out of the list
    assert left.position == -1 and left.matched == 4 and left.previous is not None and left.next is not None
    assert (left.previous["number"], left.next["number"]) == (4, 6)
    assert index.values("task") == ["pick", "place"] and index.values("tag") == ["grasp", "slow"]


def test_episode_that_follows_is_described_before_the_index_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(episode_index, "QUIET_S", 1e9)  # it reads nothing by itself
    index = EpisodeIndex([make_log(tmp_path / "log", 2, images=False)])
    assert index._opened.wait(60)
    following = index.following(index.sources[0].key, 0)
    assert following is not None and following["number"] == 1
    assert following["end"] is not None and following["date"] is not None
    index.close()


def test_index_knows_what_the_same_sender_recorded_next(tmp_path: Path):
    path = make_log(tmp_path / "log", 1, images=False)
    with Log.open(path, "a") as log:
        for episode, actor in ((5, "b"), (1, "a"), (2, "b"), (3, "a")):  # the times are those of `episode`
            log.add(trajectory(episode, 6, images=False), actor=actor)
        Edits(log).bad(3)
    index = EpisodeIndex([path])
    assert index.wait_until_read(60)
    key = index.sources[0].key
    following = [index.following(key, number) for number in range(5)]
    assert [None if one is None else one["number"] for one in following] == [None, None, 4, None, None]
    with Log.open(path, "r") as log:
        Edits(log).bad(3, False)
    index.sources[0].refresh()
    assert index.wait_until_read(60)
    after = index.following(key, 3)
    assert after is not None and after["number"] == 1 and index.following(key, 1) is None
    index.close()


def test_index_follows_a_log_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(episode_index, "REFRESH_S", 0.0)
    path = make_log(tmp_path / "log", 3, images=False)
    index = opened(path)
    with Log.open(path, "a") as log:
        log.add(trajectory(3, 9, images=False), facts=facts(3))
        log.annotate(0, success=True, bad=True)
        log.delete(1)
        log.relabel(2, "rewards", np.ones(4), first=2)
    assert numbers(index) == [2, 3] and index.wait_until_read(60)
    assert [row["return"] for row in index.page(EpisodeFilter()).rows] == [4.0, 1.0]
    assert numbers(index, "bad=yes success=yes") == [0]
    index.close()


def test_index_shows_the_rows_of_a_wide_trajectory(tmp_path: Path):
    narrow = trajectory(3, 6, images=False)

    def widened(tree: Any) -> Any:
        return {
            k: widened(v) if isinstance(v, dict) else np.concatenate([v, np.zeros_like(v)], 1) for k, v in tree.items()
        }

    with Log.create(tmp_path / "log", Schema.of(narrow, leading=2), durability="never") as log:
        log.add(widened(narrow))
    index = opened(tmp_path / "log")
    rows = index.page(EpisodeFilter()).rows
    assert [(row["lane"], row["length"], row["return"], row["sources"]["policy"]) for row in rows] == [
        (0, 6, 1.0, 4),
        (1, 6, 0.0, 6),
    ]
    assert index.sources[0].columns(0, 1)["observations/state"].sum() == 0
    index.close()


def test_index_of_a_run_has_its_log_demonstrations_and_every_rank(tmp_path: Path):
    for part in ("log", "demos", "rollouts/rank-0", "rollouts/rank-10", "rollouts/rank-2"):
        make_log(tmp_path / "run" / part, 2, images=False)
    names = [name for name, _ in find_sources(tmp_path / "run")]
    assert names == ["log", "demos", "rollouts/rank-0", "rollouts/rank-2", "rollouts/rank-10"]
    index = opened(tmp_path / "run")
    assert len(index) == 10 and numbers(index, "group~rank-1") == [0, 1]
    index.close()


def test_index_reads_a_dataset_of_another_system(log: Path, tmp_path: Path):
    convert(log, tmp_path / "lerobot", to="lerobot", fps=10)
    index = opened(tmp_path / "lerobot")
    rows = index.page(EpisodeFilter.parse("success=yes source=human")).rows
    assert [(row["number"], row["length"], row["return"]) for row in rows] == [(3, 9, 1.0)]
    assert not index.sources[0].editable and index.sources[0].format == "lerobot"
    assert index.sources[0].hz(3) == 10
    index.close()


def test_index_goes_on_beside_what_is_damaged(log: Path, tmp_path: Path):
    convert(log, tmp_path / "lerobot", to="lerobot", fps=10)
    for file in (tmp_path / "lerobot/data").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:100])
    index = opened(log, tmp_path / "absent", tmp_path / "lerobot")
    assert "there is no such file" in index.problems[str(tmp_path / "absent")]
    page = index.page(EpisodeFilter.parse("problem~restore"))
    assert page.matched == 8 and page.total == 16 and numbers(index, "group=log success=no") == [0, 2, 4, 6]
    index.close()


def test_index_shows_what_people_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(episode_index, "REFRESH_S", 0.0)
    path = make_log(tmp_path / "log", 5, images=False)
    index = opened(path)
    edits = Edits(Log.open(path, "r"), author="ann")
    edits.trim(4, first=2, last=6)
    edits.label(0, success=True)
    edits.tag(0, "good")
    edits.mark(4, 3, "grasp")
    edits.bad(1)
    edits.delete(2)
    assert numbers(index) == [0, 3, 4] and numbers(index, "tag=good success=true") == [0]
    assert index.wait_until_read(60)
    assert numbers(index, "bad=true") == [1] and numbers(index, "deleted=true") == [2]
    source = index.sources[0]
    assert index.row(source.key, 4)["length"] == 5 and index.row(source.key, 1)["length"] == 7
    lanes = episode_lanes(source, 4)
    assert lanes["steps"] == 5 and lanes["marks"] == [[1, "grasp"]]
    states = next(lane for lane in lanes["lanes"] if lane["name"] == "observations/state")
    assert states["values"][0] == [6.0, 7.0, 8.0, 9.0, 10.0]
    edits.log.close()
    index.close()


def test_index_knows_the_oldest_and_newest_version_and_that_those_of_a_run_count_from_its_starts(tmp_path: Path):
    steps = trajectory(0, 6, images=False)
    steps["policy_version"][:, 0] = [-1, 2_000_003, 2_000_003, 2_000_017, -1, -1]
    (tmp_path / "run").mkdir()
    with Log.create(tmp_path / "run/log", Schema.of(steps, leading=2), durability="never") as log:
        log.add(steps)
        log.add({**steps, "policy_version": np.full((6, 1), -1)})
    index = EpisodeIndex([tmp_path / "run/log"])
    assert index.wait_until_opened(60) and index.wait_until_read(60)

    def known(number: int) -> tuple[int | None, ...]:
        row = index.row(index.sources[0].key, number)
        return row["first_version"], row["version"], row["versions_per_start"]

    assert known(0) == (2_000_003, 2_000_017, 0) and known(1) == (None, None, 0)
    (tmp_path / "run" / STARTS).write_text("{}")
    assert known(0) == (2_000_003, 2_000_017, VERSIONS_PER_START)
    for text, found in (
        ("version=v17", [0]),
        ("version=2,000,017", [0]),
        ("version>=2000000", [0]),
        ("version<9", [1]),
    ):
        assert [row["number"] for row in index.page(EpisodeFilter.parse(text)).rows] == found, text
    index.close()
