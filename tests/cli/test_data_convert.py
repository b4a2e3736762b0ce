"""``hilt data convert``, ``formats`` and ``inspect`` as a person uses them: what
they print, what they write, how they exit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.core.tree import flatten
from hilt.formats import FORMATS, open_dataset
from hilt.replay import Log
from tests.replay.toy_steps import new_log, numbers, step, trajectory, write

BRIDGE = Path(__file__).parent.parent / "golden" / "rlds" / "bridge_like" / "1.0.0"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["data", *map(str, arguments)], env={"COLUMNS": "250"})


def test_convert_says_what_it_did(tmp_path: Path) -> None:
    done = run("convert", BRIDGE, tmp_path / "log", "--split", "train[:2]")
    assert done.exit_code == 0, done.output
    assert f"{BRIDGE} (rlds, " in done.output and f"{tmp_path / 'log'} (log, " in done.output
    with Log.open(tmp_path / "log", "r") as log:
        said = [line.split() for line in done.output.splitlines()]
        assert ["steps", str(len(log))] in said and ["episodes", "2"] in said
        assert len(log.trajectories()) == 2
    assert "0 succeeded, 0 failed, 2 unknown" in done.output


def test_notes_are_shown(tmp_path: Path) -> None:
    done = run("convert", BRIDGE, tmp_path / "log")
    assert "not carried over as it was:" in done.output and "last step" in done.output
    assert (
        f"hilt data inspect {tmp_path / 'log'}\n  hilt train RECIPE demonstrations=0 'demo_path=[{tmp_path / 'log'}]'"
        in done.output
    )


def test_as_json(tmp_path: Path) -> None:
    done = run("convert", BRIDGE, tmp_path / "log", "--json", "--drop", "language_embedding", "--workers", 1)
    said = json.loads(done.output)
    assert (said["episodes"], said["source_format"], said["target_format"], said["damaged"]) == (3, "rlds", "log", 0)


def test_options_have_the_types_of_their_format(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        write(log, [*numbers(0, 3), step(3, terminated=True)])
    assert (
        run("convert", log.path, tmp_path / "out", "--to", "lerobot", "-o", "images=png", "-o", "fps=25").exit_code == 0
    )
    assert json.loads((tmp_path / "out" / "meta" / "info.json").read_text())["fps"] == 25
    wrong = run("convert", log.path, tmp_path / "two", "--to", "lerobot", "-o", "fps=fast")
    assert wrong.exit_code == 2 and "expected a number" in wrong.output
    unknown = run("convert", log.path, tmp_path / "two", "--to", "lerobot", "-o", "fpss=2")
    assert unknown.exit_code == 1 and "has no such option; did you mean 'fps'?" in unknown.output
    assert "expected NAME=VALUE" in run("convert", log.path, tmp_path / "two", "-o", "fps").output
    assert "such as 128x128" in run("convert", BRIDGE, tmp_path / "two", "--image-size", "128").output


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "junk").mkdir()
    said = run("inspect", tmp_path / "junk")
    assert said.exit_code == 1 and said.output.count("\n") == 1
    assert "none of the known formats (log, rlds, lerobot, " in said.output and "--from" in said.output
    assert "no such file or folder" in run("inspect", tmp_path / "nowhere").output


def test_the_folder_of_a_recording_is_converted(tmp_path: Path) -> None:
    recording = tmp_path / "recordings" / "first"
    with new_log(recording) as log:
        write(log, [*numbers(0, 3), step(3, terminated=True)])
    done = run("convert", recording, tmp_path / "out", "--to", "rlds")
    assert done.exit_code == 0 and f"{log.path} (log, " in done.output, done.output
    assert len(open_dataset(recording)) == len(open_dataset(tmp_path / "out")) == 1
    assert "none of the known formats" in run("inspect", recording.parent).output


def test_formats_lists_all_with_their_options() -> None:
    said = run("formats").output
    assert all(name in said for name in FORMATS)
    assert "split=" in said and "fps=" in said and "view=all" in said and "av1, h264 or lossless" in said
    assert "`" not in said, "a terminal renders no backticks"


def test_inspect_counts_and_lists_columns(tmp_path: Path) -> None:
    said = run("inspect", BRIDGE)
    assert said.exit_code == 0, said.output
    assert "rlds" in said.output and "observations/image" in said.output and "32×40×3" in said.output
    assert ["steps", "15"] in [
        line.split() for line in said.output.splitlines()
    ] and "next_observations" not in said.output
    assert "hilt data convert" in said.output
    quick = json.loads(run("inspect", BRIDGE, "--quick", "--json").output)
    assert quick["counted"] is False and quick["episodes"] == 4 and quick["steps"] == 0
    full = json.loads(run("inspect", BRIDGE, "--json", "--split", "val").output)
    assert full["counted"] is True and full["episodes"] == 1
    assert {"column": "actions", "dtype": "float32", "shape": [7]} in full["columns"]


def test_inspect_draws_an_episode(tmp_path: Path) -> None:
    out = tmp_path / "strip.png"
    assert run("inspect", BRIDGE, "--frames", "--trajectory", 1, "--out", out).exit_code == 0
    from PIL import Image

    drawn = np.asarray(Image.open(out)).reshape(-1, 3)
    (_, episode, *_) = open_dataset(BRIDGE)
    shown = {tuple(pixel) for pixel in drawn.tolist()}
    assert {
        tuple(pixel) for pixel in episode.columns["observations"]["wrist_image"][0].reshape(-1, 3).tolist()
    } <= shown
    assert "no episode -1" in run("inspect", BRIDGE, "--frames", "--trajectory", -1, "--out", out).output
    refused = run("inspect", BRIDGE, "--frames", "--out", tmp_path)
    assert refused.exit_code == 1 and not list(tmp_path.parent.glob(".*.new"))
    assert "no episode 9" in run("inspect", BRIDGE, "--frames", "--trajectory", 9, "--out", out).output


def test_a_colon_in_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg takes what stands before it in a relative path for a protocol."""
    monkeypatch.chdir(tmp_path)
    with new_log(tmp_path) as log:
        write(log, [*numbers(0, 3), step(3, terminated=True)])
    assert (
        run("convert", log.path, "as:videos", "--to", "lerobot", "-o", "codec=lossless", "-o", "fps=10").exit_code == 0
    )
    assert run("convert", "as:videos", "back:again").exit_code == 0
    for one, other in zip(open_dataset(log.path), open_dataset("back:again"), strict=True):
        (images,) = [
            column
            for path, column in flatten(other.columns).items()
            if path.startswith("observations") and column.ndim == 4
        ]
        np.testing.assert_array_equal(one.columns["observations"]["image"], images)


