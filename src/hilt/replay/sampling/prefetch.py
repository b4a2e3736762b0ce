"""Batches made ahead by a thread, so that a learner does not wait for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

from hilt.core.errors import ClosedError, ConfigError, DeadlineError
from hilt.replay.sampling.assembly import Batch
from hilt.replay.sampling.limiters import gives_up

_CLOSE_S = 60.0
"""How long the thread has to end."""
_DEADLINE_S = 660.0
"""How long the next batch is awaited before that is an error, in seconds: longer
than a rate limiter waits, whose error says more."""


P = TypeVar("P")


class Rewindable(Protocol[P]):
    """The source of batches, to which batches that were not taken can be put back;
    a position of None means that they cannot."""

    def position(self) -> P | None: ...

    def seek(self, position: P) -> None: ...

    def state(self, position: P | None = None) -> dict[str, object]: ...


class Prefetch(Iterator[Any]):
    """An endless iterator. What goes wrong in the thread is raised by ``next``; `close` ends the thread.

    Batches that were made ahead and not taken do not count: `state` is that of the `source` after the
    last batch that ``next`` returned, and after `close` the source goes on from there. Samplers of which
    that is true are those with a `Sampler.position`; of others, such as prioritised ones, the batches
    made ahead are lost, and the state is that after them.
    """

    def __init__(self, make: Callable[[], Any], ahead: int, device: Any = None, source: Rewindable[Any] | None = None):
        self._stop = threading.Event()
        if ahead < 1:
            raise ConfigError(f"prefetch: expected at least 1 batch, got {ahead}.")
        move: Callable[[Any], Any] = lambda batch: batch  # noqa: E731
        if device is not None:
            from hilt.replay import tensors as bridge

            move = partial(_moved, bridge.mover(device))
        self._ready: _Queue = queue.Queue(ahead)
        self._failure: BaseException | None = None
        position: Callable[[], Any] = (lambda: None) if source is None else source.position
        self._source, self._position = source, position()
        # the thread does not refer to this object, so that an iterator that is no longer referenced ends its thread
        given = (make, move, position, self._ready, self._stop)
        self._thread = threading.Thread(target=_fill, args=given, name="hilt-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise ClosedError("this iterator was closed; make another one.")
        try:
            batch, error, position = self._ready.get(timeout=_DEADLINE_S)
        except queue.Empty:
            raise DeadlineError(f"waited {_DEADLINE_S:g} s for the next batch; the sampling thread is stuck.") from None
        if error is not None:
            self._failure = error
            self._stop.set()
            raise error
        self._position = position
        return batch

    def state(self) -> dict[str, object]:
        """The state of what the batches are drawn from, after the last one that was taken."""
        if self._source is None:
            raise ClosedError(
                "there is no state of these batches: the iterator was closed, or made without a "
                "sampler. Ask the sampler."
            )
        return self._source.state(self._position)

    def close(self) -> None:
        """Ends the thread, also one that a rate limiter holds back. Batches that were made
        ahead are put back where they can be."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineError(
                f"waited {_CLOSE_S:g} s for the batch that is being made; the sampling thread is stuck."
            )
        source, self._source = self._source, None
        if source is not None and self._position is not None:
            source.seek(self._position)

    def __del__(self) -> None:
        self._stop.set()


_Queue = queue.Queue[tuple[Any, "BaseException | None", Any]]


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


def _fill(
    make: Callable[[], Any],
    move: Callable[[Any], Any],
    position: Callable[[], Any],
    ready: _Queue,
    stop: threading.Event,
) -> None:
    gives_up.set(stop)
    while not stop.is_set():
        item: tuple[Any, BaseException | None, Any]
        try:
            batch = make()
            item = (move(batch), None, position())
        except BaseException as error:  # noqa: BLE001  # broad: raised in the thread that takes the batch
            item = (None, error, None)
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if item[1] is not None:
            return
