"""TFDS folders: every value as the real library reads it, splits, shards, and what damage costs."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, CorruptError, FormatError, MissingPackageError, StorageError, UnknownNameError
from hilt.formats.tensorflow_files.tfds import RldsDataset, Shard, matches, open_dataset, select
from hilt.formats.tensorflow_files.tfrecord import OVERHEAD, RecordFile, RecordWriter, header
from tests.formats.values import differences, values
from tests.golden import FOLDER

RLDS = FOLDER / "rlds"
RAGGED = Path(__file__).parent / "ragged"
"""Made by tests/peers/make_rlds.py, as all_features was"""


@pytest.mark.parametrize("name", ["bridge_like", "d4rl_like", "all_features"])
def test_every_value_is_that_of_the_real_library(name: str):
    with np.load(RLDS / f"{name}_expected.npz") as theirs:
        assert differences(values(RLDS / name, whole=False), dict(theirs)) == []


def test_values_without_a_fixed_shape_and_of_whole_episodes():
    with np.load(RAGGED / "ragged_features.npz") as theirs:
        assert differences(values(RAGGED / "ragged_features"), dict(theirs)) == []


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The training episodes of all_features in three files of 2, 0 and 3 records."""
    return reshard(tmp_path / "all_features" / "1.0.0", [2, 0, 3])


def reshard(
    folder: Path, lengths: list[int], write: Callable[[Path, list[bytes]], None] | None = None, kind: str = "tfrecord"
) -> Path:
    source = RLDS / "all_features" / "1.0.0"
    file = RecordFile(source / "all_features-train.tfrecord-00000-of-00001")
    records = [bytes(file.read(*place)) for place in file.places()]
    folder.mkdir(parents=True)
    shutil.copy(source / "features.json", folder)
    info = json.loads((source / "dataset_info.json").read_text())
    info["fileFormat"] = kind
    info["splits"] = [info["splits"][0] | {"shardLengths": [str(length) for length in lengths]}]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for number, length in enumerate(lengths):
        path = folder / f"all_features-train.{kind}-{number:05}-of-{len(lengths):05}"
        (write or write_records)(path, records[:length])
        records = records[length:]
    return folder


def write_records(path: Path, records: list[bytes]) -> None:
    writer = RecordWriter(path)
    for record in records:
        writer.add(record)
    writer.close()


def ids(dataset: RldsDataset) -> list[int]:
    return [int(episode["episode_metadata"]["episode_id"]) for episode in dataset.rlds()]


def test_several_files(shards: Path):
    assert ids(open_dataset(shards)) == [0, 1, 2, 3, 4]
    assert ids(open_dataset(shards, split="train[1:4]")) == [1, 2, 3]
    assert ids(open_dataset(shards, split="train[3:]+train[:1]")) == [3, 4, 0]
    assert ids(open_dataset(shards, split="train[2shard]")) == [2, 3, 4]


def test_jobs_in_order_from_any_number_on(shards: Path):
    dataset = open_dataset(shards)
    assert len(dataset) == 5
    for first in range(7):
        episodes = [job() for job in dataset.jobs(first)]
        # two have one step
        assert [e and e.facts["episode_metadata"]["episode_id"] for e in episodes] == [0, None, 2, 3, None][first:]


def test_jobs_are_episodes():
    episodes = list(open_dataset(RLDS / "bridge_like", split="train"))
    with np.load(RLDS / "bridge_like_expected.npz") as theirs:
        for number, episode in enumerate(episodes):
            for i in range(len(episode)):
                assert (
                    episode.columns["observations"]["image"][i] == theirs[f"train/{number}/{i}/observation/image"]
                ).all()
                assert (
                    episode.columns["next_observations"]["image"][i]
                    == theirs[f"train/{number}/{i + 1}/observation/image"]
                ).all()
                assert (episode.columns["actions"][i] == theirs[f"train/{number}/{i}/action"]).all()
            assert episode.facts["split"] == "train" and isinstance(episode.facts["language_instruction"], str)


def test_jobs_without_images(shards: Path):
    episode = next(open_dataset(shards).jobs(2, images=False))()
    assert episode is not None
    assert "jpeg" not in episode.columns["observations"] and "float32" in episode.columns["observations"]
    assert len(episode) == 1


def test_description():
    described = open_dataset(RLDS / "bridge_like").describe()
    assert described == {"name": "bridge_like", "version": "1.0.0", "splits": {"train": 3, "val": 1}}


