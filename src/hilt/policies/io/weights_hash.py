"""A hash of a policy's folder, by which what was computed with the policy is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hilt.core.errors import ConfigError
from hilt.core.files import storage_errors

BLOCK_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".pt")
CONFIG = "config.json"
SETTINGS = (
    *(CONFIG, "hilt.json", "adapter_config.json", "dataset_statistics.json", "norm_stats.json"),
    *("preprocessor_config.json", "policy_preprocessor.json", "policy_postprocessor.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
"""The files besides weights that policies are opened with: statistics, tokenizers, and the settings of a policy around
another one"""


def weights_hash(folder: Path) -> str:
    """A hash of the files with weights in a policy's folder and in those below it, such as ``policy/`` of a policy with
    a condition and ``base/`` of one beside a frozen policy; and of the settings that change what it computes.

    A folder that has its weights and ``config.json`` alone, such as that of a small_vla or an ACT, whose statistics are
    among the weights, has the hash of its weights. Hidden folders, and other files such as notes, make no
    difference."""
    return _hash_of(folder, _hashed(folder))


def former_weights_hash(folder: Path) -> str:
    """The hash that earlier versions gave to a policy's folder: that of its own weights, without those of the folders
    below it and without settings. Empty where the folder has no weights of its own."""
    paths = sorted(path for suffix in WEIGHTS for path in folder.glob(f"*{suffix}"))
    return _hash_of(folder, paths) if paths else ""


def _hash_of(folder: Path, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(folder).as_posix().encode())
        with storage_errors(path), path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()[:12]


def _hashed(folder: Path) -> list[Path]:
    """The files that are hashed, in the order of their names."""
    inner = folder / "policy"
    if not (folder / CONFIG).is_file() and (inner / CONFIG).is_file():
        raise ConfigError(f"policy={folder}: there are no weights in it. This is a run; its policy is {inner}")
    there = sorted(path for path in folder.rglob("*") if _counts(path.relative_to(folder)) and path.is_file())
    weights = [path for path in there if path.suffix in WEIGHTS]
    if not weights:
        raise ConfigError(f"policy={folder}: there are no weights in it. Give the folder of a checkpoint.")
    others = [path for path in there if path.name in SETTINGS]
    return weights if others in ([], [folder / CONFIG]) else there


def _counts(path: Path) -> bool:
    """Whether a file, by its path in the folder, is one that a policy is opened with."""
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and (path.suffix in WEIGHTS or path.name in SETTINGS)
