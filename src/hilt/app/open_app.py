"""The web app of ``hilt open``: its server, and the frame of every page with navigation, language, theme and help."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.app.episodes.episode_shelf import EpisodeShelf
from hilt.app.remote_runs import RemoteRuns
from hilt.app.run_commands import CommandRunner
from hilt.app.run_library import RunLibrary, run_folders
from hilt.app.sign_in import LANGUAGE_COOKIE, SignIn, TokenPage, words_of
from hilt.app.words import LANGUAGES, Words
from hilt.core.errors import ConfigError, optional_module
from hilt.core.web import PAGE_SERVER, PageGuard, check_tls_files, cookie_name, is_loopback, page_address

if TYPE_CHECKING:
    from fastapi import Request, Response, WebSocket
    from nicegui.element import Element

PARTS = (
    "hilt.app.run_pages",
    "hilt.app.episodes.episode_pages",
    "hilt.app.check_page",
    "hilt.app.classifiers.classifier_pages",
    "hilt.app.value_models.value_pages",
)
"""Modules whose ``add_pages(app)`` adds to the app, in the order of the navigation"""
THEMES = ("auto", "light", "dark")
THEME_COOKIE = "hilt-theme"
HERE = Path(__file__).parent
PURPOSE = "hilt open"


@dataclass(frozen=True)
class Section:
    """An entry of the navigation; its name is the word ``nav.NAME`` of the catalog."""

    name: str
    path: str
    icon: str
    """Of Material Icons"""


@dataclass
class PageContext:
    """What a page needs while it is built."""

    app: OpenApp
    ui: Any
    """NiceGUI's"""
    request: Any
    word: Words
    keys: list[tuple[str, str]] = field(default_factory=list)
    """Keys of this page for the help, each with the key of its text in the catalog"""

    def query(self, name: str, default: str = "") -> str:
        """A value of the address."""
        return str(self.request.query_params.get(name, default))

    def queries(self, name: str) -> list[str]:
        """All values of this name in the address."""
        return [str(value) for value in self.request.query_params.getlist(name)]

    def heading(self, text: str, level: int = 1) -> Element:
        """A heading; its text is never HTML."""
        return self.text(text, f"h{level}")

    def text(self, text: str, tag: str = "p", classes: str = "") -> Element:
        """An element of HTML with a text in it, which is never HTML itself."""
        label = self.ui.label(text)
        label.tag = tag
        return label.classes(classes) if classes else label


