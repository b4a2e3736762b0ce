"""Checksums, and JSON files that carry their own.

They need the package crc32c, which a GPU machine that only trains and acts may not have; `hilt.core.files` does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crc32c import crc32c

from hilt.core.errors import CorruptError
from hilt.core.files import DISK, Files, read

checksum = crc32c
"""CRC-32C of a buffer, in hardware where the processor has it: every checksum in Hilt's files is this one."""


def write_json(path: Path, data: Mapping[str, object], files: Files = DISK, durable: bool = True) -> None:
    """A JSON file that carries the checksum of its own bytes, taken with zeros in the place of the checksum."""
    text = json.dumps({**data, "checksum": "0" * 8}, indent=1, sort_keys=True).encode() + b"\n"
    place = _checksum_place(text)
    files.replace(path, text[:place] + f"{checksum(text):08x}".encode() + text[place + 8 :], durable)


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; anything else is a `CorruptError` naming the file."""
    text = read(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{path}: not readable as JSON ({error}); restore it from a copy or run: hilt data repair."
        ) from None
    place = _checksum_place(text)
    given, right = text[place : place + 8], f"{checksum(text[:place] + b'0' * 8 + text[place + 8 :]):08x}".encode()
    if not isinstance(data, dict) or "checksum" not in data or given != right:
        raise CorruptError(
            f"{path}: its bytes do not have their checksum; restore it from a copy or run: hilt data repair."
        )
    del data["checksum"]
    return data


def _checksum_place(text: bytes) -> int:
    """Where the checksum lies in the text of a JSON file: no other line begins so,
    since inner ones are indented further."""
    key = b'\n "checksum": "'
    return text.find(key) + len(key)
