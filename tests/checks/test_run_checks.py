"""A check goes on after damage, names it once, and runs only what was chosen."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from hilt.checks import CHECKS, check_dataset
from hilt.core.errors import ConfigError, FormatError, HiltError, UnknownNameError
from hilt.formats.episodes import Episode
from hilt.formats.hilserl import HilSerlDataset
from hilt.replay.maintenance.repair import verify
from tests.checks.arm import arm, arms, found, looked_at, written
from tests.effort import rounds
from tests.formats.samples import FORMATS, samples
from tests.formats.spoil import spoil


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_every_format_are_read(format: str, tmp_path: Path):
    for path in samples(format, tmp_path / format):
        report = check_dataset(path, only=["files", "counts"], workers=1)
        assert report.format == format and report.episodes and found(report) == [], path


def test_files_that_are_damaged_are_named_and_the_next_episode_follows(tmp_path: Path):
    folder = written(tmp_path / "data", arms(3), "rlds")
    shard = next(folder.glob("*.tfrecord*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(data)
    report = check_dataset(folder, only=["files", "ends"])
    assert found(report) == [("error", "files", "episode 1")] and not report.ok
    assert (report.episodes, report.damaged) == (2, 1)
    assert shard.name in report.findings[0].what


def test_files_that_are_cut_short_are_found_by_their_images(tmp_path: Path):
    folder = written(tmp_path / "data", arms(2), "lerobot", codec="h264")
    video = next(folder.rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[:1000])
    assert found(check_dataset(folder, only=["files"])) == [("error", "files", f"episode {n}") for n in range(2)]
    assert found(check_dataset(folder, only=["ends"])) == [], "which looks at no image"


def test_files_that_keep_a_dataset_from_opening_are_a_finding(tmp_path: Path):
    folder = written(tmp_path / "data", arms(1), "lerobot", images="png")
    (folder / "meta/info.json").write_text("{")
    report = check_dataset(folder)
    assert found(report) == [("error", "files", "dataset")] and "info.json" in report.findings[0].what


def test_files_of_a_log_have_the_findings_of_verify(tmp_path: Path):
    pictures = np.random.default_rng(0).integers(0, 256, (61, 24, 24, 3), np.uint8)
    folder = written(tmp_path / "log", [arm(front=pictures)])
    frames = next(path for path in (folder / "segments").rglob("*") if "front" in path.name)
    data = bytearray(frames.read_bytes())
    data[len(data) // 2] ^= 255
    frames.write_bytes(data)
    expected = verify(folder)
    report = check_dataset(folder, only=["files"])
    assert [finding.what for finding in report.findings] == [f"{finding}." for finding in expected.findings]
    assert not report.ok and "hilt data repair" in report.findings[0].cure
    assert report.findings[0].label == "trajectory 0" and report.findings[0].column == "observations/front"


def test_files_without_which_a_log_does_not_open_are_one_finding(tmp_path: Path):
    folder = written(tmp_path / "log", [arm()])
    (folder / "log.json").write_text("{")
    report = check_dataset(folder)
    assert found(report) == [("error", "files", "dataset")] and "log.json" in report.findings[0].what


def test_files_left_over_in_a_log_are_no_error(tmp_path: Path):
    folder = written(tmp_path / "log", [arm()])
    (folder / "segments" / "stray.txt").write_text("x")
    report = check_dataset(folder, only=["files"])
    assert report.ok and all(finding.severity == "info" for finding in report.findings)


def test_only_and_skip_choose_checks(tmp_path: Path):
    folder = written(tmp_path / "log", [arm(terminated=np.zeros(60, bool))])
    assert check_dataset(folder, only=["ends", "counts"], skip=["counts"]).checks == ["ends"]
    assert "ends" not in check_dataset(folder, skip=["ends"]).checks
    with pytest.raises(UnknownNameError, match="no check named 'end'"):
        check_dataset(folder, only=["end"])
    with pytest.raises(ConfigError, match="no check is left"):
        check_dataset(folder, skip=CHECKS)


def test_a_path_of_no_known_format_is_refused(tmp_path: Path):
    with pytest.raises(FormatError, match="none of the known formats"):
        check_dataset(tmp_path)


def test_episodes_are_read_one_after_the_other_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At most a few episodes are held at once, however many there are."""
    import weakref

    folder, held, most = written(tmp_path / "data", arms(12, length=8), "hil-serl", buffer_period=1), [], []
    read = HilSerlDataset._read

    def counted(self, found, images):
        episode = read(self, found, images)
        most.append(sum(reference() is not None for reference in held))
        held.append(weakref.ref(episode))
        return episode

    monkeypatch.setattr(HilSerlDataset, "_read", counted)
    assert check_dataset(folder, workers=1).episodes == 12
    assert max(most) <= 5


def test_progress_is_reported_for_every_episode(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    check_dataset(written(tmp_path / "log", arms(3)), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_steps_of_a_trimmed_episode_are_counted_as_recorded(tmp_path: Path):
    """`hilt data trim` and the other edits count so, too."""
    from hilt.replay.edits import Edits
    from hilt.replay.log import Log

    rewards = np.zeros(60, np.float32)
    rewards[30] = np.nan
    folder = written(tmp_path / "log", [arm(), arm(seed=1, rewards=rewards)])
    with Log.open(folder, "r") as log:
        Edits(log, author="ann").trim(1, first=10, last=40)
    report = check_dataset(folder, only=["values", "ends"])
    assert found(report) == [("error", "values", "trajectory 1, step 30, rewards")] and report.steps == 91
    assert report.findings[0].trimmed == 10
    with Log.open(folder, "r") as log:
        Edits(log, author="ann").bad(1)
    assert found(check_dataset(folder, only=["values", "ends"])) == [], "which is in no view"


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "rlinf"])
def test_spoilt_files_end_in_findings_or_one_error(format: str, tmp_path: Path):
    """Whatever is damaged, a check reports it, or refuses a folder that is no dataset any more."""
    (path, *_) = samples(format, tmp_path / "whole")
    for seed in range(rounds(3, 100)):
        spoilt = tmp_path / str(seed) / path.name
        spoilt.parent.mkdir()
        (shutil.copytree if path.is_dir() else shutil.copy)(path, spoilt)
        done = spoil(random.Random(seed), spoilt)
        try:
            report = check_dataset(spoilt, format, workers=1)
        except HiltError as error:
            assert str(error), done
        else:
            assert report.to_json()["format"] == format, done


def test_odd_columns_break_no_check():
    """Episodes of one step, of other widths, shapes and types, and with numbers at the limits of their types."""
    rng = np.random.default_rng(0)
    one = arm(length=1)
    wide = Episode(
        {
            "observations": {"state": rng.normal(size=(50, 7)), "front": np.zeros((50, 0, 4, 3), np.uint8)},
            "actions": {"arm": np.full((50, 5), 1e300), "hand": rng.integers(0, 2, (50, 1))},
            "rewards": np.full((50, 1), np.inf),
            "terminated": np.zeros((50, 1), np.float32),
            "truncated": np.ones((50, 1), np.int8),
            "text": np.array(["x"] * 50, object),
            "times": {"observed": np.full(50, np.nan)},
        },
        {"language_instruction": {"texts": 3}, "fps": "fast"},
    )
    flat = Episode({"observations": rng.normal(size=(50, 2)), "actions": np.zeros(50, np.float32)})
    report = looked_at([one, wide, flat, arm(), wide, one], *CHECKS[1:])
    assert report.episodes == 6 and "values" in report.by_check
