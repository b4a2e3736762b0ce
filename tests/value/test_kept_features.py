"""Features of a policy that are kept in the folder of a log: by step and instruction, whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.replay import Log
from hilt.value.kept_features import KeptFeatures, StepFeatures
from tests.value.valued import write_log

WEIGHTS = "0123456789ab"


def steps(keys: list[int], text: str = "lift it") -> StepFeatures:
    return StepFeatures.of(np.array(keys), [text] * len(keys), torch.tensor([[float(key), 1.0] for key in keys]))


def test_steps_are_found_by_key_and_instruction():
    made = steps([7, 3]).joined(steps([7, 9], "drop it"))
    assert made.places(np.array([3, 7, 9, 8]), ["lift it"] * 4) == [1, 0, -1, -1]
    assert made.places(np.array([9, 7]), ["drop it"] * 2) == [3, 2]


def test_they_come_back_by_weights_and_names(tmp_path: Path):
    with Log.open(write_log(tmp_path / "log", 4), "r") as log:
        files = KeptFeatures(log, WEIGHTS)
        assert files.read(1, "tabletop") is None
        files.write(1, "tabletop", steps([1, 2, 3]))
        again = KeptFeatures(log, WEIGHTS).read(1, "tabletop")
        assert again is not None and torch.equal(again.features, steps([1, 2, 3]).features)
        assert again.places(np.array([3]), ["lift it"]) == [2]
        assert files.read(1, "libero") is None and files.read(2, "tabletop") is None
        assert KeptFeatures(log, "ba9876543210").read(1, "tabletop") is None
        assert not log.damage()
    with Log.open(tmp_path / "log") as log:
        assert len(log.trajectories()) == 4


def test_a_damaged_file_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with Log.open(write_log(tmp_path / "log", 4), "r") as log:
        files = KeptFeatures(log, WEIGHTS)
        files.write(1, "tabletop", steps([1, 2, 3]))
        (file,) = files.folder.glob("1-*.safetensors")
        whole = file.read_bytes()
        for damaged in (whole[:-4] + bytes(4), whole[:40], b""):
            file.write_bytes(damaged)
            assert files.read(1, "tabletop") is None
        assert caplog.text.count("its features are computed again") == 3


def test_where_nothing_can_be_written_a_warning_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with Log.open(write_log(tmp_path / "log", 4), "r") as log, caplog.at_level(logging.WARNING):
        (log.path / "features").write_text("a file in the place of the folder")
        files = KeptFeatures(log, WEIGHTS)
        for number in range(3):
            files.write(number, "tabletop", steps([1]))
        assert caplog.text.count("features of the policy are not kept") == 1
        assert files.read(0, "tabletop") is None


def test_files_of_trajectories_that_are_gone_are_removed(tmp_path: Path):
    with Log.open(write_log(tmp_path / "log", 4)) as log:
        for number in range(4):
            KeptFeatures(log, WEIGHTS).write(number, "tabletop", steps([number]))
        KeptFeatures(log, WEIGHTS).write(9, "tabletop", steps([9]))  # which this process does not know yet
        log.delete(1)
        files = KeptFeatures(log, WEIGHTS)
        files.write(0, "tabletop", steps([0]))
        assert sorted(int(file.name.partition("-")[0]) for file in files.folder.iterdir()) == [0, 2, 3, 9]
