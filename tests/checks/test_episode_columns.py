"""What the checks see of an episode."""

from __future__ import annotations

import numpy as np

from hilt.checks.episode_columns import EpisodeColumns, stretches
from hilt.formats.episodes import Episode
from tests.checks.arm import arm


def columns_of(episode: Episode) -> EpisodeColumns:
    return EpisodeColumns(0, "episode 0", episode)


def test_columns_are_sorted_by_what_they_are():
    seen = columns_of(arm(length=7))
    assert {path: column.shape for path, column in seen.cameras.items()} == {"observations/front": (7, 16, 16, 3)}
    assert {path: column.shape for path, column in seen.states.items()} == {"observations/state": (7, 3)}
    assert {path: column.shape for path, column in seen.actions.items()} == {"actions": (7, 3)}
    assert seen.times is None and len(seen) == 7


def test_columns_of_a_stack_show_the_newest_image():
    stack = np.arange(4 * 2 * 8 * 8 * 3).astype(np.uint8).reshape(4, 2, 8, 8, 3)
    camera = columns_of(Episode({"observations": {"front": stack}})).cameras["observations/front"]
    assert np.array_equal(camera, stack[:, 1])


def test_columns_that_are_wide_or_not_finite_are_left_out():
    wide, bad = np.zeros((4, 1000), np.float32), np.full((4, 2), np.nan)
    seen = columns_of(Episode({"observations": {"embedding": wide, "state": np.zeros((4, 1, 2))}, "actions": bad}))
    assert list(seen.states) == ["observations/state"] and seen.states["observations/state"].shape == (4, 2)
    assert seen.actions == {}


def test_times_come_from_the_format_or_from_a_column():
    clock = np.arange(4) / 10
    of_format = columns_of(Episode({"rewards": np.zeros(4)}, {}, clock)).times
    of_column = columns_of(Episode({"rewards": np.zeros(4), "times": {"observed": clock + 1e9}})).times
    assert of_format is not None and of_format[0] == "timestamp" and np.array_equal(of_format[1], clock)
    assert of_column is not None and of_column[0] == "times/observed"


def test_stretches():
    assert stretches(np.array([1, 1, 0, 0, 1], bool)) == [(0, 1), (4, 4)] and stretches(np.zeros(3, bool)) == []
