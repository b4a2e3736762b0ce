"""Files that are whole or absent: the one layer through which Hilt changes the disk.

Nothing is written in place. A file is written beside its target and renamed over it (`Files.replace`, and `replacing`
for what a library writes, or for a folder); a growing file is only appended to, and each record carries its own
checksum. Tests replace `Files` by layers that stop, forget or reorder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hilt.core import platform
from hilt.core.errors import DiskFullError, StorageError, UnsafeError
from hilt.core.tree import Array


class Files:
    """The system calls that change a disk. Every method raises `StorageError` with the path and a cure."""

    def create(self, path: Path) -> int:
        """A new file, open for reading and appending; it must not exist."""
        with storage_errors(path):
            return _named(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), path)

    def open(self, path: Path, write: bool = False) -> int:
        with storage_errors(path):
            return _named(os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC), path)

    def write(self, fd: int, data: bytes | bytearray | memoryview | Array, offset: int) -> None:
        """The whole buffer at this offset, or an error and nothing promised."""
        size = data.nbytes if isinstance(data, (np.ndarray, memoryview)) else len(data)
        part = data if size <= platform.MAX_IO_BYTES else memoryview(data).cast("B")[: platform.MAX_IO_BYTES]
        while True:
            try:
                written = os.pwrite(fd, part, offset)
            except OSError as error:
                raise _storage_error(error, _path_of(fd)) from error
            size, offset = size - written, offset + written
            if not size:
                return
            data = memoryview(data).cast("B")[written:]
            part = data[: platform.MAX_IO_BYTES]

    def write_all(self, fd: int, buffers: Sequence[memoryview | Array], offset: int) -> None:
        """Many buffers one after the other, in as few calls as the system allows."""
        if len(buffers) == 1:
            self.write(fd, buffers[0], offset)
            return
        for start in range(0, len(buffers), 512):
            part = buffers[start : start + 512]
            size = sum(b.nbytes for b in part)
            try:
                written = platform.write_buffers(fd, part, offset)
            except OSError as error:
                raise _storage_error(error, _path_of(fd)) from error
            if written != size:
                for b in part:
                    self.write(fd, b, offset)
                    offset += b.nbytes
            else:
                offset += size

    def truncate(self, fd: int, size: int) -> None:
        with storage_errors(_path_of(fd)):
            os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Returns when the file's bytes would survive a power cut."""
        try:
            platform.sync(fd)
        except OSError as error:
            raise _storage_error(error, _path_of(fd)) from error

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in this folder would survive a power cut."""
        with storage_errors(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                platform.sync(fd)
            finally:
                os.close(fd)

    def close(self, fd: int) -> None:
        _NAMES.pop(fd, None)  # before its number can be given to another file
        os.close(fd)

    def make_folder(self, path: Path) -> None:
        """One folder; it may exist already."""
        with storage_errors(path):
            path.mkdir(exist_ok=True)

    def make_folders(self, path: Path) -> None:
        """The folder and those above it, as far as they are not there. Their names
        survive a power cut when it returns."""
        with storage_errors(path):
            if path.exists():  # asked first: another process may make it at any moment
                if path.is_dir():
                    return
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if path.parent != path:
            self.make_folders(path.parent)
        self.make_folder(path)
        self.sync_folder(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        with storage_errors(target):
            os.replace(source, target)

    def remove(self, path: Path) -> None:
        """A file, or a folder with all it holds; one that is already gone is fine."""
        with storage_errors(path), contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def replace(self, path: Path, data: bytes | str, durable: bool = True) -> None:
        """The file's new content, whole: written beside, synced, renamed. Text becomes UTF-8."""
        data = data.encode() if isinstance(data, str) else data
        beside = path.with_name(_beside(path))
        fd = self.create(beside)
        try:
            self.write(fd, data, 0)
            if durable:
                self.sync(fd)
        except StorageError:
            self.close(fd)
            self.remove(beside)
            raise
        self.close(fd)
        try:
            self.rename(beside, path)
        except StorageError:
            self.remove(beside)
            raise
        if durable:
            self.sync_folder(path.parent)


DISK = Files()


def read(path: Path) -> bytes:
    with storage_errors(path):
        return path.read_bytes()


