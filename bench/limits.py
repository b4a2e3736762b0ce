"""What the machine itself can do, measured in the same run with the same bytes: no store can be faster by much."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.timing import Rates, in_turns

Array = npt.NDArray[Any]


def memcpy(seconds: float = 0.2, rounds: int = 3) -> Rates:
    """Copies of 64 MiB per second, between pages that were touched before."""
    source, target = np.ones(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)
    return in_turns({"memcpy": lambda: np.copyto(target, source)}, rounds, seconds)["memcpy"]


class RamGather:
    """Rows of arrays in memory, picked at random with ``numpy.take(out=)`` into memory that is used again and again."""

    def __init__(self, columns: Mapping[str, Array], batch: int, ahead: Sequence[int] = (0,)):
        """`ahead`: 0 picks the row itself, 1 the one after it, as a next observation is."""
        self._columns = {name: array.reshape(len(array), -1).view(np.uint8) for name, array in columns.items()}
        self._out = {
            (name, k): np.ones((batch, array.shape[1]), np.uint8)
            for name, array in self._columns.items()
            for k in ahead
        }
        self._rows = len(next(iter(self._columns.values()))) - max(ahead)
        self._batch, self._rng = batch, np.random.default_rng(0)

    def __call__(self) -> None:
        index = self._rng.integers(self._rows, size=self._batch)
        for (name, k), out in self._out.items():
            np.take(self._columns[name], index + k, axis=0, out=out, mode="clip")

    @property
    def nbytes(self) -> int:
        return sum(out.nbytes for out in self._out.values())


class PlainFrames:
    """Frames in plain files, one after the other, read in the order of the file by one thread with `pread`."""

    def __init__(self, folder: Path, frames: Mapping[str, Array], batch: int, ahead: Sequence[int] = (0,)):
        folder.mkdir()
        self._ahead, self._batch, self._rng = ahead, batch, np.random.default_rng(0)
        self._rows = len(next(iter(frames.values()))) - max(ahead)
        self._size = next(iter(frames.values()))[0].nbytes
        self.paths = []
        for name, array in frames.items():
            path = folder / name
            with path.open("wb") as file:
                for start in range(0, len(array), 256):
                    file.write(np.ascontiguousarray(array[start : start + 256]).data)
                file.flush()
                os.fsync(file.fileno())
            self.paths.append(path)
        self._fds = [os.open(path, os.O_RDONLY) for path in self.paths]
        self._out = np.ones((batch * len(ahead), self._size), np.uint8)

    def __call__(self) -> None:
        index = self._rng.integers(self._rows, size=self._batch)
        order = np.sort(np.concatenate([index + k for k in self._ahead])).tolist()
        for fd in self._fds:
            for target, row in zip(self._out, order, strict=True):
                os.preadv(fd, [target], row * self._size)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class PlainAppend:
    """Buffers of the given sizes appended to one plain file, then fsync."""

    def __init__(self, path: Path, sizes: Sequence[int]):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._buffers = [np.random.default_rng(0).integers(0, 255, size, np.uint8) for size in sizes]
        self.nbytes = sum(sizes)

    def __call__(self) -> None:
        for buffer in self._buffers:
            assert os.write(self._fd, buffer) == buffer.nbytes
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def touch_memory(folder: Path, nbytes: int) -> None:
    """Writes a file of this size and deletes it, so that the page cache then takes pages that were used before.

    The first touch of a page of a virtual machine's memory is several times slower than any later one: it would be
    measured in place of whatever store happened to run first.
    """
    path, block = folder / "touch", bytes(8 << 20)
    with path.open("wb") as file:
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
    path.unlink()


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Puts these files out of the page cache. Nobody may have them mapped."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def resident_share(paths: Sequence[Path]) -> float:
    """Which share of the pages of these files is in the page cache."""
    resident = pages = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            if _libc.mincore(view.ctypes.data, size, flags.ctypes.data) != 0:
                raise OSError(ctypes.get_errno(), f"mincore on {path}")
            resident, pages = resident + int((flags & 1).sum()), pages + len(flags)
            del view
    return resident / max(1, pages)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def is_on_disk(folder: Path) -> bool:
    """Whether a folder lies on a disk rather than in memory."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, system, *_ = line.split()
        if str(folder.resolve()).startswith(mount) and len(mount) >= len(best):
            best, kind = mount, system
    return kind not in ("tmpfs", "ramfs")
