"""A pickle is read, never run."""

from __future__ import annotations

import builtins
import collections
import contextlib
import io
import operator
import os
import pickle
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, UnsafeError
from hilt.core.unpickle import MAX_DEPTH, dump, safe_load
from tests.effort import rounds

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def load(data: bytes, **options: Any) -> Any:
    return safe_load(data, where="demo.pkl", **options)


def transition() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    observation = {
        "state": rng.standard_normal((1, 19)).astype(np.float32),
        "wrist": rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8),
    }
    return {
        "observations": observation,
        "next_observations": {k: v[::-1].copy() for k, v in observation.items()},
        "actions": rng.standard_normal(7),
        "rewards": np.float32(1.0),
        "masks": 0.0,
        "dones": np.bool_(True),
        "infos": {
            "succeed": True,
            "left": False,
            "grasp_penalty": -0.02,
            "episode": {"r": np.array([1.0], np.float32)},
        },
    }


SHARED = {"state": np.ones(2)}
DATA = {
    "transition": transition(),
    "plain": [
        None,
        True,
        False,
        0,
        -1,
        255,
        65535,
        2**40,
        -(2**90),
        1.5,
        float("inf"),
        "text",
        "héé\n",
        b"",
        b"\x00\xff" * 200,
    ],
    "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {"a": {}}, {(0, "x"): 1, None: 2, 3: [], b"y": ()}, [[]]],
    "shared": [SHARED, [SHARED, (SHARED,)], {"again": SHARED}],
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "complex": 2 + 3j,
    "bytearray": bytearray(b"abc"),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "empty": np.zeros((0, 3), np.float16),
    "zero_dim": np.array(3),
    "large": np.arange(100_000),
    "big_endian": np.arange(4, dtype=">i4"),
    "text": np.array(["ab", "c"]),
    "bytes": np.array([b"ab", b"c"]),
    "times": np.array(["2026-01-01"], dtype="M8[25s]"),
    "time": np.timedelta64(3, "ms"),
    "objects": np.array([{"a": np.ones(2)}, None, "x", [1, 2], np.array(5), (np.ones(1),)], dtype=object),
    "object table": np.asfortranarray(np.array([[None, "a", 1], [2.0, {}, b""]], dtype=object)),
    "no objects": np.array([], dtype=object),
    "scalars": [
        np.float64(1),
        np.int8(-1),
        np.uint64(2**63),
        np.str_("é"),
        np.str_(""),
        np.bytes_(b"x"),
        np.complex64(1j),
        np.datetime64("2026", "Y"),
    ],
    "dtypes": [np.dtype("<f4"), np.dtype(">u2"), np.dtype("U5"), np.dtype("M8[ms]"), np.dtype("m8")],
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", DATA)
def test_data_is_what_pickle_itself_gives(name: str, protocol: int) -> None:
    data = pickle.dumps(DATA[name], protocol)
    same(load(data), pickle.loads(data))


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape, ours.strides, ours.flags.writeable) == (
            theirs.dtype,
            theirs.shape,
            theirs.strides,
            theirs.flags.writeable,
        )
        for a, b in zip(ours.flat, theirs.flat, strict=True):
            assert type(a) is type(b)
            same(a, b) if isinstance(b, (dict, np.ndarray)) else None
        assert theirs.dtype.kind == "O" or ours.tobytes() == theirs.tobytes()
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    else:
        assert ours == theirs


@pytest.mark.parametrize("protocol", (2, 4, 5))
def test_arrays_of_numpy_1_and_numpy_2_are_the_same(protocol: int) -> None:
    data = pickle.dumps({"a": np.arange(3), "b": np.float32(2)}, protocol)
    old, new = b"numpy.core.", b"numpy._core."
    for text, other in ((new, old), (old, new)):
        same(load(_rename(data, text, other)), load(data))


def _rename(data: bytes, old: bytes, new: bytes) -> bytes:
    """The module path of another numpy, with the length before it put right."""
    out = io.BytesIO()
    rest = data
    while (at := rest.find(old)) >= 0:
        head, rest = rest[:at], rest[at + len(old) :]
        if head[-2:-1] == b"\x8c":  # a short text: one byte of length before it
            head = head[:-1] + bytes([head[-1] + len(new) - len(old)])
        out.write(head + new)
    out.write(rest)
    renamed = bytearray(out.getvalue())
    if renamed[2] == 0x95:  # a frame, with its length
        renamed[3:11] = struct.pack("<Q", len(renamed) - 11)
    return bytes(renamed)


