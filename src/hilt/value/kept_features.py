"""Features that a frozen policy computed of the steps of a log, kept in the log's folder, so that nobody computes them
again.

    LOG/features/HASH/TRAJECTORY-NAMES.safetensors    HASH is that of the policy's weights, and NAMES a checksum of how
                                                      the policy named what it saw

        keys        int64 [N]           of the steps
        texts       int64 [N]           the checksum of the instruction that the policy was given at each
        features    float32 [N, width]

A file is written whole or not at all, by whichever process has computed something, and each tensor has its checksum.
What is missing or damaged is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hilt.core.checksums import checksum
from hilt.core.errors import CorruptError, FormatError, MissingFieldError, StorageError
from hilt.core.files import DISK
from hilt.core.tree import Array
from hilt.policies.io.tensor_files import Tensors, write_tensors
from hilt.replay.log import Log

FOLDER = "features"
"""In the folder of a log"""
TIDY_EVERY = 100
"""Files that are written between two looks for those of trajectories that the log has no more"""
logger = logging.getLogger("hilt.value")


@dataclass(frozen=True)
class StepFeatures:
    """The features of some steps of a trajectory, as a file has them."""

    keys: Tensor
    texts: Tensor
    features: Tensor

    @classmethod
    def of(cls, keys: Array, texts: Sequence[str], features: Tensor) -> StepFeatures:
        sums = torch.tensor([checksum(text.encode()) for text in texts], dtype=torch.int64)
        return cls(torch.from_numpy(np.array(keys, np.int64)), sums, features)

    def places(self, keys: Array, texts: Sequence[str]) -> list[int]:
        """Where each of these steps is among them; -1: it is not."""
        steps = zip(self.keys.tolist(), self.texts.tolist(), strict=True)
        known = {step: place for place, step in enumerate(steps)}
        return [known.get((key, checksum(text.encode())), -1) for key, text in zip(keys.tolist(), texts, strict=True)]

    def joined(self, other: StepFeatures) -> StepFeatures:
        """Returns these steps, and others behind them."""
        parts = ((self.keys, other.keys), (self.texts, other.texts), (self.features, other.features))
        return StepFeatures(*(torch.cat(pair) for pair in parts))


class KeptFeatures:
    """The files of a log for a policy with these weights, by trajectory and by how it named what it saw."""

    def __init__(self, log: Log, weights: str):
        self.log, self.folder = log, log.path / FOLDER / weights
        self._written, self._refused = 0, False

    def read(self, trajectory: int, names: str) -> StepFeatures | None:
        """What is kept of a trajectory, if anything."""
        file = self._file(trajectory, names)
        if not file.is_file():
            return None
        try:
            found = Tensors(file)
            return StepFeatures(found["keys"], found["texts"], found["features"])
        except (CorruptError, FormatError, MissingFieldError, KeyError) as error:
            logger.warning("%s: its features are computed again: %s", file, error)
            return None

    def write(self, trajectory: int, names: str, steps: StepFeatures) -> None:
        """Keeps the features of a trajectory in the place of what was kept. A log that cannot be written to, such as
        one of somebody else, is used without: a warning says so once."""
        if self._refused:
            return
        state = {"keys": steps.keys, "texts": steps.texts, "features": steps.features.contiguous()}
        file = self._file(trajectory, names)
        try:
            DISK.make_folders(self.folder)
            write_tensors(self.folder, state, name=file.name)
        except StorageError as error:
            self._refused = True
            logger.warning("features of the policy are not kept, and will be computed again: %s", error)
            return
        if self._written % TIDY_EVERY == 0:
            self._remove_gone()
        self._written += 1

    def _file(self, trajectory: int, names: str) -> Path:
        return self.folder / f"{trajectory}-{checksum(names.encode()):08x}.safetensors"

    def _remove_gone(self) -> None:
        """Removes the files of trajectories that were deleted for good or evicted. Of those that are newer than what
        this process knows of the log nothing is known."""
        there = set(self.log.trajectories(hidden=True))
        newest = max(there, default=-1)
        for file in self.folder.glob("*.safetensors"):
            number = file.name.partition("-")[0]
            if number.isdecimal() and int(number) < newest and int(number) not in there:
                DISK.remove(file)
