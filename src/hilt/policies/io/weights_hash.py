"""A hash of the weights of a policy's folder, by which what was computed with them is known again."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hilt.core.errors import ConfigError
from hilt.core.files import storage_errors

BLOCK_BYTES = 1 << 20


def weights_hash(folder: Path) -> str:
    """A hash of the files with weights in a policy's folder."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.pt")])
    if not files:
        raise ConfigError(f"policy={folder}: there are no weights in it. Give the folder of a checkpoint.")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with storage_errors(path), path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()[:12]
