"""The page of reward classifiers: frames are labeled, the least certain first; a classifier is trained in a process of
its own, and its mistakes are shown with what each threshold makes of them."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.app.classifiers.classifier_data import (
    KnownClassifier,
    UseCommand,
    cameras_of,
    classifiers_of,
    log_paths,
    progress_of,
    queue_of,
    report_of,
    score_words,
    sources_of,
    train_words,
    use_command,
)
from hilt.app.episodes.episode_shelf import EpisodeData, OpenedData
from hilt.app.error_words import PageError
from hilt.app.open_app import PURPOSE, OpenApp, PageContext, Section
from hilt.app.run_commands import RunCommand, StartedCommand
from hilt.app.run_library import RunSummary, id_of
from hilt.app.table_parts import choose_data, command_row
from hilt.app.words import Words
from hilt.core.errors import ConfigError, HiltError, optional_module

if TYPE_CHECKING:
    from fastapi import Request, Response

HERE = Path(__file__).parent
OPEN_TIMEOUT_S = 30.0
REUSE_S = 300.0
"""Seconds for which scores are shown again, when the page is opened again"""
STOP_S = 10.0
KEYS = (
    ("S F", "classifier.key_label"),
    ("U", "classifier.key_unknown"),
    ("Z", "classifier.key_undo"),
    ("← →", "classifier.key_move"),
    ("Enter", "classifier.key_open"),
    ("T", "classifier.key_threshold"),
)


def add_pages(app: OpenApp) -> None:
    """Adds the page and what it asks for."""
    pages = ClassifierPages(app)
    app.add_section(Section("classifier", "/classifier", "rule"))
    app.page("/classifier", "classifier", pages.show)
    for name in ("state", "queue", "report", "use"):
        app.route(f"/classifier/{name}", pages.handler(getattr(pages, f"answer_{name}")))
    for name in ("score", "train", "stop", "start_use"):
        app.route(f"/classifier/{name}", pages.handler(getattr(pages, name), writes=True), methods=["POST"])


class ClassifierPages:
    """The page of one run or log, and the answers to the requests of its component."""

    def __init__(self, app: OpenApp):
        self._app = app
        self._responses = optional_module("starlette.responses", PURPOSE, "teleop", "nicegui")

        class ClassifierView(app.ui.element, component=HERE / "classifier_view.js"):  # type: ignore[call-arg, name-defined]
            pass

        self._view = ClassifierView

    async def show(self, page: PageContext) -> None:
        """The page of the data in the address, or the choice of some."""
        page.keys += KEYS
        page.ui.add_css((HERE / "classifier.css").read_text())
        listed = await asyncio.to_thread(self._app.shelf.listed)
        usable = await asyncio.to_thread(lambda: [data for data in listed if log_paths(data)])
        chosen = [data for data in listed if data.key == page.query("data")] or (usable if len(usable) == 1 else [])
        if chosen and chosen[0] in usable:
            made = self._view()
            props = {"data": chosen[0].key, "several": len(usable) > 1, "readonly": self._app.view}
            for name, value in {**props, "words": page.word.starting("classifier.")}.items():
                made.props[name] = value
            return
        with page.ui.element("div").classes("hilt-stack" if usable and not chosen else "hilt-empty"):
            page.heading(page.word("nav.classifier"))
            if chosen:
                page.text(page.word("classifier.other_format", format=chosen[0].format))
                command_row(page, shlex.join(["hilt", "data", "convert", str(chosen[0].path), f"{chosen[0].path}-log"]))
            elif usable:
                choose_data(page, page.word("classifier.choose"), "/classifier", usable)
            else:
                page.text(page.word("classifier.empty", paths=", ".join(map(str, self._app.paths))))
                for command in (
                    "hilt record tabletop/pick --classifier --device browser --out frames",
                    "hilt open frames",
                ):
                    command_row(page, command)

    def handler(
        self, answer: Callable[[Mapping[str, Any]], object], writes: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that answers with JSON; errors of ours come as text. What only reads is given the language, too."""

        async def handle(request: Request) -> Response:
            word = self._app.words_of(request)
            try:
                if writes and self._app.view:
                    raise PageError("error.view_only")
                given = (
                    json.loads(await request.body()) if writes else {**request.query_params, "language": word.language}
                )
                return self._responses.JSONResponse(await asyncio.to_thread(answer, given))
            except (HiltError, ValueError, TypeError, OSError) as error:
                return self._responses.JSONResponse({"error": word.error(error)}, 400)

        return handle

    # Answers

    def answer_state(self, query: Mapping[str, str]) -> dict[str, object]:
        """The classifiers there are, and how far the work is."""
        opened = self._opened(query)
        data, known = opened.data, self._known(opened.data)
        chosen, sources = self._chosen(query, opened.data), sources_of(opened)
        scored, trained = (self._app.commands.started.get(f"{work}-{data.key}") for work in ("score", "train"))
        try:
            command, problem = shlex.join(train_words(data, sources, str(query.get("settings", "")))), ""
        except ConfigError as error:
            command, problem = "", Words(query["language"]).error(error)
        return {
            "name": data.name,
            "images": bool(sources),
            "problems": opened.index.problems,
            "classifiers": [{"key": one.key, "name": one.name, "path": str(one.path)} for one in known],
            "chosen": chosen.key if chosen is not None else "",
            "score": {**_work(scored), "command": shlex.join(score_words(log_paths(data), chosen))},
            "train": {**_work(trained), "command": command, "problem": problem},
        }

    def answer_queue(self, query: Mapping[str, object]) -> dict[str, object]:
        """The frames of the newest score."""
        opened = self._opened(query)
        scored = self._app.commands.started.get(f"score-{opened.data.key}")
        if scored is None or scored.code != 0:
            raise PageError("error.not_scored")
        chosen = self._chosen(query, opened.data)
        return queue_of(opened, scored, cameras_of(chosen) if chosen is not None else ())

    def answer_report(self, query: Mapping[str, object]) -> dict[str, object]:
        """What is known of the chosen classifier."""
        chosen = self._chosen(query, self._opened(query).data)
        if chosen is None:
            raise PageError("error.no_classifier")
        return report_of(chosen, self._app.shelf)

    def answer_use(self, query: Mapping[str, object]) -> dict[str, object]:
        """The command by which this run uses the chosen classifier."""
        use, run = self._use(query)
        page = f"/run?id={run.id}" if run is not None else ""
        return {"command": shlex.join(use.words), "why": use.why, "resumes": use.resumes, "run": page}

    # Work

    def score(self, given: Mapping[str, object]) -> dict[str, object]:
        """Finds the frames that are worth a label, unless that is being done or was done a moment ago."""
        opened = self._opened(given)
        started = self._app.commands.started.get(f"score-{opened.data.key}")
        words = score_words([source.path for source in sources_of(opened)], self._chosen(given, opened.data))
        if started is not None and started.code is None:
            if started.text == shlex.join(words):
                return {}
            started.process.end(STOP_S)  # of another classifier: nobody waits for it any more
        recent = started is not None and started.code == 0 and time.time() - started.began < REUSE_S
        if started is None or not recent or started.text != shlex.join(words):
            self._app.commands.start(f"score-{opened.data.key}", words, apart=True)
        return {}

    def train(self, given: Mapping[str, object]) -> dict[str, object]:
        """Trains a classifier from what is labeled."""
        opened = self._opened(given)
        words = train_words(opened.data, sources_of(opened), str(given.get("settings", "")))
        self._app.commands.start(f"train-{opened.data.key}", words)
        return {}

    def stop(self, given: Mapping[str, object]) -> dict[str, object]:
        """Ends the training, which leaves nothing then."""
        started = self._app.commands.started.get(f"train-{self._opened(given).data.key}")
        if started is not None:
            started.stop()
        return {}

    def start_use(self, given: Mapping[str, object]) -> dict[str, object]:
        """Resumes the run with the chosen classifier."""
        use, run = self._use(given)
        if run is None or not use.resumes:
            raise PageError("error.not_from_here", command=shlex.join(use.words))
        self._app.commands.run(run, RunCommand("resume", use.words, confirm=True))
        return {"run": f"/run?id={run.id}"}

    # Inside

    def _opened(self, given: Mapping[str, Any]) -> OpenedData:
        opened = self._app.shelf.opened(str(given.get("data", "")))
        opened.index.wait_until_opened(OPEN_TIMEOUT_S)
        return opened

    def _known(self, data: EpisodeData) -> list[KnownClassifier]:
        return classifiers_of(data, self._app.paths)

    def _chosen(self, given: Mapping[str, Any], data: EpisodeData) -> KnownClassifier | None:
        """The classifier that a request names, else the first one."""
        known = {one.key: one for one in self._known(data)}
        if key := str(given.get("classifier") or ""):
            if key not in known:
                raise PageError("error.classifier_gone")
            return known[key]
        return next(iter(known.values()), None)

    def _use(self, given: Mapping[str, Any]) -> tuple[UseCommand, RunSummary | None]:
        data = self._opened(given).data
        chosen, run = self._chosen(given, data), self._app.runs.runs.get(id_of(data.path))
        if chosen is None:
            raise PageError("error.no_classifier")
        return use_command(run, data.path, chosen, float(given.get("threshold") or 0)), run


def _work(started: StartedCommand | None) -> dict[str, Any]:
    """How far a command is."""
    if started is None:
        return {"running": False, "code": None, "lines": [], "progress": [], "began": 0, "text": ""}
    code = started.code
    running = {"running": code is None, "code": code, "lines": started.lines(), "progress": progress_of(started)}
    return {**running, "began": started.began, "text": started.text}
