"""The page of one run: how it stands, its curves, evaluations, settings, log lines, and what can be done with it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.app.episodes.episode_shelf import data_key
from hilt.app.open_app import HERE, PURPOSE, OpenApp, PageContext
from hilt.app.remote_runs import add_routes
from hilt.app.run_commands import CommandRunner, RunCommand, commands_of, evaluate_command, resume_words
from hilt.app.run_curves import MAX_SMOOTH, RunCurves
from hilt.app.run_library import OVER, UNREADABLE, RunSummary, evaluations, modified, tail
from hilt.app.run_settings import changed_from_recipe, flat_settings
from hilt.app.table_parts import command_row, kind, plain_table, success_text, when, why
from hilt.app.take_over_page import TakeOverPages, add_tabs
from hilt.cli.show import human_bytes
from hilt.core.children import final_error
from hilt.core.errors import HiltError, optional_module
from hilt.core.files import inside

if TYPE_CHECKING:
    from fastapi import Request, Response

LOG_LINES, MAX_FILMS = 60, 12
AXES = ("step", "minutes")


class RunPages:
    """The page of a run, and the routes that its charts and videos come from."""

    def __init__(self, app: OpenApp):
        self.app = app
        self.curves, self.runner = RunCurves(), app.commands
        self._responses = optional_module("starlette.responses", PURPOSE, "teleop", "nicegui")

        class Curves(app.ui.element, component=HERE / "charts.js"):  # type: ignore[call-arg, name-defined]
            pass

        self._element = Curves
        app.route("/api/curves", self.answer_curves)
        app.route("/video", self.answer_video)
        add_routes(app, self._responses)
        app.page("/run", "runs", self.show)
        TakeOverPages(app)

    async def answer_curves(self, request: Request) -> Response:
        """The charts of the runs in the address, or that nothing has changed since the stamp in it."""
        query = request.query_params
        runs = [self.app.runs.runs[key] for key in query.getlist("run") if key in self.app.runs.runs]
        axis, smooth = query.get("axis", "step"), query.get("smooth", "20")
        if not runs or axis not in AXES or not smooth.isdecimal() or not 1 <= int(smooth) <= MAX_SMOOTH:
            return self._responses.PlainTextResponse("no such run, axis or smoothing", 404)
        word = self.app.words_of(request)
        paths = [run.path for run in runs]
        try:
            stamp = await asyncio.to_thread(self.curves.stamp, paths)
            if stamp == query.get("stamp"):
                return self._responses.JSONResponse({"same": True})
            names = [run.name for run in runs]
            found = await asyncio.to_thread(self.curves.charts, paths, names, axis, int(smooth), word)
        except (HiltError, OSError) as error:
            return self._responses.PlainTextResponse(str(error), 409)
        return self._responses.JSONResponse(found)

    async def answer_video(self, request: Request) -> Response:
        """A video of a run, by its path inside of the run's folder."""
        run = self.app.runs.runs.get(request.query_params.get("run", ""))
        name = request.query_params.get("file", "")
        if run is None or not name.endswith(".mp4"):
            return self._responses.PlainTextResponse("no such video", 404)
        try:
            path = inside(run.path, name, "the address")
        except HiltError as error:
            return self._responses.PlainTextResponse(str(error), 404)
        if not path.is_file():
            return self._responses.PlainTextResponse("no such video", 404)
        return self._responses.FileResponse(path, media_type="video/mp4")

    def add_curves(self, page: PageContext, runs: list[RunSummary]) -> None:
        """The charts of these runs."""
        names = ("curves", "axis", "step", "minutes", "smooth", "reset", "hint", "none")
        element = self._element()
        element.props["runs"] = [run.id for run in runs]
        element.props["words"] = {name: page.word(f"chart.{name}") for name in names}

    def show(self, page: PageContext) -> None:
        """The page of the run whose id is in the address."""
        run = self.app.runs.runs.get(page.query("id"))
        page.keys += [("← →", "keys.cursor"), ("Esc", "keys.zoom")]
        if run is None:
            page.text(page.word("run.unknown"), "p", "hilt-empty")
            return
        with page.ui.element("div").classes("hilt-stack"):
            _live_head(page, run)
            with page.ui.element("div").classes("hilt-columns"):
                _live_rows(page, run)
                _commands(page, run, self.runner)
            self.add_curves(page, [run])
            for section in (_evaluations, _settings, _logs):
                try:
                    section(page, run)
                except UNREADABLE as error:
                    page.text(str(error) or repr(error), "p", "hilt-alarm")


