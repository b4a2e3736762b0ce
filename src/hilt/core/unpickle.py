"""Reading pickle files without running what they carry.

A pickle is a program for a small stack machine, and Python's own machine lets that program call anything. The one
here can build plain containers and numpy arrays and nothing else: it imports no module, looks up no attribute and
calls only the handful of constructors listed under `_constructors`. A file that asks for more is refused with
`UnsafeError` at the moment it asks. Lengths are checked against the file before memory is taken for them.
"""

from __future__ import annotations

import collections
import functools
import io
import math
import os
import pickle
import re
import struct
from collections.abc import Callable, Hashable, Mapping
from typing import Any, BinaryIO, NoReturn

import numpy as np

from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, UnsafeError

Names = Mapping[tuple[str, str], object]
"""What a caller admits besides: ``(module, name)`` to a function that stands in for it, or to a value."""

PickleError = pickle.PickleError
"""What other restricted loaders raise, torch's for one; the name saves its callers an import of pickle."""

MAX_DEPTH = 100
"""Containers inside containers; deeper than this is an attack on whoever walks the result."""


def safe_load(source: BinaryIO | bytes | bytearray | memoryview, *, where: str, extra: Names | None = None) -> Any:
    """The object in a pickle made of plain containers, numbers, text, bytes and numpy arrays.

    `where` names the file in errors. `extra` maps ``(module, name)`` to a stand-in: a function that is called in place of
    the original with whatever arguments the file gives, so it must check them, or a value that replaces it. Nothing of
    the original module is imported. After one object the file stands behind it, as with `pickle.load`.

    Raises `UnsafeError` when the file asks for anything else, and `CorruptError` when it is cut short or garbled.

    >>> import pickle, numpy as np
    >>> safe_load(pickle.dumps({"actions": np.zeros(2)}), where="demo.pkl")
    {'actions': array([0., 0.])}
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    elif not hasattr(source, "read"):
        raise ConfigError(f"safe_load was given {type(source).__name__}; pass an open binary file or bytes.")
    reader = _Reader(source, where)
    if reader.peek(4) == b"PK\x03\x04":
        raise FormatError(f"{where} is a zip archive, as numpy.savez and torch.save write them, not a pickle. Open it as .npz or .pt.")
    machine = _Machine(reader, where, {**_constructors(where), **(extra or {})})
    try:
        value = machine.run()
        _check(value, machine.admitted, where, 0, {})
    except HiltError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, MemoryError, struct.error) as error:
        reason = str(error) or type(error).__name__
        raise CorruptError(
            f"{where} is not a whole pickle ({reason}, near byte {reader.position}). Copy it again from where it came."
        ) from error
    reader.rewind()
    return value


def dump(value: object, file: BinaryIO) -> None:
    """Write a pickle for a program that reads nothing else. The rest of Hilt writes none."""
    pickle.dump(value, file, protocol=4)


class _Reader:
    """Bytes in order from a file whose end is known, so that no length it declares is believed beyond that end."""

    def __init__(self, file: BinaryIO, where: str):
        if not file.seekable():
            file = io.BytesIO(file.read())
        self._file = file
        self._where = where
        self._start = file.tell()
        self._size = file.seek(0, os.SEEK_END) - self._start
        file.seek(self._start)
        self._chunk = b""
        self._at = 0
        self._read = 0  # bytes taken from the file so far

    @property
    def position(self) -> int:
        return self._read - len(self._chunk) + self._at

    def take(self, count: int) -> bytes:
        """Exactly this many bytes."""
        end = self._at + count
        if end <= len(self._chunk):
            data = self._chunk[self._at : end]
            self._at = end
            return data
        if count > self._size - self.position:
            self._cut(count)
        head = self._chunk[self._at :]
        missing = count - len(head)
        if missing > 1 << 16:  # an array's bytes: straight into one object
            data = self._file.read(missing)
            self._read += len(data)
            self._chunk, self._at = b"", 0
            if len(data) < missing:
                self._cut(count)
            return head + data if head else data
        self._fill(head)
        if len(self._chunk) < count:
            self._cut(count)
        self._at = count
        return self._chunk[:count]

    def peek(self, count: int) -> bytes:
        """The first bytes, still to be taken."""
        if not self._chunk:
            self._fill(b"")
        return self._chunk[:count]

    def line(self) -> bytes:
        """Up to the next newline, without it."""
        while (end := self._chunk.find(b"\n", self._at)) < 0:
            before = len(self._chunk) - self._at
            self._fill(self._chunk[self._at :])
            if len(self._chunk) == before:
                self._cut(1)
        line = self._chunk[self._at : end]
        self._at = end + 1
        return line

    def rewind(self) -> None:
        """Put the file behind what was taken."""
        self._file.seek(self._start + self.position)

    def _fill(self, head: bytes) -> None:
        data = self._file.read(1 << 18)
        self._read += len(data)
        self._chunk, self._at = head + data, 0

    def _cut(self, count: int) -> NoReturn:
        raise CorruptError(
            f"{self._where} ends too early: at byte {self.position} of {self._size} it promises {count} more. It was cut while it was "
            f"written or copied; copy it again from where it came."
        )


class _Name:
    """A global that a pickle mentions: something to call or to pass on, never a Python object of that name."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., object] | None):
        self.name = name
        self.call = call


