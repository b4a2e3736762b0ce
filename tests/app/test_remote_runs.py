"""Runs on another machine: followed from a real `hilt open`, with its token or its password, and while it is silent."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hilt.cli
from hilt.app.remote_runs import RemoteRuns, check_address
from hilt.app.run_commands import commands_of
from hilt.app.run_library import RunLibrary
from hilt.core.errors import ConfigError
from hilt.observe.metrics import Metrics, read_metrics
from hilt.replay.storage.lock import WriterLock
from tests.app.test_open_app import serving
from tests.app.test_run_library import make_run


def looked(library: RunLibrary, remote: RemoteRuns) -> Any:
    remote.look()
    library.look()
    return next(iter(library.runs.values()), None)


def test_remote_run_is_followed_and_shown_as_silent_when_the_machine_is(tmp_path: Path):
    run = make_run(tmp_path / "there" / "pick", 30)
    with WriterLock(run), serving(tmp_path / "there") as served:
        remote = RemoteRuns(served.base, served.token)
        library = RunLibrary([], remotes=[remote])
        shown = looked(library, remote)
        for _ in range(1200):  # the other one looks for its runs when it starts
            if shown is not None:
                break
            threading.Event().wait(0.1)
            shown = looked(library, remote)
        assert not library.errors and shown.name == f"127.0.0.1:{served.port}: pick" and shown.remote == served.base
        assert (shown.recipe, shown.task, shown.updates) == ("tabletop_button", "tabletop/button", 290)
        assert shown.state == "learning" and shown.writer, "a process is at work there, and none here"
        assert commands_of(shown) == [] and shown.path != run
        assert read_metrics(shown.path) == read_metrics(run)
        with Metrics(run) as metrics:
            metrics.write("update", {"critic_loss": 0.5}, update=999, step=2000)
        assert looked(library, remote).updates == 999
        assert read_metrics(shown.path) == read_metrics(run), "what was appended, and nothing twice"
        wrong = RemoteRuns(served.base, "another-token")
        wrong.look()
        assert "the token or password is wrong" in wrong.problem and "403" in wrong.problem and not wrong.found
    shown = looked(library, remote)
    assert shown.state == "unreachable" and "does not answer" in shown.why and shown.updates == 999
    assert "does not answer" in library.errors[served.base]


def test_remote_run_behind_a_password(tmp_path: Path):
    make_run(tmp_path / "there" / "pick")
    file = tmp_path / "password"
    file.write_text("correct horse\n")
    file.chmod(0o600)
    with serving(tmp_path / "there", "--password-file", str(file)) as served:
        remote = RemoteRuns(served.base, "correct horse")
        for _ in range(1200):
            remote.look()
            if remote.found:
                break
            threading.Event().wait(0.1)
        assert [run["name"] for run in remote.found.values()] == ["pick"] and not remote.problem
        wrong = RemoteRuns(served.base, "wrong horse")
        wrong.look()
        assert "the token or password is wrong" in wrong.problem and "401" in wrong.problem


class Hostile(http.server.BaseHTTPRequestHandler):
    answer: bytes = b""
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hostile() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (json.dumps([{"id": "../../../etc"}]), 200, "a run is called '../../../etc'"),
        ("<html>", 200, "this is no page of hilt open"),
        ("[1]", 200, "this is no page of hilt open"),
        ("", 302, "it answered with status 302"),
    ],
)
def test_remote_that_is_something_else_is_named(hostile: str, answer: str, status: int, why: str, monkeypatch: Any):
    monkeypatch.setattr(Hostile, "answer", answer.encode())
    monkeypatch.setattr(Hostile, "status", status)
    remote = RemoteRuns(hostile, "token")
    remote.look()
    assert why in remote.problem and not remote.found


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://10.0.0.7:8642", "everybody on the way could read the token"),
        ("https://host:8642/?token=x", "leave the token out of the address"),
        ("https://host:8642/runs", "expected https://HOST:PORT"),
        ("https://", "expected https://HOST:PORT"),
    ],
)
def test_remote_address_is_checked_before_a_key_is_asked_for(address: str, why: str):
    with pytest.raises(ConfigError, match=why):
        check_address(address)
    result = CliRunner().invoke(hilt.cli.app, ["open", address, "--no-browser"])
    assert result.exit_code == 1 and why in result.stderr.replace("\n", " ")


def test_remote_address_is_that_of_the_page():
    assert check_address("https://host:8642/") == "https://host:8642"
    assert check_address("http://localhost:9000") == "http://localhost:9000"
