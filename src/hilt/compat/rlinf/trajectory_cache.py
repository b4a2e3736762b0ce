"""The newest trajectories in memory, flattened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hilt.core.errors import SchemaError, explained_calls
from hilt.core.tree import Array, flatten, unflatten
from hilt.replay import tensors as bridge
from hilt.replay.settings import as_whole_number

if TYPE_CHECKING:
    from torch import Tensor


@explained_calls
class TrajectoryCache:
    """First in, first out. All trajectories lie in one buffer of equal slots, so a batch of any of them is one gather.

    A slot is as long as the longest trajectory seen; a longer one makes all slots longer.
    """

    def __init__(self, max_size: int = 5):
        self.max_size = as_whole_number(
            "max_size", max_size, "the number of trajectories; without a cache, give enable_cache=False", 1
        )
        self.cache: dict[int, int] = {}
        """Trajectory number to slot, oldest first"""
        self._lengths: dict[int, int] = {}
        self._slot_length = 0
        self._buffer: dict[str, Array] = {}
        self._types: dict[str, str] = {}

    def put(self, trajectory_id: int, flat: Mapping[str, Tensor]) -> None:
        """Keeps a flattened trajectory, fields ``[T * B, ...]``, tensors or arrays; the oldest one makes room."""
        raw = {path: bridge.raw_array(value, path) for path, value in flatten(flat).items() if hasattr(value, "shape")}
        arrays = {path: array for path, (array, _) in raw.items() if array.ndim}
        if not arrays:
            raise SchemaError("Trajectory contains no tensor fields.")
        if self._buffer and set(arrays) != set(self._buffer):
            odd = sorted(set(arrays) ^ set(self._buffer))[0]
            where = "lacks this field" if odd in self._buffer else "has this field and the others do not"
            raise SchemaError(
                f"{odd}: trajectory {trajectory_id} {where}; all trajectories of a cache have the same fields."
            )
        length = len(next(iter(arrays.values())))
        slot = self._slot_for(trajectory_id)
        self._types.update({path: name for path, (_, name) in raw.items()})
        if length > self._slot_length or not self._buffer:
            self._grow(arrays, length)
        start = slot * self._slot_length
        for path, array in arrays.items():
            self._buffer[path][start : start + length] = array
        self.cache[trajectory_id], self._lengths[trajectory_id] = slot, length

    def get(self, trajectory_id: int) -> dict[str, Tensor] | None:
        """The flattened trajectory, sharing the cache's memory, or None."""
        if trajectory_id not in self.cache:
            return None
        start = self.cache[trajectory_id] * self._slot_length
        stop = start + self._lengths[trajectory_id]
        return unflatten(
            {path: bridge.from_raw_array(array[start:stop], self._types[path]) for path, array in self._buffer.items()}
        )

    def get_buffer(self) -> dict[str, object]:
        """All slots, one behind the other: fields ``[max_size * slot length, ...]``."""
        return unflatten(
            {path: bridge.from_raw_array(array, self._types[path]) for path, array in self._buffer.items()}
        )

    def get_slot_length(self) -> int:
        return self._slot_length

    def clear(self) -> None:
        self.cache, self._lengths, self._buffer, self._types, self._slot_length = {}, {}, {}, {}, 0

    def discard(self, trajectory_id: int) -> None:
        """Forgets one trajectory."""
        self.cache.pop(trajectory_id, None)
        self._lengths.pop(trajectory_id, None)

    def take(self, path: str, trajectory_ids: Array, rows: Array, out: Array) -> None:
        """Rows of one field, each of its own trajectory, into `out`."""
        slots = np.array([self.cache[number] for number in trajectory_ids.tolist()], np.int64)
        np.take(self._buffer[path], slots * self._slot_length + rows, axis=0, out=out, mode="clip")

    def __len__(self) -> int:
        return len(self.cache)

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._buffer.values())

    def _slot_for(self, trajectory_id: int) -> int:
        if trajectory_id in self.cache:
            return self.cache[trajectory_id]
        if len(self.cache) < self.max_size:
            return min(set(range(self.max_size)) - set(self.cache.values()))
        oldest = next(iter(self.cache))
        slot = self.cache[oldest]
        self.discard(oldest)
        return slot

    def _grow(self, arrays: Mapping[str, Array], length: int) -> None:
        old, old_length = self._buffer, self._slot_length
        self._buffer = {path: np.zeros((self.max_size * length, *a.shape[1:]), a.dtype) for path, a in arrays.items()}
        for number, slot in self.cache.items():
            n = self._lengths[number]
            for path, array in self._buffer.items():
                array[slot * length : slot * length + n] = old[path][slot * old_length : slot * old_length + n]
        self._slot_length = length