class OpenApp:
    """The app, made of its parts. Everything of it lies behind `hilt.core.web.PageGuard`."""

    def __init__(self, paths: Sequence[Path], view: bool = False, remotes: Sequence[RemoteRuns] = ()):
        """`paths`: runs, logs, datasets, or folders of them. `view`: nothing can be changed or started. `remotes`:
        other machines whose runs are shown too."""
        self.paths, self.view = list(paths), view
        self.shelf = EpisodeShelf(self.paths)
        self._opening = threading.Thread(target=self.shelf.open_only_one, name="hilt-open-start", daemon=True)
        self._opening.start()  # the data are read while the libraries below are imported
        self.ui = optional_module("nicegui", PURPOSE, "teleop").ui
        self._routing = optional_module("starlette.routing", PURPOSE, "teleop", "nicegui")
        self.server = optional_module("fastapi", PURPOSE, "teleop").FastAPI(openapi_url=None)
        self.sections: list[Section] = []
        self.runs = RunLibrary(self.paths, remotes=remotes)
        self.commands = CommandRunner()
        for part in PARTS:
            importlib.import_module(part).add_pages(self)
        look = {"title": "Hilt", "favicon": "🦾", "tailwind": False, "show_welcome_message": False, "dark": None}
        self.ui.run_with(self.server, **look, binding_refresh_interval=None, reconnect_timeout=30)
        optional_module("nicegui", PURPOSE, "teleop").app.exception_handlers[404] = self._no_such_page

    def close(self) -> None:
        """Waits a moment for the thread that opens the data."""
        self._opening.join(1.0)

    async def _no_such_page(self, request: Any, error: Exception) -> Any:
        """The answer to an unknown address: a page with the navigation, or for what is no page a line."""
        responses = optional_module("starlette.responses", PURPOSE, "teleop", "nicegui")
        if request.method != "GET" or request.url.path.startswith(("/_nicegui", "/api/")):
            return responses.PlainTextResponse("there is no such address", 404)
        client = optional_module("nicegui.client", PURPOSE, "teleop").Client(self.ui.page(""), request=request)
        with client, framed(self, request, "") as page, self.ui.element("div").classes("hilt-empty"):
            page.heading(page.word("frame.no_page"))
            page.text(page.word("frame.no_page_hint"))
            with self.ui.link(target="/").classes("hilt-button"):
                page.text(page.word("nav.runs"), "span")
        return client.build_response(request, 404)

    def words_of(self, request: Request) -> Words:
        """The words of the language that a request asks for."""
        return words_of(request)

    def add_section(self, section: Section) -> None:
        """Adds an entry to the navigation."""
        self.sections.append(section)

    def page(self, path: str, section: str, build: Callable[[PageContext], Awaitable[None] | None]) -> None:
        """Adds a page at this path. `build` is called for every visit, within the frame of the app."""
        request_type = optional_module("fastapi", PURPOSE, "teleop").Request

        async def show(request: Request) -> None:
            with framed(self, request, section) as page:
                made = build(page)
                if inspect.isawaitable(made):
                    await made

        show.__annotations__ = {"request": request_type}
        self.ui.page(path)(show)

    def route(
        self, path: str, handler: Callable[[Request], Awaitable[Response]], methods: Sequence[str] = ("GET",)
    ) -> None:
        """Adds a route: `handler` takes a request of starlette and returns a response."""
        self.server.router.routes.append(self._routing.Route(path, handler, methods=list(methods)))

    def socket(self, path: str, handler: Callable[[WebSocket], Awaitable[None]]) -> None:
        """Adds a websocket: `handler` takes one of starlette's."""
        self.server.router.routes.append(self._routing.WebSocketRoute(path, handler))


@contextlib.contextmanager
def framed(app: OpenApp, request: Request, section: str) -> Iterator[PageContext]:
    """The frame of a page, within which its content is built."""
    ui = app.ui
    word = app.words_of(request)
    theme = request.cookies.get(THEME_COOKIE, "auto")
    theme = theme if theme in THEMES else "auto"
    page = PageContext(app, ui, request, word)
    ui.add_css((HERE / "app.css").read_text())
    ui.add_body_html(f"<script>{(HERE / 'app.js').read_text()}</script>")
    ui.run_javascript(f"document.documentElement.lang = {json.dumps(word.language)}")
    ui.run_javascript(f"hiltLost({json.dumps([word('frame.lost'), word('frame.lost_hint')])})")
    ui.dark_mode({"auto": None, "light": False, "dark": True}[theme])
    ui.element("a").props('href="#content"').classes("hilt-skip").add_slot("default", word("frame.skip"))
    with ui.element("header").classes("hilt-head"):
        with ui.link(target="/").classes("hilt-brand"):
            page.text("Hilt", "span")
        with ui.element("nav").props(f'aria-label="{word("nav.label")}"'):
            for one in app.sections:
                link = ui.link(target=one.path).classes("hilt-nav")
                if one.name == section:
                    link.props('aria-current="page"')
                with link:
                    ui.icon(one.icon).props('aria-hidden="true"')
                    page.text(word(f"nav.{one.name}"), "span")
        if app.view:
            page.text(word("frame.view"), "span", "hilt-chip")
        _frame_buttons(page, theme)
    with ui.element("main").props('id="content" tabindex="-1"').classes("hilt-main"):
        yield page
    _help(page)


def _frame_buttons(page: PageContext, theme: str) -> None:
    ui, word, language = page.ui, page.word, page.word("frame.language")
    with ui.element("div").classes("hilt-tools"):
        for code, name in LANGUAGES.items():
            if code != word.language:
                button = _button(page, "", name, f"{language}: {name}")
                button.on("click", js_handler=_choice(LANGUAGE_COOKIE, code)).classes("hilt-language")
        icon = {"auto": "brightness_auto", "light": "light_mode", "dark": "dark_mode"}[theme]
        label = word("frame.theme", theme=word(f"theme.{theme}"))
        handler = _choice(THEME_COOKIE, f"' + hiltNextTheme('{theme}') + '")
        _button(page, icon, "", label).on("click", js_handler=handler).classes("hilt-theme")
        _button(page, "keyboard", "", word("frame.help")).on("click", js_handler="() => hiltHelp()")


