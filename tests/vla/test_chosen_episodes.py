"""What the filter of a run has chosen when it began stays its choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError
from hilt.replay import Edits, Log
from hilt.vla.demonstrations import Demonstrations
from hilt.vla.imitation.chosen_episodes import CHOSEN
from tests.vla.taught import write_log
from tests.vla.test_demonstrations import opened


def lengths(lessons: Demonstrations) -> list[int]:
    lessons.close()
    return [len(lesson.keys) for lesson in lessons.lessons]


def test_a_choice_is_kept_of_each_log_that_has_a_filter(tmp_path: Path):
    paths = [write_log(tmp_path / name, [(5, "put", True), (3, "put", True), (4, "put", True)]) for name in "abc"]
    run, said = tmp_path / "run", list[str]()
    run.mkdir()
    asked: dict[str, Any] = {"where": ["tag=good", "", "steps<5"], "run": run, "notify": said.append}
    with Log.open(paths[0]) as log:
        Edits(log).tag([0, 2], "good")
    assert lengths(opened(tmp_path, *paths, **asked)) == [5, 4, 5, 3, 4, 3, 4]
    assert read_json(run / CHOSEN)["logs"] == {
        "0": {"where": "tag=good", "rows": [[0, 0], [2, 0]]},
        "2": {"where": "steps<5", "rows": [[1, 0], [2, 0]]},
    }
    with Log.open(paths[0]) as log:
        Edits(log).untag([2], "good")
        Edits(log).tag([1], "good")
    assert lengths(opened(tmp_path, *paths, **asked)) == [5, 4, 5, 3, 4, 3, 4]
    assert said[2:] == [
        f"2 episodes of {paths[0]} were chosen by where='tag=good' when the run began",
        f"2 episodes of {paths[2]} were chosen by where='steps<5' when the run began",
    ]
    assert lengths(opened(tmp_path, *paths, **{**asked, "run": None})) == [5, 3, 5, 3, 4, 3, 4], "without a run, anew"
    assert lengths(opened(tmp_path, *paths, **{**asked, "where": ["tag=good steps>0"]})) == [5, 3, 5, 3, 4, 5, 3, 4]


def test_episodes_that_were_chosen_and_are_gone_are_an_error(tmp_path: Path):
    path, run = write_log(tmp_path / "a", [(5, "put", True), (3, "put", True), (4, "put", True)]), tmp_path / "run"
    run.mkdir()
    asked: dict[str, Any] = {"where": ["steps<5"], "run": run}
    opened(tmp_path, path, **asked).close()
    with Log.open(path) as log:
        Edits(log).bad([0, 2])
    gone = (
        r"where='steps<5' chose 2 episodes of .*a when .*run began, and of 1 trajectories \(number 2\) nothing is "
        r"shown now: they are bad, deleted, .*hilt data history .*or begin another run"
    )
    with pytest.raises(ConfigError, match=gone):
        opened(tmp_path, path, **asked)
    with Log.open(path) as log:
        Edits(log).undo()
    assert lengths(opened(tmp_path, path, **asked)) == [3, 4]