def test_bfloat16_becomes_float32():
    dataset = open_dataset(RAGGED / "ragged_features", split="train[:1]")
    (episode,) = dataset
    with np.load(RAGGED / "ragged_features.npz") as theirs:
        assert episode.columns["brain"].dtype == np.float32
        assert (episode.columns["brain"] == [theirs["train/0/0/brain"], theirs["train/0/1/brain"]]).all()
    assert dataset.notes.counts["bfloat16, which logs do not have, becomes float32 of the same values"] == 1


@pytest.mark.parametrize("spec", [None, "all", "train+val", "val+train"])
def test_all_splits(spec: str | None):
    assert len(open_dataset(RLDS / "bridge_like", split=spec)) == 4


@pytest.mark.parametrize("name", ["all", "a[b", "", None, 3])
def test_all_splits_whatever_their_names(shards: Path, name: Any):
    info = json.loads((shards / "dataset_info.json").read_text())
    info["splits"].append({"name": name, "shardLengths": []})
    (shards / "dataset_info.json").write_text(json.dumps(info))
    assert len(open_dataset(shards)) == 5


LENGTHS = {"train": [3, 0, 4], "val": [1], "held-out": [5]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("train", [(0, 0, 3), (2, 0, 4)]),
        ("train[:2]", [(0, 0, 2)]),
        ("train[2:5]", [(0, 2, 1), (2, 0, 2)]),
        ("train[-2:]", [(2, 2, 2)]),
        ("train[:-5]", [(0, 0, 2)]),
        ("train[5:2]", []),
        ("train[:50%]", [(0, 0, 3), (2, 0, 1)]),  # 3.5 becomes 4
        ("train[:7%]", []),
        ("train[:8%]", [(0, 0, 1)]),
        ("train[35%:-35.5%]", [(0, 2, 1), (2, 0, 2)]),
        ("train[1_0%:100%]", [(0, 1, 2), (2, 0, 4)]),
        ("train[1shard:]", [(2, 0, 4)]),
        ("train[:-1shard]", [(0, 0, 3)]),
        ("train[0shard]", [(0, 0, 3)]),
        ("held-out[:1]", [(0, 0, 1)]),
        ("val + train[:1]", [(0, 0, 1), (0, 0, 1)]),
    ],
)
def test_slices(spec: str, expected: list[tuple[int, int, int]]):
    """What tensorflow_datasets makes of them; tests/peers/test_tfds.py asks it about many more."""
    splits = {
        name: [Shard(Path(f"{i}"), length) for i, length in enumerate(lengths)] for name, lengths in LENGTHS.items()
    }
    assert [(int(part.shard.path.name), part.first, part.count) for part in select(spec, splits)] == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train[", r"split 'train\[': expected such as train, train\[:10%\]"),
        ("train[:]", "expected such as"),
        ("train[1:2:3]", "expected such as"),
        ("train[a:b]", "expected such as"),
        ("", "expected such as"),
        ("train++val", "expected such as"),
        ("train[5]", "only whole shards can be taken without a ':'"),
        ("train[:101%]", "percentages are between -100 and 100"),
        ("train[:8]", "there are 7 records"),
        ("train[-8:]", "there are 7 records"),
        ("train[1.5:]", "invalid literal"),
        ("train[..:]", "invalid literal"),
    ],
)
def test_slices_that_mean_nothing(spec: str, message: str):
    with pytest.raises(ConfigError, match=message):
        select(spec, {"train": [Shard(Path("a"), 7)]})


def test_an_unknown_split_names_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"no split named 'tran'; did you mean 'train'\? Known: train, val"):
        open_dataset(RLDS / "bridge_like", split="tran[:5]")


def test_where_a_dataset_may_lie(tmp_path: Path, shards: Path):
    assert matches(shards) and matches(shards.parent) and matches(shards.parent.parent)
    assert len(open_dataset(shards.parent.parent)) == 5
    assert not matches(tmp_path / "nothing") and not matches(shards / "features.json")
    shutil.copytree(shards, shards.parent / "2.0.0")
    assert matches(shards.parent)
    with pytest.raises(
        FormatError, match=r"all_features: expected a folder with features\.json.*found: 1\.0\.0, 2\.0\.0"
    ):
        open_dataset(shards.parent)
    with pytest.raises(FormatError, match="found: none"):
        open_dataset(tmp_path / "nothing")


