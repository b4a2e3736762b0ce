"""Everything of the store that needs torch: tensors, their files, their devices and their random numbers.

The only file under ``replay`` that imports torch, and only inside its functions, so that a robot's computer can do
without it. Files are read with ``weights_only`` or through `hilt.core.unpickle`: neither runs what a file carries.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, MissingPackageError, SchemaError, UnsafeError
from hilt.core.files import storage_errors
from hilt.core.unpickle import PickleError, dump, safe_load

Tensor: TypeAlias = Any
Device: TypeAlias = Any
Generator: TypeAlias = Any


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


def to_torch(tree: Mapping[str, Any], device: Device | Sequence[Device] | str | None = None) -> Any:
    """The same nested dictionary with a tensor for each array; for a list of devices, a list with one whole copy for each.

    On the CPU a tensor shares the array's memory, so writing to one writes to the other; an array that cannot be written
    to, or whose bytes are in another machine's order, is copied. For CUDA the bytes go through pinned memory and the copy
    is asynchronous: the tensors may be used at once on the current stream.
    """
    place = check_device(device)
    if isinstance(place, list):
        return [_convert(tree, one, "") for one in place]
    return _convert(tree, place, "")


def mover(device: Any) -> Callable[[Mapping[str, Any]], Any]:
    """`to_torch` for one device, checked now rather than at the first batch."""
    place = check_device(device)
    return lambda tree: to_torch(tree, place)


def _convert(tree: Mapping[str, Any], device: Device | None, prefix: str) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            converted[key] = _convert(value, device, f"{path}/")
            continue
        tensor = as_tensor(value, path)
        if device is not None and device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        elif device is not None:
            tensor = tensor.to(device)
        converted[key] = tensor
    return converted


def as_tensor(value: Any, path: str) -> Tensor:
    """A tensor from an array or a number; tensors pass unchanged. `path` names the field in the error."""
    torch = import_torch()
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        raise SchemaError(f"{path} is a {type(value).__name__}; tensors are made of arrays and numbers. Leave it out or convert it.")
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise SchemaError(f"{path} has dtype {array.dtype}, of which torch has no tensors. Convert it to numbers.") from error


def to_numpy(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same nested dictionary with an array for each tensor, sharing memory where the tensor is on the CPU.

    numpy has no bfloat16 and no 8-bit floats: these come back as float32, which holds each of their values exactly.
    """
    return _arrays(tree, "")


