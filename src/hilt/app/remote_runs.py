"""Runs on another machine: what its `hilt open` shows of them, followed into a folder of this machine, read-only."""

from __future__ import annotations

import json
import re
import ssl
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hilt.core.errors import ConfigError, HiltError
from hilt.core.files import replacing
from hilt.core.web import cookie_name, is_loopback
from hilt.observe.metrics import FILE as METRICS
from hilt.runs.folder import CONFIG, RUN_FILE

if TYPE_CHECKING:
    from fastapi import Request, Response

    from hilt.app.open_app import OpenApp
    from hilt.app.run_library import RunSummary

LIST_PATH, FILE_PATH, SIGN_IN_PATH = "/api/runs", "/api/run-file", "/sign-in"
FOLLOWED = (RUN_FILE, CONFIG, METRICS)
"""Files of a run that are followed; the metrics grow, the others are small"""
SHOWN = ("state", "why", "reason", "writer", "success", "low", "high", "episodes", "split", "last", "disk")
"""What the other machine knows better than the files do: whether a process is at work, evaluations, sizes"""
TIMEOUT_S, POLL_INTERVAL_S, PAUSE_S = 10.0, 2.0, 5.0
"""Of a request, between two looks, and after one that failed"""
MAX_CHUNK, MAX_BYTES, MAX_RUNS = 4 << 20, 256 << 20, 1000
"""Bytes of one answer, of all that is followed of one run, and the number of runs"""


def is_address(text: str) -> bool:
    """Whether an argument of `hilt open` is the address of another machine."""
    return text.startswith(("http://", "https://"))


def check_address(text: str) -> str:
    """The address of a page of `hilt open`, without its path."""
    parts = urllib.parse.urlsplit(text)
    if parts.query or parts.username:
        raise ConfigError(
            f"{parts.scheme}://{parts.hostname}: leave the token out of the address, where the shell's history keeps "
            "it: it is asked for, or read from a file (--remote-key FILE)."
        )
    if not parts.hostname or parts.path not in ("", "/"):
        raise ConfigError(f"{text}: expected https://HOST:PORT, the address of hilt open on another machine.")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{text}: everybody on the way could read the token: give an address with https, or one of this machine "
            "that is the end of an SSH tunnel (ssh -L 9000:localhost:8642 HOST, then http://localhost:9000)."
        )
    return f"{parts.scheme}://{parts.netloc}"


