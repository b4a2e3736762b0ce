"""The page that checks a dataset: what ``hilt data check`` finds, each finding with a link to its frame."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hilt.app.episodes.episode_index import find_sources
from hilt.app.episodes.episode_shelf import EpisodeData
from hilt.app.open_app import OpenApp, PageContext, Section
from hilt.app.run_library import tail
from hilt.app.table_parts import choose_data, command_row
from hilt.checks.finding_texts import render, render_place
from hilt.core.children import ChildProcess, run_module
from hilt.core.tree import JsonObject
from hilt.formats.listing.episode_source import source_key

MAX_ROWS = 500
"""Findings that the page shows; the command lists all of them."""
REFRESH_S = 1.0


def add_pages(app: OpenApp) -> None:
    """Adds the page to the app."""
    pages = CheckPages(app)
    app.add_section(Section("check", "/check", "fact_check"))
    app.page("/check", "check", pages.show)


@dataclass
class CheckRun:
    """One check, which runs in a process of its own."""

    process: ChildProcess
    output: Path
    errors: Path

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def last_line(self) -> str:
        """The last line that it printed beside its report: how far it is, or what went wrong."""
        return "".join(tail(self.errors, 1))

    def report(self) -> JsonObject | None:
        """Returns its report; None while it runs, and where it failed."""
        if self.is_running:
            return None
        try:
            found = json.loads(self.output.read_bytes())
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


class CheckRunner:
    """Starts checks, one at a time for each log or dataset."""

    def __init__(self) -> None:
        self.runs: dict[str, CheckRun] = {}
        """The newest check of each path, by the key of its source."""
        self._folder = Path(tempfile.mkdtemp(prefix="hilt-check-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._lock = threading.Lock()

    def start(self, key: str, path: Path) -> None:
        """Checks a log or dataset, unless that is being done."""
        with self._lock:
            if key in self.runs and self.runs[key].is_running:
                return
            output, errors = self._folder / f"{key}.json", self._folder / f"{key}.txt"
            with output.open("wb") as out, errors.open("wb") as err:
                process = ChildProcess(
                    run_module("hilt", *check_words(path)[1:], "--json"),
                    leaves_signals=False,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self.runs[key] = CheckRun(process, output, errors)


def check_words(path: Path) -> list[str]:
    """The command that checks a path."""
    return ["hilt", "data", "check", str(path)]


def frame_address(data: str, source: str, finding: dict[str, Any]) -> str:
    """The page of the frame that a finding is about; empty if it is about no episode."""
    number = finding["episode"]
    if trajectory := re.fullmatch(r"trajectory (\d+)", finding["label"]):  # so the episodes of a log are numbered
        number = int(trajectory[1])
    if number is None:
        return ""
    step = max(0, (finding["first"] or 0) - finding["trimmed"])  # the page counts the steps that it shows
    return "/episode?" + urlencode({"data": data, "source": source, "number": number, "step": step})


class CheckPages:
    """The choice of what to check, and the findings of one."""

    def __init__(self, app: OpenApp):
        self._app, self._shelf, self._runner = app, app.shelf, CheckRunner()

    async def show(self, page: PageContext) -> None:
        listed = await asyncio.to_thread(self._shelf.listed)
        chosen = [data for data in listed if data.key == page.query("data")] or (listed if len(listed) == 1 else [])
        with page.ui.element("div").classes("hilt-stack"):
            page.heading(page.word("nav.check"))
            if chosen:
                self._show_one(page, chosen[0])
            elif listed:
                choose_data(page, page.word("check.choose"), "/check", listed)
            else:
                page.text(page.word("check.empty", paths=", ".join(map(str, self._app.paths))), "p", "hilt-empty")

    def _show_one(self, page: PageContext, data: EpisodeData) -> None:
        page.text(page.word("check.about"), "p", "hilt-soft")
        for name, path in find_sources(data.path):
            with page.ui.element("section").classes("hilt-panel hilt-check"):
                page.heading(f"{data.name} {name}".strip(), 2)
                command_row(page, shlex.join(check_words(path)))
                self._show_source(page, data.key, source_key(path), path)

    def _show_source(self, page: PageContext, data: str, source: str, path: Path) -> None:
        if not self._app.view:
            button = page.ui.element("button").props('type="button"').classes("hilt-button hilt-do")
            with button:
                page.text(page.word("check.start"), "span")
            button.on("click", lambda: self._runner.start(source, path))
        state = page.text("", "p", "hilt-soft")
        table = page.ui.element("div").classes("hilt-scroll")
        shown: list[Any] = [None]

        def refresh() -> None:
            run = self._runner.runs.get(source)
            if run is None:
                return
            report = run.report()
            state.set_text(_state(page, run, report))
            if report is not None and shown[0] is not run:
                shown[0] = run
                table.clear()
                with table:
                    _show_findings(page, data, source, report)

        refresh()
        page.ui.timer(REFRESH_S, refresh)


def _state(page: PageContext, run: CheckRun, report: dict[str, Any] | None) -> str:
    if report is not None:
        counts = {name: f"{count:,}" for name, count in report["severities"].items()}
        values = {"episodes": f"{report['episodes']:,}", "steps": f"{report['steps']:,}", **counts}
        return page.word("check.found", **values)
    word = page.word("check.running" if run.is_running else "check.failed")
    return f"{word} {run.last_line()}".strip()


def _show_findings(page: PageContext, data: str, source: str, report: dict[str, Any]) -> None:
    if not report["findings"]:
        return
    with page.ui.element("table").classes("hilt-plain"):
        with page.ui.element("thead"), page.ui.element("tr"):
            for head in ("check.severity", "check.name", "check.place", "check.what", "check.cure"):
                page.text(page.word(head), "th")
        with page.ui.element("tbody"):
            for finding in report["findings"][:MAX_ROWS]:
                _show_finding(page, data, source, finding)


def _show_finding(page: PageContext, data: str, source: str, finding: dict[str, Any]) -> None:
    with page.ui.element("tr"):
        page.text(page.word(f"severity.{finding['severity']}"), "th")
        page.text(finding["check"], "td")
        with page.ui.element("td"):
            address = frame_address(data, source, finding)
            with page.ui.element("a" if address else "span") as place:
                if address:
                    place.props["href"] = address
                page.text(_place(page, finding), "span")
        for text in render(finding["text"], finding["values"], page.word.language):
            page.text(text, "td")


def _place(page: PageContext, finding: dict[str, Any]) -> str:
    label, first, last, column = (finding[name] for name in ("label", "first", "last", "column"))
    return render_place(label, first, last, column, page.word.language)
