"""TFRecord files: records of bytes, each with its length and two checksums.

    length 8 │ checksum of length 4 │ data │ checksum of data 4

All little-endian. The checksums are CRC-32C, rotated and shifted by a constant.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from hilt.core.checksums import checksum
from hilt.core.errors import CorruptError
from hilt.core.files import DISK, Files, storage_errors

OVERHEAD = 16
"""Bytes of a record besides its data."""


class RecordFile:
    """A TFRecord file, open for reading; several threads may read at once."""

    unit = "byte"

    def __init__(self, path: Path):
        self.path = path
        self._fd = DISK.open(path)
        with storage_errors(path):
            self.size = os.fstat(self._fd).st_size

    def places(self) -> Iterator[tuple[int, int]]:
        """Where each record begins, and how long its data is. Where a length is damaged
        the rest of the file is lost: an error."""
        offset = 0
        while offset < self.size:
            head = self._read(12, offset)
            if len(head) < 12:
                raise CorruptError(
                    f"{self.path}: the file ends inside the length of the record at byte {offset}; it was cut off."
                )
            length, given = struct.unpack("<QI", head)
            if given != masked(head[:8]):
                raise CorruptError(
                    f"{self.path}: the length of the record at byte {offset} does not have its checksum; "
                    "what follows cannot be found."
                )
            if length > self.size - offset - OVERHEAD:
                raise CorruptError(
                    f"{self.path}: the record at byte {offset} needs {length + OVERHEAD} bytes and the file "
                    f"has {self.size - offset}; it was cut off."
                )
            yield offset, length
            offset += length + OVERHEAD

    def read(self, offset: int, length: int) -> memoryview:
        """The data of a record, checked."""
        data = memoryview(self._read(length + 4, offset + 12))
        if len(data) != length + 4:
            raise CorruptError(f"{self.path}: the file ends inside the record at byte {offset}; it was cut off.")
        if int.from_bytes(data[length:], "little") != masked(data[:length]):
            raise CorruptError(f"{self.path}: the record at byte {offset} does not have its checksum; it is damaged.")
        return data[:length]

    def _read(self, length: int, offset: int) -> bytes:
        with storage_errors(self.path):
            data = os.pread(self._fd, length, offset)
            while 0 < len(data) < length and (more := os.pread(self._fd, length - len(data), offset + len(data))):
                data += more  # the system reads at most 2 GiB at a time
            return data

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            DISK.close(self._fd)


class RecordWriter:
    """A new TFRecord file; one that is there already is replaced."""

    def __init__(self, path: Path, files: Files = DISK):
        files.remove(path)
        self.size = 0
        self.records = 0
        self._files = files
        self._fd: int | None = files.create(path)

    def add(self, data: bytes) -> None:
        assert self._fd is not None
        buffers = [memoryview(part) for part in (header(len(data)), data, footer(data)) if part]
        self._files.write_all(self._fd, buffers, self.size)
        self.size += len(data) + OVERHEAD
        self.records += 1

    def sync(self) -> None:
        """Returns when what was added would survive a power cut."""
        assert self._fd is not None
        self._files.sync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            self._files.close(self._fd)
            self._fd = None


def header(length: int) -> bytes:
    raw = struct.pack("<Q", length)
    return raw + struct.pack("<I", masked(raw))


def footer(data: bytes | bytearray | memoryview) -> bytes:
    return struct.pack("<I", masked(data))


def masked(data: bytes | bytearray | memoryview) -> int:
    """The checksum as TFRecord stores it. A plain one would be weak over data that has checksums inside."""
    crc = checksum(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
