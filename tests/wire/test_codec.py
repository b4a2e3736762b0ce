"""Every kind of value there and back; every malformed message refused by one kind
of error, before memory is taken for it."""

from __future__ import annotations

import enum
import gc
import random
import subprocess
import sys
import tracemalloc
import warnings
from collections import OrderedDict
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import FormatError, SchemaError, VersionError
from hilt.wire import codec
from hilt.wire.codec import INLINE_BYTES, MessageLimits, decode, encode
from tests.effort import rounds

STRUCTURED = np.dtype([("x", "<f4", (2, 3)), ("inner", [("y", "u1"), ("when", "<M8[us]")]), ("name", "U3")], align=True)
TITLED = np.dtype({"names": ["a"], "formats": ["<i2"], "titles": ["The first"], "offsets": [3], "itemsize": 9})
DTYPES = [
    *"?bhiqBHIQefdgFDG",
    *("S1", "S7", "U1", "U5", "V1", "V9", "V0", ">f8", ">i2", ">u4", ">c16", ">U2"),
    *("M8", "M8[D]", "<M8[ns]", ">M8[25s]", "m8", "<m8[us]", ">m8[h]"),
    np.dtype([]),
    STRUCTURED,
    TITLED,
    np.dtype([("v", ml_dtypes.bfloat16), ("w", ">f4")]),
    *codec._ML_DTYPES.values(),
    np.dtype(ml_dtypes.bfloat16).newbyteorder(">"),
]
LAYOUTS = {
    "as it is": lambda a: a,
    "fortran": np.asfortranarray,
    "turned": lambda a: a.T,
    "reversed": lambda a: a[::-1] if a.ndim else a,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a,
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape)),
    "read-only": lambda a: np.frombuffer(a.tobytes() or b"\0", np.uint8),
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype) if a.nbytes else a,
}


def same(given: Any, got: Any) -> None:
    """Bit for bit, with types; tuples as lists."""
    if isinstance(given, (dict, list, tuple)):
        assert type(got) is (dict if isinstance(given, dict) else list) and len(got) == len(given)
        if isinstance(given, dict):
            assert list(got) == list(given)
            given, got = list(given.values()), list(got.values())
        for a, b in zip(given, got, strict=True):
            same(a, b)
    elif isinstance(given, np.ndarray):
        assert (
            type(got) is np.ndarray
            and got.dtype == given.dtype
            and got.dtype.str == given.dtype.str
            and got.shape == given.shape
        )
        assert (
            whole(got).tobytes() == whole(given).tobytes()
            and got.flags.c_contiguous
            and got.flags.aligned
            and not got.flags.writeable
        )
    elif isinstance(given, float):
        assert type(got) is float and np.float64(got).tobytes() == np.float64(given).tobytes()
    else:
        assert type(got) is type(given) and got == given


def whole(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """With the gaps between its fields."""
    return array.view(f"V{array.dtype.itemsize}") if array.dtype.names and not array.dtype.hasobject else array


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    size = int(np.prod(shape)) * dtype.itemsize
    seed = draw(st.integers(0, 2**32 - 1))
    array = np.ndarray(shape, dtype, np.random.default_rng(seed).bytes(size))
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    texts,
    st.binary(max_size=2 * INLINE_BYTES),
    arrays(),
)
messages = st.dictionaries(
    texts,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
    ),
)


