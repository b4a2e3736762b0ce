"""The pages of episodes: the list with its filters, and one episode, or two side by side."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.app.episodes.bulk_edits import bulk_commands, edit_many, selected_ids, undo_many
from hilt.app.episodes.episode_edits import cut_away, edit_episode, history_of, shown_edit
from hilt.app.episodes.episode_index import SORTS, EpisodePage, Neighbors
from hilt.app.episodes.episode_lanes import episode_lanes
from hilt.app.episodes.episode_shelf import TOGETHER, EpisodeData, OpenedData
from hilt.app.episodes.export_command import export_commands, is_export, where_commands
from hilt.app.episodes.saved_views import SavedView, SavedViews
from hilt.app.error_words import PageError
from hilt.app.open_app import PURPOSE, OpenApp, PageContext, Section
from hilt.core.errors import ConfigError, HiltError, optional_module
from hilt.formats.listing.episode_filter import EpisodeFilter

if TYPE_CHECKING:
    from fastapi import Request, Response

HERE = Path(__file__).parent
SHARED_SCRIPTS = ("edits_of_tab.js", "shown_values.js")
"""What both pages import, by the names of the files"""
VIEW_SCRIPTS = ("episode_camera.js", "episode_timeline.js", "episode_keys.js")
"""The parts of the page of an episode"""
COUNT, MAX_COUNT = 50, 200
"""Rows of a page of the list, and of one answer at most."""
FIRST_LIST = """<script>(() => {
  const asked = new URLSearchParams(location.search);
  asked.set("data", %s);
  asked.set("count", %d);
  window.hiltFirstList = fetch("/episodes/list?" + asked).then((answer) => answer.json());
  window.hiltFirstList.catch(() => {});
})()</script>"""
"""Asks for the first rows while the browser still loads the scripts that show them."""
OPEN_TIMEOUT_S = 30.0
"""Seconds to wait for a log or dataset to open, for an answer that needs it."""
FIRST_S = 0.8
"""Seconds after which the list is answered without what is still being opened; the browser asks again."""
MAX_AHEAD = 16
"""A frame that was asked for beforehand is not made if the cursor is further away meanwhile."""
MAX_CURSORS = 64
FRAME_AGE_S = 600
"""Seconds for which a browser may keep a frame."""
KEYS = (
    ("Space", "episode.key_play"),
    ("← →", "episode.key_step"),
    ("Shift ← →", "episode.key_ten"),
    ("Home End", "episode.key_ends"),
    ("J K L", "episode.key_shuttle"),
    ("I O", "episode.key_loop"),
    ("↑ ↓", "episode.key_next"),
    ("S F U", "episode.key_label"),
    ("B", "episode.key_bad"),
    ("M", "episode.key_mark"),
    ("N", "episode.key_unmark"),
    ("X", "episode.key_split"),
    ("A", "episode.key_join"),
    ("T", "episode.key_tag"),
    ("R", "episode.key_reward"),
    ("E", "episode.key_instruction"),
    ("C", "episode.key_trim"),
    ("Z", "episode.key_undo"),
)
LIST_KEYS = (
    ("J K ↓ ↑", "episodes.key_move"),
    ("Enter", "episodes.key_open"),
    ("X", "episodes.key_select"),
    ("Shift X", "episodes.key_range"),
    ("A", "episodes.key_all"),
    ("Esc", "episodes.key_none"),
    ("N P", "episodes.key_page"),
    ("S F U", "episodes.key_label"),
    ("B", "episode.key_bad"),
    ("T", "episodes.key_tag"),
    ("Delete", "episodes.key_delete"),
    ("Z", "episode.key_undo"),
)


def add_pages(app: OpenApp) -> None:
    """Adds the pages and what they ask for."""
    pages = EpisodePages(app)
    app.add_section(Section("episodes", "/episodes", "movie"))
    app.page("/episodes", "episodes", pages.show_list)
    app.page("/episode", "episodes", pages.show_one)
    for path, answer in (
        ("/episodes/list", pages.answer_list),
        ("/episodes/one", pages.answer_one),
        ("/episodes/all", pages.answer_all),
    ):
        app.route(path, pages.handler(answer))
    # many episodes may be selected, more than an address can name
    app.route("/episodes/export", pages.handler(pages.answer_export), methods=["POST"])
    app.route("/episodes/frame", pages.frame)
    app.route("/episodes/views", pages.views, methods=["GET", "POST"])
    app.route("/episodes/edit", pages.edit, methods=["POST"])
    app.route("/episodes/many", pages.edit_many, methods=["POST"])
    app.route("/episodes/run", pages.run_export, methods=["POST"])


class EpisodePages:
    """The pages of episodes: the data that they show, and the answers to the requests of their components."""

    def __init__(self, app: OpenApp):
        self._app, self.shelf, self.saved = app, app.shelf, SavedViews()
        # frames that nobody waits for yet are made one at a time, so that they hardly delay those that somebody sees
        self._ahead = ThreadPoolExecutor(1, "frames ahead")
        self._cursors: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._responses = optional_module("starlette.responses", PURPOSE, "teleop", "nicegui")
        ui = app.ui

        scripts = [HERE / name for name in SHARED_SCRIPTS]
        parts = [HERE / name for name in (*SHARED_SCRIPTS, *VIEW_SCRIPTS)]

        class EpisodeList(ui.element, component=HERE / "episode_list.js", dependencies=scripts):  # type: ignore[call-arg, name-defined]
            pass

        class EpisodeView(ui.element, component=HERE / "episode_view.js", dependencies=parts):  # type: ignore[call-arg, name-defined]
            pass

        self._list, self._view = EpisodeList, EpisodeView

    # Pages

    async def show_list(self, page: PageContext) -> None:
        """The list of episodes of one run, log or dataset, or the choice of one."""
        page.keys += LIST_KEYS
        page.ui.add_css((HERE / "episodes.css").read_text())
        listed = await asyncio.to_thread(self.shelf.listed)
        if not listed:
            with page.ui.element("div").classes("hilt-empty"):
                page.heading(page.word("nav.episodes"))
                page.text(page.word("episodes.empty", paths=", ".join(map(str, self._app.paths))))
                for command in ("hilt demo store --out runs/store", "hilt open runs/store"):
                    page.text(command, "code")
            return
        chosen = page.query("data") or (listed[0].key if len(listed) == 1 else "")
        if not chosen:
            self._choose(page, listed)
            return
        page.ui.add_head_html(FIRST_LIST % (json.dumps(chosen).replace("<", "\\u003c"), COUNT))
        self._component(page, self._list, data=chosen, several=len(listed) > 1, readonly=self._app.view, count=COUNT)

    def _choose(self, page: PageContext, listed: list[EpisodeData]) -> None:
        """The choice of a run, log or dataset."""
        with page.ui.element("div").classes("hilt-stack"):
            page.heading(page.word("nav.episodes"))
            tasks = {run.path: run.task for run in self._app.runs.runs.values()}
            logs = sum(data.format == "log" for data in listed)
            if logs > 1:
                with page.ui.element("a").classes("hilt-button together") as link:
                    link.props["href"] = f"/episodes?data={TOGETHER}"
                    page.text(page.word("episodes.show_together", count=logs), "span")
            with page.ui.element("ul").classes("episode-data"):
                for data in listed:
                    self._entry(page, data, tasks.get(data.path, ""))

    def _entry(self, page: PageContext, data: EpisodeData, task: str) -> None:
        with page.ui.element("li").classes("hilt-panel"):
            with page.ui.element("a") as link:
                link.props["href"] = f"/episodes?data={data.key}"
                page.text(data.name, "strong")
                page.text(data.format, "span", "hilt-chip")
            if task:
                page.text(task, "p", "hilt-soft")

    def show_one(self, page: PageContext) -> None:
        """One episode, or two side by side."""
        page.keys += KEYS
        page.ui.add_css((HERE / "episodes.css").read_text())
        self._component(page, self._view, data=page.query("data"), readonly=self._app.view)

    def _component(self, page: PageContext, kind: Any, **props: Any) -> None:
        made = kind()
        words: dict[str, str] = {}
        for prefix in ("episodes.", "episode.", "command."):
            words |= page.word.starting(prefix)
        for name, value in {**props, "words": words}.items():
            made.props[name] = value

    # Answers

    def _opened(self, key: str) -> OpenedData:
        return self.shelf.opened_together() if key == TOGETHER else self.shelf.opened(key)

    def handler(
        self, answer: Callable[[OpenedData, Mapping[str, Any]], dict[str, object]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that answers with JSON, and changes nothing; errors of ours come as text."""

        async def handle(request: Request) -> Response:
            def work() -> dict[str, object]:
                return answer(self._opened(str(given.get("data", ""))), given)

            try:
                given = request.query_params if request.method == "GET" else json.loads(await request.body())
                return self._said(request, await asyncio.to_thread(work))
            except (HiltError, ValueError, OSError) as error:
                return self._failed(request, error)

        return handle

    def _said(self, request: Request, answer: dict[str, Any]) -> Response:
        """An answer as JSON, with a ``text`` for each edit in it: its name in the language of the page."""
        word = self._app.words_of(request)
        edits = [answer, answer.get("edit", {}), *answer.get("history", ())]
        for edit in (edit for edit in edits if "action" in edit):
            edit["text"] = word.edit(edit["action"])
        return self._responses.JSONResponse(answer)

    def _failed(self, request: Request, error: Exception) -> Response:
        return self._responses.JSONResponse({"error": self._app.words_of(request).error(error)}, 400)

    def answer_list(self, opened: OpenedData, query: Mapping[str, Any]) -> dict[str, object]:
        """A page of the list, with the menus of its filters."""
        index = opened.index
        opening = not index.wait_until_opened(FIRST_S)
        chosen, sort, descending = _order(query)
        page: EpisodePage = index.page(
            chosen, sort, descending, int(query.get("first", 0)), min(MAX_COUNT, int(query.get("count", COUNT)))
        )
        return {
            **asdict(page),
            "opening": opening,
            "name": opened.data.name,
            "format": opened.data.format,
            "problems": index.problems,
            "filter": str(chosen),
            "menus": {name: index.values(name) for name in ("task", "tag", "group")},
            "views": [asdict(view) for view in self.saved.listed()],
        }

    def answer_one(self, opened: OpenedData, query: Mapping[str, Any]) -> dict[str, object]:
        """Everything about one episode but its frames; with ``light``, without its steps."""
        index = opened.index
        index.wait_until_opened(OPEN_TIMEOUT_S)
        source, number, lane = _named(opened, query)
        if query.get("light"):
            source.refresh()
            return {"row": index.row(source.key, number, lane), "history": history_of(source, number)}
        chosen, sort, descending = _order(query)
        beside: Neighbors = index.neighbors(source.key, number, lane, chosen, sort, descending)
        return {
            "row": index.row(source.key, number, lane),
            "lanes": episode_lanes(source, number, lane),
            "neighbors": asdict(beside),
            "following": index.following(source.key, number, lane),
            "name": opened.data.name,
            "editable": source.editable,
            "history": history_of(source, number),
        }

    def answer_export(self, opened: OpenedData, query: Mapping[str, Any]) -> dict[str, object]:
        """The commands that turn a selection into a dataset and train from it."""
        opened.index.wait_until_opened(OPEN_TIMEOUT_S)
        chosen, to, selected = _export(query)
        commands = export_commands(opened.index, chosen, to, selected)
        return {
            "commands": commands,
            "runnable": [command for command in commands if is_export(command)],
            "where": where_commands(opened.index, chosen, selected=selected),
            "started": self._started(opened.data.key),
        }

    def answer_all(self, opened: OpenedData, query: object) -> dict[str, object]:
        """The names of all episodes that a filter admits."""
        opened.index.wait_until_opened(OPEN_TIMEOUT_S)
        return {"ids": selected_ids(opened.index, _order(query)[0])}

    async def frame(self, request: Request) -> Response:
        """One frame as JPEG. With ``ahead=1`` it is one that is not to be seen yet."""
        query = request.query_params
        film = tuple(query.get(name, "") for name in ("data", "source", "number", "lane", "camera"))

        def work() -> bytes:
            step, height, ahead = int(query.get("step", 0)), int(query.get("height", 0)), query.get("ahead") == "1"
            if not ahead and not height:
                self._cursors[film] = step
                self._cursors.move_to_end(film)
                while len(self._cursors) > MAX_CURSORS:
                    self._cursors.popitem(last=False)
            elif ahead and abs(self._cursors.get(film, step) - step) > MAX_AHEAD:
                raise ConfigError(f"step {step} is far from the one that is seen now: ask for it again.")
            opened = self._opened(query.get("data", ""))
            opened.index.wait_until_opened(OPEN_TIMEOUT_S)
            source, number, lane = _named(opened, query)
            return opened.frames.jpeg(source.key, number, lane, step, query.get("camera", ""), height)

        try:
            pool = self._ahead if query.get("ahead") == "1" else None
            data = await asyncio.get_running_loop().run_in_executor(pool, work)
        except (HiltError, ValueError, OSError) as error:
            return self._responses.PlainTextResponse(str(error), 404)
        age = FRAME_AGE_S if int(query.get("step", 0)) >= 0 else 5
        return self._responses.Response(
            data, media_type="image/jpeg", headers={"Cache-Control": f"private, max-age={age}"}
        )

    async def edit(self, request: Request) -> Response:
        """Makes one edit of an episode, and answers with the episode as it is then; without a row where it is gone."""

        def work(given: dict[str, Any]) -> dict[str, Any]:
            opened = self._opened(str(given.get("data", "")))
            opened.index.wait_until_opened(OPEN_TIMEOUT_S)
            source, number, lane = _named(opened, given)
            lost = cut_away(source, number, lane, given)
            made = edit_episode(source, number, given)
            there = source.place(number, lane) >= 0
            return {
                "edit": shown_edit(made),
                "lost": lost,
                "shown": source.shown_of(made.episodes),
                "row": opened.index.row(source.key, number, lane) if there else None,
                "history": history_of(source, number),
            }

        return await self._edited(request, work)

    async def edit_many(self, request: Request) -> Response:
        """Makes one edit of all episodes that are selected, or undoes such edits; with ``commands`` it only answers
        with the commands that do the same."""

        def work(given: dict[str, Any]) -> dict[str, Any]:
            index = self._opened(str(given.get("data", ""))).index
            index.wait_until_opened(OPEN_TIMEOUT_S)
            if "undo" in given:
                return asdict(undo_many(index, given["undo"], str(given.get("author", ""))))
            episodes, where = given.get("episodes", {}), given.get("where")
            if given.get("commands"):
                return {"commands": bulk_commands(index, episodes, where, str(given.get("name", "")))}
            return asdict(edit_many(index, episodes, given))

        return await self._edited(request, work)

    async def run_export(self, request: Request) -> Response:
        """Runs one of the commands that export a selection, one at a time for each log or dataset."""

        def work(given: dict[str, Any]) -> dict[str, Any]:
            opened = self._opened(str(given.get("data", "")))
            opened.index.wait_until_opened(OPEN_TIMEOUT_S)
            command, known = str(given.get("command", "")), export_commands(opened.index, *_export(given))
            if command not in known or not is_export(command):
                raise PageError("error.export_changed", command=command)
            self._app.commands.start(f"export-{opened.data.key}", shlex.split(command))
            return {"started": self._started(opened.data.key)}

        return await self._edited(request, work)

    def _started(self, key: str) -> dict[str, Any] | None:
        """The newest export of a log or dataset: its command, what it printed, and its exit code, None while it
        runs."""
        started = self._app.commands.started.get(f"export-{key}")
        return None if started is None else {"text": started.text, "code": started.code, "lines": started.lines()}

    async def _edited(self, request: Any, work: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        try:
            if self._app.view:
                raise PageError("error.view_only")
            given = json.loads(await request.body())
            return self._said(request, await asyncio.to_thread(work, given))
        except (HiltError, ValueError, TypeError, KeyError, OSError) as error:
            return self._failed(request, error)

    async def views(self, request: Request) -> Response:
        """The saved views; a POST saves one, or removes it."""
        try:
            if request.method == "POST":
                if self._app.view:
                    raise PageError("error.view_only")
                given = json.loads(await request.body())
                if given.get("remove"):
                    self.saved.remove(str(given["remove"]))
                else:
                    fields = (str(given["name"]), str(given["filter"]), str(given["sort"]), bool(given["descending"]))
                    self.saved.save(SavedView(*fields))
            return self._responses.JSONResponse({"views": [asdict(view) for view in self.saved.listed()]})
        except (HiltError, ValueError, KeyError, OSError) as error:
            return self._failed(request, error)


def _named(opened: OpenedData, query: Any) -> tuple[Any, int, int]:
    """The source, number and lane that a request names."""
    return opened.index.source(query.get("source", "")), int(query.get("number", 0)), int(query.get("lane", 0))


def _export(query: Any) -> tuple[EpisodeFilter, str, Any]:
    """The filter, the format and the episodes that a request names; None of these where none is selected. Where all
    that a filter shows were selected, the filter names them."""
    to, where = str(query.get("to", "lerobot")), query.get("where")
    if where is not None:
        return EpisodeFilter.parse(where), to, None
    return _order(query)[0], to, query.get("episodes")


def _order(query: Any) -> tuple[EpisodeFilter, str, bool]:
    """The filter and the order that a request names."""
    sort = query.get("sort") or SORTS[0]
    return EpisodeFilter.parse(query.get("filter", "")), sort, query.get("descending") == "1"
