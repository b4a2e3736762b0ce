"""A hash of a policy's folder, by which what was computed with the policy is known again."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hilt.core.errors import ConfigError
from hilt.core.files import storage_errors

BLOCK_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".pt")
SETTINGS = (".json", ".model", ".txt")
"""Statistics, tokenizers, and the settings of a policy around another one"""
CONFIG = "config.json"


def weights_hash(folder: Path) -> str:
    """A hash of the files with weights in a policy's folder and in those below it, such as ``policy/`` of a policy with
    a condition and ``base/`` of one beside a frozen policy; and of the settings that change what it computes.

    A folder that has its weights and ``config.json`` alone, such as that of a small_vla or an ACT, whose statistics are
    among the weights, has the hash of its weights."""
    digest = hashlib.sha256()
    for path in _hashed(folder):
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
    there = sorted(path for path in folder.rglob("*") if path.suffix in WEIGHTS + SETTINGS and path.is_file())
    weights = [path for path in there if path.suffix in WEIGHTS]
    if not weights:
        raise ConfigError(f"policy={folder}: there are no weights in it. Give the folder of a checkpoint.")
    others = [path for path in there if path.suffix in SETTINGS and not path.name.endswith(".safetensors.index.json")]
    return weights if others in ([], [folder / CONFIG]) else there