def test_options_of_datasets_are_refused_for_logs(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3))
    assert "are for datasets that are not logs" in run("inspect", log.path, "--quick").output


def test_where_converts_the_episodes_that_a_filter_chooses(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        for first in (0, 10, 20):
            facts = {"success": first > 5, "value": first / 20}
            log.add(trajectory([[*numbers(first, 2), step(first + 2, terminated=True)]]), facts=facts)
    done = run("convert", log.path, tmp_path / "few", "--where", "value>=0.3 success=true", "--where", "value<1")
    assert done.exit_code == 0 and "1 succeeded, 0 failed, 0 unknown" in done.output
    [episode] = open_dataset(tmp_path / "few")
    assert episode.columns["rewards"].tolist() == [10, 11, 12]
    none = run("convert", log.path, tmp_path / "none", "--where", "value>3")
    assert none.exit_code == 1 and "chooses none of the 3 episodes" in none.output and not (tmp_path / "none").exists()
    other = run("convert", BRIDGE, tmp_path / "other", "--where", "success=true")
    assert other.exit_code == 1 and "is a dataset (rlds), and filters of episodes are for logs" in other.output


def test_ctrl_c_keeps_what_was_done(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        for first in range(0, 4000, 10):
            write(log, [*numbers(first, 9), step(first + 9, terminated=True)])
    main = "from hilt.cli import main; main()"
    command = [sys.executable, "-c", main, "data", "convert", str(log.path), str(tmp_path / "out"), "--to", "rlds"]
    command += ["-o", "shard_bytes=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    record, deadline = tmp_path / ".out.converting" / "record.jsonl", time.monotonic() + 60
    while (
        not (record.exists() and record.stat().st_size > 10_000)
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    if process.returncode == 0:
        pytest.skip("it was done before Ctrl-C reached it")
    assert process.returncode == 130 and "the same command goes on from there" in said
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(again.stdout)["went_on_from"] > 0 and json.loads(again.stdout)["episodes"] == 400
    assert len(open_dataset(tmp_path / "out")) == 400
