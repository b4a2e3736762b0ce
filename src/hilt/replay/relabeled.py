"""Values that replace those of rows: by column and key, put into batches when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hilt.core.errors import CorruptError
from hilt.core.tree import Array


class RelabeledValues:
    """The newest value of each step that was relabeled. Batches are made while values are added."""

    def __init__(self, file: str):
        self._file = file  # that they were read from, for errors
        self.by_column: dict[str, dict[int, Any]] = {}
        """Column, key of the step, and its value."""
        self._sorted: dict[str, tuple[Array, Array]] = {}  # the same as sorted keys and values, made for a batch
        self._lock = threading.Lock()

    def put(self, column: str, first: int, values: Iterable[Any]) -> None:
        """Consecutive steps, the first of which has this key, get these values."""
        with self._lock:
            self._sorted.pop(column, None)
            self.by_column.setdefault(column, {}).update({first + i: value for i, value in enumerate(values)})

    def take_out(self, column: str, first: int, count: int) -> None:
        """Consecutive steps have the values of their rows again."""
        with self._lock:
            self._sorted.pop(column, None)
            known = self.by_column.get(column, {})
            for key in range(first, first + count):
                known.pop(key, None)
            if not known:
                self.by_column.pop(column, None)

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Forgets the values of all keys but the wanted ones."""
        with self._lock:
            kept = {c: {k: v for k, v in known.items() if wanted(k)} for c, known in self.by_column.items()}
            self.by_column, self._sorted = {column: known for column, known in kept.items() if known}, {}

    def overlay(self, keys: Array, batch: Mapping[str, Array]) -> None:
        """Puts the values into a batch of these steps."""
        for column in batch:
            with self._lock:
                known = self.by_column.get(column)
                if known is None:
                    continue
                if column not in self._sorted:
                    order = sorted(known)
                    values = self._as_array(column, [known[key] for key in order], batch[column])
                    self._sorted[column] = np.array(order, np.int64), values
                relabeled, values = self._sorted[column]
            place = np.minimum(np.searchsorted(relabeled, keys), len(relabeled) - 1)
            there = relabeled[place] == keys
            batch[column][there] = values[place[there]]

    def renew_lock(self) -> None:
        """In a forked process."""
        self._lock = threading.Lock()

    def _as_array(self, column: str, values: list[Any], like: Array) -> Array:
        """Relabeled values as an array; values of a file that another program wrote are checked."""
        try:
            made = np.array(values, like.dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise CorruptError(f"{self._file}: relabeled values of {column} are not {like.dtype} ({error}).") from None
        if made.shape[1:] != like.shape[1:]:
            raise CorruptError(
                f"{self._file}: relabeled values of {column} have shape {made.shape[1:]}, expected {like.shape[1:]}."
            )
        return made
