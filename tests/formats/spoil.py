"""Ways to spoil a file: its bytes, and what its format lets one say."""

from __future__ import annotations

import json
import pickletools
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hilt.formats.tensorflow_files.tfrecord import footer, header


def spoil(rng: random.Random, root: Path) -> str:
    """Changes one file, or several. Returns what was done."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file())
        if not files:
            break
        path = rng.choice(files)
        spoilers: list[Callable[[random.Random, Path], Any]] = [spoil_bytes]
        if path.suffix == ".json":
            spoilers += [spoil_json] * 5
        elif path.suffix == ".jsonl":
            spoilers += [spoil_lines] * 5
        elif path.suffix == ".pkl":
            spoilers += [spoil_pickle] * 4
        elif path.suffix == ".parquet":
            spoilers += [spoil_table] * 3
        elif path.suffix in (".hdf5", ".h5"):
            spoilers += [spoil_hdf5] * 4
        elif ".tfrecord" in path.name:
            spoilers += [spoil_records] * 5
        elif path.suffix == ".pt":
            spoilers += [spoil_zip] * 2
        if root.is_dir() and rng.random() < 0.06:
            spoilers = [spoil_names]
        spoiler = rng.choice(spoilers)
        done.append(f"{path.relative_to(root.parent)}: {spoiler.__name__} {spoiler(rng, path) or ''}")
    return "; ".join(done)


def spoil_names(rng: random.Random, path: Path) -> str:
    """A file that is gone, a folder, empty, or another one's."""
    how = rng.randrange(5)
    if how == 0:
        path.unlink()
    elif how == 1:
        path.unlink()
        path.mkdir()
    elif how == 2:
        path.write_bytes(b"")
    elif how == 3:
        path.unlink()
        path.symlink_to(path)
    else:
        others = [p for p in path.parent.rglob("*") if p.is_file() and p != path]
        if others:
            shutil.copyfile(rng.choice(others), path)
    return ["gone", "a folder", "empty", "a link", "another"][how]


def spoil_bytes(rng: random.Random, path: Path) -> None:
    path.write_bytes(changed(rng, path.read_bytes()))


