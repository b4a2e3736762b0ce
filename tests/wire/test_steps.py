"""The check that the fault tests rely on: it sees a step that is lost, there twice,
in the wrong order, altered, or made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.wire.steps import ENV, INTERVENTION, LENGTH, Told, check_log, make_buffer, transition, wanted_in


def write(path: Path, numbers: Sequence[int], store: str = ENV, spoil: int = -1) -> None:
    buffer = make_buffer(path)
    for sequence, n in enumerate(numbers):
        step = transition(1, 0, n)
        if n == spoil:
            step["observations"]["image"] = step["observations"]["image"].copy()
            step["observations"]["image"][3, 3, 1] ^= 1
        buffer.insert(step, "actor-1", sequence, boot="b", store=store)
    buffer.close()


def told(count: int, acknowledged: int, store: str = ENV) -> dict[tuple[int, int], Told]:
    numbers = [n for n in range(count) if wanted_in(store, n)]
    return {(1, 0): Told(count - 1, {n: i for i, n in enumerate(numbers)}, acknowledged)}


@pytest.mark.parametrize("store", [ENV, INTERVENTION])
def test_check_log_accepts_a_correct_log(tmp_path: Path, store: str):
    numbers = [n for n in range(3 * LENGTH) if wanted_in(store, n)]
    write(tmp_path / "log", numbers, store)
    arrived, counts = check_log(tmp_path / "log", store, told(3 * LENGTH, 5, store), [1])
    assert arrived.steps == len(numbers) == counts["promised"]
    _, counts = check_log(tmp_path / "log", store, told(3 * LENGTH, 5, store), [])
    assert counts["promised"] == 6


def test_check_log_allows_missing_unsynced_steps_at_the_end(tmp_path: Path):
    write(tmp_path / "log", range(30))
    _, counts = check_log(tmp_path / "log", ENV, told(40, 20), [])
    assert (counts["unpromised but there"], counts["lost with their memory"]) == (9, 10)


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        (range(30), "10 of 40 promised steps are lost, from n=30 to n=39"),
        ([*range(10), *range(9, 40)], "1 of 41 steps are there twice, the first is n=9"),
        ([*range(10), 11, 10, *range(12, 40)], "out of order: n=10 comes after n=11"),
        (range(41), "1 steps are there that were never inserted, the first is n=40"),
    ],
)
def test_check_log_finds_errors_on_disk(tmp_path: Path, numbers: Sequence[int], complaint: str):
    write(tmp_path / "log", numbers)
    with pytest.raises(AssertionError, match=complaint):
        check_log(tmp_path / "log", ENV, told(40, -1), [1])


def test_a_gap_is_seen_even_where_nothing_was_promised(tmp_path: Path):
    write(tmp_path / "log", [*range(10), *range(12, 40)])
    with pytest.raises(AssertionError, match=r"of 40 steps up to n=39, 2 are missing: \[10, 11\]"):
        check_log(tmp_path / "log", ENV, told(40, 5), [])


def test_a_changed_pixel_is_seen(tmp_path: Path):
    write(tmp_path / "log", range(40), spoil=21)
    with pytest.raises(AssertionError, match="observations/image is wrong in 1 of 40 steps, first in actor 1 n 21"):
        check_log(tmp_path / "log", ENV, told(40, -1), [1])


def test_steps_are_distinct():
    seen = {
        transition(a, life, n)["observations"]["image"].tobytes()
        for a in range(4)
        for life in range(4)
        for n in range(60)
    }
    assert len(seen) == 4 * 4 * 60
    first, second = transition(1, 0, 4), transition(1, 0, 5)
    assert np.array_equal(first["next_observations"]["image"], second["observations"]["image"])
