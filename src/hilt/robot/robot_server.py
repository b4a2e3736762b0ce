"""The robot server: the HTTP routes of HIL-SERL over any arm, with limits that hold for every client.

    with RobotServer("tabletop", {"task": "pick"}, port=5000) as server:
        ...

This process speaks HTTP and renders simulated cameras. The arm moves in a process of its own,
``control.py``: it reads no request and never waits. They exchange lines of JSON on a socket; the state is
in shared memory, so that reading it does not delay the arm.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from hilt.core.children import ChildProcess, run_module
from hilt.core.errors import ConfigError, DeadlineError, HiltError, RequestError, optional_module, suggest
from hilt.core.web import ThreadedServer, own_address
from hilt.envs.rotations import Array
from hilt.robot.backends import Box, backend_class
from hilt.robot.control import START_S, STOP_S, ArmLimits, Board, News, receive_line, send_line
from hilt.robot.request_auth import LET_IN, Lease, RequestAuth, listen, read_tokens
from hilt.robot.routes import COMMANDS, READS, Refusal, parse, read_image, read_scene, read_seconds

_log = logging.getLogger("hilt.envs")

MAX_BODY_BYTES = 1 << 16
MAX_PICTURES = 32  # asked for and not yet rendered
BODY_S = 5.0
ANSWER_S = 60.0
REPORT_WAIT_S = 2.0  # until the server reports what it waits for
STALE_S = 1.0
LOOKS = 50  # of 10 ms each: after a pause of the whole machine, the first state is some milliseconds away
POLL_INTERVAL_S = 0.1  # how often a long request is checked for a client that has gone
ESTOP_ROUTES = {"/estop": "Stopped", "/release_estop": "Released"}
"""They need no lease: whoever may command the arm may stop it"""
OWN_ROUTES = ("/scene", "/image", "/status", *ESTOP_ROUTES)


class RobotServer(ThreadedServer):
    """Serves the arms of one backend: the first at `port`, a second at the next one. Port 0 takes free ones."""

    title, start_s, stop_s = "robot server", START_S, 2 * STOP_S

    def __init__(
        self,
        backend: str = "tabletop",
        options: Mapping[str, Any] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 5000,
        tokens: Sequence[str | os.PathLike[str]] = (),
        limits: ArmLimits | None = None,
    ):
        super().__init__()
        optional_module("uvicorn", "the robot server", "robot")
        self._door = RequestAuth(host, read_tokens(tokens))
        with contextlib.ExitStack() as undo:
            # the port before the arm: a second server, begun by mistake, must not come near the arm of the first
            self._sockets = [undo.enter_context(listen(host, port))]
            self.control = Control(backend, options or {}, limits or ArmLimits())
            undo.callback(self.control.close)
            self._sockets += [
                undo.enter_context(listen(host, port and port + arm)) for arm in range(1, self.control.hello["arms"])
            ]
            undo.pop_all()
        self._pictures = Pictures(backend, options or {})
        shown = own_address() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.urls = [f"http://{shown}:{s.getsockname()[1]}/" for s in self._sockets]

    def close(self) -> None:
        """Ends the control process, with the arms held."""
        for listening in self._sockets:
            listening.close()
        self._pictures.close()
        self.control.close()

    async def serve_until(self, ending: asyncio.Event, ready: Callable[[], None]) -> None:
        from hilt.robot.http_server import web_server  # needs uvicorn

        try:
            await self.control.connect()
            apps = [App(arm, self.control, self._door, self._pictures) for arm in range(len(self._sockets))]
            servers = [web_server(app) for app in apps]
            running = [asyncio.create_task(s.serve(sockets=[at])) for s, at in zip(servers, self._sockets, strict=True)]
            while not all(server.started for server in servers):
                await asyncio.sleep(0.005)
            ready()
            await ending.wait()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)
        finally:
            self.close()


class App:
    """One arm's routes, as an ASGI application."""

    def __init__(self, arm: int, control: Control, door: RequestAuth, pictures: Pictures):
        self._arm, self._control, self._door, self._pictures = arm, control, door, pictures
        self._lease = Lease(arm, control.limits.heartbeat)
        low, high = control.hello["workspaces"][arm]
        self._box: Box = (np.array(low), np.array(high))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        kind, status = "text/plain; charset=utf-8", 200
        try:
            answer = await self._answer(scope, receive)
        except HiltError as error:
            answer, status = str(error), getattr(error, "status", 500)
        if isinstance(answer, dict):
            kind, answer = "application/json", json.dumps(answer)
        elif isinstance(answer, bytes):
            kind = "application/octet-stream"
        # JSON may have half a character
        data = answer if isinstance(answer, bytes) else answer.encode(errors="backslashreplace")
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(data)).encode()),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _answer(self, scope: dict[str, Any], receive: Any) -> Any:
        who, path = self._door.who(scope), scope["path"]
        if path not in READS and path not in COMMANDS and path not in OWN_ROUTES:
            raise Refusal(
                404,
                f"no route {path!r:.60}{suggest(path, [*READS, *COMMANDS, *OWN_ROUTES])} All "
                "are listed in docs/robot.md.",
            )
        if scope["method"] != "POST":
            raise Refusal(405, f"{path}: expected POST, got {scope['method']}.")
        data = await _body(scope, receive)
        scope[LET_IN] = True
        if path in READS:
            return READS[path]((await self._control.news()).states[self._arm])
        if path in COMMANDS:
            return await self._command(path, data, who, receive)
        return await self._own(path, parse(data, path), who)

    async def _command(self, path: str, data: bytes, who: str, receive: Any) -> str:
        command = COMMANDS[path]
        values = command.read(parse(data, path), self._box) if command.read else command.values
        gone = asyncio.ensure_future(_gone(receive))
        await asyncio.sleep(0)  # lets it look
        if gone.done():  # this process stood still meanwhile: what was wanted then is not wanted now
            raise Refusal(408, f"{path}: its client left before it was done.")
        with self._lease.command(who):
            asked = asyncio.ensure_future(self._control.ask(command.do, self._arm, **values))
            try:
                while not (await asyncio.wait({asked}, timeout=POLL_INTERVAL_S))[0]:
                    if gone.done():  # the client of this motion has disconnected
                        await self._control.ask("release", self._arm)
                await asked
            finally:
                gone.cancel()
                asked.cancel()
        return command.reply

    async def _own(self, path: str, body: Any, who: str) -> Any:
        hello, control = self._control.hello, self._control
        if path == "/status":
            return await self._status(read_seconds(body))
        if path in ESTOP_ROUTES:
            await control.ask(path[1:], self._arm)
            _log.warning("%s: %s", who, "the emergency stop is latched" if path == "/estop" else "it is released")
            return ESTOP_ROUTES[path]
        if not hello["simulation"]:
            raise Refusal(404, f"{path}: this backend is no simulation; read its cameras where they are connected.")
        if path == "/scene":
            values = read_scene(body)
            if values["split"] is not None:
                self._lease.take(who)
            return await control.ask("scene", self._arm, **values)
        camera, height, width = read_image(body, hello["cameras"])
        return await self._pictures.take((await control.news()).snapshot, camera, height, width)

    async def _status(self, seconds: float) -> dict[str, Any]:
        hello, news = self._control.hello, await self._control.news()
        return {
            "arm": self._arm,
            "arms": hello["arms"],
            "mode": news.modes[self._arm],
            "controller": self._lease.holder(),
            "time": news.time,
            "workspace": {"low": self._box[0].tolist(), "high": self._box[1].tolist()},
            "cameras": hello["cameras"],
            "realtime": hello["realtime"],
            **asdict(self._control.limits),
            "period": await self._control.ask("period", self._arm, seconds=seconds),
        }


