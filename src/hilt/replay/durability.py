"""When a step is safe, in plain words.

*Process-safe*: the write returned, so it survives the process being killed. *Power-safe*: fsync returned, so it
survives a power cut. Every append is process-safe when it returns; the setting determines when it becomes power-safe.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hilt.core.errors import ConfigError, HiltError


@dataclass(frozen=True)
class Durability:
    """``"every step"``, ``"every episode"``, ``"at most 50 ms"`` or ``"never"``."""

    words: str
    every_step: bool = False
    every_episode: bool = False
    milliseconds: float | None = None

    @classmethod
    def parse(cls, words: str | Durability) -> Durability:
        if isinstance(words, Durability):
            return words
        plain = " ".join(str(words).lower().split())
        if plain == "every step":
            return cls(plain, every_step=True, every_episode=True)
        if plain == "every episode":
            return cls(plain, every_episode=True)
        if plain == "never":
            return cls(plain)
        match = re.fullmatch(r"at most (\d+(?:\.\d+)?) ms", plain)
        if match and float(match[1]) > 0:
            return cls(plain, milliseconds=float(match[1]))
        raise ConfigError(
            f"durability {words!r}: expected 'every step', 'every episode', 'at most N ms' (N > 0) or 'never'."
        )

    def promise(self) -> str:
        """What holds when a call returns."""
        if self.every_step:
            return "every step is power-safe when its append returns"
        if self.every_episode:
            return (
                "every step is process-safe when its append returns, and power-safe when its episode "
                "or trajectory is complete"
            )
        if self.milliseconds is not None:
            return (
                "every step is process-safe when its append returns, and power-safe at most "
                f"{self.milliseconds:g} ms later"
            )
        return "every step is process-safe when its append returns, and power-safe when sync() returns"


class Syncer:
    """A thread that syncs soon after something was written: one fsync for all that came together."""

    def __init__(self, milliseconds: float, sync: Callable[[], None]):
        self._pause = milliseconds / 2e3  # half of the time is left to fsync itself
        self._sync = sync
        self._dirty = threading.Event()
        self._stop = threading.Event()
        self.error: HiltError | None = None
        self._thread = threading.Thread(target=self._run, name="hilt-sync", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Something was written."""
        self._dirty.set()

    def check(self) -> None:
        """Raises what a sync failed with, if one did: from then on nothing can be promised."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._stop.set()
        self._dirty.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._dirty.wait()
            self._stop.wait(self._pause)
            self._dirty.clear()
            try:
                self._sync()
            except HiltError as error:
                self.error = error
                return
