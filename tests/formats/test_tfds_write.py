"""TFDS folders that we write, read by our reader; tests/peers/test_rlds.py has the real library read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, SchemaError
from hilt.formats import open_dataset as open_any
from hilt.formats.convert import convert
from hilt.formats.episodes import Dataset, Episode
from hilt.formats.rlds import (
    convert_rlds_to_trajectories,
    create_log_schema,
    create_trajectory_data_spec,
    push_rlds_to_reverb,
)
from hilt.formats.tensorflow_files.tfds_write import create
from hilt.replay import Log
from tests.effort import rounds
from tests.formats.test_steps import random_episode
from tests.formats.toy_episodes import assert_all_same, made, write, write_killed, write_stopped_at_every_call

GOLDEN = Path(__file__).parent.parent / "golden" / "rlds"


def open_dataset(path: Path, **options: Any) -> Dataset:
    return open_any(path, format="rlds", **options)


def episodes() -> list[Episode]:
    return [made(length, seed) for seed, length in enumerate([4, 1, 6, 3])] + [made(5, 9, ended="")]


def test_an_episode_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(create(tmp_path, name="toy", version="2.1.0"), episodes())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "dataset_info.json", "features.json", "metadata.json", "toy-train.tfrecord-00000-of-00001",
    ]  # fmt: skip
    dataset = open_dataset(tmp_path)
    assert_all_same(list(dataset), episodes())
    assert dataset.notes.counts == {}
    assert dataset.describe()["name"] == "toy" and dataset.describe()["version"] == "2.1.0"
    assert all(t.step_type != 1 or t.next_step_type != 0 for t in convert_rlds_to_trajectories(dataset, strict=True))


@settings(deadline=None, max_examples=rounds(12, 200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_every_type_of_column_comes_back(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("tfds")
    one = random_episode(seed)
    write(create(folder), [one])
    assert_all_same(list(open_dataset(folder)), [one])


def test_types_that_a_list_of_numbers_cannot_hold(tmp_path: Path) -> None:
    more = {
        "bf16": np.array([1, 2, np.nan, -0.0], ml_dtypes.bfloat16),
        "c64": np.array([1j, 2, 3, 4], np.complex64),
        "f64": np.array([[np.pi, 1e300]] * 4),
        "empty": np.zeros((4, 0), np.float64),
        "empty8": np.zeros((4, 2, 0), np.uint8),
        "u64": np.array([0, 1, 2**64 - 1, 2**63], np.uint64),
        "large": np.random.default_rng(0).integers(0, 255, (4, 2, 30, 40, 3), np.uint8),
        "rgba": np.random.default_rng(0).integers(0, 255, (4, 3, 4, 4), np.uint8),
        "gray": np.random.default_rng(0).integers(0, 255, (4, 3, 4, 1), np.uint8),
        "two": np.random.default_rng(0).integers(0, 255, (4, 3, 4, 2), np.uint8),
    }
    wanted = [made(4, 0, **more)]
    write(create(tmp_path), wanted)
    wanted[0].columns["bf16"] = more["bf16"].astype(np.float32)  # as logs have it
    assert_all_same(list(open_dataset(tmp_path)), wanted)
    stored = next(open_dataset(tmp_path).rlds())["steps"].columns["bf16"]
    assert stored.dtype == ml_dtypes.bfloat16 and stored[:4].tobytes() == more["bf16"].tobytes()


@pytest.mark.parametrize(
    "column", [np.array([b"ab", b"cd"]), np.array(["2020-01-01", "2021-01-01"], "M8[D]"), np.zeros((2, 0), np.uint32)]
)
def test_a_column_that_has_no_place(tmp_path: Path, column: Any) -> None:
    writer = create(tmp_path)
    with pytest.raises(SchemaError, match="steps/strange: TFDS has no way to store"):
        writer.add(0, made(2, strange=column))
    writer.close()


def test_images_as_jpeg_are_smaller_near_and_noted(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 20 * 24 * 3).reshape(1, 20, 24, 3).repeat(5, 0).astype(np.uint8)
    one = made(4)
    one.columns["observations"]["front"], one.columns["next_observations"]["front"] = smooth[:-1], smooth[1:]
    for format in ("png", "jpeg"):
        writer = create(tmp_path / format, image_format=format)
        write(writer, [one])
        assert writer.notes.counts == (
            {} if format == "png" else {"images were stored as JPEG, which changes them a little": 1}
        )
    (found,) = open_dataset(tmp_path / "jpeg")
    assert 0 < np.abs(found.columns["observations"]["front"].astype(int) - smooth[:-1]).max() < 30
    assert (tmp_path / "jpeg/episodes-train.tfrecord-00000-of-00001").stat().st_size < 20_000


def test_shards(tmp_path: Path) -> None:
    write(create(tmp_path, shard_bytes=30_000), episodes())
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    lengths = [int(n) for n in info["splits"][0]["shardLengths"]]
    assert sum(lengths) == 5 and len(lengths) > 1
    files = sorted(tmp_path.glob("*.tfrecord-*"))
    assert [f.name for f in files] == [
        f"episodes-train.tfrecord-{i:05}-of-{len(lengths):05}" for i in range(len(lengths))
    ]
    assert int(info["splits"][0]["numBytes"]) == sum(f.stat().st_size for f in files)
    assert_all_same(list(open_dataset(tmp_path)), episodes())
    assert_all_same(list(open_dataset(tmp_path, split="train[2:4]")), episodes()[2:4])


def test_an_episode_with_a_gap_is_cut_and_noted(tmp_path: Path) -> None:
    one = made(6)
    for path in ("state", "front"):
        one.columns["observations"][path] = one.columns["observations"][path].copy()
        one.columns["observations"][path][4] += 1
    writer = create(tmp_path)
    write(writer, [one])
    assert writer.notes.counts == {"an episode with gaps or ends inside was cut there": 1}
    first, second = open_dataset(tmp_path)
    assert (
        len(first) == 4
        and len(second) == 2
        and not first.columns["terminated"].any()
        and second.columns["terminated"][-1]
    )
    assert np.array_equal(second.columns["observations"]["state"], one.columns["observations"]["state"][4:])


def test_other_columns_than_before(tmp_path: Path) -> None:
    writer = create(tmp_path)
    writer.add(0, made(3))
    for episode, said in (
        (made(3, more=np.zeros(3)), r"steps/more: expected nothing, got float64 \(\)\."),
        (made(3, policy_version=np.zeros((3, 1))), r"steps/policy_version: expected int64 \(\), got float64 \(1,\)\."),
    ):
        with pytest.raises(
            SchemaError,
            match=f"^not as in the episodes before, and all steps of a dataset have the same features: {said}",
        ):
            writer.add(1, episode)
    writer.close()


def test_metadata_is_there_for_others_too(tmp_path: Path) -> None:
    first, second = made(2), made(3)
    first.facts["episode_metadata"] = {
        "file": "a.h5",
        "n": 3,
        "x": 0.1,
        "ok": True,
        "list": [1],
        "a/b": 1,
        "huge": 2**80,
    }
    second.facts["episode_metadata"] = {"file": 7, "x": 0.2}
    write(create(tmp_path), [first, second])
    found = [episode["episode_metadata"] for episode in open_dataset(tmp_path).rlds()]  # type: ignore[attr-defined]
    assert [{name: value for name, value in one.items() if name != "hilt"} for one in found] == [
        {"file": b"a.h5", "n": 3, "x": 0.1, "ok": True},
        {"file": b"", "n": 0, "x": 0.2, "ok": False},
    ]
    assert_all_same(list(open_dataset(tmp_path)), [first, second])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "Bridge Like"}, "name='Bridge Like': TFDS takes small letters"),
        ({"version": "1.0"}, "version='1.0': expected three numbers, such as 1.0.0"),
        ({"image_format": "gif"}, "image_format='gif': expected png or jpeg"),
        ({"shard_bytes": 0}, "shard_bytes=0: expected at least 1"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create(tmp_path, **options)


def test_nothing_to_write(tmp_path: Path) -> None:
    writer = create(tmp_path)
    with pytest.raises(ConfigError, match="there is not one episode with a transition to write"):
        writer.finish()
    writer.close()


def test_a_complete_dataset_is_not_written_to(tmp_path: Path) -> None:
    write(create(tmp_path), episodes())
    again = create(tmp_path)
    assert again.next == 5
    with pytest.raises(ConfigError, match="this dataset is complete"):
        again.add(5, made(2))
    again.finish()
    again.close()
    assert_all_same(list(open_dataset(tmp_path)), episodes())


@pytest.mark.parametrize("file", ["dataset_info.json", "metadata.json", "notes.txt"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match="expected a new or empty folder, got one with other files in it"):
        create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_going_on_with_other_options(tmp_path: Path) -> None:
    writer = create(tmp_path, shard_bytes=1)
    writer.add(0, made(2))
    writer.close()
    with pytest.raises(ConfigError, match=r"it was begun with .*'name': 'episodes'.* Give the same options"):
        create(tmp_path, name="other", shard_bytes=1)
    assert create(tmp_path, shard_bytes=1).next == 1


def test_a_writer_that_is_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = episodes()
    write(create(tmp_path / "whole", shard_bytes=30_000), wanted)
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}

    def check(place: Path) -> None:
        assert {path.name: path.read_bytes() for path in place.iterdir()} == files

    def make(place: Path) -> Any:
        return create(place, shard_bytes=30_000)

    with monkeypatch.context() as patch:
        assert write_stopped_at_every_call(make, wanted, check, tmp_path, patch) > 30
    write_killed(make, wanted, check, tmp_path, kills=rounds(4, 12))


def test_a_log_goes_there_and_back(tmp_path: Path) -> None:
    from hilt.formats import create as create_any

    write(create_any(tmp_path / "log", "log"), episodes())
    there = convert(tmp_path / "log", tmp_path / "tfds", to="rlds", name="mine", shard_bytes=20_000)
    back = convert(tmp_path / "tfds", tmp_path / "again")
    assert not there.notes and not back.notes and back.source_format == "rlds"
    assert_all_same(list(open_any(tmp_path / "again")), list(open_any(tmp_path / "log")))


@pytest.mark.parametrize("name", ["bridge_like", "d4rl_like"])
def test_golden_data_goes_to_a_log_to_rlds_and_to_a_log(tmp_path: Path, name: str) -> None:
    convert(GOLDEN / name, tmp_path / "log", format="rlds")
    convert(tmp_path / "log", tmp_path / "tfds", to="rlds")
    convert(tmp_path / "tfds", tmp_path / "again")
    assert_all_same(list(open_any(tmp_path / "again")), list(open_any(tmp_path / "log")))


def test_what_we_wrote_is_pushed_as_it_was(tmp_path: Path) -> None:
    write(create(tmp_path / "tfds"), episodes())
    data = open_dataset(tmp_path / "tfds")
    with Log.create(tmp_path / "log", create_log_schema(data)) as log:
        assert push_rlds_to_reverb(data, log) == sum(len(e) + 1 for e in episodes())
    assert_all_same(list(open_any(tmp_path / "log")), episodes())


def test_what_has_no_ends_is_pushed_without(tmp_path: Path) -> None:
    one = Episode({"observations": np.ones((2, 3)), "actions": np.ones(2), "rewards": np.ones(2)})
    write(create(tmp_path), [one])
    data = open_dataset(tmp_path)
    with Log.anonymous(create_log_schema(data)) as log:
        assert (
            push_rlds_to_reverb(data, log) == 3 and len(log) == 2 and not log.read(log.all().keys())["terminated"].any()
        )


def test_the_last_step_of_a_dataset_can_be_kept() -> None:
    usual, kept = (list(open_dataset(GOLDEN / "d4rl_like", split="train", last_step=how)) for how in ("end", "keep"))
    steps = [len(e["steps"]) for e in open_dataset(GOLDEN / "d4rl_like", split="train").rlds()]  # type: ignore[attr-defined]
    assert [len(e) for e in kept] == steps and [len(e) for e in usual] == [n - 1 for n in steps if n > 1]
    with pytest.raises(ConfigError, match="last_step='drop': expected end or keep"):
        open_dataset(GOLDEN / "d4rl_like", last_step="drop")


def test_our_reader_is_rlds_data() -> None:
    data = open_dataset(GOLDEN / "d4rl_like", split="train")
    steps = sum(len(e["steps"]) for e in data.rlds())  # type: ignore[attr-defined]
    assert len(list(convert_rlds_to_trajectories(data))) == steps > 0
    spec = create_trajectory_data_spec(data)
    assert (spec.observation.dtype, spec.observation.shape, spec.action.shape) == (np.float32, (17,), (6,))
    bridge = create_trajectory_data_spec(open_dataset(GOLDEN / "bridge_like"))
    assert bridge.observation["image"].shape == (32, 40, 3) and bridge.observation["image"].dtype == np.uint8
