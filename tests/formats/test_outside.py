"""No dataset leads out of its own folder, whatever it names: not to other files, not to a server, not to a device."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import CorruptError, FormatError, HiltError, UnsafeError
from hilt.core.files import inside
from hilt.formats import lerobot, open_dataset, rlinf_folder
from hilt.formats.hdf5 import attributes, opened
from hilt.formats.tensorflow_files import tfds
from tests.effort import need

need("av")
GOLDEN = Path(__file__).parent.parent / "golden"
ONE_FILE = "all_features-train.tfrecord-00000-of-00001"
VIDEOS = "videos/observation.images.front/chunk-000/file-000.mp4"


def set_info(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "lerobot" / "v3_video", tmp_path / "videos")


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server
        with pytest.raises(BlockingIOError):  # nobody came
            server.accept()


@pytest.mark.parametrize(
    "protocol",
    [
        "http:/127.0.0.1:{port}/x.mp4",
        "tcp:/127.0.0.1:{port}",
        "file:{outside}",
        "concat:{outside}|x",
        "subfile:{outside}",
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_no_protocol_of_ffmpeg_is_spoken(
    videos: Path, listening: Any, protocol: str, here: bool, monkeypatch: pytest.MonkeyPatch
):
    port, outside = listening.getsockname()[1], videos.parent / "private.mp4"
    shutil.copy(videos / VIDEOS, outside)
    set_info(videos / "meta/info.json", video_path=protocol.format(port=port, outside=outside))
    monkeypatch.chdir(videos)
    with pytest.raises(CorruptError, match="this video is missing"):
        list(lerobot.open_dataset(Path(".") if here else videos))


@pytest.mark.parametrize(
    "list_of_others", ["ffconcat version 1.0\nfile {outside}\n", "#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:{port}/a.ts\n"]
)
def test_a_list_of_further_files_is_no_video(videos: Path, listening: Any, list_of_others: str):
    outside = videos.parent / "private.mp4"
    shutil.move(videos / VIDEOS, outside)
    (videos / VIDEOS).write_text(list_of_others.format(port=listening.getsockname()[1], outside=outside))
    with pytest.raises(CorruptError, match="not readable as a video"):
        list(lerobot.open_dataset(videos))


@pytest.mark.parametrize("name", [VIDEOS, "data/chunk-000/file-000.parquet"])
def test_links_out_of_a_dataset_are_not_followed(videos: Path, name: str):
    shutil.move(videos / name, videos.parent / "private")
    (videos / name).symlink_to(videos.parent / "private")
    with pytest.raises(UnsafeError, match=r"info\.json: .* names .*, which leads out of .*: it was not opened"):
        list(lerobot.open_dataset(videos))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a\0b", "link", "folder/x", "pipe"])
def test_a_name_is_of_a_file_below_the_folder(tmp_path: Path, name: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "x").touch()
    (folder / "link").symlink_to("../x")
    (folder / "folder").symlink_to("..")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UnsafeError, match=r"it names .*: it was not opened"):
        inside(folder, name, "it")
    (folder / "ours").symlink_to("real")
    (folder / "real").touch()
    for good in ("real", "ours", "absent", "a" * 300):
        assert inside(folder, good, "it") == folder / good


def test_a_snapshot_of_the_hub_has_its_files_beside_it(tmp_path: Path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "deadbeef").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/deadbeef")
    assert inside(snapshot, "model.safetensors", "it") == snapshot / "model.safetensors"
    (snapshot / "other").symlink_to("../../../private")
    with pytest.raises(UnsafeError):
        inside(snapshot, "other", "it")


@pytest.fixture
def rlds(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "rlds" / "all_features", tmp_path / "all_features") / "1.0.0"


@pytest.mark.parametrize(
    ("split", "error", "text"),
    [
        (
            {"filepathTemplate": "../../{SPLIT}-{SHARD_X_OF_Y}"},
            UnsafeError,
            "names '../../train-00000-of-.*' *, which leads out of",
        ),
        ({"filepathTemplate": "/etc/passwd"}, UnsafeError, "leads out of"),
        ({"numShards": str(10**12)}, FormatError, f"this file is missing, one of {10**12}"),
        ({"numShards": str(10**12), "filepathTemplate": ONE_FILE}, FormatError, "the file of two shards"),
    ],
)
def test_shards_are_files_of_the_folder_and_not_more_than_there_are(
    rlds: Path, split: dict[str, str], error: type[HiltError], text: str
):
    set_info(
        rlds / "dataset_info.json",
        splits=[{"name": "train", **({} if "numShards" in split else {"shardLengths": ["1"]}), **split}],
    )
    with pytest.raises(error, match=text):
        tfds.open_dataset(rlds)


def test_the_index_of_rlinf_names_files_of_its_folder(tmp_path: Path):
    entry = {"num_samples": 1, "trajectory_id": 0, "shape": [], "model_weights_id": "/../../x", "uuid": "x"}
    index = {"trajectory_index": {"0": entry}, "trajectory_id_list": [0]}
    (tmp_path / "trajectory_index.json").write_text(json.dumps(index))
    (tmp_path / "metadata.json").write_text(json.dumps({"trajectory_format": "pt", "seed": 0, "trajectory_counter": 1}))
    with pytest.raises(FormatError, match="a name that no file of this folder can have"):
        rlinf_folder.read_index(tmp_path)
    (tmp_path / "trajectory_0_y.pt").symlink_to("/etc/passwd")
    with pytest.raises(UnsafeError, match="leads out of"):
        rlinf_folder.find_file(tmp_path, {**entry, "model_weights_id": "y"}, "pt")


def _with_bomb(path: Path, texts: int, size: int) -> None:
    """An attribute of many texts, all of which are the same bytes of the file."""
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["one"] = "x" * size
        file.attrs.create("many", ["a"] * texts, dtype=h5py.string_dtype())
        file.attrs["kept"] = np.arange(3)
    data, reference = path.read_bytes(), struct.Struct("<IQI")  # length, address and number of a text
    length, step = struct.Struct("<I"), reference.size
    lengths = [length.unpack_from(data, place)[0] for place in range(len(data) - 3 * step)]
    single = next(
        place
        for place, found in enumerate(lengths)
        if found == size and data[place + 4 : place + 12] in data[place + step :]
    )
    many = next(
        place for place, found in enumerate(lengths) if found == lengths[place + step] == lengths[place + 2 * step] == 1
    )
    path.write_bytes(data[:many] + data[single : single + step] * texts + data[many + step * texts :])


def test_attributes_that_repeat_one_text_are_left_out(tmp_path: Path):
    need("h5py")
    _with_bomb(tmp_path / "bomb.hdf5", 3000, 200_000)
    with opened(tmp_path / "bomb.hdf5") as file:
        assert set(attributes(file)) == {"one", "kept"}
        assert len(file.attrs["many"][0]) == 200_000  # the library itself would make 600 MB of it


def test_more_attributes_than_anybody_writes(tmp_path: Path):
    need("h5py")
    import h5py

    with h5py.File(tmp_path / "many.hdf5", "w") as file:
        for number in range(1001):
            file.attrs[str(number)] = number
    with pytest.raises(CorruptError, match="more than 1,000 attributes"), opened(tmp_path / "many.hdf5") as file:
        attributes(file)


def test_readers_of_every_format_read_what_they_read_before(videos: Path, rlds: Path):
    assert len(list(open_dataset(videos))) and len(list(open_dataset(rlds)))
