"""Messages as openpi's client packs them: arrays there and back, and nothing that could be code."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hilt.core.errors import FormatError
from hilt.serving import pack, unpack
from tests.effort import rounds
from tests.serving.served_toy import packed, unpacked

DTYPES = st.sampled_from(["|b1", "|u1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", ">f4"])


@settings(max_examples=rounds(30, 1000))
@given(arrays.arrays(DTYPES.map(np.dtype), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
def test_arrays_go_there_and_back(array: np.ndarray):
    for there, back in ((pack, unpacked), (packed, unpack), (pack, unpack)):
        result = back(there({"x": array, "y": [1, "two"]}))
        assert result["y"] == [1, "two"] and result["x"].dtype == array.dtype
        np.testing.assert_array_equal(result["x"], array)


def test_scalars_of_numpy_go_there_and_back():
    result = unpack(pack({"a": np.float32(0.5), "b": np.int64(-3), "c": np.bool_(True)}))
    assert result == {"a": 0.5, "b": -3, "c": True} and result["a"].dtype == np.float32


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes):
    try:
        unpack(data)
    except FormatError as error:
        assert "\n" not in str(error)


def as_array(**changes: Any) -> bytes:
    array = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({**array, **{key.encode(): value for key, value in changes.items()}})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (as_array(dtype="|O8"), r"dtype '\|O8'; expected whole, floating or truth values"),
        (as_array(dtype="<c8"), "dtype '<c8'"),
        (as_array(dtype="|V8"), "dtype '|V8'"),
        (as_array(dtype="i4,i4"), "dtype 'i4,i4'"),
        (as_array(dtype="<f1"), "dtype '<f1', which numpy does not know"),
        (as_array(dtype=3), "dtype 3"),
        (as_array(shape=[3]), r"float32 \[3\] has 8 bytes; expected 12 bytes"),
        (as_array(shape=[-2]), r"shape \[-2\]; expected at most 8 whole numbers"),
        (as_array(shape=[1] * 9 + [2]), "at most 8 whole numbers"),
        (as_array(shape="x"), "shape 'x'"),
        (as_array(data="text"), "has a str; expected 8 bytes"),
        (msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"}), "expected one number"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}), "300 does not fit its dtype"),
        (msgpack.packb({1: 2}), "is not msgpack"),
        (b"\xc1", "a message of 1 bytes is not msgpack"),
        (b"", "a message of 0 bytes is not msgpack"),
        (b"\x91" * 5000 + b"\x01", "is not msgpack"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, expected: str):
    with pytest.raises(FormatError, match=expected):
        unpack(data)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([object()]), "an array of object cannot be sent"),
        (np.zeros(2, np.complex64), "an array of complex64"),
        ({1, 2}, "a value of the type set cannot be sent"),
        (1 << 70, "a value of the type int cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_refused(value: Any, expected: str):
    with pytest.raises(FormatError, match=expected):
        pack({"x": value})
