"""The tests' own order and selection."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import schedule
from tests.effort import LONG, rounds

FILES = [f"tests/test_{name}.py" for name in "abcdefgh"]


def test_how_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(LONG, raising=False)
    assert rounds(3, 100) == 3
    monkeypatch.setenv(LONG, "1")
    assert rounds(3, 100) == 100


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.lists(st.floats(0, 50), min_size=8, max_size=8), st.integers(1, 4))
def test_longest_first(counts: list[int], seconds: list[float], workers: int):
    """Every test once; each worker's piece goes from files with long tests to quick ones, and no file lies in more pieces than it must."""
    tests = [f"{file}::test_{number}" for file, count in zip(FILES, counts, strict=False) for number in range(count)]
    taken = {f"{file}::test_0": duration for file, duration in zip(FILES, seconds, strict=False)}
    row = [tests[index] for index in schedule.longest_first(tests, taken, workers)]
    assert Counter(row) == Counter(tests)
    first = max(FILES[: len(counts)], key=lambda file: taken[f"{file}::test_0"])
    assert schedule.file_of(row[0]) == first or len(tests) < workers
    if workers == 1:
        durations = [taken[f"{schedule.file_of(test)}::test_0"] for test in row]
        assert durations == sorted(durations, reverse=True)


def test_the_slow_files():
    taken = {"tests/test_a.py::test_0": 1.5, "tests/test_a.py::test_1": 1.5, "tests/test_b.py::test_0": 1.9}
    assert schedule.slow_files(taken) == {"tests/test_a.py"}
