"""Epochs of readers: files that are removed from a log stay until every reader of that time has ended."""

from __future__ import annotations

from collections.abc import Callable


class Readers:
    """Counts who reads, by epoch: every removal begins a new one. The caller holds
    the log's lock in all of its methods."""

    def __init__(self) -> None:
        self._epoch = 0
        self._reading: dict[int, int] = {}  # epoch -> number of readers that began in it
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def enter(self) -> int:
        """Begins a read; returns the epoch, for `leave`."""
        self._reading[self._epoch] = self._reading.get(self._epoch, 0) + 1
        return self._epoch

    def leave(self, epoch: int) -> None:
        self._reading[epoch] -= 1
        if not self._reading[epoch]:
            del self._reading[epoch]
        self._free()

    def later(self, *actions: Callable[[], None]) -> None:
        """Calls actions when all current readers have ended."""
        self._waiting += [(self._epoch, action) for action in actions]
        self._epoch += 1
        self._free()

    def _free(self) -> None:
        oldest = min(self._reading, default=self._epoch)
        while self._waiting and self._waiting[0][0] < oldest:
            self._waiting.pop(0)[1]()
