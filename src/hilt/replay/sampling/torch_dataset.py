"""A view of a log as a dataset of ``torch.utils.data``.

    # map style: steps[3], DataLoader(steps, 256, shuffle=True)
    steps = StepDataset(log.successes(), ["observations", "actions"])
    # shuffled epochs, in an order that neither workers nor a resume change
    loader = StepLoader(steps, 256, seed=0, workers=2)
    for epoch in range(10):
        for batch in loader:
            ...
    state = loader.state_dict()

A dataset has the steps that the view held when it was made. Every process reads the log through a reader of its own, so
it can be sent to workers however they are started, while the log's writer goes on.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hilt.core.errors import ConfigError
from hilt.core.tree import Array
from hilt.replay.log import Log
from hilt.replay.tensors import generator, map_tree, to_torch
from hilt.replay.view import View

Batch = dict[str, Any]
"""Nested tensors by name"""
TIMEOUT_S = 600
"""Seconds after which a batch that no worker delivers is an error"""


class StepDataset(Dataset[Batch]):
    """The steps of a view, oldest trajectory first: ``steps[i]`` is one of them, as nested tensors. Map style."""

    def __init__(self, view: View, columns: Sequence[str] | None = None):
        """`columns` names single columns or whole subtrees, such as ``observations``; None: all of them."""
        view.require_steps()
        self.path, self.keys = Path(view.log.path).absolute(), view.keys()
        self.columns = view.log.schema.select(columns)
        self._log: Log | None = view.log
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Several steps at once; what ``DataLoader`` calls for a batch."""
        batch = self.batch(np.asarray(indices, np.int64))
        return [map_tree(lambda leaf, path, place=place: leaf[place], batch) for place in range(len(indices))]  # type: ignore[misc]

    def batch(self, indices: Array) -> Batch:
        """The steps at these places as one batch, without stacking them one by one."""
        return to_torch(self._reader().read(self.keys[indices], self.columns))  # type: ignore[no-any-return]

    def fingerprint(self) -> int:
        """A checksum of which steps these are."""
        return zlib.crc32(np.ascontiguousarray(self.keys, "<i8").tobytes())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None}

    def _reader(self) -> Log:
        # a log belongs to the process that opened it
        if self._log is None or self._log.closed or self._process != os.getpid():
            self._log, self._process = Log.open(self.path, "r"), os.getpid()
        return self._log


class StepBatches(IterableDataset[Batch]):
    """Batches of a dataset, epoch after epoch. Iterable style: ``DataLoader(stream, batch_size=None, num_workers=2)``.

    Which steps a batch has follows from the seed and the number of the batch alone. Workers share out the numbers, and
    ``DataLoader`` takes batches from them in turn, so the order does not depend on how many there are.
    """

    def __init__(
        self,
        steps: StepDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        epochs: int | None = None,
        first: int = 0,
    ):
        """`drop_last` leaves out the last batch of an epoch if it is smaller than the others. `epochs` is the number of
        epochs, None: without end. `first` is the number of the batch to begin with, counted through all epochs."""
        if batch_size < 1 or (drop_last and batch_size > len(steps)):
            raise ConfigError(
                f"batch_size={batch_size}: expected 1 to {len(steps)}, the number of steps in the dataset."
            )
        if seed < 0 or first < 0:
            raise ConfigError(f"seed={seed}, first={first}: expected whole numbers from 0 up.")
        self.steps, self.batch_size, self.shuffle, self.seed, self.drop_last = (
            steps,
            batch_size,
            shuffle,
            seed,
            drop_last,
        )
        self.epochs, self.first = epochs, first

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(len(self.steps), self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def order(self, epoch: int) -> Array:
        """The places of all steps, in the order in which this epoch has them."""
        count = len(self.steps)
        return np.random.default_rng([self.seed, epoch]).permutation(count) if self.shuffle else np.arange(count)

    def __iter__(self) -> Iterator[Batch]:
        worker, per_epoch, known, order = get_worker_info(), self.batches_per_epoch, -1, np.zeros(0, np.int64)
        begin, step = (self.first, 1) if worker is None else (self.first + worker.id, worker.num_workers)
        for number in itertools.count(begin, step):
            epoch, place = divmod(number, per_epoch)
            if self.epochs is not None and epoch >= self.epochs:
                return
            if epoch != known:
                known, order = epoch, self.order(epoch)
            yield self.steps.batch(order[place * self.batch_size : (place + 1) * self.batch_size])


class StepLoader:
    """Epochs of batches with a state: ``for batch in loader`` goes through one epoch,
    or through the rest of the one that was left.

    A loader that loads the state of another goes on with the batch after the last one that the other delivered, bit for
    bit, whatever number of workers either has. The random generators of torch and numpy are not touched.
    """

    def __init__(
        self,
        steps: StepDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        ahead: int = 2,
        pin_memory: bool | None = None,
        context: str | None = None,
    ):
        """`workers` is the number of processes that read batches, 0: this one does, and `ahead` the number of
        batches that each of them prepares in advance. `pin_memory` copies batches into page-locked memory, for
        asynchronous copies to a GPU; None: if there is one. `context` is how workers are started: "fork", "spawn"
        or "forkserver"; None: as Python does on this system."""
        if workers < 0 or ahead < 1:
            raise ConfigError(f"workers={workers}, ahead={ahead}: expected at least 0 workers, and 1 batch ahead.")
        if context is not None and not workers:
            raise ConfigError(
                f"context={context!r} is how workers are started, and there are none: set workers, or leave it out."
            )
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError("pin_memory=True is for copies to a GPU, and torch finds none here: leave it out.")
        self._stream = StepBatches(steps, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._workers, self._ahead, self._context = workers, ahead, context
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._delivered = 0
        self._running: Iterator[Batch] | None = None

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next batch is of, from 0."""
        return self._delivered // len(self)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._stream.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        end = (self.epoch + 1) * len(self)
        while self._delivered < end:
            if self._running is None:
                self._running = self._started()
            batch = next(self._running)
            self._delivered += 1
            yield batch

    def state_dict(self) -> dict[str, object]:
        """Where it is, as plain numbers, and of which batches: for a checkpoint."""
        stream = self._stream
        settings = {
            "batch_size": stream.batch_size,
            "shuffle": stream.shuffle,
            "seed": stream.seed,
            "drop_last": stream.drop_last,
        }
        return {
            "delivered": self._delivered,
            "steps": len(stream.steps),
            "fingerprint": stream.steps.fingerprint(),
            **settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the last batch of the loader whose state this is. One of other steps or settings is refused."""
        own = self.state_dict()
        differs = [
            f"{name} {state.get(name)}, here {own[name]}"
            for name in own
            if name != "delivered" and state.get(name) != own[name]
        ]
        if differs or int(state.get("delivered", -1)) < 0:
            found = "; ".join(differs) or f"delivered {state.get('delivered')}"
            raise ConfigError(
                f"the state is of a loader of other batches ({found}): make this one with the same view and settings."
            )
        self.close()
        self._delivered = int(state["delivered"])

    def close(self) -> None:
        """Ends the workers; the next batch starts them anew."""
        self._running = None

    def _started(self) -> Iterator[Batch]:
        self._stream.first = self._delivered
        options: dict[str, Any] = {
            "num_workers": self._workers,
            "pin_memory": self._pin,
            "generator": generator(self._stream.seed),
        }
        if self._workers:
            options |= {"prefetch_factor": self._ahead, "timeout": TIMEOUT_S, "multiprocessing_context": self._context}
        return iter(DataLoader(self._stream, batch_size=None, **options))
