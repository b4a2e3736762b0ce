"""One grammar of filters: what the app shows and what ``--where`` chooses are the same episodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.trajectory import STARTS
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.formats.listing.log_episodes import episodes_where
from hilt.replay import Log, Schema
from hilt.replay.edits import Edits
from tests.app.episode_samples import BEGAN, make_log, trajectory


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_log(tmp_path_factory.mktemp("filter") / "log", images=False)
    with Log.open(path, "r") as opened:
        edits = Edits(opened, author="ann")
        edits.mark([2, 3], 1, "grasp")
        edits.bad(6)
        edits.delete(7)
    return path


@pytest.fixture(scope="module")
def index(log: Path) -> Iterator[EpisodeIndex]:
    index = EpisodeIndex([log])
    assert index.wait_until_read(60)
    yield index
    index.close()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("success=no", [0, 2, 4]),
        ("success!=true", [0, 2, 4]),
        ("success=yes source=human", [3]),
        ("source!=human task=pick", [1, 4, 5]),
        ('instruction~"RED cube" steps>=8', [2, 3]),
        ("'instruction~RED cube' steps >= 8", [2, 3]),
        ("tag=slow", [5]),
        ("tag!=slow success=yes", [1, 3]),
        ("mark=grasp", [2, 3]),
        ("mark!=grasp", [0, 1, 4, 5]),
        ("level>=2 return>0", [3]),
        ("level=1", [1, 5]),
        ("level!=1 trajectory<3", [0, 2]),
        ("version<=20 end=truncated", [0, 2]),
        ("human>0", [0, 3]),
        ("bad=yes", [6]),
        ("deleted=true", [7]),
    ],
)
def test_filter_chooses_the_same_episodes_in_the_app_and_behind_where(
    log: Path, index: EpisodeIndex, text: str, found: list[int]
):
    assert [row["number"] for row in index.page(EpisodeFilter.parse(text)).rows] == found
    with Log.open(log, "r") as opened:
        assert episodes_where(opened, [text]) == found
        assert episodes_where(opened, [str(EpisodeFilter.parse(text))]) == found  # as the app writes it
    assert str(EpisodeFilter.parse(str(EpisodeFilter.parse(text)))) == str(EpisodeFilter.parse(text))


def test_filter_by_day_and_moment(log: Path):
    moment = time.strftime("%Y-%m-%dT%H:%M", time.localtime(BEGAN + 3 * 3600))
    with Log.open(log, "r") as opened:
        assert episodes_where(opened, [f"date>={moment}"]) == [3, 4, 5]
        assert episodes_where(opened, [f"date<{moment}"]) == [0, 1, 2]
        days = {time.strftime("%Y-%m-%d", time.localtime(BEGAN + 3600 * episode)) for episode in range(6)}
        assert sorted(n for day in days for n in episodes_where(opened, [f"date={day}"])) == list(range(6))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("version=v1,250", [1, 3]),
        ("version=1250", [1, 3]),
        ("version=1,250", [1, 3]),
        ("version=v1.250", [1, 3]),  # as a browser in German shows it
        ("version=v1,200-1,250", [1]),
        ("version!=v1,200-1,250 version>=0", [0, 2, 3]),
        ("version>=v1,000", [0, 1, 3]),
        ("version=2,001,250", [3]),  # as it is recorded, with its start
        ("version>=2000000", [2, 3]),
        ("version=-1", [4]),
    ],
)
def test_filter_takes_versions_as_the_list_shows_them(tmp_path: Path, text: str, found: list[int]):
    versions = [
        (1_001_249, 1_001_249),
        (1_001_200, 1_001_250),
        (2_000_007, 2_000_007),
        (2_001_250, 2_001_250),
        (-1, -1),
    ]
    steps = trajectory(0, 2, images=False)
    (tmp_path / STARTS).write_text("{}")
    with Log.create(tmp_path / "log", Schema.of(steps, leading=2), durability="never") as log:
        for pair in versions:
            log.add({**steps, "policy_version": np.array(pair)[:, None]})
        assert episodes_where(log, [text]) == found


def test_filter_of_versions_outside_of_a_run_compares_what_is_recorded(tmp_path: Path):
    steps = trajectory(0, 2, images=False)
    with Log.create(tmp_path / "log", Schema.of(steps, leading=2), durability="never") as log:
        log.add({**steps, "policy_version": np.full((2, 1), 1_001_250)})
        assert episodes_where(log, ["version=v1,250"]) == [] and episodes_where(log, ["version=v1,001,250"]) == [0]
        assert episodes_where(log, ["version>=v999,999"]) == [0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("success", "filter 'success': expected a name, one of = != ~ < <= > >= and a value"),
        ("instruction~red cube", "filter 'cube': .* a value with spaces needs quotes"),
        ("success=maybe", "filter success=maybe: expected one of yes, true, no, false, unknown"),
        ("steps>long", "filter steps>long: expected a comparison with a number"),
        ("date>yesterday", "such as 2026-11-30"),
        ("task>a", "filter task>a: task has no order"),
        ("success~y", "filter success~y: success is not text"),
        ("source=nobody", "filter source=nobody: no source named 'nobody'. Known: demo, human, policy, random"),
        ("task='pick", "a quote is not closed"),
        ("version=newest", "filter version=newest: expected a version of the policy, as the list shows it"),
        ("version=1,25", "filter version=1,25: expected a version"),
        ("version>v1,200-1,250", "an order needs one version"),
    ],
)
def test_filter_that_is_none_is_an_error_with_the_word_and_the_cure(text: str, error: str):
    with pytest.raises((ConfigError, UnknownNameError), match=error):
        EpisodeFilter.parse(text)


def test_filter_by_a_name_that_no_episode_has_lists_the_facts_that_are_known(log: Path, index: EpisodeIndex):
    error = r"filter levle>=2: no property or fact of an episode named 'levle'; did you mean 'level'\? Known: .*level"
    with pytest.raises(UnknownNameError, match=error):
        index.page(EpisodeFilter.parse("levle>=2"))
    with Log.open(log, "r") as opened:
        with pytest.raises(UnknownNameError, match=error):
            episodes_where(opened, ["levle>=2"])
        with pytest.raises(ConfigError, match="filter group=log: this is one log"):
            episodes_where(opened, ["group=log"])
        with pytest.raises(ConfigError, match="an order needs a number"):
            episodes_where(opened, ["level>high"])
