"""Reading pickle files without running what they carry.

A pickle is a program for a small stack machine. Python's own machine, in C, runs it
here, but it is given little to work with:

* `_prepare` reads the instructions first and refuses those that make objects of classes or reach outside the file.
* Every name leads to a `_Name` of our own, which checks what it is called with. Nothing is imported or looked up.
* What a file could still change after its making is in a `_Box` until all is read: numpy and torch believe any state
  that they are given, and a dict hashes any key, which for nested tuples takes unbounded time and stack.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, UnsafeError

PickleError = pickle.PickleError
"""What other restricted loaders raise, torch's for one; the name saves its callers an import of pickle."""

MAX_DEPTH = 100
"""The maximum depth of nested containers; a deeper file would exhaust the stack of code that walks the result."""

_DAMAGE = (
    PickleError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    BufferError,
    MemoryError,
)
_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray}


def safe_load(source: BinaryIO | bytes, *, where: str, extra: Mapping[tuple[str, str], object] | None = None) -> Any:
    """The object in a pickle made of dicts, lists, tuples, numbers, text, bytes and numpy arrays.

    `where` names the file in errors. `extra` maps ``(module, name)`` to a stand-in: a function that is called in place
    of the original with whatever arguments the file gives, so it must check them, or a value that replaces it. Nothing
    of the original module is imported. After one object the file stands behind it, as with `pickle.load`.

    Raises `UnsafeError` when the file asks for anything else, and `CorruptError` when it is cut short or garbled.

    >>> import pickle, numpy as np
    >>> safe_load(pickle.dumps({"actions": np.zeros(2)}), where="demo.pkl")
    {'actions': array([0., 0.])}
    """
    if not isinstance(source, bytes) and not hasattr(source, "read"):
        raise ConfigError(f"safe_load was given {type(source).__name__}; pass an open binary file or bytes.")
    file = io.BytesIO(source if isinstance(source, bytes) else source.read())
    if bytes(file.getbuffer()[:4]) == b"PK\x03\x04":
        raise FormatError(
            f"{where} is a zip archive, as numpy.savez and torch.save write them, not a pickle. Open it as .npz or .pt."
        )
    try:
        with file.getbuffer() as data:
            unread, dicts = _prepare(data)
        machine = _Machine(io.BufferedReader(file), buffers=dicts)
        machine.names = {**_NAMES, **{key: _admitted(".".join(key), found) for key, found in (extra or {}).items()}}
        value, _ = _opened(machine.load(), 0, {})
    except HiltError:
        raise  # of a caller's stand-in
    except _Refused as deed:
        raise UnsafeError(
            f"{where} {deed}, which a file of plain containers and numpy arrays does not; it was "
            "refused and nothing was run. If you made the file yourself, load it with pickle where you made it "
            "and save its arrays, for instance with numpy.savez."
        ) from None
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise CorruptError(f"{where} is not a whole pickle ({reason}). Copy it again from where it came.") from error
    if not isinstance(source, bytes) and source.seekable():
        source.seek(-unread, io.SEEK_CUR)
    return value


def dump(value: object, file: BinaryIO) -> None:
    """Write a pickle for a program that reads nothing else. The rest of Hilt writes none."""
    pickle.dump(value, file, protocol=4)


# Instructions whose arguments have a fixed size or end with a line. A memo number
# of 2**20 costs the machine 16 MB; see below.
_SIMPLE = re.compile(
    rb"(?s:[(012NRabelstu\])\x85-\x89\x93\x94]+|[Khq].|C\x01.|M..|[Jj].{4}|r..[\0-\x0f]\0|[G\x95].{8}"
    rb"|c[^\n]*\n[^\n]*\n){0,1000}"
)
# bytes of the length before the contents
_SIZED = {0x42: 4, 0x43: 1, 0x58: 4, 0x8A: 1, 0x8B: 4, 0x8C: 1, 0x8D: 8, 0x8E: 8, 0x96: 8}
_REFUSED = b"PQSTUdio\x81\x82\x83\x84\x8f\x90\x91\x92\x97\x98"
_PROTO, _EMPTY_DICT, _LONG_BINPUT, _STOP, _NEXT_BUFFER = b"\x80}r.\x97"