def test_without_dataset_info_the_names_of_the_files_say_what_there_is(shards: Path):
    (shards / "dataset_info.json").unlink()
    dataset = open_dataset(shards, split="train[1:]")
    assert ids(dataset) == [1, 2, 3, 4]
    assert dataset.describe()["name"] == "all_features"


def test_without_dataset_info_a_gap_between_the_files_is_seen(shards: Path):
    (shards / "dataset_info.json").unlink()
    (shards / "all_features-train.tfrecord-00001-of-00003").unlink()
    with pytest.raises(
        FormatError, match=r"00002-of-00003: the file before it is missing\. Fetch it, or dataset_info\.json"
    ):
        open_dataset(shards)


def test_dataset_info_without_lengths(shards: Path):
    info = json.loads((shards / "dataset_info.json").read_text())
    info["splits"] = [{"name": "train", "numShards": "3"}]
    (shards / "dataset_info.json").write_text(json.dumps(info))
    assert ids(open_dataset(shards)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fileFormat": "riegeli"},
            "files of the format 'riegeli'; those that can be read are tfrecord and array_record",
        ),
        ({"splits": 3}, "not the description of a TFDS dataset"),
        ({"splits": [{"name": "train", "shardLengths": ["x"]}]}, "not the description of a TFDS dataset"),
        ({"splits": [{"shardLengths": ["1"]}]}, "not the description of a TFDS dataset"),
        *(
            (
                {"splits": [{"name": "train", "shardLengths": ["2", count, "3"]}]},
                rf"not the description .*{count} records in all_features",
            )
            for count in ("-1", "99999999999", str(2**70))
        ),
        ({"name": None}, "not the description of a TFDS dataset"),
    ],
)
def test_a_bad_description_is_refused(shards: Path, change: dict[str, Any], message: str):
    info = json.loads((shards / "dataset_info.json").read_text())
    (shards / "dataset_info.json").write_text(json.dumps(info | change))
    with pytest.raises(FormatError, match=rf"dataset_info\.json: {message}"):
        open_dataset(shards)


def test_no_files_at_all(shards: Path):
    for file in shards.iterdir():
        if file.name != "features.json":
            file.unlink()
    with pytest.raises(FormatError, match=r"no splits in dataset_info\.json, and no files such as"):
        open_dataset(shards)


def test_a_dataset_without_steps_is_no_dataset_of_episodes(shards: Path):
    features = json.loads((shards / "features.json").read_text())
    del features["featuresDict"]["features"]["steps"]
    (shards / "features.json").write_text(json.dumps(features))
    with pytest.raises(FormatError, match="not of episodes: its features have no nested dataset 'steps'"):
        open_dataset(shards)


def test_missing_files_are_counted(shards: Path):
    (shards / "all_features-train.tfrecord-00002-of-00003").unlink()
    with pytest.raises(FormatError, match=r"00002-of-00003: 1 of 2 files are missing\. .* train\[:5shard\]"):
        open_dataset(shards)
    assert ids(open_dataset(shards, split="train[:2shard]")) == [0, 1]


