"""Everything of the store that needs torch: tensors, their files, their devices and their random numbers.

It imports torch inside its functions only, and `torch_dataset` is the other file under ``replay`` that imports it at
all, so that a robot's computer can do without it. Files are read with ``weights_only`` or through
`hilt.core.unpickle`: neither runs what a file carries.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, CorruptError, FormatError, MissingPackageError, SchemaError, UnsafeError
from hilt.core.files import storage_errors
from hilt.core.tree import Array
from hilt.core.unpickle import PickleError, dump, safe_load

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor
    Device: TypeAlias = torch.device
    Generator: TypeAlias = torch.Generator


def import_torch() -> Any:
    """The torch package, or an error with the line that installs it."""
    try:
        import torch
    except ImportError as error:
        raise MissingPackageError("torch", "Working with tensors", "torch") from error
    return torch


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor, found out without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


# Trees of arrays and trees of tensors


def to_torch(tree: Mapping[str, object], device: Device | Sequence[Device] | str | None = None) -> Any:
    """The same nested dictionary with a tensor for each array; for a list of
    devices, a list with one whole copy for each.

    On the CPU a tensor shares the array's memory, so writing to one writes to the other; an array that cannot be
    written to, or whose bytes are in another machine's order, is copied. For CUDA the bytes go through pinned memory
    and the copy is asynchronous: the tensors may be used at once on the current stream.
    """
    return mover(device)(tree)


def mover(device: Device | str) -> Callable[[Mapping[str, Any]], Any]:
    """`to_torch` for one device, checked now rather than at the first batch."""
    place = check_device(device)
    if isinstance(place, list):
        return lambda tree: [map_tree(partial(_placed, one), tree) for one in place]
    return lambda tree: map_tree(partial(_placed, place), tree)


def map_tree(function: Callable[[Any, str], Any], tree: Mapping[str, object], path: str = "") -> dict[str, object]:
    """The same nested dictionary with ``function(leaf, path)`` for each leaf."""
    paths = {key: f"{path}/{key}" if path else key for key in tree}
    return {
        k: map_tree(function, v, paths[k]) if isinstance(v, Mapping) else function(v, paths[k]) for k, v in tree.items()
    }


def _placed(device: Device | None, value: Any, path: str) -> Tensor:
    tensor = as_tensor(value, path)
    if device is None:
        return tensor
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def as_tensor(value: object, path: str) -> Tensor:
    """A tensor from an array or a number; tensors pass unchanged. `path` names the field in the error."""
    torch = import_torch()
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        raise SchemaError(
            f"{path} is a {type(value).__name__}; tensors are made of arrays and numbers. Leave it out or convert it."
        )
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise SchemaError(
            f"{path} has dtype {array.dtype}, of which torch has no tensors. Convert it to numbers."
        ) from error


def concatenate(leaves: Sequence[object], axis: int) -> Tensor:
    """Tensors or arrays, one behind the other along a dimension, as a tensor."""
    return import_torch().cat([as_tensor(leaf, "a batch") for leaf in leaves], dim=axis)


def raw_array(value: object, path: str) -> tuple[Array, str]:
    """One tensor as an array of the same bits, sharing memory on the CPU, and its own
    type when numpy has none for it (bfloat16)."""
    if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        return np.asarray(value), ""
    torch = import_torch()
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise SchemaError(
            f"{path} is a {type(value).__name__}, not a dense tensor or an array. Leave this field out or convert it."
        )
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.contiguous().view(bits).numpy(), str(tensor.dtype).removeprefix("torch.")
    return tensor.numpy(), ""


def from_raw_array(array: Array, name: str) -> Tensor:
    """The tensor that `raw_array` came from, sharing the array's memory."""
    torch = import_torch()
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, name)) if name else tensor


# Devices


def check_device(device: Device | str) -> Device | list[Device] | None:
    """None, one ``torch.device``, or a list of them, from what a caller passed as `device`.

    Raises `ConfigError`, saying what to pass, for anything else and for a device that this machine does not have.
    """
    if device is None:
        return None
    if isinstance(device, (list, tuple)):
        if not device:
            raise ConfigError("device is an empty list; pass None for the CPU, or a list of at least one torch device.")
        return [_one_device(one) for one in device]
    return _one_device(device)


def _one_device(device: Any) -> Device:
    torch = import_torch()
    wanted = "pass None, a torch.device, its name such as 'cpu' or 'cuda:0', or a list of these"
    if not isinstance(device, (str, torch.device)):
        raise ConfigError(f"device is a {type(device).__module__}.{type(device).__name__} ({device!r}); {wanted}.")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is no torch device; {wanted}.") from error
    if place.type == "meta":
        raise ConfigError(f"device 'meta' holds no data; {wanted}.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(place)!r} is not on this machine, which has "
            f"{torch.cuda.device_count()} CUDA devices; {wanted}."
        )
    return place


# Random numbers


def generator(seed: int | None) -> Generator:
    """A generator of its own on the CPU; the global one is never touched. None seeds it from the system."""
    made = import_torch().Generator()
    if seed is None:
        made.seed()
        return made
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}; pass an integer of at most 64 bits, or None to seed from the system.")
    made.manual_seed(int(seed))
    return made


