"""Other people's replay buffers, fed with the same data. Each is asked in its own
words, with its input ready in its own types."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import version_of

Array = npt.NDArray[Any]


class Peer(ABC):
    """One buffer. `columns` are flat ``[T, ...]`` arrays by name."""

    name: str
    package: str
    on_disk = False

    @classmethod
    def absent(cls) -> str | None:
        """Why it cannot be measured here, or None."""
        try:
            importlib.import_module(cls.package)
        except ImportError as error:
            return f"{error}; install it: pip install -c constraints.txt '.[bench]'"
        return None

    @classmethod
    def title(cls) -> str:
        return f"{cls.name} {version_of(cls.package)}"

    @abstractmethod
    def __init__(self, capacity: int, example: dict[str, Array], batch: int, folder: Path): ...

    @abstractmethod
    def steps(self, columns: dict[str, Array]) -> list[Any]:
        """The single steps in the type that the peer takes."""

    @abstractmethod
    def block(self, columns: dict[str, Array]) -> Any:
        """All of them in one, likewise."""

    @abstractmethod
    def add_one(self, step: Any) -> None: ...

    @abstractmethod
    def add_block(self, block: Any) -> None: ...

    @abstractmethod
    def sample(self) -> Any: ...

    @abstractmethod
    def files(self) -> list[Path]:
        """Its files, when it is on disk."""


class Cpprb(Peer):
    name, package = "cpprb", "cpprb"

    def __init__(self, capacity: int, example: dict[str, Array], batch: int, folder: Path):
        from cpprb import ReplayBuffer

        columns = {_safe(k): {"shape": v.shape[1:] or 1, "dtype": v.dtype} for k, v in example.items()}
        self._buffer, self._batch = ReplayBuffer(capacity, columns), batch

    def steps(self, columns: dict[str, Array]) -> list[Any]:
        named = self.block(columns)
        return [{k: v[i] for k, v in named.items()} for i in range(len(next(iter(named.values()))))]

    def block(self, columns: dict[str, Array]) -> Any:
        return {_safe(k): v for k, v in columns.items()}

    def add_one(self, step: Any) -> None:
        self._buffer.add(**step)

    add_block = add_one

    def sample(self) -> Any:
        return self._buffer.sample(self._batch)

    def files(self) -> list[Path]:
        return []


class TorchRL(Peer):
    package = "torchrl"

    def __init__(self, capacity: int, example: dict[str, Array], batch: int, folder: Path):
        from torchrl.data import ReplayBuffer

        self._folder = folder
        self._buffer = ReplayBuffer(storage=self._storage(capacity), batch_size=batch)

    def _storage(self, capacity: int) -> Any:
        raise NotImplementedError

    @classmethod
    def absent(cls) -> str | None:
        os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
        return super().absent()

    def steps(self, columns: dict[str, Array]) -> list[Any]:
        return list(self.block(columns).unbind(0))

    def block(self, columns: dict[str, Array]) -> Any:
        import torch
        from tensordict import TensorDict

        length = len(next(iter(columns.values())))
        return TensorDict({k: torch.from_numpy(np.array(v)) for k, v in columns.items()}, [length])

    def add_one(self, step: Any) -> None:
        self._buffer.add(step)

    def add_block(self, block: Any) -> None:
        self._buffer.extend(block)

    def sample(self) -> Any:
        return self._buffer.sample()

    def files(self) -> list[Path]:
        return [p for p in self._folder.rglob("*") if p.is_file()] if self._folder.exists() else []


class TorchRLTensor(TorchRL):
    name = "torchrl LazyTensorStorage"

    def _storage(self, capacity: int) -> Any:
        from torchrl.data import LazyTensorStorage

        return LazyTensorStorage(capacity)


class TorchRLMemmap(TorchRL):
    name, on_disk = "torchrl LazyMemmapStorage", True

    def _storage(self, capacity: int) -> Any:
        from torchrl.data import LazyMemmapStorage

        return LazyMemmapStorage(capacity, scratch_dir=self._folder)


PEERS: tuple[type[Peer], ...] = (Cpprb, TorchRLMemmap, TorchRLTensor)


def installed(wanted: tuple[type[Peer], ...] = PEERS) -> tuple[list[type[Peer]], dict[str, str]]:
    """(peers that can be measured, reasons of the others)."""
    absent: dict[str, str] = {}
    found = []
    for peer in wanted:
        reason: str | None = peer.absent()
        if reason is None:
            found.append(peer)
        else:
            absent[peer.name] = reason
    return found, absent


def one_torch_thread() -> None:
    """Threads beyond the free cores make torch gathers many times slower; one is the fairest on any machine."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


def _safe(name: str) -> str:
    return name.replace(".", "_")
