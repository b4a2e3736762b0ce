"""The real LeRobot beside our reader and writer: 0.4.4, which has format v3.0, and 0.3.3, the last one that wrote v2.1.

Run in a venv of each; what does not concern its version is skipped there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot")

from hilt.core.tree import flatten
from hilt.formats import create, lerobot_write, open_dataset
from hilt.formats.episodes import Episode, transitions
from tests import golden
from tests.formats.toy_episodes import assert_same, made
from tests.formats.toy_episodes import write as write_ours
from tests.golden.kinds.lerobot import described
from tests.golden.kinds.lerobot import frames as our_frames
from tests.peers import real_lerobot as real

pytestmark = pytest.mark.peers
GOLDEN = Path(__file__).parent.parent / "golden/lerobot"
v3_only = pytest.mark.skipif(real.WRITES_V2, reason="this LeRobot has another format")


@pytest.mark.parametrize("videos", [False, True])
def test_we_read_what_it_wrote(tmp_path: Path, videos: bool) -> None:
    went_in = real.write(tmp_path / "a", videos)
    features = described(tmp_path / "a")
    ours, theirs = our_frames(tmp_path / "a", features), real.frames(tmp_path / "a")
    assert set(ours) == set(went_in)
    for key, value in ours.items():
        if features[key.split("/", 2)[2]]["dtype"] == "video":
            assert np.array_equal(value, theirs[key]), key  # bit for bit what LeRobot decodes
            assert golden.signal_to_noise(value, went_in[key]) > 25, key
        else:
            assert value.dtype == went_in[key].dtype and np.array_equal(value, went_in[key]), key
    tasks = [["pick the cube"] * 5, ["打开抽屉"] * 3, ["stack"] * 3 + ["stack more"] * 3]
    assert [[theirs[f"{episode}/{i}/task"] for i in range(len(texts))] for episode, texts in enumerate(tasks)] == tasks
    facts = [episode.facts for episode in open_dataset(tmp_path / "a")]
    assert [fact["success"] for fact in facts] == [True, False, True]
    assert facts[1]["language_instruction"] == "打开抽屉" and facts[2]["language_instruction"]["begins"] == [0, 3]
    assert facts[0]["fps"] == 10 and facts[0]["robot_type"] == "panda"


@pytest.mark.parametrize("name", ["v21_image", "v21_video"] if real.WRITES_V2 else ["v3_image", "v3_video"])
def test_the_golden_datasets_are_to_it_what_they_are_to_us(name: str) -> None:
    ours, theirs = our_frames(GOLDEN / name, described(GOLDEN / name)), real.frames(GOLDEN / name)
    for key, value in ours.items():
        assert np.array_equal(value.astype(theirs[key].dtype), theirs[key]), key  # LeRobot hands out float64 as float32


def moving(length: int, seed: int, **more: Any) -> Episode:
    """An episode with two cameras that can be videos."""
    episode = made(
        length, seed, ended="truncated" if seed % 2 else "terminated", source=[i % 2 for i in range(length)], **more
    )
    cameras = {"front": (64, 0), "wrist": (48, 3)}
    images = {
        name: np.stack([real.drawn(h, 64, i + ahead, seed) for i in range(length + 1)])
        for name, (h, ahead) in cameras.items()
    }
    state = np.random.default_rng(seed).normal(size=(length + 1, 8)).astype(np.float32)
    episode.columns |= transitions({"images": images, "state": state, "one": np.arange(length + 1, dtype=np.int16)})
    return episode


@v3_only
@pytest.mark.parametrize(
    "options", [{"images": "png"}, {"codec": "av1"}, {"codec": "h264"}, {"codec": "lossless"}], ids=str
)
def test_lerobot_reads_our_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    monkeypatch.setattr(lerobot_write, "UNIT_BYTES", 10 * (64 + 48) * 64 * 3)  # three files of each kind
    grid = np.arange(66, dtype=np.uint16).reshape(11, 2, 3)
    episodes = [moving(n, i, grid=grid[:n], cube=np.ones((n, 2, 1, 2))) for i, n in enumerate((7, 4, 11, 2))]
    episodes[2].facts["language_instruction"] = {"texts": ["stack", "打开抽屉"], "begins": [0, 4]}
    write_ours(create(tmp_path / "a", "lerobot", fps=30, robot_type="panda", **options), episodes)
    assert len(list((tmp_path / "a").glob("data/*/*.parquet"))) == 3
    dataset = real.opened(tmp_path / "a")
    assert (len(dataset), dataset.num_episodes, dataset.fps, dataset.meta.robot_type) == (24, 4, 30, "panda")
    theirs, lossy = real.frames(tmp_path / "a"), options.get("codec") in ("av1", "h264")
    for number, (episode, ours) in enumerate(zip(episodes, open_dataset(tmp_path / "a"), strict=True)):
        said, read = flatten(episode.columns), flatten(ours.columns)
        names = {feature["hilt"]["path"]: name for name, feature in dataset.features.items() if "hilt" in feature}
        assert {path for path in said if not path.startswith("next_observations")} == {path for path in names if path}
        for i in range(len(episode)):
            for path, name in names.items():
                value = theirs[f"{number}/{i}/{name}"]
                if path.startswith("observations/images") and lossy:
                    assert np.array_equal(value, read[path][i]), (path, i)
                    assert golden.signal_to_noise(value, said[path][i]) > 25
                elif path:
                    assert np.array_equal(value.reshape(said[path].shape[1:]), said[path][i].astype(value.dtype)), (
                        path,
                        i,
                    )
            assert theirs[f"{number}/{i}/next.done"] == (said["terminated"][i] or said["truncated"][i])
            assert theirs[f"{number}/{i}/complementary_info.is_intervention"] == (said["source"][i] == 1)
        assert theirs[f"{number}/{len(episode) - 1}/next.success"] == episode.facts["success"]
    assert [theirs[f"2/{i}/task"] for i in (0, 3, 4, 10)] == ["stack", "stack", "打开抽屉", "打开抽屉"]
    state = np.concatenate([episode.columns["observations"]["state"] for episode in episodes])
    assert np.allclose(dataset.meta.stats["observation.state"]["mean"], state.mean(0), atol=1e-6)


@v3_only
def test_lerobot_trains_on_our_datasets(tmp_path: Path) -> None:
    """Windows over time, some episodes only, and batches."""
    import torch

    write_ours(create(tmp_path / "a", "lerobot", fps=10), [moving(7, 0), moving(5, 1)])
    windows = {"observation.state": [-0.1, 0.0], "observation.images.front": [-0.1, 0.0], "action": [0.0, 0.1, 0.2]}
    dataset = real.opened(tmp_path / "a", episodes=[1], delta_timestamps=windows)
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=5)))
    assert batch["observation.images.front"].shape == (5, 2, 3, 64, 64) and batch["action"].shape == (5, 3, 2)
    assert batch["action_is_pad"][-1].tolist() == [False, True, True] and batch["task"] == ["put 1 down"] * 5


@v3_only
@pytest.mark.parametrize("images", ["png", "video"])
def test_lerobot_appends_to_our_datasets(tmp_path: Path, images: str) -> None:
    """LeRobot records further episodes into a dataset of ours, and we read all of them."""
    episodes = [moving(3, 0), moving(2, 1)]
    write_ours(create(tmp_path / "a", "lerobot", fps=10, images=images), episodes)
    dataset = real.opened(tmp_path / "a")
    features = {name: feature for name, feature in dataset.features.items() if name not in real.BOOKKEEPING}
    cameras = [name for name, feature in features.items() if feature["dtype"] in ("image", "video")]
    for i in range(4):
        item = dataset[i % 3]
        frame = {
            n: item[n].numpy().reshape(f["shape"]).astype(f["dtype"]) for n, f in features.items() if n not in cameras
        }
        pictures = {name: real.drawn(features[name]["shape"][0], 64, i, 5) for name in cameras}
        dataset.add_frame({**frame, **pictures, "task": "once more"})
    dataset.save_episode()
    dataset.finalize()
    ours = list(open_dataset(tmp_path / "a"))
    assert len(ours) == 3 and len(ours[2]) == 4 and ours[2].facts["language_instruction"] == "once more"
    if images == "png":
        for a, b in zip(ours[:2], episodes, strict=True):
            assert_same(a, b)
