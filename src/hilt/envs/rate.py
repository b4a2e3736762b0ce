"""A loop at a fixed rate, and how well it was kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from hilt.core.errors import ConfigError


class Rate:
    """Waits for deadlines that lie one period apart, whatever the loop does between
    them, and keeps the periods that came of it.

    A deadline is counted from the one before, so errors never add up. A loop that lost whole
    periods goes on at the next deadline of the same grid: it does not hurry through the lost ones,
    for an arm would be given their motion at once.
    """

    def __init__(
        self, hz: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ):
        if not 0 < hz < 100_000:
            raise ConfigError(
                f"a rate of {hz} Hz was asked for; give a positive number of steps in a second, such as 10."
            )
        self.period, self._clock, self._sleep = 1.0 / hz, clock, sleep
        self._periods: deque[float] = deque(maxlen=10_000)
        self._late: deque[float] = deque(maxlen=10_000)
        self.missed = 0
        """Whole periods that were lost because the loop was late."""
        self.restart()

    def restart(self) -> None:
        """The first period begins now; what happened since the last wait is not a period."""
        self._deadline = self._last = self._clock()

    def wait(self) -> float:
        """Sleeps until the next deadline and gives the seconds since the last wait ended."""
        self._deadline += self.period
        late = self._clock() - self._deadline
        if late < 0:
            self._sleep(-late)
        elif lost := int(late / self.period):
            self._deadline += lost * self.period
            self.missed += lost
        now = self._clock()
        # of a lost period too: it was due when it was due
        self._late.append(late if late >= 0 else now - self._deadline)
        took, self._last = now - self._last, now
        self._periods.append(took)
        return took

    def timing(self) -> dict[str, float]:
        """Returns statistics of the last 10,000 waits, in seconds: ``p50``, ``p99`` and ``max`` of the periods,
        ``late_p50`` and ``late_p99`` of how long
        after its deadline a wait ended; what was asked for, and how many were lost."""
        periods, late = np.array(self._periods or [0.0]), np.array(self._late or [0.0])
        p50, p99, late_p50, late_p99 = (float(p) for part in (periods, late) for p in np.percentile(part, [50, 99]))
        counts = {"steps": len(self._periods), "missed": self.missed}
        found = {"p50": p50, "p99": p99, "max": float(periods.max()), "late_p50": late_p50, "late_p99": late_p99}
        return {"nominal": self.period, **found, **counts}