def _live_head(page: PageContext, run: RunSummary) -> None:
    """Name, state and alarms, kept up to date."""
    ui, word = page.ui, page.word
    with ui.element("div").classes("hilt-row"):
        page.heading(run.name)
        state = page.text("", "span", "hilt-state")
        reason = page.text("", "span", "hilt-soft")
        if any(run.path.glob("log/log.json")) or any(run.path.glob("rollouts/*/log.json")):
            with ui.link(target=f"/episodes?data={data_key(run.path)}").classes("hilt-button"):
                page.text(word("nav.episodes"), "span")
            with ui.link(target=f"/classifier?data={data_key(run.path)}").classes("hilt-button"):
                page.text(word("nav.classifier"), "span")
        logs = ui.element("button").props('type="button"').classes("hilt-button to-logs")
        with logs:
            page.text(word("run.logs"), "span")
        logs.on("click", js_handler="() => document.querySelector('.hilt-logs').scrollIntoView()")
        add_tabs(page, run)
    goes_on = page.text(word("run.goes_on"), "p")
    facts = page.text("", "p", "hilt-soft")
    with ui.element("div").classes("hilt-stack").props('role="status"') as alarms:
        pass
    seen: dict[str, Any] = {}

    def refresh() -> None:
        now, known = time.time(), page.app.runs.runs.get(run.id, run)
        state.set_text(word(f"state.{known.state}"))
        state.classes(replace=f"hilt-state {known.state}")
        reason.set_text(why(known, word, now))
        bad = known.state in ("failed", "died")
        reason.classes(replace="hilt-wrong" if bad else "hilt-soft")
        logs.set_visibility(bad)
        goes_on.set_visibility(bad and any(one.name == "resume" for one in commands_of(known)))
        parts = [kind(known, word), known.recipe, known.task, known.began, human_bytes(known.disk)]
        parts.append(known.remote or str(known.path))
        shown = success_text(known, word)
        facts.set_text(" · ".join(part for part in (shown, *parts) if part and part != "–"))
        raised = list(page.app.runs.standing(run.id).alarms.values()) if run.id in page.app.runs.runs else []
        if seen.get("alarms") != raised:
            seen["alarms"] = raised
            alarms.clear()
            with alarms:
                for text in raised:
                    page.text(word.event(text), "p", "hilt-alarm")

    refresh()
    ui.timer(2.0, refresh)


def _live_rows(page: PageContext, run: RunSummary) -> None:
    """Shows the present numbers of a run, in the same rows as its command does in the terminal."""
    with page.ui.element("section").classes("hilt-panel"):
        heading = page.heading("", 2)
        with page.ui.element("dl").classes("hilt-facts") as rows:
            pass
    seen: dict[str, Any] = {}

    def refresh() -> None:
        if run.id not in page.app.runs.runs:
            return
        over = page.app.runs.runs[run.id].state in OVER
        heading.set_text(page.word("run.at_end" if over else "run.now"))
        found = [(name, text) for name, text in page.app.runs.standing(run.id).rows(over) if name != "ALARM"]
        if seen.get("rows") == found:
            return
        seen["rows"] = found
        rows.clear()
        with rows:
            for name, text in found:
                page.text(page.word.metric(name), "dt")
                page.text(page.word.event(text) if name == "last event" else page.word.of_run(text), "dd")

    refresh()
    page.ui.timer(2.0, refresh)


