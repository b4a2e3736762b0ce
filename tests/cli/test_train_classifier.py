"""``hilt train classifier`` as a person meets it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.classifier.reward import reward_function
from hilt.cli.train_classifier import _recipe
from hilt.core.checksums import read_json, write_json
from tests.classifier.labeled import clips, write_log
from tests.forked import ForkServer
from tests.lines import all_lines, no_line_twice

QUICK = ("steps=20", "batch_size=24", "features=16", "hidden=32", "random_crop=1")


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, ["train", "classifier", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def test_frames_become_a_classifier_and_it_says_how_good_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # a path, whatever is in its name
    log, more = write_log(tmp_path / "log", clips(12)), write_log(tmp_path / "a=b", clips(6, seed=1))
    all_lines(monkeypatch)
    done = run(log, more, "--out", tmp_path / "c", *QUICK)
    said = no_line_twice(done.stderr) + done.stdout
    assert "216 frames of 18 episodes, 2 classes" in said and "images/front (32 x 32), images/wrist (32 x 32)" in said
    assert f"reading {log}: 3 of 12" in said and "judging it on the frames that were held out" in said
    assert (
        "training: 2 of 20, loss" in said
        and "training: 20 of 20, loss" in said
        and said.count("of its batch right") >= 20
    )
    card = read_json(tmp_path / "c" / "classifier.json")
    held = card["held_out"]
    assert card["settings"]["steps"] == 20 and card["training"]["episodes"] + held["episodes"] == 18
    for words in (
        f"{held['accuracy']:.1%} held out; always the most frequent class: {held['majority']:.1%}",
        f"{held['episodes']} episodes from {held['initial_states']} initial states, by initial state",
        f"{card['threshold']:g}: the middle of the thresholds",
        "just before a success: ",
        f"hilt train RECIPE classifier={tmp_path / 'c'}",
    ):
        assert words in said
    write_json(tmp_path / "recording.json", {"task": "tabletop/pick"})
    assert _recipe([str(tmp_path)]) == "tabletop_pick" and _recipe([str(log)]) == "RECIPE"
    assert "CAUTION" not in said and reward_function(tmp_path / "c").threshold == card["threshold"]
    assert "error: " in run(log, "--out", tmp_path / "c", *QUICK, code=1).output  # exists already
    alike = write_log(tmp_path / "alike", clips(12, states=1))
    assert "episodes on both sides began alike" in run(alike, "--out", tmp_path / "alike-c", *QUICK).output
    few = write_log(tmp_path / "few", clips(4))
    assert "that proves little. Record 12 episodes or more" in run(few, "--out", tmp_path / "few-c", *QUICK).output


def test_a_classifier_that_finds_no_success_is_not_suggested(tmp_path: Path):
    """Recall 0% was shown beside "precision 100.0%", and its use suggested."""
    log = write_log(tmp_path / "log", clips(12))
    said = run(log, "--out", tmp_path / "c", *QUICK[1:], "steps=1", "threshold=0.99").output
    held = read_json(tmp_path / "c" / "classifier.json")["held_out"]
    assert held["recall"] == 0 and held["precision"] is None and held["successes"] > 0
    assert "precision undefined (no frame is called a success), recall 0.0%" in said and "100.0%" not in said
    assert "of the held-out successes a success" in said and "Do not use it as a reward" in said
    assert "hilt record TASK --classifier" in said and "hilt train RECIPE classifier=" not in said


def test_an_alarm_is_shown_kept_and_ends_the_training_without_a_folder(tmp_path: Path):
    log = write_log(tmp_path / "log", clips(12))
    words = [log, *QUICK[1:], "steps=1", "threshold=0.99"]
    said = run(*words, "--out", tmp_path / "c").output
    [alarm] = read_json(tmp_path / "c" / "classifier.json")["training"]["alarms"]
    assert alarm["name"] == "ranking" and alarm["step"] == 1 and not alarm["stops"]
    assert f"step 1: {alarm['text']}" in said.replace("\n", " ") and "ALARM" in said
    said = run(*words, "stop_on=[ranking]", "--out", tmp_path / "d", code=1).output
    assert "It was ended because stop_on names this alarm. Nothing was written." in said
    assert not (tmp_path / "d").exists()
    said = run(*words, "stop_on=[rank]", "--out", tmp_path / "d", code=1).output
    assert "no alarm named 'rank'" in said


def test_settings_are_shown_and_wrong_ones_refused_in_a_line(tmp_path: Path):
    said = run("--settings", "steps=150").output
    assert "steps" in said and "150" in said and "Gradient steps" in said and "as many of each class" in said
    log = write_log(tmp_path / "log", clips(6))
    for words, expected in (
        ([log, "step=3"], "no setting named 'step'; did you mean 'steps'?"),
        ([log, "steps=many"], "steps: "),
        ([], "no data: give at least one recording of hilt record --classifier"),
        ([tmp_path / "nowhere"], "there is no such file or folder"),
        ([write_log(tmp_path / "few", clips(2))], "too few episodes to hold some out"),
        ([log, "image_keys=[images/side]"], "no camera named 'images/side'"),
    ):
        said = run(*words, "--out", tmp_path / "c", code=1).output
        assert expected in said and "error: " in said and "Traceback" not in said
    assert not (tmp_path / "c").exists()


def test_one_camera_is_enough_and_ctrl_c_leaves_nothing(tmp_path: Path, fork_server: ForkServer):
    log = write_log(tmp_path / "log", clips(6))
    run(log, "image_keys=[images/front]", "--out", tmp_path / "c", *QUICK)
    assert list(read_json(tmp_path / "c" / "classifier.json")["image_keys"]) == ["images/front"]
    output, deadline = tmp_path / "output", time.monotonic() + 600
    words = ["train", "classifier", log, "--out", tmp_path / "d", *QUICK, "steps=100000"]
    process = fork_server.start_run(words, output)
    while "72 frames" not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, f"it never began: {output.read_text()}"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and "Traceback" not in output.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "log", "output"]
