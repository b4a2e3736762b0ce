"""HIL-SERL's file of pretrained weights, ``resnet10_params.pkl``: a pickle of nested
dictionaries of arrays, read without running it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.core.errors import FormatError, UnsafeError
from hilt.core.files import read
from hilt.core.unpickle import safe_load

_BLOCK = {
    "Conv_0/kernel": "conv_0.weight",
    "MyGroupNorm_0/scale": "norm_0.weight",
    "MyGroupNorm_0/bias": "norm_0.bias",
    "Conv_1/kernel": "conv_1.weight",
    "MyGroupNorm_1/scale": "norm_1.weight",
    "MyGroupNorm_1/bias": "norm_1.bias",
    "conv_proj/kernel": "conv_proj.weight",
    "norm_proj/scale": "norm_proj.weight",
    "norm_proj/bias": "norm_proj.bias",
}
_NAMES = {
    "conv_init/kernel": "conv_init.weight",
    "norm_init/scale": "norm_init.weight",
    "norm_init/bias": "norm_init.bias",
    **{
        f"ResNetBlock_{i}/{theirs}": f"blocks.{i}.{ours}"
        for i in range(4)
        for theirs, ours in _BLOCK.items()
        if i or "proj" not in theirs
    },
}
"""Their names of the trunk's arrays, and ours"""


def read_resnet10(path: str | Path) -> dict[str, Tensor]:
    """The trunk's tensors under the names of `hilt.policies.agent.encoders.ResNet10`;
    anything else in the file is left out."""
    where = str(path)
    arrays = _flatten(_load(read(Path(path).expanduser()), where))
    if lacking := [name for name in _NAMES if name not in arrays]:
        raise FormatError(
            f"{where} has no {lacking[0]!r}, which HIL-SERL's ResNet-10 has; it begins with "
            f"{', '.join(list(arrays)[:3])}."
        )
    tensors = {}
    for theirs, ours in _NAMES.items():
        given, expected = np.asarray(arrays[theirs]), _shape(ours)
        if given.dtype.kind not in "fiu":
            raise FormatError(f"{where}: {theirs} is no array of numbers, but {given.dtype}.")
        array = given.astype(np.float32)
        if array.shape != expected:
            raise FormatError(f"{where}: {theirs} has the shape {array.shape}; HIL-SERL's ResNet-10 has {expected}.")
        if not np.isfinite(array).all():
            raise FormatError(f"{where}: {theirs} has numbers that are not finite. Get the file again.")
        # flax has its kernels as [height, width, inputs, outputs]
        tensors[ours] = torch.from_numpy(
            np.ascontiguousarray(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array)
        )
    return tensors


def _shape(ours: str) -> tuple[int, ...]:
    """What their array of this name must look like."""
    if ours.startswith("conv_init"):
        return 7, 7, 3, 64
    stage = int(ours.split(".")[1]) if ours.startswith("blocks") else 0
    filters, inputs = 64 * 2**stage, 64 * max(1, 2**stage // 2)
    if "norm" in ours:
        return (filters,)
    size = 1 if "proj" in ours else 3
    return size, size, filters if "conv_1" in ours else inputs, filters


def _load(data: bytes, where: str) -> Any:
    """Plain numpy arrays; or, since the file was written by JAX, arrays of that."""
    frozen = {("flax.core.frozen_dict", "FrozenDict"): dict}
    try:
        return safe_load(data, where=where, extra=frozen)
    except UnsafeError as error:
        if "jax" not in str(error):
            raise

    def array(word: Any = None, made_with: Any = None, state: Any = None, *_: Any) -> Any:
        known = type(state) is tuple and len(state) == 5 and isinstance(state[2], np.dtype) and type(state[4]) is bytes
        if word != "array" or not known or state[2].kind not in "fiu":
            raise FormatError(f"{where} has an array of JAX that is none.")
        _version, shape, dtype, fortran, contents = state
        made: Any = np.ndarray(shape, dtype, contents, order="F" if fortran else "C")
        if made.nbytes != len(contents):
            raise FormatError(f"{where} has an array of JAX with {len(contents)} bytes for {made.nbytes}.")
        return made

    # In such a file a numpy array's maker and state are arguments of JAX's own function. Both names are but words here.
    words = {(f"numpy.{core}.multiarray", "_reconstruct"): "array" for core in ("core", "_core")} | {
        ("numpy", "ndarray"): "kind"
    }
    return safe_load(data, where=where, extra={**frozen, **words, ("jax._src.array", "_reconstruct_array"): array})


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flatten(value, f"{prefix}/{key}" if prefix else str(key))
    return found
