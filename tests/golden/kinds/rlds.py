"""TFDS folders with RLDS episodes, and every step as tensorflow_datasets decodes it:
``split/episode/step/path``; text is uint8 bytes.

Everything is exact, but for JPEG.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten
from hilt.formats import open_dataset
from tests import golden


def matches(path: Path) -> Path | None:
    case = beside(path)
    return case if case is not None and len(versions(case)) == 1 else None


def compare(case: Path) -> golden.Result:
    (version,) = versions(case)
    pictures = dict(encodings(json.loads((version / "features.json").read_text())))
    with np.load(case) as file:
        theirs = dict(file)

    def allowed(key: str) -> Callable[[Any, Any], golden.Difference]:
        return golden.jpeg if pictures.get(key.split("/", 3)[-1]) == "jpeg" else golden.exact

    return golden.compare(steps(version), theirs, allowed)


def steps(version: Path) -> dict[str, Any]:
    """What our reader makes of a folder, in all of its splits."""
    values: dict[str, Any] = {}
    for split in json.loads((version / "dataset_info.json").read_text())["splits"]:
        dataset: Any = open_dataset(version, format="rlds", split=split["name"])
        for number, episode in enumerate(dataset.rlds()):
            for i, step in enumerate(episode["steps"]):
                for path, value in flatten(step).items():
                    array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
                    values[f"{split['name']}/{number}/{i}/{path}"] = array
    return values


def encodings(feature: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The pictures among the features of a step, with how they are encoded."""
    if "featuresDict" in feature:
        for name, inner in feature["featuresDict"]["features"].items():
            yield from encodings(inner, (*path, name))
    elif "sequence" in feature:
        yield from encodings(feature["sequence"]["feature"], path)
    elif "image" in feature:
        yield "/".join(path[1:]), feature["image"].get("encodingFormat", "")


def versions(case: Path) -> list[Path]:
    folder = case.with_name(case.name.removesuffix("_expected.npz"))
    return [path.parent for path in (*folder.glob("features.json"), *folder.glob("*/features.json"))]


def beside(path: Path) -> Path | None:
    """For ``<name>`` or ``<name>_expected.npz`` the latter, when both are there."""
    name = path.name.removesuffix("_expected.npz")
    case = path.with_name(f"{name}_expected.npz")
    return case if case.is_file() and path.with_name(name).is_dir() else None
