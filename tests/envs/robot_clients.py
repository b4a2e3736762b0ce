"""A client of the robot server for tests, and the real command in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

HILT = [sys.executable, "-c", "from hilt.cli import main; main()"]


class Refused(Exception):
    """An answer that is not 200: its status and its sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(f"{status}: {sentence}")
        self.status, self.sentence = status, sentence


class Client:
    """POSTs on one connection that stays open; `source` is the address it comes from."""

    def __init__(self, url: str, *, source: str = "127.0.0.1", headers: dict[str, str] | None = None):
        at = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            at.hostname or "", at.port, timeout=60, source_address=(source, 0)
        )
        self._headers = headers or {}

    def post(self, path: str, body: Any = None, *, raw: bytes | None = None, method: str = "POST") -> Any:
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, self._headers)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise Refused(answer.status, data.decode())
        kind = answer.getheader("content-type", "")
        return (
            json.loads(data) if kind == "application/json" else data if kind.endswith("octet-stream") else data.decode()
        )

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def serve_robot(*arguments: str) -> Iterator[list[str]]:
    """``hilt serve-robot`` with these arguments at free ports; its addresses."""
    process = subprocess.Popen([*HILT, "serve-robot", "--port", "0", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    urls = []
    try:
        for line in process.stdout:  # it ends, with an error, when the process does
            if not line.startswith("arm "):
                break
            urls.append(line.split()[-1])
        assert urls, f"it ended with code {process.wait(60)}"
        yield urls
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
