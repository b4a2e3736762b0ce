"""`Batch`: rows of tensors, of objects beside them, and facts about all of them. It
has the operations of verl's ``DataProto``.

    batch = Batch.from_single_dict({"responses": tokens, "task_suite_name": names}, meta_info={"temperature": 1.6})
    first, second = batch.chunk(2)
    again = Batch.concat([first, second])

Tensors are in a plain dictionary, `batch`; arrays of objects in `non_tensor_batch`; what is not by row in `meta_info`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.replay.tensors import generator

Meta = Mapping[str, Any] | None


class Batch:
    """Rows. Every tensor and every array has as many; a change of one key does not touch another batch."""

    def __init__(
        self, batch: Mapping[str, Tensor], non_tensor_batch: Mapping[str, Any] | None = None, meta_info: Meta = None
    ):
        self.batch = dict(batch)
        self.non_tensor_batch = {key: objects(values) for key, values in (non_tensor_batch or {}).items()}
        self.meta_info = dict(meta_info or {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raises where a key has more or fewer rows than the first."""
        columns: dict[str, Any] = {**self.batch, **self.non_tensor_batch}
        if not columns and self.meta_info:
            return  # facts alone, such as the figures of an update
        if not columns:
            raise SchemaError("a batch was given no key; it needs at least one, to know how many rows it has.")
        for key, values in self.batch.items():
            if not isinstance(values, Tensor) or not values.ndim:
                raise SchemaError(
                    f"{key} is {type(values).__name__}; expected is a tensor with one row for each sample."
                )
        first = next(iter(columns))
        for key, values in columns.items():
            if len(values) != len(columns[first]):
                raise SchemaError(
                    f"{key} has {len(values)} rows and {first} {len(columns[first])}; all keys of a batch have as many."
                )

    # --- made of dictionaries ---

    @classmethod
    def from_single_dict(cls, data: Mapping[str, object], meta_info: Meta = None) -> Batch:
        """Tensors and arrays from one dictionary, such as `collate_fn` gives."""
        for key, values in data.items():
            if not isinstance(values, (Tensor, np.ndarray)):
                raise SchemaError(
                    f"{key} is {type(values).__name__}; expected is a tensor, or a numpy array of objects."
                )
        arrays = {key: values for key, values in data.items() if isinstance(values, np.ndarray)}
        return cls({key: values for key, values in data.items() if key not in arrays}, arrays, meta_info)

    @classmethod
    def from_dict(
        cls, tensors: Mapping[str, Tensor], non_tensors: Mapping[str, object] | None = None, meta_info: Meta = None
    ) -> Batch:
        return cls(tensors, non_tensors, meta_info)

    def __len__(self) -> int:
        return len(next(iter({**self.batch, **self.non_tensor_batch}.values()), ()))

    # --- keys ---

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Batch:
        """Only these keys of each part; all of a part where None is given. Tensors are shared, unless `deepcopy`."""
        parts = [
            dict(part) if keys is None else {key: _get(part, key) for key in keys}
            for part, keys in self._parts(batch_keys, non_tensor_batch_keys, meta_info_keys)
        ]
        return Batch(*(copy.deepcopy(parts) if deepcopy else parts))

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> Batch:
        """The same keys, taken out of this batch."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for part, keys in self._parts(batch_keys, non_tensor_batch_keys, meta_info_keys):
            for key in keys or ():
                del part[key]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Batch:
        """Tensors under other names, in place."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ConfigError(f"{len(old)} keys are to be renamed and {len(new)} names were given; give as many.")
        if taken := [key for key in new if key in self.batch and key not in old]:
            raise ConfigError(f"{taken[0]} is in this batch already; pop() it first, or take another name.")
        found = {key: _get(self.batch, key) for key in old}
        self.batch = {key: values for key, values in self.batch.items() if key not in found} | dict(
            zip(new, found.values(), strict=True)
        )
        return self

    def union(self, other: Batch) -> Batch:
        """The keys of both, in place. A key that both have must hold the same."""
        if len(self) != len(other):
            raise SchemaError(
                f"batches of {len(self)} and of {len(other)} rows have no union; concat() puts rows after one another."
            )
        theirs = (other.batch, other.non_tensor_batch, other.meta_info)
        for (part, _), more in zip(self._parts(), theirs, strict=True):
            for key, values in more.items():
                if key in part and not _same(part[key], values):
                    raise SchemaError(
                        f"both batches have {key}, and it differs: pop() it from one of them, or rename() it."
                    )
            part.update(more)
        return self

    # --- rows ---

    def __getitem__(self, rows: Any) -> Batch:
        """The rows of a number, slice, range, mask or list of numbers. One number gives a batch of one row."""
        if not isinstance(rows, slice):
            rows = np.atleast_1d(rows.cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows))
            rows = rows if rows.dtype == bool else rows.astype(np.int64)
        places = np.arange(len(self))[rows]
        arrays = {key: values[places] for key, values in self.non_tensor_batch.items()}
        found = torch.from_numpy(places)
        return Batch(
            {key: values[found.to(values.device)] for key, values in self.batch.items()}, arrays, self.meta_info
        )

    def slice(self, index: object) -> Batch:
        """The same, by its name there."""
        return self[index]

    def reorder(self, indices: object) -> None:
        """In place."""
        moved = self[indices]
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def chunk(self, chunks: int) -> list[Batch]:
        """Splits the rows into this number of pieces, of as many rows each or one more. There, tensors and arrays are
        cut at other rows where it does not divide."""
        if not 0 < chunks <= len(self):
            raise ConfigError(
                f"{len(self)} rows do not make {chunks} pieces of at least one row; give from 1 to {len(self)}."
            )
        return [self[piece] for piece in np.array_split(np.arange(len(self)), chunks)]

    @staticmethod
    def concat(data: Sequence[Batch]) -> Batch:
        """Rows after one another, with the facts of the first."""
        if not data:
            raise SchemaError("concat() was given no batch; give it at least one.")
        first = data[0]
        for each in data:
            if (each.batch.keys(), each.non_tensor_batch.keys()) != (first.batch.keys(), first.non_tensor_batch.keys()):
                apart = {*each.batch, *each.non_tensor_batch} ^ {*first.batch, *first.non_tensor_batch}
                raise SchemaError(
                    f"only some of the batches have {', '.join(sorted(apart))}; pop() it, or add it to the others."
                )
        tensors = {key: torch.cat([each.batch[key] for each in data]) for key in first.batch}
        arrays = {key: np.concatenate([each.non_tensor_batch[key] for each in data]) for key in first.non_tensor_batch}
        return Batch(tensors, arrays, first.meta_info)

    def make_iterator(self, mini_batch_size: int, epochs: int, seed: int | None = None) -> Iterator[Batch]:
        """Mini-batches of `epochs` passes; with a seed, each in an order of its own.
        There, a seed shuffles nothing by itself."""
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ConfigError(
                f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}: choose "
                "a size that divides them."
            )
        draws = None if seed is None else generator(seed)

        def batches() -> Iterator[Batch]:
            for _ in range(epochs):
                order = torch.arange(len(self)) if draws is None else torch.randperm(len(self), generator=draws)
                for rows in order.split(mini_batch_size):
                    yield self[rows]

        return batches()

    def to(self, device: str | torch.device) -> Batch:
        """Tensors to a device, in place."""
        self.batch = {key: values.to(device) for key, values in self.batch.items()}
        return self

    def _parts(self, *keys: Sequence[str] | None) -> Iterator[tuple[dict[str, Any], Sequence[str] | None]]:
        parts: tuple[dict[str, Any], ...] = (self.batch, self.non_tensor_batch, self.meta_info)
        return zip(parts, keys or (None, None, None), strict=True)


def _get(part: Mapping[str, Any], key: str) -> Any:
    if key not in part:
        raise UnknownNameError("key of this batch", key, part)
    return part[key]


def objects(values: Sequence[object]) -> np.ndarray:
    """An array of objects with one dimension, whatever the objects are."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    made = np.empty(len(values), object)
    made[:] = list(values)
    return made


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b.to(a.device)))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