def _arrays(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        converted[key] = _arrays(value, f"{path}/") if isinstance(value, Mapping) else tensor_to_numpy(value, path)
    return converted


def tensor_to_numpy(value: Any, path: str) -> npt.NDArray[Any]:
    """One tensor as an array; arrays pass unchanged. `path` names the field in the error."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, (np.generic, bool, int, float)):
        return np.asarray(value)
    torch = import_torch()
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise SchemaError(f"{path} is a {type(value).__name__}, not a dense tensor or an array. Leave this field out or convert it.")
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Equal tensors along a new first dimension."""
    return import_torch().stack(list(tensors), dim=0)


def concatenate(leaves: Sequence[Any], axis: int) -> Tensor:
    """Tensors or arrays, one behind the other along a dimension, as a tensor."""
    return import_torch().cat([as_tensor(leaf, "a batch") for leaf in leaves], dim=axis)


def choose(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Element by element, `yes` where the condition holds and `no` elsewhere."""
    return import_torch().where(condition, yes, no)


def as_bool(tensor: Tensor) -> Tensor:
    return tensor.to(import_torch().bool)


# Devices


def check_device(device: Any) -> Any:
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
        raise ConfigError(f"device {str(place)!r} is not on this machine, which has {torch.cuda.device_count()} CUDA devices; {wanted}.")
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
    """`n` numbers below `high` with replacement: the numbers that ``torch.randint(0, high, (n,), generator=source)`` gives."""
    drawn: npt.NDArray[np.int64] = import_torch().randint(0, high, (n,), generator=source).numpy()
    return drawn


def generator_state(source: Generator) -> npt.NDArray[np.uint8]:
    """Where the generator stands, as bytes that `set_generator_state` takes."""
    state: npt.NDArray[np.uint8] = source.get_state().numpy().copy()
    return state


def set_generator_state(source: Generator, state: npt.NDArray[np.uint8] | bytes) -> None:
    """Put the generator where it stood."""
    raw = np.frombuffer(state, np.uint8) if isinstance(state, bytes) else np.asarray(state, np.uint8)
    try:
        source.set_state(import_torch().from_numpy(raw.copy()))
    except RuntimeError as error:
        raise CorruptError(f"a random generator's state of {raw.size} bytes is not one of torch's. Start from a seed instead.") from error


# Files of tensors


def load_pt(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dictionary in a file of ``torch.save``, on the CPU. Its checksums are verified, which ``torch.load`` does not do."""
    path = Path(path)
    torch = import_torch()
    with storage_errors(path), path.open("rb") as file:
        if zipfile.is_zipfile(file):
            _verify_zip(file, path)
        file.seek(0)
        return _dictionary(_torch_load(torch, file, str(path)), path)


def load_pkl(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dictionary of tensors in a pickle, as RLinf writes with ``trajectory_format="pkl"``. Such files carry no checksum."""
    path = Path(path)
    with storage_errors(path), path.open("rb") as file:
        return _dictionary(safe_load(file, where=str(path), extra=_stand_ins(str(path))), path)


def save_pt(value: Mapping[str, Any], file: str | os.PathLike[str] | BinaryIO) -> None:
    """Write a nested dictionary of tensors, arrays, numbers and text so that ``torch.load(weights_only=True)`` reads it."""
    import_torch().save(_portable(value, ""), file)


def save_pkl(value: Mapping[str, Any], file: str | os.PathLike[str] | BinaryIO) -> None:
    """The same as a pickle of tensors, for programs that read nothing else."""
    if isinstance(file, (str, os.PathLike)):
        with storage_errors(Path(file)), Path(file).open("wb") as opened:
            dump(_portable(value, ""), opened)
    else:
        dump(_portable(value, ""), file)


def _portable(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Plain dictionaries and tensors that own just their elements: a view would be saved with all that it is a view of."""
    portable: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            portable[key] = _portable(value, f"{prefix}{key}/")
        elif value is None or isinstance(value, (str, bool, int, float)):
            portable[key] = value
        else:
            tensor = as_tensor(value, f"{prefix}{key}").detach().cpu().contiguous()
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            portable[key] = tensor if whole else tensor.clone()
    return portable


def _dictionary(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds a {type(value).__name__}; a trajectory file holds a dictionary. Check which file this is.")
    return value


def _verify_zip(file: BinaryIO, path: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise CorruptError(f"{path} is a damaged archive ({error}). Copy it again from where it came.") from error
    if damaged is not None:
        raise CorruptError(f"{path} is damaged: the checksum of {damaged!r} inside it does not match. Copy it again from where it came.")


def _torch_load(torch: Any, file: BinaryIO, where: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except HiltError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError, AssertionError, PickleError) as error:
        refused = re.search(r"GLOBAL (\S+)|unrecognized function <[^>]*?(\w+)[^>]*>|Unsupported class (\S+)", str(error))
        if refused:
            asked = next(name for name in refused.groups() if name).rstrip(".,")
            raise UnsafeError(
                f"{where} asks for {asked}, which a file of tensors does not; it was refused and nothing was run. "
                f"If you made the file yourself, save plain dictionaries of tensors, numbers and text."
            ) from error
        said = re.search(r"WeightsUnpickler error: (.+)", str(error))
        reason = (said.group(1) if said else str(error) or type(error).__name__).splitlines()[0][:150]
        raise CorruptError(f"{where} is not a whole file of torch.save ({reason}). Copy it again from where it came.") from error


def _stand_ins(where: str) -> dict[tuple[str, str], Any]:
    """What a pickle of tensors names, each replaced by a function that checks what it is given."""
    torch = import_torch()

    def load_from_bytes(data: Any) -> Any:
        if not isinstance(data, bytes):
            raise CorruptError(f"{where} has a tensor without bytes. Copy it again from where it came.")
        storage = _torch_load(torch, io.BytesIO(data), where)
        if not isinstance(storage, torch.storage.TypedStorage):
            raise UnsafeError(f"{where} has a {type(storage).__name__} for a tensor's memory; it was refused. Save plain tensors.")
        return storage

    def rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *_: Any) -> Tensor:
        if not isinstance(storage, torch.storage.TypedStorage) or hooks:
            raise UnsafeError(f"{where} has a tensor with hooks or without memory; it was refused. Save plain tensors.")
        available = storage._untyped_storage.nbytes() // storage.dtype.itemsize
        numbers = [offset, *size, *stride]
        if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
            raise CorruptError(f"{where} has a tensor of shape {size!r} and strides {stride!r}. Copy it again from where it came."[:300])
        reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0
        if reach > available or math.prod(size) > available:  # torch would enlarge the memory, up to any size
            raise CorruptError(f"{where} has a tensor of shape {tuple(size)} on {available} elements. Copy it again from where it came.")
        return torch._utils._rebuild_tensor_v2(storage, offset, tuple(size), tuple(stride), bool(requires_grad), None)

    return {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
        ("torch.storage", "_load_from_bytes"): load_from_bytes,
        ("torch", "Size"): lambda size: torch.Size([int(n) for n in size]),
        **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    }


# Tensors that numpy has no type for


def raw_array(value: Any, path: str) -> tuple[npt.NDArray[Any], str]:
    """One tensor as an array of the same bits, and the name of its own type when numpy has none for it (bfloat16), else ""."""
    torch = import_torch()
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
        bits = {1: torch.uint8, 2: torch.int16}[value.element_size()]
        return tensor_to_numpy(value.detach().cpu().contiguous().view(bits), path), str(value.dtype).removeprefix("torch.")
    return tensor_to_numpy(value, path), ""


def from_raw_array(array: npt.NDArray[Any], name: str) -> Tensor:
    """The tensor that `raw_array` came from, sharing the array's memory."""
    torch = import_torch()
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, name)) if name else tensor
