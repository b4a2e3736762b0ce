"""Processes of a benchmark that do what they are asked: one JSON object per line goes in, one comes back.

The bench has a `Side` for each of them; the process itself runs `serve`. Needs nothing but Python, so that a peer whose
packages cannot live beside ours is asked the same way with its own interpreter.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Side:
    """One process. It ends with its `with` block, and by itself when the bench dies."""

    def __init__(self, module: str, role: str, python: str | Path = sys.executable):
        self.name = f"{module} {role}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [str(python), "-m", module, role],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"bench-{role}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, call: str, timeout: float = 120.0, **arguments: Any) -> Any:
        """What a method of the role returns."""
        self.tell(call, **arguments)
        return self.answer(timeout)

    def tell(self, call: str, **arguments: Any) -> None:
        """The same without waiting; `answer` gets what it returned."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"call": call, "arguments": arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(f"{self.name} is gone:\n{self._said()}") from None

    def answer(self, timeout: float = 120.0) -> Any:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"{self.name} gave no answer within {timeout:g} s:\n{self._said()}") from None
        if line is None:
            raise RuntimeError(f"{self.name} is gone:\n{self._said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name} failed:\n{answer['error']}")
        return answer["value"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(roles: Mapping[str, type]) -> None:
    """The loop of a process: methods of ``roles[sys.argv[1]]`` until the bench closes the pipe."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    side = roles[sys.argv[1]]()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": getattr(side, asked["call"])(**asked["arguments"])}
        except Exception:  # noqa: BLE001  (told to the bench, which raises it)
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=replies, flush=True)
    if hasattr(side, "close"):
        side.close()
