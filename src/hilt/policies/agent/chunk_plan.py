"""The chunk of actions that an agent executes without looking: one action a step, until it is used up or dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hilt.core.trajectory import Source
from hilt.policies.agent.config import CHUNK, CHUNK_INDEX

Actions = npt.NDArray[np.float32]


class ChunkPlan:
    """For one episode at a time. Whoever else acts, such as a person who takes over, ends the chunk: what is left of it
    is dropped, and the next step of the policy begins another one."""

    def __init__(self) -> None:
        self._left: deque[Actions] = deque()
        self._number = self._index = -1
        self._version = -1

    def begin(self) -> None:
        """An episode begins."""
        self._left.clear()
        self._number = -1

    def next(self, plan: Callable[[], Actions], version: int) -> Actions:
        """The action of this step. `plan` makes a chunk ``[h, A]`` where there is none; `version`: of the weights that
        do so."""
        if not self._left:
            self._left.extend(plan())
            self._index, self._version = -1, version
        self._index += 1
        return self._left.popleft()

    def acted(self, source: Source) -> dict[str, object]:
        """A step was made, by whom. Returns its columns: which chunk of the episode it is of, its place in it, and the
        weights that decided it."""
        if source != Source.POLICY:
            self._left.clear()
            return {CHUNK: np.int32(-1), CHUNK_INDEX: np.int16(-1)}
        self._number += self._index == 0  # a chunk counts when it is begun, not when it is planned
        return {
            CHUNK: np.int32(self._number),
            CHUNK_INDEX: np.int16(self._index),
            "policy_version": np.int64(self._version),
        }
