"""Where files are that a dataset or a checkpoint names. It needs nothing that a machine with only torch lacks."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hilt.core.errors import UnsafeError


def inside(folder: Path, name: str, said_by: str) -> Path:
    """The place of a file that a dataset or a checkpoint names: a plain file below its folder, also after links were followed.

    Any other could be a private file of this machine, a device, or the address of a server: it is refused. A snapshot in the cache of
    huggingface_hub consists of links into the folder ``blobs`` beside it, which belongs to it.
    """
    root = folder.resolve()
    homes = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    path = Path(name)
    why = f"which leads out of {folder}"
    if not path.is_absolute() and ".." not in path.parts and "\0" not in name:
        found = Path(os.path.realpath(root / path))  # of links in a circle, one of them: whoever opens it is told
        is_inside = any(found.is_relative_to(home) for home in homes)
        with contextlib.suppress(OSError):  # no file can have such a name
            if is_inside and stat.S_IFMT(found.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                is_inside, why = False, "which is neither a file nor a folder"
        if is_inside:
            return root / path
    raise UnsafeError(f"{said_by} names {name!r}, {why}: it was not opened. Put the file itself there, and not a link.")