class _Refused(Exception):
    """Raised when a file wants something that data does not need; the text says what."""


def _prepare(data: memoryview) -> tuple[int, list[Any]]:
    """Check the instructions of the first object. Returns how many bytes are behind it, and the dicts that it makes.

    Those are ours and not the machine's, which would hash any key: each instruction that makes one is changed into the
    one that takes the next "outside buffer", which may be any object.
    """
    at, dicts = 2, []
    if not data or data[0] != _PROTO:
        raise ValueError("it does not begin as pickles of protocol 2 or later do")
    while True:
        start, at = at, _SIMPLE.match(data, at).end()  # type: ignore[union-attr]
        code = data[at] if at < len(data) else -1
        if code in _SIZED:
            size = int.from_bytes(data[at + 1 : at + 1 + _SIZED[code]], "little")
            if at + size >= len(data):
                raise ValueError(f"at byte {at} of {len(data)} it promises {size} more")
            at += 1 + _SIZED[code] + size
        elif code == _EMPTY_DICT:
            dicts.append(_Dict({}))
            data[at] = _NEXT_BUFFER
            at += 1
        elif code == _STOP:
            return len(data) - at - 1, dicts
        elif code == _LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") < at:
            # else the memo outgrows the file
            at += 5
        elif code >= 0 and code in _REFUSED:
            raise _Refused(f"has the instruction {code:#04x} at byte {at}")
        elif at == start:
            raise ValueError(f"no whole instruction at byte {at} of {len(data)}")


class _Machine(pickle.Unpickler):
    names: dict[tuple[str, str], _Box]

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in self.names:
            raise _Refused(f"asks for {module}.{name}")
        return self.names[module, name]


