"""Damage of every kind, for tests of `verify` and `repair`: at random, and by
somebody who knows the format and its checksums."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.checksums import checksum, read_json, write_json
from hilt.core.errors import HiltError
from hilt.replay.storage.journal import format_line
from hilt.replay.storage.segment import EXTENT, Segment

_WAYS = ["flip"] * 5 + ["cut", "grow", "zero", "delete", "swap", "empty", "garbage", "copy"]
_VALUES = [
    None,
    -1,
    0,
    1,
    7,
    2**31,
    2**40,
    2**63,
    -(2**63),
    1.5,
    "x",
    "",
    [],
    {},
    [[1]],
    True,
    "<f8",
    "|O",
    10**30,
    ["a"],
    {"a": 1},
]


def damage(folder: Path, generator: random.Random) -> None:
    """Between 3 and 25 faults in the files of a log: flipped bits, cuts, swapped and missing files, copied segments."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "writer.lock"]
    for _ in range(generator.randint(3, 25)):
        path = generator.choice(files)
        if path.exists():
            _damage_file(path, generator, files)


def _damage_file(path: Path, generator: random.Random, files: list[Path]) -> None:
    raw, how = bytearray(path.read_bytes()), generator.choice(_WAYS)
    at = generator.randrange(len(raw) or 1)
    if how == "delete":
        path.unlink() if generator.random() < 0.7 or not path.parent.name.isdigit() else shutil.rmtree(path.parent)
        return
    if how == "flip" and raw:
        raw[at] ^= 1 << generator.randrange(8)
    elif how == "cut":
        raw = raw[:at]
    elif how == "grow":
        raw += generator.randbytes(generator.randrange(300))
    elif how == "zero":
        raw[at : at + 64] = bytes(len(raw[at : at + 64]))
    elif how == "swap" and (other := generator.choice(files)).exists():
        raw = bytearray(other.read_bytes())
    elif how in ("empty", "garbage"):
        raw = bytearray(generator.randbytes(generator.randrange(500) if how == "garbage" else 0))
    elif how == "copy" and path.parent.name.isdigit() and not (path.parent.parent / "000009").exists():
        shutil.copytree(path.parent, path.parent.parent / "000009")
    path.write_bytes(raw)


def craft(folder: Path, generator: random.Random) -> None:
    """One thing that no log of Hilt has, with every checksum right."""
    segment = generator.choice(sorted((folder / "segments").iterdir()))
    how = generator.choice([_craft_json, _craft_json, _craft_rows, _craft_rows, _craft_extents, _craft_fact])
    with contextlib.suppress(HiltError, FileNotFoundError):  # what was crafted before stands in the way
        how(folder, segment, generator)


def _craft_json(folder: Path, segment: Path, generator: random.Random) -> None:
    files = [
        folder / "log.json",
        segment / "header.json",
        segment / "seal.json",
        folder / "closed.json",
        folder / "quarantine.json",
    ]
    path = generator.choice(files)
    data = read_json(path) if path.exists() else {"segments": {"1": [[0, 2, "x: y"]]}}
    _mutate(data, generator)
    write_json(path, data)


def _craft_rows(folder: Path, segment: Path, generator: random.Random) -> None:
    row = Segment.open(segment).layout.row
    rows = np.fromfile(segment / "rows", row)
    i, name = (
        generator.randrange(len(rows)),
        generator.choice([name for name in row.names or () if name not in ("#pad", "#crc")]),
    )
    raw = rows.view(np.uint8).reshape(len(rows), -1)
    if row[name].names:
        rows[name]["frame"][i] = generator.choice([-1, 10**9, 2**62, -(2**63), 5, 0])
    else:
        start = (row.fields or {})[name][1]
        raw[i, start : start + row[name].itemsize] = generator.choice([0xFF, 0x80, 0x7F, 0, 1])
    if name != "#count":
        rows["#count"][i] = 1
    count = max(1, min(int(rows["#count"][i]), i + 1))
    rows["#crc"][i] = checksum(raw[i + 1 - count : i + 1].reshape(-1)[:-4].tobytes())
    rows.tofile(segment / "rows")


def _craft_extents(folder: Path, segment: Path, generator: random.Random) -> None:
    extents, seal = np.fromfile(segment / "extents", EXTENT), read_json(segment / "seal.json")
    i, name = generator.randrange(len(extents)), generator.choice(EXTENT.names or ())
    small = EXTENT[name].itemsize < 8
    extents[name][i] = generator.choice([0, 1, 100]) if small else generator.choice([-1, 0, 5, 2**40, 2**62])
    extents = np.concatenate([extents, extents]) if generator.random() < 0.3 else extents
    extents.tofile(segment / "extents")
    write_json(segment / "seal.json", {**seal, "extents_crc": checksum(extents.tobytes())})


def _craft_fact(folder: Path, segment: Path, generator: random.Random) -> None:
    known = [json.loads(line[9:]) for line in (folder / "annotations.jsonl").read_bytes().splitlines()]
    known += [
        {"trajectory": 1, "column": "rewards", "first": 0, "values": [1.0, 2.0]},
        {"trajectory": 1, "deleted_before": 3},
    ]
    known += [
        {"used": {"trajectory": 5, "segment": 5, "origin": 5}, "seen": {"1": 5}},
        {"trajectory": 4, "whole": False},
    ]
    fact = generator.choice(known)
    _mutate(fact, generator)
    with (folder / "annotations.jsonl").open("ab") as file:
        file.write(format_line(fact))


def _mutate(data: Any, generator: random.Random) -> None:
    """Another value for one thing in nested lists and mappings, or without it."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(data)
    node, key = generator.choice(places)
    if generator.random() < 0.75:
        node[key] = generator.choice(_VALUES)
    else:
        del node[key]