def changed(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        if not out:
            return bytes(out)
        region = rng.choice([len(out), min(len(out), 64), min(len(out), 600)])
        # heads and tails matter most
        at = rng.randrange(region) if rng.random() < 0.7 else len(out) - 1 - rng.randrange(region)
        end = min(len(out), at + rng.choice([1, 2, 4, 8, 50, 1000]))
        how = rng.randrange(10)
        if how <= 2:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 3:
            out[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif how == 4:
            del out[at:]
        elif how == 5:
            out[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
        elif how == 6:
            del out[at:end]
        elif how == 7:
            out[at:at] = out[at:end]
        elif how == 8:
            out[at:end] = bytes([rng.choice([0, 0xFF])]) * (end - at)
        else:  # a lie about a length
            number = rng.choice([2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, 1 << rng.randrange(20, 40)])
            code = rng.choice(["<I", ">I", "<Q", ">Q"])
            raw = struct.pack(code, number & (2**32 - 1 if code[1] == "I" else 2**64 - 1))
            out[at : at + len(raw)] = raw
    return bytes(out)


DEEP = "[" * 100_000 + "]" * 100_000
WHOLE = [
    DEEP,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    "",
    "null",
    "[]",
    "{}",
    "1",
    '"x"',
    "NaN",
    "\ufeff{}",
    '{"a": 1' + "0" * 5000 + "}",
]
STRANGE: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    -(2**31),
    2**53,
    2**63,
    -(2**63),
    2**64,
    10**30,
    1e308,
    -1e308,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../../etc/passwd",
    "/etc/passwd",
    "\x00",
    "a/b",
    "{",
    "{x}",
    "{0}",
    "{x:99999999999d}",
    "{x.__class__}",
    "{:03d}",
    "%s%n",
    "é" * 300,
    "x" * 70_000,
    "1e999999",
    "9" * 5000,
    "-5",
    "train[:",
    "int64",
    "float128",
    "O",
    "object",
    "(2,)f4",
    "uint8",
    "bfloat16",
    "string",
    [],
    {},
    [[]],
    {"": {}},
    [0] * 1000,
    {"a": {"b": {"c": 1}}},
    [2**40, 2**40],
    [2**31, 2**31, 3],
    [-1],
    [0],
    [1e9],
    ["a"],
    ["99999999999"],
    ["-1"],
]


def spoil_json(rng: random.Random, path: Path) -> str:
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError):
        path.write_bytes(changed(rng, path.read_bytes()))
        return "again"
    text, what = changed_json(rng, document)
    path.write_text(text)
    return what


def changed_json(rng: random.Random, document: Any) -> tuple[str, str]:
    places = list(nodes(document, ()))
    if not places or rng.random() < 0.03:
        return rng.choice(WHOLE), "whole"
    what = ""
    for _ in range(rng.choice([1, 1, 2, 4])):
        node, key, where = rng.choice(places)
        try:
            how = rng.randrange(6)
            if how == 0:
                del node[key]
            elif how == 1 and isinstance(node, dict):
                node[rng.choice(["extra", "", "a/b", "../x", "steps", "é", key])] = rng.choice(STRANGE)
            elif how == 2 and isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
                node[key] = node[key] * rng.choice([-1, 2, 0, 1000, 10**9, 0.5]) + rng.choice([0, 1, -1])
            elif how == 3 and isinstance(node[key], str) and node[key].isdigit():
                node[key] = str(int(node[key]) + rng.choice([-1, 1, 7, 2**31, 2**62, -(2**40)]))
            elif how == 4 and isinstance(node[key], str) and node[key]:
                node[key] = changed(rng, node[key].encode()).decode("utf-8", "replace")
            else:
                node[key] = rng.choice(STRANGE)
        except (KeyError, IndexError, ValueError, TypeError):  # an earlier change took it away, or made it too large
            continue
        what += f"{'/'.join(map(str, where))} "
    return json.dumps(document), what


def nodes(tree: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key, (*where, key)
            yield from nodes(tree[key], (*where, key))


def spoil_lines(rng: random.Random, path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    if not lines:
        return ""
    at = rng.randrange(len(lines))
    try:
        lines[at], what = changed_json(rng, json.loads(lines[at]))
    except (ValueError, RecursionError):
        what = "again"
    if rng.random() < 0.2:
        lines.insert(at, rng.choice([lines[at], "", "{"]))
    path.write_text("\n".join(lines) + "\n")
    return what


HOSTILE = [
    b"cos\nsystem\n",
    b"c__builtin__\neval\n",
    b"cbuiltins\nexec\n",
    b"\x8c\x05posix\x8c\x06system\x93",
    b"cnumpy\nload\n",
    b"cnumpy\nfrombuffer\n",
    b"R",
    b"b",
    b"\x81",
    b"o",
    b"iposix\nsystem\n",
    b"\x92",
    b"P0\n",
    b"Q",
    b"\x98",
    b"\x97",
    b"r\xff\xff\xff\x7f",
    b"r\xff\xff\x0f\x00",
    b"j\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 7 + b"\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"B\xff\xff\xff\xff",
    b"\x95" + b"\xff" * 8,
    b"(",
    b"0",
    b"1",
    b"2",
    b"t",
    b"l",
    b"d",
    b"}",
    b"]",
    b")",
    b"e",
    b"u",
    b"a",
    b"s",
    b"\x90",
    b"\x91",
    b"\x8f",
    b"(lp0\n",
    b"I99999999999999999999\n",
    b"L1L\n",
    b"F1e999\n",
    b"N",
    b"\x88",
    b"K\x01",
    b"M\xff\xff",
    b"J\xff\xff\xff\x7f",
    b"\x8a\x08" + b"\xff" * 8,
    b"G" + b"\xff" * 8,
    b"\x80\x02",
    b"\x80\x05",
    b"\x80\xff",
    b".",
    b"h\x00",
    b"h\xff",
    b"g0\n",
    b"p99999999999\n",
]


def spoil_pickle(rng: random.Random, path: Path) -> str:
    data = path.read_bytes()
    try:
        starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    except Exception:  # noqa: BLE001 (whatever it says of a pickle that was spoilt before)
        path.write_bytes(changed(rng, data))
        return "again"
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(parts) + 1)
        how = rng.randrange(5)
        if how == 0 and at < len(parts):
            del parts[at]
        elif how == 1:
            parts.insert(at, rng.choice(parts))
        elif how == 2:
            parts.insert(at, rng.choice(HOSTILE))
        elif how == 3 and at < len(parts):
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif at < len(parts) and len(parts[at]) > 1:
            parts[at] = parts[at][:1] + changed(rng, parts[at][1:])
    path.write_bytes(b"".join(parts))
    return ""


def spoil_zip(rng: random.Random, path: Path) -> str:
    """Torch's files: the pickle in them, or the bytes of a tensor."""
    try:
        with zipfile.ZipFile(path) as file:
            members = {name: file.read(name) for name in file.namelist()}
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, zlib.error):
        path.write_bytes(changed(rng, path.read_bytes()))
        return "again"
    if not members:
        return ""
    name = rng.choice([name for name in members if name.endswith("data.pkl")] * 3 + list(members))
    members[name] = changed(rng, members[name])
    with zipfile.ZipFile(path, "w") as file:
        for inner, data in members.items():
            file.writestr(inner, data)
    return name


def spoil_records(rng: random.Random, path: Path) -> str:
    """The data of one record, with checksums that fit, so that what is behind them is met."""
    data = path.read_bytes()
    try:
        records, at = [], 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            if length > len(data):
                raise ValueError
            records.append(data[at + 12 : at + 12 + length])
            at += length + 16
        if not records:
            raise ValueError
    except (struct.error, ValueError):
        path.write_bytes(changed(rng, data))
        return "again"
    number = rng.randrange(len(records))
    pictures = [kind for kind in (b"\x89PNG", b"\xff\xd8\xff") if kind in records[number]]
    if pictures and rng.random() < 0.5:
        records[number] = lying_picture(rng, records[number], rng.choice(pictures))
    else:
        records[number] = changed(rng, records[number])
    path.write_bytes(b"".join(header(len(record)) + record + footer(record) for record in records))
    return f"record {number}"


def lying_picture(rng: random.Random, record: bytes, kind: bytes) -> bytes:
    """One picture in it says that it is of another size or type; a PNG with a checksum that fits."""
    places = [i for i in range(len(record)) if record.startswith(kind, i)]
    at, out = rng.choice(places), bytearray(record)
    size = rng.choice([0, 1, 2, 31, 33, 1000, 30_000, 65_500, 2**31 - 1, 2**32 - 1])
    if kind == b"\x89PNG":
        out[at + 16 : at + 20] = struct.pack(">I", size)
        if rng.random() < 0.5:
            out[at + 20 : at + 24] = struct.pack(">I", rng.choice([1, size, 2**31 - 1]))
        if rng.random() < 0.3:
            out[at + 24], out[at + 25] = rng.choice([1, 2, 4, 8, 16, 99]), rng.choice([0, 2, 3, 4, 6, 7])
        out[at + 29 : at + 33] = struct.pack(">I", zlib.crc32(out[at + 12 : at + 29]))
    else:
        frame = max(out.find(b"\xff\xc0", at), out.find(b"\xff\xc2", at))
        if frame > 0:
            out[frame + 5 : frame + 9] = struct.pack(">HH", size & 0xFFFF, rng.choice([1, 65535, size & 0xFFFF]))
            if rng.random() < 0.3:
                out[frame + 9] = rng.choice([0, 1, 2, 4, 255])
    return bytes(out)


def spoil_table(rng: random.Random, path: Path) -> str:
    """A whole parquet file with a column that is gone, of another type, or of other values."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError, ValueError):
        path.write_bytes(changed(rng, path.read_bytes()))
        return "again"
    if not table.num_columns:
        return ""
    at = rng.randrange(table.num_columns)
    name, values = table.column_names[at], table.column(at).to_pylist()
    how = rng.randrange(8)
    made: Any = None
    if how == 0:
        table = table.remove_column(at)
    elif how == 1:
        made = arrow.nulls(len(table))
    elif how == 2:
        made = [rng.choice([None, value]) for value in values]
    elif how == 3 and values and isinstance(values[0], (int, float)):
        made = arrow.array([int(value) + rng.choice([0, 1, -1, 10**6, 2**40, -(2**40)]) for value in values])
    elif how == 4:
        made = arrow.array(["x"] * len(table)) if rng.random() < 0.5 else arrow.array([[1.5]] * len(table))
    elif how == 5:
        rows = range(len(table))
        order = (
            rng.sample(rows, len(table)) if rng.random() < 0.5 or not rows else rng.choices(rows, k=rng.randrange(30))
        )
        table = table.take(arrow.array(order, arrow.int64()))
    elif how == 6 and values and isinstance(values[0], dict):
        made = [value | {"path": rng.choice(["x", "../../x", None])} for value in values]
        made = [
            value | {"bytes": rng.choice([None, changed(rng, value["bytes"])])} if value.get("bytes") else value
            for value in made
        ]
    elif values and isinstance(values[0], list):
        made = [rng.choice([value, [], value[:-1], [*value, 1]]) for value in values]
    if made is not None:
        try:
            table = table.set_column(at, name, made if isinstance(made, arrow.Array) else arrow.array(made))
        except (arrow.ArrowException, ValueError, TypeError):
            return "not made"
    parquet.write_table(table, path)
    return f"{name} {how}"


def spoil_hdf5(rng: random.Random, path: Path) -> str:
    """A whole HDF5 file whose groups, datasets or attributes are others."""
    import h5py

    try:
        with h5py.File(path, "a") as file:
            names: list[str] = []
            file.visit(names.append)
            if not names:
                return ""
            name = rng.choice(names)
            how = rng.randrange(12)
            item = file[name]
            if how == 0:
                del file[name]
            elif how <= 2:
                key = rng.choice([*item.attrs, "num_samples", "total_steps", "id", "env_args"])
                item.attrs[key] = rng.choice(
                    [-1, 0, 2**40, 1.5, float("nan"), "x", "{", "../x", b"\xff\xfe", np.zeros(3), h5py.Empty("f")]
                )
            elif how == 3:
                file[f"{name}_again"] = h5py.SoftLink(rng.choice(["/nowhere", f"/{name}", "/"]))
            elif how == 4:
                del file[name]
                file[name] = h5py.ExternalLink(rng.choice(["/etc/passwd", "nowhere.hdf5", path.name]), "/data")
            elif how == 5:
                del file[name]
                file.create_dataset(name, (2**40,), "f8", chunks=(1000,))  # takes no room until it is read
            elif how == 6:
                del file[name]
                file[name] = rng.choice(
                    [np.zeros(0), np.zeros((2, 0, 3)), np.float64(1), np.array([b"a", b"bc"]), np.zeros(3, "c16")]
                )
            elif how == 7:
                del file[name]
                file.create_dataset(name, (4,), h5py.string_dtype(), data=["a", "b", "c", ""])
            elif how == 8:
                del file[name]
                file.create_dataset(name, (4,), np.dtype([("a", "f4"), ("b", "i8")]))
            elif how == 9:
                del file[name]
                file.create_dataset(name, (4,), h5py.vlen_dtype(np.dtype("f4")))
            elif how == 10:
                del file[name]
                file.create_group(name)
            elif isinstance(item, h5py.Dataset) and item.ndim:
                values = item[()]
                del file[name]
                other = values.astype("S8" if values.dtype.kind != "u" else "i4")
                file[name] = rng.choice([values[:-1], np.concatenate([values, values]), values[None], other])
            return f"{name} {how}"
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, MemoryError) as error:
        path.write_bytes(changed(rng, path.read_bytes()))
        return f"again ({type(error).__name__})"