# --- there and back
# ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=rounds(30, 1000), deadline=None)
@given(messages)
def test_codec_round_trip(message: dict[str, Any]):
    frames = encode(message)
    same(message, decode(frames))
    same(message, decode([zmq.Frame(bytes(frame)) for frame in frames]))
    same(message, decode([memoryview(bytearray(frame)) for frame in frames]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_array_in_every_layout(dtype: Any):
    dtype = np.dtype(dtype)
    for shape in [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (40, 40)]:
        data = np.random.default_rng(0).bytes(int(np.prod(shape)) * dtype.itemsize)
        for layout in LAYOUTS.values():
            array = layout(np.ndarray(shape, dtype, data))
            frames = encode({"a/b": array})
            assert len(frames) == 1 + (array.nbytes > INLINE_BYTES)
            same({"a/b": array}, decode(frames))


def test_scalars_stay_scalars():
    scalars = [
        np.float32(1.5),
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.longdouble(1) / 3,
        np.complex64(1j),
        np.float16(2),
    ]
    scalars += [
        np.datetime64("2024-02-29T01:02:03", "ns"),
        np.timedelta64(5, "h"),
        ml_dtypes.bfloat16(3),
        np.void(b"ab"),
    ]
    got = decode(encode({"scalars": scalars}))["scalars"]
    for a, b in zip(scalars, got, strict=True):
        assert type(b) is type(a) and b.dtype == a.dtype
        assert b == a if a.dtype == np.longdouble else b.tobytes() == a.tobytes()  # x86's has bytes that mean nothing
    record = np.ones(1, STRUCTURED)[0]
    assert decode(encode({"r": record}))["r"] == record


def test_relatives_of_plain_values_arrive_as_those():
    class Color(enum.IntEnum):
        RED = 3

    class Name(str, enum.Enum):
        FIRST = "first"

    class Meters(float):
        pass

    given = {
        "enum": Color.RED,
        "name": Name.FIRST,
        "meters": Meters(1.5),
        "complex": 1 + 2j,
        "text": np.str_("ab\0"),
        "empty": np.str_(""),
        "bytes": np.bytes_(b"ab\0"),
        "array": bytearray(b"x"),
        "view": memoryview(np.arange(3, dtype=np.int16))[::2],
        "ordered": OrderedDict(a=1),
        "proxy": MappingProxyType({"b": 2}),
        "tuple": (1, (2,)),
        Name.FIRST: 0,
    }
    got = decode(encode(MappingProxyType(given)))
    assert got == {
        "enum": 3,
        "name": "first",
        "meters": 1.5,
        "complex": 1 + 2j,
        "text": "ab\0",
        "empty": "",
        "bytes": b"ab\0",
        "array": b"x",
        "view": b"\0\0\2\0",
        "ordered": {"a": 1},
        "proxy": {"b": 2},
        "tuple": [1, [2]],
        "first": 0,
    }
    assert {type(got[key]) for key in ("enum", "name", "meters", "text", "bytes")} == {int, str, float, bytes}
    assert type(next(key for key in got if key == "first")) is str


def test_subclasses_of_arrays_arrive_as_arrays(tmp_path):
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.asmatrix(np.arange(400.0).reshape(20, 20))
    mapped = np.memmap(tmp_path / "m", np.uint8, "w+", shape=(100, 10))
    records = np.rec.array(np.ones(300, STRUCTURED))
    got = decode(encode({"matrix": matrix, "mapped": mapped, "records": records}))
    same({"matrix": np.asarray(matrix), "mapped": np.asarray(mapped), "records": np.ones(300, STRUCTURED)}, got)


def test_large_bytes_have_a_buffer_of_their_own():
    blob = random.Random(0).randbytes(5000)
    frames = encode({"a": blob, "b": bytearray(blob), "c": memoryview(blob)[::5], "d": [blob[:INLINE_BYTES]]})
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [5000, 5000, 1000]
    assert decode(frames) == {"a": blob, "b": blob, "c": blob[::5], "d": [blob[:INLINE_BYTES]]}
    assert decode([frames[0], blob, *frames[2:]])["a"] is blob


def test_codec_round_trip_of_nested_arrays():
    class Wrapped:  # as jax does it
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(300, dtype=ml_dtypes.bfloat16)

    same({"jax": np.arange(300, dtype=ml_dtypes.bfloat16)}, decode(encode({"jax": Wrapped()})))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    weights = torch.arange(600, dtype=torch.float32).reshape(20, 30) / 2  # float8 ends at 448
    given = {
        "float": weights,
        "turned": weights.T,
        "bfloat16": weights.bfloat16(),
        "half": weights.half(),
        "bool": weights > 3,
        "grad": weights.clone().requires_grad_(),
        "scalar": torch.tensor(3),
        "float8": weights.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(weights),
        "conj": torch.complex(weights, weights).conj(),
    }
    frames = encode(given)
    got = decode(frames)
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), weights.numpy())
    for name, tensor in given.items():
        assert got[name].shape == tuple(tensor.shape), name
    same(weights.T.numpy(), got["turned"])
    assert got["bfloat16"].dtype == ml_dtypes.bfloat16 and got["float8"].dtype == ml_dtypes.float8_e4m3fn
    assert np.array_equal(got["bfloat16"].astype(np.float32), weights.bfloat16().float().numpy())
    assert np.array_equal(got["float8"].astype(np.float32), weights.to(torch.float8_e4m3fn).float().numpy())
    assert np.array_equal(got["conj"], given["conj"].resolve_conj().numpy())