def randint(source: Generator, high: int, n: int) -> npt.NDArray[np.int64]:
    """`n` numbers below `high` with replacement: the numbers that
    ``torch.randint(0, high, (n,), generator=source)`` gives."""
    drawn: npt.NDArray[np.int64] = import_torch().randint(0, high, (n,), generator=source).numpy()
    return drawn


# Files of tensors


def load_pt(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dictionary in a file of ``torch.save``, on the CPU. Its checksums are
    verified, which ``torch.load`` does not do."""
    path = Path(path)
    torch = import_torch()
    with storage_errors(path), path.open("rb") as file:
        _verify_zip(file, path)
        file.seek(0)
        return _dictionary(_torch_load(torch, file, str(path)), path)


def load_pkl(path: str | os.PathLike[str]) -> dict[str, object]:
    """The dictionary of tensors in a pickle, as RLinf writes with
    ``trajectory_format="pkl"``. Such files carry no checksum."""
    path = Path(path)
    with storage_errors(path), path.open("rb") as file:
        return _dictionary(safe_load(file, where=str(path), extra=_stand_ins(str(path))), path)


def save_pt(value: Mapping[str, object], file: str | os.PathLike[str] | BinaryIO) -> None:
    """Write a nested dictionary of tensors, arrays, numbers and text so that
    ``torch.load(weights_only=True)`` reads it."""
    import_torch().save(map_tree(_portable, value), file)


def save_pkl(value: Mapping[str, object], file: str | os.PathLike[str] | BinaryIO) -> None:
    """The same as a pickle of tensors, for programs that read nothing else."""
    portable = map_tree(_portable, value)
    if not isinstance(file, (str, os.PathLike)):
        return dump(portable, file)
    with storage_errors(Path(file)), Path(file).open("wb") as opened:
        dump(portable, opened)


def _portable(value: Any, path: str) -> Any:
    """A tensor that owns just its elements: a view would be saved with all that it is a view of."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    tensor = as_tensor(value, path).detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _dictionary(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(
            f"{path} holds a {type(value).__name__}; a trajectory file holds a dictionary. Check which file this is."
        )
    return value


def _verify_zip(file: BinaryIO, path: Path) -> None:
    try:
        if not zipfile.is_zipfile(file):  # as old versions of torch wrote
            return
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise CorruptError(f"{path} is a damaged archive ({error}). Copy it again from where it came.") from error
    if damaged is not None:
        raise CorruptError(
            f"{path} is damaged: the checksum of {damaged!r} inside it does not match. Copy it "
            "again from where it came."
        )


_DAMAGE = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    AttributeError,
    AssertionError,
    MemoryError,
    PickleError,
)
"""What torch raises about files that are not whole, beside struct's error."""


def _torch_load(torch: Any, file: BinaryIO, where: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (*_DAMAGE, struct.error) as error:
        refused = re.search(
            r"GLOBAL (\S+)|unrecognized function <[^>]*?(\w+)[^>]*>|Unsupported class (\S+)", str(error)
        )
        if refused:
            asked = next(name for name in refused.groups() if name).rstrip(".,")
            raise UnsafeError(
                f"{where} asks for {asked}, which a file of tensors does not; it was refused and nothing was run. "
                f"If you made the file yourself, save plain dictionaries of tensors, numbers and text."
            ) from error
        reported = re.search(r"WeightsUnpickler error: (.+)", str(error))
        reason = (reported.group(1) if reported else str(error) or type(error).__name__).splitlines()[0][:150]
        raise CorruptError(
            f"{where} is not a whole file of torch.save ({reason}). Copy it again from where it came."
        ) from error


def _stand_ins(where: str) -> dict[tuple[str, str], Any]:
    """What a pickle of tensors names, each replaced by a function that checks what it is given."""
    torch = import_torch()

    def load_from_bytes(data: bytes) -> object:
        storage = _torch_load(torch, io.BytesIO(data), where)
        if not isinstance(storage, torch.storage.TypedStorage):
            raise UnsafeError(
                f"{where} has a {type(storage).__name__} for a tensor's memory; it was refused. Save plain tensors."
            )
        return storage

    def rebuild_tensor(
        storage: object,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        requires_grad: bool,
        hooks: object,
        *_: Any,
    ) -> Tensor:
        if not isinstance(storage, torch.storage.TypedStorage) or hooks:
            raise UnsafeError(f"{where} has a tensor with hooks or without memory; it was refused. Save plain tensors.")
        available = storage._untyped_storage.nbytes() // storage.dtype.itemsize
        if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
            raise ValueError(f"a tensor of shape {size!r} and strides {stride!r}"[:200])
        reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0
        if reach > available or math.prod(size) > available:  # torch would enlarge the memory, up to any size
            raise ValueError(f"a tensor of shape {size!r} on {available} elements"[:200])
        if requires_grad and not (storage.dtype.is_floating_point or storage.dtype.is_complex):
            raise ValueError(f"a tensor of {storage.dtype} with gradients")
        return torch._utils._rebuild_tensor_v2(storage, offset, tuple(size), tuple(stride), bool(requires_grad), None)

    return {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
        ("torch.storage", "_load_from_bytes"): load_from_bytes,
        ("torch", "Size"): lambda size: torch.Size([int(n) for n in size]),
        **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    }
