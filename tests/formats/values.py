"""Everything that our reader makes of a TFDS folder, by
``split/episode/step/path``, as tests/peers/make_rlds.py names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hilt.formats.tensorflow_files.tfds import open_dataset


def values(folder: Path, splits: tuple[str, ...] = ("train", "val"), whole: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for split in splits:
        for number, episode in enumerate(open_dataset(folder, split=split).rlds()):
            steps = episode.pop("steps")
            for i in range(len(steps)):
                found.update(named(steps[i], f"{split}/{number}/{i}"))
            if whole:
                found.update(named(episode, f"{split}/{number}/-"))
    return found


def named(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from named(inner, f"{path}/{name}")
    elif isinstance(value, bytes):
        yield path, np.frombuffer(value, np.uint8)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        for i, inner in enumerate(value.reshape(-1)):
            yield from named(inner, f"{path}/{i}")
    else:
        array = np.asarray(value)
        yield path, array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What is not the same bit for bit; NaN is like NaN."""
    found = [
        f"{key}: not in {name}"
        for name, a, b in (("ours", theirs, ours), ("theirs", ours, theirs))
        for key in a
        if key not in b
    ]
    for key in theirs:
        if key in ours:
            a, b = np.asarray(ours[key]), np.asarray(theirs[key])
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                found.append(f"{key}: {a.dtype}{a.shape} and {b.dtype}{b.shape}")
            elif not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
                found.append(f"{key}: {a.reshape(-1)[:6]} and {b.reshape(-1)[:6]}")
    return found
