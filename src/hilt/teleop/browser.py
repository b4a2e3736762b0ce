"""The browser as a device: a page for computer and phone, served by a process of its own (`hilt.teleop.page`).

    device = Browser()                       # this machine only; the address is device.url
    device = Browser("0.0.0.0", 8080)        # the network too, with a token in the address; not encrypted

`show` copies the pictures into a socket and `read` takes what lies in another one: neither waits, compresses or draws.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import zmq

from hilt.core.children import ChildProcess, run_module
from hilt.core.errors import DeadlineError, DeviceError, MissingPackageError, SchemaError
from hilt.core.web import is_loopback, listen, page_address
from hilt.envs.env_protocol import Env
from hilt.teleop.devices import ESTOP, RELEASE_ESTOP, Device, Reading, Status, arms_and_gripper

ANY_EPISODE = ("stop", ESTOP, RELEASE_ESTOP)
"""Events that count whatever the episode in which they were pressed"""
STALE_SECONDS = 0.1
"""A driver whose newest state is older than this is out of reach, and the arm holds still. So does it when the page's
process is silent for that long, whoever acts: nobody could take over."""
PATIENCE = 1.0
"""Multiplies this limit, and those of the page and its process: for tests, on machines that stand still for seconds."""


class Browser(Device):
    """A person in a browser. They act from *Take over* to *Give back*; with no key held, the arm holds still.

    Of several viewers one drives, the first who takes over. When contact to the driver is lost, or the
    driver's page is closed, readings are `lost` until somebody takes over or gives back. *Stop* and the emergency
    stop count from every viewer; success, fail and reset from the driver, or from any viewer while there is no driver,
    and only if pressed in the episode that they end.
    """

    name = "browser"
    screen = True
    rewinds = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0, timeout_seconds: float = 60.0):
        """`port` 0 takes a free one. `timeout_seconds`: how long the page may take to start."""
        super().__init__()
        if importlib.util.find_spec("nicegui") is None:
            raise MissingPackageError("nicegui", "The page", "teleop")
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        # of mode 0700: other users cannot access the sockets in it
        self._folder = Path(tempfile.mkdtemp(prefix="hilt-page-"))
        self._context: zmq.Context[Any] = zmq.Context()
        self._page: ChildProcess | None = None
        self._held: dict[str, Any] = {"driving": False, "lost": False, "at": math.inf}
        self._on = False
        self._episode, self._arms = 0, 1
        self._rewind: int | None = None
        try:
            self._frames, self._state, self._events = (self._bind(kind) for kind in ("frames", "held", "events"))
            with listen(host, port) as listener:
                self.url = page_address(host, listener.getsockname()[1], self.token)
                self._page = self._start(listener, host)
            self._await_page(timeout_seconds)
        except BaseException:
            self.close()
            raise

    def _bind(self, name: str) -> zmq.Socket[Any]:
        link: zmq.Socket[Any] = self._context.socket(zmq.PUSH if name == "frames" else zmq.PULL)
        link.set(zmq.LINGER, 0)
        if name != "events":
            link.set(zmq.CONFLATE, 1)  # only the newest lies in the queue, so it is never full
        link.bind(f"ipc://{self._folder}/{name}")
        return link

    def _start(self, listener: socket.socket, host: str) -> ChildProcess:
        """Passes the listening socket to the page's process: a browser that connects early waits there."""
        with open(self._folder / "output", "wb") as output:
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": output,
                "stderr": output,
                "pass_fds": [listener.fileno()],
            }
            page = ChildProcess(run_module("hilt.teleop.page"), **pipes, start_new_session=True)
        settings = {
            "folder": str(self._folder),
            "listener": listener.fileno(),
            "host": host,
            "token": self.token,
            "parent": os.getpid(),
            "patience": PATIENCE,
        }
        assert page.stdin is not None
        with contextlib.suppress(BrokenPipeError), page.stdin as stdin:  # it died: its output is reported below
            stdin.write(json.dumps(settings).encode() + b"\n")
        return page

    def _await_page(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._events.poll(100):
            self._check_page()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the page did not start within {timeout_seconds:g} s. Give timeout_seconds=, or free the machine."
                )
        self._events.recv()

    def attach(self, env: Env) -> None:
        self._arms = arms_and_gripper(env)[0]

    def reset(self) -> None:
        self._receive()
        super().reset()
        self._episode += 1
        self._on, self._rewind = False, None  # so does TakeOver begin, in toggle mode

    def read(self) -> Reading:
        self._check_page()
        self._receive()
        held = self._held
        lost = held["lost"] or time.monotonic() - held["at"] > PATIENCE * STALE_SECONDS
        engaged = held["driving"] or lost
        if engaged != self._on:
            self.press("toggle")
        self._on = engaged
        rewind, self._rewind = self._rewind, None
        more: dict[str, Any] = {"events": self.take_events(), "paused": held.get("paused", False), "rewind": rewind}
        if lost or not engaged:
            return Reading(engaged=engaged, lost=lost, **more)
        return Reading(
            np.array(held["motion"]), held["gripper"], True, False, arm=min(held["arm"], self._arms - 1), **more
        )

    def is_estop_pressed(self) -> bool:
        self._receive()
        return super().is_estop_pressed()

    def show(self, images: Mapping[str, np.ndarray], status: Status) -> None:
        for name, image in images.items():
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] not in (1, 3):
                raise SchemaError(
                    f"image {name!r} is {image.dtype} {image.shape}: a page shows uint8 [height, width, 3 or 1]."
                )
        pictures = {name: (image.shape, np.ascontiguousarray(image).data) for name, image in images.items()}
        shown = {
            "images": pictures,
            "status": asdict(status),
            "episode": self._episode,
            "arms": self._arms,
            "at": time.monotonic(),
        }
        with contextlib.suppress(zmq.Again):
            # numpy's numbers, in a status, become Python's
            self._frames.send(msgpack.packb(shown, default=lambda value: value.item()), zmq.DONTWAIT)

    def close(self) -> None:
        if self._page is not None:
            self._page.end()
        self._context.destroy(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            self._held = msgpack.unpackb(self._state.recv(zmq.DONTWAIT))
        with contextlib.suppress(zmq.Again):
            while True:
                pressed = msgpack.unpackb(self._events.recv(zmq.DONTWAIT))
                # else it was meant for an episode that is over
                if pressed["event"] == "rewind" and pressed["episode"] == self._episode:
                    self._rewind = pressed["step"]
                elif pressed["event"] in ANY_EPISODE or pressed["episode"] == self._episode:
                    self.press(pressed["event"])

    def _check_page(self) -> None:
        if self._page is not None and self._page.poll() is not None:
            output = (self._folder / "output").read_text(errors="replace").strip()[-4000:]
            last = output.splitlines()[-1] if output else "it left no word"
            cure = "Start the run again; the arm got no command from the page since."
            raise DeviceError(f"the page ended with exit status {self._page.returncode} ({last}). {cure}\n{output}")