class RemoteRuns:
    """The runs that one address shows. A thread follows them as long as it is entered."""

    def __init__(self, address: str, key: str):
        """`key`: the token or the password of the page there."""
        self.address, self._key = check_address(address), key
        self.problem = ""
        """Why it does not answer now"""
        self.found: dict[Path, dict[str, Any]] = {}
        """Folders that hold the followed files of a run, and what the other machine shows of it"""
        self._cookie = f"{cookie_name(key)}={key}" if re.fullmatch(r"[\w-]+", key) else ""
        self._folder = tempfile.TemporaryDirectory(prefix="hilt-remote-")
        self._over = threading.Event()
        self._opener = urllib.request.build_opener(
            _NoRedirection, urllib.request.HTTPSHandler(context=ssl.create_default_context())
        )

    def __enter__(self) -> RemoteRuns:
        self._thread = threading.Thread(target=self._follow, name="hilt-remote", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(TIMEOUT_S + 1)
        self._folder.cleanup()

    def _follow(self) -> None:
        while not self._over.is_set():
            self.look()
            self._over.wait(PAUSE_S if self.problem else POLL_INTERVAL_S)

    def look(self) -> None:
        """Takes over what is new there; `problem` has why that failed."""
        try:
            listed = json.loads(self._ask(LIST_PATH).decode())
            found = {}
            for run in listed[:MAX_RUNS]:
                if not re.fullmatch(r"[0-9a-f]{12}", run["id"]):
                    raise ValueError(f"a run is called {run['id']!r}")
                folder = Path(self._folder.name) / run["id"]
                folder.mkdir(exist_ok=True)
                for name in FOLLOWED:
                    self._take(run["id"], folder / name)
                found[folder] = {name: run[name] for name in (*SHOWN, "name")}
            self.found, self.problem = found, ""
        except urllib.error.HTTPError as error:
            self.problem = self._refused(error.code)
        except (OSError, HTTPException, HiltError) as error:
            self.problem = f"{self.address} does not answer ({getattr(error, 'reason', None) or error})."
        except (ValueError, KeyError, TypeError) as error:
            self.problem = f"{self.address}: this is no page of hilt open, or one of another version ({error})."

    def _refused(self, code: int) -> str:
        if code in (401, 403):
            return f"{self.address}: the token or password is wrong, or the page was started anew (status {code})."
        return f"{self.address}: it answered with status {code}; expected a page of hilt open."

    def _take(self, run: str, file: Path) -> None:
        """Follows one file: what was appended to the metrics, and the others as a whole when they have changed."""
        here = file.stat().st_size if file.exists() else 0
        grows = file.name == METRICS
        while not self._over.is_set():
            query = urllib.parse.urlencode({"run": run, "file": file.name, "from": here if grows else 0})
            data, there = self._part(f"{FILE_PATH}?{query}")
            if not grows:
                if data and (not file.exists() or file.read_bytes() != data):
                    with replacing(file, durable=False) as beside:
                        beside.write_bytes(data)
                return
            if there < here:  # another file, such as that of a run that was made anew
                file.unlink()
                here = 0
                continue
            if data and here + len(data) <= MAX_BYTES:
                with file.open("ab") as out:
                    out.write(data)
                here += len(data)
            if not data or here >= there:
                return

    def _part(self, path: str) -> tuple[bytes, int]:
        with self._open(path) as answer:
            return answer.read(MAX_CHUNK), int(answer.headers["X-Size"])

    def _ask(self, path: str) -> bytes:
        with self._open(path) as answer:
            return bytes(answer.read(MAX_CHUNK))

    def _open(self, path: str) -> Any:
        try:
            return self._request(path)
        except urllib.error.HTTPError as error:
            if error.code != 401:  # the answer of a page with a password
                raise
            self._sign_in()
            return self._request(path)

    def _request(self, path: str, data: bytes | None = None) -> Any:
        headers = {"Cookie": self._cookie} | ({"Origin": self.address} if data is not None else {})
        return self._opener.open(urllib.request.Request(self.address + path, data, headers), timeout=TIMEOUT_S)

    def _sign_in(self) -> None:
        """Gives the password, and keeps the cookie of the session."""
        try:
            self._request(SIGN_IN_PATH, urllib.parse.urlencode({"password": self._key}).encode()).close()
        except urllib.error.HTTPError as error:
            if error.code != 303:
                raise
            self._cookie = (error.headers["Set-Cookie"] or "").partition(";")[0]


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """The key is given to the address that was named, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def add_routes(app: OpenApp, responses: ModuleType) -> None:
    """Adds the addresses that a `hilt open` on another machine asks for, behind the same guard as all others."""

    async def runs(request: Request) -> Response:
        shown = [{"id": run.id, "name": run.name, **{name: getattr(run, name) for name in SHOWN}} for run in own()]
        return responses.JSONResponse(shown)

    async def file(request: Request) -> Response:
        query = request.query_params
        run, name, first = app.runs.runs.get(query.get("run", "")), query.get("file", ""), query.get("from", "0")
        if run is None or run.remote or name not in FOLLOWED or not first.isdecimal():
            return responses.PlainTextResponse("no such file", 404)
        data, size = read_part(run.path / name, int(first))
        return responses.Response(data, media_type="application/octet-stream", headers={"X-Size": str(size)})

    def own() -> list[RunSummary]:
        return [run for run in app.runs.runs.values() if not run.remote]

    for path, handler in ((LIST_PATH, runs), (FILE_PATH, file)):
        app.route(path, handler)


def read_part(path: Path, first: int) -> tuple[bytes, int]:
    """A part of a file from this byte on, and the size of the whole file; nothing of one that is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(min(first, size))
            return file.read(MAX_CHUNK), size
    except OSError:
        return b"", 0
