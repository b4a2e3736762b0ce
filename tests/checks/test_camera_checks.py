"""Cameras: frames that are black, repeat or come late, and those that only look so."""

from __future__ import annotations

import numpy as np

from hilt.checks.camera_checks import black_frames, repeated
from tests.checks.arm import arm, arms, found, looked_at, pictures, smooth

FRONT = "observations/front"


def path_of(seed: int, length: int = 60) -> np.ndarray:
    return smooth(np.random.default_rng(seed), length + 1, 3)


def test_black_frames_are_found():
    frames = pictures(path_of(1))
    frames[20:23] = np.random.default_rng(0).integers(0, 8, frames[20:23].shape)
    report = looked_at([arm(), arm(seed=1, front=frames)], "black-frames")
    assert found(report) == [("warning", "black-frames", f"episode 1, steps 20-22, {FRONT}")]
    assert "3 of 60 frames are black" in report.findings[0].what


def test_black_frames_are_not_dark_ones_or_masks():
    dark = np.zeros((61, 100, 100, 3), np.uint8)
    dark[:, 51, 51] = 80  # one lamp, between the pixels that are looked at first
    assert not black_frames(dark).any()
    masks = np.zeros((61, 16, 16, 1), np.uint8)
    assert found(looked_at([arm(front=dark), arm(front=masks)], "black-frames")) == []


def test_frozen_frames_are_found_while_the_robot_moves():
    frames = pictures(path_of(1))
    frames[20:30] = frames[20]
    report = looked_at([arm(), arm(seed=1, front=frames)], "frozen-frames")
    assert found(report) == [("warning", "frozen-frames", f"episode 1, steps 20-29, {FRONT}")]


def test_frozen_frames_of_a_robot_that_stands_still_are_not_frozen():
    path = np.r_[path_of(1)[:30], np.repeat(path_of(1)[30:31], 31, axis=0)]
    assert found(looked_at([arm(state=path, front=pictures(path))], "frozen-frames")) == []


def test_frozen_frames_without_states_are_seen_by_another_camera():
    frames = pictures(path_of(1))
    frames[20:30] = frames[20]
    episode = arm(seed=1, front=frames)
    for part in ("observations", "next_observations"):
        del episode.columns[part]["state"]
    assert found(looked_at([episode], "frozen-frames")) == []
    for part, rows in (("observations", slice(None, -1)), ("next_observations", slice(1, None))):
        episode.columns[part]["wrist"] = pictures(path_of(1))[rows]
    assert found(looked_at([episode], "frozen-frames")) == [
        ("warning", "frozen-frames", f"episode 0, steps 20-29, {FRONT}")
    ]


def test_frozen_frames_of_a_camera_that_is_half_as_fast():
    path = np.cumsum(np.full((61, 3), 0.03), axis=0)
    path = path - path.mean(axis=0)
    frames = pictures(path)
    frames[1::2] = frames[:-1:2]
    report = looked_at([arm(state=path, front=frames)], "frozen-frames")
    assert found(report) == [("warning", "frozen-frames", f"episode 0, {FRONT}")]
    assert "0.5 frames per step" in report.findings[0].what


def test_frozen_frames_differ_in_no_pixel():
    frames = np.zeros((3, 100, 100, 3), np.uint8)
    frames[2, 51, 51] = 1
    assert repeated(frames).tolist() == [False, True, False]


def late(seed: int, lag: int, length: int = 120) -> dict[str, np.ndarray | int]:
    """An arm whose camera lags behind by so many steps."""
    path = bursts(seed, length + 1 + lag)
    return {"length": length, "seed": seed, "state": path[lag:], "front": pictures(path)[: length + 1]}


def bursts(seed: int, length: int) -> np.ndarray:
    """A path with phases of motion and rest."""
    rng = np.random.default_rng(seed)
    speed = np.repeat(rng.uniform(0, 1, length // 6 + 1) ** 3, 6)[:length]
    turn = np.cumsum(speed * 0.6)
    return np.stack([0.8 * np.sin(turn), 0.8 * np.cos(0.8 * turn), np.sin(turn)], axis=1)


def test_camera_sync_finds_a_camera_that_is_late():
    report = looked_at([arm(**late(seed, 3)) for seed in range(4)], "camera-sync")
    assert found(report) == [("warning", "camera-sync", FRONT)]
    assert "3 steps behind the states" in report.findings[0].what


def test_camera_sync_finds_the_one_episode_that_is_late():
    episodes = [arm(**late(seed, 4 if seed == 2 else 0)) for seed in range(6)]
    report = looked_at(episodes, "camera-sync")
    assert found(report) == [("warning", "camera-sync", f"episode 2, {FRONT}")]


def test_camera_sync_is_judged_by_positions_and_not_by_forces():
    def force(episode: dict[str, np.ndarray | int]) -> dict[str, np.ndarray | int]:
        rng = np.random.default_rng(0)
        return {**episode, "state": np.c_[episode["state"], rng.normal(size=(121, 6))]}

    assert found(looked_at([arm(**force(late(seed, 0))) for seed in range(4)], "camera-sync")) == []
    assert len(looked_at([arm(**force(late(seed, 3))) for seed in range(4)], "camera-sync").findings) == 1


def test_camera_sync_is_not_lost_where_the_picture_moves_by_itself():
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (121, 16, 16, 3), np.uint8) for _ in range(4)]
    other = [pictures(bursts(seed + 50, 121)) for seed in range(4)]
    for frames in (noise, other):
        assert found(looked_at([arm(length=120, seed=n, front=f) for n, f in enumerate(frames)], "camera-sync")) == []
    assert found(looked_at([*arms(4, 120), *(arm(**late(seed, 0)) for seed in range(4))], "camera-sync")) == []
