"""What an actor or a learner says about itself, one line per event, in a file that outlives it.

A line is one write to a file opened for appending: whatever was written before a SIGKILL is there afterwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class Journal:
    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *words: object) -> None:
        os.write(self._fd, (" ".join(str(word) for word in words) + "\n").encode())


class Stop:
    """Whether a signal has come. A `threading.Event` has a lock, which the thread that the signal interrupts may
    hold: it would wait for itself, for ever."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self._is_set


def lines(path: Path) -> Iterator[list[str]]:
    """The complete lines, as words."""
    if path.exists():
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            yield line.split()


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


def said(path: Path, word: str) -> list[list[str]]:
    """The lines that begin with this word."""
    return [line for line in lines(path) if line[0] == word]
