"""Checks of actions: constant, at their limits, or shifted by a step against the states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hilt.checks.dataset_findings import DatasetFinding
from hilt.checks.episode_columns import Check, EpisodeColumns
from hilt.checks.lags import FEW_VALUES, best_lag
from hilt.core.tree import Array
from hilt.formats.episodes import Dataset

MIN_LENGTH = 10
"""Steps below which an episode is too short to judge."""
MIN_STEPS = 50
SATURATED = 0.15
"""The share of steps at a limit from which on actions are saturated."""
MAX_LAG = 3
MIN_CORRELATION = 0.7
MAX_DIMENSIONS = 16
"""Dimensions of actions and states that are compared with each other."""


class ConstantActions(Check):
    """Looks for episodes whose actions never change although the robot moves, and for dimensions that never vary."""

    name = "constant-actions"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._low: dict[str, Array] = {}
        self._high: dict[str, Array] = {}
        self._steps = 0

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        self._steps += len(episode)
        for path, actions in episode.actions.items():
            low, high = actions.min(axis=0), actions.max(axis=0)
            if self._low.get(path, low).shape == low.shape:
                self._low[path] = np.minimum(low, self._low.get(path, low))
                self._high[path] = np.maximum(high, self._high.get(path, high))
            moves = any((np.ptp(state, axis=0) > 1e-3).any() for state in episode.states.values())
            if len(actions) >= MIN_LENGTH and (high == low).all() and moves:
                yield episode.finding("warning", "constant-actions.episode", at=path, count=len(actions))

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        for path, low in self._low.items():
            same = np.flatnonzero(low == self._high[path]).tolist()
            if self._steps < MIN_STEPS or not same:
                continue
            if len(same) == len(low):
                yield self.about("error", "constant-actions.all", at=path)
            else:
                yield self.about("info", "constant-actions.dimension", at=path, dimensions=same, width=len(low))


class SaturatedActions(Check):
    """Looks for dimensions that are at their lowest or highest value in many steps, and take other values, too."""

    name = "saturated-actions"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._limits: dict[str, list[_Limits]] = {}

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        for path, actions in episode.actions.items():
            known = self._limits.setdefault(path, [_Limits() for _ in range(actions.shape[1])])
            for limits, values in zip(known, actions.T, strict=False):
                limits.add(values, episode.label)
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        for path, known in self._limits.items():
            for dimension, limits in enumerate(known):
                share = limits.share
                if limits.steps >= MIN_STEPS and share >= SATURATED and len(limits.distinct) > FEW_VALUES:
                    yield self.about(
                        "warning",
                        "saturated-actions.limit",
                        at=path,
                        weight=share,
                        dimension=dimension,
                        low=limits.low,
                        high=limits.high,
                        percent=100 * share,
                        place=limits.place,
                    )


class _Limits:
    """The lowest and highest value of one dimension, and how often it is there."""

    def __init__(self) -> None:
        self.low, self.high, self.steps = np.inf, -np.inf, 0
        self.counts = [0, 0]
        self.place = ""
        self.distinct: set[float] = set()

    def add(self, values: Array, place: str) -> None:
        low, high = float(values.min()), float(values.max())
        tolerance = 1e-6 * max(1e-12, max(high, self.high) - min(low, self.low))
        if low < self.low - tolerance:
            self.low, self.counts[0], self.place = low, 0, place
        if high > self.high + tolerance:
            self.high, self.counts[1], self.place = high, 0, place
        self.counts[0] += int((values <= self.low + tolerance).sum())
        self.counts[1] += int((values >= self.high - tolerance).sum())
        self.steps += len(values)
        if len(self.distinct) <= FEW_VALUES:
            self.distinct.update(np.unique(values)[: FEW_VALUES + 1].tolist())

    @property
    def share(self) -> float:
        """The share of steps at the limits; a single extreme step at one of them does not count."""
        return sum(count for count in self.counts if count >= MIN_LENGTH) / max(1, self.steps)


class ShiftedActions(Check):
    """Compares actions, and their changes, with the motions of the states before, at and after each step.

    An action causes the motion from its own state to the next one, or a later one if the robot is slow to follow. An
    action that belongs to a motion of the past was stored with the wrong state.
    """

    name = "shifted-actions"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._sums: dict[tuple[str, str, str], Array] = {}
        self._steps = 0

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        inner = len(episode) - 2 * MAX_LAG - 2
        if inner >= MIN_LENGTH:
            self._steps += inner
            for path, actions in episode.actions.items():
                commands = {
                    "actions": actions[1:, :MAX_DIMENSIONS],
                    "changes": np.diff(actions[:, :MAX_DIMENSIONS], axis=0),
                }
                for state_path, states in episode.states.items():
                    motion = np.diff(states[:, :MAX_DIMENSIONS], axis=0)[1:]
                    for kind, command in commands.items():
                        self._add((path, state_path, kind), command, motion, inner)
        yield from ()

    def _add(self, key: tuple[str, str, str], command: Array, motion: Array, inner: int) -> None:
        """Adds the products of commands and motions for each lag of the motions: ``[3, lags, A, S]``."""
        x = command[MAX_LAG : MAX_LAG + inner]
        x = x - x.mean(axis=0)
        sums = []
        for lag in range(-MAX_LAG, MAX_LAG + 1):
            y = motion[MAX_LAG + lag : MAX_LAG + lag + inner]
            y = y - y.mean(axis=0)
            xx = np.broadcast_to((x * x).sum(axis=0)[:, None], (x.shape[1], y.shape[1]))
            yy = np.broadcast_to((y * y).sum(axis=0), xx.shape)
            sums.append(np.stack([x.T @ y, xx, yy]))
        found = np.stack(sums, axis=1)
        known = self._sums.get(key)
        if known is None or known.shape == found.shape:
            self._sums[key] = found if known is None else known + found

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        best: dict[str, tuple[float, bool, int, int, int, str]] = {}  # of two as strong, the one without a lag
        for (path, state_path, _), (xy, xx, yy) in self._sums.items():
            size = np.sqrt(xx * yy)
            correlations = np.where(size > 1e-12, xy / np.where(size > 1e-12, size, 1), 0)
            for a, s in np.ndindex(correlations.shape[1:]):
                lag = best_lag(correlations[:, a, s], MIN_CORRELATION)
                if lag is not None:
                    strength = round(float(correlations[lag + MAX_LAG, a, s]), 2)
                    best[path] = max(
                        best.get(path, (0.0, True, 0, 0, 0, "")), (strength, not lag, lag, a, s, state_path)
                    )
        for path, (strength, _, lag, a, s, state_path) in best.items():
            if self._steps < MIN_STEPS or not lag:
                continue
            yield self.about(
                "warning" if lag < 0 else "info",
                "shifted-actions.past" if lag < 0 else "shifted-actions.late",
                at=path,
                lag=abs(lag),
                action=a,
                state=s,
                column=state_path,
                strength=strength,
            )
