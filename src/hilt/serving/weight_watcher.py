"""Newer weights of a run are taken up by the server of its policy, between two batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hilt.core.errors import HiltError
from hilt.serving.batcher import Batcher

POLL_INTERVAL_S = 1.0
CLOSE_S = 10.0
"""The timeout for the thread to end, in seconds"""

_log = logging.getLogger("hilt.serving")


class WeightWatcher:
    """A thread that looks for newer weights. `newest` returns their version, and is called often; `load` reads those of
    a version. Weights that cannot be read, or do not fit, are skipped with a warning: the next ones are tried."""

    def __init__(
        self,
        batcher: Batcher,
        newest: Callable[[], int],
        load: Callable[[int], Mapping[str, Any]],
        interval_s: float = POLL_INTERVAL_S,
    ):
        self._batcher, self._newest, self._load, self._interval_s = batcher, newest, load, interval_s
        self._seen = batcher.version
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hilt-weight-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            try:
                version = self._newest()
                if version <= self._seen:
                    continue
                self._seen = version
                self._batcher.swap(version, dict(self._load(version)))  # read now, and not between two batches
            except HiltError as error:
                _log.warning("newer weights were not taken up: %s", error)