def test_torch_is_not_imported_for_it():
    script = (
        "import sys, numpy, hilt.wire.codec as c; c.decode(c.encode({'a': numpy.zeros(999)})); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "False", done.stderr


# --- without copies
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "f4", "<M8[ns]", ">i8", ml_dtypes.bfloat16, STRUCTURED], ids=str)
def test_codec_copies_nothing(dtype: Any):
    array = np.zeros((30, 40), dtype)
    frames = encode({"camera": {"wrist": array}})
    assert np.shares_memory(frames[1], array)
    assert np.shares_memory(decode(frames)["camera"]["wrist"], array)
    frame = zmq.Frame(frames[1], copy=False)
    got = decode([frames[0], frame])["camera"]["wrist"]
    assert np.shares_memory(got, array) and np.shares_memory(got, frame.buffer)
    with pytest.raises(ValueError, match="read-only"):
        got[0] = got[1]
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        got.flags.writeable = True


def test_codec_copies_non_contiguous_arrays_once():
    array = np.zeros((200, 200))
    frames = encode({"part": array[:, ::2]})
    assert not np.shares_memory(frames[1], array)
    assert np.shares_memory(decode(frames)["part"], np.frombuffer(frames[1], np.uint8))


def test_a_view_lives_as_long_as_it_is_needed():
    got = decode([zmq.Frame(bytes(frame)) for frame in encode({"a": np.arange(5000)})])["a"]
    gc.collect()
    assert got.sum() == np.arange(5000).sum()


# --- what cannot be sent
# ----------------------------------------------------------------------------------------------------------

LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP
CAN = "numbers, text, bytes, arrays, lists and dictionaries can be sent. Convert it or leave it out."


class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("deleted\nlong ago")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ([1], "the message: expected a dictionary, got a value of type list."),
        ({1: 2}, "the message: the key 1 is of type int; keys are text. Rename it."),
        ({"a": {"b": {(1, 2): 3}}}, "a/b: the key (1, 2) is of type tuple; keys are text. Rename it."),
        ({"o": {"wrist/left": [0, {"x": object()}]}}, f"o/wrist/left/1/x: a value of type object; {CAN}"),
        ({"o": {1, 2}}, f"o: a value of type set; {CAN}"),
        (
            {"o": np.array([None])},
            "o: an array of Python objects (dtype object) cannot be sent. Convert it to numbers or text.",
        ),
        (
            {"o": np.array([(1, None)], "i4,O")[0]},
            "o: an array of Python objects (dtype [('f0', '<i4'), ('f1', 'O')]) cannot be sent.",
        ),
        ({"n": [2**64]}, "n/0: the number 18446744073709551616 does not fit into 64 bits. Send it as text."),
        ({"n": -(2**63) - 1}, "n: the number -9223372036854775809 does not fit into 64 bits. Send it as text."),
        ({"n": 10**5000}, "n: the number of 16610 bits does not fit into 64 bits. Send it as text."),
        (
            {"s": "a\ud800"},
            "s: the text 'a\\ud800' has a half of a character pair, which no encoding has. Send it as bytes.",
        ),
        ({"\udfff": 0}, "the message: the text '\\udfff' has a half of a character pair, which no encoding has."),
        ({"m": np.ma.zeros(3)}, "m: a masked array would lose its mask. Send its data and its mask as two arrays."),
        (
            {"e": np.zeros((2**21, 0))},
            "e: an array of shape (2097152, 0) has no bytes but more than 1,048,576 elements. Leave it out.",
        ),
        ({"b": Broken()}, "b: a value of type Broken that does not turn into an array (deleted)."),
        (LOOP, "/".join(["again"] * 64) + ": nested deeper than 64 levels. Does it contain itself?"),
        ({"b": b"x" * 500, "x": ["y" * 2**20] * 16}, "the message has 16,777,"),
        ({"x": [0] * 2**18}, "the message has 262,147 values and keys, at most 262,144 can be sent."),
        (
            {"x": [np.zeros(65)] * 16_385},
            "the message has 16,385 arrays of more than 512 bytes, at most 16,384 can be sent. Stack what",
        ),
        ({"d": np.zeros(1, [("x" * 999 + str(i), "u1") for i in range(66)])}, "d: a type of 66,"),
        (
            {"t": np.zeros(1, {"names": ["a"], "formats": ["u1"], "titles": [(1,)]})},
            "t: the field 'a' of dtype [(((1,), 'a'), 'u1')] has a title that is not text. Remove it.",
        ),
    ],
    ids=range(21),
)
def test_codec_names_the_path_of_what_cannot_be_sent(message: Any, text: str):
    with pytest.raises(SchemaError) as error:
        encode(message)
    assert str(error.value).startswith(text)
    assert "\n" not in str(error.value)


