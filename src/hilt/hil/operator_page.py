"""Where the operator's page of a running actor is: a file in the actor's folder, by which `hilt open` finds it.

    RUN/actors/NAME/operator.json    the address of the page with its token, of mode 0600

The actor holds a lock on the file, which the system frees when the process ends, however it ends: a file without a lock
is a leftover and counts as none.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hilt.core.files import DISK, replacing
from hilt.replay.storage.lock import after_fork, try_lock

OPERATOR_FILE = "operator.json"


class PageAnnouncement:
    """The file, written whole and readable by this user alone; closing it removes it."""

    def __init__(self, folder: Path, url: str):
        self._path, self._fd = folder / OPERATOR_FILE, -1
        text = json.dumps({"url": url, "host": socket.gethostname()}).encode()
        with replacing(self._path, durable=False) as beside:
            self._fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            DISK.write(self._fd, text, 0)
            try_lock(self._fd, 0.0)  # nobody else knows this file yet
        after_fork(self, "_release")  # the lock is the actor's, whatever its children do

    def close(self) -> None:
        """Removes the file, unless another actor has written its own there. May be called twice."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                DISK.remove(self._path)
        self._release()

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class OperatorPage:
    """The page of an actor that is running on this machine now."""

    actor: str
    url: str


def operator_pages(run: Path) -> list[OperatorPage]:
    """The pages of a run's actors that can be opened now, by the actors' names."""
    found = (_live_page(path) for path in sorted(run.glob(f"actors/*/{OPERATOR_FILE}")))
    return [page for page in found if page is not None]


def _live_page(path: Path) -> OperatorPage | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), _opened(path) as fd:
        if not _is_free(fd):
            found = json.loads(os.pread(fd, 65536, 0))
            if found["host"] == socket.gethostname():
                return OperatorPage(path.parent.name, str(found["url"]))
    return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_free(fd: int) -> bool:
    """Whether no process holds the lock of this file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