def test_a_name_that_no_file_can_have(shards: Path):
    info = json.loads((shards / "dataset_info.json").read_text())
    info["splits"][0]["filepathTemplate"] = "{SHARD_INDEX}" + "x" * 5000
    (shards / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(FormatError, match="2 of 2 files are missing"):
        open_dataset(shards)


def test_what_cannot_be_read_is_noted(shards: Path):
    features = json.loads((shards / "features.json").read_text())
    features["featuresDict"]["features"]["maybe"] = {"pythonClassName": "x.Optional", "optional": {}}
    (shards / "features.json").write_text(json.dumps(features))
    dataset = open_dataset(shards)
    assert list(dataset.notes.counts) == [
        "maybe: a feature of class x.Optional, which is not supported, not carried over"
    ]
    assert ids(dataset) == [0, 1, 2, 3, 4]


def outcomes(dataset: RldsDataset) -> list[str]:
    found = []
    for job in dataset.jobs():
        try:
            job()
            found.append("")
        except CorruptError as error:
            found.append(str(error))
    return found


def places(path: Path) -> list[tuple[int, int]]:
    return list(RecordFile(path).places())


def test_a_damaged_record_is_one_job_that_fails(shards: Path):
    path = shards / "all_features-train.tfrecord-00002-of-00003"
    offset = places(path)[1][0]
    raw = bytearray(path.read_bytes())
    raw[offset + 100] ^= 1
    path.write_bytes(raw)
    assert outcomes(open_dataset(shards)) == [
        "",
        "",
        "",
        f"{path}: the record at byte {offset} does not have its checksum; it is damaged.",
        "",
    ]
    with pytest.raises(CorruptError, match="does not have its checksum"):
        ids(open_dataset(shards))


def test_a_damaged_length_loses_the_rest_of_its_file_and_nothing_else(shards: Path):
    path = shards / "all_features-train.tfrecord-00000-of-00003"
    offset = places(path)[1][0]
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
    found = outcomes(open_dataset(shards))
    assert [bool(text) for text in found] == [False, True, False, False, False]
    assert f"the length of the record at byte {offset} does not have its checksum" in found[1]
    (shards / "dataset_info.json").unlink()
    assert [bool(text) for text in outcomes(open_dataset(shards))] == [False, True, False, False, False]


def test_a_file_that_was_cut_off(shards: Path):
    path = shards / "all_features-train.tfrecord-00002-of-00003"
    second, third = places(path)[1][0], places(path)[2][0]
    raw = path.read_bytes()
    path.write_bytes(raw[: second + 50])
    found = outcomes(open_dataset(shards))
    assert [bool(text) for text in found] == [False, False, False, True, True]
    assert f"the record at byte {second} needs" in found[3] and found[3] == found[4]
    path.write_bytes(raw[:third])  # between two records: only dataset_info.json knows
    assert outcomes(open_dataset(shards))[4] == f"{path}: the file has 2 records, and dataset_info.json has 3."


def test_a_record_that_is_no_example_is_named_with_its_place(shards: Path):
    path = shards / "all_features-train.tfrecord-00000-of-00003"
    first = RecordFile(path)
    data = bytes(first.read(*next(first.places())))
    write_records(path, [data, b"\x0b"])
    found = outcomes(open_dataset(shards))
    assert (
        found[1] == f"{path}: the record at byte {len(data) + OVERHEAD}: not a tf.train.Example: a field of "
        "wire type 3 at byte 1 of 1."
    )


def test_a_file_that_vanishes_after_opening(shards: Path):
    dataset = open_dataset(shards)
    (shards / "all_features-train.tfrecord-00000-of-00003").unlink()
    with pytest.raises(StorageError, match="00000-of-00003"):
        ids(dataset)


def test_array_record_files(tmp_path: Path):
    module = pytest.importorskip("array_record.python.array_record_module", reason="array_record is not installed")

    def write(path: Path, records: list[bytes]) -> None:
        writer = module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()

    folder = reshard(tmp_path / "1.0.0", [3, 2], write, "array_record")
    assert ids(open_dataset(folder, split="train[1:4]")) == [1, 2, 3]
    with np.load(RLDS / "all_features_expected.npz") as theirs:
        expected = {key: value for key, value in theirs.items() if key.startswith("train/")}
    assert differences(values(folder, ("train",), whole=False), expected) == []
    (folder / "dataset_info.json").unlink()
    assert ids(open_dataset(folder)) == [0, 1, 2, 3, 4]
    path = folder / "all_features-train.array_record-00000-of-00002"
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    found = outcomes(open_dataset(folder))
    assert [bool(text) for text in found] == [True, False, False, False, False]
    assert "00000-of-00002: the record at number 0 is damaged" in found[0]
    path.write_bytes(raw[:300])
    found = outcomes(open_dataset(folder))  # nobody knows how many there were
    assert [bool(text) for text in found] == [True, False, False] and "not a readable ArrayRecord file" in found[0]


def test_array_record_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = reshard(tmp_path / "1.0.0", [5], write_records, "array_record")
    monkeypatch.setitem(__import__("sys").modules, "array_record.python.array_record_module", None)
    with pytest.raises(
        MissingPackageError, match=r"Reading ArrayRecord files needs .*pip install 'hilt\[array-record\]'"
    ):
        ids(open_dataset(folder))


def test_a_generator_that_is_left_early_stops_its_threads(shards: Path):
    episodes = open_dataset(shards).rlds(workers=2)
    next(episodes)
    working = [thread for thread in threading.enumerate() if thread.name.startswith("hilt-decode")]
    episodes.close()  # type: ignore[attr-defined]
    assert working and not any(thread.is_alive() for thread in working)


def test_a_length_beyond_the_file_in_a_dataset(shards: Path):
    path = shards / "all_features-train.tfrecord-00000-of-00003"
    path.write_bytes(header(2**60) + struct.pack("<I", 0))
    assert [bool(text) for text in outcomes(open_dataset(shards))] == [True, True, False, False, False]
