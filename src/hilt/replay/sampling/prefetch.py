"""Batches made ahead by a thread, so that a learner does not wait for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hilt.core.errors import ClosedError, ConfigError, DeadlineError
from hilt.replay.sampling.limiters import gives_up
from hilt.replay.sampling.sampler import Batch

_DEADLINE_S = 660.0
"""How long the next batch is awaited before that is an error, in seconds: longer than a rate limiter waits, whose error says more."""


class Prefetch(Iterator[Any]):
    """An endless iterator. What goes wrong in the thread is raised by ``next``; `close` ends the thread."""

    def __init__(self, make: Callable[[], Any], ahead: int, device: Any = None):
        self._stop = threading.Event()
        if ahead < 1:
            raise ConfigError(f"prefetch: expected at least 1 batch, got {ahead}.")
        move: Callable[[Any], Any] = lambda batch: batch  # noqa: E731
        if device is not None:
            from hilt.replay import tensors as bridge

            move = partial(_moved, bridge.mover(device))
        self._ready: _Queue = queue.Queue(ahead)
        self._failure: BaseException | None = None
        # the thread does not refer to this object, so that an iterator nobody holds ends its thread
        self._thread = threading.Thread(target=_fill, args=(make, move, self._ready, self._stop), name="hilt-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise ClosedError("this iterator was closed; make another one.")
        try:
            batch, error = self._ready.get(timeout=_DEADLINE_S)
        except queue.Empty:
            raise DeadlineError(f"waited {_DEADLINE_S:g} s for the next batch; the sampling thread is stuck.") from None
        if error is not None:
            self._failure = error
            self._stop.set()
            raise error
        return batch

    def close(self) -> None:
        """Ends the thread, also one that a rate limiter holds back. Batches that were made ahead are dropped."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join(timeout=10)

    def __del__(self) -> None:
        self._stop.set()


_Queue = queue.Queue[tuple[Any, "BaseException | None"]]


def _moved(move: Callable[[Any], Any], batch: Any) -> Any:
    """A batch, or one per device, as tensors; `steps` stay keys, and weights and probabilities become tensors too."""
    numbers = {name: getattr(batch, name) for name in ("weights", "probabilities") if hasattr(batch, name)}
    moved, factors = move(batch), move(numbers)
    if not isinstance(moved, list):
        return _with_attributes(batch, moved, factors)
    return [_with_attributes(batch, *pair) for pair in zip(moved, factors, strict=True)]


def _with_attributes(batch: Any, moved: dict[str, Any], factors: dict[str, Any]) -> Batch:
    made = Batch(moved)
    vars(made).update({**vars(batch), **factors})
    return made


def _fill(make: Callable[[], Any], move: Callable[[Any], Any], ready: _Queue, stop: threading.Event) -> None:
    gives_up.set(stop)
    while not stop.is_set():
        item: tuple[Any, BaseException | None]
        try:
            item = (move(make()), None)
        except BaseException as error:  # noqa: BLE001  # handed to the one who waits for the batch, and raised there
            item = (None, error)
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if item[1] is not None:
            return
