"""The page from which a person drives: a web server in a process of its own, between browsers and the control process.

    control process          this process                       browsers
    Browser.show   ─ frames, newest wins ─►  JPEG  ─ websocket, newest wins ─►  pictures, who is in control, counters
    Browser.read  ◄─ held,   newest wins ──  Wheel ◄─ the whole held state, 20 times a second ── keys, sticks, gamepad
                  ◄─ events, each once ────        ◄─ numbered, sent again until acknowledged ── buttons

The device (`hilt.teleop.browser`) starts it with ``python -m hilt.teleop.page``, and it ends with its parent. What is drawn lies in
page.js, a component of NiceGUI's, and page.css.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgpack  # type: ignore[import-untyped]
import numpy as np
import zmq
import zmq.asyncio

from hilt.core.errors import FormatError, optional_module
from hilt.core.signals import leave_to_parent
from hilt.formats import images
from hilt.robot.request_auth import host_name
from hilt.teleop.devices import EVENTS, KEYS

SEAT_SECONDS = 2.0
"""Seconds of silence after which a driver loses control."""
DRIFT = 2e-3
"""Seconds by which the clocks of a browser and of this machine may part in a second."""
VIEWERS = 32
"""More at a time are refused."""
NAME_S = 10.0
"""Seconds within which a viewer must send its name"""
IN_FLIGHT = 2
"""Messages on their way to a browser: more would only be older when they arrive."""
QUALITY = 95
"""Of the JPEG pictures."""
STILL = {"motion": [0.0] * 6, "gripper": 0, "arm": 0}


class Wheel:
    """The driver, at most one viewer, and the inputs that they hold.

    A driver who vanishes loses the wheel but leaves it *lost*: the arm holds still until a person takes the wheel or gives it
    back to the policy. Times are the monotonic clock's, which this machine's processes share.
    """

    def __init__(self) -> None:
        self.driver: str | None = None
        self.lost = False
        self._heard = 0.0
        self._held: dict[str, Any] = STILL

    def take(self, viewer: str, now: float) -> bool:
        """Whether the viewer drives now: the first one who asks."""
        if self.driver is None:
            self.driver, self.lost, self._heard, self._held = viewer, False, now, STILL
        return self.driver == viewer

    def give(self, viewer: str) -> None:
        """Back to the policy: by the driver, and by anybody when the driver is gone."""
        if self.driver in (None, viewer):
            self.driver, self.lost = None, False

    def hold(self, viewer: str, held: dict[str, Any], at: float) -> None:
        if viewer == self.driver and at >= self._heard:
            self._held, self._heard = held, at

    def check(self, now: float) -> None:
        if self.driver is not None and now - self._heard > SEAT_SECONDS:
            self.driver, self.lost = None, True

    def message(self, now: float) -> dict[str, Any]:
        """For the device, which judges the age itself: this process may be the one that stalls."""
        driving = self.driver is not None
        return {
            "driving": driving,
            "lost": self.lost,
            "at": self._heard if driving else now,
            **(self._held if driving else STILL),
        }


@dataclass
class Viewer:
    """One page in a browser; it keeps its name when its connection breaks."""

    name: str
    done: int = 0  # number of the last event that was handled
    sent: int = 0  # messages sent to it on this connection, and
    seen: int = 0  # how many of them it has drawn
    picture: int = 0  # number of the newest picture it was sent
    echo: tuple[float, float] = (0.0, 0.0)  # its clock in its last message, and ours when that came: for the round trip
    news: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False  # for its acknowledgment, with news untold
    connection: Any = None
    left: float = 0.0  # when it was last connected
    _offset: float = math.inf

    def connect(self, connection: Any) -> None:
        self.connection, self.sent, self.seen, self.picture = connection, 0, 0, 0
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Anew: those of a phone stand still while it sleeps."""
        self._offset = math.inf

    def sent_at(self, theirs: float, now: float) -> float:
        """When a message was sent, in our clock, if the quickest of the last ones took no time: so a backlog shows as old."""
        self._offset = min(now - theirs, self._offset + DRIFT * max(0.0, now - self.echo[1]))
        self.echo = theirs, now
        return theirs + self._offset


