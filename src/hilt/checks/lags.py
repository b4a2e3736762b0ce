"""The arithmetic of the checks: how far a robot moves, and by which lag one signal follows another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hilt.core.tree import Array

FEW_VALUES = 8
"""A dimension with at most this many distinct values is a switch, such as a gripper, and not a motion."""
NOISE = 2.0
"""From this roughness on, a dimension is noise: smooth motion has far less than 1, white noise 3.2."""
RESIDUAL = 0.6
"""A lag is better than none if it leaves less than this share of what is unexplained without it."""
EXPLAINED = 0.02
"""Without a lag, less than this unexplained is as good as it gets."""


def path_length(values: Array) -> Array:
    """How far the smooth dimensions of ``[T, D]`` values move between two steps, each relative to its range,
    ``[T - 1]``. Switches and noise, as of sensors of force, are no motion."""
    total = np.zeros(max(0, len(values) - 1))
    for column in values.T:
        if not is_switch(column) and roughness(column[:, None]) < NOISE:
            total += np.abs(np.diff(column)) / np.ptp(column)
    return total


def all_motion(columns: Mapping[str, Array], length: int) -> Array:
    """How far all columns of an episode of this length move between two steps, ``[length - 1]``."""
    return sum((path_length(values) for values in columns.values()), np.zeros(max(0, length - 1)))


def roughness(values: Array) -> float:
    """How much ``[T, D]`` values tremble: third over first differences, 0 where nothing moves."""
    span = np.ptp(values, axis=0)
    columns = values[:, span > 0] / span[span > 0]
    if len(values) < 4 or not columns.size:
        return 0.0
    first, third = (float(np.sqrt((np.diff(columns, n, axis=0) ** 2).mean())) for n in (1, 3))
    return third / first


def is_switch(values: Array) -> bool:
    """Whether a dimension has few distinct values, as the command of a gripper has."""
    return len(np.unique(values)) <= FEW_VALUES


def lagged_correlation(late: Array, early: Array, limit: int) -> Array | None:
    """The correlations of two signals for the lags -`limit` to `limit` of the first behind the second, over the same
    stretch of the second; None if one of them does not vary or they are too short."""
    inner = len(early) - 2 * limit
    if inner < limit:
        return None
    fixed = early[limit : limit + inner]
    found = np.array([_correlation(late[limit + lag : limit + lag + inner], fixed) for lag in range(-limit, limit + 1)])
    return found if np.isfinite(found).all() else None


def best_lag(correlations: Array, minimum: float) -> int | None:
    """The lag with the highest correlation, if that is high enough and clearly above the one without a lag; 0 if none
    is better, and None where no correlation is high enough. Of lags that are as good, the smallest."""
    limit = len(correlations) // 2
    highest = float(correlations.max())
    if highest < minimum:
        return None
    near = np.flatnonzero(correlations >= highest - 0.02 * (1 - highest) - 1e-9) - limit
    lag = int(near[np.argmin(np.abs(near))])
    missed = 1 - float(correlations[limit])
    return lag if missed > EXPLAINED and 1 - highest < RESIDUAL * missed else 0


def _correlation(a: Array, b: Array) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 1e-12 else float("nan")
