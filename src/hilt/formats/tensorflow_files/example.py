"""tf.train.Example in protobuf's wire format, without protobuf: named lists of bytes, floats or integers.

    Example   1: Features
    Features  1: entries of a map: 1: name, 2: Feature
    Feature   1: list of bytes, 2: list of floats, 3: list of integers

Floats come as arrays on the record's own memory, integers are decoded by a few array operations, bytes are views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hilt.core.errors import CorruptError
from hilt.core.tree import Array

Values = list[memoryview] | Array
"""Of a feature: a list of bytes, or one array of float32 or int64."""

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_SIZES = {_EIGHT: 8, _FOUR: 4}


def decode(data: bytes | memoryview) -> dict[str, Values]:
    """Every feature of a serialized example. One without a list is an empty list of bytes."""
    features: dict[str, Values] = {}
    for features_message in _messages(memoryview(data), 1):
        for entry in _messages(features_message, 1):
            name, feature = b"", memoryview(b"")
            for field, part in _fields(entry):
                if field == 1 and isinstance(part, memoryview):
                    name = bytes(part)
                elif field == 2 and isinstance(part, memoryview):
                    feature = part
            try:
                features[name.decode()] = _values(feature)
            except UnicodeDecodeError:
                raise CorruptError(f"a feature's name is not UTF-8: {name[:40]!r}.") from None
    return features


def encode(features: Mapping[str, Sequence[bytes] | Array]) -> bytes:
    """A serialized example. Arrays of floats become floats of 32 bits, arrays of
    integers and booleans integers of 64."""
    entries = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _encoded(values))) for name, values in features.items()
    )
    return _field(1, entries)


def _encoded(values: Sequence[bytes] | Array) -> bytes:
    if not isinstance(values, np.ndarray):
        return _field(1, b"".join([_field(1, value) for value in values]))
    flat = values.reshape(-1)
    if flat.dtype.kind in "biu":
        return _field(3, _field(1, encode_varints(flat)) if flat.size else b"")
    return _field(2, _field(1, flat.astype("<f4").tobytes()) if flat.size else b"")


def encode_varints(values: Array) -> bytes:
    """Packed integers: seven bits a byte, the lowest first; a negative one takes ten bytes."""
    rest = values.astype(np.int64).view(np.uint64)
    if not (rest >> np.uint64(7)).any():
        return rest.astype(np.uint8).tobytes()
    parts = np.empty((len(rest), 10), np.uint8)
    more = np.empty((len(rest), 10), bool)
    for i in range(10):
        parts[:, i] = rest & np.uint64(127)
        rest = rest >> np.uint64(7)
        more[:, i] = rest > 0
    used = np.concatenate([np.ones((len(rest), 1), bool), more[:, :-1]], axis=1)
    result: bytes = (parts | (more.view(np.uint8) << 7))[used].tobytes()
    return result


def decode_varints(data: memoryview) -> Array:
    """Packed integers as int64. One of more than ten bytes, or cut off, is an error."""
    raw = np.frombuffer(data, np.uint8)
    last = raw < 128
    if last.all():
        return raw.astype(np.int64)
    ends = np.flatnonzero(last)
    if not last[-1]:
        raise CorruptError("a list of integers ends inside one.")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10:
        raise CorruptError("an integer has more than ten bytes.")
    values = (raw[starts] & 127).astype(np.uint64)
    for i in range(1, longest):
        has = np.flatnonzero(lengths > i)
        values[has] |= (raw[starts[has] + i] & 127).astype(np.uint64) << np.uint64(7 * i)
    result: Array = values.view(np.int64)
    return result


def _values(feature: memoryview) -> Values:
    """The list of a feature. As in protobuf, the last kind of list wins and lists of one kind are joined."""
    kind, messages = 0, list[memoryview]()
    for field, part in _fields(feature):
        if field in (1, 2, 3) and isinstance(part, memoryview):
            kind, messages = field, messages if kind == field else []
            messages.append(part)
    parts = [part for message in messages for field, part in _fields(message) if field == 1]
    if kind in (0, 1):
        if not all(isinstance(part, memoryview) for part in parts):
            raise CorruptError("a list of bytes has a number in it.")
        return parts  # type: ignore[return-value]
    if kind == 2:
        arrays = [_floats(part) for part in parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.float32), *arrays])
    arrays = [
        np.array([part], np.uint64).view(np.int64) if isinstance(part, int) else decode_varints(part) for part in parts
    ]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.int64), *arrays])


def _floats(part: memoryview | int) -> Array:
    if isinstance(part, int) or len(part) % 4:
        raise CorruptError("a list of floats is not made of floats.")
    return np.frombuffer(part, "<f4")


def _messages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    """The messages in a message that stand in one field."""
    for field, part in _fields(data):
        if field == wanted and isinstance(part, memoryview):
            yield part


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and content of every field of a message: bytes, or an integer."""
    at, size = 0, len(data)
    while at < size:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            number, at = _varint(data, at)
            yield tag >> 3, number
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in _SIZES:
            length = _SIZES[wire]
        else:
            raise CorruptError(f"not a tf.train.Example: a field of wire type {wire} at byte {at} of {size}.")
        if length > size - at:
            raise CorruptError(f"not a whole tf.train.Example: a field of {length} bytes at byte {at} of {size}.")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """One integer, and where it ends."""
    if at < len(data) and data[at] < 128:
        return data[at], at + 1
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at + i + 1
    raise CorruptError(f"not a whole tf.train.Example: an integer at byte {at} of {len(data)} has no end.")


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes with its tag and length."""
    length, head = len(content), bytearray([number << 3 | _BYTES])
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + content