class Page:
    """Frames in, pictures out; what viewers hold and press in, readings out."""

    def __init__(self, folder: Path):
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._frames, self._held, self._events = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH))
        self._frames.set(zmq.CONFLATE, 1)  # only the newest lies in the queue
        self._held.set(zmq.CONFLATE, 1)
        for name, link in (("frames", self._frames), ("held", self._held), ("events", self._events)):
            link.set(zmq.LINGER, 500)
            link.connect(f"ipc://{folder}/{name}")
        self.wheel = Wheel()
        self._viewers: dict[str, Viewer] = {}
        self._connections: set[Any] = set()
        self._ghosts: set[asyncio.Task[None]] = set()
        self._shown: dict[str, Any] = {"status": {}, "episode": 0, "arms": 1, "at": 0.0}
        self._pictures: list[tuple[str, bytes]] = []
        self._number = 0

    async def frames(self) -> None:
        """Compresses each frame once, for everybody."""
        await self._press("ready", 0)
        while True:
            shown = msgpack.unpackb(await self._frames.recv())
            pictures = await asyncio.to_thread(compress, shown.pop("images"))
            self._shown, self._pictures, self._number = shown, pictures, self._number + 1
            self._tell()

    async def beat(self, parent: int) -> None:
        """Ten times a second, whatever happens: who drives, to all sides. Returns when the parent is gone."""
        while os.getppid() == parent:
            await self._report()
            self._tell()
            await asyncio.sleep(0.1)

    async def serve(self, connection: Any) -> None:
        """One viewer's websocket, until it closes. The first message is the viewer's name."""
        if len(self._connections) >= VIEWERS:
            await connection.accept()
            await connection.close(
                1013, f"{VIEWERS} viewers are connected, no more are served: close one of the other pages."
            )
            return
        self._connections.add(connection)  # counted from here on, even without a name
        viewer = sender = None
        hurry = asyncio.create_task(_close_later(connection, NAME_S))
        try:
            await connection.accept()
            async for text in connection.iter_text():
                message = json.loads(text)
                if viewer is None:
                    name = str(message["viewer"])[:64]
                    hurry.cancel()
                    viewer = self._viewers.setdefault(name, Viewer(name))
                    if viewer.connection is not None:  # it has come back: the former one is a ghost
                        self._ghosts.add(ghost := asyncio.create_task(_close_later(viewer.connection, 0.0)))
                        ghost.add_done_callback(self._ghosts.discard)
                    viewer.connect(connection)
                    sender = asyncio.create_task(self._send(viewer, connection))
                elif viewer.connection is connection:  # else it has come back on another one, and this one is a ghost
                    await self._receive(viewer, message)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            await connection.close(1008, f"not a message of this page: {error}"[:120])
        finally:
            self._connections.discard(connection)
            hurry.cancel()
            if sender is not None:
                sender.cancel()
            if viewer is not None and viewer.connection is connection:
                viewer.connection, viewer.left = None, time.monotonic()

    async def _receive(self, viewer: Viewer, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if "event" in message:
            await self._handle(viewer, str(message["event"]), int(message["number"]), int(message["episode"]), now)
        else:
            at = viewer.sent_at(float(message["sent"]), now)
            viewer.seen = int(message["seen"])
            self.wheel.hold(viewer.name, checked(message), at)
        if viewer.waits:
            viewer.news.set()
        if viewer.name == self.wheel.driver or "event" in message:
            await self._report()

    async def _handle(self, viewer: Viewer, event: str, number: int, episode: int, now: float) -> None:
        if number <= viewer.done:  # sent again, since the acknowledgment was lost
            return
        viewer.done = number
        if event == "take":
            viewer.compare_clocks()
            self.wheel.take(viewer.name, now)
        elif event == "give":
            self.wheel.give(viewer.name)
        elif event not in EVENTS or event == "toggle":  # which is the device's word for take and give
            raise FormatError(f"event {event!r} is not one that a page has")
        elif event == "stop" or self.wheel.driver in (
            None,
            viewer.name,
        ):  # anybody may stop; the rest is the driver's, if there is one
            await self._press(event, episode)
        self._tell()

    async def _press(self, event: str, episode: int) -> None:
        await self._events.send(msgpack.packb({"event": event, "episode": episode}))

    async def _report(self) -> None:
        now = time.monotonic()
        self.wheel.check(now)
        await self._held.send(msgpack.packb(self.wheel.message(now)))

    def _tell(self) -> None:
        for name, viewer in list(self._viewers.items()):
            viewer.news.set()
            if viewer.connection is None and time.monotonic() - viewer.left > 60:
                del self._viewers[name]

    async def _send(self, viewer: Viewer, connection: Any) -> None:
        """To one viewer, newest wins: one who is slow misses pictures, and never sees old ones."""
        while viewer.connection is connection:
            await viewer.news.wait()
            viewer.news.clear()
            viewer.waits = viewer.sent - viewer.seen >= IN_FLIGHT
            if viewer.waits:
                continue
            pictures = self._pictures if viewer.picture < self._number else []
            viewer.picture = self._number
            viewer.sent += 1
            await connection.send_bytes(self._packed(viewer, pictures))

    def _packed(self, viewer: Viewer, pictures: list[tuple[str, bytes]]) -> bytes:
        """The length of the header in four bytes, the header in JSON, the pictures."""
        now, wheel = time.monotonic(), self.wheel
        header = {
            **self._shown,
            "age": now - self._shown["at"] if self._number else None,
            "echo": viewer.echo[0],
            "kept": now - viewer.echo[1],
            "done": viewer.done,
            "driving": wheel.driver == viewer.name,
            "taken": wheel.driver is not None,
            "lost": wheel.lost,
            "viewers": sum(other.connection is not None for other in self._viewers.values()),
            "pictures": [[name, len(data)] for name, data in pictures],
        }
        text = json.dumps(header).encode()
        return b"".join([len(text).to_bytes(4, "little"), text, *(data for _, data in pictures)])


async def _close_later(connection: Any, seconds: float) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(RuntimeError):  # it is closed already
        await connection.close(1008, "this page sent no name, or is open elsewhere.")


def compress(frames: dict[str, tuple[list[int], bytes]]) -> list[tuple[str, bytes]]:
    return [
        (name, images.encode(np.frombuffer(data, np.uint8).reshape(shape), "jpeg", QUALITY))
        for name, (shape, data) in frames.items()
    ]


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """What a viewer holds, if it is what it should be."""
    motion = [float(value) for value in message["motion"]]
    gripper, arm = message["gripper"], message["arm"]
    if len(motion) != 6 or not all(map(math.isfinite, motion)) or gripper not in (-1, 0, 1) or arm not in (0, 1):
        raise FormatError(f"motion {motion}, gripper {gripper!r}, arm {arm!r}: expected six numbers, -1|0|1 and 0|1")
    return {"motion": [max(-1.0, min(1.0, value)) for value in motion], "gripper": int(gripper), "arm": int(arm)}


class Guard:
    """Around the whole application: HTTP, NiceGUI's socket and ours.

    The Host must be this machine by its address or own name, or a name in somebody's DNS could lead a browser here. The Origin
    must be the Host, or any web page that the person has open could drive the arm. Beyond loopback the token must be there: in
    the address once, which a cookie then replaces.
    """

    def __init__(self, app: Any, host: str, token: str):
        self.app = app  # NiceGUI finds itself by this name
        own = socket.gethostname().lower()
        self._names = {"localhost", host.lower()} | ({own, f"{own}.local"} if token else set())
        self._token, self._cookie = (
            token,
            f"hilt-{token[:6]}",
        )  # a name of its own: other ports of this machine see it too
        self._responses = optional_module("starlette.responses", "The page", "teleop", "nicegui")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if objection := self._objection(scope["type"], headers, given):
            await self._responses.PlainTextResponse(objection, 403)(scope, receive, send)
        elif given and self._token:
            # A page and not a redirection: after a link on another site, a strict cookie would not be sent along with that one.
            response = self._responses.HTMLResponse('<meta http-equiv="refresh" content="0;url=/">')
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, self._framed(send))

    def _objection(self, kind: str, headers: dict[str, str], given: str) -> str:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._known(host):
            return f"Host {host!r} is not this machine: open the address that was printed."
        if kind == "websocket" if origin is None else origin.partition("://")[2] != host:
            return f"Origin {origin!r} is not this page: open the address that was printed."
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        shown = given or cookies.get(self._cookie, "")
        if not hmac.compare_digest(shown.encode(), self._token.encode()) and self._token:
            return "This page needs its token: open the whole address that was printed, with ?token=."
        return ""

    def _known(self, host: str) -> bool:
        try:
            name = host_name(host)
            return name in self._names or ipaddress.ip_address(name).is_loopback or self._token != ""
        except ValueError:
            return False

    @staticmethod
    def _framed(send: Any) -> Any:
        """No other site may show this page inside its own, where a click means something else."""

        async def framed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-frame-options", b"DENY")]}
            await send(message)

        return framed


