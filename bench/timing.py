"""Timing on a machine that is never quite quiet: contenders take turns, and medians over the turns are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rates:
    """How many per second, once per round."""

    rounds: Sequence[float]

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.rounds), max(self.rounds)


def in_turns(contenders: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, Rates]:
    """Calls per second of each contender. In every round each one runs for so long; a first round is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, call in contenders.items():
            rate = rate_of(call, seconds)
            if round_number:
                rates[name].append(rate)
    return {name: Rates(found) for name, found in rates.items()}


def rate_of(call: Callable[[], object], seconds: float) -> float:
    """Calls per second over at least so long. The clock is read between growing groups of calls."""
    calls, group = 0, 1
    start = now = time.perf_counter()
    while now - start < seconds:
        for _ in range(group):
            call()
        calls += group
        now = time.perf_counter()
        group = max(1, min(2 * group, int(calls / (now - start) * seconds / 10)))
    return calls / (now - start)


def seconds_of(call: Callable[..., object], *arguments: object) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def seconds_each(call: Callable[..., object], items: Iterable[object]) -> float:
    """How long the calls with each of these items take together."""
    start = time.perf_counter()
    for item in items:
        call(item)
    return time.perf_counter() - start
