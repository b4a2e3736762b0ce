"""Several runs beside each other: curves, the settings that differ, and the difference of their success."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hilt.app.open_app import OpenApp, PageContext
from hilt.app.run_library import RunSummary, evaluations
from hilt.app.run_page import RunPages
from hilt.app.run_settings import differing
from hilt.app.table_parts import plain_table, success_text
from hilt.observe.statistics import paired_difference

MAX_COMPARED = 8


class ComparePage:
    """The page that compares the runs whose ids are in its address."""

    def __init__(self, app: OpenApp, pages: RunPages):
        self._pages = pages
        app.page("/compare", "runs", self.show)

    def show(self, page: PageContext) -> None:
        word, known = page.word, page.app.runs.runs
        runs = [known[key] for key in dict.fromkeys(page.queries("id")) if key in known][:MAX_COMPARED]
        with page.ui.element("div").classes("hilt-stack"):
            page.heading(word("compare.title"))
            if len(runs) < 2:
                page.text(word("compare.few"), "p", "hilt-empty")
                return
            with page.ui.element("section").classes("hilt-panel"):
                page.heading(word("compare.success"), 2)
                self._success(page, runs)
            self._pages.add_curves(page, runs)
            with page.ui.element("section").classes("hilt-panel"):
                page.heading(word("compare.settings"), 2)
                rows = [[key, *values] for key, values in differing([run.path for run in runs])]
                if rows:
                    plain_table(page, [word("settings.key"), *(run.name for run in runs)], rows)
                else:
                    page.text(word("compare.same"))

    def _success(self, page: PageContext, runs: list[RunSummary]) -> None:
        """The success of each run, and by how much it differs from that of the first."""
        word, rows = page.word, []
        for place, run in enumerate(runs):
            difference = success_difference(runs[0].path, run.path) if place else None
            text = "" if not place else word("compare.not_paired")
            if difference is not None:
                split, gain, low, high = difference
                text = f"{100 * gain:+.0f}% [{100 * low:+.0f}%, {100 * high:+.0f}%] ({split})"
            rows.append([run.name, success_text(run, word), text])
        heads = [word("compare.run"), word("column.success"), word("compare.difference", name=runs[0].name)]
        plain_table(page, heads, rows)


def success_difference(one: Path, other: Path) -> tuple[str, float, float, float] | None:
    """Returns by how much the success of the other run is larger, state by state: (split, difference, low, high) with
    the 95% interval. The newest evaluations of a split, test first, that tried the same states count; else None."""
    first, second = _newest(one), _newest(other)
    for split in sorted(first.keys() & second.keys(), key=lambda split: (split != "test", split)):
        before, after = first[split], second[split]
        same = sorted(before.keys() & after.keys())
        if same:
            clusters = [(scene, state) for _, scene, state in same]
            return split, *paired_difference([before[key] for key in same], [after[key] for key in same], clusters)
    return None


def _newest(run: Path) -> dict[str, dict[tuple[str, str, int], bool]]:
    """For each split the outcomes of the newest evaluation of each task, by task, scene and initial state."""
    newest: dict[tuple[str, str], Any] = {(one["split"], one.get("task", "")): one for one in evaluations(run)}
    found: dict[str, dict[tuple[str, str, int], bool]] = {}
    for (split, task), one in newest.items():
        for outcome in one.get("outcomes", []):
            key = (task, str(one.get("scene", task)), int(outcome["state"]))
            found.setdefault(split, {})[key] = bool(outcome["success"])
    return found
