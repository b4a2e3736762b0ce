"""The page from which a person drives: a web server in a process of its own, between browsers and the control process.

    control process          this process                       browsers
    Browser.show   ─ frames, newest wins ─►  JPEG  ─ websocket, newest wins ─►  pictures, who is in control, counters
    Browser.read  ◄─ held,   newest wins ──  Wheel ◄─ the whole held state, 20 times a second ── keys, sticks, gamepad
                  ◄─ events, each once ────        ◄─ numbered, sent again until acknowledged ── buttons

The device (`hilt.teleop.browser`) starts it with ``python -m hilt.teleop.page``, and it ends with its parent. What is
drawn lies in page.js, a component of NiceGUI's, and page.css.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import zmq
import zmq.asyncio

from hilt.core.errors import FormatError, optional_module
from hilt.core.signals import leave_to_parent
from hilt.core.web import PAGE_SERVER, PageGuard
from hilt.formats import images
from hilt.teleop.devices import ESTOP, EVENTS, KEYS

if TYPE_CHECKING:
    from fastapi import FastAPI, WebSocket
    from nicegui.element import Element

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
MOMENT_BYTES = 128 << 20
"""Of the pictures of the running episode; beyond that the oldest go"""
QUALITY = 95
"""Of the JPEG pictures."""
STILL = {"motion": [0.0] * 6, "gripper": 0, "arm": 0}


class Wheel:
    """The driver, at most one viewer, and the inputs that they hold.

    A driver who vanishes loses the wheel but leaves it *lost*: the arm holds still until a person takes the wheel or
    gives it back to the policy. Times are the monotonic clock's, which this machine's processes share.
    """

    def __init__(self, seat_seconds: float = SEAT_SECONDS) -> None:
        self.seat_seconds = seat_seconds
        self.driver: str | None = None
        self.lost = False
        self._heard = 0.0
        self._held: dict[str, Any] = STILL
        self.paused_by: str | None = None
        self._pause_heard = 0.0

    def pause(self, viewer: str, now: float) -> None:
        """The driver pauses a simulation, or anybody while there is none; until they go on, or are gone."""
        if self.driver in (None, viewer) and self.paused_by is None:
            self.paused_by, self._pause_heard = viewer, now

    def resume(self, viewer: str) -> None:
        """Goes on after a pause: by the one who paused."""
        if self.paused_by == viewer:
            self.paused_by = None

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
        if viewer == self.paused_by:
            self._pause_heard = max(self._pause_heard, at)

    def check(self, now: float) -> None:
        if self.paused_by is not None and now - self._pause_heard > self.seat_seconds:
            self.paused_by = None
        if self.driver is not None and now - self._heard > self.seat_seconds:
            self.driver, self.lost = None, True

    def message(self, now: float) -> dict[str, object]:
        """For the device, which judges the age itself: this process may be the one that stalls."""
        driving = self.driver is not None
        return {
            "driving": driving,
            "lost": self.lost,
            "paused": self.paused_by is not None,
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
    picture: tuple[int, int] = (0, -1)  # number of the newest picture it was sent, and the moment that it shows
    moment: int = -1  # the step of the episode at which it looks; -1: the newest
    echo: tuple[float, float] = (0.0, 0.0)  # its clock in its last message, and ours when that came: for the round trip
    news: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False  # for its acknowledgment, with news untold
    connection: Any = None
    left: float = 0.0  # when it was last connected
    _offset: float = math.inf

    def connect(self, connection: object) -> None:
        self.connection, self.sent, self.seen, self.picture, self.moment = connection, 0, 0, (0, -1), -1
        self.compare_clocks()

    def compare_clocks(self) -> None:
        """Anew: those of a phone stand still while it sleeps."""
        self._offset = math.inf

    def sent_at(self, theirs: float, now: float) -> float:
        """When a message was sent, in our clock, if the quickest of the last ones
        took no time: so a backlog shows as old."""
        self._offset = min(now - theirs, self._offset + DRIFT * max(0.0, now - self.echo[1]))
        self.echo = theirs, now
        return theirs + self._offset


class Page:
    """Frames in, pictures out; what viewers hold and press in, readings out."""

    def __init__(self, folder: Path, patience: float = 1.0):
        """`patience` multiplies the times after which contact counts as lost."""
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._frames, self._held, self._events = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH))
        self._frames.set(zmq.CONFLATE, 1)  # only the newest lies in the queue
        self._held.set(zmq.CONFLATE, 1)
        for name, link in (("frames", self._frames), ("held", self._held), ("events", self._events)):
            link.set(zmq.LINGER, 500)
            link.connect(f"ipc://{folder}/{name}")
        self.wheel, self._patience = Wheel(patience * SEAT_SECONDS), patience
        self._viewers: dict[str, Viewer] = {}
        self._connections: set[Any] = set()
        self._ghosts: set[asyncio.Task[None]] = set()
        self._shown: dict[str, Any] = {"status": {}, "episode": 0, "arms": 1, "at": 0.0}
        self._pictures: list[tuple[str, bytes]] = []
        self._number = 0
        self._moments = MomentPictures()
        self._id = secrets.token_hex(8)  # by which a browser tells this process from one that was here before

    async def frames(self) -> None:
        """Compresses each frame once, for everybody."""
        await self._press("ready", 0)
        while True:
            shown = msgpack.unpackb(await self._frames.recv())
            pictures = await asyncio.to_thread(compress, shown.pop("images"))
            self._shown, self._pictures, self._number = shown, pictures, self._number + 1
            if shown["status"].get("rewind"):
                self._moments.add(shown["episode"], shown["status"]["step"], pictures)
            self._tell()

    async def beat(self, parent: int) -> None:
        """Whatever happens: who drives, to the device 40 times a second, which takes silence for a loss, and to the
        viewers ten times. Returns when the parent is gone."""
        count = 0
        while os.getppid() == parent:
            await self._report()
            if count % 4 == 0:
                self._tell()
            count += 1
            await asyncio.sleep(0.025)

    async def serve(self, connection: WebSocket) -> None:
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
            if message.get("page", self._id) == self._id:  # else it was pressed before this process was there
                await self._handle(viewer, message, now)
        else:
            at = viewer.sent_at(float(message["sent"]), now)
            viewer.seen, viewer.moment = int(message["seen"]), int(message.get("moment", -1))
            self.wheel.hold(viewer.name, checked(message), at)
        if viewer.waits:
            viewer.news.set()
        if viewer.name == self.wheel.driver or "event" in message:
            await self._report()

    async def _handle(self, viewer: Viewer, message: dict[str, Any], now: float) -> None:
        event, number, episode = str(message["event"]), int(message["number"]), int(message["episode"])
        if number <= viewer.done:  # sent again, since the acknowledgment was lost
            return
        viewer.done = number
        if event == "take":
            viewer.compare_clocks()
            self.wheel.take(viewer.name, now)
        elif event == "give":
            self.wheel.give(viewer.name)
        elif event in ("pause", "resume", "rewind"):
            await self._pause(viewer, event, message, now)
        elif event not in EVENTS or event == "toggle":  # which is the device's word for take and give
            raise FormatError(f"event {event!r} is not one that a page has")
        elif event in ("stop", ESTOP) or self.wheel.driver in (None, viewer.name):
            # anybody may stop; the rest is the driver's, if there is one
            self.wheel.paused_by = None
            await self._press(event, episode)
        self._tell()

    async def _pause(self, viewer: Viewer, event: str, message: dict[str, Any], now: float) -> None:
        """Pauses a simulation, goes on, or goes back: by the driver, or by anybody while nobody drives."""
        if event == "pause" and self._shown["status"].get("rewind"):
            self.wheel.pause(viewer.name, now)
        elif event == "rewind" and self.wheel.paused_by == viewer.name:
            await self._events.send(
                msgpack.packb({"event": event, "episode": int(message["episode"]), "step": int(message["step"])})
            )
        if event != "pause":
            self.wheel.resume(viewer.name)

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
            moment = viewer.moment if self.wheel.paused_by == viewer.name else -1
            wanted = (self._number, -1) if moment < 0 else (0, moment)
            pictures = [] if wanted == viewer.picture else self._pictures if moment < 0 else self._moments.at(moment)
            viewer.picture = wanted
            viewer.sent += 1
            await connection.send_bytes(self._packed(viewer, pictures))

    def _packed(self, viewer: Viewer, pictures: list[tuple[str, bytes]]) -> bytes:
        """The length of the header in four bytes, the header in JSON, the pictures."""
        now, wheel = time.monotonic(), self.wheel
        header = {
            **self._shown,
            "age": now - self._shown["at"] if self._number else None,
            "page": self._id,
            "echo": viewer.echo[0],
            "kept": now - viewer.echo[1],
            "done": viewer.done,
            "patience": self._patience,
            "driving": wheel.driver == viewer.name,
            "taken": wheel.driver is not None,
            "lost": wheel.lost,
            "paused": wheel.paused_by is not None,
            "pausing": wheel.paused_by == viewer.name,
            "moments": self._moments.first,
            "viewers": sum(other.connection is not None for other in self._viewers.values()),
            "pictures": [[name, len(data)] for name, data in pictures],
        }
        text = json.dumps(header).encode()
        return b"".join([len(text).to_bytes(4, "little"), text, *(data for _, data in pictures)])


class MomentPictures:
    """The pictures of each step of the running episode, for a person who looks for a moment to go back to."""

    def __init__(self) -> None:
        self._episode, self._kept = 0, dict[int, list[tuple[str, bytes]]]()
        self._bytes = 0

    def add(self, episode: int, step: int, pictures: list[tuple[str, bytes]]) -> None:
        """Keeps those of a step; those after it are of a past that was rewound, and those of an earlier episode go."""
        if episode != self._episode:
            self._episode, self._kept, self._bytes = episode, {}, 0
        for gone in [kept for kept in self._kept if kept >= step]:
            self._remove(gone)
        self._kept[step] = pictures
        self._bytes += sum(len(data) for _, data in pictures)
        while self._bytes > MOMENT_BYTES and len(self._kept) > 1:
            self._remove(next(iter(self._kept)))

    def at(self, step: int) -> list[tuple[str, bytes]]:
        """Those of this step, or of the nearest one before it: a page that is slow misses some."""
        return self._kept[max((kept for kept in self._kept if kept <= step), default=self.first)] if self._kept else []

    @property
    def first(self) -> int:
        """The first step that pictures are kept of."""
        return next(iter(self._kept), 0)

    def _remove(self, step: int) -> None:
        self._bytes -= sum(len(data) for _, data in self._kept.pop(step))


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


def cockpit(ui: Any) -> Callable[[], Element]:
    """A function that puts what a person sees and presses onto a page of NiceGUI's, and returns the element."""
    here = Path(__file__).parent

    class Cockpit(ui.element, component=here / "page.js"):  # type: ignore[call-arg]
        pass

    def add() -> Element:
        ui.add_css((here / "page.css").read_text())
        element = Cockpit()
        element.props["keys"] = KEYS
        return element

    return add


def application(page: Page) -> FastAPI:
    """NiceGUI with our component in it, and our websocket beside."""
    ui = optional_module("nicegui", "The page", "teleop").ui
    app = optional_module("fastapi", "The page", "teleop").FastAPI(openapi_url=None)
    app.router.routes.append(
        optional_module("starlette.routing", "The page", "teleop", "nicegui").WebSocketRoute("/drive", page.serve)
    )
    add_cockpit = cockpit(ui)

    def index() -> None:
        add_cockpit()

    ui.page("/")(index)
    look = {"title": "Hilt", "dark": True, "favicon": "🦾", "tailwind": False, "show_welcome_message": False}
    ui.run_with(app, **look, binding_refresh_interval=None, reconnect_timeout=60)
    return app


async def run(settings: dict[str, Any]) -> None:
    """Serves on the socket that the parent listens on, until the parent ends it or is gone."""
    uvicorn = optional_module("uvicorn", "The page", "teleop")
    page = Page(Path(settings["folder"]), settings["patience"])
    app = PageGuard(application(page), settings["host"], settings["token"])
    server = uvicorn.Server(uvicorn.Config(app, **PAGE_SERVER))
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
