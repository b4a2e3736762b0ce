"""Messages of openpi's protocol: msgpack, where an array is a map of its bytes, dtype and shape.

    data = pack({"state": np.zeros(8, np.float32), "prompt": "pick up the cube"})
    message = unpack(data)

Arrays have whole, floating or truth values. What else numpy could make of a message (objects, records, complex
numbers) is refused, and nothing of a message is ever run.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from hilt.core.errors import FormatError

ARRAY, SCALAR, DATA, DTYPE, SHAPE = b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape"
KINDS = "biuf"
"""Kinds of numbers that may be sent, as numpy abbreviates them"""
MAX_DIMENSIONS = 8
_DTYPE = re.compile(r"[<>|=]?[biuf][1248]")


def pack(message: object) -> bytes:
    """Returns the bytes of a message: nested dictionaries and lists of arrays, numbers and texts."""
    try:
        packed: bytes = msgpack.packb(message, default=_packed)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"this message cannot be sent: {error}. Send arrays, numbers, texts and maps.") from None
    return packed


def unpack(data: bytes) -> object:
    """Returns the message that `pack`, or openpi's client, has made these bytes of. Its arrays cannot be written to."""
    try:
        return msgpack.unpackb(data, object_hook=_unpacked)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0][:200] or type(error).__name__
        raise FormatError(f"a message of {len(data):,} bytes is not msgpack ({reason}); expected one map.") from None


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in KINDS:
        raise FormatError(f"an array of {value.dtype} cannot be sent; expected whole, floating or truth values.")
    if isinstance(value, np.ndarray):
        return {ARRAY: True, DATA: value.tobytes(), DTYPE: value.dtype.str, SHAPE: value.shape}
    if isinstance(value, np.generic):
        return {SCALAR: True, DATA: value.item(), DTYPE: value.dtype.str}
    kind = type(value).__name__
    raise FormatError(f"a value of the type {kind} cannot be sent; expected arrays, numbers, texts and maps of them.")


def _unpacked(found: dict[Any, Any]) -> Any:
    if ARRAY in found:
        return _array(found.get(DATA), _dtype(found.get(DTYPE)), found.get(SHAPE))
    if SCALAR in found:
        value = found.get(DATA)
        if not isinstance(value, int | float):
            raise FormatError(f"a number of numpy has the data {value!r:.60}; expected one number.")
        try:
            return _dtype(found.get(DTYPE)).type(value)
        except OverflowError:
            raise FormatError(f"the number {value!r:.60} does not fit its dtype {found.get(DTYPE)!r}.") from None
    return found


def _dtype(given: Any) -> np.dtype[Any]:
    """Checks the text by a pattern: numpy itself would read records and objects from a text, too."""
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise FormatError(f"an array has the dtype {given!r:.60}; expected whole, floating or truth values, as '<f4'.")
    try:
        return np.dtype(text)
    except TypeError:
        raise FormatError(
            f"an array has the dtype {text!r}, which numpy does not know; expected such as '<f4'."
        ) from None


def _array(data: Any, dtype: np.dtype[Any], shape: Any) -> np.ndarray:
    sizes = shape if isinstance(shape, list | tuple) else None
    if sizes is None or len(sizes) > MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in sizes):
        raise FormatError(f"an array has the shape {shape!r:.60}; expected at most {MAX_DIMENSIONS} whole numbers.")
    if not isinstance(data, bytes) or len(data) != math.prod(sizes) * dtype.itemsize:
        given = f"{len(data):,} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise FormatError(
            f"an array of {dtype} {list(sizes)} has {given}; expected {math.prod(sizes) * dtype.itemsize:,} bytes."
        )
    return np.frombuffer(data, dtype).reshape(sizes)
