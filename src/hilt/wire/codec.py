"""Messages as bytes: nested dictionaries of arrays and plain values to a small header and raw buffers, and back.

    frame 0    b"HILT", the format's number in one byte, then msgpack: a map. Arrays in it are extensions.
    frame 1…   the bytes of the large arrays, in the order in which the header names them, each exactly once.

Nothing is copied on either way but what lies scattered in memory. A message from outside is first
walked through without building anything: no list, text or array is made before the bytes that it
announces are known to be there, and within the limits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, NoReturn, TypeAlias

import ml_dtypes
import msgpack  # type: ignore[import-untyped]
import numpy as np
import zmq

from hilt.core.errors import FormatError, SchemaError, VersionError
from hilt.replay.tensors import is_tensor, raw_array

Buffer: TypeAlias = bytes | memoryview
DType: TypeAlias = np.dtype[Any]

MAGIC = b"HILT"
VERSION = 1
_PREFIX = MAGIC + bytes([VERSION])
INLINE_BYTES = 512
"""Arrays and bytes up to this size lie inside the header: a frame of their own would cost more than their copy."""
_BUFFER, _INLINE, _SCALAR, _BYTES = 1, 2, 3, 4
"""The extensions: array in the next buffer, array inside, numpy scalar inside, bytes in the next buffer."""
_EMPTY_ELEMENTS = 1 << 20
"""Elements without bytes, as in the shape (n, 0), that an array may have: nothing else would limit them."""
_DESCRIPTION_BYTES = 0xFFFF
_CACHED_BYTES = 1024


@dataclass(frozen=True)
class MessageLimits:
    """What a message may have at most; more is refused before memory is taken for it."""

    header_bytes: int = 16 << 20
    buffers: int = 16_384
    nodes: int = 1 << 18
    """Values and keys, counted together."""
    depth: int = 64


DEFAULT_LIMITS = MessageLimits()


def encode(message: Mapping[str, object]) -> list[Buffer]:
    """The header and the buffers of a message. The buffers are the arrays' own
    memory: leave that unchanged until it is sent.

    Values may be None, numbers, text, bytes, lists, dictionaries with text for keys, numpy arrays and scalars of every
    type without Python objects, and whatever turns into such arrays: torch tensors on any device, jax arrays. Raises
    `SchemaError` with the path of a value that cannot be sent. Tuples arrive as lists, torch and jax arrays as numpy's.
    """
    encoder = _Encoder()
    try:
        if not isinstance(message, Mapping):
            _refuse(f"expected a dictionary, got a value of type {type(message).__name__}.")
        plain = encoder.mapping(message, 1)
    except _RefusedError as error:
        raise SchemaError(f"{'/'.join(reversed(error.path)) or 'the message'}: {error.what}") from error.__cause__
    header = _PREFIX + msgpack.packb(plain, strict_types=True)
    buffers = encoder.buffers
    for what, given, most in (
        ("bytes beside its large arrays", len(header), DEFAULT_LIMITS.header_bytes),
        ("arrays of more than 512 bytes", len(buffers), DEFAULT_LIMITS.buffers),
        ("values and keys", encoder.nodes, DEFAULT_LIMITS.nodes),
    ):
        if given > most:
            raise SchemaError(
                f"the message has {given:,} {what}, at most {most:,} can be sent. Stack what "
                "belongs together into arrays."
            )
    return [header, *buffers]


def decode(frames: Sequence[object], limits: MessageLimits = DEFAULT_LIMITS) -> dict[str, object]:
    """The message in these frames (bytes, memoryviews or zmq frames). Arrays are read-only views into them.

    Raises `FormatError` for everything that `encode` does not make, or makes only beyond the limits.
    """
    if not frames:
        raise FormatError("a message without frames; expected a header and its buffers.")
    if len(frames) - 1 > limits.buffers:
        raise FormatError(f"a message of {len(frames) - 1:,} buffers; at most {limits.buffers:,} are read.")
    view = _view(frames[0])
    if view.nbytes > limits.header_bytes:
        raise FormatError(f"a header of {view.nbytes:,} bytes; at most {limits.header_bytes:,} are read.")
    header = frames[0] if isinstance(frames[0], bytes) else bytes(view)
    if header[: len(MAGIC)] != MAGIC or len(header) <= len(_PREFIX):
        raise FormatError(
            f"the message begins with {header[:5]!r}; expected {_PREFIX!r}. The other side is no Hilt program."
        )
    if header[len(MAGIC)] != VERSION:
        given = f"a message of format {header[len(MAGIC)]}; this program reads format {VERSION}"
        raise VersionError(f"{given}. Install the same version of Hilt on both sides.")
    buffers = iter(frames[1:])
    message = _unpack(header, len(_PREFIX), limits, partial(_extension, buffers))
    if not isinstance(message, dict):
        raise FormatError(f"the header holds {_short(message)}; expected a map.")
    left = sum(1 for _ in buffers)
    if left:
        raise FormatError(f"the message has {left:,} more buffers than its header names.")
    return message


# --- encoding
# ---------------------------------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """Something that cannot be sent; it gathers its path on its way up."""

    def __init__(self, what: str):
        self.what = what
        self.path: list[str] = []


def _refuse(what: str) -> NoReturn:
    raise _RefusedError(what)


class _Encoder:
    """One message's walk: each value as msgpack takes it; the large arrays' memory is gathered on the way."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.nodes = 1

    def mapping(self, tree: Mapping[Any, Any], depth: int) -> dict[str, object]:
        self._count(2 * len(tree), depth)
        made = {}
        for key, value in tree.items():
            if type(key) is not str:
                key = _text_key(key)
            if not key.isascii():
                _check_text(key)
            try:
                made[key] = self.value(value, depth)
            except _RefusedError as error:
                error.path.append(key)
                raise
        return made

    def sequence(self, values: Sequence[object], depth: int) -> list[object]:
        self._count(len(values), depth)
        made = []
        for value in values:
            try:
                made.append(self.value(value, depth))
            except _RefusedError as error:
                error.path.append(str(len(made)))
                raise
        return made

    def value(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind is np.ndarray:
            return self._array(value)
        if kind is float or kind is bool or value is None:
            return value
        if kind is int:
            if not -(1 << 63) <= value < 1 << 64:
                _refuse(f"the number {_short(value)} does not fit into 64 bits. Send it as text.")
            return value
        if kind is str:
            if not value.isascii():
                _check_text(value)
            return value
        if kind is dict:
            return self.mapping(value, depth + 1)
        if kind is list or kind is tuple:
            return self.sequence(value, depth + 1)
        return self._other(value, depth)

    def _other(self, value: Any, depth: int) -> Any:
        if isinstance(value, str):  # numpy's too, which as an array would lose zeros at its end
            return self.value(str.__str__(value), depth)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._bytes(value)
        if isinstance(value, (np.generic, complex)):
            array = np.asarray(value)
            return _extension_type(_SCALAR, array.tobytes() + _suffix(array.dtype, ()))
        if isinstance(value, np.ma.MaskedArray):
            _refuse("a masked array would lose its mask. Send its data and its mask as two arrays.")
        if isinstance(value, np.ndarray):
            return self._array(np.asarray(value))
        if isinstance(value, Mapping):
            return self.mapping(value, depth + 1)
        if isinstance(value, (list, tuple)):
            return self.sequence(value, depth + 1)
        if isinstance(value, (int, float)):  # their subclasses, such as members of an IntEnum
            return self.value(int(value) if isinstance(value, int) else float(value), depth)
        return self._array(_as_array(value))

    def _array(self, array: np.ndarray[Any, DType]) -> Any:
        dtype, shape = array.dtype, array.shape
        if dtype.names:  # as a whole: copied by its fields, it would have something else in its gaps
            array = array.view(np.dtype((np.void, dtype.itemsize)))
        if array.nbytes <= INLINE_BYTES:
            return _extension_type(_INLINE, array.tobytes() + _suffix(dtype, shape))
        description = _describe(dtype, shape)
        # ravel copies just what is not in order already; as bytes, for some types have no buffers of their own
        self.buffers.append(array.ravel().view(np.uint8).data)
        return _extension_type(_BUFFER, description)

    def _bytes(self, value: bytes | bytearray | memoryview) -> Any:
        view = memoryview(value)
        if view.nbytes <= INLINE_BYTES:
            return view.tobytes()
        self.buffers.append(view.cast("B") if view.c_contiguous else view.tobytes())
        return _extension_type(_BYTES, b"")

    def _count(self, nodes: int, depth: int) -> None:
        self.nodes += nodes
        if depth > DEFAULT_LIMITS.depth:
            _refuse(f"nested deeper than {DEFAULT_LIMITS.depth} levels. Does it contain itself?")


def _extension_type(code: int, data: bytes) -> msgpack.ExtType:
    return tuple.__new__(msgpack.ExtType, (code, data))  # without its checks, which take longer than all the rest


def _as_array(value: Any) -> np.ndarray[Any, DType]:
    kind = type(value).__name__
    if is_tensor(value):
        try:
            array, name = raw_array(value, "this")
        except SchemaError as error:
            _refuse(str(error))
        except (TypeError, RuntimeError) as error:
            raise _RefusedError(f"a {kind} of {value.dtype} has no numpy counterpart. Convert it.") from error
        if name and name not in _ML_DTYPES:
            _refuse(f"a {kind} of {value.dtype} has no numpy counterpart. Convert it.")
        return array.view(_ML_DTYPES[name]) if name else array
    if not hasattr(type(value), "__array__"):
        _refuse(
            f"a value of type {kind}; numbers, text, bytes, arrays, lists and dictionaries can be sent. "
            "Convert it or leave it out."
        )
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _RefusedError(
            f"a value of type {kind} that does not turn into an array ({str(error).splitlines()[0][:100]})."
        ) from error


def _text_key(key: Any) -> str:
    if not isinstance(key, str):
        _refuse(f"the key {_short(key)} is of type {type(key).__name__}; keys are text. Rename it.")
    return str.__str__(key)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse(f"the text {_short(text)} has a half of a character pair, which no encoding has. Send it as bytes.")


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 128:  # Python itself refuses to write very long ones
        return f"of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- what an array is
# -------------------------------------------------------------------------------------------------------------

_ML_DTYPES: dict[str, DType] = {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
"""bfloat16 and its relatives, which numpy itself does not know by name."""
ML_NAMES = {dtype.type: name for name, dtype in _ML_DTYPES.items()}
_ORDERS = {"=": "<" if sys.byteorder == "little" else ">"}
_PLAIN_TYPE = re.compile(r"[<>|][biufcSUVMm][0-9]{1,10}(\[[0-9]{0,9}[A-Za-z]{1,7}\])?")


@lru_cache(4096)
def _describe(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The type and shape of an array, in msgpack."""
    if _bare_elements(dtype.itemsize, shape) > _EMPTY_ELEMENTS:
        _refuse(f"an array of shape {shape} has no bytes but more than {_EMPTY_ELEMENTS:,} elements. Leave it out.")
    described: bytes = msgpack.packb([_from_dtype(dtype), *shape])
    if len(described) > _DESCRIPTION_BYTES:
        _refuse(
            f"a type of {len(described):,} bytes in words, at most {_DESCRIPTION_BYTES:,} can be sent. "
            "Use fewer or shorter fields."
        )
    return described


@lru_cache(4096)
def _suffix(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """What follows the bytes of an array inside the header: in front of them it would spoil their alignment."""
    described = _describe(dtype, shape)
    return described + len(described).to_bytes(2, "little")


def _from_dtype(dtype: DType) -> Any:
    if dtype.hasobject:
        _refuse(f"an array of Python objects (dtype {dtype}) cannot be sent. Convert it to numbers or text.")
    if dtype.type in ML_NAMES:
        return _ORDERS.get(dtype.byteorder, dtype.byteorder) + ML_NAMES[dtype.type]
    if dtype.names is None or dtype.fields is None:
        if not _PLAIN_TYPE.fullmatch(dtype.str):
            _refuse(f"an array of dtype {dtype} cannot be sent. Convert it to numbers or text.")
        return dtype.str
    fields = []
    for name in dtype.names:
        of, offset, *titles = dtype.fields[name]
        base, shape = of.subdtype or (of, None)
        if any(not isinstance(title, str) for title in titles):
            _refuse(f"the field {name!r} of dtype {dtype} has a title that is not text. Remove it.")
        fields.append([name, _from_dtype(base), offset, shape, *titles])
    return [dtype.itemsize, *fields]


def _to_dtype(described: Any) -> DType:
    if isinstance(described, str):
        if described[1:] in _ML_DTYPES and described[0] in "<>|":
            return _ML_DTYPES[described[1:]].newbyteorder(described[0])  # type: ignore[arg-type]
        dtype = np.dtype(described) if _PLAIN_TYPE.fullmatch(described) else None
        if dtype is None or dtype.str != described:
            raise ValueError(f"no type is named {_short(described)}")
        return dtype
    itemsize, *fields = described
    parts: dict[str, list[Any]] = {"names": [], "formats": [], "offsets": [], "titles": []}
    for name, of, offset, shape, *titles in fields:
        base = _to_dtype(of)
        if shape is not None and (not shape or _bare_elements(base.itemsize, shape) > _EMPTY_ELEMENTS):
            raise ValueError(f"a field of shape {_short(shape)}")
        given = (name, base if shape is None else np.dtype((base, tuple(shape))), offset, titles[0] if titles else None)
        for part, value in zip(parts.values(), given, strict=True):
            part.append(value)
    if not any(parts["titles"]):
        del parts["titles"]
    made: Any = {**parts, "itemsize": itemsize}
    structured: DType = np.dtype(made)
    return structured


def _parse(description: bytes) -> tuple[DType, tuple[int, ...], int]:
    """The type, shape and size in bytes of an array."""
    if len(description) > _DESCRIPTION_BYTES:
        raise FormatError(f"an array described in {len(description):,} bytes; at most {_DESCRIPTION_BYTES:,} are read.")
    given = _unpack(description, 0, DEFAULT_LIMITS, _no_extension)
    if not isinstance(given, list) or not 0 < len(given) <= 65 or any(type(n) is not int or n < 0 for n in given[1:]):
        raise FormatError(f"an array described as {_short(given)}; expected its type and the lengths of its axes.")
    shape = tuple(given[1:])
    try:
        dtype = _to_dtype(given[0])
        if dtype.hasobject or _bare_elements(dtype.itemsize, shape) > _EMPTY_ELEMENTS:
            raise ValueError(f"its shape is {_short(shape)}")
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise FormatError(f"an array of an unknown type or shape ({_short(str(error))}).") from None
    return dtype, shape, dtype.itemsize * prod(shape)


_parse_again = lru_cache(1024)(_parse)


def _bare_elements(itemsize: int, shape: Sequence[int]) -> int:
    """How many elements or empty rows a loop over an array would meet, if no byte of memory stands behind them."""
    if itemsize and 0 not in shape:
        return 0
    return prod(shape[: shape.index(0)] if 0 in shape else shape)


# --- decoding
# ---------------------------------------------------------------------------------------------------------------------


def _view(frame: Any) -> memoryview:
    view = memoryview(frame.buffer if isinstance(frame, zmq.Frame) else frame)
    return (view if view.ndim == 1 and view.format == "B" else view.cast("B")).toreadonly()


def _extension(buffers: Iterator[Any], code: int, data: bytes) -> Any:
    if code in (_BUFFER, _BYTES):
        frame = next(buffers, None)
        if frame is None:
            raise FormatError("the header names more buffers than the message has.")
        view = _view(frame)
        if code == _BYTES:
            if data:
                raise FormatError("the header has a malformed entry for bytes.")
            return frame if isinstance(frame, bytes) else bytes(view)
        return _array(data, view, view.nbytes)
    described = int.from_bytes(data[-2:], "little")
    size = len(data) - 2 - described
    if size < 0:
        raise FormatError("the header has a malformed array.")
    array = _array(data[size:-2], data, size)
    if code == _INLINE:
        return array
    if array.ndim:
        raise FormatError(f"a scalar of shape {array.shape}; expected no axes.")
    return array[()]


def _array(description: bytes, buffer: Buffer, size: int) -> np.ndarray[Any, DType]:
    dtype, shape, needed = (_parse_again if len(description) <= _CACHED_BYTES else _parse)(description)
    if needed != size:
        raise FormatError(f"an array of {_short(shape)} {dtype} with {size:,} bytes; expected {_short(needed)}.")
    try:
        flat = np.frombuffer(buffer, dtype, size // dtype.itemsize) if size else np.ndarray(shape, dtype, b"")
        array = flat.reshape(shape)
    except (ValueError, TypeError) as error:  # too many axes, or sizes beyond all memory beside an axis of length 0
        raise FormatError(f"an array of shape {_short(shape)} ({_short(str(error))}).") from None
    if not array.flags.aligned:  # a small buffer that zmq received amid others
        array = array.copy()
        array.flags.writeable = False
    return array


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise FormatError("an array described by another array.")


def _unpack(data: bytes, start: int, limits: MessageLimits, extension: Any) -> Any:
    _walk(data, start, limits)
    try:
        return msgpack.unpackb(
            memoryview(data)[start:],
            ext_hook=extension,
            strict_map_key=True,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_ext_len=len(data),
            max_array_len=limits.nodes,
            max_map_len=limits.nodes,
        )
    except FormatError:
        raise
    except (ValueError, TypeError) as error:
        raise FormatError(f"the header is not readable as msgpack ({_short(str(error))}).") from None


# For each first byte of a msgpack value, from the table of its specification.
_SIZES = (
    [1] * 0x80
    + [0] * 0x20
    + list(range(1, 33))
    + [1, 0, 1, 1]
    + [0] * 6
    + [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]
    + [0] * 12
    + [1] * 0x20
)
"""The length of the value; 0 if the byte alone does not determine it."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""The number of bytes that hold the length: bytes, text, lists, maps."""
_EXTENSIONS = {
    0xC7: (1, 0),
    0xC8: (2, 0),
    0xC9: (4, 0),
    0xD4: (0, 1),
    0xD5: (0, 2),
    0xD6: (0, 4),
    0xD7: (0, 8),
    0xD8: (0, 16),
}
"""The same for extensions, or how long they are."""
_TEXT = [0xA0 <= byte <= 0xBF or 0xD9 <= byte <= 0xDB for byte in range(256)]


def _walk(data: bytes, start: int, limits: MessageLimits) -> None:
    """Checks that exactly one msgpack value lies here, that all it announces is
    there, and that it is within the limits.

    msgpack itself makes a list of the announced length before it sees an element,
    and so could be made to take any memory.
    """
    at, nodes, left, in_map = start, 1, 1, 0
    outer: list[tuple[int, int]] = []
    try:
        while True:
            while not left and outer:
                left, in_map = outer.pop()
            if not left:
                if at != len(data):
                    raise IndexError
                return
            byte = data[at]
            left -= 1
            if left & in_map and not _TEXT[byte]:
                raise FormatError("the header has a key that is not text.")
            if size := _SIZES[byte]:
                at += size
            elif byte in _EXTENSIONS:
                width, size = _EXTENSIONS[byte]
                code = at + 1 + width
                at = code + 1 + (size or int.from_bytes(data[at + 1 : code], "big"))
                if not _BUFFER <= data[code] <= _BYTES:
                    raise FormatError(f"the header has an unknown extension, {data[code]}.")
            elif byte == 0xC1:
                raise FormatError("the header has the byte 0xc1, which msgpack never has.")
            else:
                width = _LENGTHS.get(byte, 0)
                size = int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else byte & 15
                at += 1 + width
                if 0xC4 <= byte <= 0xDB:
                    at += size
                    continue
                outer.append((left, in_map))
                in_map = int(byte < 0x90 or byte >= 0xDE)
                left = size << in_map
                nodes += left
                if left > len(data) - at:
                    raise IndexError
                if nodes > limits.nodes:
                    raise FormatError(f"the header has more than {limits.nodes:,} values.")
                if len(outer) > limits.depth:
                    raise FormatError(f"the header is nested deeper than {limits.depth} levels.")
    except IndexError:
        raise FormatError(
            f"the header is cut off or goes on behind its end, {abs(len(data) - at):,} bytes off."
        ) from None
