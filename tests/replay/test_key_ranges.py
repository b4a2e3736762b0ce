"""Sets of keys as runs, against a Python set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hilt.replay.key_ranges import OFFSET_BITS, Runs, key_of
from tests.effort import rounds

KEYS = st.builds(key_of, st.integers(0, 5), st.integers(0, 12))
SETS = st.frozensets(KEYS, max_size=30)


def runs_of(keys: Any) -> Runs:
    """By adding one key after the other, in an order that is not the sorted one."""
    runs = Runs()
    for key in np.random.default_rng(len(keys)).permutation(np.array(sorted(keys), np.int64)).tolist():
        runs.add(key)
    return runs


def check(runs: Runs, expected: Any) -> None:
    keys = sorted(expected)
    assert runs.keys().tolist() == keys
    assert len(runs) == len(keys)
    assert runs.draw(np.arange(len(keys))).tolist() == keys if keys else not len(runs)
    ends = runs.starts + runs.counts
    assert (runs.counts > 0).all() and (runs.starts[1:] >= ends[:-1]).all()
    assert runs.trajectories().tolist() == sorted({key >> OFFSET_BITS for key in keys})
    near = np.array(sorted({k + d for k in keys for d in (-1, 0, 1)} | {0, key_of(9)}), np.int64)
    assert runs.contains(near).tolist() == [k in expected for k in near.tolist()]


class Machine(RuleBasedStateMachine):
    """Adding at the end, before, between; removing at the front, at the end, across runs; asking in between."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()
        self.expected: set[int] = set()
        self.versions = {self.runs.version}

    @rule(key=KEYS, count=st.integers(0, 6))
    def add(self, key: int, count: int) -> None:
        fresh = [k for k in range(key, key + count) if k not in self.expected]
        if len(fresh) == count:
            self.runs.add(key, count)
            self.expected |= set(fresh)
            self._changed(count > 0)

    @rule(count=st.integers(1, 6), gap=st.integers(0, 2))
    def append(self, count: int, gap: int) -> None:
        self.add_at_end(max(self.expected, default=-1) + 1 + gap, count)

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: self.expected)
    def next_trajectory(self, count: int) -> None:
        self.add_at_end(key_of((max(self.expected) >> OFFSET_BITS) + 1), count)

    def add_at_end(self, key: int, count: int) -> None:
        self.runs.add(key, count)
        self.expected |= set(range(key, key + count))
        self._changed(True)

    @rule(key=KEYS, count=st.integers(1, 40))
    def remove(self, key: int, count: int) -> None:
        gone = {k for k in self.expected if key <= k < key + count}
        self.runs.remove(key, count)
        self.expected -= gone
        self._changed(bool(gone))

    @rule(trajectory=st.integers(0, 6))
    def evict(self, trajectory: int) -> None:
        self.remove(key_of(trajectory), 1 << OFFSET_BITS)

    @rule(n=st.integers(1, 8))
    @precondition(lambda self: self.expected)
    def remove_front(self, n: int) -> None:
        self.remove(min(self.expected), n)

    def _changed(self, changed: bool) -> None:
        """A version is never seen again once the set has changed."""
        assert (self.runs.version not in self.versions) == changed
        self.versions.add(self.runs.version)

    @invariant()
    def holds(self) -> None:
        check(self.runs, self.expected)
        for first in (1, 3):
            assert self.runs.since(first).keys().tolist() == [
                k for k in sorted(self.expected) if k >> OFFSET_BITS >= first
            ]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=rounds(15, 100), stateful_step_count=40, deadline=None)


@settings(max_examples=rounds(50, 1000), deadline=None)
@given(SETS, SETS, st.integers(0, 6))
def test_algebra(a: frozenset[int], b: frozenset[int], first: int):
    left, right = runs_of(a), runs_of(b)
    check(left & right, a & b)
    check(left | right, a | b)
    check(left - right, a - b)
    check(left.since(first), {k for k in a if k >> OFFSET_BITS >= first})
    check(left.copy(), a)
    check(left, a)
    check(right, b)


@given(SETS)
@settings(max_examples=50, deadline=None)
def test_a_copy_is_independent(a: frozenset[int]):
    runs = runs_of(a)
    copy = runs.copy()
    copy.add(key_of(9), 3)
    copy.remove(0, key_of(3))
    check(runs, a)
    check(copy, {k for k in a if k >= key_of(3)} | {key_of(9), key_of(9) + 1, key_of(9) + 2})


def test_two_sets_never_have_the_same_version():
    """A cache remembers versions: a new set that lies where a freed one lay must not look like it."""
    versions = [Runs(np.array([i]), np.array([1])).version for i in range(100)]
    assert len(set(versions)) == 100


def test_draws_are_places_in_the_order_of_keys():
    runs = Runs()
    for trajectory in range(100):
        runs.add(key_of(trajectory), trajectory % 7 + 1)
    runs.remove(0, key_of(10))
    keys = runs.keys()
    places = np.random.default_rng(0).integers(len(runs), size=1000)
    assert np.array_equal(runs.draw(places), keys[places])


def test_key_ranges_empty():
    runs = Runs()
    assert len(runs) == 0
    assert runs.keys().tolist() == [] == runs.trajectories().tolist()
    assert runs.contains(np.array([1, 2])).tolist() == [False, False]
    assert runs.contains(np.zeros(0, np.int64)).tolist() == []
    runs.remove(0, 5)
    assert len(runs | runs) == len(runs & runs) == len(runs - runs) == 0


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_large_set_grows_and_shrinks(at_the_end: bool):
    """A window that moves on: the room is used again, and nothing is lost when it is renewed."""
    runs, expected = Runs(), []
    for trajectory in range(1000):
        offset = 0 if at_the_end else trajectory % 3
        runs.add(key_of(trajectory, offset), 2)
        expected += [key_of(trajectory, offset), key_of(trajectory, offset) + 1]
        if trajectory >= 50:
            runs.remove(key_of(trajectory - 50), 1 << OFFSET_BITS)
            expected = expected[2:]
        assert len(runs) == len(expected)
    assert runs.keys().tolist() == expected
