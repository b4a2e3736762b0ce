"""Small parts that pages share: commands that can be copied, plain tables, lists of data, and texts of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hilt.app.episodes.episode_shelf import EpisodeData
from hilt.app.open_app import PageContext
from hilt.app.run_library import RunSummary
from hilt.app.words import Words
from hilt.runs.folder import COMMANDS


class CommandRow(NamedTuple):
    """A command on a page."""

    row: Any
    code: Any
    """The element with its text"""


def command_row(page: PageContext, text: str) -> CommandRow:
    """A command with a button that copies it."""
    with page.ui.element("div").classes("hilt-command") as row:
        code = page.text(text, "code")
        label = page.word("command.copy")
        button = page.ui.element("button").props(f'type="button" aria-label="{label}" title="{label}"')
        with button.classes("hilt-tool"):
            page.ui.icon("content_copy").props('aria-hidden="true"')
        button.on("click", js_handler="(event) => hiltCopy(event.currentTarget)")
    return CommandRow(row, code)


def plain_table(page: PageContext, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of texts, the first of each row as its head."""
    with page.ui.element("div").classes("hilt-scroll"), page.ui.element("table").classes("hilt-plain"):
        with page.ui.element("thead"), page.ui.element("tr"):
            for head in heads:
                page.text(head, "th")
        with page.ui.element("tbody"):
            for row in rows:
                _table_row(page, row)


def _table_row(page: PageContext, row: Sequence[str]) -> None:
    with page.ui.element("tr"):
        for place, text in enumerate(row):
            page.text(text, "td" if place else "th")


def choose_data(page: PageContext, question: str, path: str, listed: Sequence[EpisodeData]) -> None:
    """A question, and a link to the page at this path for each log or dataset."""
    page.text(question)
    with page.ui.element("ul"):
        for data in listed:
            with page.ui.element("li"), page.ui.element("a") as link:
                link.props["href"] = f"{path}?data={data.key}"
                page.text(f"{data.name} ({data.format})", "span")


def kind(run: RunSummary, word: Words) -> str:
    return word(f"kind.{run.kind}") if run.kind in COMMANDS else run.kind


def why(run: RunSummary, word: Words, now: float) -> str:
    """Why a run is in its state."""
    if run.reason == "why.silent":
        return word("why.silent", who=run.writer, age=age(now - run.last, word))
    if run.reason == "why.gone":
        return word("why.gone", when=when(run.last))
    if run.state == "ended":
        return word.of_run(word.event(run.why))
    return word(run.reason) if run.reason else word.event(run.why)


def when(seconds: float) -> str:
    """A moment, as every page of the app and ``run.json`` show it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def success_text(run: RunSummary, word: Words) -> str:
    if run.success is None:
        return "–"
    share, low, high = (f"{100 * one:.0f}%" for one in (run.success, run.low, run.high))
    values = {"share": share, "low": low, "high": high, "episodes": run.episodes}
    return word("success.evaluation", split=run.split, **values) if run.split else word("success.training", **values)


def age(seconds: float, word: Words) -> str:
    for unit, length, limit in (("seconds", 1, 90), ("minutes", 60, 5400), ("hours", 3600, 48 * 3600)):
        if seconds < limit:
            return word(f"age.{unit}", count=round(max(0.0, seconds) / length))
    return word("age.days", count=round(seconds / 86400))
