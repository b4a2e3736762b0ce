"""HDF5 files, read with suspicion.

Such a file may lead into other files of this machine, contain itself, or promise
more than any memory holds; all of this is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from hilt.core.errors import CorruptError, HiltError, UnsafeError, optional_module
from hilt.core.files import storage_errors
from hilt.formats.episodes import plain

if TYPE_CHECKING:
    import h5py

MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_BYTES = 4 << 30
"""Of one column of one episode"""
MAX_ELEMENTS = 1 << 30
"""Bytes of a column whose elements have lengths of their own, such as text"""
MAX_LEAVES, MAX_DEPTH, MAX_ATTRIBUTES = 10_000, 16, 1_000
FEW_TEXTS, MAX_TEXTS = 16, 1 << 28
"""An attribute of more texts than the first is read if they cannot come to more bytes than the second"""
RATIO = 1100
"""Deflate makes nothing smaller than a 1032nd."""
_DAMAGE = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    NotImplementedError,
)


def import_h5py() -> ModuleType:
    return optional_module("h5py", "Reading and writing HDF5", "formats")


def is_hdf5(path: Path) -> bool:
    """Returns whether the first bytes of a file are HDF5's."""
    try:
        with path.open("rb") as file:
            return file.read(8) == MAGIC
    except OSError:
        return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """The file, open for reading; whatever the library finds wrong with it is a `CorruptError`."""
    h5py = import_h5py()
    with storage_errors(path), path.open("rb"):
        pass
    try:
        with h5py.File(path, "r") as file:
            yield file
    except HiltError:
        raise
    except _DAMAGE as error:
        raise CorruptError(f"{path}: damaged, or no HDF5 file ({error}). Copy it again from where it came.") from error


def child(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    """What has this name in a group; None when nothing has, or there is no group."""
    h5py = import_h5py()
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if link is None:
        return None
    found = group[name] if isinstance(link, h5py.HardLink) else None
    if found is None or (isinstance(found, h5py.Dataset) and (found.external or found.is_virtual)):
        place = f"{group.file.filename}: {group.name.rstrip('/')}/{name}"
        raise UnsafeError(
            f"{place} leads to another place or file, which could be any of this machine's; it was "
            "refused. Copy its data in."
        )
    return found


def leaves(group: h5py.Group, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, h5py.Dataset]]:
    """Every dataset under a group, by path."""
    h5py, count = import_h5py(), 0
    for name in group:
        found, path = child(group, name), f"{prefix}{name}"
        for leaf in (
            leaves(found, f"{path}/", depth + 1)
            if isinstance(found, h5py.Group) and depth < MAX_DEPTH
            else [(path, found)]
        ):
            count += 1
            if count > MAX_LEAVES or not isinstance(leaf[1], h5py.Dataset):
                raise CorruptError(f"{group.file.filename}: {group.name} holds itself, or too much.")
            yield leaf


def values(dataset: h5py.Dataset, more: int = 0) -> Any:
    """Numbers as an array, with `more` rows behind that repeat the last; texts as a
    list; None when it has neither, or no rows."""
    h5py = import_h5py()
    if not dataset.shape:
        return None
    size, stored = (
        math.prod(dataset.shape) * dataset.dtype.itemsize,
        min(dataset.id.get_storage_size(), dataset.file.id.get_filesize()),
    )
    if size > min(MAX_BYTES, stored * (RATIO if dataset.chunks else 1) + 4096):
        raise CorruptError(
            f"{dataset.file.filename}: {dataset.name} promises {size:,} bytes and has {stored:,}; it was not read."
        )
    if h5py.check_string_dtype(dataset.dtype) and len(dataset.shape) == 1:
        return [plain(value) for value in elements(dataset)]
    if dataset.dtype.kind not in "biuf":
        return None
    out = np.empty((dataset.shape[0] + more, *dataset.shape[1:]), np.dtype(dataset.dtype.str).newbyteorder("="))
    if dataset.shape[0]:
        dataset.read_direct(out, dest_sel=np.s_[: dataset.shape[0]])
        out[dataset.shape[0] :] = out[dataset.shape[0] - 1]
    return out


def elements(dataset: h5py.Dataset) -> Iterator[Any]:
    """What has no fixed length, one by one, since all of it may be in the file only once."""
    total = 0
    for i in range(dataset.shape[0]):
        value = dataset[i]
        total += len(value)
        if total > MAX_ELEMENTS:
            raise CorruptError(
                f"{dataset.file.filename}: {dataset.name} is longer than {MAX_ELEMENTS:,} bytes; it was not read."
            )
        yield value


def attributes(group: h5py.Group) -> dict[str, Any]:
    """Returns the attributes as plain values; long ones are left out, and so are lists of texts that could be
    long: one text in the file may be all of them."""
    h5py, found, size = import_h5py(), {}, group.file.id.get_filesize()
    for count, name in enumerate(group.attrs):
        if count >= MAX_ATTRIBUTES:
            raise CorruptError(f"{group.file.filename}: {group.name} has more than {MAX_ATTRIBUTES:,} attributes.")
        about = group.attrs.get_id(name)
        values = math.prod(about.shape or (1,))
        has_texts = h5py.check_vlen_dtype(about.dtype) is not None or about.dtype.hasobject
        if about.get_storage_size() <= 1 << 20 and not (has_texts and values > FEW_TEXTS and values * size > MAX_TEXTS):
            found[name] = plain(group.attrs[name])
    return found
