"""What goes when a log is full: whole trajectories, oldest first, and of a running one only what must."""

from __future__ import annotations

from pathlib import Path

from hilt.replay import Log
from tests.replay.test_properties import SCHEMA, same, transition


def test_an_endless_episode_keeps_its_newest_steps(tmp_path: Path) -> None:
    """It spans many segments; as each is full, no more than the excess goes."""
    log = Log.create(tmp_path / "log", SCHEMA, capacity_steps=200, durability="never")
    episode = log.episode()
    for t in range(1000):
        episode.append(transition(t, t + 1))
        assert min(t + 1, 200 - 200 // 16) <= len(log) <= 200
    batch = log.read(log.all().keys())
    for i, t in enumerate(range(1000 - len(log), 1000)):
        same(batch, transition(t, t + 1), i)
    assert log.stats()["segments_deleted"] > 0
    kept = log.all().keys().tolist()
    log.close()
    with Log.open(tmp_path / "log") as again:
        assert again.all().keys().tolist() == kept


def test_a_running_episode_is_spared_while_others_are_there(tmp_path: Path) -> None:
    with Log.create(tmp_path / "log", SCHEMA, capacity_steps=100, durability="never") as log:
        running = log.episode()
        for t in range(90):
            running.append(transition(t, t + 1))
        for number in range(10):
            with log.episode() as other:
                for t in range(5):
                    other.append(transition(1000 + 10 * number + t, 1001 + 10 * number + t))
        assert (log.all().keys() >> 32 == running.trajectory).sum() == 90
        assert len(log) <= 100
