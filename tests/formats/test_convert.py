"""Conversion as a whole: what is counted and said, what is refused, and that a
stopped one goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, CorruptError, LockedError, SchemaError, StorageError, UnknownNameError
from hilt.core.tree import flatten
from hilt.formats import FORMATS, Episode, create, detect, open_dataset, options_of
from hilt.formats.convert import EpisodeChange, convert, resize, survey
from hilt.replay import Log
from tests.effort import rounds
from tests.replay.toy_steps import new_log, numbers, step, write

GOLDEN = Path(__file__).parent.parent / "golden" / "rlds"
BRIDGE = GOLDEN / "bridge_like" / "1.0.0"
WRITERS = [name for name in FORMATS if hasattr(__import__(FORMATS[name], fromlist=["create"]), "create")]
LOSSLESS: dict[str, dict[str, Any]] = {"lerobot": {"images": "png", "fps": 10}}
"""Options with which a format keeps every pixel."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Five episodes, each of which ends, with facts."""
    with new_log(tmp_path) as log:
        for number, first in enumerate(range(0, 50, 10)):
            write(log, [*numbers(first, 4 + number, source=2), step(first + 4 + number, terminated=True, source=2)])
            log.annotate(number, success=number % 2 == 0, language_instruction=f"task {number}")
    return log.path


def assert_same(a: Path, b: Path) -> None:
    """Two datasets have the same episodes, value for value."""
    ours, theirs = list(open_dataset(a)), list(open_dataset(b))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.facts == other.facts
        left, right = flatten(one.columns), flatten(other.columns)
        assert set(left) == set(right)
        for path, column in left.items():
            assert column.dtype == right[path].dtype, path
            np.testing.assert_array_equal(column, right[path], err_msg=path)


def test_counts_and_notes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = convert(BRIDGE, tmp_path / "log", progress=lambda done, total: seen.append((done, total)))
    with Log.open(tmp_path / "log", "r") as log:
        assert (summary.episodes, summary.steps) == (len(log.trajectories()), len(log)) == (3, 15)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (summary.successes, summary.failures, summary.unknown, summary.empty) == (0, 0, 3, 1)
    assert summary.source_bytes == sum(p.stat().st_size for p in BRIDGE.iterdir()) and summary.target_bytes > 0
    assert [p.name for p in tmp_path.iterdir()] == ["log"], "nothing else is left"


def test_survey_counts_without_images(tmp_path: Path) -> None:
    counted, converted = survey(open_dataset(BRIDGE)), convert(BRIDGE, tmp_path / "log")
    assert (counted.episodes, counted.steps, counted.unknown) == (
        converted.episodes,
        converted.steps,
        converted.unknown,
    )


@pytest.mark.parametrize("to", WRITERS)
def test_a_stopped_conversion_goes_on(to: str, log: Path, tmp_path: Path) -> None:
    source, options = log, LOSSLESS.get(to, {})
    if to == "log":
        convert(log, tmp_path / "source", to="rlds")
        source = tmp_path / "source"
    convert(source, tmp_path / "whole", to=to, **options)

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "part", to=to, progress=stop, **options)
    assert not (tmp_path / "part").exists()
    summary = convert(source, tmp_path / "part", to=to, **options)
    assert 0 <= summary.went_on_from <= 3
    assert (summary.episodes, summary.steps, summary.successes, summary.failures) == (5, 35, 3, 2), (
        "earlier episodes are counted too"
    )
    assert_same(tmp_path / "whole", tmp_path / "part")
    assert not list(tmp_path.glob(".*.converting"))


KILLED = """
import sys
from hilt.formats.convert import convert
options = dict(part.split("=") for part in sys.argv[4:])
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], progress=lambda done, total: print(done, flush=True), **options)
print("finished", flush=True)
"""


