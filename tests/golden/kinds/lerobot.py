"""Folders of LeRobot, and every frame as it went in: ``episode/frame/feature``.

Everything is exact, but for videos: see tests/golden/lerobot/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.trajectory import Source
from hilt.core.tree import flatten
from hilt.formats import open_dataset
from tests import golden
from tests.golden.kinds.rlds import beside

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
WORST_DB, MEAN_DB = 23, 31
"""Peak signal-to-noise ratio of any frame of a video, and of all of them on average."""


def matches(path: Path) -> Path | None:
    case = beside(path)
    return case if case is not None and (folder_of(case) / "meta/info.json").is_file() else None


def compare(case: Path) -> golden.Result:
    features = described(folder_of(case))
    videos = [name for name, feature in features.items() if feature["dtype"] == "video"]
    with np.load(case) as file:
        theirs = dict(file)

    def allowed(key: str) -> Callable[[Any, Any], golden.Difference]:
        return golden.lossy(WORST_DB) if key.split("/", 2)[-1] in videos else golden.exact

    ours = frames(folder_of(case), features)
    result = golden.compare(ours, theirs, allowed)
    for name in videos:
        pairs = [(ours[key], theirs[key]) for key in theirs if key.endswith(f"/{name}") and key in ours]
        mean = np.mean([golden.signal_to_noise(a, b) for a, b in pairs if a.shape == b.shape] or [0])
        result.add(
            name, (0.0, None if mean >= MEAN_DB else f": {mean:.1f} dB on average, and at least {MEAN_DB} are needed")
        )
    return result


def frames(folder: Path, features: dict[str, Any]) -> dict[str, Any]:
    """What our reader makes of a folder, put back into frames."""
    values: dict[str, Any] = {}
    for number, episode in enumerate(open_dataset(folder, format="lerobot")):
        columns = flatten(episode.columns)
        for name, feature in features.items():
            column = column_of(name, columns)
            for i in range(len(episode)):
                values[f"{number}/{i}/{name}"] = column[i].reshape(feature["shape"])
    return values


def column_of(name: str, columns: dict[str, Any]) -> Any:
    if name == "next.reward":
        return columns["rewards"]
    if name == "next.done":
        return columns["terminated"] | columns["truncated"]
    if name.endswith("is_intervention"):
        return columns["source"] == Source.HUMAN
    head, *rest = name.split(".")
    return columns["/".join([{"observation": "observations", "action": "actions"}.get(head, head), *rest])]


def described(folder: Path) -> dict[str, Any]:
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    return {name: feature for name, feature in features.items() if name not in BOOKKEEPING}


def folder_of(case: Path) -> Path:
    return case.with_name(case.name.removesuffix("_expected.npz"))