def _beside(path: Path) -> str:
    """A name that no other process chooses."""
    return f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new"


def leftovers(folder: Path) -> list[Path]:
    """What lies in a folder because a process was killed while it wrote or removed it."""
    with storage_errors(folder):
        return [
            path for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith((".new", ".trash"))
        ]


@contextlib.contextmanager
def replacing(path: Path, files: Files = DISK, durable: bool = True, sole_writer: bool = False) -> Iterator[Path]:
    """A name beside `path` at which the caller writes a file or makes a folder, which then takes the
    place of `path`, or is removed after an error.

    For content that is bytes at hand there is `Files.replace`. `durable`: all of it and its name survive a power cut
    when this returns. `sole_writer`: no other process writes this path, so what one left that was killed can be
    removed; without it, `leftovers` finds that.
    """
    beside = path.with_name(f".{path.name}.new" if sole_writer else _beside(path))
    if sole_writer:
        files.remove(beside)
    try:
        with storage_errors(path):
            yield beside
        if durable:
            for each in (*beside.rglob("*"), beside):
                if not each.is_symlink():
                    sync_file(each, files)
        if path.is_dir():  # nothing is renamed over a folder that holds something
            files.remove(path)
        files.rename(beside, path)
    except BaseException:
        files.remove(beside)
        raise
    if durable:
        files.sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder that appears under its name when all of it is written, and not at all
    otherwise. An existing one is never changed."""
    path = Path(path)
    with storage_errors(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StorageError(f"{path}: it exists and is not empty. Choose another name, or remove it first.")
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        DISK.make_folder(beside)
        yield beside


def sync_file(path: Path, files: Files = DISK) -> None:
    """Returns when a file that another library wrote, or a folder, would survive a power cut."""
    fd = files.open(path)
    try:
        files.sync(fd)
    finally:
        files.close(fd)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def inside(folder: Path, name: str, said_by: str) -> Path:
    """The place of a file that a dataset or a checkpoint names: a plain file below
    its folder, also after links were followed.

    Any other could be a private file of this machine, a device, or the address of a server: it is refused. A snapshot
    in the cache of huggingface_hub consists of links into the folder ``blobs`` beside it, which belongs to it.
    """
    root = folder.resolve()
    homes = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    path = Path(name)
    why = f"which leads out of {folder}"
    if not path.is_absolute() and ".." not in path.parts and "\0" not in name:
        found = Path(os.path.realpath(root / path))  # of links in a circle, one of them: opening it raises the error
        is_inside = any(found.is_relative_to(home) for home in homes)
        with contextlib.suppress(OSError):  # no file can have such a name
            if is_inside and stat.S_IFMT(found.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                is_inside, why = False, "which is neither a file nor a folder"
        if is_inside:
            return root / path
    raise UnsafeError(f"{said_by} names {name!r}, {why}: it was not opened. Put the file itself there, and not a link.")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns the system's errors into ours, with the path and a cure."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _storage_error(error, path) from error


def _storage_error(error: OSError, path: Path) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kept = "nothing of this write was kept. Free space or lower capacity_bytes."
        return DiskFullError(f"{path}: no room left to write ({error.strerror}); {kept}")
    cures = {
        errno.EACCES: "Check the owner and permissions of this path.",
        errno.EPERM: "Check the owner and permissions of this path.",
        errno.EROFS: "The file system is read-only: choose another folder.",
        errno.ENOENT: "Check the path.",
        errno.ENOTDIR: "A part of this path is a file, not a folder.",
        errno.EEXIST: "It exists already: choose another name or remove it.",
        errno.EMFILE: "Too many open files: raise the limit with ulimit -n.",
        errno.EIO: "The disk reports a fault: copy the folder elsewhere and run: hilt data verify.",
    }
    return StorageError(f"{path}: {error.strerror or error}. {cures.get(error.errno or 0, 'The system refused this.')}")


_NAMES: dict[int, Path] = {}
"""The paths that files were opened by, for systems that do not tell them."""


def _named(fd: int, path: Path) -> int:
    _NAMES[fd] = path
    return fd


def _path_of(fd: int) -> Path:
    return platform.path_of(fd) or _NAMES.get(fd) or Path(f"file descriptor {fd}")