@pytest.mark.parametrize("to", ["log", "rlds"])  # every writer's own tests kill it at every call
def test_sigkill_at_any_moment_loses_and_doubles_nothing(to: str, log: Path, tmp_path: Path, counted: Any) -> None:
    source = log
    if to == "log":
        convert(log, tmp_path / "source", to="rlds")
        source = tmp_path / "source"
    options = LOSSLESS.get(to, {})
    convert(source, tmp_path / "whole", to=to, **options)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(source),
        str(tmp_path / "part"),
        to,
        *(f"{k}={v}" for k, v in options.items()),
    ]
    rng, kills = random.Random(to), 0
    for after in (*range(0, 5, rounds(2, 1)), None):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if (after is not None and line.strip() == str(after + 1)) or line.strip() == "finished":
                    break
            if after is not None:
                with pytest.raises(subprocess.TimeoutExpired):  # it is working, or just ended: wait a little, then kill
                    process.wait(rng.uniform(0, 0.01))
                    raise subprocess.TimeoutExpired("", 0)
                process.send_signal(signal.SIGKILL)
                kills += 1
        if (tmp_path / "part").exists():
            break
    counted(f"{to}: killed {kills} times")
    assert_same(tmp_path / "whole", tmp_path / "part")


def stopped_after(count: int) -> Any:
    def stop(done: int, total: int) -> None:
        if done == count:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("to", WRITERS)
def test_what_was_written_is_kept_when_it_is_stopped(to: str, log: Path, tmp_path: Path) -> None:
    """However large the files of a format are."""
    with pytest.raises(KeyboardInterrupt):
        convert(log, tmp_path / "out", to=to, drop=["policy_version"] if to == "log" else [], progress=stopped_after(2))
    summary = convert(log, tmp_path / "out", to=to, drop=["policy_version"] if to == "log" else [])
    assert (summary.went_on_from, summary.episodes) == (2, 5)
    assert len(open_dataset(tmp_path / "out")) == 5


def test_another_conversion_to_the_same_place_is_not_mixed_in(log: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(log, tmp_path / "out", to="rlds", progress=stopped_after(1))
    with pytest.raises(
        ConfigError, match=r"unfinished conversion is there, with drop \[\], now \['policy_version'\]\. Repeat that"
    ):
        convert(log, tmp_path / "out", to="rlds", drop=["policy_version"])
    with pytest.raises(ConfigError, match=r"with formats \['log', 'rlds'\], now \['log', 'hil-serl'\]"):
        convert(log, tmp_path / "out", to="hil-serl")
    assert convert(log, tmp_path / "out", to="rlds").episodes == 5


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"to": "lerobot", "codec": "h265"}, {"to": "lerobot", "codec": "h264"}),
        ({"to": "rlds", "shard_bytes": 0}, {"to": "rlds"}),
        ({"to": "rlds", "drop": ["rewardz"]}, {"to": "rlds"}),
    ],
)
def test_a_command_that_failed_does_not_stand_in_the_way_of_the_right_one(
    wrong: Any, right: Any, log: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, UnknownNameError)):
        convert(log, tmp_path / "out", **wrong)
    assert not list(tmp_path.glob(".out*"))
    assert convert(log, tmp_path / "out", **right).episodes == 5


def test_two_at_once_are_refused(log: Path, tmp_path: Path) -> None:
    def again(done: int, total: int) -> None:
        with pytest.raises(LockedError, match=r"another conversion is writing it .* Wait for it, or stop it"):
            convert(log, tmp_path / "out", to="rlds")

    convert(log, tmp_path / "out", to="rlds", progress=again)


