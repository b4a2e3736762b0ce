"""Readers for the numbers under tests/golden/rlinf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent.parent / "golden" / "rlinf"


def packed(name: str) -> dict[str, Any]:
    """Arrays (and strings) by name, from a file that holds one flat array for each dtype."""
    with np.load(FOLDER / name) as file:
        blobs = dict(file)
    values: dict[str, Any] = {}
    for key, entry in json.loads(str(blobs["index"])).items():
        if isinstance(entry, str):
            values[key] = entry
        else:
            dtype, shape, start = entry
            values[key] = blobs[dtype][start : start + int(np.prod(shape, dtype=int))].reshape(shape)
    return values


def under(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries below a prefix, with the rest of their names."""
    return {key[len(prefix) + 1 :]: value for key, value in values.items() if key.startswith(f"{prefix}/")}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """``{"curr_obs/states": a}`` to ``{"curr_obs": {"states": a}}``."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
