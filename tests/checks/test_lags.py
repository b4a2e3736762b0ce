"""Lags between signals."""

from __future__ import annotations

import numpy as np

from hilt.checks.lags import best_lag, is_switch, lagged_correlation, path_length, roughness


def test_lag_of_a_signal_behind_another():
    signal = np.random.default_rng(0).normal(size=200)
    for lag in (-3, 0, 2):
        found = lagged_correlation(np.roll(signal, lag), signal, 5)
        assert found is not None and best_lag(found, 0.5) == lag


def test_lag_is_unknown_without_correlation_or_variation():
    rng = np.random.default_rng(0)
    found = lagged_correlation(rng.normal(size=500), rng.normal(size=500), 5)
    assert found is not None and best_lag(found, 0.5) is None
    assert lagged_correlation(np.zeros(200), rng.normal(size=200), 5) is None
    assert lagged_correlation(np.zeros(10), np.zeros(10), 5) is None


def test_path_length_is_relative_to_the_range():
    values = np.c_[np.linspace(0, 1, 11), np.linspace(0, 1000, 11), np.ones(11)]
    assert np.allclose(path_length(values), 0.2)


def test_path_length_has_no_switches_and_no_noise():
    rng = np.random.default_rng(0)
    values = np.c_[np.arange(60) > 30, rng.normal(size=60)]
    assert not path_length(values).any()
    assert is_switch(values[:, 0]) and not is_switch(values[:, 1])
    assert roughness(values[:, 1:]) > 2 > roughness(np.sin(np.arange(60) / 5)[:, None])
