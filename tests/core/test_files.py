"""Files that are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import CorruptError, DiskFullError, StorageError
from hilt.core.files import DISK, Files, leftovers, new_folder, replacing, storage_errors

DATA = {"format": 1, "nested": {"checksum": "00000000", "text": '\n "checksum": "x"'}, "list": [1, 2.5, None, True]}


def test_json_comes_back(tmp_path: Path):
    write_json(tmp_path / "a.json", DATA)
    assert read_json(tmp_path / "a.json") == DATA
    assert os.listdir(tmp_path) == ["a.json"]


def test_every_flipped_bit_of_a_json_file_is_found(tmp_path: Path):
    path = tmp_path / "a.json"
    write_json(path, DATA)
    text = path.read_bytes()
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CorruptError, match=r"a\.json: .*restore it from a copy or run: hilt data repair"):
            read_json(path)


FOREIGN = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'"checksum"',
    b'{"checksum": "00000000"}',
    b"\xff\xfe",
    b"0" * 100,
    b"[" * 10**6,
]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_json_file_is_refused(tmp_path: Path, text: bytes):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(CorruptError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_a_cut_json_file_is_refused(tmp_path: Path):
    write_json(tmp_path / "a.json", DATA)
    text = (tmp_path / "a.json").read_bytes()
    for size in range(len(text)):
        (tmp_path / "a.json").write_bytes(text[:size])
        with pytest.raises(CorruptError):
            read_json(tmp_path / "a.json")


def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    class Full(Files):
        def sync(self, fd: int) -> None:
            raise DiskFullError("full")

    DISK.replace(tmp_path / "a", b"old")
    with pytest.raises(DiskFullError):
        Full().replace(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system may take a part of a buffer; the rest follows, for one buffer and for many."""
    real, calls = os.pwrite, []

    def short(fd: int, data: Any, offset: int) -> int:
        calls.append(len(data))
        return real(fd, bytes(data)[:7], offset)

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: short(fd, buffers[0], offset))
    data = np.arange(50, dtype=np.uint8)
    fd = DISK.create(tmp_path / "a")
    DISK.write(fd, data, 0)
    DISK.write_all(fd, [data[:20], data[20:]], 50)
    DISK.close(fd)
    assert (tmp_path / "a").read_bytes() == 2 * data.tobytes()
    assert len(calls) > 10


def test_many_buffers_are_written_in_order(tmp_path: Path):
    buffers = [np.full(3, i % 251, np.uint8) for i in range(1500)]
    fd = DISK.create(tmp_path / "a")
    DISK.write_all(fd, buffers, 5)
    DISK.close(fd)
    assert (tmp_path / "a").read_bytes() == bytes(5) + b"".join(b.tobytes() for b in buffers)


def test_folders_are_made_with_those_above_and_their_names_are_synced(tmp_path: Path):
    synced: list[Path] = []

    class Watched(Files):
        def sync_folder(self, path: Path) -> None:
            synced.append(path)

    Watched().make_folders(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a/b"]
    Watched().make_folders(tmp_path / "a/b/c")
    assert len(synced) == 3


def test_only_our_leftovers_are_leftovers(tmp_path: Path):
    for name in (".a.json.1.2.new", ".000003.trash", ".DS_Store", ".git", "a.new", "rows"):
        (tmp_path / name).touch()
    assert sorted(path.name for path in leftovers(tmp_path)) == [".000003.trash", ".a.json.1.2.new"]


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (
            errno.ENOSPC,
            DiskFullError,
            "/x/y: no room left to write .* nothing of this write was kept. Free space or lower capacity_bytes",
        ),
        (errno.EACCES, StorageError, "/x/y: Permission denied. Check the owner and permissions of this path"),
        (errno.EROFS, StorageError, "/x/y: Read-only file system. The file system is read-only: choose another folder"),
        (errno.EMFILE, StorageError, "/x/y: Too many open files. Too many open files: raise the limit with ulimit -n"),
        (errno.EIO, StorageError, "/x/y: Input/output error. The disk reports a fault: copy the folder elsewhere"),
        (errno.ENOTDIR, StorageError, "/x/y: Not a directory. A part of this path is a file, not a folder"),
    ],
)
def test_the_systems_errors_get_the_path_and_a_cure(number: int, kind: type[StorageError], text: str):
    with pytest.raises(kind, match=text), storage_errors(Path("/x/y")):
        raise OSError(number, os.strerror(number))


def test_a_folder_that_another_process_makes_meanwhile_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def is_dir(path: Path, asked: Any = Path.is_dir) -> bool:
        found = bool(asked(path))
        if not found:
            os.mkdir(path)  # by another process, the moment after
        return found

    monkeypatch.setattr(Path, "is_dir", is_dir)
    DISK.make_folders(tmp_path / "a")
    assert (tmp_path / "a").exists()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path):
    with pytest.raises(RuntimeError, match="half"), new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        raise RuntimeError("half")
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "b" / "c") as folder:
        (folder / "x").write_text("1")
    assert (tmp_path / "b" / "c" / "x").read_text() == "1"
    with pytest.raises(StorageError, match="it exists and is not empty"), new_folder(tmp_path / "b" / "c"):
        pass


def test_replacing_a_file_and_a_folder_that_are_there(tmp_path: Path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("old")
    folder.mkdir()
    (folder / "old").touch()
    with replacing(file) as beside:
        beside.write_text("new")
        assert file.read_text() == "old"
    with replacing(folder, durable=False) as beside:
        beside.mkdir()
        (beside / "new").touch()
        assert (folder / "old").exists()
    assert file.read_text() == "new" and [path.name for path in folder.iterdir()] == ["new"]
    with pytest.raises(StorageError, match=r"file: No space left|file: no room left"), replacing(file) as beside:
        beside.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match="file"), replacing(file):
        pass  # nothing was written
    assert file.read_text() == "new" and sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_replacing_as_sole_writer_removes_what_a_killed_writer_left(tmp_path: Path):
    (tmp_path / ".a.new").mkdir()
    (tmp_path / ".a.new" / "half").touch()
    with replacing(tmp_path / "a", sole_writer=True) as beside:
        assert not beside.exists()
        beside.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and not any((tmp_path / "a").iterdir())


def test_replacing_syncs_all_of_a_folder_before_its_name(tmp_path: Path):
    calls = []

    class Recorded(Files):
        def sync(self, fd: int) -> None:
            calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name if os.path.isdir("/proc/self/fd") else "?")
            super().sync(fd)

        def rename(self, source: Path, target: Path) -> None:
            calls.append("rename")
            super().rename(source, target)

        def sync_folder(self, path: Path) -> None:
            calls.append("folder")
            super().sync_folder(path)

    with replacing(tmp_path / "a", Recorded(), sole_writer=True) as beside:
        (beside / "b").mkdir(parents=True)
        (beside / "b" / "c").touch()
    assert calls[3:] == ["rename", "folder"] and (calls[0] == "?" or sorted(calls[:3]) == [".a.new", "b", "c"])
