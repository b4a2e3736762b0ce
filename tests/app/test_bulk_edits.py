"""One edit of many episodes, of several logs too: what it does, how it is undone, and the commands that do the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hilt.cli
from hilt.app.episodes.bulk_edits import BULK_ACTIONS, bulk_commands, edit_many, selected_ids, undo_many
from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.formats.convert import convert
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log


@pytest.fixture
def index(tmp_path: Path) -> Iterator[EpisodeIndex]:
    """Two logs, as a run with two ranks has."""
    index = EpisodeIndex([make_log(tmp_path / name, 4, images=False) for name in ("one", "two")])
    assert index.wait_until_opened(60) and index.wait_until_read(60)
    yield index
    index.close()


def shown(index: EpisodeIndex, column: str) -> list[list[object]]:
    return [[index.row(source.key, number)[column] for number in range(4)] for source in index.sources]


def changes(log: Log, number: int) -> list[dict[str, object]]:
    """What an edit changes; a list of no values is nothing."""
    return [{k: v for k, v in one.items() if v != []} for one in log.facts.edits.edits[number]["changes"]]


def test_bulk_edit_is_one_edit_of_each_log_and_is_undone_as_one(index: EpisodeIndex):
    one, two = index.sources
    chosen = {one.key: [2, 0, 2], two.key: [3]}
    before = shown(index, "success")
    made = edit_many(index, chosen, {"action": "success", "author": "ann"})
    assert (made.action, made.count, made.error) == ("label success", 3, "")
    assert shown(index, "success") == [[True, True, True, True], [False, True, False, True]]
    with Log.open(one.path, "r") as log:
        [edit] = Edits(log).history()
        assert edit.author == "ann" and edit.episodes == (0, 2) and edit.time
    assert undo_many(index, made.edits, "bob").count == 3 and shown(index, "success") == before
    again = undo_many(index, made.edits)
    assert again.count == 0 and again.error.count("is undone already") == 2


def test_bulk_edit_that_fails_in_one_log_says_so_and_keeps_what_was_done(index: EpisodeIndex):
    one, two = index.sources
    made = edit_many(index, {one.key: [1], two.key: [99]}, {"action": "tag", "name": "slow"})
    assert [edit["source"] for edit in made.edits] == [one.key] and "no trajectory named '99'" in made.error
    assert shown(index, "tags")[0] == [[], ["slow"], [], []]
    with pytest.raises(UnknownNameError, match="no trajectory named '99'"):
        edit_many(index, {one.key: [99], two.key: [1]}, {"action": "delete"})
    assert shown(index, "deleted") == [[False] * 4] * 2


@pytest.mark.parametrize("where", [None, "success=true group=one"])
def test_bulk_commands_do_what_the_list_does(index: EpisodeIndex, where: str | None):
    one = index.sources[0]
    ids = selected_ids(index, EpisodeFilter.parse("success=true group=one"))
    assert ids == [f"{one.key}:1:0", f"{one.key}:3:0"]
    commands = bulk_commands(index, {one.key: [1, 3]}, where, "seen")
    wanted = "1,3" if where is None else "--where success=true"
    assert commands[0] == f"hilt data label {one.path} {wanted} --success"
    assert commands[-2:] == [f"hilt data tag {one.path} seen {wanted}", f"hilt data delete {one.path} {wanted}"]
    for action, command in zip(BULK_ACTIONS, commands, strict=True):
        made = edit_many(index, {one.key: [1, 3]}, {"action": action, "name": "seen"})
        with Log.open(one.path, "r") as log:
            by_page = changes(log, made.edits[0]["edit"])
        undo_many(index, made.edits)
        result = CliRunner().invoke(hilt.cli.app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
        with Log.open(one.path, "r") as log:
            edits = Edits(log)
            last = edits.history()[-1]
            assert changes(log, last.number) == by_page and last.episodes == (1, 3)
            edits.undo(last.number)


def test_bulk_edit_refuses_what_it_cannot_do(index: EpisodeIndex, tmp_path: Path):
    one = index.sources[0]
    with pytest.raises(UnknownNameError, match="no edit of many episodes named 'trim'"):
        edit_many(index, {one.key: [1]}, {"action": "trim"})
    with pytest.raises(ConfigError, match="expected the numbers of one episode or more"):
        edit_many(index, {one.key: []}, {"action": "bad"})
    with pytest.raises(ConfigError, match="no such run, log or dataset any more"):
        edit_many(index, {"nothing": [1]}, {"action": "bad"})
    with pytest.raises(ConfigError, match="too many single numbers for one command: select all that a filter shows"):
        bulk_commands(index, {one.key: range(0, 20_000, 2)})
    convert(one.path, tmp_path / "data", to="robomimic")
    other = EpisodeIndex([tmp_path / "data"])
    assert other.wait_until_opened(60)
    with pytest.raises(ConfigError, match=r"is not edited\. Copy it to a log first: hilt data convert"):
        edit_many(other, {other.sources[0].key: [0]}, {"action": "bad"})
    other.close()
