"""The bench of VLA policies at its tiny size: every row is there, says that it ran
at another size, and meets nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import vla, vla_steps
from bench.lab import Lab
from bench.timing import Rates

from tests.effort import need

need("transformers")


def test_the_tiny_rows(tmp_path: Path):
    lab = Lab(tmp_path, quick=True)
    rows = vla.act(lab)
    bench = vla.Bench(lab)
    rows.append(vla.one_update(bench, False, Rates([1.0]), vla.FULL))
    assert [row.name for row in rows] == [*vla.GROUPS["act"].rows, "update_full"]
    for row in rows:
        assert row.ours is not None and row.ours > 0 and row.spread is not None, row.name
        assert row.met is (False if row.targets else None) and "a tiny model on the CPU" in row.notes, row.name
    assert rows[0].limit and rows[0].peer == vla.PEER and rows[2].unit == "ms"
    assert set(bench.measured) == {"update_full"} and "bf16 matrix product of 8192" in lab.limits


@pytest.mark.long  # runs the command twice
def test_training_step_of_a_tiny_model_is_that_of_the_command(tmp_path: Path):
    (row,) = vla_steps.steps(Lab(tmp_path, quick=True, only={"step_oft"}))
    assert row.ours and row.unit == "s" and "a tiny model on the CPU" in row.size
    assert "24 chunks acted, 16 learned" in row.note, "a group of three is dropped, and made anew"
    assert "command: hilt train simplevla data.task_suite_name=libero_10" in row.note