class _Machine:
    """Pickle's stack machine, for protocols 0 to 5, without the instructions that make objects of arbitrary classes."""

    def __init__(self, reader: _Reader, where: str, names: Names):
        self.admitted: set[type] = set()  # types that came from a caller's stand-ins
        self._reader = reader
        self._where = where
        self._names = names
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each open mark
        self._memo: dict[int, Any] = {}
        self._unset: dict[int, Any] = {}  # arrays and dtypes that have not received their state, by identity

    def run(self) -> Any:
        take, table = self._reader.take, _INSTRUCTIONS
        while True:
            code = take(1)[0]
            if code == _STOP:
                return self._stack.pop()
            instruction = table.get(code)
            if instruction is None:
                raise CorruptError(
                    f"{self._where} is not a pickle, or is damaged: byte {self._reader.position - 1} is {code:#04x}, which is no "
                    f"instruction. Copy it again from where it came."
                )
            instruction(self)

    # Plain values

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._reader.take(size), "little")

    def _int_text(self) -> None:
        text = self._reader.line()
        self._stack.append(text == b"01" if text in (b"00", b"01") else int(text))

    def _int(self, size: int) -> None:
        self._stack.append(int.from_bytes(self._reader.take(size), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._reader.take(8))[0])

    def _bytes(self, size: int) -> None:
        """Bytes whose length stands before them in `size` bytes."""
        self._stack.append(self._reader.take(self._uint(size)))

    def _text(self, size: int) -> None:
        self._stack.append(self._reader.take(self._uint(size)).decode("utf-8", "surrogatepass"))

    # Containers

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _items(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _top(self, kinds: tuple[type, ...], what: str) -> Any:
        if type(self._stack[-1]) not in kinds:
            raise ValueError(f"{what} of a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _close(self, kind: Callable[[list[Any]], object]) -> None:
        items = self._items()  # first, for it changes what the stack is
        self._stack.append(kind(items))

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._items()

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("an empty stack")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _append(self, items: list[Any]) -> None:
        self._top((list, collections.deque), "items").extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top((dict, collections.OrderedDict), "items")
        if len(items) % 2:
            raise ValueError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key, self._where)] = value

    def _dict(self) -> None:
        items = self._items()
        self._stack.append({})
        self._set_items(items)

    def _add_items(self) -> None:
        items = self._items()
        self._top((set,), "items").update(_key(item, self._where) for item in items)

    # The memo

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    # Names, calls and states

    def _global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        if (module, name) not in self._names:
            self.refuse(f"asks for {module}.{name}")
        found = self._names[module, name]
        if isinstance(found, _Name):
            self._stack.append(found)
        elif callable(found):
            self._stack.append(_Name(f"{module}.{name}", self._admit(found)))
        else:
            self.admitted.add(type(found))
            self._stack.append(found)

    def _admit(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            result = function(*arguments)
            self.admitted.add(type(result))
            return result

        return call

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._global(module, name)

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not _Name or type(arguments) is not tuple:
            self.refuse(f"calls a {type(function).__name__}")
        if function.call is None:
            self.refuse(f"calls {function.name}")
        result = function.call(*(self._settle(a) for a in arguments))
        if function.call in (_dtype, _reconstruct):
            self._unset[id(result)] = result
        self._stack.append(result)

    def _settle(self, value: Any) -> Any:
        """A dtype that something was made with keeps the state it has: changing it later would change that thing's memory."""
        if isinstance(value, np.dtype):
            self._unset.pop(id(value), None)
        return value

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, (np.ndarray, np.dtype)) or self._unset.pop(id(target), None) is None or type(state) is not tuple:
            self.refuse(f"sets the state of a {type(target).__name__}")
        if isinstance(target, np.dtype):
            _set_dtype(target, state)
        else:
            for part in state:
                self._settle(part)
            _set_array(target, state)

    def refuse(self, deed: str) -> NoReturn:
        raise UnsafeError(
            f"{self._where} {deed}, which a file of plain containers and numpy arrays does not; it was refused and nothing was run. "
            f"If you made the file yourself, load it with pickle where you made it and save its arrays, for instance with numpy.savez."
        )


