"""Weights as files: safetensors shards, read tensor by tensor to where they belong, and written whole or not at all.

    tensors = Tensors("folder")                    # the headers only
    # a module on the meta device gets its memory here
    load_into(module, tensors, device="cuda:0", dtype=torch.bfloat16)
    write_tensors("folder", module.state_dict())

The library `safetensors` reads and writes the files. It maps a file into memory, and mapped pages count
as memory of the process, so a file is mapped for one tensor at a time, or for small ones of `MAPPED_BYTES` in
all: what is resident beside the weights is never more than that, or the largest tensor. What we write carries a
checksum for each tensor in the header's metadata, where other readers do not mind it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hilt.core.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    MissingFieldError,
    SchemaError,
    StorageError,
    UnknownNameError,
    UnsafeError,
)
from hilt.core.files import DISK, inside, replacing, storage_errors
from hilt.core.unpickle import PickleError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 1_000_000_000
"""A shard is written from memory as a whole, so tensors that are on another device,
or made while they are written, need this much."""
MAPPED_BYTES = 16_000_000
"""Tensors that are read from one opened file: to open it, its whole header is read"""
MAX_LISTED = 5


class Entry(NamedTuple):
    """The place of a tensor in a file."""

    file: Path
    name: str
    """Its name in the file"""
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int
    """How many tensors lie before it in the file"""
    crc32: str
    """In hexadecimal; empty in files that others wrote"""

    @property
    def nbytes(self) -> int:
        result: int = self.dtype.itemsize * math.prod(self.shape)
        return result


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name. Only headers are read until one is asked for."""

    def __init__(self, path: str | os.PathLike[str]):
        """`path`: a folder with ``model.safetensors`` or an index of shards, or one file."""
        path = Path(path)
        self.path = path
        self.entries: dict[str, Entry] = {}
        index = path / INDEX
        if path.is_dir() and index.is_file():
            self._read_index(index)
        else:
            self.entries = _read_header(path / SINGLE if path.is_dir() else path)

    def _read_index(self, index: Path) -> None:
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and file == Path(file).name for file in places.values()
        ):
            raise FormatError(
                f"{index}: its weight_map does not name the file of each tensor, in the same folder. Copy it again."
            )
        shards = {file: _read_header(inside(index.parent, file, str(index))) for file in sorted(set(places.values()))}
        for name, file in places.items():
            if name not in shards[file]:
                raise MissingFieldError(
                    f"{index.parent / file}: the tensor {name} is not in it, though {INDEX} lists it. Copy both again."
                )
            self.entries[name] = shards[file][name]

    def __getitem__(self, name: str) -> Tensor:
        out = torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype)
        self.read(name, out)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, name: str, out: Tensor, mapped: _Mapped | None = None) -> None:
        """One tensor into memory that is there: of the same shape, on any device, of any type of number."""
        entry = self.entries[name]
        if entry.shape != tuple(out.shape):
            raise SchemaError(
                f"{entry.file}: the tensor {name} has the shape {list(entry.shape)}, and "
                f"{list(out.shape)} was asked for."
            )
        if out.is_meta:  # nothing is there to be filled: memory is estimated
            return
        with _opened(entry.file) if mapped is None else contextlib.nullcontext(mapped.file_of(entry)) as file:
            found = file.get_tensor(entry.name)
            if entry.crc32 and f"{zlib.crc32(_bytes_of(found)):08x}" != entry.crc32:
                raise CorruptError(
                    f"{entry.file}: the bytes of the tensor {name} do not have their checksum. Copy the file again."
                )
            with torch.no_grad():
                out.copy_(found)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def load_into(
    module: nn.Module,
    tensors: Tensors,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    also: Mapping[str, Tensor] | None = None,
    optional: tuple[str, ...] = (),
) -> list[str]:
    """Fills a module's parameters and buffers, and gives the names of the tensors
    that it had no use for (none if `strict`).

    `rename` gives the name in the file for the name in the module. A module on the meta device gets its memory on
    `device`, floating point as `dtype` (that of the file unless given), tensor by tensor: there is never a second copy.
    Names and shapes are compared before the first byte is read. Without `strict`, what the files lack stays as it is;
    so does what is missing or left over and begins with one of `optional`. `also` are tensors from elsewhere, by their
    name in the module; they come before those of the files.
    """
    owners, also = _places(module), also or {}
    strange = [name for name in also if name not in owners and not name.startswith(optional)]
    _fill({name: owners.pop(name) for name in also if name in owners}, also, device, dtype)
    wanted = {name: rename(name) if rename else name for name in owners}
    missing = sorted(name for name in wanted.values() if name not in tensors.entries and not name.startswith(optional))
    unused = sorted(
        [*strange, *(name for name in set(tensors.entries) - set(wanted.values()) if not name.startswith(optional))]
    )
    if strict and (missing or unused):
        problems = [
            f"{len(names)} {word} ({_listed(names)})"
            for names, word in ((missing, "missing"), (unused, "unknown"))
            if names
        ]
        raise MissingFieldError(
            f"{tensors.path}: of its tensors {' and '.join(problems)} for this model. Check that the config is "
            "the one of these weights."
        )
    for name, (holder, key) in owners.items():
        entry, shape = tensors.entries.get(wanted[name]), tuple(getattr(holder, key).shape)
        if entry and entry.shape != shape:
            raise SchemaError(
                f"{entry.file}: the tensor {wanted[name]} has the shape {list(entry.shape)}, and the "
                f"config asks for {list(shape)}. Check that the config is the one of these weights."
            )
    found = ((tensors.entries[theirs], name) for name, theirs in wanted.items() if theirs in tensors.entries)
    filled: dict[int, Tensor] = {}
    with _Mapped() as mapped:
        for entry, name in sorted(found, key=lambda pair: (pair[0].file, pair[0].place)):
            holder, key = owners[name]
            old = getattr(holder, key)
            if old.is_meta:
                if id(old) not in filled:  # two names of one parameter share it afterwards too
                    kind = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
                    made = torch.empty(entry.shape, dtype=kind, device=device)
                    tensors.read(wanted[name], made, mapped)
                    filled[id(old)] = nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made
                setattr(holder, key, filled[id(old)])
            else:
                tensors.read(wanted[name], old, mapped)
    return unused


