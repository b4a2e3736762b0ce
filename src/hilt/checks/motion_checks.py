"""Checks of motion in time: clocks that jump, trembling and jumping robots, and robots that stand still."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hilt.checks.dataset_findings import DatasetFinding
from hilt.checks.episode_columns import Check, EpisodeColumns, stretches
from hilt.checks.lags import all_motion, is_switch, roughness
from hilt.core.tree import Array
from hilt.formats.episodes import Dataset

LONG_INTERVAL = 1.75
"""An interval this many times as long as nine of ten has lost a step."""
UNEVEN = 1.5
"""A clock is uneven if one of ten intervals is this many times as long as the usual one."""
RATE_TOLERANCE = 0.1
SAME_RATE = 0.05
"""Usual intervals of two episodes that differ by less than this part are of the same rate."""
FORCES = ("force", "torque", "wrench", "effort", "current")
TREMBLING = 2.5
"""The roughness from which on an episode trembles."""
MIN_EPISODES = 5
RARE = 0.3
"""The share of episodes up to which a jump is not in the nature of a dimension, as the closing of a gripper is."""
MIN_LENGTH = 20
JUMP = 10.0
"""A motion this many times as large as nearly all others of the episode, and a third of the range, is a jump."""
STILL = 0.02
"""A step that moves less than this part of the quick steps stands still."""
IDLE_SHARE, MIN_IDLE = 0.15, 15
"""A stretch of standing still is named from this part of the episode and this many steps on."""


class Timestamps(Check):
    """Looks for clocks that stand, go back or jump, and for another rate than the metadata state.

    A jump is a lost step only where steps have a rate. In a simulation that waits for no clock, an interval is as long
    as the computation took: then one finding says so.
    """

    name = "timestamps"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._intervals, self._uneven = array("d"), array("b")
        self._found: list[DatasetFinding] = []

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        if episode.times is None or len(episode) < 3:
            return
        path, times = episode.times
        intervals = np.diff(times)
        back = np.flatnonzero(intervals <= 0)
        if len(back) or not np.isfinite(times).all():
            place = int(back[0]) if len(back) else 0
            steps = (place, place + 1)
            yield episode.finding("error", "timestamps.back", at=path, steps=steps, count=len(back), total=len(times))
            return
        usual, long = (float(np.quantile(intervals, share)) for share in (0.5, 0.9))
        gaps = np.flatnonzero(intervals > LONG_INTERVAL * long)
        uneven = long > UNEVEN * usual
        self._intervals.append(usual)
        self._uneven.append(uneven)
        if uneven:
            self._found.append(
                episode.finding("info", "timestamps.uneven", at=path, weight=long / usual, long=long, usual=usual)
            )
        if len(gaps):
            longest = int(gaps[np.argmax(intervals[gaps])])
            gap = float(intervals[longest])
            self._found.append(
                episode.finding(
                    "warning",
                    "timestamps.gap",
                    at=path,
                    steps=(longest, longest + 1),
                    weight=gap / usual,
                    count=len(gaps),
                    longest=gap,
                    usual=usual,
                )
            )
        rate = episode.episode.facts.get("fps")
        stated = float(rate) if path == "timestamp" and isinstance(rate, int | float) else 0.0
        if stated > 0 and abs(usual * stated - 1) > RATE_TOLERANCE:
            yield episode.finding("warning", "timestamps.rate", at=path, rate=1 / usual, stated=stated)

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        usual, uneven = np.array(self._intervals), np.array(self._uneven, bool)
        if len(usual) >= MIN_EPISODES:
            unpaced = uneven | ~has_company(usual)
            if unpaced.mean() > 0.5:
                low, high = np.quantile(usual, [0.05, 0.95])
                count = int(unpaced.sum())
                yield self.about("info", "timestamps.unpaced", count=count, episodes=len(usual), low=low, high=high)
                return
        yield from self._found


class Jerk(Check):
    """Looks for single jumps of the state, and for episodes that tremble much more than the others."""

    name = "jerk"

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._roughness: dict[str, list[tuple[int, float]]] = {}
        self._jumps: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """By column and dimension: the episodes with a jump, and the steps before it."""
        self._episodes = 0

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        if len(episode) >= MIN_LENGTH:
            self._episodes += 1
            for path, states in episode.states.items():
                for dimension, column in enumerate(() if is_force(path) else states.T):
                    if (place := jump_of(column)) is not None:
                        self._jumps.setdefault((path, dimension), []).append(
                            (episode.number, place + episode.first_step)
                        )
            for path, actions in (episode.actions or episode.states).items():
                moving = [column for column in actions.T if not is_switch(column)]
                if moving:
                    found = roughness(np.stack(moving, axis=1))
                    self._roughness.setdefault(path, []).append((episode.number, found))
        yield from ()

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        jumps: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for (path, dimension), those in self._jumps.items():
            if self._episodes < MIN_EPISODES or len(those) <= RARE * self._episodes:  # else it is how this one moves
                for number, place in those:
                    jumps.setdefault((number, path), []).append((place, dimension))
        for (number, path), places in sorted(jumps.items()):
            first = min(places)[0]
            finding = self.about(
                "warning", "jerk.jump", episode=number, at=path, dimensions=sorted(d for _, d in places)
            )
            yield replace(finding, first=first, last=first + 1, trimmed=self.dataset.first_step(number))
        for path, rough in self._roughness.items():
            usual = float(np.median([found for _, found in rough]))
            for number, found in rough if len(rough) >= MIN_EPISODES else []:
                if found > TREMBLING and found > 2 * usual:
                    factor = found / max(usual, 1e-9)
                    yield self.about("warning", "jerk.tremble", episode=number, at=path, weight=factor, factor=factor)


class Idle(Check):
    """Looks for stretches in which the robot stands still."""

    name = "idle"

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        length = len(episode)
        if length < MIN_LENGTH or not episode.states:
            return
        if not any(np.ptp(states, axis=0).any() for states in episode.states.values()):
            yield episode.finding("warning", "idle.all", weight=length, count=length)
            return
        speed = all_motion(episode.states, length)
        if not speed.any():
            return  # nothing but switches and noise
        still = np.r_[speed <= STILL * np.quantile(speed, 0.95), False]
        least = max(MIN_IDLE, IDLE_SHARE * length)
        found = [(first, last) for first, last in stretches(still) if last - first + 1 >= least]
        total = sum(last - first + 1 for first, last in found)
        for first, last in found:
            where = "begins" if first == 0 else "ends" if last >= length - 2 else "stops"
            yield episode.finding(
                "warning" if total > length / 2 else "info",
                f"idle.{where}",
                steps=(first, last if last < length - 2 else length - 1),
                weight=last - first + 1,
                count=last - first + 1,
                total=length,
            )


def jump_of(values: Array) -> int | None:
    """The step after which one dimension jumps; None for switches, and for angles that wrap."""
    if is_switch(values):
        return None
    moves = np.abs(np.diff(values))
    place, usual = int(np.argmax(moves)), float(np.quantile(moves, 0.95))
    largest, span = float(moves[place]), float(np.ptp(values))
    if usual < 1e-6 * span or largest < JUMP * usual or largest < span / 3 or is_turn(largest):
        return None
    return place


def has_company(intervals: Array) -> Array:
    """Marks the episodes whose usual interval is shared by one of five episodes: steps that have a rate, or several."""
    ordered = np.sort(intervals)
    low, high = intervals * (1 - SAME_RATE), intervals * (1 + SAME_RATE)
    count = np.searchsorted(ordered, high, "right") - np.searchsorted(ordered, low, "left")
    return np.asarray(count >= 0.2 * len(intervals))


def is_force(path: str) -> bool:
    """Whether a column has forces, which jump at a contact."""
    return any(word in path.lower() for word in FORCES)


def is_turn(move: float) -> bool:
    """Whether a motion is a whole turn, in radians or degrees: an angle that wraps."""
    return any(abs(move / turn - 1) < 0.1 for turn in (2 * np.pi, 360.0))
