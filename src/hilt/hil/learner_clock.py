"""The clock of the learner: which share of its time torch, data and waiting take, and how fast its counters grow."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator


class LearnerClock:
    """Measures on what the learner spends its time, since `shares` was last called."""

    def __init__(self, *counts: int) -> None:
        self._spent: Counter[str] = Counter()
        self._began = time.perf_counter()
        self._last = (counts[0], counts[1], self._began)

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[what] += time.perf_counter() - began  # type: ignore[assignment]

    def move(self, source: str, target: str, seconds: float) -> None:
        self._spent[source] -= seconds  # type: ignore[assignment]
        self._spent[target] += seconds  # type: ignore[assignment]

    def shares(self) -> dict[str, float]:
        """Returns the shares of the time since the last call, by the names that they have in the metrics."""
        now = time.perf_counter()
        total = max(now - self._began, 1e-9)
        names = {"torch_share": "torch", "sample_wait_share": "data", "wait_share": "wait"}
        shares = {name: self._spent[what] / total for name, what in names.items()}
        self._spent.clear()
        self._began = now
        return {**shares, "other_share": max(0.0, 1.0 - sum(shares.values()))}

    def since(self, *counts: int) -> tuple[float, float, float]:
        """How far two counters have come since they were last given, and in how many seconds."""
        now, before = time.perf_counter(), self._last
        self._last = (counts[0], counts[1], now)
        return counts[0] - before[0], counts[1] - before[1], max(now - before[2], 1e-9)
