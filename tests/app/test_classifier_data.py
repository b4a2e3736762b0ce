"""The data of the page of classifiers: classifiers of a run, commands, the queue, mistakes with links."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.app.classifiers.classifier_data import (
    KnownClassifier,
    classifiers_of,
    own_folder,
    progress_of,
    queue_of,
    report_of,
    score_words,
    sources_of,
    train_words,
    use_command,
)
from hilt.app.episodes.episode_shelf import EpisodeShelf
from hilt.classifier.frame_scores import score_frames
from hilt.classifier.held_out import HELD_OUT_FILE, HeldOut
from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError
from hilt.formats.listing.episode_source import source_key
from hilt.replay import Edits, Log
from hilt.replay.storage.lock import WriterLock
from tests.app.episode_samples import make_log
from tests.app.test_run_library import make_run, summary

CURVE = [[round(0.01 * i, 2), None, 0.0, 0] for i in range(1, 100)]


def make_classifier(folder: Path, held: HeldOut | None = None) -> KnownClassifier:
    """A folder as `hilt train classifier` makes one, without its weights."""
    folder.mkdir(parents=True)
    facts = {"frames": 4, "episodes": 2, "initial_states": 2, "by": "episode", "accuracy": 0.5, "majority": 0.5}
    described = {"threshold": 0.705, "image_keys": {"wrist": [48, 64, 3]}, "training": {"frames": 9}}
    write_json(folder / "classifier.json", {**described, "held_out": {**facts, "curve": CURVE}})
    if held is not None:
        write_json(folder / HELD_OUT_FILE, held.to_json())
    return KnownClassifier("key", folder.name, folder)


def opened_data(path: Path) -> Any:
    shelf = EpisodeShelf([path])
    [data] = shelf.listed()
    opened = shelf.opened(data.key)
    assert opened.index.wait_until_opened(60)
    return shelf, opened


def test_mistakes_lead_to_their_frames(tmp_path: Path):
    log = make_log(tmp_path / "log", 4)
    with Log.open(log, "r") as opened:
        Edits(opened).trim(2, first=3)
    where = [{"where": f"{log}, episode {n}", "log": str(log), "trajectory": n} for n in (1, 2, 3)]
    held = HeldOut(np.array([1, 0, 0, 0]), [0.1, 0.8, 0.7, 0.6], [0, 1, 1, 2], [4, 5, 2, 0], where)
    shelf, _ = opened_data(log)
    try:
        report = report_of(make_classifier(tmp_path / "c", held), shelf)
        [data] = shelf.listed()
        base = f"/episode?data={data.key}&source={source_key(log)}"
        links = [frame["href"] for frame in report["worst"]]
        # what a step led to; a trimmed step is not shown
        expected = [f"{base}&number=1&step=5", f"{base}&number=2&step=3", "", f"{base}&number=3&step=1"]
        assert links == expected
        assert "camera=observations%2Fwrist" in report["worst"][0]["picture"]
        points = {point["threshold"]: point for point in report["curve"]}
        assert len(points) == 100 and points[0.705]["false_successes"] == 1 and points[0.705]["missed"] == 1
        older = report_of(make_classifier(tmp_path / "older"), shelf)
        assert older["curve"] == older["worst"] == []
    finally:
        shelf.close()


def test_queue_leaves_out_what_was_labeled_since(tmp_path: Path):
    log = make_log(tmp_path / "log", 2)
    with Log.open(log, "r") as opened:
        Edits(opened).trim(1, first=2)
    shelf, data = opened_data(log)
    try:
        answer = tmp_path / "answer.json"
        found = score_frames([log])
        answer.write_text(
            json.dumps(
                {
                    "frames": [vars(frame) for frame in found.frames],
                    **{name: getattr(found, name) for name in ("labeled", "episodes", "steps", "wide")},
                }
            )
        )
        with Log.open(log, "r") as opened:
            Edits(opened).label_frame(1, 6, True)
        queue = queue_of(data, SimpleNamespace(answer=answer), ["front"])
        frames = {(frame["number"], frame["step"]): frame["shown"] for frame in queue["frames"]}
        assert len(frames) == 10 and frames[0, 5] == 6 and frames[1, 2] == 1 and (1, 6) not in frames
        assert queue["labeled"] == {"success": 1, "failure": 0, "unknown": 0}
        assert queue["cameras"] == {source_key(log): ["observations/front"]}
    finally:
        shelf.close()


def test_commands_to_score_and_train(tmp_path: Path):
    log = make_log(tmp_path / "log", 2)
    known = make_classifier(own_folder(log) / "3")
    shelf, opened = opened_data(log)
    try:
        sources = sources_of(opened)
        assert own_folder(log) == tmp_path / "log-classifiers"
        words = train_words(opened.data, sources, "steps=5 image_keys=[images/front]")
        out = str(own_folder(log) / "4")
        assert words == ["hilt", "train", "classifier", str(log), "steps=5", "image_keys=[images/front]", "--out", out]
        for wrong in ("--trust x", "steps", "/etc/passwd"):
            with pytest.raises(ConfigError, match="expected a setting of hilt train classifier and its value"):
                train_words(opened.data, sources, wrong)
        write_json(tmp_path / "recording.json", {})
        assert train_words(opened.data, sources, "")[3] == str(tmp_path)
        (tmp_path / "recording.json").unlink()
        assert score_words([log], known)[-4:] == [str(known.path), "--frames", "500", "--json"]
        make_classifier(tmp_path / "elsewhere")
        names = [one.name for one in classifiers_of(opened.data, [tmp_path])]
        assert names == ["log-classifiers/3", "elsewhere"]
    finally:
        shelf.close()
    started = SimpleNamespace(lines=lambda: ["reading", "training: 12 of 1,300, loss 0.7", "training: 24 of 1,300"])
    assert progress_of(started) == [24, 1300] and progress_of(SimpleNamespace(lines=lambda: ["reading"])) == []


def test_command_that_uses_a_classifier_in_a_run(tmp_path: Path):
    known = KnownClassifier("key", "c", tmp_path / "c")
    settings = f"classifier={known.path} classifier_threshold=0.8"
    assert " ".join(use_command(None, tmp_path, known, 0.8).words) == f"hilt train RECIPE {settings}"
    run = make_run(tmp_path / "run")
    without = use_command(summary(run), run, known, 0.8)
    assert (" ".join(without.words), without.why) == (
        f"hilt train tabletop_button {settings}",
        "classifier.use_without",
    )
    (run / "config.yaml").write_text("task: tabletop/button\nclassifier: old\n")
    use = use_command(summary(run), run, known, 0.8)
    assert " ".join(use.words) == f"hilt train {settings} --run {run} --resume" and use.resumes
    with WriterLock(run):
        use = use_command(summary(run), run, known, 0.8)
        assert not use.resumes and use.why == "classifier.use_stop"
    assert not use_command(summary(make_run(tmp_path / "sft", kind="sft")), run, known, 0.8).resumes
    with pytest.raises(ConfigError, match="threshold=1: expected a probability between 0 and 1"):
        use_command(None, tmp_path, known, 1.0)
