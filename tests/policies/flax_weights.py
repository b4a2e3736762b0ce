"""Weights and images that a formula makes, so that no file of numbers is needed:
flax's own modules were run on the same ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "conv_init/kernel": (7, 7, 3, 64),
        "norm_init/scale": (64,),
        "norm_init/bias": (64,),
    }
    for i, (inputs, filters) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)]):
        block = f"ResNetBlock_{i}"
        found |= {f"{block}/Conv_0/kernel": (3, 3, inputs, filters), f"{block}/Conv_1/kernel": (3, 3, filters, filters)}
        norms = ["MyGroupNorm_0", "MyGroupNorm_1"]
        if i:
            found[f"{block}/conv_proj/kernel"] = (1, 1, inputs, filters)
            norms.append("norm_proj")
        found |= {f"{block}/{norm}/{part}": (filters,) for norm in norms for part in ("scale", "bias")}
    return found


HEAD = {
    "SpatialLearnedEmbeddings_0/kernel": (4, 4, 512, 8),
    "Dense_0/kernel": (4096, 256),
    "Dense_0/bias": (256,),
    "LayerNorm_0/scale": (256,),
    "LayerNorm_0/bias": (256,),
}


def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
    start = sum(ord(letter) * (i + 1) for i, letter in enumerate(name)) % 1000
    wave = np.sin(np.arange(np.prod(shape), dtype=np.float64) * 0.7345 + start)
    values = (
        1 + 0.2 * wave
        if name.endswith("scale")
        else 0.1 * wave
        if name.endswith("bias")
        else 1.4 * wave * np.sqrt(2 / np.prod(shape[:-1]))
    )
    return values.reshape(shape).astype(np.float32)


def arrays() -> dict[str, np.ndarray]:
    """The trunk's by their own names, the head's under ``head/``."""
    trunk = {name: fill(f"pretrained_encoder/{name}", shape) for name, shape in shapes().items()}
    return trunk | {f"head/{name}": fill(name, shape) for name, shape in HEAD.items()}


def nested() -> dict[str, Any]:
    """The trunk as HIL-SERL's file has it."""
    tree: dict[str, Any] = {}
    for name, shape in shapes().items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = fill(f"pretrained_encoder/{name}", shape)
    return tree


def write(folder: Path) -> Path:
    path = folder / "resnet10_params.pkl"
    path.write_bytes(pickle.dumps(nested()))
    return path


def image(height: int, width: int) -> np.ndarray:
    numbers = np.arange(2 * height * width * 3, dtype=np.int64) * (2654435761 + height) // 97 % 256
    return numbers.astype(np.uint8).reshape(2, height, width, 3)
