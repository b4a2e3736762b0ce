"""Which frames are worth a label: the least certain first, spread over episodes without a classifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hilt import cli
from hilt.algos import classifier as algo
from hilt.classifier.frame_scores import score_frames, spread
from hilt.classifier.frames import read_frames
from hilt.classifier.reward import ClassifierConfig, reward_function, train
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.tree import Array, ArraySpec
from hilt.replay import Edits, Log
from tests.app.episode_samples import make_log
from tests.classifier.labeled import clips, write_log


class Brightness:
    """Judges by how bright the first pixel of a camera is."""

    def cameras(self, leaves: Mapping[str, ArraySpec]) -> dict[str, str]:
        assert set(leaves) == {"front", "wrist"}
        return {"the front": "front"}

    def probabilities(self, images: Mapping[str, Array]) -> Array:
        return images["the front"][:, 20, 0, 0].astype(np.float32) / 100  # 0.08 of each step


def test_frames_are_ordered_by_uncertainty_and_labeled_ones_left_out(tmp_path: Path):
    path = make_log(tmp_path / "log", 3)  # of 6, 7 and 8 steps; what a step leads to is one brighter
    with Log.open(path, "r") as log:
        Edits(log).label_frame(1, 5, True)
        Edits(log).label_frame(2, 0, None)
        Edits(log).trim(2, first=2)
    scores = score_frames([path], Brightness())
    assert (scores.episodes, scores.steps, scores.wide) == (3, 19, 0)
    assert scores.labeled == {"success": 1, "failure": 0, "unknown": 0}  # the other one is trimmed
    found = [(frame.trajectory, frame.step) for frame in scores.frames]
    assert len(found) == 18 and found[:3] == [(0, 5), (2, 5), (1, 6)] and (1, 5) not in found
    assert [frame.certainty for frame in scores.frames] == sorted(frame.certainty for frame in scores.frames)
    assert scores.frames[0].probability == pytest.approx(0.48) and scores.frames[1].first == 2
    few = score_frames([path], Brightness(), count=6)
    assert {(frame.trajectory, frame.step) for frame in few.frames} <= set(found) and len(few.frames) == 6
    with pytest.raises(SchemaError, match="no images among its observations"):
        score_frames([make_log(tmp_path / "blind", 1, images=False)], Brightness())


def test_frames_without_a_classifier_are_spread(tmp_path: Path):
    scores = score_frames([make_log(tmp_path / "log", 2)], count=8)
    assert [(frame.trajectory, frame.step) for frame in scores.frames][:4] == [(0, 5), (1, 6), (0, 0), (1, 0)]
    assert all(frame.probability is None and frame.label is None for frame in scores.frames)
    labeled = score_frames([write_log(tmp_path / "labeled", clips(2))])
    assert {(f.trajectory, f.step): f.label for f in labeled.frames}[1, 11] == 1


@given(
    st.lists(st.integers(0, 20), max_size=8),
    st.integers(1, 60),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 19)), max_size=20),
)
def test_spread_takes_no_frame_twice_and_all_if_there_is_room(
    lengths: list[int], count: int, taken: set[tuple[int, int]]
):
    found = spread(lengths, count, taken)
    every = {(episode, step) for episode, length in enumerate(lengths) for step in range(length)} - taken
    assert len(set(found)) == len(found) <= count and set(found) <= every
    if len(lengths) * 3 <= count:
        assert len(found) == min(count, len(every))
    last = [(episode, length - 1) for episode, length in enumerate(lengths) if length]
    if len(lengths) * 3 <= count and not taken:
        assert found[: len(last)] == last


def test_score_from_the_command_line_after_training_from_frame_labels(tmp_path: Path):
    """Labels of frames reach a batch of the classifier, whose scores order the next frames."""
    path = write_log(tmp_path / "log", clips(8), labels=False)
    with Log.open(path, "r") as log:
        for number in range(8):
            Edits(log).label_frame(number, 1, False)
            Edits(log).label_frame(number, 10, bool(number % 3))
    quick = ("steps=20", "batch_size=24", "features=16", "hidden=32", "random_crop=1")
    out = run("train", "classifier", path, *quick, "--out", tmp_path / "c")
    assert "16 frames of 8 episodes, 2 classes" in out
    said = json.loads(run("data", "score", path, "--classifier", tmp_path / "c", "--json"))
    judge = reward_function(tmp_path / "c")
    assert said["labeled"] == {"success": 5, "failure": 11, "unknown": 0} and len(said["frames"]) == 8 * 12 - 16
    certain = [abs(frame["probability"] - 0.5) for frame in said["frames"]]
    assert certain == sorted(certain)
    frame = said["frames"][0]
    images = clips(8)[frame["trajectory"]].images
    seen = {"images": {name.split("/")[1]: image[frame["step"]] for name, image in images.items()}}
    assert judge.probability(seen) == pytest.approx(frame["probability"], abs=1e-6)
    shown = run("data", "score", tmp_path / "log")
    assert "96 frames of 8 episodes; frame labels: 5 success, 11 failure, 0 unknown" in shown
    assert f"hilt data label {path} 0 --frame success --step 11" in shown


def test_label_of_a_frame_is_in_the_batches_of_the_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In place of the recorded one."""
    drawn: list[Array] = []
    original = algo.loss

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.requires_grad:  # held-out frames are looked at, too
            drawn.append(labels.numpy())
        return original(logits, labels)

    monkeypatch.setattr(algo, "loss", loss)
    path = write_log(tmp_path / "log", [replace(clip, labels=clip.labels * 0) for clip in clips(8)])
    config = ClassifierConfig(steps=2, batch_size=24, features=8, hidden=8)
    with pytest.raises(ConfigError, match=r"none is of the class 1 \(success\)"):
        train(read_frames([path]), config)
    with Log.open(path, "r") as log:
        for number in range(8):
            Edits(log).label_frame(number, number, True)
    found = train(read_frames([path]), config).metadata
    assert found["training"]["of_class"][1] + found["held_out"]["of_class"][1] == 8
    assert [batch.sum() for batch in drawn] == [12, 12]  # as many of each class


def run(*words: object) -> str:
    done = CliRunner().invoke(cli.app, [*map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout
