"""A robot server of a few lines, over real HTTP: an arm that is at once where it is
sent, and a test that decides what goes wrong."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DOWN = [1.0, 0.0, 0.0, 0.0]


class ToyRobot:
    """`routes` and `bodies` are what was asked; `delays`, `waits`, `refusals`, `blocked`, `sag` are
    what goes wrong; with a `scene` it simulates."""

    def __init__(self, scene: dict[str, Any] | None = None, port: int = 0):
        self.pose, self.gripper = [0.5, 0.0, 0.2, *DOWN], 1.0
        self.scene, self.blocked, self.sag = scene, False, 0.0
        self.asked: list[tuple[str, Any, float, float]] = []  # route, body, began, ended
        self.headers: list[dict[str, str]] = []
        self.delays: dict[str, float] = {}
        self.waits: dict[str, Any] = {}  # a barrier, or what else has a `wait`
        self.refusals: dict[str, tuple[int, str]] = {}
        self.raw: dict[str, tuple[str, bytes]] = {}
        self.trickle: set[str] = set()
        self.connections = 0
        self.drop_after_reply = False
        toy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                toy.connections += 1
                super().setup()

            def do_POST(self) -> None:
                toy.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ToyRobot:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def routes(self) -> list[str]:
        return [route for route, *_ in self.asked]

    def bodies(self, route: str) -> list[Any]:
        return [body for asked, body, *_ in self.asked if asked == route]

    def poses(self) -> np.ndarray:
        return np.array([body["arr"] for body in self.bodies("pose")])

    def answer(self, handler: Any) -> None:
        began = time.monotonic()
        handler.close_connection = self.drop_after_reply  # without telling
        data = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        route, body = handler.path.strip("/"), json.loads(data) if data else None
        if route in self.waits:
            self.waits[route].wait()
        time.sleep(self.delays.get(route, 0.0))
        status, (kind, reply) = 200, ("text/plain", b"")
        if route in self.refusals:
            status, sentence = self.refusals[route]
            kind, reply = "text/plain", sentence.encode()
        elif route in self.raw:
            kind, reply = self.raw[route]
        elif route in ("scene", "image") and self.scene is None:
            status, reply = 404, b"this backend is no simulation"
        else:
            kind, reply = self.do(route, body)
        self.asked.append((route, body, began, time.monotonic()))
        self.headers.append(dict(handler.headers))
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(reply)))
        handler.end_headers()
        for piece in [bytes([b]) for b in reply] if route in self.trickle else [reply]:
            handler.wfile.write(piece)
            time.sleep(0.05 if route in self.trickle else 0.0)

    def do(self, route: str, body: Any) -> tuple[str, bytes]:
        if route == "pose" and not self.blocked:
            self.pose = list(body["arr"])
            self.pose[2] -= self.sag
        if route in ("open_gripper", "close_gripper"):
            self.gripper = float(route == "open_gripper")
        if route == "getstate":
            zeros = {"vel": [0.0] * 6, "force": [0.0] * 3, "torque": [0.0] * 3, "q": [0.0] * 7, "dq": [0.0] * 7}
            state = {"pose": self.pose, **zeros, "jacobian": [[0.0] * 7] * 6, "gripper_pos": self.gripper}
            return "application/json", json.dumps(state).encode()
        if route == "scene":
            assert self.scene is not None
            self.scene.update(body)
            return "application/json", json.dumps(self.scene).encode()
        if route == "image":
            rows = np.arange(body["height"], dtype=np.uint8)[:, None, None]
            image = np.broadcast_to(rows + len(body["camera"]), (body["height"], body["width"], 3))
            return "application/octet-stream", np.ascontiguousarray(image).tobytes()
        return "text/plain", b"done"


def scene(**changes: Any) -> dict[str, Any]:
    return {
        "task": "pick",
        "instruction": "pick it up",
        "succeed": False,
        "split": "train",
        "state": 0,
        "step_limit": 7,
        **changes,
    }
