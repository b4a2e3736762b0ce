"""``hilt open`` in a process of its own, for tests of its pages."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests import sessions
from tests.forked import ForkServer

SLOW_IMPORTS = ["hilt.app.open_app", "nicegui", "fastapi", "uvicorn"]


@functools.cache
def fork_server() -> ForkServer:
    """One for all tests of this process. It ends with it."""
    from hilt.app.open_app import PARTS

    return ForkServer([*SLOW_IMPORTS, *PARTS])


@contextlib.contextmanager
def serving(folder: Path, *options: str, state: Path | None = None) -> Iterator[Any]:
    """``hilt open FOLDER OPTION...``, forked from a process that has imported what it needs; ``state`` is where it
    keeps what it remembers. How it is started by itself is tested in test_sign_in.py."""
    environment = os.environ | ({} if state is None else {"XDG_STATE_HOME": str(state)})
    commands: list[int] = []
    process = fork_server().start(["open", folder, "--port", 0, "--no-browser", *options], environment)
    try:
        url = process.stdout.readline().removeprefix("open ").strip()
        port, token = urlsplit(url).port, parse_qs(urlsplit(url).query).get("token", [""])[0]
        base = f"http://127.0.0.1:{port}"
        yield SimpleNamespace(url=url, port=port, token=token, folder=folder, base=base, process=process)
        if process.returncode is None:  # else the test has ended it
            commands = sessions.children(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
    finally:  # where a test failed, it still runs
        commands += [] if process.poll() is not None else sessions.children(process.pid)
        process.kill()
        process.wait()
        for command in commands:  # they have sessions of their own, and go on when the app ends
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command, signal.SIGKILL)
