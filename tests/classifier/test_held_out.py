"""The held-out frames of a classifier: counts at every threshold, the worst mistakes, and how they are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.algos import classifier as algo
from hilt.classifier.frames import ClipSource
from hilt.classifier.held_out import HELD_OUT_FILE, HeldOut, read_held_out
from hilt.core.checksums import write_json
from hilt.core.errors import CorruptError
from tests.classifier.labeled import clips


def judged(seed: int = 0) -> HeldOut:
    """24 frames of two episodes; the probabilities include ties and values at thresholds."""
    rng = np.random.default_rng(seed)
    made = [replace(clip, source=ClipSource("logs/a", i + 3, 5)) for i, clip in enumerate(clips(2))]
    return HeldOut.of(made, rng.choice(np.linspace(0, 1, 11), 24), success=1)


@pytest.mark.parametrize("seed", range(4))
def test_counts_precision_and_recall_at_a_threshold(seed: int):
    held = judged(seed)
    for point in held.curve([*algo.THRESHOLDS, 0.875]):
        called = [float(p) >= np.float32(point["threshold"]) for p in held.probability]
        pairs = list(zip(held.success.tolist(), called, strict=True))
        assert point["hits"] == pairs.count((True, True)) and point["missed"] == pairs.count((True, False))
        assert point["false_successes"] == pairs.count((False, True))
        assert point["rejected"] == pairs.count((False, False))
        assert point["precision"] == (point["hits"] / called.count(True) if any(called) else None)
        assert point["recall"] == point["hits"] / held.success.sum()
    expected = algo.curve(torch.from_numpy(held.probability), torch.from_numpy(held.success))
    found = held.curve(algo.THRESHOLDS)
    assert [(p.precision, p.recall, p.false_successes) for p in expected] == [
        (p["precision"], p["recall"], p["false_successes"]) for p in found
    ]
    none = HeldOut(np.zeros(3, bool), np.full(3, 0.1), np.zeros(3), np.arange(3), [{}])
    assert (none.at(0.5).precision, none.at(0.5).recall) == (None, None)


def test_worst_mistakes_are_the_most_confident_wrong_ones():
    success = np.array([1, 0, 1, 0, 0, 1], bool)
    probability = np.array([0.9, 0.95, 0.02, 0.6, 0.1, 0.4])
    where = [{"where": "log, episode 0", "log": "log", "trajectory": 7}]
    held = HeldOut(success, probability, np.zeros(6), np.arange(10, 16), where)
    worst = held.worst(2)
    assert [(frame.step, frame.success) for frame in worst] == [(12, True), (11, False), (13, False), (15, True)]
    assert worst[0].trajectory == 7 and worst[0].log == "log" and worst[0].probability == pytest.approx(0.02)
    assert len(held.worst(99)) == 6


def test_held_out_frames_are_kept_exactly(tmp_path: Path):
    held = judged()
    write_json(tmp_path / HELD_OUT_FILE, held.to_json())
    read = read_held_out(tmp_path)
    assert read is not None and read.worst(24) == held.worst(24)
    assert {(frame.trajectory, frame.log) for frame in read.worst(24)} == {(3, "logs/a"), (4, "logs/a")}
    assert {frame.step for frame in read.worst(24)} == set(range(5, 17))
    assert read_held_out(tmp_path / "older") is None
    write_json(tmp_path / HELD_OUT_FILE, {**held.to_json(), "step": [1]})
    with pytest.raises(
        CorruptError, match=r"held_out\.json: these are no held-out frames .* Train the classifier again"
    ):
        read_held_out(tmp_path)