@pytest.mark.parametrize("to", [name for name in WRITERS if name != "log"])
def test_a_writer_does_not_touch_the_files_of_others(to: str, log: Path, tmp_path: Path) -> None:
    """Nor a dataset that is complete."""
    names = (
        "notes.txt",
        "buffer/transitions_1.pkl",
        "data/x.parquet",
        "meta/info.json",
        "data.hdf5",
        "trajectory_0_x.pt",
    )
    for name in names:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("precious")
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        create(tmp_path / "mine", to)
    assert {p.relative_to(tmp_path / "mine").as_posix() for p in (tmp_path / "mine").rglob("*") if p.is_file()} == set(
        names
    )
    convert(log, tmp_path / "done", to=to)
    before = {path: path.read_bytes() for path in (tmp_path / "done").rglob("*") if path.is_file()}
    with contextlib.closing(create(tmp_path / "done", to)) as writer:
        assert writer.next == 5
        with pytest.raises(ConfigError, match="this dataset is complete"):
            writer.add(5, next(iter(open_dataset(log))))
        writer.finish()
    assert {path: path.read_bytes() for path in (tmp_path / "done").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("to", ["rlds", "hil-serl"])
def test_what_was_written_before_a_stop_is_counted(
    log: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the stop comes after the last thing that a writer does for an episode."""
    options: dict[str, Any] = {"shard_bytes": 1} if to == "rlds" else {"buffer_period": 1}
    whole = convert(log, tmp_path / "whole", to=to, **options)
    assert whole.episodes > 2
    with contextlib.closing(create(tmp_path / "type", to)) as writer:
        kind = type(writer)
    for stop in range(whole.episodes):

        def add(writer: Any, number: int, episode: Episode, stop: int = stop, real: Any = kind.add) -> None:
            real(writer, number, episode)
            if number == stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(kind, "add", add)
            with pytest.raises(KeyboardInterrupt):
                convert(log, tmp_path / f"stopped-{stop}", to=to, **options)
        summary = convert(log, tmp_path / f"stopped-{stop}", to=to, **options)
        assert summary.went_on_from == stop + 1
        for name in ("episodes", "steps", "successes", "failures", "unknown", "notes"):
            assert getattr(summary, name) == getattr(whole, name), (name, stop)


def test_a_damaged_episode_is_named_or_passed_over_and_counted(tmp_path: Path) -> None:
    shutil.copytree(BRIDGE, tmp_path / "bad")
    (shard,) = (tmp_path / "bad").glob("*train.tfrecord*")
    raw = bytearray(shard.read_bytes())
    raw[int.from_bytes(raw[:8], "little") + 16 + 12 + 100] ^= 1  # in the data of the second record
    shard.write_bytes(raw)
    with pytest.raises(CorruptError, match=rf"{shard.name}.*--skip-corrupt"):
        convert(tmp_path / "bad", tmp_path / "log")
    summary = convert(tmp_path / "bad", tmp_path / "log", skip_corrupt=True)  # goes on, as the error says
    assert (summary.episodes, summary.damaged, summary.empty) == (2, 1, 1)
    assert any(shard.name in sentence for sentence in summary.notes)
    whole = list(open_dataset(BRIDGE))
    for one, other in zip(open_dataset(tmp_path / "log"), [whole[0], *whole[2:]], strict=True):
        np.testing.assert_array_equal(one.columns["observations"]["image"], other.columns["observations"]["image"])


def test_columns_are_dropped_and_images_resized(tmp_path: Path) -> None:
    convert(BRIDGE, tmp_path / "log", drop=["language_embedding", "observations/state"], image_size=(16, 12))
    with Log.open(tmp_path / "log", "r") as log:
        assert (
            log.schema.columns["observations/image"].shape
            == log.schema.columns["next_observations/wrist_image"].shape
            == (16, 12, 3)
        )
        assert "language_embedding" not in log.schema.columns and "observations/state" not in log.schema.columns
    with pytest.raises(UnknownNameError, match="no column named 'observations/stat'; did you mean"):
        convert(BRIDGE, tmp_path / "other", drop=["observations/stat"])


def test_dropping_an_observation_drops_the_next_one_too(log: Path, tmp_path: Path) -> None:
    summary = convert(log, tmp_path / "one", drop=["observations/image"])
    with Log.open(tmp_path / "one", "r") as made:
        assert not [column for column in made.schema.columns if "image" in column]
        assert {"observations/state", "next_observations/state"} <= set(made.schema.columns)
    assert summary.notes["left out by --drop: observations/image, next_observations/image"] == 5, "one for each episode"
    both = convert(log, tmp_path / "both", drop=["observations/image", "next_observations/image"])
    assert both.notes == summary.notes, "naming both is the same"
    convert(log, tmp_path / "next", drop=["next_observations/image"])
    with Log.open(tmp_path / "next", "r") as made:
        assert "observations/image" in made.schema.columns and "next_observations/image" not in made.schema.columns
    columns = ["observations/a", "next_observations/a/b", "observations_2", "curr_obs/a", "next_obs/a"]
    assert EpisodeChange(drop=("observations",)).dropped(columns) == ["observations/a", "next_observations/a/b"]
    assert EpisodeChange(drop=("curr_obs/a",)).dropped(columns) == ["curr_obs/a", "next_obs/a"]


def test_resizing_keeps_what_a_picture_shows() -> None:
    picture = np.zeros((2, 1, 40, 60, 3), np.uint8)
    picture[:, :, :20] = 200
    small = resize(picture, 4, 6)
    assert small.shape == (2, 1, 4, 6, 3) and (small[:, :, 0] > 190).all() and (small[:, :, -1] < 10).all()
    gray = resize(picture[..., :1], 4, 6)
    assert gray.shape == (2, 1, 4, 6, 1) and np.array_equal(gray[..., 0], small[..., 0])
    episode = Episode({"observations": {"a": picture, "mask": np.zeros((2, 40, 60), np.uint8)}})
    assert EpisodeChange(image_size=(4, 6)).apply(episode).columns["observations"]["mask"].shape == (2, 40, 60), (
        "not a picture"
    )


def test_an_episode_of_another_shape_is_refused_with_a_cure(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        for number, size in enumerate((20, 24)):
            demo = file.create_group(f"data/demo_{number}")
            demo["obs/front"], demo["actions"] = np.zeros((3, size, size, 3), np.uint8), np.zeros((3, 2), np.float32)
    with pytest.raises(SchemaError, match=r"demos.hdf5, episode 1: observations/front: expected .*--image-size"):
        convert(tmp_path / "demos.hdf5", tmp_path / "log")
    assert convert(tmp_path / "demos.hdf5", tmp_path / "log", image_size=(20, 20)).episodes == 2


def test_what_cannot_be_done_is_said(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a log already; copy it with: hilt data merge"):
        convert(log, tmp_path / "out")
    assert convert(log, tmp_path / "small", image_size=(8, 8)).episodes == 5, "a log that is changed is another one"
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        convert(BRIDGE, log)
    with pytest.raises(ConfigError, match="is a file; expected the name of a folder"):
        convert(BRIDGE, log / "log.json")
    with pytest.raises(ConfigError, match="terminated: where episodes end cannot be left out"):
        convert(BRIDGE, tmp_path / "out", drop=["terminated"])
    with pytest.raises(StorageError, match="there is no such file or folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"minari: this format cannot be written\. Those that can: log, "):
        convert(log, tmp_path / "out", to="minari")
    with pytest.raises(UnknownNameError, match="no format named 'lerobt'; did you mean 'lerobot'"):
        convert(log, tmp_path / "out", to="lerobt")
    with pytest.raises(ConfigError, match="splitt: from rlds to log: has no such option; did you mean 'split'"):
        convert(BRIDGE, tmp_path / "out", splitt="train")


def test_every_format_is_detected_and_has_its_functions(log: Path, tmp_path: Path) -> None:
    for to in WRITERS:
        if to != "log":
            convert(log, tmp_path / to, to=to)
            assert detect(tmp_path / to) == to
    assert detect(log) == "log"
    for name in FORMATS:
        assert all(option.annotation is not option.empty for option in options_of(name, "open_dataset").values())
