"""Frames of episodes as JPEG: the right one, from logs and datasets, and no more memory than agreed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hilt.app.episodes import dataset_episodes
from hilt.app.episodes.byte_cache import ByteCache
from hilt.app.episodes.dataset_episodes import DatasetEpisodes
from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.app.episodes.jpeg_frames import JpegFrames
from hilt.core.errors import UnknownNameError
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode
from hilt.formats.images import decode
from hilt.replay import Log, Schema
from tests.app.episode_samples import SIZE, make_log

CAMERAS = ["observations/front", "observations/wrist"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("frames") / "log", 4)


@pytest.fixture(scope="module", params=["log", "lerobot", "lerobot-png", "robomimic"])
def index(
    log: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[EpisodeIndex]:
    path = log
    if request.param != "log":
        path = tmp_path_factory.mktemp(request.param) / "data"
        format, _, images = request.param.partition("-")
        options = {"fps": 10, **({"images": images} if images else {"codec": "h264"})} if format == "lerobot" else {}
        convert(log, path, to=format, **options)
    index = EpisodeIndex([path])
    assert index.wait_until_opened(60)
    yield index
    index.close()


def read_back(data: bytes) -> tuple[int, int, int]:
    """Episode, step and camera of a picture of `tests.app.episode_samples`."""
    image = decode(data).astype(float)
    bands = image[4:12].mean(), image[20:28].mean(), image[36:].mean()
    return round(bands[0] / 20), round(bands[1] / 8), round((bands[2] - 100) / 100)


def test_jpeg_frames_are_those_of_the_episode_step_and_camera(index: EpisodeIndex):
    frames, source = JpegFrames(index), index.sources[0]
    assert list(source.cameras(2)) == CAMERAS
    for episode, step, camera in [(2, 5, 1), (2, 4, 1), (0, 0, 0), (3, 7, 0), (3, 8, 1), (1, 3, 0), (3, 0, 0)]:
        data = frames.jpeg(source.key, episode, 0, step, CAMERAS[camera])
        assert read_back(data) == (episode, step, camera)
    assert read_back(frames.jpeg(source.key, 2, 0, -1)) == (2, 8, 0)  # what was seen after the last of eight steps
    small = decode(frames.jpeg(source.key, 3, 0, 4, CAMERAS[0], height=24))
    assert small.shape == (24, SIZE[1] // 2, 3)
    with pytest.raises(UnknownNameError, match="camera"):
        frames.jpeg(source.key, 0, 0, 0, "observations/back")


def test_jpeg_frames_keep_no_more_than_agreed(log: Path):
    index = EpisodeIndex([log])
    assert index.wait_until_opened(60)
    kept: ByteCache[bytes] = ByteCache(3000)
    frames, key = JpegFrames(index, kept), index.sources[0].key
    first = frames.jpeg(key, 0, 0, 0, CAMERAS[0])
    for step in range(8):
        frames.jpeg(key, 3, 0, step, CAMERAS[0])
    assert 0 < kept.nbytes <= 3000 and len(kept) > 1
    assert frames.jpeg(key, 0, 0, 0, CAMERAS[0]) == first
    frames.close()
    assert (kept.nbytes, len(kept)) == (0, 0)
    index.close()


def test_jpeg_frames_of_what_a_policy_saw_are_one_camera_each(tmp_path: Path):
    """The record of a policy has all cameras in one column."""
    images = np.zeros((5, 1, 2, 32, 32, 3), np.uint8)
    images[:, :, 1] = 200
    rows = {"record": {"images": images}, "rewards": np.zeros((5, 1), np.float32)}
    with Log.create(tmp_path / "log", Schema.of(rows, leading=2), durability="never") as log:
        log.add(rows)
    index = EpisodeIndex([tmp_path / "log"])
    assert index.wait_until_opened(60)
    source = index.sources[0]
    assert list(source.cameras(0)) == ["record/images/0", "record/images/1"]
    assert decode(JpegFrames(index).jpeg(source.key, 0, 0, 3, "record/images/1")).mean() == 200
    with pytest.raises(UnknownNameError, match="camera"):
        source.frame(0, 0, 0, "record/images/2")
    index.close()


def test_decoded_episodes_are_kept_up_to_a_limit(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    convert(log, tmp_path / "data", to="robomimic")
    index = EpisodeIndex([tmp_path / "data"])
    assert index.wait_until_opened(60)
    source = index.sources[0]
    assert isinstance(source, DatasetEpisodes)
    kept: ByteCache[Episode] = ByteCache(1)
    monkeypatch.setattr(dataset_episodes, "DECODED", kept)
    for episode in (0, 1, 2, 1):
        source.frame(episode, 0, 0, CAMERAS[0])
    assert len(kept) == 1 and kept.get((source.key, 1, True)) is not None
    index.close()
    assert (kept.nbytes, len(kept)) == (0, 0)