def test_the_string_type_of_numpy_2():
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy 1 has no such type")
    with pytest.raises(SchemaError, match=r"^s: an array of Python objects \(dtype StringDType\(\)\) cannot be sent\."):
        encode({"s": np.array(["a"], np.dtypes.StringDType())})


def test_tensors_without_a_counterpart():
    torch = pytest.importorskip("torch")
    with pytest.raises(
        SchemaError, match=r"^w/sparse: this is a Tensor, not a dense tensor or an array\. Leave this field"
    ):
        encode({"w": {"sparse": torch.eye(3).to_sparse()}})
    with (
        warnings.catch_warnings(),
        pytest.raises(SchemaError, match=r"^w: a Tensor of torch.complex32 has no numpy counterpart\."),
    ):
        warnings.simplefilter("ignore")  # torch calls this type an experiment
        encode({"w": torch.zeros(3, dtype=torch.complex32)})


# --- what is refused
# --------------------------------------------------------------------------------------------------------------


def header(body: Any, prefix: bytes = b"HILT\x01") -> bytes:
    return prefix + (body if isinstance(body, bytes) else msgpack.packb(body))


def inline(described: Any, data: bytes = b"", code: int = 2) -> bytes:
    text = described if isinstance(described, bytes) else msgpack.packb(described)
    return header({"a": msgpack.ExtType(code, data + text + len(text).to_bytes(2, "little"))})


