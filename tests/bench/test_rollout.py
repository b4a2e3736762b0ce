"""The bench of rollouts at its smallest: every row is there; what is not installed is named, and meets nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import rollout
from bench.lab import Lab


def test_rows_without_libero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout, "LIBERO", tmp_path / "python")
    for suite in rollout.CHUNKS:
        group = rollout.GROUPS[suite]
        rows = group.run(Lab(tmp_path, quick=True))
        assert [row.name for row in rows] == list(group.rows)
        plain, blind, trajectories = rows
        assert not any(row.met for row in rows)
        assert "No such file or directory" in plain.notes and "HILT_LIBERO_PYTHON" in blind.notes
        if suite == "libero":
            assert [row.ours for row in rows] == [None] * 3
        else:
            assert all(row.ours and row.ours > 0 for row in rows)
            assert trajectories.peer == rollout.PROCESSES and not trajectories.absent


@pytest.mark.peers
def test_rows_of_whole_runs(tmp_path: Path):
    (driver,) = rollout.GROUPS["driver"].run(Lab(tmp_path, quick=True))
    assert driver.name == "rollout_driver" and 0.1 < driver.ours < 100, (
        "cards and figures went through this process, and no picture"
    )
    assert "pictures are 0.6 MB" in driver.notes and "2 chunks instead of 64" in driver.notes and not driver.met
    (other,) = rollout.GROUPS["share"].run(Lab(tmp_path, quick=True))
    assert other.name == "rollout_other" and 0 < other.ours < 100 and "simulator" in other.notes and not other.met
    (beside,) = rollout.GROUPS["ahead"].run(Lab(tmp_path, quick=True))
    assert beside.name == "rollout_ahead" and beside.ours and beside.peer == "one after the other" and not beside.met
