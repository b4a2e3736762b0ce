"""The tab of a run from which a person takes over, while an actor of the run has a page for its operator.

The page of the actor's process (`hilt.teleop.page`) is drawn by the app itself, and what it says to its process goes
through a websocket of the app's: so one address, one token and one certificate protect it, and it works wherever the
app does. The app is one more viewer to that process, which decides who drives; when the app or the browser is gone,
contact is lost as always, and the arm holds still.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

from hilt.app.open_app import PURPOSE, OpenApp, PageContext
from hilt.app.run_library import RunSummary
from hilt.app.take_over_words import TAKE_OVER_WORDS
from hilt.app.words import Words
from hilt.core.errors import optional_module
from hilt.core.web import cookie_name
from hilt.hil.operator_page import OperatorPage, operator_pages
from hilt.teleop.page import STILL, cockpit

if TYPE_CHECKING:
    from fastapi import WebSocket

AWAY = 4404
"""The code with which a websocket is closed when there is no actor to take over; page.js knows it"""
PASSED_ON = (1008, 1013)
"""Codes with which an actor's page refuses a viewer, for a reason that the person should read"""
CONNECT_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 64 << 20


class TakeOverPages:
    """The tab, and the websocket between a browser and the page of an actor."""

    def __init__(self, app: OpenApp):
        self.app = app
        self._client = optional_module("websockets.asyncio.client", PURPOSE, "teleop", "nicegui")
        self._errors = optional_module("websockets.exceptions", PURPOSE, "teleop", "nicegui")
        sockets = optional_module("starlette.websockets", PURPOSE, "teleop", "nicegui")
        self._gone: type[Exception] = sockets.WebSocketDisconnect
        self._add_cockpit = cockpit(app.ui)
        app.page("/take-over", "runs", self.show)
        app.socket("/take-over/drive", self.join)

    def show(self, page: PageContext) -> None:
        """The tab of the run whose id is in the address."""
        run = self.app.runs.runs.get(page.query("id"))
        if run is None:
            page.text(page.word("run.unknown"), "p", "hilt-empty")
            return
        with page.ui.element("div").classes("hilt-row"):
            page.heading(run.name)
            add_tabs(page, run, page.query("actor") or "*")
        element = self._add_cockpit()
        element.props["path"] = f"/take-over/drive?{urlencode({'id': run.id, 'actor': page.query('actor')})}"
        element.props["words"], element.props["watch"] = take_over_words(page.word), self.app.view

    async def join(self, browser: WebSocket) -> None:
        """Passes on what browser and page say to each other, until one of them ends."""
        await browser.accept()
        run = self.app.runs.runs.get(browser.query_params.get("id", ""))
        pages = [] if run is None else await asyncio.to_thread(operator_pages, run.path)
        wanted = browser.query_params.get("actor", "")
        found = next((page for page in pages if wanted in ("", page.actor)), None)
        code, reason = AWAY, ""
        if found is not None:
            with contextlib.suppress(OSError, asyncio.TimeoutError, self._errors.WebSocketException):
                async with await self._connect(found) as page:
                    code, reason = await self._pass_on(browser, page)
        with contextlib.suppress(RuntimeError, self._gone):  # the browser has closed it already
            await browser.close(code, reason)

    async def _connect(self, page: OperatorPage) -> Any:
        """A connection to an actor's page, as a browser that was opened at its address makes one."""
        place = urlsplit(page.url)
        token = parse_qs(place.query).get("token", [""])[0]
        address = place.hostname or "", place.port or 0
        # a socket of our own, as no proxy of this user's settings has a way to this machine
        link = await asyncio.to_thread(socket.create_connection, address, CONNECT_TIMEOUT_S)
        return self._client.connect(
            f"ws://{place.netloc}/drive",
            origin=f"http://{place.netloc}",
            additional_headers={"Cookie": f"{cookie_name(token)}={token}"} if token else {},
            open_timeout=CONNECT_TIMEOUT_S,
            close_timeout=CONNECT_TIMEOUT_S,
            max_size=MAX_MESSAGE_BYTES,
            compression=None,
            sock=link,
        )

    async def _pass_on(self, browser: Any, page: Any) -> tuple[int, str]:
        """Returns the code and the reason with which the browser's side is to be closed."""
        ways = [asyncio.create_task(way) for way in (self._to_page(browser, page), _to_browser(page, browser))]
        done, open_ways = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in open_ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        if ways[0] in done and isinstance(ways[0].exception(), ValueError):
            return 1008, "this is not a message of the page."
        return (page.close_code, page.close_reason or "") if page.close_code in PASSED_ON else (AWAY, "")

    async def _to_page(self, browser: Any, page: Any) -> None:
        async for text in browser.iter_text():
            passed = watching(text) if self.app.view else text
            if passed is not None:
                await page.send(passed)


async def _to_browser(page: Any, browser: Any) -> None:
    async for message in page:
        await browser.send_bytes(message)


def watching(text: str) -> str | None:
    """What goes to an actor's page of a message of somebody who may only watch: that pictures were drawn, and a name
    of their own that no driver has. What they press or hold does not."""
    message = json.loads(text)
    if not isinstance(message, dict) or "event" in message:
        return None
    if "viewer" in message:
        return json.dumps({"viewer": secrets.token_hex(16)})
    return json.dumps({"sent": float(message.get("sent", 0.0)), "seen": int(message.get("seen", 0)), **STILL})


def take_over_words(word: Words) -> dict[str, str]:
    """The texts of page.js in the language of the page; English ones are in that file."""
    return {} if word.language == "en" else dict(TAKE_OVER_WORDS)


def add_tabs(page: PageContext, run: RunSummary, current: str = "") -> None:
    """The tabs of a run, kept up to date: the overview, and one for each operator's page that is open now. `current`:
    the actor whose tab this is, ``*`` for any; it stays while that actor is gone."""
    with page.ui.element("nav").classes("hilt-tabs").props(f'aria-label="{page.word("tab.label")}"') as place:
        pass
    seen: dict[str, Any] = {}

    def refresh() -> None:
        names = [found.actor for found in operator_pages(run.path)]
        shown = sorted({*names, *([current] if current not in ("", "*") else [])}) or (["*"] if current else [])
        if seen.get("tabs") == shown:
            return
        seen["tabs"] = shown
        place.clear()
        with place:
            if shown:
                _tab(page, f"/run?id={run.id}", page.word("tab.overview"), not current)
            for name in shown:
                here = current == name or (current == "*" and name == shown[0])
                text = page.word("tab.take_over") + (f": {name}" if len(shown) > 1 else "")
                query = {"id": run.id, **({"actor": name} if name != "*" else {})}
                _tab(page, f"/take-over?{urlencode(query)}", text, here)

    refresh()
    page.ui.timer(2.0, refresh)


def _tab(page: PageContext, path: str, text: str, is_current: bool) -> None:
    link = page.ui.link(target=path).classes("hilt-tab")
    if is_current:
        link.props('aria-current="page"')
    with link:
        page.text(text, "span")
