"""From a robot's units to the model's and back, by the statistics of the dataset that the model was trained on.

    Normalizer(stats["action"]).unnormalize(x)      x in [-1, 1] to the robot's units, by q01 and q99
    Normalizer(stats["proprio"], clip=True).normalize(state)

Statistics are a dictionary of lists, as ``dataset_statistics.json`` has them: ``q01``, ``q99``,
``min``, ``max``, ``mean``, ``std``, and a ``mask`` that is false for numbers which stay as they are
(the gripper). Arrays give arrays, tensors tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.core.errors import ConfigError, FormatError, SchemaError, UnknownNameError

KINDS = {"q99": ("q01", "q99"), "minmax": ("min", "max"), "mean_std": ("mean", "std")}


class Normalizer:
    """One kind of normalization along the last dimension.

        q99, minmax   normal = 2 (x - low) / (high - low + epsilon) - 1      x = (normal + 1) / 2
                      (high - low + epsilon) + low
        mean_std      normal = (x - mean) / (std + epsilon)                  x = normal (std + epsilon) + mean

    Numbers whose mask is false are left alone. `clip` keeps what is normal within
    [-1, 1]. Plain OpenVLA has an `epsilon` of 0.
    """

    def __init__(self, stats: Mapping[str, Any], kind: str = "q99", epsilon: float = 1e-8, clip: bool = False):
        if kind not in KINDS:
            raise UnknownNameError("kind of normalization", kind, KINDS)
        if clip and kind == "mean_std":
            raise ConfigError(
                "a normalization by mean and standard deviation has no bounds to clip to; give clip=False."
            )
        if missing := [name for name in KINDS[kind] if not len(stats.get(name, ()))]:
            raise SchemaError(
                f"normalization {kind!r} needs {' and '.join(KINDS[kind])}; these statistics lack {missing[0]} "
                f"and have {sorted(stats)}."
            )
        first, second = (np.asarray(stats[name], np.float64) for name in KINDS[kind])
        self.mask = np.asarray(stats.get("mask", np.ones(first.shape, bool)), bool)
        if not first.shape == second.shape == self.mask.shape or first.ndim != 1:
            raise SchemaError(
                f"statistics of one row each were expected, and {KINDS[kind][0]}, {KINDS[kind][1]} "
                f"and mask have the shapes {first.shape}, {second.shape} and {self.mask.shape}."
            )
        self.kind, self.epsilon, self.clip, self.size = kind, epsilon, clip, len(first)
        self._offset = first
        self._scale = (second if kind == "mean_std" else second - first) + epsilon

    def normalize(self, numbers: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        x, offset, scale, mask = self._with(numbers)
        scale = scale + (scale == 0) * 1e-8  # of a number that never moved, and an epsilon of 0
        normal = (x - offset) / scale if self.kind == "mean_std" else 2 * (x - offset) / scale - 1
        return self._kept(normal.clip(-1, 1) if self.clip else normal, x, mask)

    def unnormalize(self, normal: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        x, offset, scale, mask = self._with(normal)
        return self._kept(x * scale + offset if self.kind == "mean_std" else 0.5 * (x + 1) * scale + offset, x, mask)

    def _with(self, numbers: Any) -> np.ndarray | torch.Tensor:
        if numbers.shape[-1] != self.size:
            raise SchemaError(
                f"numbers of width {numbers.shape[-1]} were given to a normalization of {self.size}; the "
                "statistics are of another robot."
            )
        if isinstance(numbers, torch.Tensor):  # in the tensor's own precision: what goes through a GPU is float32
            own = [torch.from_numpy(each).to(numbers.device) for each in (self._offset, self._scale, self.mask)]
            return numbers, own[0].to(numbers.dtype), own[1].to(numbers.dtype), own[2]
        return np.asarray(numbers), self._offset, self._scale, self.mask

    @staticmethod
    def _kept(new: Any, old: Any, mask: Any) -> np.ndarray | torch.Tensor:
        return torch.where(mask, new, old) if isinstance(new, torch.Tensor) else np.where(mask, new, old)


def statistics(numbers: np.ndarray, mask: Sequence[bool] | np.ndarray | None = None) -> dict[str, Any]:
    """Those of a dataset of our own: float64 lists of one row, of rows [N, D]."""
    rows = np.asarray(numbers, np.float64)
    if rows.ndim != 2 or not len(rows) or not np.isfinite(rows).all():
        raise SchemaError(
            f"statistics are of finite rows [N, D], N > 0; {rows.shape} was given"
            + ("." if rows.ndim != 2 or not len(rows) else ", with NaN or infinity.")
        )
    low, high = np.quantile(rows, [0.01, 0.99], axis=0)
    found = {"mean": rows.mean(0), "std": rows.std(0), "min": rows.min(0), "max": rows.max(0), "q01": low, "q99": high}
    known: dict[str, Any] = {name: value.tolist() for name, value in found.items()}
    return known | {"mask": [bool(each) for each in (np.ones(rows.shape[1], bool) if mask is None else mask)]}


def resolve_key(stats: Mapping[str, object], key: str | None = None) -> str:
    """The name of the dataset whose statistics are meant: itself, with ``_no_noops``, or the only one that there is."""
    if key is None:
        if len(stats) == 1:
            return next(iter(stats))
        raise ConfigError(
            f"this checkpoint has statistics of {len(stats)} datasets; name one as unnorm_key: "
            f"{', '.join(sorted(stats)) or 'none'}."
        )
    for name in (key, f"{key}_no_noops", key.removeprefix("robotwin2_").removeprefix("robotwin_")):
        if name in stats:
            return name
    raise UnknownNameError("dataset statistics (unnorm_key)", key, stats)


def read_statistics(file: str | Path) -> dict[str, Any]:
    """A checkpoint's ``dataset_statistics.json``: dataset name to ``action``, ``proprio`` and others."""
    try:
        stats = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{file}: no statistics can be read from it: {error}") from error
    if not isinstance(stats, dict) or not all(isinstance(each, dict) and "action" in each for each in stats.values()):
        raise FormatError(f"{file}: expected statistics by dataset name, each with an 'action'.")
    return stats


# --- grippers: the last number of an action ---


def gripper_signs(actions: np.ndarray) -> np.ndarray:
    """RLDS's 0 (closed) to 1 (open) as -1, 0 or +1; a copy."""
    signed = np.array(actions, copy=True)
    signed[..., -1] = np.sign(2 * signed[..., -1] - 1)
    return signed


def gripper_inverted(actions: np.ndarray) -> np.ndarray:
    """Open becomes closed; a copy. LIBERO's -1 opens and +1 closes."""
    turned = np.array(actions, copy=True)
    turned[..., -1] *= -1
    return turned
