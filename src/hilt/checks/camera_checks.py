"""Checks of cameras: frames that are black or repeat, and cameras that are out of step with the states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hilt.checks.dataset_findings import DatasetFinding
from hilt.checks.episode_columns import Check, EpisodeColumns, stretches
from hilt.checks.lags import all_motion, best_lag, lagged_correlation, path_length
from hilt.core.tree import Array
from hilt.formats.episodes import Dataset

BLACK = 12
"""A frame is black if no value in it, of 0 to 255, is above this: sensors have some noise in the dark."""
SAMPLES = 32
"""Rows and columns of a frame that are looked at first; all of them only where these are suspicious."""
MIN_REPEATS = 3
"""Repeats one after the other that are a frozen camera, if the robot moves meanwhile."""
MOVED = 0.05
"""The part of its way in the episode that the robot covers in a stretch, from which on it counts as moving."""
SLOW_SHARE = 0.4
"""The share of repeats among the frames in which the robot moves, from which on a camera is slower than the steps."""
MAX_LAG = 5
"""Steps by which a camera can be found to be out of step."""
MIN_LENGTH = 40
"""Steps below which nothing is concluded from an episode."""
MIN_CORRELATION = 0.5


class BlackFrames(Check):
    """Looks for frames without any light."""

    name = "black-frames"
    images = True

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        for path, frames in episode.cameras.items():
            if frames.shape[-1] == 1:
                continue  # depth and masks are 0 where there is nothing
            black = black_frames(frames)
            if black.any():
                first, last = stretches(black)[0][0], stretches(black)[-1][1]
                yield episode.finding(
                    "warning",
                    "black-frames.black",
                    at=path,
                    steps=(first, last),
                    weight=int(black.sum()),
                    count=int(black.sum()),
                    total=len(frames),
                )


class FrozenFrames(Check):
    """Looks for frames that repeat while the robot, or what another camera sees, moves."""

    name = "frozen-frames"
    images = True

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        repeats = {path: repeated(frames) & ~black_frames(frames) for path, frames in episode.cameras.items()}
        for path, same in repeats.items():
            if not same.any():
                continue
            moving = self._moving(episode, path, repeats)
            frozen = [
                (first - 1, last)
                for first, last in stretches(same)
                if last - first + 1 >= MIN_REPEATS and moving[first : last + 1].sum() >= MOVED * moving.sum() > 0
            ]
            if frozen:
                longest = max(last - first for first, last in frozen)
                yield episode.finding(
                    "warning",
                    "frozen-frames.stretches",
                    at=path,
                    steps=(frozen[0][0], frozen[-1][1]),
                    weight=longest,
                    count=len(frozen),
                    longest=longest,
                )
            elif len(same) >= MIN_LENGTH and _share(same, moving) >= SLOW_SHARE:
                share = _share(same, moving)
                yield episode.finding(
                    "warning",
                    "frozen-frames.slow",
                    at=path,
                    weight=share,
                    percent=100 * share,
                    frames=1 - share,
                )

    def _moving(self, episode: EpisodeColumns, path: str, repeats: Mapping[str, Array]) -> Array:
        """How far the robot moved before each step; or, without states, whether another camera sees something new."""
        motion = all_motion(episode.states, len(episode))
        if motion.any():
            return np.append(0.0, motion)
        others = [~same for other, same in repeats.items() if other != path]
        return np.asarray(np.any(others, axis=0), np.float64) if others else np.zeros(len(episode))


class CameraSync(Check):
    """Compares when the picture changes with when the state changes, over all lags of a few steps."""

    name = "camera-sync"
    images = True

    def __init__(self, dataset: Dataset):
        super().__init__(dataset)
        self._sums: dict[str, dict[str, Array]] = {}
        """By camera and column of the state: correlations of all episodes, weighted by their lengths."""
        self._steps: dict[str, int] = {}
        self._lags: dict[str, list[tuple[int, int]]] = {}
        """By camera: number and lag of the episodes in which it is clear."""

    def look(self, episode: EpisodeColumns) -> Iterator[DatasetFinding]:
        if len(episode) >= MIN_LENGTH:
            speeds = {path: path_length(state) for path, state in episode.states.items()}
            for camera, frames in episode.cameras.items():
                self._add(episode, camera, picture_change(frames), speeds)
        yield from ()

    def _add(self, episode: EpisodeColumns, camera: str, change: Array, speeds: dict[str, Array]) -> None:
        found = {path: lagged_correlation(change, speed, MAX_LAG) for path, speed in speeds.items()}
        known = {path: correlations for path, correlations in found.items() if correlations is not None}
        if not known:
            return
        sums = self._sums.setdefault(camera, {})
        for path, correlations in known.items():
            sums[path] = sums.get(path, np.zeros(2 * MAX_LAG + 1)) + correlations * len(episode)
        self._steps[camera] = self._steps.get(camera, 0) + len(episode)
        lag = best_lag(_best(known), minimum=0.6)
        if lag is not None:
            self._lags.setdefault(camera, []).append((episode.number, lag))

    def finish(self, complete: bool) -> Iterator[DatasetFinding]:
        for path, sums in self._sums.items():
            common = best_lag(_best(sums) / self._steps[path], MIN_CORRELATION)
            if common:
                text = f"camera-sync.{'behind' if common > 0 else 'ahead'}"
                yield self.about("info" if abs(common) == 1 else "warning", text, at=path, lag=abs(common))
            for number, lag in self._lags.get(path, []):
                if abs(lag - (common or 0)) >= 2:
                    text = f"camera-sync.one_{'behind' if lag > 0 else 'ahead'}"
                    yield self.about("warning", text, episode=number, at=path, weight=abs(lag), lag=abs(lag))


def black_frames(frames: Array) -> Array:
    """Marks the frames that have no light, ``[T]``."""
    black: Array = _sampled(frames)[..., :3].reshape(len(frames), -1).max(axis=1) <= BLACK
    for number in np.flatnonzero(black):
        black[number] = frames[number, ..., :3].max() <= BLACK
    return black


def repeated(frames: Array) -> Array:
    """Marks the frames that are the same as the one before, pixel by pixel, ``[T]``."""
    some = _sampled(frames).reshape(len(frames), -1)
    same: Array = np.append(False, (some[1:] == some[:-1]).all(axis=1))
    for number in np.flatnonzero(same):
        same[number] = np.array_equal(frames[number], frames[number - 1])
    return same


def picture_change(frames: Array) -> Array:
    """How much the picture changes between two steps, ``[T - 1]``."""
    gray = _sampled(frames).reshape(len(frames), -1).astype(np.float32)
    return np.asarray(np.abs(np.diff(gray, axis=0)).mean(axis=1), np.float64)


def _sampled(frames: Array) -> Array:
    rows, columns = (-(-size // SAMPLES) for size in frames.shape[1:3])
    return frames[:, ::rows, ::columns]


def _share(same: Array, moving: Array) -> float:
    moves = moving > 0.1 * np.median(moving[moving > 0]) if (moving > 0).any() else np.zeros(len(moving), bool)
    return float(same[moves].mean()) if moves.any() else 0.0


def _best(correlations: Mapping[str, Array]) -> Array:
    """Those with the column of the state that fits best: a position, and not a force."""
    return max(correlations.values(), key=lambda found: float(found.max()))
