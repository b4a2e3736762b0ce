"""What there is to look at below some folders, each opened when it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilt.app.episodes import episode_shelf
from hilt.app.episodes.episode_shelf import EpisodeShelf
from hilt.core.errors import ConfigError
from hilt.formats.convert import convert
from tests.app.episode_samples import make_log


def test_shelf_finds_runs_logs_and_datasets_below_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = make_log(tmp_path / "a/log", 1, images=False)
    make_log(tmp_path / "b/run/rollouts/rank-0", 2, images=False)
    make_log(tmp_path / "a/evaluations/test/log", 1, images=False)
    convert(log, tmp_path / "a/log-rlinf", to="rlinf")  # an export, as the app's command writes it
    convert(log, tmp_path / "b/data", to="robomimic")
    make_log(tmp_path / ".hidden", 1, images=False)
    (tmp_path / "b/notes").mkdir()
    shelf = EpisodeShelf([tmp_path])
    assert [(data.name, data.format) for data in shelf.listed()] == [
        ("a", "log"),
        ("a/log-rlinf", "rlinf"),
        ("b/data", "robomimic"),
        ("b/run", "log"),
    ]
    assert [data.name for data in EpisodeShelf([tmp_path / "a"]).listed()] == ["a", "a/log-rlinf"]
    assert [data.name for data in EpisodeShelf([log]).listed()] == ["log"]
    monkeypatch.setattr(episode_shelf, "MAX_OPEN", 2)
    for data in shelf.listed():
        opened = shelf.opened(data.key)
        assert opened.index.wait_until_read(60) and len(opened.index) in (1, 2) and not opened.index.problems
    assert len(shelf._opened) == 2 and shelf.opened(data.key) is opened
    together = shelf.opened_together()  # of runs and logs, not of their exports
    assert together.index.wait_until_read(60) and len(together.index) == 3 and not together.index.problems
    assert [source.name for source in together.index.sources] == ["a/log", "b/run/rollouts/rank-0"]
    make_log(tmp_path / "later", 4, images=False)
    monkeypatch.setattr(episode_shelf, "LOOK_S", 0.0)
    assert shelf.opened_together() is together
    assert together.index.wait_until_opened(60) and together.index.wait_until_read(60) and len(together.index) == 7
    assert len(shelf._opened) == 2
    with pytest.raises(ConfigError, match="no such run, log or dataset any more"):
        shelf.opened("../..")
    shelf.close()
