"""Clocks, jerk and idle time: episodes with each fault, and episodes that only look like it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hilt.checks import check_dataset
from hilt.formats.episodes import Episode
from tests.checks.arm import arm, arms, found, looked_at, smooth, written


def with_clock(times: np.ndarray, **facts: object) -> Episode:
    episode = arm(length=len(times), facts=facts)
    episode.times = times
    return episode


def test_timestamps_that_jump_or_go_back():
    even = np.arange(60) / 10
    late, back = even.copy(), even.copy()
    late[30:] += 0.4
    back[30:] -= 0.2
    report = looked_at([with_clock(even), with_clock(late), with_clock(back)], "timestamps")
    assert found(report) == [
        ("error", "timestamps", "episode 2, steps 29-30, timestamp"),
        ("warning", "timestamps", "episode 1, steps 29-30, timestamp"),
    ]
    assert "up to 0.5 instead of 0.1" in report.findings[1].what


def test_timestamps_of_another_rate_than_the_metadata_state():
    report = looked_at([with_clock(np.arange(60) / 30, fps=10)], "timestamps")
    assert [finding.what for finding in report.findings] == [
        "The clock has 30 steps per second, and the metadata state 10."
    ]


def test_timestamps_with_jitter_since_the_epoch_do_not_jump():
    rng = np.random.default_rng(0)
    times = 1.7e9 + np.arange(60) / 10 + rng.uniform(-0.03, 0.03, 60)
    rounded = (np.arange(6000) / 30).astype(np.float32)
    column = arm()
    column.columns["times"] = {"observed": times}
    assert found(looked_at([with_clock(times), with_clock(rounded[-60:], fps=30), column], "timestamps")) == []


def test_timestamps_of_an_uneven_clock_are_only_mentioned():
    times = np.cumsum(np.random.default_rng(0).uniform(0.001, 0.12, 60))
    assert found(looked_at([with_clock(times, fps=None)], "timestamps")) == [
        ("info", "timestamps", "episode 0, timestamp")
    ]


def test_timestamps_of_a_robot_with_a_rate_show_the_lost_step_among_many_episodes():
    rng = np.random.default_rng(0)
    clocks = [np.arange(60) / (10 if n < 8 else 30) + rng.uniform(-0.002, 0.002, 60) for n in range(12)]
    clocks[5][30:] += 0.3
    report = looked_at([with_clock(clock, fps=None) for clock in clocks], "timestamps")
    assert found(report) == [("warning", "timestamps", "episode 5, steps 29-30, timestamp")]


def test_timestamps_of_a_simulation_without_a_rate_are_one_finding():
    rng = np.random.default_rng(0)
    clocks = [np.cumsum(rng.lognormal(0, 0.5, 60)) * 0.01 * 1.2**n for n in range(12)]
    for n in (3, 7):
        clocks[n][40:] += 3  # the machine was busy for a while: nothing is lost
    (finding,) = looked_at([with_clock(clock, fps=None) for clock in clocks], "timestamps").findings
    assert finding.severity == "info" and "no fixed rate: in 12 of 12 episodes" in finding.what


def test_timestamps_of_lerobot_are_read(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = written(tmp_path / "data", arms(1), "lerobot", images="png")
    file = next((folder / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    place = table.column_names.index("timestamp")
    times = np.array(table.column("timestamp").to_pylist(), np.float32)
    times[20:] += 1
    column = pa.array(times.tolist(), table.schema.field("timestamp").type)
    pq.write_table(table.set_column(place, table.schema.field("timestamp"), column), file)
    report = check_dataset(folder, only=["timestamps"])
    assert found(report) == [("warning", "timestamps", "episode 0, steps 19-20, timestamp")]


def test_jerk_of_a_state_that_jumps():
    path = smooth(np.random.default_rng(0), 61, 3)
    path[40:] += 9
    assert found(looked_at([arm(), arm(state=path)], "jerk")) == [
        ("warning", "jerk", "episode 1, steps 39-40, observations/state")
    ]


def test_jerk_is_not_a_gripper_that_closes_or_an_angle_that_wraps():
    path = smooth(np.random.default_rng(0), 61, 3)
    path[:, 1] = np.arange(61) > 30
    path[:, 2] = (np.arange(61) * 0.12 + 2) % (2 * np.pi) - np.pi
    assert found(looked_at([arm(state=path)], "jerk")) == []


def test_jerk_is_not_a_force_at_a_contact():
    force = np.where(np.arange(61) >= 40, 30, 0)[:, None] + np.random.default_rng(0).normal(size=(61, 3))

    def episode(name: str) -> Episode:
        made = arm()
        made.columns["observations"][name] = force[:-1]
        return made

    assert found(looked_at([episode("tcp_force")], "jerk")) == []
    assert found(looked_at([episode("joints")], "jerk")) == [
        ("warning", "jerk", "episode 0, steps 39-40, observations/joints")
    ]


def test_jerk_is_not_a_dimension_that_jumps_in_most_episodes():
    def change(number: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(number)
        path = smooth(rng, 61, 3)
        path[:, 1] = (np.arange(61) > 30) + 0.01 * rng.normal(size=61)  # a gripper with a sensor
        return {"state": path}

    assert found(looked_at(arms(6, change=change), "jerk")) == []


def test_jerk_of_one_episode_that_trembles():
    trembling = arm(seed=9).columns["actions"] + 0.3 * (-1.0) ** np.arange(60)[:, None]
    report = looked_at([*arms(6), arm(seed=9, actions=trembling.astype(np.float32))], "jerk")
    assert found(report) == [("warning", "jerk", "episode 6, actions")]


def test_jerk_of_actions_that_all_tremble_is_their_nature():
    rng = np.random.default_rng(0)
    assert found(looked_at(arms(7, change=lambda n: {"actions": rng.normal(size=(60, 3))}), "jerk")) == []


def test_idle_at_the_head_and_in_the_whole_episode():
    path = smooth(np.random.default_rng(0), 61, 3)
    waiting = np.r_[np.repeat(path[:1], 25, axis=0), path[:36]]
    report = looked_at([arm(), arm(state=waiting), arm(state=np.zeros((61, 3)))], "idle")
    assert found(report) == [("info", "idle", "episode 1, steps 0-24"), ("warning", "idle", "episode 2")]


def test_idle_for_most_of_an_episode_is_a_warning():
    path = smooth(np.random.default_rng(0), 61, 3)
    report = looked_at([arm(state=np.r_[path[:20], np.repeat(path[20:21], 41, axis=0)])], "idle")
    assert found(report) == [("warning", "idle", "episode 0, steps 20-59")]


def test_idle_is_not_slow():
    path = smooth(np.random.default_rng(0), 61, 3)
    slow = np.r_[path[:1] + np.linspace(0, 0.1, 30)[:, None], path[:31] + 0.1]
    assert found(looked_at([arm(state=slow)], "idle")) == []


def test_json_of_a_report_is_plain():
    json.dumps(looked_at(arms(2), "idle", "jerk").to_json(), allow_nan=False)
