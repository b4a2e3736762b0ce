"""The real LeRobot, of whichever version is installed here, and datasets that it writes.

    .venv-lerobot21/bin/python -m tests.peers.real_lerobot tests/golden/lerobot/v21
        makes v21_image, v21_video and what went in

LeRobot imports torchvision for two things only, and has no release that goes with the torch of these tests. Both are
here instead: images as tensors, and a video read frame by frame from a key frame on, as torchvision did with PyAV.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
EPISODES = (5, 3, 6)
TASKS = (("pick the cube",), ("打开抽屉",), ("stack", "stack more"))
"""The tasks of each episode: the last one changes its own half-way"""


class ToTensor:
    def __call__(self, picture: Any) -> torch.Tensor:
        pixels = np.array(picture)
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).float() / 255


class VideoReader:
    def __init__(self, path: str, stream: str):
        self.container = av.open(path)

    def seek(self, time: float, keyframes_only: bool) -> None:
        self.container.seek(int(time * av.time_base), any_frame=not keyframes_only, backward=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for frame in self.container.decode(video=0):
            yield {
                "data": torch.from_numpy(frame.to_rgb().to_ndarray()).permute(2, 0, 1),
                "pts": float(frame.pts * frame.time_base),
            }


def stand_in(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


transforms, reader = (
    stand_in("torchvision.transforms", ToTensor=ToTensor),
    stand_in("torchvision.io", VideoReader=VideoReader),
)
stand_in("torchvision", transforms=transforms, io=reader, set_video_backend=lambda backend: None)

CACHE = tempfile.mkdtemp(prefix="hilt-lerobot-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ |= {"HF_HOME": CACHE, "HF_HUB_OFFLINE": "1", "SVT_LOG": "1"}

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

VERSION = tuple(int(part) for part in version("lerobot").split("."))
WRITES_V2 = VERSION < (0, 4)


def opened(root: Path, **options: Any) -> Any:
    """LeRobot's own view of this folder; nothing is looked for elsewhere."""
    return LeRobotDataset("hilt/test", root=root, video_backend="pyav", **options)


def frames(root: Path) -> dict[str, Any]:
    """Every value as LeRobot gives it, by ``episode/frame/feature``; images as they were before it made them float."""
    dataset, values = opened(root), {}
    for i in range(len(dataset)):
        item = dataset[i]
        place = f"{int(item['episode_index'])}/{int(item['frame_index'])}"
        for name, feature in dataset.features.items():
            value = item[name].numpy()
            if feature["dtype"] in ("image", "video"):
                value = np.rint(value * 255).astype(np.uint8).transpose(1, 2, 0)
            values[f"{place}/{name}"] = value.reshape(feature["shape"])
        values[f"{place}/task"] = item["task"]
    return values


def write(root: Path, videos: bool) -> dict[str, np.ndarray]:
    """Has LeRobot write three episodes; returns what went in, by ``episode/frame/feature``."""
    picture = {"dtype": "video" if videos else "image", "names": ["height", "width", "channels"]}
    one = {"shape": (1,), "names": None}
    features = {
        "observation.images.front": {**picture, "shape": (64, 64, 3)},
        "observation.images.wrist": {**picture, "shape": (48, 64, 3)},
        "observation.state": {"dtype": "float32", "shape": (8,), "names": [f"s{i}" for i in range(8)]},
        "observation.grid": {"dtype": "int16", "shape": (2, 3), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": [f"a{i}" for i in range(7)]},
        "next.reward": {"dtype": "float32", **one},
        "next.done": {"dtype": "bool", **one},
        "next.success": {"dtype": "bool", **one},
        "complementary_info.is_intervention": {"dtype": "bool", **one},
        "complementary_info.discrete_penalty": {"dtype": "float64", **one},
    }
    dataset = LeRobotDataset.create("hilt/test", 10, features, root=root, robot_type="panda", use_videos=videos)
    random, went_in = np.random.default_rng(7), {}
    for episode, length in enumerate(EPISODES):
        for i in range(length):
            end, tasks = i == length - 1, TASKS[episode]
            frame = {
                "observation.images.front": drawn(64, 64, i, episode),
                "observation.images.wrist": drawn(48, 64, i + 3, episode),
                "observation.state": random.standard_normal(8).astype(np.float32),
                "observation.grid": random.integers(-999, 999, (2, 3)).astype(np.int16),
                "action": random.standard_normal(7).astype(np.float32),
                "next.reward": np.array([float(end)], np.float32),
                "next.done": np.array([end]),
                "next.success": np.array([end and episode != 1]),
                "complementary_info.is_intervention": np.array([i % 3 == 1]),
                "complementary_info.discrete_penalty": np.array([-0.02 * i]),
            }
            went_in |= {f"{episode}/{i}/{name}": value for name, value in frame.items()}
            task = tasks[i * len(tasks) // length]
            if WRITES_V2:
                dataset.add_frame(frame, task=task)
            else:
                dataset.add_frame({**frame, "task": task})
        dataset.save_episode()
    if not WRITES_V2:
        dataset.finalize()
    return went_in


def drawn(height: int, width: int, step: int, episode: int) -> np.ndarray:
    """A checkered picture and a square that moves, so that neighboring frames differ."""
    y, x = np.mgrid[:height, :width] // 16
    picture = np.stack([40 + 30 * x, 30 + 30 * y, 90 + 10 * episode + 0 * x], axis=-1)
    left = 19 * step % (width - 16)
    picture[6:30, left : left + 16] = (230, 220, 200)
    return picture.clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    for kind in ("image", "video"):
        folder = Path(f"{sys.argv[1]}_{kind}")
        np.savez_compressed(f"{folder}_expected.npz", **write(folder, kind == "video"))
        shutil.rmtree(folder / "images")  # what it leaves of its own work
