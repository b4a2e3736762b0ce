"""Intervals: they hold the truth as often as they say, also where episodes share
scenes, and a paired comparison sees small gains."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.observe.statistics import clustered, crossed, paired_difference, student, wilson


def test_one_episode_in_each_cluster_is_wilsons_interval() -> None:
    outcomes = [i % 5 != 0 for i in range(100)]
    assert clustered(outcomes, range(100)) == pytest.approx(wilson(80, 100), abs=2e-3)


def test_copies_of_an_episode_add_nothing() -> None:
    outcomes = [i % 5 != 0 for i in range(100)]
    assert clustered(outcomes * 4, list(range(100)) * 4) == pytest.approx(wilson(80, 100), abs=2e-3)
    assert clustered([True] * 400, list(range(100)) * 4) == wilson(100, 100)
    assert clustered([False] * 400, list(range(100)) * 4) == wilson(0, 100)


def test_the_interval_holds_the_truth_where_outcomes_of_a_scene_are_alike() -> None:
    rng, held, naive = np.random.default_rng(0), 0, 0
    for _ in range(400):
        scenes = rng.beta(1.6, 0.4, 50)  # the truth is 0.8, and scenes differ
        outcomes = (rng.random((4, 50)) < scenes).ravel().tolist()
        low, high = clustered(outcomes, list(range(50)) * 4)
        held += low <= 0.8 <= high
        low, high = wilson(sum(outcomes), 200)
        naive += low <= 0.8 <= high
    assert held >= 370 > naive, (held, naive)


def test_a_paired_comparison_sees_what_two_intervals_hide() -> None:
    rng = np.random.default_rng(1)
    hard = rng.random(100) < 0.3
    before, after = (~hard).tolist(), (~hard | (rng.random(100) < 0.3)).tolist()
    gain, low, high = paired_difference(before, after, range(100))
    assert gain == pytest.approx(np.mean(after) - np.mean(before)) and 0 < low < gain < high
    assert wilson(sum(before), 100)[1] > wilson(sum(after), 100)[0], "the two intervals overlap"
    gain_of_none, least, most = paired_difference(before, before, range(100))
    assert gain_of_none == 0 and -0.05 < least < 0 < most < 0.05
    assert paired_difference(before, after, range(100)) == (gain, low, high), "the same draws every time"


def test_clusters_of_other_sizes_count_by_their_size() -> None:
    sizes, wins = (50, 50, 1, 1, 1, 1), (1, 0, 1, 1, 0, 0)
    outcomes = [bool(win) for size, win in zip(sizes, wins, strict=True) for _ in range(size)]
    clusters = [number for number, size in enumerate(sizes) for _ in range(size)]
    low, high = clustered(outcomes, clusters)
    assert high - low > 0.7, "two clusters are nearly all of it"


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_over_seeds_and_scenes_holds_the_truth(seeds: int) -> None:
    rng, held, naive = np.random.default_rng(2), 0, 0
    truth = np.mean(1 / (1 + np.exp(-(rng.normal(1.5, 1.0, 200_000) + rng.normal(0, 1.0, 200_000)))))
    for _ in range(400):
        policies, places = rng.normal(1.5, 1.0, (seeds, 1)), rng.normal(0, 1.0, (1, 100))
        outcomes = rng.random((seeds, 100)) < 1 / (1 + np.exp(-(policies + places)))
        share, low, high = crossed(outcomes)
        assert share == pytest.approx(outcomes.mean()) and low <= share <= high
        held += low <= truth <= high
        low, high = wilson(int(outcomes.sum()), outcomes.size)
        naive += low <= truth <= high
    assert held >= 360 and naive < 280, (held, naive)


def test_a_share_and_a_gain_stay_in_their_range() -> None:
    outcomes = np.ones((3, 50))
    outcomes[0, :5] = 0
    assert crossed(outcomes)[2] == 1.0 and crossed(outcomes)[1] >= 0.0
    assert crossed(outcomes - 1)[1] >= -1.0


def test_where_all_scenes_show_the_same_others_are_still_possible() -> None:
    assert crossed(np.ones((5, 100))) == (1.0, pytest.approx(wilson(100, 100)[0]), 1.0)
    assert crossed(np.zeros((2, 50))) == (0.0, pytest.approx(-wilson(0, 50)[1]), pytest.approx(wilson(0, 50)[1]))
    gain, low, high = paired_difference([False] * 40, [True] * 40, range(40))
    assert (gain, high) == (1, 1) and low == pytest.approx(1 - wilson(0, 40)[1])
    with pytest.raises(ConfigError, match=r"values have the shape \[3\]; expected is \[seeds, scenes\]"):
        crossed(np.ones(3))


def test_students_factor() -> None:
    assert [round(student(freedom), 2) for freedom in (1, 4, 9, 10, 30, 1000)] == [12.71, 2.78, 2.26, 2.2, 2.04, 1.96]


def test_statistics_refuse_what_cannot_be_compared() -> None:
    with pytest.raises(
        ConfigError, match="2 and 1 episodes cannot be paired: try both policies from the same initial states"
    ):
        paired_difference([True, False], [True], [0, 1])
    with pytest.raises(ConfigError, match="2 outcomes and 1 clusters: expected the cluster of each outcome"):
        clustered([True, False], [0])
