"""The table of all runs, from which one is opened or several are compared."""

from __future__ import annotations

import time
from typing import Any

from hilt.app.compare_page import MAX_COMPARED, ComparePage
from hilt.app.open_app import OpenApp, PageContext, Section
from hilt.app.run_library import RunSummary
from hilt.app.run_page import RunPages
from hilt.app.table_parts import age, command_row, kind, success_text, why
from hilt.app.words import Words
from hilt.cli.show import human_bytes

COLUMNS = ("name", "state", "success", "recipe", "steps", "updates", "age", "disk")
NUMBERS = ("steps", "updates", "age", "disk")
"""Columns that are sorted by a number beside their text"""
PAGE_ROWS = 50
STATE = """<span :class="'hilt-state ' + props.row.state_class">{{ props.row.state }}</span>"""
WHY = """<div class="why" :title="props.row.why">{{ props.row.why }}</div>"""
LINK = """<a :href="props.row.href">{{ props.row.name }}</a>"""
BAR = """<span v-if="props.row.bar" class="hilt-bar" aria-hidden="true">
<i :style="{left: props.row.bar[0] + '%', right: 100 - props.row.bar[2] + '%'}"></i>
<b :style="{left: 'calc(' + props.row.bar[1] + '% - 1px)'}"></b></span>{{ props.row.success }}"""
RECIPE = """<div>{{ props.row.recipe }}</div><div class="why" :title="props.row.task">{{ props.row.task }}</div>"""
CELLS = {"name": LINK, "state": STATE + WHY, "success": BAR, "recipe": RECIPE}
CELLS |= {name: f"{{{{ props.row.{name} }}}}" for name in NUMBERS}
"""What a cell shows, as a template of Vue's: texts are never HTML"""
CARD = f"""<div class="hilt-card"><div class="hilt-row"><q-checkbox v-model="props.selected" dense />
{LINK} {STATE}</div>{WHY}<div>{BAR}</div>
<div class="hilt-soft">{{{{ props.row.recipe }}}} · {{{{ props.row.steps }}}} · {{{{ props.row.age }}}}</div></div>"""
"""A run on a phone"""


def add_pages(app: OpenApp) -> None:
    app.add_section(Section("runs", "/", "insights"))
    app.page("/", "runs", show_runs)
    ComparePage(app, RunPages(app))


def show_runs(page: PageContext) -> None:
    """The table of runs, which keeps itself up to date."""
    ui, word, library = page.ui, page.word, page.app.runs
    with ui.element("div").classes("hilt-stack"):
        page.heading(word("runs.title"))
        summary = page.text("", "p", "hilt-soft")
        with ui.element("div").classes("hilt-empty") as empty:
            page.text(word("runs.empty", paths=", ".join(map(str, page.app.paths))))
            command_row(page, "hilt demo --fast --run runs/demo")
            page.text(word("runs.empty_open"))
            command_row(page, "hilt open runs/demo")
        bar, table = _table_with_filter(page)
        damaged = ui.element("div").classes("hilt-stack")
    shown: dict[str, Any] = {"errors": None}

    def refresh() -> None:
        rows = [row_of(run, word, time.time()) for run in sorted(library.runs.values(), key=lambda run: -run.last)]
        if rows != table.rows:
            table.rows = rows
            table.props(f"{'hide-pagination' if len(rows) <= PAGE_ROWS else ''}", remove="hide-pagination")
            table.update()
        paths = ", ".join(map(str, page.app.paths))
        summary.set_text(word("runs.count", count=len(rows), paths=paths) if library.looked else word("runs.reading"))
        is_empty = library.looked and not rows and not library.errors
        empty.set_visibility(is_empty)
        for element in (summary, bar, table):
            element.set_visibility(not is_empty)
        if shown["errors"] != library.errors:
            shown["errors"] = dict(library.errors)
            damaged.clear()
            with damaged:
                if library.errors:
                    page.heading(word("runs.damaged"), 2)
                for name, error in library.errors.items():
                    page.text(f"{name}: {word.event(error)}", "p", "hilt-alarm")

    refresh()
    ui.timer(2.0, refresh)


def _table_with_filter(page: PageContext) -> tuple[Any, Any]:
    """The row with the filter and the button that compares, and the table."""
    ui, word = page.ui, page.word
    label = word("runs.filter")
    with ui.element("div").classes("hilt-row") as bar:
        field = ui.input(placeholder=label).props(f'dense outlined clearable aria-label="{label}"')
        field.classes("hilt-filter")
    columns = [
        {
            "name": name,
            "label": word(f"column.{name}"),
            "field": f"{name}_value" if name in NUMBERS else name,
            "sortable": True,
            "align": "right" if name in NUMBERS else "left",
        }
        for name in COLUMNS
    ]
    paged = {"rowsPerPage": PAGE_ROWS, "sortBy": None}
    table = ui.table(columns=columns, rows=[], row_key="id", selection="multiple", pagination=paged)
    table.classes("hilt-table").props(f'flat :grid="window.innerWidth < 640" no-results-label="{word("runs.none")}"')
    for name, template in CELLS.items():
        table.add_slot(f"body-cell-{name}", f'<q-td :props="props">{template}</q-td>')
    table.add_slot("item", CARD)
    field.on_value_change(lambda event: setattr(table, "filter", event.value or ""))
    with bar:
        button = ui.element("a").classes("hilt-button hilt-compare").props(f'title="{word("runs.compare_hint")}"')
        with button:
            page.text(word("runs.compare"), "span")

    def choose() -> None:
        chosen = [row["id"] for row in table.selected]
        usable = 2 <= len(chosen) <= MAX_COMPARED
        button.props["href"] = f"/compare?{'&'.join(f'id={key}' for key in chosen)}" if usable else None
        button.props["aria-disabled"] = "false" if usable else "true"
        button.update()

    table.on_select(lambda _: choose())
    choose()
    return bar, table


def row_of(run: RunSummary, word: Words, now: float) -> dict[str, object]:
    """A row of the table: plain texts, and numbers to sort by."""
    return {
        "id": run.id,
        "href": f"/run?id={run.id}",
        "name": run.name,
        "recipe": run.recipe,
        "task": " · ".join(text for text in (kind(run, word), run.task) if text),
        "state": word(f"state.{run.state}"),
        "state_class": run.state,
        "why": why(run, word, now),
        "success": success_text(run, word),
        "bar": None if run.success is None else [round(100 * one, 1) for one in (run.low, run.success, run.high)],
        "steps": f"{run.steps:,}",
        "steps_value": run.steps,
        "updates": f"{run.updates:,}",
        "updates_value": run.updates,
        "age": age(now - run.last, word) if run.last else "",
        "age_value": -run.last,
        "disk": human_bytes(run.disk),
        "disk_value": run.disk,
    }