class _Box:
    """Something that a file may pass on but not change."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any):
        self.value = value

    def __setstate__(self, state: Any) -> None:
        raise _Refused(f"sets the state of a {type(self.value).__name__}")


class _Name(_Box):
    """A name that a file may mention and call. A bare function will not do: a file could give it other defaults."""

    __slots__ = ("call",)

    def __init__(self, name: str, call: Callable[..., object] | None):
        self.value, self.call = name, call

    def __call__(self, *arguments: object) -> object:
        if self.call is None:
            raise _Refused(f"calls {self.value}")
        return self.call(*arguments)


class _Dict(_Box):
    """A dict whose keys are plain values or tuples of these."""

    __slots__ = ()

    def __setitem__(self, key: Any, item: Any) -> None:
        if type(key) is not str:
            for part in key if type(key) is tuple else (key,):
                if type(part) not in _PLAIN and not isinstance(part, np.generic):
                    raise _Refused(f"has a key with a {type(part).__name__} in it")
        self.value[key] = item


class _Dtype(_Box):
    """A numpy dtype without fields; its state has the byte order, and the unit of a time."""

    __slots__ = ()

    def __init__(self, code: Any, align: Any, copy: Any):
        if not re.fullmatch(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU]\d{1,9}|[mM]8|O8?", code):
            raise _Refused(f"has values of dtype {code}")
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if self.value.kind in "mM" and len(state) > 8:
            unit, count = state[8][1][0].decode("ascii"), state[8][1][1]
            if not unit.isalpha() or count < 1:
                raise ValueError(f"the unit of a time {unit!r}")
            self.value = np.dtype(
                f"{self.value.kind}8[generic]" if unit == "generic" else f"{self.value.kind}8[{count:d}{unit}]"
            )
        self.value = self.value.newbyteorder(state[1])


class _Array(_Box):
    """A numpy array whose contents follow in its state; one of objects is made when they are opened."""

    __slots__ = ()

    def __init__(self, kind: Any, shape: Any, code: Any):
        if kind is not _NDARRAY:
            raise ValueError("an array of another class")
        self.value = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, contents = state
        if dtype.value.kind == "O":
            if type(contents) is not list or np.empty(len(contents), np.int8).reshape(shape).shape != shape:
                raise ValueError("an array of objects without them")
            self.value = 1, shape, dtype.value, bool(fortran), contents
        else:
            _array(contents, dtype, shape, bool(fortran))
            self.value = np.empty(0, np.int8)
            self.value.__setstate__((1, shape, dtype.value, bool(fortran), contents))


def _array(contents: Any, dtype: Any, shape: Any, fortran: bool = False) -> np.ndarray[Any, Any]:
    """An array on these bytes, by the constructor that checks shape and size; what
    numpy loads pickles with checks little."""
    if type(dtype) is not _Dtype or dtype.value.kind == "O" or type(contents) not in (bytes, bytearray):
        raise ValueError("an array without a dtype or bytes")
    array = np.ndarray(shape, dtype.value, contents, order="F" if fortran else "C")
    if array.shape != shape or array.nbytes != len(contents) or (array.size > 1 and not array.itemsize):
        raise ValueError(f"{len(contents)} bytes for {array.size} elements of {array.itemsize}")
    if array.dtype.kind == "U" and contents and np.frombuffer(contents, array.dtype.byteorder + "u4").max() > 0x10FFFF:
        raise ValueError("text of characters that do not exist")
    return array


def _from_buffer(contents: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> _Box:
    array = _array(contents, dtype, shape, order == "F")
    return _Box(array if axes is None else array.transpose(axes))


def _encode(text: Any = b"", encoding: str = "latin1") -> bytes:
    """Bytes as protocols 0 to 2 store them. Other codecs are refused: they compress, or import modules."""
    if type(text) is bytes:
        return text
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"a {type(text).__name__} encoded as {encoding!r}")
    return text.encode("latin1")


def _admitted(name: str, found: object) -> _Box:
    """What a caller admits. What a function makes is boxed, so the file cannot change it."""
    return (
        _Name(name, lambda *arguments: _Box(found(*_opened(arguments, 0, {})[0]))) if callable(found) else _Box(found)
    )


def _opened(value: Any, depth: int, seen: dict[int, tuple[Any, Any, int]]) -> tuple[Any, int]:
    """A value without its boxes, and how many containers deep it is. `seen` has the
    same for each container, and keeps it alive."""
    kind, result = type(value), value.value if isinstance(value, _Box) else value
    if kind is _Name:
        raise _Refused(f"holds {result} as a value")
    if kind is _Array and type(result) is tuple:
        *state, result = result  # of an array of objects
    elif kind not in (_Dict, list, tuple):
        return result, 0
    opened: Any
    _, opened, height = seen.get(id(value), (value, None, 0))
    if depth + height >= MAX_DEPTH:
        raise _Refused(f"is nested more than {MAX_DEPTH} deep or contains itself")
    if height:
        return opened, height
    seen[id(value)] = value, None, MAX_DEPTH  # a reference back to it while it is being opened counts as too deep
    opened = result if kind in (_Dict, list) else list(result)
    for key, item in opened.items() if kind is _Dict else enumerate(opened):
        if type(item) not in _PLAIN:
            opened[key], below = _opened(item, depth + 1, seen)
            height = max(height, below)
    if kind is tuple:
        opened = tuple(opened)
    elif kind is _Array:
        items, opened = opened, np.empty(0, object)
        opened.__setstate__((*state, items))
    seen[id(value)] = value, opened, height + 1
    return opened, height + 1


_NDARRAY = _Name("numpy.ndarray", None)
_NAMES: Mapping[tuple[str, str], _Box] = {
    (module, name): _Name(f"{module}.{name}", call)
    for modules, name, call in (
        ("collections", "OrderedDict", lambda: _Dict(OrderedDict())),
        ("builtins __builtin__", "complex", complex),
        ("builtins __builtin__", "bytearray", lambda *text: bytearray(_encode(*text))),
        ("builtins __builtin__", "bytes", lambda: b""),  # how protocols 0 to 2 spell no bytes
        ("_codecs", "encode", _encode),
        ("numpy", "dtype", _Dtype),
        ("numpy.core.multiarray numpy._core.multiarray", "_reconstruct", _Array),
        # A scalar gets bytes of its own: a file could write to what shares the file's.
        (
            "numpy.core.multiarray numpy._core.multiarray",
            "scalar",
            lambda dtype, data: _array(bytearray(_encode(data)), dtype, ())[()],
        ),
        ("numpy.core.numeric numpy._core.numeric", "_frombuffer", _from_buffer),
    )
    for module in modules.split()
} | {("numpy", "ndarray"): _NDARRAY}
