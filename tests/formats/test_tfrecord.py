"""Records with lengths and masked checksums; what damage costs."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.errors import CorruptError, StorageError
from hilt.formats.tensorflow_files.tfrecord import OVERHEAD, RecordFile, RecordWriter, footer, header, masked

RECORDS = [b"first", b"", b"x" * 1000, bytes(range(256))]


def write(path: Path, records: list[bytes]) -> bytes:
    writer = RecordWriter(path)
    for record in records:
        writer.add(record)
    assert writer.records == len(records)
    writer.sync()
    writer.close()
    raw = path.read_bytes()
    assert writer.size == len(raw)
    return raw


def read(path: Path) -> list[bytes]:
    file = RecordFile(path)
    return [bytes(file.read(*place)) for place in file.places()]


def test_the_bytes_are_those_of_tensorflow(tmp_path: Path):
    """What tf.io.TFRecordWriter of TensorFlow 2.15 wrote for these two records."""
    raw = write(tmp_path / "a", [b"hilt", b""])
    assert raw.hex() == "04000000000000004245520468696c74fb231a83000000000000000029039807d8ea82a2"


def test_the_mask_is_rotation_and_sum():
    assert masked(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_records_come_back(tmp_path_factory: pytest.TempPathFactory, records: list[bytes]):
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    write(path, records)
    assert read(path) == records


def test_an_earlier_file_is_replaced(tmp_path: Path):
    write(tmp_path / "a", RECORDS)
    write(tmp_path / "a", [b"new"])
    assert read(tmp_path / "a") == [b"new"]


def test_a_flipped_bit_in_data_loses_one_record(tmp_path: Path):
    path = tmp_path / "a"
    raw = bytearray(write(path, RECORDS))
    third = sum(len(r) + OVERHEAD for r in RECORDS[:2])
    raw[third + 12 + 500] ^= 1
    path.write_bytes(raw)
    file = RecordFile(path)
    places = list(file.places())
    assert len(places) == 4
    with pytest.raises(
        CorruptError, match=rf"a: the record at byte {third} does not have its checksum; it is damaged\."
    ):
        file.read(*places[2])
    assert bytes(file.read(*places[3])) == RECORDS[3]


def test_a_flipped_bit_in_a_length_loses_the_rest(tmp_path: Path):
    path = tmp_path / "a"
    raw = bytearray(write(path, RECORDS))
    second = len(RECORDS[0]) + OVERHEAD
    raw[second] ^= 1
    path.write_bytes(raw)
    places = RecordFile(path).places()
    assert next(places) == (0, 5)
    with pytest.raises(CorruptError, match=rf"the length of the record at byte {second} does not have its checksum"):
        next(places)


def test_every_cut_is_found_or_falls_between_records(tmp_path: Path):
    path = tmp_path / "a"
    raw = write(path, RECORDS[:3])
    ends = {0, 21, 37, len(raw)}
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        if size in ends:
            read(path)
        else:
            with pytest.raises(CorruptError, match="it was cut off"):
                read(path)


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path):
    path = tmp_path / "a"
    for length in (2**20, 2**63, 2**64 - 1, 2**64 - 16):
        path.write_bytes(header(length) + b"abc")
        with pytest.raises(CorruptError, match=rf"the record at byte 0 needs {length + 16} bytes and the file has 15"):
            list(RecordFile(path).places())


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    path = tmp_path / "a"
    raw = write(path, RECORDS)
    file = RecordFile(path)
    places = list(file.places())
    path.write_bytes(raw[:-10])
    with pytest.raises(CorruptError, match="ends inside the record"):
        file.read(*places[-1])


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(StorageError, match="nothing: No such file"):
        RecordFile(tmp_path / "nothing")


def test_header_and_footer():
    assert header(3)[:8] == struct.pack("<Q", 3)
    assert footer(b"abc") == struct.pack("<I", masked(b"abc"))
