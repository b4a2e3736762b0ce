"""The page of value models: how well one ranks held-out episodes, whether its probabilities come true, and which
episodes it judges worst."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hilt.app.open_app import OpenApp, PageContext, Section
from hilt.app.table_parts import command_row
from hilt.app.value_models.value_data import KnownValueModel, report_of, value_models_of
from hilt.core.errors import HiltError

HERE = Path(__file__).parent


def add_pages(app: OpenApp) -> None:
    """Adds the page to the app."""
    app.add_section(Section("value", "/value", "trending_up"))
    app.page("/value", "value", ValuePages(app).show)


class ValuePages:
    """The choice of a model, and the report of one."""

    def __init__(self, app: OpenApp):
        self._app = app

        class ValueView(app.ui.element, component=HERE / "value_view.js"):  # type: ignore[call-arg, name-defined]
            pass

        self._view = ValueView

    async def show(self, page: PageContext) -> None:
        """The model in the address, or the newest one."""
        page.ui.add_css((HERE / "value.css").read_text())
        known = await asyncio.to_thread(value_models_of, self._app.paths, self._app.shelf)
        key = page.query("model")
        chosen = [one for one in known if one.key == key] if key else known[:1]
        with page.ui.element("div").classes("hilt-stack" if known else "hilt-empty"):
            page.heading(page.word("nav.value"))
            if len(known) > 1:
                _choices(page, known, chosen)
            if chosen:
                await self._show_one(page, chosen[0])
            elif known:
                page.text(page.word("value_model.gone"), "p", "hilt-alarm")
            else:
                page.text(page.word("value_model.empty", paths=", ".join(map(str, self._app.paths))))
                for command in ("hilt train value DATA --out value", "hilt open DATA value"):
                    command_row(page, command)

    async def _show_one(self, page: PageContext, chosen: KnownValueModel) -> None:
        try:
            report = await asyncio.to_thread(report_of, chosen, self._app.shelf, page.word)
        except (HiltError, OSError) as error:
            page.text(page.word.error(error), "p", "hilt-alarm")
            return
        made = self._view()
        made.props["report"], made.props["words"] = report, page.word.starting("value_model.")
        with page.ui.element("section").classes("hilt-panel hilt-stack"):
            page.heading(page.word("value_model.use"), 2)
            for command in report["commands"]:
                command_row(page, command)
            if not report["commands"]:
                page.text(page.word("value_model.no_use"))


def _choices(page: PageContext, known: list[KnownValueModel], chosen: list[KnownValueModel]) -> None:
    """A link to each model."""
    with page.ui.element("nav").classes("hilt-row").props(f'aria-label="{page.word("nav.value")}"'):
        for one in known:
            link = page.ui.link(target=f"/value?model={one.key}").classes("hilt-tab")
            if one in chosen:
                link.props('aria-current="page"')
            link.props["title"] = str(one.path)
            with link:
                page.text(one.name, "span")