def _commands(page: PageContext, run: RunSummary, runner: CommandRunner) -> None:
    """Commands, each with a button that copies it and one that runs it."""
    with page.ui.element("section").classes("hilt-panel hilt-stack"):
        page.heading(page.word("run.commands"), 2)
        if run.remote:
            page.text(page.word("run.remote", address=run.remote), "p", "hilt-soft")
            return
        with page.ui.element("div").classes("hilt-stack") as rows:
            pass
        output = page.text("", "pre", "hilt-output")
    seen: dict[str, Any] = {}

    def refresh() -> None:
        known = page.app.runs.runs.get(run.id, run)
        found, started = commands_of(known), runner.started.get(run.id)
        busy = started is not None and started.code is None
        if seen.get("commands") != (found, busy):
            seen["commands"] = found, busy
            rows.clear()
            with rows:
                for one in found:
                    _command(page, known, one, runner, busy)
        output.set_visibility(started is not None)
        if started is not None:
            ended = "" if started.code is None else page.word("command.ended", code=started.code)
            output.set_text("\n".join([f"$ {started.text}", *started.lines(), ended]).rstrip())

    refresh()
    page.ui.timer(2.0, refresh)


def _command(page: PageContext, run: RunSummary, command: RunCommand, runner: CommandRunner, busy: bool) -> None:
    ui, word = page.ui, page.word
    chosen = {"command": command}
    with ui.element("div").classes("hilt-do"):
        page.text(word(f"command.{command.name}"), "strong")
        field = None
        if command.name == "resume":
            field = ui.input(placeholder="max_steps=…").props(f'dense outlined aria-label="{word("command.limits")}"')
        row = command_row(page, command.text)

        def limit() -> None:
            try:
                words = resume_words(run, str(field.value or "")) if field is not None else command.words
                chosen["command"] = RunCommand(command.name, words, command.confirm)
                row.code.set_text(chosen["command"].text)
            except HiltError as error:
                ui.notify(page.word.error(error), type="warning")

        if field is not None:
            field.on("blur", limit)
        if page.app.view:
            return
        button = ui.element("button").props('type="button"').classes("hilt-button")
        with button:
            page.text(word("command.run"), "span")
    if busy and command.name != "stop":
        button.props("disabled")

    def start() -> None:
        try:
            runner.run(run, chosen["command"])
        except (HiltError, OSError) as error:
            ui.notify(page.word.error(error), type="negative")

    button.on("click", lambda: _confirmed(page, chosen["command"], start) if command.confirm else start())


def _confirmed(page: PageContext, command: RunCommand, start: Any) -> None:
    with page.ui.dialog(value=True) as dialog, page.ui.element("div").classes("hilt-panel hilt-stack"):
        page.heading(page.word("command.confirm"), 2)
        page.text(command.text, "code")
        with page.ui.element("div").classes("hilt-row"):
            for key, does in (("command.run", start), ("command.cancel", None)):
                button = page.ui.element("button").props('type="button"').classes("hilt-button")
                with button:
                    page.text(page.word(key), "span")
                button.on("click", lambda does=does: (dialog.close(), does() if does is not None else None))


def _evaluations(page: PageContext, run: RunSummary) -> None:
    """Evaluations with their intervals, newest first, and their videos; kept up to date."""
    with page.ui.element("section").classes("hilt-panel hilt-stack"):
        page.heading(page.word("run.evaluations"), 2)
        with page.ui.element("div") as place:
            pass
    seen: dict[str, Any] = {}

    def refresh() -> None:
        files = sorted(path.as_posix() for path in (*run.path.glob("evaluations/*/*"), *run.path.glob("*.mp4")))
        if seen.get("files") != files:
            seen["files"] = files
            place.clear()
            with place:
                _show_evaluations(page, run)

    refresh()
    page.ui.timer(5.0, refresh)


def _show_evaluations(page: PageContext, run: RunSummary) -> None:
    word, found = page.word, evaluations(run.path)[::-1]
    if run.remote:
        page.text(word("run.remote", address=run.remote), "p", "hilt-soft")
    elif not found:
        page.text(word("run.no_evaluations"))
        command_row(page, evaluate_command(run).text)
    else:
        heads = [word(f"evaluation.{name}") for name in ("update", "split", "task", "success", "episodes", "steps")]
        plain_table(page, heads, [_evaluation_row(one) for one in found])
    films = [(one, path) for one in found for path in sorted(one["folder"].glob("videos/*.mp4"))]
    with page.ui.element("div").classes("hilt-films"):
        for one, path in films[:MAX_FILMS]:
            _film(page, run, path, f"{one['split']} {one['update']:,}: {path.stem}")
        for path in sorted(run.path.glob("*.mp4")):
            _film(page, run, path, path.stem)


