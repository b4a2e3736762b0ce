"""Edits from the pages of episodes: what each does to the log, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hilt.app.episodes.episode_edits import ACTIONS, cut_away, edit_episode, history_of, shown_edit
from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.formats.convert import convert
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log


@pytest.fixture
def index(tmp_path: Path) -> Iterator[EpisodeIndex]:
    index = EpisodeIndex([make_log(tmp_path / "log", 4)])
    assert index.wait_until_opened(60)
    yield index
    index.close()


def edited(index: EpisodeIndex, number: int, action: str, **given: Any) -> dict[str, Any]:
    [source] = index.sources
    edit_episode(source, number, {"action": action, **given})
    return index.row(source.key, number)


def test_every_action_shows_in_the_row_and_in_the_log(index: EpisodeIndex):
    [source] = index.sources
    assert edited(index, 1, "failure", author="ann")["success"] is False
    assert edited(index, 1, "success")["success"] is True and edited(index, 1, "unknown")["success"] is None
    assert edited(index, 0, "tag", name="slow")["tags"] == ["slow"]
    assert edited(index, 0, "untag", name="slow")["tags"] == []
    assert edited(index, 0, "instruction", text="lift it")["instruction"] == "lift it"
    assert edited(index, 2, "bad")["bad"] and not edited(index, 2, "good")["bad"]
    before = edited(index, 3, "mark", step=2, name="grasp")["length"]
    assert edited(index, 3, "trim", first=2, last=5)["length"] == 4 and source.first_step(3) == 2
    assert edited(index, 3, "mark", step=1, name="lift")["length"] == 4  # the fourth step that was recorded
    edited(index, 3, "unmark", step=1, name="lift")
    assert edited(index, 3, "reward", step=0, value=0.5)["return"] == 0.5
    assert edited(index, 3, "show_all")["length"] == before
    assert edited(index, 1, "delete")["deleted"] and not edited(index, 1, "undo")["deleted"]
    with Log.open(source.path, "r") as log:
        assert log.facts.about(3)["marks"] == {"grasp": [2]} and log.facts.about(0)["language_instruction"] == "lift it"
    assert [edit["author"] for edit in history_of(source, 1)][-1] == "ann"
    assert {"undo: delete", "delete", "label failure"} <= {edit["action"] for edit in history_of(source, 1)}


def test_split_and_join_show_other_episodes_and_undoing_shows_the_first_again(index: EpisodeIndex):
    [source] = index.sources
    edited(index, 3, "mark", step=4, name="lift")
    assert edited(index, 3, "split", name="lift", author="ann")["deleted"]
    made = Edits(source.log).history(3)[-1]
    assert made.author == "ann" and source.shown_of(made.episodes) == [4, 5]
    assert [index.row(source.key, number)["length"] for number in (4, 5)] == [4, 5]
    assert edited(index, 4, "join", other=5)["deleted"] and index.row(source.key, 6)["length"] == 9
    edit_episode(source, 6, {"action": "undo"})
    assert source.shown_of([3, 4, 5, 6]) == [4, 5] and source.place(6) < 0
    edit_episode(source, 4, {"action": "undo", "edit": made.number})
    assert source.shown_of([3, 4, 5, 6]) == [3]
    with Log.open(source.path, "a"), pytest.raises(ConfigError, match=r"stop it first\..*is writing to this log"):
        edit_episode(source, 3, {"action": "split", "name": "lift"})
    with pytest.raises(ConfigError, match="split at 'drop': expected a step, or a mark of the episode, which has"):
        edit_episode(source, 3, {"action": "split", "name": "drop"})
    with pytest.raises(ConfigError, match="reward 'much': expected a number, such as"):
        edit_episode(source, 3, {"action": "reward", "step": 0, "value": "much"})


def test_after_a_join_is_undone_the_list_is_as_before_also_when_it_is_opened_again(index: EpisodeIndex):
    def listed(index: EpisodeIndex, text: str = "") -> tuple[list[int], int, int]:
        assert index.wait_until_opened(60)
        page = index.page(EpisodeFilter.parse(text))
        return [row["number"] for row in page.rows], page.matched, page.total

    [source] = index.sources
    before = listed(index)
    edit_episode(source, 1, {"action": "join", "other": 2})
    assert listed(index) == ([0, 3, 4], 3, 3) and listed(index, "deleted=true") == ([1, 2], 2, 5)
    undone = edit_episode(source, 4, {"action": "undo"})
    assert listed(index) == before == ([0, 1, 2, 3], 4, 4) and listed(index, "deleted=true") == ([], 0, 4)
    again = EpisodeIndex([source.path])
    assert listed(again) == before
    again.close()
    edit_episode(source, 1, {"action": "undo", "edit": undone.number})  # which joins them again
    assert listed(index)[0] == [0, 3, 4] and index.row(source.key, 4)["read"]


def test_edits_are_named_without_the_numbers_of_others(index: EpisodeIndex):
    [source] = index.sources
    edit_episode(source, 1, {"action": "tag", "name": "undo 2 (it)"})
    undone = edit_episode(source, 1, {"action": "undo"})
    again = edit_episode(source, 1, {"action": "undo", "edit": undone.number})
    assert again.action == "undo 2 (undo 1 (tag undo 2 (it)))"  # as the command line shows it
    shown = [edit["action"] for edit in history_of(source, 1)]
    assert shown == ["undo: undo: tag undo 2 (it)", "undo: tag undo 2 (it)", "tag undo 2 (it)"]
    assert shown_edit(again)["action"] == shown[0] and shown_edit(again)["number"] == 3


def test_a_trim_that_takes_away_reward_or_the_end_is_known(index: EpisodeIndex):
    [source] = index.sources
    edit_episode(source, 3, {"action": "reward", "step": 2, "value": 0.5})

    def lost(first: int, last: int) -> list[str]:
        return cut_away(source, 3, 0, {"action": "trim", "first": first, "last": last})

    assert lost(0, 8) == lost(2, 8) == [] and lost(3, 8) == ["reward"] and lost(0, 7) == ["reward", "end"]
    assert cut_away(source, 2, 0, {"action": "trim", "first": 0, "last": 3}) == ["end"]
    assert cut_away(source, 3, 0, {"action": "delete"}) == []


def test_what_cannot_be_edited_is_refused_with_its_cure(index: EpisodeIndex, tmp_path: Path):
    [source] = index.sources
    with pytest.raises(UnknownNameError, match="no edit named 'sucess'; did you mean 'success'"):
        edit_episode(source, 0, {"action": "sucess"})
    with pytest.raises(ConfigError, match="mark: 'step' is missing"):
        edit_episode(source, 0, {"action": "mark", "name": "grasp"})
    with pytest.raises(UnknownNameError, match="trajectory"):
        edit_episode(source, 99, {"action": "success"})
    convert(source.path, tmp_path / "data", to="robomimic")
    other = EpisodeIndex([tmp_path / "data"])
    assert other.wait_until_opened(60)
    with pytest.raises(ConfigError, match=r"is not edited\. Copy it to a log first: hilt data convert"):
        edit_episode(other.sources[0], 0, {"action": "success"})
    assert history_of(other.sources[0], 0) == []
    other.close()
    assert set(ACTIONS) >= {"success", "failure", "bad", "trim", "undo"}