def _key(key: Any, where: str, depth: int = 0) -> Hashable:
    """The key, when hashing it is harmless: Python hashes nested tuples by recursion in C, without a limit."""
    if type(key) in (tuple, frozenset):
        if depth == 8:
            raise UnsafeError(f"{where} has a key nested more than 8 deep, which no data needs; it was refused. Give the file a flat key.")
        for part in key:
            _key(part, where, depth + 1)
    elif type(key) not in _PLAIN and not isinstance(key, np.generic):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key  # type: ignore[no-any-return]


def _check(value: Any, admitted: set[type], where: str, depth: int, seen: dict[int, int]) -> None:
    """Refuse whatever is neither plain data nor made by a caller's stand-in, and containers that have no bottom."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth >= MAX_DEPTH:
        raise UnsafeError(f"{where} is nested more than {MAX_DEPTH} deep or contains itself; it was refused. Flatten it before saving.")
    if seen.get(id(value), -1) >= depth:
        return
    seen[id(value)] = depth
    if kind in (dict, collections.OrderedDict):
        parts: Any = value.values()
    elif kind in (list, tuple, set, frozenset, collections.deque):
        parts = value
    elif kind is np.ndarray:
        parts = value.flat if value.dtype.kind == "O" else ()
    elif isinstance(value, (np.generic, np.dtype)) or kind in admitted:
        parts = ()
    else:
        name = value.name if kind is _Name else kind.__name__
        raise UnsafeError(f"{where} holds {name} as a value, which is not data; it was refused. Save arrays, numbers and text only.")
    for part in parts:
        _check(part, admitted, where, depth + 1, seen)


def _constructors(where: str) -> dict[tuple[str, str], _Name]:
    """Everything a pickle may call, by each module path it has had. Each checks its arguments."""
    table: dict[tuple[str, str], _Name] = {}

    def admit(modules: tuple[str, ...], name: str, call: Callable[..., object] | None) -> None:
        for module in modules:
            table[module, name] = _Name(f"{module}.{name}", call)

    def hashable(kind: Callable[..., object]) -> Callable[..., object]:
        return lambda items=(): kind(_key(item, where) for item in _need(items, list, tuple))

    def ordered(items: object = ()) -> object:
        return collections.OrderedDict((_key(key, where), value) for key, value in _need(items, list, tuple))

    def deque(items: object = (), maxlen: object = None) -> object:
        return collections.deque(_need(items, list, tuple), _need(maxlen, int, type(None)))

    admit(("collections",), "OrderedDict", ordered)
    admit(("collections",), "deque", deque)
    admit(("builtins", "__builtin__"), "set", hashable(set))
    admit(("builtins", "__builtin__"), "frozenset", hashable(frozenset))
    admit(("builtins", "__builtin__"), "complex", lambda real, imag: complex(_need(real, float), _need(imag, float)))
    admit(("builtins", "__builtin__"), "bytearray", lambda data=b"", encoding="latin-1": bytearray(_encode(data, encoding)))
    admit(("builtins", "__builtin__"), "bytes", lambda: b"")  # how protocols 0 to 2 spell no bytes
    admit(("_codecs",), "encode", _encode)
    admit(("numpy",), "ndarray", None)
    admit(("numpy",), "dtype", _dtype)
    admit(("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct", _reconstruct)
    admit(("numpy.core.multiarray", "numpy._core.multiarray"), "scalar", _scalar)
    admit(("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer", _frombuffer)
    return table


def _need(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise ValueError(f"a {type(value).__name__} where {kinds[0].__name__} belongs")
    return value


def _encode(data: Any, encoding: str = "latin-1") -> bytes:
    """How protocols 0 to 2 spell bytes. Other codecs compress or look modules up."""
    if isinstance(data, str):
        if encoding not in ("latin1", "latin-1"):
            raise ValueError(f"text encoded as {encoding!r}")
        return data.encode("latin-1")
    return bytes(_need(data, bytes, bytearray))


_DTYPE_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SUV]\d{1,9}|[mM]8|O8?")
_TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")


def _dtype(code: Any, align: Any = False, copy: Any = True) -> Any:
    text = code.decode("ascii") if isinstance(code, bytes) else _need(code, str)
    if not _DTYPE_CODE.fullmatch(text):
        raise ValueError(f"the dtype {text!r}")
    return np.dtype(text, copy=True)


def _set_dtype(dtype: Any, state: tuple[Any, ...]) -> None:
    """Byte order, fields and units, applied as numpy itself would write them: its own loader believes any flag and offset."""
    _, order, base, names, fields, size, _, flags, *metadata = state
    order = order.decode("ascii") if isinstance(order, bytes) else order
    if order not in ("<", ">", "|", "="):
        raise ValueError(f"the byte order {order!r}")
    if dtype.kind != "V" and (base is not None or names is not None):
        raise ValueError(f"fields in {dtype}")
    wanted: Any = dtype
    if base is not None:
        wanted = np.dtype((_part(base[0]), _shape(base[1])))
    elif names is not None:
        parts = [fields[name] for name in names]
        wanted = np.dtype(
            {"names": list(names), "formats": [_part(p[0]) for p in parts], "offsets": [p[1] for p in parts], "itemsize": size},
            align=bool(flags & 0x80),
        )
    elif dtype.kind in "mM" and metadata:
        unit, count = metadata[0][1][:2]
        unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
        if unit != "generic":
            if unit not in _TIME_UNITS or type(count) is not int or count < 1:
                raise ValueError(f"the time unit {count} {unit!r}")
            wanted = np.dtype(f"{dtype.kind}8[{count}{unit}]")
    if order in "<>" and base is None and names is None:
        wanted = wanted.newbyteorder(order)
    if wanted.itemsize != dtype.itemsize:
        raise ValueError(f"a dtype of {wanted.itemsize} bytes announced as {dtype.itemsize}")
    dtype.__setstate__(wanted.__reduce__()[2])


def _part(dtype: Any) -> np.dtype[Any]:
    """A copy, so that nothing the file does later can change it."""
    _item_size(dtype)
    copy: np.dtype[Any] = np.dtype(dtype, copy=True)
    return copy


def _item_size(dtype: Any) -> int:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ValueError("something else where a dtype without objects belongs")
    return dtype.itemsize


def _shape(shape: Any) -> tuple[int, ...]:
    shape = shape if isinstance(shape, tuple) else (shape,)
    if len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"the shape {shape!r}"[:200])
    return shape  # type: ignore[no-any-return]


def _reconstruct(kind: Any, shape: Any, code: Any) -> Any:
    """An array whose contents follow."""
    if type(kind) is not _Name or kind.name != "numpy.ndarray" or shape != (0,):
        raise ValueError("an array of a kind that is not numpy.ndarray")
    return np.empty((0,), np.int8)


def _set_array(array: Any, state: tuple[Any, ...]) -> None:
    _, shape, dtype, fortran, contents = state
    count = math.prod(_shape(shape))
    if not isinstance(dtype, np.dtype) or type(fortran) not in (bool, int):
        raise ValueError("an array without a dtype")
    if dtype.kind == "O":
        if len(_need(contents, list)) != count:
            raise ValueError(f"{len(contents)} objects in an array of {count}")
    else:
        _fit(_need(contents, bytes), dtype, count)
    array.__setstate__((1, shape, dtype, bool(fortran), contents))


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Protocol 5's arrays."""
    count = math.prod(_shape(shape))
    _fit(_need(data, bytes, bytearray), dtype, count)
    flat = np.frombuffer(data, dtype) if count else np.empty((0,), dtype)
    if order == "K" and axes is not None:
        return flat.reshape(shape).transpose(_shape(axes))
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _scalar(dtype: Any, data: Any) -> Any:
    raw = _encode(data)
    if not raw and _item_size(dtype) == 0:
        return dtype.type()
    _fit(raw, dtype, 1)
    return np.frombuffer(raw, dtype)[0]