def test_a_file_is_read_once_and_left_behind_the_object(tmp_path: Path) -> None:
    path = tmp_path / "two.pkl"
    path.write_bytes(b"head" + pickle.dumps(np.arange(50_000)) + pickle.dumps("second", 2))
    with path.open("rb") as file:
        file.seek(4)
        assert load_file(file).shape == (50_000,)
        assert load_file(file) == "second"
        assert file.read() == b""


def load_file(file: Any) -> Any:
    return safe_load(file, where="two.pkl")


def test_a_stream_without_seek_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as out:
        out.write(pickle.dumps([1, 2]))
    with os.fdopen(reading, "rb") as file:
        assert load_file(file) == [1, 2]


def test_dump_writes_an_ordinary_pickle() -> None:
    file = io.BytesIO()
    dump(DATA["transition"], file)
    same(load(file.getvalue()), DATA["transition"])
    same(pickle.loads(file.getvalue()), DATA["transition"])


def test_a_path_is_not_a_file() -> None:
    with pytest.raises(ConfigError, match="pass an open binary file or bytes"):
        safe_load("demo.pkl", where="demo.pkl")  # type: ignore[arg-type]


# Hostile files. Each would leave a file behind if it ran.


class Call:
    def __init__(self, function: Any, *arguments: Any):
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def attacks(sentinel: Path) -> dict[str, Any]:
    touch = f"touch {sentinel}"
    code = f"open({str(sentinel)!r}, 'w')"
    return {
        "os.system": Call(os.system, touch),
        "subprocess": Call(subprocess.Popen, ["touch", str(sentinel)]),
        "eval": Call(eval, code),
        "exec": Call(exec, code),
        "open": Call(open, str(sentinel), "w"),
        "import": Call(__import__, "os"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "getattr of numpy": Call(getattr, np.dtype("f4"), "__class__"),
        "attrgetter": Call(operator.attrgetter, "system"),
        "map": Call(list, Call(map, eval, [code])),
        "inside a list": [1, {"a": (Call(os.system, touch),)}],
        "inside an object array": np.array([1, Call(os.system, touch)], dtype=object),
        "as a key": {Call(os.system, touch): 1},
        "a class": Path("x"),
        "a class of ours": Call(Call, os.system),
        "a function as a value": {"f": os.system},
        "a type as a value": {"f": np.float32},
        "numpy's own loader": Call(np.load, str(sentinel)),
        "a subclass of ndarray": np.ma.array([1]),
        "a generator": np.random.default_rng(0),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", list(attacks(Path("/"))))
def test_unpickle_executes_nothing(name: str, protocol: int, tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    data = pickle.dumps(attacks(sentinel)[name], protocol)
    with pytest.raises(UnsafeError, match=r"^demo.pkl .*(refused)"):
        load(data)
    assert not sentinel.exists()


def test_the_refusal_names_what_was_asked_for_and_the_file_and_the_cure() -> None:
    with pytest.raises(
        UnsafeError,
        match=r"demo.pkl asks for posix.system, .* nothing was run. If you made the file yourself, load it with pickle",
    ):
        load(pickle.dumps(Call(os.system, "true")))


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


MULTIARRAY = "numpy._core.multiarray"
ARRAY = name(MULTIARRAY, "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"


def state(shape: bytes, dtype: bytes, contents: bytes) -> bytes:
    return b"(K\x01" + shape + dtype + b"\x89" + contents + b"tb"


def dtype(code: str, tail: bytes = b"") -> bytes:
    return name("numpy", "dtype") + text(code) + b"\x89\x88\x87R" + tail


def plain_state(order: bytes = b"<", rest: bytes = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00") -> bytes:
    return b"(K\x03" + text(order.decode()) + rest + b"tb"


HANDMADE = {
    "a dotted name": name("numpy", "f2py.diagnose.os.system") + b".",
    "a module inside another": name("numpy.core.multiarray.os", "system") + b".",
    "the array class itself": name("numpy", "ndarray") + b"K\x05\x85\x85R.",
    "the array class by NEWOBJ": name("numpy", "ndarray") + b")\x81.",
    "NEWOBJ_EX": name("numpy", "ndarray") + b")}\x92.",
    "OBJ": b"(" + name("collections", "OrderedDict") + b"o.",
    "INST": b"(" + text("true") + b"ios\nsystem\n.",
    "the state of a name": name("numpy", "dtype") + b"}" + text("call") + b"Nsb.",
    "the slots of a name": name("numpy", "dtype") + b"N}" + text("call") + b"Ns\x86b.",
    "the state of a dict": b"}}" + text("a") + b"K\x01sb.",
    "the state of an ordered dict": name("collections", "OrderedDict") + b")R}" + text("keys") + b"K\x01sb.",
    "a name as a value": b"]" + name("numpy", "ndarray") + b"a.",
    "a persistent id": b"K\x01Q.",
    "a persistent id in text": b"P1\n.",
    "an extension": b"\x82\x01.",
    "an outside buffer": b"\x97.",
    "a Python 2 string": b"U\x01a.",
    "a set": b"\x8f.",
    "a frozenset": b"(K\x01\x91.",
    "a dict of the machine's own": b"(d.",
    "a record": dtype("V8") + b".",
    "objects hidden in a record": dtype("f4,O") + b".",
}


@pytest.mark.parametrize("case", HANDMADE)
def test_handmade_attacks_are_refused(case: str) -> None:
    with pytest.raises(UnsafeError, match="refused"):
        load(b"\x80\x04" + HANDMADE[case])


GARBLED = {
    "objects called numbers": ARRAY + state(b"K\x01\x85", dtype("O8", plain_state(b"|")), b"C\x08" + bytes(8)) + b".",
    "more elements than bytes": ARRAY
    + state(b"J\xff\xff\xff\x7f\x85", dtype("f8", plain_state()), b"C\x08" + bytes(8))
    + b".",
    "fewer elements than bytes": ARRAY + state(b"K\x01\x85", dtype("i1", plain_state(b"|")), b"C\x02ab") + b".",
    "a negative length": ARRAY + state(b"J\xff\xff\xff\xff\x85", dtype("i1", plain_state(b"|")), b"C\x00") + b".",
    "elements of no bytes": ARRAY + state(b"J\xff\xff\xff\x7f\x85", dtype("S0"), b"C\x00") + b".",
    "an array without its contents": ARRAY + b".",
    "fewer objects than elements": ARRAY + state(b"K\x02\x85", dtype("O8", plain_state(b"|")), b"]Na") + b".",
    "objects of a negative number": ARRAY
    + state(b"J\xff\xff\xff\xff\x85", dtype("O8", plain_state(b"|")), b"]Na")
    + b".",
    "a unit that is more than a unit": dtype(
        "M8", b"(K\x04" + text("<") + b"NNNK\x00K\x00K\x00}(C\x05s],O8K\x01K\x01K\x01t\x86tb"
    )
    + b".",
    "the state of a list": b"]}b.",
    "the slots of a list": b"]N}" + text("append") + b"Ns\x86b.",
    "a call of a call": name("collections", "OrderedDict") + b")R)R.",
    "an ordered dict of pairs": name("collections", "OrderedDict") + b"]\x85R.",
    "a huge empty array": name(MULTIARRAY, "_reconstruct")
    + name("numpy", "ndarray")
    + b"J\xff\xff\xff\x7f\x85C\x01d\x87R.",
    "another class of array": name(MULTIARRAY, "_reconstruct") + name("numpy", "dtype") + b"K\x00\x85C\x01b\x87R.",
    "an object scalar": name(MULTIARRAY, "scalar") + dtype("O8", plain_state(b"|")) + b"C\x08" + bytes(8) + b"\x86R.",
    "a strange byte order": dtype("f4", plain_state(b"!")) + b".",
    "a bytearray by its length": name("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R.",
    "a bytes by its length": name("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R.",
    "a codec that looks up modules": name("_codecs", "encode") + text("x") + text("idna") + b"\x86R.",
    "a codec that inflates": name("_codecs", "encode") + text("x") + text("zip") + b"\x86R.",
    "a memo that is not there": b"h\x07.",
    "an empty stack": b"R.",
    "nothing at all": b".",
    "a mark that is not there": b"t.",
    "a key without a value": b"}(K\x01u.",
    "items of a number": b"K\x01K\x02a.",
    "a text scalar that is not text": name(MULTIARRAY, "scalar")
    + dtype("U1", plain_state())
    + b"C\x04\xff\xff\xff\xff\x86R.",
    "a text array that is not text": ARRAY
    + state(b"K\x01\x85", dtype("U1", plain_state()), b"C\x04\xff\xff\xff\xff")
    + b".",
    "text that is not text": b"\x8c\x02\xff\xff.",
    "an instruction of protocol 0": b"I1\n.",
}


@pytest.mark.parametrize("case", GARBLED)
def test_garbled_pickles_are_corrupt(case: str) -> None:
    with pytest.raises(CorruptError, match=r"^demo.pkl is not a whole pickle .*Copy it again"):
        load(b"\x80\x04" + GARBLED[case])


@pytest.mark.parametrize("data", [b"", b"hello world", bytes(100), pickle.dumps([1], 0), pickle.dumps([1], 1)])
def test_unpickle_refuses_other_files(data: bytes) -> None:
    with pytest.raises(
        CorruptError,
        match=r"^demo\.pkl is not a whole pickle \(it does not begin as pickles of protocol 2 or later do\)",
    ):
        load(data)


def test_a_state_set_later_changes_nothing_that_was_made() -> None:
    number = dtype("i4", plain_state())
    twice = (
        ARRAY
        + state(b"K\x02\x85", dtype("i1", plain_state(b"|")), b"C\x02ab")
        + state(b"K\x01\x85", number, b"C\x04\x01\0\0\0")
    )
    same(load(b"\x80\x04" + twice + b"."), np.array([1], np.int32))
    array = ARRAY + b"(K\x01K\x01\x85" + number + b"\x94\x89C\x04\x01\0\0\0tb"
    changed = load(b"\x80\x04]" + array + b"ah\0" + plain_state(b">") + b"a.")
    same(changed, [np.array([1], np.int32), np.dtype(">i4")])


def test_a_zip_archive_is_named_as_one() -> None:
    with pytest.raises(FormatError, match=r"demo.pkl is a zip archive, .* Open it as .npz or .pt"):
        load(b"PK\x03\x04" + bytes(50))


def test_a_cut_file_is_corrupt_wherever_it_is_cut() -> None:
    whole = pickle.dumps([transition(), np.arange(40_000), "é" * 300], 4)
    for length in [*range(0, 600), *range(600, len(whole), 4999), len(whole) - 1]:
        with pytest.raises(CorruptError, match=r"demo\.pkl"):
            load(whole[:length])


# Bombs: what a small file may cost is bounded by its size.

BOMBS = {
    "bytes": b"\x8e" + struct.pack("<Q", 2**60),
    "a bytearray": b"\x96" + struct.pack("<Q", 2**62),
    "text": b"\x8d" + struct.pack("<Q", 2**50),
    "a number": b"\x8b" + struct.pack("<I", 2**31 - 1),
    "old bytes": b"B" + struct.pack("<I", 2**32 - 1),
}


@pytest.mark.parametrize("case", BOMBS)
def test_declared_lengths_are_not_believed(case: str) -> None:
    with pytest.raises(CorruptError, match=r"promises .* more"):
        load(b"\x80\x04" + BOMBS[case] + b"abc.")


def test_a_small_file_takes_little_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptError):  # Python would take 64 GB for this
        load(b"\x80\x04K\x01r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.")
    laugh = b"]" + b"".join(b"q" + bytes([i]) + b"0](" + (b"h" + bytes([i])) * 10 + b"e" for i in range(30))
    assert len(load(b"\x80\x04" + laugh + b".")) == 10  # 10**30 leaves, 30 lists
    for bomb in BOMBS.values():
        with pytest.raises(CorruptError):
            load(b"\x80\x04" + bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # kilobytes


@pytest.mark.parametrize("depth", (MAX_DEPTH + 1, 200_000))
def test_bottomless_containers_are_refused(depth: int) -> None:
    for nested in (b"]" * depth + b"a" * (depth - 1), b")" + b"\x85" * depth, b"}" + b"K\x00}" * depth + b"s" * depth):
        with pytest.raises(UnsafeError, match="nested more than 100 deep"):
            load(b"\x80\x04" + nested + b".")


def test_a_container_in_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append({"again": endless})
    with pytest.raises(UnsafeError, match="contains itself"):
        load(pickle.dumps(endless))


@pytest.mark.parametrize("tower", [b")" + b"\x85" * 300_000, b")" + b"2\x86" * 64], ids=["deep", "wide"])
def test_keys_that_would_take_all_of_the_stack_or_time_to_hash_are_refused(tower: bytes) -> None:
    for data in (
        b"}" + tower + b"K\x01s.",
        b"}(" + tower + b"K\x01u.",
        name("collections", "OrderedDict") + b")R" + tower + b"K\x01s.",
    ):
        with pytest.raises(UnsafeError, match="has a key with a tuple in it"):
            load(b"\x80\x04" + data)
    with pytest.raises(UnsafeError, match="has a key with a list in it"):
        load(b"\x80\x04}]K\x01s.")


def test_a_memo_number_beyond_2_to_the_20_is_held_against_the_size_of_the_file() -> None:
    remembered = b"]r" + (2**20 + 5).to_bytes(4, "little") + b"."
    # bytes that are taken from the stack again
    padding = b"B" + (2**20 + 100).to_bytes(4, "little") + bytes(2**20 + 100) + b"0"
    assert load(b"\x80\x04" + padding + remembered) == []
    with pytest.raises(CorruptError, match="no whole instruction at byte 3 of 9"):
        load(b"\x80\x04" + remembered)


@pytest.mark.long
def test_many_memo_numbers() -> None:
    """Protocol 2 writes each into the file; beyond 2**20 they are held against its size."""
    values = [(i,) for i in range(2**20 + 10)]
    assert load(pickle.dumps(values, 2)) == values


def test_deep_enough_for_data() -> None:
    value: Any = np.arange(3)
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    same(load(pickle.dumps(value)), value)


# What a caller adds.


class Reading:
    def __init__(self, value: int):
        self.value = value

    def __reduce__(self) -> Any:
        return Reading, (self.value,)


def test_a_caller_may_admit_more() -> None:
    calls: list[Any] = []

    def stand_in(*arguments: Any) -> Any:
        calls.append(arguments)
        return Reading(7)

    data = pickle.dumps([Reading(3), builtins.ValueError])
    extra = {(__name__, "Reading"): stand_in, ("builtins", "ValueError"): 5}
    reading, value = load(data, extra=extra)
    assert (type(reading), reading.value, value, calls) == (Reading, 7, 5, [(3,)])
    with pytest.raises(UnsafeError, match="asks for"):
        load(data)


def test_unpickle_stand_ins_take_no_state() -> None:
    data = b"\x80\x04" + name("m", "f") + b")R}" + text("value") + b"K\x01sb."
    with pytest.raises(UnsafeError, match="sets the state of a Reading"):
        load(data, extra={("m", "f"): lambda: Reading(0)})


# Anything at all.

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just(np.arange(3.0)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=rounds(40, 500), deadline=None)
@given(trees, st.sampled_from(PROTOCOLS))
def test_any_tree_comes_back(tree: Any, protocol: int) -> None:
    data = pickle.dumps(tree, protocol)
    same(load(data), pickle.loads(data))


def test_damaged_pickles_are_data_or_an_error_of_ours() -> None:
    """In a process of its own, because a mistake here is a crash. `python -m
    tests.core.test_unpickle 1 50000` runs more."""
    command = [sys.executable, "-m", __name__, "0", "3000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def fuzz(seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    rng = np.random.default_rng(seed)
    data = {key: value for key, value in DATA.items() if key != "large"}
    whole = [pickle.dumps(value, protocol) for value in [*data.values(), list(data.values())] for protocol in PROTOCOLS]
    whole += [b"\x80\x04" + case for case in [*HANDMADE.values(), *GARBLED.values()]]
    for number in range(count):
        mutant = bytearray(whole[rng.integers(len(whole))])
        for _ in range(rng.integers(1, 6)):
            at, length, kind = int(rng.integers(len(mutant) + 1)), int(rng.integers(1, 9)), rng.integers(5)
            other = whole[rng.integers(len(whole))]
            start = int(rng.integers(len(other)))
            mutant[at : at + (0, length, 1, length, 40)[kind]] = (  # insert, remove, replace, fill, splice
                INSTRUCTIONS[rng.integers(len(INSTRUCTIONS)) :][:1],
                b"",
                rng.bytes(1),
                bytes([rng.choice([0, 1, 127, 128, 255])]) * length,
                other[start : start + 40],
            )[kind]
        try:
            value = load(bytes(mutant))
        except HiltError as error:
            assert "demo.pkl" in str(error), number
            continue
        # a time without a unit, text that was changed after its check
        with contextlib.suppress(ValueError, SystemError):
            str(value)


INSTRUCTIONS = b"(.012BCGIJKLMNQRSTUVXabcdeghijlopqrstu}])" + bytes(range(0x80, 0x99))

if __name__ == "__main__":
    fuzz(int(sys.argv[1]), int(sys.argv[2]))