def _evaluation_row(one: dict[str, Any]) -> list[str]:
    share, low, high = (f"{100 * one[name]:.0f}%" for name in ("success", "low", "high"))
    steps = "–" if one.get("steps_per_success") is None else f"{one['steps_per_success']:.1f}"
    shown = [f"{one['update']:,}", str(one["split"]), str(one.get("task", "")), f"{share} [{low}, {high}]"]
    return [*shown, str(one["episodes"]), steps]


def _film(page: PageContext, run: RunSummary, path: Path, title: str) -> None:
    with page.ui.element("figure"):
        video = page.ui.element("video").props("controls preload=metadata muted playsinline")
        video.props["src"] = f"/video?run={run.id}&file={path.relative_to(run.path).as_posix()}"
        page.text(title, "figcaption", "hilt-soft")


def _settings(page: PageContext, run: RunSummary) -> None:
    """Shows the settings that differ from the recipe, and all of them below. Importing the recipe may take seconds."""
    word = page.word
    with page.ui.element("section").classes("hilt-panel hilt-stack"):
        page.heading(word("run.settings"), 2)
        with page.ui.element("div") as place:
            page.text(word("run.reading"), "p", "hilt-soft")
        with page.ui.element("details"):
            page.text(word("run.all_settings"), "summary")
            plain_table(page, [word("settings.key"), word("settings.value")], sorted(flat_settings(run.path).items()))

    async def compare() -> None:
        try:
            found = await asyncio.to_thread(changed_from_recipe, run)
        except UNREADABLE as error:
            found, problem = [], str(error) or repr(error)
        else:
            problem = ""
        place.clear()
        with place:
            if problem or not found:
                text = word("settings.no_recipe") if found is None else word("settings.same", recipe=run.recipe)
                page.text(problem or text)
                return
            heads = [word("settings.key"), word("settings.value"), word("settings.recipe", recipe=run.recipe)]
            plain_table(page, heads, found)

    page.ui.timer(0.1, compare, once=True)


def _logs(page: PageContext, run: RunSummary) -> None:
    """The last lines of each log file, and the events in the metrics; kept up to date. Logs that end with an error
    come first, and are open."""
    logs = sorted(run.path.glob("logs/*.log"))
    failed = [log for log in logs if final_error(tail(log, LOG_LINES))]
    opened = failed or [log for log in logs if log.stem == "learner"]
    texts: dict[Path, tuple[Any, Any]] = {}
    seen: dict[Path, float] = {}
    with page.ui.element("section").classes("hilt-panel hilt-stack hilt-logs"):
        page.heading(page.word("run.logs"), 2)
        for log in sorted(logs, key=lambda log: log not in failed):
            texts[log] = _lines(page, log.name, log in opened)
        events, _ = _lines(page, page.word("run.events"), False)

    def refresh() -> None:
        for path, (element, mark) in texts.items():
            if seen.get(path) != (changed := modified(path)):
                seen[path] = changed
                lines = tail(path, LOG_LINES)
                element.set_text("\n".join(lines))
                mark.set_text(page.word("run.has_error") if final_error(lines) else "")
        events.set_text(_events(page, run))  # which are known a little after the file has changed

    refresh()
    page.ui.timer(3.0, refresh)


def _lines(page: PageContext, title: str, is_open: bool) -> tuple[Any, Any]:
    """A section that shows the end of its lines first. Returns the elements of the lines, and of a mark beside the
    title."""
    with page.ui.element("details").props("open" if is_open else ""):
        with page.ui.element("summary"):
            page.text(title, "span")
            mark = page.text("", "span", "hilt-wrong")
        with page.ui.element("div").classes("hilt-tail").props('tabindex="0"'):
            lines = page.text("", "pre", "hilt-output")
    return lines, mark


def _events(page: PageContext, run: RunSummary) -> str:
    """Returns the newest events of the run as texts."""
    lines = page.app.runs.standing(run.id).events if run.id in page.app.runs.runs else ()
    return "\n".join(f"{when(at)}  {page.word.event(text)}" for at, text in lines)
