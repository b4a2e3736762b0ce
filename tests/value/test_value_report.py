"""The report on held-out episodes, from predictions that are made up."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from hilt.algos.value_distribution import ValueSupport
from hilt.value.value_report import HeldOutEpisode, held_out_report, report_picture


def held_out(succeeded: bool, value: list[float], task: str = "a") -> HeldOutEpisode:
    values = np.array(value, np.float32)
    return HeldOutEpisode("log", 0, task, succeeded, values, values + 1)


def test_an_episode_is_judged_after_a_share_of_its_own_length():
    good = [held_out(True, [-0.9, -0.9, -0.5, 0.0]), held_out(True, [-0.9, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0])]
    bad = [held_out(False, [-0.1, -0.9, -0.9, -1.0]), held_out(False, [-0.6, -0.8, -0.4, -1.0])]
    found = held_out_report([*good, *bad])
    # after a quarter: -0.9, -0.5 against -0.9, -0.8; after a half -0.5, 0 against -0.9, -0.4
    assert [after["auc"] for after in found["after"]] == [0.625, 0.75, 1.0]
    assert found["after"][2]["interval"] == [1.0, 1.0] and found["after"][0]["interval"][0] < 0.625
    assert found["after"][2]["calibration_error"] == pytest.approx(0.0, abs=1e-6)
    assert found["after"][0]["auc_within_tasks"] is None
    picture = Image.open(io.BytesIO(report_picture([*good, *bad], found, ValueSupport(4))))
    assert picture.width > 2 * picture.height and len(picture.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_tasks_that_differ_in_difficulty_rank_nothing_within_them():
    easy = [held_out(number > 0, [-0.2], "easy") for number in range(4)]
    hard = [held_out(number == 0, [-0.8], "hard") for number in range(4)]
    found = held_out_report([*easy, *hard])
    after = found["after"][0]
    assert after["auc"] == 0.75 and after["auc_within_tasks"] == 0.5
    assert [(one["task"], one["episodes"], one["successes"], one["auc"]) for one in found["tasks"]] == [
        ("easy", 4, 3, [0.5] * 3),
        ("hard", 4, 1, [0.5] * 3),
    ]
    errors = [one["calibration_error"] for one in found["tasks"]]
    assert errors == pytest.approx([0.05, 0.05], abs=1e-6), "predicted 0.8 and 0.2, and 3 and 1 of 4 succeeded"
    alone = held_out_report([*easy, held_out(True, [-0.8], "rare")])["tasks"][1]
    assert alone["auc"] == [None] * 3
