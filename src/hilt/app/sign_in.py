"""The password of `hilt open`: read from a file or asked for, kept as a salted hash alone, and the page on which it is
given."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import hmac
import html
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

from hilt.app.words import Words, language_of
from hilt.core.errors import ConfigError, optional_module

if TYPE_CHECKING:
    from fastapi import Request

MIN_LENGTH, MAX_LENGTH = 8, 1024
"""Of a password"""
MAX_TRIES, PAUSE_S = 5, 60.0
"""Wrong tries in a row from one address, and the seconds for which it is refused then"""
MAX_ADDRESSES = 1024
"""Addresses whose tries are counted: those that tried last"""
MAX_BODY = 8192
PATH = "/sign-in"
LANGUAGE_COOKIE = "hilt-language"
STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --panel: #fff; --line: #dfe3e9; --text: #1b2230; --accent: #2f6fde; --on: #fff; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f131a; --panel: #171d26; --line: #2b3442; --text: #e6eaf1; --accent: #7fabff; --on: #0b1424;
  --bad: #ff8f86; } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; }
form, section { box-sizing: border-box; width: min(360px, calc(100vw - 32px)); display: grid; gap: 14px; padding: 28px; background: var(--panel);
  border: 1px solid var(--line); border-radius: 12px; }
h1 { font-size: 20px; margin: 0; } p { margin: 0; } form p { color: var(--bad); } label { display: grid; gap: 6px; }
input, button { font: inherit; color: inherit; padding: 9px 12px; border: 1px solid var(--line); border-radius: 8px; background: var(--ground); }
button { background: var(--accent); color: var(--on); border-color: var(--accent); font-weight: 600; cursor: pointer; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
"""  # noqa: E501


def read_password(file: str) -> str:
    """The password in a file, or as it is typed, if it is long enough."""
    password = read_secret(file, "--password-file", "Password for the page: ")
    if file == "-" and getpass.getpass("Once more: ") != password:
        raise ConfigError("--password-file -: the two passwords differ; start again.")
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise ConfigError(f"the password has {len(password)} characters; expected {MIN_LENGTH} to {MAX_LENGTH}.")
    return password


def read_secret(file: str, option: str, prompt: str) -> str:
    """The first line of a file that its owner alone can read; ``-`` asks for it."""
    if file == "-":
        try:
            return getpass.getpass(prompt)
        except EOFError:
            raise ConfigError(f"{option}: there is no terminal to ask for it; give a file.") from None
    path = Path(file)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path}: other users of this machine can read the secret in it; run: chmod 600 {path}")
        return (path.read_text().splitlines() or [""])[0]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{option} {path}: {why}; expected a file with the secret in its first line.") from None


class SignIn:
    """An ASGI application for those who have no session: shows the page, and takes the password. A session is a cookie
    that this process alone knows, so that one of another process, or of an earlier start, is worth nothing."""

    def __init__(
        self, password: str, cookie: str, session: str, secure: bool, now: Callable[[], float] = time.monotonic
    ):
        self._salt = secrets.token_bytes(16)
        self._hash = _hashed(password, self._salt)
        self._cookie, self._session, self._secure, self._now = cookie, session, secure, now
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._one = asyncio.Lock()  # a hash takes memory and time on purpose: one at a time
        self._responses = optional_module("starlette.responses", "hilt open", "teleop", "nicegui")
        self._requests = optional_module("starlette.requests", "hilt open", "teleop", "nicegui")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = self._requests.Request(scope, receive)
        if scope["method"] == "POST" and scope["path"] == PATH:
            response = await self._answer(request)
        else:
            asked = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            response = self._page(request, asked if scope["method"] == "GET" else "/", "", 401)
        await response(scope, receive, send)

    async def _answer(self, request: Any) -> Any:
        address = request.client.host if request.client else ""
        given = await self._form(request)
        target = _own(given.get("next", ["/"])[0])
        if self._remaining(address) > 0:
            return self._page(request, target, "sign_in.wait", 429)
        async with self._one:
            password = given.get("password", [""])[0][:MAX_LENGTH]
            found = await asyncio.to_thread(_hashed, password, self._salt)
        # asked again: others may have tried from there while this one waited for its turn
        if self._remaining(address) > 0:
            return self._page(request, target, "sign_in.wait", 429)
        if not hmac.compare_digest(found, self._hash):
            count, _ = self._tries.pop(address, (0, 0.0))
            self._tries[address] = count + 1, self._now()
            while len(self._tries) > MAX_ADDRESSES:
                self._tries.popitem(last=False)
            return self._page(request, target, "sign_in.wrong", 401)
        self._tries.pop(address, None)
        response = self._responses.RedirectResponse(target, 303)
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", secure=self._secure)
        return response

    def _remaining(self, address: str) -> float:
        """Seconds for which an address is refused."""
        count, last = self._tries.get(address, (0, 0.0))
        if count >= MAX_TRIES and self._now() - last >= PAUSE_S:
            self._tries[address] = count, last = MAX_TRIES - 1, last  # one more try
        return PAUSE_S - (self._now() - last) if count >= MAX_TRIES else 0.0

    async def _form(self, request: Any) -> dict[str, list[str]]:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return {}
        return parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)

    def _page(self, request: Any, target: str, problem: str, status: int) -> Any:
        word = words_of(request)
        shown = word(problem, seconds=round(PAUSE_S)) if problem == "sign_in.wait" else word(problem) if problem else ""
        title, label, button = (
            html.escape(word(key)) for key in ("sign_in.title", "sign_in.password", "sign_in.enter")
        )
        form = f"""<form method="post" action="{PATH}"><h1>{title}</h1><p role="alert">{html.escape(shown)}</p>
<input type="hidden" name="next" value="{html.escape(target, quote=True)}">
<label>{label}<input type="password" name="password" autocomplete="current-password" required autofocus></label>
<button>{button}</button></form>"""
        headers = {"Cache-Control": "no-store"} | ({"Retry-After": str(round(PAUSE_S))} if status == 429 else {})
        return self._responses.HTMLResponse(small_page(word, title, form), status, headers)


class TokenPage:
    """An ASGI application for those who have no token: a page that says where they find the address with it."""

    def __init__(self) -> None:
        self._responses = optional_module("starlette.responses", "hilt open", "teleop", "nicegui")
        self._requests = optional_module("starlette.requests", "hilt open", "teleop", "nicegui")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        word = words_of(self._requests.Request(scope, receive))
        title, hint = (html.escape(word(key)) for key in ("token.title", "token.hint"))
        text = small_page(word, title, f"<section><h1>{title}</h1><p>{hint}</p></section>")
        await self._responses.HTMLResponse(text, 403, {"Cache-Control": "no-store"})(scope, receive, send)


def words_of(request: Request) -> Words:
    """The words of the language that a request asks for."""
    return Words(language_of(request.cookies.get(LANGUAGE_COOKIE, ""), request.headers.get("accept-language", "")))


def small_page(word: Words, title: str, content: str) -> str:
    """A page without the app around it; title and content are HTML."""
    return f"""<!doctype html><html lang="{word.language}"><head><meta charset="utf-8"><title>{title} · Hilt</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>
{content}</main></body></html>"""


def _hashed(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=1 << 14, r=8, p=1)


def _own(target: str) -> str:
    """An address as a path of this page, whatever it was."""
    parts = urlsplit(target)
    path = "/" + quote(parts.path.lstrip("/\\"), safe="/%")
    return path + (f"?{quote(parts.query, safe='=&%+;:,/')}" if parts.query and not path.startswith(PATH) else "")
