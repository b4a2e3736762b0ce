"""The password of `hilt open`: who gets a session, how often one may try, and where the password is not kept."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from hilt.app.sign_in import MAX_TRIES, PAUSE_S, SignIn, TokenPage, read_password
from hilt.core.errors import ConfigError
from hilt.core.web import PageGuard, cookie_name

PASSWORD, TOKEN = "correct horse", "t0k3n-of-this-start"
HEADERS = {"host": "testserver", "origin": "https://testserver"}


@pytest.fixture
def page() -> Iterator[Any]:
    """A guarded page behind a password, and a clock of its own."""
    clock = SimpleNamespace(now=100.0)

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    sign_in = SignIn(PASSWORD, cookie_name(TOKEN), TOKEN, True, now=lambda: clock.now)
    guard = PageGuard(inside, "testserver", TOKEN, secure=True, sign_in=sign_in)
    client = TestClient(guard, base_url="https://testserver", follow_redirects=False)
    yield SimpleNamespace(client=client, clock=clock, sign_in=sign_in)


def give(page: Any, password: str, target: str = "/", **headers: str) -> Any:
    return page.client.post(
        "/sign-in", content=urlencode({"password": password, "next": target}), headers={**HEADERS, **headers}
    )


def test_password_opens_a_session_with_a_strict_cookie(page: Any):
    asked = page.client.get("/run?id=%22%3E", headers={"accept-language": "zh"})
    assert (
        asked.status_code == 401
        and "登录" in asked.text
        and "密码" in asked.text
        and '"><' not in asked.text[-500:-400]
    )
    assert 'value="/run?id=%22%3E"' in asked.text and asked.headers["x-frame-options"] == "DENY"
    assert asked.headers["referrer-policy"] == "same-origin", "else a browser sends the form with the Origin null"
    wrong = give(page, "wrong horse")
    assert wrong.status_code == 401 and "This is not the password." in wrong.text and "set-cookie" not in wrong.headers
    right = give(page, PASSWORD, "/run?id=1")
    assert right.status_code == 303 and right.headers["location"] == "/run?id=1"
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "secure" in cookie
    assert page.client.get("/").text == "inside"


@pytest.mark.parametrize(
    "target", ["https://evil.example/x", "//evil.example/x", "/\\evil.example/x", "\\\\evil.example"]
)
def test_sign_in_leads_nowhere_else(page: Any, target: str):
    location = give(page, PASSWORD, target).headers["location"]
    assert location.startswith("/") and not location.startswith(("//", "/\\")) and "evil.example/" not in location[:2]


def test_cookie_of_another_start_is_refused(page: Any):
    page.client.cookies.set(cookie_name(TOKEN), "t0k3n-of-another-one")
    assert page.client.get("/").status_code == 401
    page.client.cookies.set(cookie_name("other"), TOKEN)
    assert page.client.get("/").status_code == 401


def test_password_is_refused_after_many_tries_and_later_once_more(page: Any):
    for _ in range(MAX_TRIES):
        assert give(page, "wrong horse").status_code == 401
    blocked = give(page, PASSWORD)
    assert (
        blocked.status_code == 429 and "Too many wrong tries" in blocked.text and blocked.headers["retry-after"] == "60"
    )
    page.clock.now += PAUSE_S + 1
    assert give(page, "wrong horse").status_code == 401
    assert give(page, PASSWORD).status_code == 429, "one try, and no more"
    page.clock.now += PAUSE_S + 1
    assert give(page, PASSWORD).status_code == 303


def test_sign_in_from_another_site_and_a_long_body_are_refused(page: Any):
    other = give(page, PASSWORD, origin="https://evil.example")
    assert other.status_code == 403 and "is not this page" in other.text
    assert give(page, PASSWORD + "x" * 20_000).status_code == 401
    assert page.client.get("/x", headers={"host": "testserver", "origin": "https://testserver"}).status_code == 401


def test_refused_websocket_is_closed_which_a_server_answers_without_a_warning():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def nothing(*_: Any) -> None:
        raise AssertionError("it was not refused")

    headers = [(b"host", b"127.0.0.1"), (b"origin", b"http://127.0.0.1"), (b"cookie", b"hilt-old=old")]
    asyncio.run(
        PageGuard(nothing, "127.0.0.1", TOKEN, sign_in=TokenPage())(
            {"type": "websocket", "headers": headers}, nothing, send
        )
    )
    assert [one["type"] for one in sent] == ["websocket.close"] and "needs its token" in sent[0]["reason"]


def test_password_is_kept_nowhere(page: Any):
    assert PASSWORD not in repr(vars(page.sign_in)) and PASSWORD.encode() not in vars(page.sign_in).values()


def test_password_file_is_read_if_its_owner_alone_can(tmp_path: Path):
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\nmore\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_password(str(file))
    file.chmod(0o600)
    assert read_password(str(file)) == PASSWORD
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 characters; expected 8 to"):
        read_password(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        read_password(str(tmp_path / "nothing"))


def test_open_command_prints_an_address_without_a_token(tmp_path: Path):
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    file.chmod(0o600)
    words = [sys.executable, "-m", "hilt", "open", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen([*words, "--password-file", str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("open ").strip()
        assert "token" not in url
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(f"GET / HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
            assert b"401" in connection.makefile("rb").readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
