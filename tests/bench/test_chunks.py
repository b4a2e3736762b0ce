"""The bench of chunks: what it measures of an episode, and the rows that it makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import chunks
from bench.lab import Lab


def commands(*motions: float) -> np.ndarray:
    made = np.zeros((len(motions), 7), np.float32)
    made[:, 0] = motions
    return made


def test_jumps_of_an_episode_are_in_millimeters_and_seams_are_where_the_chunk_changes():
    full = float(chunks.episode(commands(1.0), [0], True)["jump"])
    found = chunks.episode(commands(0.0, 0.2, 0.2, 0.8, 0.8, 0.0), [-1, 0, 0, 1, 1, -1], False)
    assert found["jump"] == pytest.approx(0.8 * full) and (found["held"], found["steps"]) == (2, 6)
    assert found["seam"] == pytest.approx((0.6 + 0.8) / 2 * full), "from one chunk to the next, and from one to a hold"
    turned = commands(0.2, 0.2)
    turned[:, 6] = [-1, 1]
    assert chunks.episode(turned, [0, 1], True)["seam"] == 0, "the gripper is no motion"


def cell(success: float, **others: float) -> dict[str, Any]:
    return {"episodes": 300, "success": success, "idle": 5.0, "jump": 9.0, "seam": 2.0, "steps": 40.0, **others}


def test_a_row_is_what_four_steps_of_delay_cost(tmp_path: Path):
    found = {f"rtc {delay}": cell(95.0 - delay) for delay in chunks.DELAYS}
    lab = Lab(tmp_path, quick=False)
    row = chunks.row(lab, "flow", "rtc", found)
    assert (row.ours, row.unit, row.met) == (4.0, "points", False)
    assert "delay 8: 87% in 40 steps, largest jump 9.0 mm, at seams 2.0 mm, idle 5%" in row.note
    found["rtc 4"] = cell(93.0)
    assert chunks.row(lab, "flow", "rtc", found).met is True
    none = chunks.row(lab, "tokens", "asynchronous", found)
    assert none.ours is None and "with the head tokens continues a chunk only if it was trained to" in none.note


def test_figures_are_those_of_all_episodes():
    made = [{"success": 1.0, "steps": 10.0, "held": 0.0, "jump": 1.0, "seam": 1.0}]
    made.append({"success": 0.0, "steps": 30.0, "held": 10.0, "jump": 3.0, "seam": 2.0})
    assert chunks.figures(made) == {
        **{"episodes": 2, "success": 50.0, "idle": 25.0, "jump": 2.0, "seam": 1.5, "steps": 10.0}
    }


@pytest.mark.long
def test_the_smallest_run_has_every_row_of_a_head(tmp_path: Path):
    lab = Lab(tmp_path, quick=True)
    rows = [*chunks.GROUPS["delays"].run(lab), *chunks.GROUPS["control"].run(lab)]
    assert [row.name for row in rows] == [*(f"chunks_flow_{mode}" for mode in chunks.WAYS), "chunks_lateness_p99"]
    assert all(row.ours is not None and "instead of" in row.notes and not row.met for row in rows)