def application(page: Page) -> Any:
    """NiceGUI with our component in it, and our websocket beside."""
    ui = optional_module("nicegui", "The page", "teleop").ui
    app = optional_module("fastapi", "The page", "teleop").FastAPI(openapi_url=None)
    app.router.routes.append(
        optional_module("starlette.routing", "The page", "teleop", "nicegui").WebSocketRoute("/drive", page.serve)
    )
    here = Path(__file__).parent

    class Cockpit(ui.element, component=here / "page.js"):  # type: ignore[call-arg, name-defined]
        pass

    def index() -> None:
        ui.add_css((here / "page.css").read_text())
        Cockpit().props["keys"] = KEYS

    ui.page("/")(index)
    look = {"title": "Hilt", "dark": True, "favicon": "🦾", "tailwind": False, "show_welcome_message": False}
    ui.run_with(app, **look, binding_refresh_interval=None, reconnect_timeout=60)
    return app


async def run(settings: dict[str, Any]) -> None:
    """Serves on the socket that the parent listens on, until the parent ends it or is gone."""
    uvicorn = optional_module("uvicorn", "The page", "teleop")
    page = Page(Path(settings["folder"]))
    app = Guard(application(page), settings["host"], settings["token"])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, ws_max_size=1 << 20))
    server.capture_signals = contextlib.nullcontext  # they are left to the parent
    listener = socket.socket(fileno=settings["listener"])
    works = [
        asyncio.create_task(work) for work in (server.serve([listener]), page.frames(), page.beat(settings["parent"]))
    ]
    done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(works[0], 3)
    for work in done:
        work.result()  # what failed is raised here


def main() -> None:
    leave_to_parent()
    settings = json.loads(sys.stdin.readline())  # not in the command line, which everybody on this machine can read
    try:
        asyncio.run(run(settings))
    finally:
        if os.getppid() != settings["parent"]:  # the parent process is gone
            shutil.rmtree(settings["folder"], ignore_errors=True)


if __name__ == "__main__":
    main()