class Control:
    """The control process, as seen from here."""

    def __init__(self, backend: str, options: Mapping[str, Any], limits: ArmLimits):
        self.limits = limits
        self.failure: str | None = None
        """Why the control process is no more: its own traceback."""
        self.held = False
        """Whether it reported at its end that the arms hold; a killed process cannot"""
        self._numbers, self._asked = itertools.count(), dict[int, asyncio.Future[Any]]()
        self._closing = False
        self._line, theirs = socket.socketpair()
        file = Board.create()
        self._board = Board(file)
        command = run_module("hilt.robot.control", str(theirs.fileno()), str(file), str(os.getpid()))
        self._process = ChildProcess(
            command, leaves_signals=False, pass_fds=(theirs.fileno(), file), start_new_session=True
        )
        theirs.close()
        os.close(file)
        try:
            send_line(self._line, {"backend": backend, "options": dict(options), "limits": asdict(limits)})
            if not select.select([self._line], [], [], REPORT_WAIT_S)[0]:
                _log.warning("waiting for the backend %r to tell its first state, for %.0f s at most", backend, START_S)
            self.hello = receive_line(self._line, START_S)
        except BaseException as error:
            self.close()
            if not isinstance(error, (EOFError, OSError)):
                raise  # Ctrl-C
            raise RequestError(f"the control process did not come up ({error!r}): {self._ended()}.") from error
        if "failed" in self.hello:
            self.close()
            if self.hello["failed"]:
                raise ConfigError(self.hello["failed"])
            whole = self.hello["traceback"].strip()
            raise RequestError(f"the backend {backend!r} did not start: {whole.splitlines()[-1]}") from RequestError(
                whole
            )

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._line)
        self._listening = asyncio.create_task(self._listen(reader))

    async def ask(self, do: str, arm: int, **values: Any) -> Any:
        """The control process's answer, with a deadline."""
        self._need()
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": number, "do": do, "arm": arm, **values}).encode() + b"\n")
        try:
            return await asyncio.wait_for(self._asked[number], ANSWER_S)
        except asyncio.TimeoutError:
            raise Refusal(504, f"the control process did not answer {do!r} in {ANSWER_S:.0f} s.") from None
        finally:
            del self._asked[number]

    async def news(self) -> News:
        """The state that was published last. An old one is refused, unless a new
        one comes while this process is awake."""
        age = 0.0
        for _ in range(LOOKS):
            self._need()
            try:
                news = self._board.read(0.1)
            except DeadlineError as error:
                raise Refusal(503, str(error)) from None
            if (age := time.monotonic() - news.time) <= STALE_S:
                return news
            await asyncio.sleep(0.01)
        raise Refusal(503, f"the control process has published no state for {age:.1f} s: its backend hangs.")

    def close(self) -> None:
        """Ends the process, with the arms held: it does so by itself when the line is closed."""
        self._closing = True
        with contextlib.suppress(OSError):  # when it is closed already
            self._line.shutdown(socket.SHUT_RDWR)
        self._process.end(STOP_S)
        self._line.close()

    def _need(self) -> None:
        if self.failure is not None:
            last = self.failure.strip().splitlines()[-1]
            held = (
                "and the arm is held"
                if self.held
                else "and did not report that the arm is held: check it, and use its emergency stop"
            )
            raise Refusal(503, f"the control process has ended, {held}: {last} (the server's log has all of it).")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        traceback = ""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                message = json.loads(line)
                traceback = message.get("traceback", traceback)
                self.held = message.get("held", self.held)
                if "warning" in message:
                    _log.warning("%s", message["warning"])
                asked = self._asked.get(message.get("id"))
                if asked is not None and not asked.done():
                    if "error" in message:
                        asked.set_exception(Refusal(message["status"], message["error"]))
                    else:
                        asked.set_result(message["answer"])
        if self._closing:
            return
        self.failure = traceback or await asyncio.to_thread(self._ended)
        _log.error("the control process has ended:\n%s", self.failure)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(
                    Refusal(503, f"the control process ended meanwhile: {self.failure.strip().splitlines()[-1]}")
                )

    def _ended(self) -> str:
        self._process.ends_within(STOP_S)
        code = self._process.returncode
        return f"it was ended by signal {-code}" if code is not None and code < 0 else f"it ended with code {code}"