def in_buffer(*described: Any) -> bytes:
    return header({"a": msgpack.ExtType(1, msgpack.packb(list(described)))})


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "a message without frames; expected a header and its buffers."),
        ([b""], r"the message begins with b''; expected b'HILT\\x01'. The other side is no Hilt program."),
        ([b"HILT\x01"], "the message begins with b'HILT.x01'; expected"),
        ([b"GET / HTTP/1.1"], "the message begins with b'GET /'; expected"),
        (
            [header({}, b"HILT\x02")],
            "a message of format 2; this program reads format 1. Install the same version of Hilt on both sides.",
        ),
        ([header(5)], "the header holds 5; expected a map."),
        ([header({}), b"", b""], "the message has 2 more buffers than its header names."),
        ([in_buffer("<f4", 2)], "the header names more buffers than the message has."),
        ([in_buffer("<f4", 2), b"1234567"], r"an array of \(2,\) float32 with 7 bytes; expected 8."),
        ([in_buffer("<f4", 2**60), b"1234567"], "an array of .* with 7 bytes; expected 4611686018427387904."),
        ([in_buffer("<f4", *[2**60] * 9), b"1234567"], "with 7 bytes; expected of 543 bits."),
        (
            [in_buffer("|u1", *[1] * 64 + [1]), b"1"],
            "an array described as .*; expected its type and the lengths of its axes.",
        ),
        ([in_buffer("<f8", 0, 2**62), b""], r"an array of shape \(0, 4611686018427387904\) \('array is too big"),
        (
            [in_buffer("<f8", 2**40, 0), b""],
            r"an array of an unknown type or shape \(.its shape is \(1099511627776, 0\).\)",
        ),
        ([in_buffer("|V0", 2**40), b""], "an array of an unknown type or shape"),
        ([in_buffer("<f8", -1), b""], "an array described as .*-1.*; expected its type and the lengths of its axes."),
        ([in_buffer("<f8", True), b""], "expected its type and the lengths of its axes."),
        ([in_buffer("<f8", 1.0), b""], "expected its type and the lengths of its axes."),
        ([in_buffer(), b""], "expected its type and the lengths of its axes."),
        ([in_buffer("|O", 1), b"12345678"], "an array of an unknown type or shape .*no type is named"),
        ([in_buffer("O"), b""], "no type is named"),
        ([in_buffer(""), b""], "no type is named|out of range"),
        ([in_buffer("f4,f4"), b""], "no type is named"),
        ([in_buffer("<f4[ns]"), b""], "an array of an unknown type or shape"),
        ([in_buffer("<M8[1ns]"), b""], "no type is named"),
        ([in_buffer("<M8[xx]"), b""], "an array of an unknown type or shape"),
        ([in_buffer("<f3"), b""], "an array of an unknown type or shape"),
        ([in_buffer("<U4000000000"), b""], "an array of an unknown type or shape"),
        ([in_buffer("<bfloat17"), b""], "no type is named"),
        ([in_buffer(5), b""], "an array of an unknown type or shape"),
        ([in_buffer([]), b""], "an array of an unknown type or shape"),
        ([in_buffer([8, ["x", "<f8", 4, None]]), b""], "an array of an unknown type or shape"),
        ([in_buffer([8, ["x", "|O", 0, None]]), b""], "an array of an unknown type or shape"),
        ([in_buffer([8, ["x", "<f8"]]), b""], "an array of an unknown type or shape"),
        ([in_buffer([8, ["x", "<f4", 0, [-2]]]), b""], "an array of an unknown type or shape"),
        ([in_buffer([8, ["x", "<f4", 0, [2**31, 2**31]]]), b""], "an array of an unknown type or shape"),
        ([in_buffer([0, ["x", "|V0", 0, [2**30]]]), b""], "an array of an unknown type or shape"),
        ([in_buffer([8, ["x", "<f4", 0, None], ["x", "<f4", 4, None]]), b""], "an array of an unknown type or shape"),
        ([in_buffer({"<f4": 0}), b""], "an array of an unknown type or shape"),
        ([in_buffer(msgpack.ExtType(1, b"")), b""], "an array described by another array."),
        ([header({"a": msgpack.ExtType(1, b"\xc1")}), b""], "the header has the byte 0xc1, which msgpack never has."),
        (
            [header({"a": msgpack.ExtType(1, b"x" * 70_000)}), b""],
            "an array described in 70,000 bytes; at most 65,535 are read.",
        ),
        ([header({"a": msgpack.ExtType(4, b"x")}), b""], "the header has a malformed entry for bytes."),
        (
            [header({"a": msgpack.ExtType(2, b"")})],
            "the header is cut off|array described|the header has a malformed array.",
        ),
        ([header({"a": msgpack.ExtType(2, b"\xff\xff")})], "the header has a malformed array."),
        ([inline(["<f4", 2], b"1234567")], r"an array of \(2,\) float32 with 7 bytes; expected 8."),
        ([inline(["<f4", 2], b"12345678", code=3)], r"a scalar of shape \(2,\); expected no axes."),
        ([header({"a": msgpack.ExtType(5, b"")})], "the header has an unknown extension, 5."),
        ([header({"a": msgpack.Timestamp(1)})], "the header has an unknown extension, 255."),
        ([header(b"\xc1")], "the header has the byte 0xc1"),
        ([header({"a": 1}) + b"x"], "the header is cut off or goes on behind its end, 1 bytes off."),
        ([header({"a": 1.0})[:-1]], "the header is cut off or goes on behind its end, 1 bytes off."),
        ([header(b"\xdf\xff\xff\xff\xff")], "the header is cut off"),
        ([header({5: 1})], "the header has a key that is not text."),
        ([header({b"a": 1})], "the header has a key that is not text."),
        ([header(b"\x81\x90\x01")], "the header has a key that is not text."),
        ([header(b"\x81\xa1\xff\x01")], "the header is not readable as msgpack"),
        ([header(b"\x81\xa1a" + b"\x91" * 70 + b"\x01")], "the header is nested deeper than 64 levels."),
        ([header({"a": [0] * 2**18})], "the header has more than 262,144 values."),
        ([b"HILT\x01" + bytes(16 << 20)], "a header of 16,777,221 bytes; at most 16,777,216 are read."),
        ([header({})] + [b""] * 16_385, "a message of 16,385 buffers; at most 16,384 are read."),
    ],
)
def test_a_malformed_message_is_refused(frames: list[bytes], text: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FormatError, match=text) as error:
            decode(frames)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_another_format_is_an_error_of_its_own():
    with pytest.raises(VersionError):
        decode([header({}, b"HILT\x09")])


