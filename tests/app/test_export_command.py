"""The commands that export a selection do what they say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hilt.cli
from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.app.episodes.export_command import export_commands, ranges, where_commands
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.formats import open_dataset
from hilt.formats.listing.episode_filter import EpisodeFilter
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log


def commands(path: Path, text: str, to: str) -> list[str]:
    index = EpisodeIndex([path])
    assert index.wait_until_read(60)
    try:
        return export_commands(index, EpisodeFilter.parse(text), to)
    finally:
        index.close()


def test_export_commands_export_the_episodes_of_a_filter(tmp_path: Path):
    log = make_log(tmp_path / "my log", 8, images=False)
    [command] = commands(log, "success=true steps>=9", "robomimic")
    assert command.endswith("--to robomimic --where 'success=true steps>=9'")
    result = CliRunner().invoke(hilt.cli.app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    made = tmp_path / "my log-robomimic"
    assert [len(episode) for episode in open_dataset(made)] == [9, 11, 13]
    copy, export, *train = commands(made, "success=true steps>=10", "log")  # read-only: by way of a log
    assert export.endswith("--to log -o trajectories=1-2")
    for command in (copy, export):
        result = CliRunner().invoke(hilt.cli.app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
    assert [len(episode) for episode in open_dataset(tmp_path / "my log-robomimic-log")] == [11, 13]
    assert train and all(line.startswith("hilt train") for line in train)


def test_a_filter_is_exported_by_where_only_if_it_means_the_same_in_each_log(tmp_path: Path):
    for name, count in (("log", 8), ("demos", 3)):
        make_log(tmp_path / "my run" / name, count, images=False)
    with Log.open(tmp_path / "my run" / "log", "r") as log:
        Edits(log).bad(2)
        Edits(log).label(4, True)
        Edits(log).mark(6, 3, "first grasp")
    with Log.open(tmp_path / "my run" / "log", "a") as log:
        log.annotate(5, color="dark red")

    def exported(text: str) -> list[tuple[str, list[int]]]:
        """How each command chooses, and the lengths of the episodes that it writes; with the same numbers before."""
        index = EpisodeIndex([tmp_path / "my run"])
        assert index.wait_until_read(60)
        chosen, out = EpisodeFilter.parse(text), []
        rows = index.rows_of(index.select(chosen))
        for number, command in enumerate(export_commands(index, chosen, "robomimic")):
            words = shlex.split(command)
            target = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            result = CliRunner().invoke(hilt.cli.app, [*words[1:4], str(target), *words[5:]])
            assert result.exit_code == 0, result.output
            out.append((" ".join(words[7:]), [len(episode) for episode in open_dataset(target)]))
            where = [source.path for source in index.sources].index(Path(words[3]))
            assert out[number][1] == [row["length"] for row in rows if row["group"] == where]
        index.close()
        return out

    assert exported("") == [("", [6, 7, 9, 10, 11, 12, 13]), ("", [6, 7, 8])]
    assert exported("success=true steps>=9") == [("--where success=true steps>=9", [9, 10, 11, 13])]
    assert exported("group~demos steps<8") == [("--where steps<8", [6, 7])]
    assert exported('mark~"first grasp"') == [("--where 'mark~first grasp'", [12])]
    # no episode of the demonstrations has a color, which is an error for these alone
    assert exported('color!="dark red" steps<8') == [
        ("--where 'color!=dark red' steps<8", [6, 7]),
        ("-o trajectories=0-1", [6, 7]),
    ]


def test_export_of_trajectories_that_are_not_there_is_refused(tmp_path: Path):
    log = make_log(tmp_path / "log", 3, images=False)
    with pytest.raises(UnknownNameError, match="trajectory named '7-9'"):
        open_dataset(log, trajectories="0,7-9")
    with pytest.raises(ConfigError, match="such as 3,7-9"):
        open_dataset(log, trajectories="0;1")
    with pytest.raises(UnknownNameError, match="format that can be written"):
        commands(log, "", "mp4")
    assert commands(log, "success=unknown", "lerobot") == []
    assert ranges([4, 0, 2, 3, 9]) == "0,2-4,9"


def test_export_of_selected_episodes_has_exactly_these_whatever_the_filter_shows(tmp_path: Path):
    for name, count in (("log", 8), ("demos", 3)):
        make_log(tmp_path / "my run" / name, count, images=False)
    index = EpisodeIndex([tmp_path / "my run"])
    assert index.wait_until_read(60)
    log, demos = index.sources
    selected, chosen = {demos.key: [2], log.key: [6, 0, 5, 0]}, EpisodeFilter.parse("success=true")
    made = [*export_commands(index, chosen, "robomimic", selected), *where_commands(index, chosen, selected=selected)]
    said = [CliRunner().invoke(hilt.cli.app, shlex.split(command)[1:]) for command in made]
    assert [result.exit_code for result in said] == [0] * 4
    assert [result.output.rpartition(" (")[2].strip(")\n") for result in said[2:]] == ["0, 5, 6", "2"]
    assert [len(episode) for episode in open_dataset(tmp_path / "my run/log-robomimic")] == [6, 11, 12]
    assert [len(episode) for episode in open_dataset(tmp_path / "my run/demos-robomimic")] == [8]
    assert made[0].endswith("-o trajectories=0,5-6")
    with pytest.raises(ConfigError, match="expected the numbers of one episode or more"):
        export_commands(index, chosen, "robomimic", {log.key: []})
    index.close()


def test_where_commands_choose_the_episodes_of_the_filter_in_every_log_of_a_run(tmp_path: Path):
    for name, count in (("log", 8), ("demos", 3)):
        make_log(tmp_path / "my run" / name, count, images=False)
    index = EpisodeIndex([tmp_path / "my run"])
    assert index.wait_until_read(60)
    found = {}
    for text in ('success=true instruction~"red cube"', "group~demos", "steps>=13"):
        made = where_commands(index, EpisodeFilter.parse(text))
        said = [CliRunner().invoke(hilt.cli.app, shlex.split(command)[1:]) for command in made]
        assert all(result.exit_code == 0 for result in said)
        found[text] = [result.output.rpartition(" (")[2].strip(")\n") for result in said]
    assert list(found.values()) == [["1, 3", "1"], ["0, 1, 2"], ["7"]]
    index.close()
