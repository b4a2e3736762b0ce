"""Views that are saved by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilt.app.episodes.saved_views import SavedView, SavedViews, views_file
from hilt.core.errors import ConfigError, UnknownNameError


def test_saved_views_are_there_for_the_next_one_who_looks(tmp_path: Path):
    path = tmp_path / "state/views.json"
    assert SavedViews(path).listed() == []
    SavedViews(path).save(SavedView("Failures", "success=false", "length", True))
    SavedViews(path).save(SavedView("a rescue", "source=human success=true"))
    SavedViews(path).save(SavedView("Failures", "success=false steps>=10"))
    views = SavedViews(path).listed()
    assert [view.name for view in views] == ["a rescue", "Failures"] and views[1].filter == "success=false steps>=10"
    SavedViews(path).remove("a rescue")
    assert [view.name for view in SavedViews(path).listed()] == ["Failures"]
    path.write_text("{")
    assert SavedViews(path).listed() == []


def test_saved_views_refuse_what_could_not_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    views = SavedViews(tmp_path / "views.json")
    for view in (SavedView(" ", ""), SavedView("x" * 101, ""), SavedView("x", "success")):
        with pytest.raises(ConfigError):
            views.save(view)
    with pytest.raises(UnknownNameError, match="column to sort by"):
        views.save(SavedView("x", "", "color"))
    with pytest.raises(ConfigError, match="view"):
        views.remove("x")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert views_file() == tmp_path / "hilt/episode-views.json"
