"""One writer per log: an advisory lock that the system frees when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from hilt.core.errors import LockedError
from hilt.core.files import storage_errors


class WriterLock:
    """Held while a process writes to a log. A second writer gets an error that names the first."""

    def __init__(self, folder: Path):
        self._path = folder / "writer.lock"
        self._fd = -1

    def __enter__(self) -> WriterLock:
        with storage_errors(self._path):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raw = os.pread(fd, 4096, 0)
            os.close(fd)
            cure = "Open it with mode='r', or end that process."
            raise LockedError(f"{self._path.parent}: {_describe(raw)} is writing to this log. {cure}") from None
        os.ftruncate(fd, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        self._fd = fd
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def writer_of(folder: Path) -> str | None:
    """Who is writing to this log now, in words; None when nobody is."""
    path = folder / "writer.lock"
    if not path.exists():
        return None
    with storage_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _describe(os.pread(fd, 4096, 0)).rstrip(",")
    finally:
        os.close(fd)
    return None


def _describe(raw: bytes) -> str:
    try:
        holder = json.loads(raw)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']},"
    except (ValueError, KeyError, TypeError):
        return "another process"
