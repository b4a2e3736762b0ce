"""Checks of all episodes together: outliers, mixed units and rotations, and statistics that do not fit the data."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hilt.checks.dataset_findings import DatasetFinding
from hilt.checks.episode_columns import Check, EpisodeColumns
from hilt.checks.lags import is_switch
from hilt.checks.motion_checks import is_turn
from hilt.core.tree import Array
from hilt.formats.episodes import INSTRUCTION, Dataset, texts_of

MIN_EPISODES = 10
"""Episodes of a task below which none is an outlier."""
DEVIATIONS = 6.0
FEW, RARE = 3, 0.02
"""Episodes that are far from the median are outliers if they are this few, or this share of all."""
UNITS = {"degrees": 180 / np.pi, "millimeters": 1000.0, "centimeters": 100.0}
"""Units that are mixed up with radians or meters, and the factor between them."""
FACTOR_TOLERANCE = 1.3
MAX_SPREAD = 5.0
"""Within each of the two groups of episodes, the largest is at most this many times the smallest."""
UNIT_TOLERANCE = 1e-3
MEAN_TOLERANCE, SPREAD_TOLERANCE = 0.1, 0.1


class Outliers(Check):
    """Looks for episodes whose length, return or size of actions is far from that of all others of their task."""

    name = "outliers"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._tasks: dict[str, _Rows] = {}
        """By instruction: length, return and size of the actions of each episode."""

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        texts = texts_of(episode.episode.facts.get(INSTRUCTION, ""), 1)
        rewards = episode.leaves.get("rewards")
        reward = 0.0 if rewards is None or rewards.dtype.kind not in "biuf" else float(rewards.sum())
        size = [float(np.sqrt(np.mean(actions**2))) for actions in episode.actions.values()]
        self._tasks.setdefault(texts[0], _Rows()).add(episode.number, [len(episode), reward, sum(size)])
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        for rows in self._tasks.values():
            table = rows.table()
            for name, values in zip(("length", "return", "actions"), table.T, strict=True):
                far = np.flatnonzero(outlying(values, name)) if len(values) >= MIN_EPISODES else np.zeros(0, int)
                about: dict[str, Any] = {"episodes": len(values), "median": float(np.median(values))}
                distance = np.abs(values - about["median"])
                if len(far) > max(FEW, RARE * len(values)):  # so is the task, or the policy that learns it
                    worst = values[far[np.argmax(distance[far])]]
                    yield self.about("info", f"outliers.many_{name}", count=len(far), value=worst, **about)
                    continue
                for place in far:
                    number, weight = rows.numbers[place], distance[place] / max(abs(about["median"]), 1e-9)
                    text = f"outliers.{name}"
                    yield self.about("warning", text, episode=number, weight=weight, value=values[place], **about)


class Units(Check):
    """Looks for dimensions that are larger by the factor between two units in some episodes."""

    name = "units"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._sizes: dict[str, _Rows] = {}

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        for path, values in (episode.states | episode.actions).items():
            self._sizes.setdefault(path, _Rows()).add(episode.number, np.sqrt((values**2).mean(axis=0)).tolist())
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        for path, rows in self._sizes.items():
            groups: dict[tuple[int, ...], tuple[str, list[int]]] = {}
            table = rows.table()
            for dimension, column in enumerate(table.T):
                if (mixed := mixed_units(column)) is not None:
                    groups.setdefault(tuple(mixed[1]), (mixed[0], []))[1].append(dimension)
            for odd, (unit, dimensions) in groups.items():
                if len(dimensions) < min(2, table.shape[1]):
                    continue  # one of several: a force that was met in some episodes, for instance
                numbers = [rows.numbers[place] for place in odd]
                yield self.about(
                    "warning",
                    f"units.{unit}",
                    episode=numbers[0],
                    at=path,
                    weight=len(odd),
                    dimensions=dimensions,
                    odd=len(odd),
                    episodes=len(rows.numbers),
                    names=[self.dataset.label(number) for number in numbers[:5]],
                )


class Rotations(Check):
    """Looks for quaternions of mixed order, of changing sign or not of length 1, and for angles that wrap."""

    name = "rotations"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._starts: dict[tuple[str, int], _Rows] = {}
        """By column and dimension: the first quaternion of each episode."""
        self._others: dict[tuple[str, int], list[int]] = {}
        """Likewise: how many episodes have no quaternion there, and the first of them."""
        self._wraps: list[DatasetFinding] = []
        self._ranges: dict[str, tuple[Array, Array]] = {}
        """By column: the lowest and highest value of each dimension in all episodes."""

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        for path, values in (episode.states | episode.actions).items():
            within = np.zeros(values.shape[1], bool)
            for first in range(values.shape[1] - 3):
                window = values[:, first : first + 4]
                if sum(np.ptp(column) > UNIT_TOLERANCE and not is_switch(column) for column in window.T) < 2:
                    continue  # no rotation that turns: the number of a task, or zeros beside a gripper
                if np.abs(np.linalg.norm(window, axis=1) - 1).max() >= UNIT_TOLERANCE:
                    self._others.setdefault((path, first), [0, episode.number])[0] += 1
                    continue
                within[first : first + 4] = True
                self._starts.setdefault((path, first), _Rows()).add(episode.number, window[0].tolist())
                yield from self._flips(episode, path, window)
            self._add_wraps(episode, path, values, within)

    def _flips(self, episode: EpisodeColumns, path: str, window: Array) -> Iterator[DatasetFinding]:
        flips = np.flatnonzero((window[1:] * window[:-1]).sum(axis=1) < -0.5)
        if len(flips):
            steps = (int(flips[0]), int(flips[0]) + 1)
            yield episode.finding(
                "warning", "rotations.flip", at=path, steps=steps, weight=len(flips), count=len(flips)
            )

    def _add_wraps(self, episode: EpisodeColumns, path: str, values: Array, within: Array) -> None:
        moves = np.abs(np.diff(values, axis=0))
        low, high = values.min(axis=0), values.max(axis=0)
        known = self._ranges.get(path, (low, high))
        if known[0].shape == low.shape:
            self._ranges[path] = np.minimum(low, known[0]), np.maximum(high, known[1])
        for dimension in np.flatnonzero(~within).tolist():
            turns = [place for place in np.flatnonzero(moves[:, dimension] > 6) if is_turn(moves[place, dimension])]
            usual = np.median(moves[:, dimension]) if len(moves) else 0
            if turns and usual < 0.1 * moves[turns[0], dimension]:
                count, steps = len(turns), (int(turns[0]), int(turns[0]) + 1)
                finding = episode.finding(
                    "warning", "rotations.wrap", at=path, steps=steps, weight=count, dimension=dimension, count=count
                )
                self._wraps.append(finding)

    def _is_angle(self, path: str, dimension: int) -> bool:
        """Whether all values of a dimension lie within one turn, as those of an angle that wraps do."""
        low, high = (float(bound[dimension]) for bound in self._ranges[path])
        return any(
            (-turn / 2 <= low and high <= turn / 2) or (-0.05 * turn <= low and high <= turn)
            for turn in (1.05 * 2 * np.pi, 1.05 * 360.0)
            if high - low > turn / 2
        )

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        yield from (finding for finding in self._wraps if self._is_angle(finding.column, finding.values["dimension"]))
        for (path, first), starts in self._starts.items():
            dimensions = {"first": first, "last": first + 3}
            others, example = self._others.get((path, first), [0, 0])
            if 0 < others < len(starts.numbers):
                yield self.about(
                    "warning",
                    "rotations.length",
                    episode=example,
                    at=path,
                    episodes=len(starts.numbers),
                    others=others,
                    example=self.dataset.label(example),
                    **dimensions,
                )
            for place in other_order(starts.table()):
                yield self.about("warning", "rotations.order", episode=starts.numbers[place], at=path, **dimensions)


class Statistics(Check):
    """Compares the statistics for normalization that a dataset stores with those of its data."""

    name = "statistics"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._stored = dataset.stored_statistics()
        self._found: dict[str, _Moments] = {}

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        for path in self._stored:
            column = episode.leaves.get(path)
            if column is not None and column.dtype.kind in "iuf" and len(column):
                values = column.reshape(len(column), -1).astype(np.float64)
                self._found.setdefault(path, _Moments(values.shape[1])).add(values)
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        for path, found in self._found.items() if complete else ():
            if wrong := found.differing(self._stored[path]):
                yield self.about("error", "statistics.differ", at=path, weight=len(wrong), wrong=wrong)


class _Rows:
    """A few numbers of each episode, in little memory. Episodes with another number of them are left out."""

    def __init__(self) -> None:
        self.numbers, self._values, self._width = array("q"), array("d"), 0

    def add(self, number: int, values: Sequence[float]) -> None:
        self._width = self._width or len(values)
        if len(values) == self._width:
            self.numbers.append(number)
            self._values.extend(values)

    def table(self) -> Array:
        """The numbers, ``[episodes, width]``."""
        return np.asarray(self._values, np.float64).reshape(len(self.numbers), self._width)


class _Moments:
    """Mean, standard deviation and range of columns that come in parts."""

    def __init__(self, width: int):
        self.count, self.mean, self.squares = 0, np.zeros(width), np.zeros(width)
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, values: Array) -> None:
        if values.shape[1:] != self.mean.shape:
            return  # of another width than the first episode, which the reader of no format hands out
        count, mean = len(values), values.mean(axis=0)
        total, delta = self.count + count, mean - self.mean
        self.squares += ((values - mean) ** 2).sum(axis=0) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total
        self.low, self.high = np.minimum(self.low, values.min(axis=0)), np.maximum(self.high, values.max(axis=0))

    def differing(self, stored: dict[str, Array]) -> list[dict[str, object]]:
        """What does not fit, as texts with their values."""
        std = np.sqrt(self.squares / self.count)
        # what float32 cannot tell apart does not differ
        floor = 1e-4 * (np.abs(self.mean) + self.high - self.low) + 1e-6
        allowed = {
            "mean": (self.mean, MEAN_TOLERANCE * std + floor),
            "std": (std, SPREAD_TOLERANCE * std + floor),
            "min": (self.low, 0.01 * (self.high - self.low) + floor),
            "max": (self.high, 0.01 * (self.high - self.low) + floor),
        }
        wrong: list[dict[str, Any]] = []
        for name, (value, tolerance) in allowed.items():
            if name not in stored:
                continue
            given = np.asarray(stored[name], np.float64).reshape(-1)
            if given.shape != value.shape:
                wrong.append({"text": "statistics.size", "name": name, "given": given.size, "width": value.size})
                continue
            for d in np.flatnonzero(~(np.abs(given - value) <= tolerance)).tolist():
                of = {"name": name, "dimension": d, "value": value[d], "stored": given[d]}
                wrong.append({"text": "statistics.value", **of})
        return wrong


def outlying(values: Array, name: str) -> Array:
    """Marks the values that are far from the others."""
    usual = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - usual)))
    if name == "length":  # many end at a time limit, and a quick success is none
        return (values > 4 * usual) | (values < max(3, usual / 10))
    if deviation < 1e-6 * (abs(usual) + 1e-9):
        return np.zeros(len(values), bool)  # most are the same, as with a reward for success only
    return np.abs(values - usual) > DEVIATIONS * deviation + 0.5 * abs(usual)


def mixed_units(sizes: Array) -> tuple[str, list[int]] | None:
    """The units that the sizes of one dimension mix, and the episodes of the smaller group."""
    moving = np.flatnonzero(sizes > 0)
    order = moving[np.argsort(sizes[moving])]
    if len(order) < 2:
        return None
    ratios = sizes[order[1:]] / sizes[order[:-1]]
    split = int(np.argmax(ratios)) + 1
    small, large = order[:split], order[split:]
    spread = max(sizes[group[-1]] / sizes[group[0]] for group in (small, large))
    if spread > MAX_SPREAD or ratios[split - 1] < 2 * spread:
        return None
    factor = float(np.median(sizes[large]) / np.median(sizes[small]))
    name, nearest = min(UNITS.items(), key=lambda unit: abs(np.log(factor / unit[1])))
    if abs(np.log(factor / nearest)) > np.log(FACTOR_TOLERANCE):
        return None
    fewer = small if len(small) < len(large) else large
    return name, sorted(fewer.tolist())


def other_order(quaternions: Array) -> list[int]:
    """The places of the quaternions that are the rotation of most others with its components moved by one place."""
    if len(quaternions) < 3:
        return []
    signs = np.sign(quaternions[:, [np.abs(quaternions).mean(axis=0).argmax()]])
    usual = np.median(quaternions * signs, axis=0)
    length = np.linalg.norm(usual)
    if length < 0.9:
        return []  # they do not begin alike
    near = np.abs(quaternions @ usual) / length
    moved = np.max([np.abs(np.roll(quaternions, by, axis=1) @ usual) / length for by in (1, -1)], axis=0)
    return np.flatnonzero((moved > 0.995) & (near < 0.9)).tolist()