def _fill(
    owners: Mapping[str, tuple[nn.Module, str]], tensors: Mapping[str, Tensor], device: Any, dtype: torch.dtype | None
) -> None:
    for name, (holder, key) in owners.items():
        old, new = getattr(holder, key), tensors[name]
        if old.shape != new.shape:
            raise SchemaError(
                f"the tensor {name} has the shape {list(new.shape)}, and the config asks for {list(old.shape)}."
            )
        if old.is_meta:
            moved = new.to(device, dtype if dtype is not None and new.is_floating_point() else new.dtype, copy=True)
            setattr(holder, key, nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved)
        else:
            old.data.copy_(new)


def check_device(device: torch.device | str) -> torch.device:
    """A device that is on this machine."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r}: expected the name of one, such as 'cpu', 'cuda' or 'cuda:1'.") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(place)!r} is not on this machine, which has "
            f"{torch.cuda.device_count()} CUDA devices; use 'cpu'."
        )
    return place


def check_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The type of weights, also by its name: "float32", "bfloat16" or "float16"."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, str):
        if dtype not in known:
            raise UnknownNameError("type of weights", dtype, known)
        return known[dtype]
    return dtype


def write_tensors(
    folder: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
    value: Callable[[str], Tensor] | None = None,
    name: str = SINGLE,
) -> list[Path]:
    """Writes safetensors shards of at most `shard_bytes` (a larger tensor has one
    of its own) and their index into a folder.

    `value` gives the tensor to write for a name, of the type and shape that `state` has for it: those of one
    shard are made and let go again, so a merged model never exists as a whole. Each file is written beside its
    place, synced and renamed; the index comes last.
    """
    folder, value = Path(folder), value or state.__getitem__
    shards: list[list[str]] = [[]]
    filled = 0
    for key, tensor in state.items():
        if filled and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += tensor.nbytes
    stem = name.removesuffix(".safetensors")
    names = (
        [name]
        if len(shards) == 1
        else [f"{stem}-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    )
    for file, keys in zip(names, shards, strict=True):
        _write_shard(folder / file, {key: state[key] for key in keys}, value)
    if len(shards) > 1:
        places = {key: file for file, keys in zip(names, shards, strict=True) for key in keys}
        total = sum(tensor.nbytes for tensor in state.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
        DISK.replace(folder / INDEX, text + "\n")
    return [folder / file for file in names]


def read_pt(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict in a file of ``torch.save``, without the prefix that data-parallel
    training leaves. Runs nothing of the file."""
    path = Path(path)
    try:
        with storage_errors(path):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except PickleError as error:
        raise UnsafeError(
            f"{path} holds more than tensors; it was refused and nothing was run. Save a plain state dict."
        ) from error
    except (RuntimeError, ValueError, EOFError, LookupError) as error:
        raise CorruptError(
            f"{path} is not a whole file of torch.save ({str(error).splitlines()[0][:120]}). Copy it again."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FormatError(f"{path} holds no dictionary of tensors. Check which file this is.")
    return {str(name).removeprefix("module."): value for name, value in found.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that others wrote."""
    with storage_errors(path):
        text = path.read_bytes()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not readable as JSON ({error}). Copy it again from where it came.") from error
    if not isinstance(data, dict):
        raise FormatError(f"{path}: holds a {type(data).__name__} and should hold an object. Check which file this is.")
    return data


def _write_shard(path: Path, state: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
    made: dict[str, Tensor] = {}
    metadata, storages = {"format": "pt"}, set[int]()
    for name, tensor in state.items():
        given = value(name).detach()
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise SchemaError(
                f"the tensor {name} was to be {tensor.dtype} {list(tensor.shape)}: it is "
                f"{given.dtype} {list(given.shape)}."
            )
        given = given.cpu().contiguous()
        if given.untyped_storage().data_ptr() in storages:
            given = given.clone()  # tied weights have two names, and the library writes no memory twice
        storages.add(given.untyped_storage().data_ptr())
        made[name], metadata[f"crc32:{name}"] = given, f"{zlib.crc32(_bytes_of(given)):08x}"
    with replacing(path) as beside:
        beside.touch()
        mode = beside.stat().st_mode
        try:
            save_file(made, beside, metadata)
        except KeyError as error:
            raise SchemaError(
                f"{path}: tensors of {error.args[0]} have no place in a safetensors file. Convert them first."
            ) from None
        except SafetensorError as error:
            raise _system_error(error) from error
        _sort_checksums(beside)
        beside.chmod(mode)  # the library makes files that are not readable by others


def _sort_checksums(path: Path) -> None:
    """Brings the metadata of a file, which the library writes in random order, into that of the names: the same tensors
    make the same file, which has the same hash."""
    with storage_errors(path), path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        made = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(made) <= size:
            file.seek(8)
            file.write(made.ljust(size))


def _read_header(path: Path) -> dict[str, Entry]:
    with _opened(path) as file:
        sums = file.metadata() or {}
        found = [(name, file.get_tensor(name)) for name in file.offset_keys()]  # mapped, and not read
    return {
        name: Entry(path, name, tensor.dtype, tuple(tensor.shape), place, sums.get(f"crc32:{name}", ""))
        for place, (name, tensor) in enumerate(found)
    }


class _Mapped:
    """The file that tensors are read from one after the other. It is closed before more than `MAPPED_BYTES` of it are
    resident."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._path: Path | None = None
        self._file: Any = None
        self._left = 0

    def file_of(self, entry: Entry) -> Any:
        if entry.file != self._path or entry.nbytes > self._left:
            self._file = self._path = None
            self._stack.close()
            self._file = self._stack.enter_context(_opened(entry.file))
            self._path, self._left = entry.file, MAPPED_BYTES
        self._left -= entry.nbytes
        return self._file

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file = None
        self._stack.__exit__(*error)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file as the library opens it, which checks its header and its size."""
    with storage_errors(path):
        path.open("rb").close()  # the library's errors of the system do not say which they are
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise CorruptError(
                f"{path}: not a whole safetensors file ({str(error)[:120]}). Copy it again from where it came."
            ) from error


def _system_error(error: SafetensorError) -> Exception:
    """The error of the system that the library reports as text while it writes."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else StorageError(str(error))


def _places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """For each name of the state dict, the module that holds it and its name there."""
    names = module.state_dict(keep_vars=True)
    holders = dict(module.named_modules(remove_duplicate=False))
    return {name: (holders[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