def _button(page: PageContext, icon: str, text: str, label: str) -> Any:
    button = page.ui.element("button").props(f'type="button" aria-label="{label}" title="{label}"')
    with button:
        if icon:
            page.ui.icon(icon).props('aria-hidden="true"')
        if text:
            page.text(text, "span")
    return button.classes("hilt-tool")


def _choice(cookie: str, value: str) -> str:
    """What the browser does to remember a choice: no request changes anything on the server."""
    kept = f"{cookie}={value};path=/;samesite=strict;max-age=31536000"
    return f"() => {{ document.cookie = '{kept}'; location.reload(); }}"


def _help(page: PageContext) -> None:
    keys = [("?", "keys.help"), ("g r", "keys.runs"), ("/", "keys.filter"), *page.keys]
    with page.ui.element("dialog").classes("hilt-help").props(f'tabindex="-1" aria-label="{page.word("frame.help")}"'):
        page.heading(page.word("frame.help"), 2)
        with page.ui.element("dl"):
            for key, text in keys:
                page.text(key, "dt")
                page.text(page.word(text), "dd")
        close = page.ui.element("button").props('type="button"').classes("hilt-button")
        with close:
            page.text(page.word("frame.close"), "span")
        close.on("click", js_handler="() => hiltHelp()")


@dataclass(frozen=True)
class Served:
    """Where the app is served, and who may open it."""

    host: str
    certificate: Path | None = None
    key: Path | None = None
    proxy: str = ""
    """The name under which a reverse proxy with TLS serves it"""
    token: str = ""
    password: bool = False
    """Whether people sign in with a password, instead of an address that has the token"""

    @property
    def scheme(self) -> str:
        return "https" if self.certificate or self.proxy else "http"

    def address(self, listener: socket.socket, path: str = "") -> str:
        """The address to open in the browser. `path`: of its first page, without the leading slash."""
        token = "" if self.password else self.token
        if self.proxy:
            return f"https://{self.proxy}/{path}{f'?token={token}' if token else ''}"
        return page_address(self.host, listener.getsockname()[1], token, self.scheme, path)


def served(
    host: str, certificate: Path | None = None, key: Path | None = None, proxy: str = "", password: bool = False
) -> Served:
    """Checks where the app may be served: beyond this machine only with TLS. The token is made anew each time; on this
    machine it keeps other users out. `password`: people sign in, and the token is that of their session."""
    check_tls_files(certificate, key)
    if not is_loopback(host) and certificate is None and not proxy:
        raise ConfigError(
            f"host {host} is reached from other machines, where everybody on the way could read the token or the "
            "password and act with it: give TLS with --certificate FILE --key FILE, or leave out --host and let a "
            "reverse proxy with TLS forward to this machine (--proxy NAME)."
        )
    return Served(host, certificate, key, proxy, secrets.token_urlsafe(16), password)


def serve(app: OpenApp, where: Served, listener: socket.socket, password: str = "") -> None:
    """Serves until the process is asked to end."""
    uvicorn = optional_module("uvicorn", PURPOSE, "teleop")
    secure, names = where.scheme == "https", [where.proxy] if where.proxy else []
    session = (cookie_name(where.token), where.token, secure)
    strangers = SignIn(password, *session) if where.password else TokenPage()
    guard = PageGuard(app.server, where.host, where.token, names, secure, strangers)
    tls = {"ssl_certfile": where.certificate, "ssl_keyfile": where.key} if where.certificate else {}
    config = uvicorn.Config(guard, server_header=False, **PAGE_SERVER, **tls)
    gc.freeze()
    gc.collect()  # counts what is not frozen: a quarter of that must be new before it looks through everything again
    with app.runs, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    app.close()


def first_page(paths: Sequence[Path]) -> str:
    """The path of the page to open first: the episodes if there is data and no run, else the runs."""
    if any(next(run_folders(path), None) is not None for path in paths):
        return ""
    return "episodes" if EpisodeShelf(paths).listed() else ""
