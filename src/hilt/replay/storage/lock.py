"""One writer per log: an advisory lock that the system frees when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

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
        if not try_lock(fd, _LOOK_S):
            raw = os.pread(fd, 4096, 0)
            os.close(fd)
            cure = "Open it with mode='r', or end that process."
            raise LockedError(f"{self._path.parent}: {_describe(raw)} is writing to this log. {cure}")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # on a full disk the owner is not named; the lock holds all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode(), 0)
        self._fd = fd
        # it stays with the parent, and is released when the parent ends, whatever its children do
        after_fork(self, "__exit__")
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def after_fork(owner: object, method: str) -> None:
    """Calls this method in every process that is forked from this one, as long as the object lives."""
    _FORKED[owner] = method


class Shared(Protocol):
    """What threads share and a fork must not cut in two."""

    lock: threading.RLock
    cut_by_fork: bool
    """In a forked process: another thread was changing it, and did not come to an end before the fork."""


def wait_before_fork(owner: Shared) -> None:
    """From now on a fork waits until no other thread holds the lock, so that the forked process finds the object as it
    is between two changes. It gets a lock of its own: the threads that held the old one do not exist there."""
    _WAITED_FOR[owner] = next(_numbers)


FORK_TIMEOUT_S = 10.0
"""A fork waits no longer than this for one lock: a thread that holds it may wait
for something of the forking thread."""
_FORKED: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
_WAITED_FOR: weakref.WeakKeyDictionary[Shared, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_held: list[tuple[Shared, bool]] = []


def _before_fork() -> None:
    # a buffer holds its lock when it takes that of its log
    newest_first = sorted(list(_WAITED_FOR.items()), key=lambda item: -item[1])
    for owner, _ in newest_first:
        _held.append((owner, owner.lock.acquire(timeout=FORK_TIMEOUT_S)))


def _in_parent() -> None:
    for owner, acquired in _held:
        if acquired:
            owner.lock.release()
    _held.clear()


def _in_child() -> None:
    for owner, acquired in _held:
        owner.lock, owner.cut_by_fork = threading.RLock(), owner.cut_by_fork or not acquired
    _held.clear()
    for forked, method in list(_FORKED.items()):
        getattr(forked, method)()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)

_LOOK_S = 0.05
"""A writer waits this long for the lock, since `writer_of` holds it for a moment in order to look."""
_POLL_INTERVAL_S = 0.01


def try_lock(fd: int, timeout: float) -> bool:
    """Takes the lock of a file that is open; returns whether it was free within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)


def writer_of(folder: Path) -> str | None:
    """A description of the process that writes to this log now; None when there is none."""
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