class Pictures:
    """Renders simulated cameras in a thread of its own, from what the control process published."""

    def __init__(self, backend: str, options: Mapping[str, Any]):
        self._backend, self._options = backend, options
        self._thread = ThreadPoolExecutor(1, "hilt-pictures")
        self._render: Callable[[Array, str, int, int], Array] | None = None
        self._pending = 0

    async def take(self, snapshot: Array, camera: str, height: int, width: int) -> bytes:
        if self._pending >= MAX_PICTURES:
            raise Refusal(503, f"{self._pending} pictures are asked for already; expected fewer, ask again later.")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._take, snapshot, camera, height, width
            )
        finally:
            self._pending -= 1

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _take(self, snapshot: Array, camera: str, height: int, width: int) -> bytes:
        if self._render is None:
            self._render = backend_class(self._backend).renderer(self._options)
        return self._render(snapshot, camera, height, width).tobytes()


# --- HTTP
# ----------------------------------------------------------------------------------------------------------------------


async def _body(scope: Mapping[str, Any], receive: Any) -> bytes:
    """The request's body: not too long, and not for ever."""
    too_long = Refusal(413, f"expected a body of at most {MAX_BODY_BYTES} bytes.")
    if int(dict(scope["headers"]).get(b"content-length", 0)) > MAX_BODY_BYTES:
        raise too_long

    async def collect() -> bytes:
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
            if len(data) > MAX_BODY_BYTES:
                raise too_long
        return data

    try:
        return await asyncio.wait_for(collect(), BODY_S)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the request's body did not come in {BODY_S:.0f} s.") from None


async def _gone(receive: Any) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