def _fit(data: bytes | bytearray, dtype: Any, count: int) -> None:
    if len(data) != count * _item_size(dtype) or (count and not dtype.itemsize):
        raise ValueError(f"{len(data)} bytes for {count} elements of {dtype.itemsize}")
    if dtype.kind == "U" and data and np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder)).max() > 0x10FFFF:
        raise ValueError("text of characters that do not exist")


_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[_Machine], object]] = {
    # protocol 0
    ord("("): _Machine._mark,
    ord("0"): _Machine._pop,
    ord("1"): _Machine._items,
    ord("2"): lambda m: m._stack.append(m._stack[-1]),
    ord("N"): lambda m: m._stack.append(None),
    ord("I"): _Machine._int_text,
    ord("L"): lambda m: m._stack.append(int(m._reader.line().removesuffix(b"L"))),
    ord("F"): lambda m: m._stack.append(float(m._reader.line())),
    ord("V"): lambda m: m._stack.append(m._reader.line().decode("raw-unicode-escape")),
    ord("l"): lambda m: m._close(list),
    ord("d"): _Machine._dict,
    ord("t"): lambda m: m._close(tuple),
    ord("a"): lambda m: m._append([m._stack.pop()]),
    ord("s"): lambda m: m._set_items([m._stack.pop(-2), m._stack.pop()]),
    ord("p"): lambda m: m._put(int(m._reader.line())),
    ord("g"): lambda m: m._get(int(m._reader.line())),
    ord("c"): lambda m: m._global(m._reader.line().decode(), m._reader.line().decode()),
    ord("R"): _Machine._reduce,
    ord("b"): _Machine._build,
    # protocol 1
    ord("]"): lambda m: m._stack.append([]),
    ord("}"): lambda m: m._stack.append({}),
    ord(")"): lambda m: m._stack.append(()),
    ord("e"): lambda m: m._append(m._items()),
    ord("u"): lambda m: m._set_items(m._items()),
    ord("K"): lambda m: m._stack.append(m._uint(1)),
    ord("M"): lambda m: m._stack.append(m._uint(2)),
    ord("J"): lambda m: m._int(4),
    ord("G"): _Machine._float,
    ord("X"): lambda m: m._text(4),
    ord("q"): lambda m: m._put(m._uint(1)),
    ord("r"): lambda m: m._put(m._uint(4)),
    ord("h"): lambda m: m._get(m._uint(1)),
    ord("j"): lambda m: m._get(m._uint(4)),
    # protocol 2
    0x80: lambda m: m._reader.take(1),
    0x85: lambda m: m._tuple(1),
    0x86: lambda m: m._tuple(2),
    0x87: lambda m: m._tuple(3),
    0x88: lambda m: m._stack.append(True),
    0x89: lambda m: m._stack.append(False),
    0x8A: lambda m: m._int(m._uint(1)),
    0x8B: lambda m: m._int(m._uint(4)),
    # protocol 3
    ord("C"): lambda m: m._bytes(1),
    ord("B"): lambda m: m._bytes(4),
    # protocol 4
    0x8C: lambda m: m._text(1),
    0x8D: lambda m: m._text(8),
    0x8E: lambda m: m._bytes(8),
    0x8F: lambda m: m._stack.append(set()),
    0x90: _Machine._add_items,
    0x91: lambda m: m._close(lambda items: frozenset(_key(item, m._where) for item in items)),
    0x93: _Machine._stack_global,
    0x94: lambda m: m._put(len(m._memo)),
    0x95: lambda m: m._reader.take(8),  # a frame's length: a hint for buffering
    # protocol 5
    0x96: lambda m: m._stack.append(bytearray(m._reader.take(m._uint(8)))),
    ord("i"): lambda m: m.refuse(f"makes a {m._reader.line().decode()}.{m._reader.line().decode()}"),
}
for _codes, _deed in {
    "o\x81\x92": "makes an object of a class",
    "PQ": "refers to an object outside itself",
    "\x82\x83\x84": "uses the extension registry",
    "\x97\x98": "needs buffers outside itself",
    "STU": "was written by Python 2",  # bytes or text: nobody knows which
}.items():
    _INSTRUCTIONS.update(dict.fromkeys(map(ord, _codes), functools.partial(_Machine.refuse, deed=_deed)))
