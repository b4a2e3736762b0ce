"""Counts, values, ends, instructions and duplicates: a dataset with each fault, and one that only looks like it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.checks import CHECKS, check_dataset
from tests.checks.arm import arm, arms, checked, found, written
from tests.formats.samples import minari, robomimic


def test_a_good_dataset_has_no_findings(tmp_path: Path):
    for format, options in (("log", {}), ("lerobot", {"images": "png"}), ("rlds", {})):
        report = check_dataset(written(tmp_path / format, arms(5), format, **options))
        assert found(report) == [] and report.ok
        assert (report.episodes, report.steps, report.damaged) == (5, 300, 0)
        assert report.checks == list(CHECKS)


def test_counts_that_the_metadata_state_wrongly(tmp_path: Path):
    folder = written(tmp_path / "data", arms(2), "lerobot", images="png")
    info = folder / "meta/info.json"
    assert found(check_dataset(folder, only=["counts"])) == []
    info.write_text(json.dumps({**json.loads(info.read_text()), "total_frames": 121}))
    (finding,) = check_dataset(folder, only=["counts"]).findings
    assert finding.severity == "error" and finding.place == "dataset"
    assert finding.what == "The metadata state 121 steps, and 120 were read."


def test_counts_of_records_that_are_not_listed(tmp_path: Path):
    folder = written(tmp_path / "rlds", arms(3), "rlds")
    info = folder / "dataset_info.json"
    known = json.loads(info.read_text())
    assert found(check_dataset(folder, only=["counts"], split="train[:2]")) == [], "which is a part by intention"
    known["splits"][0]["shardLengths"] = ["2"]
    info.write_text(json.dumps(known))
    (finding,) = check_dataset(folder, only=["counts"]).findings
    assert finding.severity == "error" and "has 3 records, and dataset_info.json lists 2" in finding.what


def test_counts_of_frames_that_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    golden = Path(__file__).parent.parent / "golden/lerobot/v21_image"
    folder = shutil.copytree(golden, tmp_path / "lerobot")
    assert found(check_dataset(folder, only=["counts"])) == []
    monkeypatch.chdir(tmp_path)
    assert found(check_dataset("lerobot", only=["counts"])) == [], "a path relative to the current folder"
    lines = (folder / "meta/episodes.jsonl").read_text().splitlines()
    (folder / "meta/episodes.jsonl").write_text("\n".join(lines[:-1]))
    report = check_dataset(folder, only=["counts"])
    assert [finding.severity for finding in report.findings] == ["error"] * 3
    assert "meta/episodes lists 0 of them" in report.findings[0].what


def test_counts_of_a_chosen_part_are_not_those_of_the_whole(tmp_path: Path):
    path = robomimic(tmp_path)[0]
    assert found(check_dataset(path, only=["counts"], filter_key="train")) == []


@pytest.mark.parametrize(("kind", "stated"), [("robomimic", 9), ("minari", 7)])
def test_counts_of_hdf5_files(tmp_path: Path, kind: str, stated: int):
    import h5py

    path = {"robomimic": robomimic, "minari": minari}[kind](tmp_path)[0]
    assert found(check_dataset(path, only=["counts"])) == []
    if kind == "robomimic":
        with h5py.File(path, "r+") as file:
            file["data"].attrs["total"] = stated + 1
    else:
        about = path / "data/metadata.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "total_steps": stated + 1}))
    assert [finding.what for finding in check_dataset(path, only=["counts"]).findings] == [
        f"The metadata state {stated + 1} steps, and {stated} were read."
    ]


def test_counts_are_not_compared_when_an_episode_is_damaged(tmp_path: Path):
    folder = written(tmp_path / "data", arms(3), "hil-serl", buffer_period=1)
    lerobot = written(tmp_path / "lerobot", arms(1), "lerobot", images="png")
    next(lerobot.rglob("file-000.parquet")).write_bytes(b"nothing")
    for path in (folder, lerobot):
        assert "counts" not in [finding.check for finding in check_dataset(path, only=["files", "counts"]).findings]


def test_values_that_are_not_finite(tmp_path: Path):
    actions = arm().columns["actions"].copy()
    actions[10:13, 1] = np.nan
    report = checked(tmp_path / "bad", [arm(), arm(seed=1, actions=actions)], "values", format="rlds")
    assert found(report) == [("error", "values", "episode 1, steps 10-12, actions")]
    assert [finding.what for finding in report.findings] == [
        "3 of 60 steps have a value that is not a number or infinite."
    ]


def test_values_that_are_only_large_are_finite(tmp_path: Path):
    assert found(checked(tmp_path, [arm(actions=np.full((60, 3), 1e30, np.float32))], "values")) == []


def test_ends_that_are_missing_or_in_the_middle(tmp_path: Path):
    never = np.zeros(60, bool)
    report = checked(tmp_path / "none", arms(3, change=lambda n: {"terminated": never} if n else {}), "ends")
    assert found(report) == [
        ("warning", "ends", "trajectory 1, step 59"),
        ("info", "ends", "trajectory 2, step 59"),  # the newest: its run was stopped
    ]
    early = np.arange(60) == 30
    report = checked(tmp_path / "middle", [arm(terminated=early)], "ends", format="robomimic")
    assert found(report) == [
        ("warning", "ends", "data.hdf5: demo_0, step 59"),
        ("error", "ends", "data.hdf5: demo_0, step 30"),
    ]


def test_ends_by_a_time_limit_are_ends(tmp_path: Path):
    never, last = np.zeros(60, bool), np.arange(60) == 59
    assert found(checked(tmp_path, [arm(terminated=never, truncated=last)], "ends")) == []


def test_ends_of_a_log_that_is_being_written_are_not_missing(tmp_path: Path):
    from hilt.replay.log import Log

    folder = written(tmp_path / "log", [arm(terminated=np.zeros(60, bool))])
    with Log.open(folder, "a"):
        assert found(check_dataset(folder, only=["ends"])) == []
    assert len(check_dataset(folder, only=["ends"]).findings) == 1


def test_language_that_some_episodes_lack(tmp_path: Path):
    def change(number: int) -> dict[str, Any]:
        return {"facts": {"language_instruction": " " if number == 2 else "go"}}

    report = checked(tmp_path / "some", arms(4, change=change), "language")
    assert found(report) == [("warning", "language", "trajectory 2")]
    none = checked(tmp_path / "none", arms(2, change=lambda n: {"facts": {"language_instruction": ""}}), "language")
    assert found(none) == [("info", "language", "dataset")]


def test_language_that_some_steps_lack(tmp_path: Path):
    texts = {"texts": ["go", "", "stop"], "begins": [0, 20, 30]}
    report = checked(tmp_path, [arm(facts={"language_instruction": texts})], "language")
    assert found(report) == [("warning", "language", "trajectory 0, steps 20-29")]


def test_language_that_changes_within_an_episode_is_not_missing(tmp_path: Path):
    texts = {"texts": ["go", "stop"], "begins": [0, 20]}
    assert found(checked(tmp_path, [arm(facts={"language_instruction": texts})], "language")) == []


def test_duplicates_are_found_by_content(tmp_path: Path):
    report = checked(tmp_path, [arm(seed=0), arm(seed=1), arm(seed=0), arm(seed=0)], "duplicates")
    assert found(report) == [("warning", "duplicates", "trajectory 2"), ("warning", "duplicates", "trajectory 3")]
    assert all("as trajectory 0." in finding.what for finding in report.findings)


def test_duplicates_are_not_the_same_actions_elsewhere(tmp_path: Path):
    first = arm()
    path = np.r_[first.columns["observations"]["state"], first.columns["next_observations"]["state"][-1:]]
    replayed = arm(state=path + 0.01)
    longer = arm(length=61)
    assert found(checked(tmp_path, [first, replayed, longer], "duplicates")) == []
