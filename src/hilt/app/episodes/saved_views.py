"""Views that were saved by name: a filter and an order, in a file of the user's own."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hilt.app.episodes.episode_index import SORTS
from hilt.app.error_words import PageError
from hilt.core.errors import UnknownNameError
from hilt.core.files import DISK
from hilt.formats.listing.episode_filter import EpisodeFilter

MAX_NAME, MAX_VIEWS = 100, 1000


@dataclass(frozen=True)
class SavedView:
    """A filter and an order under a name."""

    name: str
    filter: str
    sort: str = "number"
    descending: bool = False


class SavedViews:
    """The views in a file; several processes may change it at once."""

    def __init__(self, path: Path | None = None):
        self.path = path or views_file()

    def listed(self) -> list[SavedView]:
        """All views by name. A file that is not readable as such holds none."""
        try:
            found = json.loads(self.path.read_bytes())["views"]
            views = [SavedView(*(one[name] for name in ("name", "filter", "sort", "descending"))) for one in found]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return sorted(views, key=lambda view: view.name.casefold())

    def save(self, view: SavedView) -> None:
        """Keeps a view; one of the same name is replaced."""
        name = view.name.strip()
        if not 0 < len(name) <= MAX_NAME:
            raise PageError("error.view_name", name=repr(view.name), most=MAX_NAME)
        if view.sort not in SORTS:
            raise UnknownNameError("column to sort by", view.sort, SORTS)
        EpisodeFilter.parse(view.filter)
        self._change(
            [*(one for one in self.listed() if one.name != name), SavedView(name, *list(asdict(view).values())[1:])]
        )

    def remove(self, name: str) -> None:
        """Removes the view of this name."""
        views = self.listed()
        if name not in {view.name for view in views}:
            raise PageError("error.no_view", name=name)
        self._change([view for view in views if view.name != name])

    def _change(self, views: list[SavedView]) -> None:
        if len(views) > MAX_VIEWS:
            raise PageError("error.view_count", path=self.path, most=MAX_VIEWS)
        DISK.make_folders(self.path.parent)
        DISK.replace(self.path, json.dumps({"views": [asdict(view) for view in views]}, indent=1).encode())


def views_file() -> Path:
    """Where views are saved: in the folder for the state of programs, ``XDG_STATE_HOME`` or ``~/.local/state``."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "hilt" / "episode-views.json"