def test_limits_can_be_lower():
    frames = encode({"a": [1, 2, [3]], "b": np.zeros(100), "c": np.zeros(100)})
    for limits, text in [
        (MessageLimits(header_bytes=20), "a header of .* bytes; at most 20 are read."),
        (MessageLimits(buffers=1), "a message of 2 buffers; at most 1 are read."),
        (MessageLimits(nodes=10), "the header has more than 10 values."),
        (MessageLimits(depth=2), "the header is nested deeper than 2 levels."),
    ]:
        with pytest.raises(FormatError, match=text):
            decode(frames, limits)
    decode(frames, MessageLimits(header_bytes=200, buffers=2, nodes=11, depth=3))


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa1a\xdd\x00\xff\xff\xff" + b"\xc0" * 1000,
        b"\x81\xa1a\xdf\x00\xff\xff\xff" + b"\xc0" * 1000,
        b"\x81\xa1a\xdb\xff\xff\xff\xff" + b"x" * 1000,
        b"\x81\xa1a\xc6\xff\xff\xff\xff" + b"x" * 1000,
        b"\x81\xa1a\xc9\xff\xff\xff\xff\x02" + b"x" * 1000,
        b"\x81\xa1a" + b"\xdd\x00\x01\xff\x00" * 1000 + b"\xc0" * 200_000,  # lists in lists, each with room behind it
        b"\x81\xa1a\x9f" + b"\xdd\x00\x01\xff\x00" * 15 + b"\xc0" * 200_000,
        b"\x81\xa1a\xdc\xff\xff" + b"\x80" * 65_534,
        in_buffer("<f8", 2**60)[5:],
        in_buffer("<U500000000", 1000)[5:],
        in_buffer([2**31 - 1, ["x", "|V2147483647", 0, None]], 2**20)[5:],
        inline(["|u1", 2**40])[5:],
    ],
)
def test_announced_sizes_take_no_memory(body: bytes):
    frames = [b"HILT\x01" + body, b"x" * 1000]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_descriptions_from_outside_are_not_kept_for_ever():
    codec._parse_again.cache_clear()
    for n in range(3000):
        decode([inline(["|u1", n, 0])])
    assert codec._parse_again.cache_info().currsize == 1024
    decode(encode({"wide": np.zeros(9, [(f"x{i}", "u1") for i in range(300)])}))
    assert codec._parse_again.cache_info().misses == 3000, "a long description is not kept"


def test_random_damage_is_refused_or_harmless():
    """Bits, bytes, lengths and frames changed at random: a message comes out, or a `FormatError`, and nothing else."""
    source = random.Random(5)
    dice = np.random.default_rng(5)
    message = {
        "kind": "steps",
        "n": [1, -5, 2**40, 1.5, None, True, b"bytes", "é"],
        "scalar": np.float32(2),
        "when": np.datetime64("2024-01-01"),
        "o": {
            "image": dice.integers(0, 256, (20, 30), np.uint8),
            "state": np.arange(7.0),
            "bf": np.ones(3, ml_dtypes.bfloat16),
        },
        "rec": np.ones(2, STRUCTURED),
        "titled": np.ones(1, TITLED),
        "blob": dice.bytes(600),
        "empty": np.zeros((0, 4)),
    }
    frames = [bytes(frame) for frame in encode(message)]
    whole, refused = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(rounds(3_000, 100_000)):
            changed = list(frames)
            for _ in range(source.choice((1, 1, 2, 4))):
                damage(source, changed)
            try:
                got = decode(changed)
                whole += 1
            except FormatError as error:
                assert "\n" not in str(error)
                refused += 1
                continue
            assert type(got) is dict
    assert whole > rounds(400, 1000) and refused > rounds(400, 1000)


def damage(source: random.Random, frames: list[bytes]) -> None:
    which = 0 if source.random() < 0.9 or len(frames) < 2 else source.randrange(len(frames))
    data = bytearray(frames[which])
    place = source.randrange(5 if source.random() < 0.95 else 0, max(6, len(data)))
    how = source.randrange(8)
    if how == 0:
        data[place : place + 1] = bytes([data[place] ^ (1 << source.randrange(8))]) if place < len(data) else b""
    elif how <= 2:
        data[place : place + 1] = bytes(
            [source.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF, source.randrange(256)))]
        )
    elif how == 3:
        del data[place:]
    elif how == 4:
        del data[place : place + source.randrange(1, 9)]
    elif how == 5:
        data[place:place] = source.randbytes(source.randrange(1, 9))
    elif how == 6:
        start = source.randrange(len(data) + 1)
        data[place:place] = data[start : start + source.randrange(40)]
    elif source.random() < 0.5 and len(frames) > 2:
        del frames[source.randrange(1, len(frames))]
        return
    else:
        frames.insert(source.randrange(len(frames) + 1), bytes(data))
        return
    frames[which] = bytes(data)


def test_frames_of_another_kind():
    assert decode([memoryview(encode({"a": 1})[0]).cast("b")]) == {"a": 1}
    with pytest.raises(TypeError):
        decode([SimpleNamespace()])
