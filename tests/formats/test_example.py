"""tf.train.Example by hand: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hilt.core.errors import CorruptError
from hilt.formats.tensorflow_files.example import decode, decode_varints, encode, encode_varints

LISTS = st.one_of(
    st.lists(st.binary(max_size=300), max_size=5),
    npst.arrays(np.float32, st.integers(0, 20)),
    npst.arrays(np.int64, st.integers(0, 20)),
    npst.arrays(np.int64, st.integers(0, 20), elements=st.integers(0, 127)),
)


@given(st.dictionaries(st.text(max_size=20), LISTS, max_size=5))
def test_what_goes_in_comes_out(features: dict[str, Any]):
    decoded = decode(encode(features))
    assert decoded.keys() == features.keys()
    for name, values in features.items():
        if isinstance(values, list):
            assert [bytes(value) for value in decoded[name]] == values
        else:
            assert decoded[name].dtype == values.dtype  # type: ignore[union-attr]
            assert decoded[name].tobytes() == values.tobytes()  # type: ignore[union-attr]


def test_the_bytes_are_those_of_protobuf():
    """What tf.train.Example of TensorFlow 2.15 made of each of these alone (a map
    with several entries has no fixed order)."""
    for features, known in [
        ({"i": np.array([1, -1, 300])}, "0a180a160a016912111a0f0a0d01ffffffffffffffffff01ac02"),
        ({"f": np.array([1.5, -2.0], np.float32)}, "0a130a110a0166120c120a0a080000c03f000000c0"),
        ({"b": [b"ab", b""]}, "0a0f0a0d0a016212080a060a0261620a00"),
    ]:
        assert encode(features).hex() == known  # type: ignore[arg-type]


@given(npst.arrays(np.int64, st.integers(0, 30)))
def test_varints(values: np.ndarray[Any, Any]):
    assert decode_varints(memoryview(encode_varints(values))).tolist() == values.tolist()


@pytest.mark.parametrize("value", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**56, 2**63 - 1, -1, -(2**63)])
def test_varints_at_the_borders(value: int):
    raw = encode_varints(np.array([value, 5]))
    assert decode_varints(memoryview(raw)).tolist() == [value, 5]
    bits = value % 2**64
    assert len(raw) == 1 + max(1, -(-bits.bit_length() // 7))


def test_booleans_unsigned_and_double():
    decoded = decode(
        encode({"b": np.array([True, False]), "u": np.array([2**64 - 1], np.uint64), "d": np.array([[0.5], [1.5]])})
    )
    assert decoded["b"].tolist() == [1, 0]  # type: ignore[union-attr]
    assert decoded["u"].view(np.uint64).tolist() == [2**64 - 1]  # type: ignore[union-attr]
    assert decoded["d"].tolist() == [0.5, 1.5]  # type: ignore[union-attr]


def test_floats_are_not_copied():
    raw = encode({"f": np.arange(100, dtype=np.float32)})
    values = decode(raw)["f"]
    assert not values.flags.owndata and not values.flags.writeable  # type: ignore[union-attr]


def entry(name: bytes, feature: bytes) -> bytes:
    inner = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(feature)]) + feature
    return b"\x0a" + bytes([len(inner)]) + inner


def example(*entries: bytes) -> bytes:
    return b"\x0a" + bytes([sum(map(len, entries))]) + b"".join(entries)


def test_lists_that_are_not_packed_and_lists_in_parts():
    unpacked_ints = b"\x1a\x05\x08\x01\x08\xac\x02"
    assert decode(example(entry(b"i", unpacked_ints)))["i"].tolist() == [1, 300]  # type: ignore[union-attr]
    unpacked_floats = b"\x12\x0a\x0d\x00\x00\xc0\x3f\x0d\x00\x00\x00\xc0"
    assert decode(example(entry(b"f", unpacked_floats)))["f"].tolist() == [1.5, -2]  # type: ignore[union-attr]
    two_lists = b"\x1a\x03\x0a\x01\x07\x1a\x03\x0a\x01\x09"
    assert decode(example(entry(b"i", two_lists)))["i"].tolist() == [7, 9]  # type: ignore[union-attr]
    two_kinds = b"\x1a\x03\x0a\x01\x07\x0a\x03\x0a\x01A"
    assert decode(example(entry(b"i", two_kinds)))["i"] == [b"A"]


def test_the_last_of_two_entries_wins_and_other_fields_are_passed_over():
    first, second = entry(b"a", b"\x1a\x03\x0a\x01\x01"), entry(b"a", b"\x1a\x03\x0a\x01\x02")
    other = b"\x28\x05" + b"\x31" + bytes(8) + b"\x3d" + bytes(4) + b"\x42\x01x"
    assert decode(other + example(first, second))["a"].tolist() == [2]  # type: ignore[union-attr]


def test_a_feature_without_a_list():
    assert decode(example(entry(b"a", b""))) == {"a": []}
    assert decode(b"") == {}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x0a\xff\xff\xff\xff\x0f", "a field of 4294967295 bytes at byte 6 of 6"),
        (b"\x0a" + b"\xff" * 12, "an integer at byte 1 of 13 has no end"),
        (b"\x0b\x0b\x0b", "a field of wire type 3 at byte 1 of 3"),
        (example(entry(b"\xff", b"")), "a feature's name is not UTF-8"),
        (example(entry(b"a", b"\x12\x05\x0a\x03abc")), "a list of floats is not made of floats"),
        (example(entry(b"a", b"\x0a\x02\x08\x01")), "a list of bytes has a number in it"),
        (example(entry(b"a", b"\x1a\x03\x0a\x01\x80")), "a list of integers ends inside one"),
        (example(entry(b"a", b"\x1a\x0e\x0a\x0c" + b"\x80" * 11 + b"\x01")), "an integer has more than ten bytes"),
    ],
)
def test_what_is_not_an_example_is_refused(raw: bytes, text: str):
    with pytest.raises(CorruptError, match=text):
        decode(raw)


@given(st.binary(max_size=80))
def test_any_bytes_are_decoded_or_refused(raw: bytes):
    with contextlib.suppress(CorruptError):
        decode(raw)


def test_every_flipped_bit_is_decoded_or_refused():
    raw = encode({"image": [b"abc", b"d"], "f": np.ones(3, np.float32), "i": np.array([1, -1, 1000])})
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CorruptError):
            decode(bytes(flipped))
