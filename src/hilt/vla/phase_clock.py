"""Where the time of a rollout goes: in the simulators, in the policy, or beside them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.envs.pool import Beginning, Pool, Reply, TaskDescription
from hilt.policies.base import Policy, Record


class PhaseClock:
    """Seconds spent in each of some things."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - began, name)

    def add(self, seconds: float, *names: str) -> None:
        for name in names:
            self._spent[name] = self._spent.get(name, 0.0) + seconds

    def begin(self) -> dict[str, float]:
        return {**self._spent, "all": time.perf_counter()}

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds since then, of each thing and of `all`."""
        return {name: seconds - before.get(name, 0.0) for name, seconds in self.begin().items()}


class TimedPolicy:
    """A policy whose `act` counts as the time of the model."""

    def __init__(self, policy: Policy, clock: PhaseClock):
        self._policy, self._clock = policy, clock

    def act(self, *given: Any, **named: Any) -> tuple[np.ndarray, Record]:
        with self._clock.at("model"):
            return self._policy.act(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class TimedPool:
    """A simulator's time is what is waited for it, and what is done `beside` until it has to be waited for. What
    the policy does meanwhile is the policy's."""

    def __init__(self, pool: Pool, clock: PhaseClock):
        self._pool, self._clock = pool, clock
        self.begin()

    def begin(self) -> dict[str, float]:
        """From now on."""
        self._left = self._clock.begin()
        return self._left

    @property
    def slots(self) -> int:
        return self._pool.slots

    def describe(self, task: str) -> TaskDescription:
        return self._pool.describe(task)

    def start(self, slot: int, beginning: Beginning) -> None:
        with self._clock.at("simulator"):
            self._pool.start(slot, beginning)

    def step(self, slot: int, actions: npt.ArrayLike) -> None:
        with self._clock.at("simulator"):
            self._pool.step(slot, actions)

    def collect(self, slots: Sequence[int]) -> list[Reply]:
        if self._pool.busy(slots):
            passed = self._clock.since(self._left)
            self._clock.add(
                passed["all"] - passed.get("model", 0.0) - passed.get("simulator", 0.0), "simulator", "beside"
            )
        with self._clock.at("simulator"):
            answers = self._pool.collect(slots)
        self.begin()
        return answers
