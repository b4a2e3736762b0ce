"""``hilt data check``: a table or JSON, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from hilt.cli.data.data_commands import app
from tests.checks.arm import arm, arms, written


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, words)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def test_check_of_a_good_dataset_exits_with_0(tmp_path: Path):
    code, text = run(written(tmp_path / "log", arms(2)))
    assert code == 0 and "ok: 0 errors, 0 warnings, 0 info in 2 episodes, 120 steps" in text


def test_check_exits_with_1_for_errors_and_with_strict_for_warnings(tmp_path: Path):
    warned = written(tmp_path / "warned", [arm(terminated=np.zeros(60, bool)), arm(seed=1)])
    code, text = run(warned)
    assert code == 0 and "has no end" in text and "trajectory 0, step 59" in text and "1 warning" in text
    assert run(warned, "--strict")[0] == 1
    faulty = written(tmp_path / "faulty", [arm(rewards=np.full(60, np.inf, np.float32))])
    code, text = run(faulty, "--only", "values")
    assert code == 1 and "faulty: 1 error, 0 warnings, 0 info" in text
    assert run(faulty, "--skip", "values")[0] == 0


def test_check_groups_findings_and_shows_the_worst_three(tmp_path: Path):
    def change(number: int) -> dict[str, np.ndarray]:
        rewards = np.zeros(60, np.float32)
        rewards[: number + 1] = np.nan
        return {"rewards": rewards}

    log = written(tmp_path / "log", arms(9, change=change))
    code, text = run(log, "--only", "values")
    assert code == 1 and text.startswith("error  values: 9 errors\n")
    shown = [line.strip() for line in text.splitlines() if "trajectory" in line]
    assert [line.split(": ")[1] for line in shown] == [
        f"{count} of 60 steps have a value that is not a number or infinite." for count in (9, 8, 7)
    ]
    assert "and 6 more: --all or --json" in text and text.count("What to do") == 1
    code, text = run(log, "--only", "values", "--all")
    assert text.count("trajectory") == 9 and "--all" not in text
    assert len(json.loads(run(log, "--only", "values", "--json")[1])["findings"]) == 9


def test_check_prints_json(tmp_path: Path):
    code, text = run(written(tmp_path / "log", [arm(terminated=np.zeros(60, bool))]), "--json", "--only", "ends")
    (finding,) = json.loads(text)["findings"]
    assert finding["what"].startswith("The episode has no end") and finding["place"] == "trajectory 0, step 59"
    assert code == 0 and finding["check"] == "ends" and finding["severity"] == "warning"
    assert (finding["episode"], finding["first"], finding["last"]) == (0, 59, 59) and finding["cure"]


def test_check_reads_a_split_and_the_folder_of_a_recording(tmp_path: Path):
    rlds = written(tmp_path / "rlds", arms(4), "rlds")
    assert "in 1 episodes" in run(rlds, "--split", "train[:25%]")[1]
    written(tmp_path / "recording" / "log", arms(2))
    assert run(tmp_path / "recording")[0] == 0


def test_check_names_unknown_checks(tmp_path: Path):
    result = CliRunner().invoke(app, ["check", str(written(tmp_path / "log", arms(1))), "--only", "frame"])
    assert result.exit_code != 0
