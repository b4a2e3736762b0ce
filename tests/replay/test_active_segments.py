"""The segments of a log to which steps are appended: who gets which, and what happens when one is full or deleted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hilt.replay import Log
from hilt.replay.maintenance.repair import verify
from tests.replay.toy_steps import new_log, numbers, step, trajectory, write


def test_active_segments_are_shared_by_episodes_one_after_the_other(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3))
        write(log, numbers(10, 3))
        assert len(log.segments) == 1, "the second episode is written to the segment of the first"
        one, other = log.episode(), log.episode()
        one.append(step(20))
        other.append(step(30))
        assert len(log.segments) == 2, "two running episodes have a segment each"
        one.end()
        other.end()
        write(log, numbers(40, 3))
        assert len(log.segments) == 2


def test_active_segments_that_were_deleted_while_idle_are_not_written_to(tmp_path: Path):
    """The last trajectory of an idle segment goes, and its files with it: the next episode gets a fresh segment."""
    with new_log(tmp_path, capacity_steps=64) as log:
        one, other = log.episode(), log.episode()
        one.append(step(0))
        other.append(step(100))
        one.end()
        other.end()
        for number in log.trajectories():
            log.delete(number)
        assert log.segments == [] and log.stats()["segments_deleted"] == 2
        keys = write(log, numbers(200, 3))
        assert [segment.number for segment in log.segments] == [2]
        assert log.read(keys)["rewards"].tolist() == [200, 201, 202]
        log.complete_segments()
    with Log.open(tmp_path / "log") as log:
        assert log.read(log.all().keys())["rewards"].tolist() == [200, 201, 202]
    assert verify(tmp_path / "log").ok


def test_active_segments_of_a_running_episode_are_kept_while_nothing_in_them_is_wanted(tmp_path: Path):
    with new_log(tmp_path) as log:
        first = log.add(trajectory([numbers(0, 3)]))
        running = log.episode()  # in the same segment
        log.delete(first)
        assert [segment.number for segment in log.segments] == [0]
        key = running.append(step(50))
        running.end()
        assert log.read(np.array([key]))["rewards"].tolist() == [50]


def test_active_segments_left_by_an_earlier_process_are_continued(tmp_path: Path):
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3))
    with Log.open(tmp_path / "log") as log:
        write(log, numbers(10, 3))
        assert len(log.segments) == 1 and log.segments[0].rows == 6
        log.complete_segments()
        assert log.segments[0].sealed is not None
        write(log, numbers(20, 3))
        assert len(log.segments) == 2
