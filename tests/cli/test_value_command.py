"""``hilt train value`` and ``hilt data value`` as a person meets them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.core.checksums import read_json
from hilt.value import value_training
from tests.value.valued import BLIND, write_log

SETTINGS = [f"{name}={value}" for name, value in BLIND.items()]


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def test_a_value_model_is_trained_shown_and_written_into_logs(tmp_path: Path):
    log, out = write_log(tmp_path / "log", 16, pictures=False), tmp_path / "value"
    said = run("train", "value", log, "--out", out, *SETTINGS).output
    metadata = read_json(out / "value.json")
    half = metadata["held_out"]["after"][1]
    for words in (
        "16 episodes, 264 steps: 8 succeeded, 8 failed, a person acted in 4",
        f"AUC {half['auc']:.3f} (95% interval {half['interval'][0]:.3f} to {half['interval'][1]:.3f})",
        f"calibration error {half['calibration_error']:.3f}",
        "4 episodes (2 successes) from 4 initial states, by initial state",
        "judged on 2 successes and 2 failures: that proves little",
        "one task only: the words are not looked at",
        "Values of 16 episodes were written into their logs.",
        f"hilt open {log} {out}",
    ):
        assert words in said, said
    assert "is a value model already" in run("train", "value", log, "--out", out, *SETTINGS, code=1).output
    more = write_log(tmp_path / "more", 4, pictures=False, seed=1)
    shown = json.loads(run("data", "value", log, more, "--model", out, "--json").stdout)
    assert shown == {"model": metadata["id"], "episodes": 4, "known": 16, "edits": 1, "passed_over": {}}
    assert (
        "Values of 0 episodes were written into their logs; 4 had them already."
        in run("data", "value", more, "--model", out).output
    )
    assert "failure_penalty" in run("train", "value", "--settings").output


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log, out = write_log(tmp_path / "log", 16, pictures=False), tmp_path / "value"
    write = value_training._write_checkpoint

    def interrupted(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(value_training, "_write_checkpoint", interrupted)
        said = run("train", "value", log, "--out", out, *SETTINGS, code=130).output
    assert f"stopped; hilt train value {log}" in said and not (out / "value.json").exists()
    assert "AUC" in run("train", "value", log, "--out", out, *SETTINGS).output
    assert {path.name for path in out.iterdir()} == {"value.json", "model.safetensors", "held_out.json", "report.png"}


def test_a_log_without_failures_is_refused_in_one_line(tmp_path: Path):
    log = write_log(tmp_path / "log", 4, (True,), pictures=False)
    said = run("train", "value", log, "--out", tmp_path / "value", *SETTINGS, code=1).output
    assert "error: " in said and "a value that has seen no failures cannot rank" in said
    assert "error: no data" in run("train", "value", code=1).output
