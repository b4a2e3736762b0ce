"""Hand-over between the threads of one process, where no wait is endless."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from hilt.core.errors import ClosedError, ConfigError, DeadlineError, explained_calls

DEADLINE_S = 60.0
"""The default timeout in seconds of `Channel.put` and `Channel.get`."""

T = TypeVar("T")


@explained_calls
class Channel(Generic[T]):
    """A first-in first-out queue for any number of threads on both sides.

    >>> channel = Channel(maxsize=2, name="trajectories")
    >>> channel.put("first")
    >>> channel.get(timeout=5)
    'first'
    """

    def __init__(self, maxsize: int = 0, name: str = "channel"):
        """`maxsize` is how many items may wait, 0 for any number; `name` tells in errors which channel it was."""
        if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 0:
            raise ConfigError(
                f"maxsize is {maxsize!r}; pass how many items may wait in the channel, or 0 for any number."
            )
        self.maxsize = maxsize
        self.name = name
        self._items: deque[T] = deque()
        self._closed = False
        lock = threading.Lock()
        self._not_empty = threading.Condition(lock)
        self._not_full = threading.Condition(lock)

    def put(self, item: T, *, timeout: float | None = None) -> None:
        """Hand an item over, waiting for room for at most `timeout` seconds, by default `DEADLINE_S`."""
        with self._not_full:
            self._wait(
                self._not_full, lambda: not self.maxsize or len(self._items) < self.maxsize, "room for an item", timeout
            )
            self._refuse_if_closed("nothing can be put into it")
            self._items.append(item)
            self._not_empty.notify()

    def get(self, *, timeout: float | None = None) -> T:
        """The oldest item, waiting for one for at most `timeout` seconds, by default `DEADLINE_S`.

        What was put before the channel was closed can still be taken; then `ClosedError`.
        """
        with self._not_empty:
            self._wait(self._not_empty, lambda: bool(self._items), "an item", timeout)
            if not self._items:
                self._refuse_if_closed("all that was put into it has been taken")
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def qsize(self) -> int:
        """How many items wait to be taken."""
        with self._not_empty:
            return len(self._items)

    __len__ = qsize

    def close(self) -> None:
        """Let nothing more in, and wake everyone who waits."""
        with self._not_empty:
            self._closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def _wait(
        self, condition: threading.Condition, ready: Callable[[], bool], what: str, timeout: float | None
    ) -> None:
        seconds = DEADLINE_S if timeout is None else timeout
        # not a number fails this too
        if not isinstance(seconds, int | float) or not 0 <= seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"timeout is {timeout!r}; pass seconds, 0 or more, or None for {DEADLINE_S:g}. "
                "A wait always has an end."
            )
        end = time.monotonic() + seconds
        while not self._closed and not ready():
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"channel {self.name!r}: waited {seconds:g} s for {what}, and {len(self._items)} items "
                    f"were waiting to be taken. Check that the other side is alive, or pass a longer timeout."
                )
            condition.wait(left)

    def _refuse_if_closed(self, consequence: str) -> None:
        if self._closed:
            raise ClosedError(f"channel {self.name!r} is closed: {consequence}. Make another channel to go on.")
