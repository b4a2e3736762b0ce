"""Intervals: they hold the truth as often as they say, also where episodes share scenes, and a paired comparison sees small gains."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.observe.statistics import clustered, crossed, paired_difference, wilson


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
    assert paired_difference(before, before, range(100)) == (0, 0, 0)
    assert paired_difference(before, after, range(100)) == (gain, low, high), "the same draws every time"


def test_few_seeds_that_differ_are_less_sure_than_their_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hilt.observe.statistics.RESAMPLES", 400)
    rng, held, naive = np.random.default_rng(2), 0, 0
    for _ in range(60):
        policies = rng.normal(0.8, 0.06, (5, 1)).clip(0, 1)
        outcomes = rng.random((5, 100)) < policies
        share, low, high = crossed(outcomes)
        assert share == pytest.approx(outcomes.mean()) and low < share < high
        held += low <= 0.8 <= high
        low, high = wilson(int(outcomes.sum()), 500)
        naive += low <= 0.8 <= high
    assert held >= 51 > naive, (held, naive)


def test_where_all_policies_succeed_everywhere_each_scene_counts_once() -> None:
    assert crossed(np.ones((5, 100))) == (1.0, *wilson(100, 100)) and crossed(np.zeros((2, 50))) == (0.0, *wilson(0, 50))
    assert crossed(np.zeros((2, 3)), difference=True) == (0, 0, 0)
    with pytest.raises(ConfigError, match=r"values have the shape \[3\]; expected is \[seeds, scenes\]"):
        crossed(np.ones(3))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 and 1 episodes cannot be paired: try both policies from the same initial states"):
        paired_difference([True, False], [True], [0, 1])
    with pytest.raises(ConfigError, match="2 outcomes and 1 clusters: expected the cluster of each outcome"):
        clustered([True, False], [0])
