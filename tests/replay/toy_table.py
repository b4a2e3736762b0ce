"""A Reverb table in thirty lines, made of our selectors and our limiter: what the
answers of the real one are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hilt.replay.sampling import limiters as limiter
from hilt.replay.sampling import selectors as select

AHEAD = 4
"""As in tests/peers/make_reverb_golden.py."""


class ToyTable:
    def __init__(self, spec: dict[str, Any]):
        self.sampler = getattr(select, spec["sampler"][0])(*spec["sampler"][1:])
        self.remover = getattr(select, spec["remover"][0])(*spec["remover"][1:])
        self.limiter = getattr(limiter, spec["limiter"][0])(*spec["limiter"][1:])
        self.max_size: int = spec["max_size"]
        self.max_times_sampled: int = spec["max_times_sampled"]
        self.items: dict[int, list[float]] = {}  # priority, times sampled
        self.rng = np.random.default_rng(0)

    def insert(self, number: int, priority: float) -> None:
        with self.limiter.inserting(timeout=0):
            self.items[number] = [priority, 0]
            for selector in (self.sampler, self.remover):
                selector.insert(np.array([number]), np.array([priority]))
            if len(self.items) > self.max_size:  # the new item may be the one that goes
                self.delete([int(self.remover.sample(1, self.rng)[0][0])])

    def sample(self) -> list[Any]:
        self.limiter.await_sample(timeout=0)
        keys, probabilities = self.sampler.sample(1, self.rng)
        item, size = self.items[int(keys[0])], len(self.items)
        item[1] += 1
        if item[1] == self.max_times_sampled:
            self.delete([int(keys[0])])
        return [int(keys[0]), float(probabilities[0]), item[0], item[1], size]

    def update(self, updates: Sequence[tuple[int, float]]) -> None:
        kept = [(number, priority) for number, priority in updates if number in self.items]
        for number, priority in kept:
            self.items[number][0] = priority
        for selector in (self.sampler, self.remover):
            selector.update(np.array([n for n, _ in kept], np.int64), np.array([p for _, p in kept]))

    def delete(self, numbers: Sequence[int]) -> None:
        kept = [number for number in numbers if number in self.items]
        for selector in (self.sampler, self.remover):
            selector.delete(np.array(kept, np.int64))
        for number in kept:
            del self.items[number]
        self.limiter.deleted(len(kept))

    def reset(self) -> None:
        for part in (self.items, self.sampler, self.remover):
            part.clear()
        self.limiter.reset()

    def counts(self) -> list[Any]:
        asked = [self.limiter.can_insert(n + 1) for n in range(AHEAD)] + [
            self.limiter.can_sample(n + 1) for n in range(AHEAD)
        ]
        stats = self.limiter.stats()
        return [len(self.items), stats["inserts"], stats["samples"], "".join(str(int(a)) for a in asked)]


def replay_table(case: dict[str, Any]) -> list[list[Any]]:
    """Our answers to the calls of a table case, in the form in which the real ones were written down."""
    ours = ToyTable(case["table"])
    steps: list[list[Any]] = []
    for call, *rest in case["steps"]:
        if call == "insert":
            ours.insert(rest[0], rest[1])
            steps.append([call, rest[0], rest[1], *ours.counts()])
        elif call == "sample":
            steps.append([call, ours.sample(), *ours.counts()])
        elif call == "reset":
            ours.reset()
            steps.append([call, *ours.counts()])
        else:
            getattr(ours, call)(rest[0])
            steps.append([call, rest[0], *ours.counts()])
    return steps


def replay_remover(case: dict[str, Any]) -> list[list[Any]]:
    """What is in our table after each call of a remover case."""
    ours = ToyTable(case["table"])
    steps: list[list[Any]] = []
    for call, arguments, _ in case["steps"]:
        if call == "insert":
            ours.insert(*arguments)
        else:
            getattr(ours, call)(arguments)
        steps.append([call, arguments, sorted(ours.items)])
    return steps


def same(ours: list[list[Any]], real: list[list[Any]]) -> None:
    """Assert that the answers are equal, and name the first that is not."""
    assert len(ours) == len(real)
    for number, (mine, theirs) in enumerate(zip(ours, real, strict=True)):
        assert mine == theirs, f"call {number}: ours {mine}, Reverb's {theirs}"


def chi_square_is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts can come from probabilities: chi-square at most five standard deviations above its mean."""
    expected = probabilities * counts.sum()
    if counts[expected == 0].any():
        return False
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(1, len(counts) - 1)
    return float(((counts - expected) ** 2 / expected).sum()) <= freedom + 5 * np.sqrt(2 * freedom)
