"""The return of each step that is drawn: the discounted sum of the rewards from it to the end of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hilt.core.tree import Array, ArraySpec
from hilt.replay.key_ranges import OFFSET_BITS
from hilt.replay.sampling.assembly import Assembly
from hilt.replay.schema import FOLLOWS, Schema
from hilt.replay.snapshot import Snapshot

if TYPE_CHECKING:
    from hilt.replay.log import Log

MAX_KEPT = 20_000
"""Episodes whose returns are kept in memory"""


class ReturnsToGo:
    """An assembly with the column ``returns [batch]`` besides:

        returns[t] = sum over i of discount^i * (r[t+i] + bias),    up to the step that terminated

    It is -infinity where the log does not know it: a time limit or a gap cut the episode, or it still goes on. `also`:
    columns that are added to the rewards.
    """

    added: ClassVar[tuple[str, ...]] = ("returns",)

    def __init__(self, own: Assembly, log: Log, discount: float, bias: float = 0.0, also: Sequence[str] = ()):
        self._own, self._log, self._discount, self._bias = own, log, discount, bias
        self._summed = ("rewards", *also)
        self._kept: dict[int, dict[int, float]] = {}
        self._edits = log.facts.edits.version

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        return {**self._own.leaves(schema, columns, n), "returns": ArraySpec(np.dtype(np.float32), (n,))}

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        return {**self._own.batch(steps, keys, columns, out), "returns": self.of(steps, keys)}

    def of(self, steps: Snapshot, keys: Array) -> Array:
        """The returns of these steps."""
        if self._edits != (version := self._log.facts.edits.version) or len(self._kept) > MAX_KEPT:
            self._kept, self._edits = {}, version
        found: dict[int, dict[int, float]] = {}
        for number in np.unique(keys >> OFFSET_BITS).tolist():
            found[number] = self._kept[number] if number in self._kept else self._read(steps, number)
        return np.array([found[key >> OFFSET_BITS].get(key, float("-inf")) for key in keys.tolist()], np.float32)

    def _read(self, steps: Snapshot, number: int) -> dict[int, float]:
        """The returns of all steps of a trajectory by key, from its last one back; kept if it has ended."""
        keys = steps.trajectory(number)
        width, columns = int(steps.widths(keys[:1])[0]), [*self._summed, "terminated", "truncated", "#flags"]
        *parts, terminated, truncated, flags = steps.fields(keys, columns)
        rewards = np.sum(parts, axis=0)
        follows = dict(zip(keys.tolist(), (flags & FOLLOWS).astype(bool).tolist(), strict=True))
        made: dict[int, float] = {}
        every = zip(keys.tolist(), rewards.tolist(), terminated.tolist(), truncated.tolist(), strict=True)
        for key, reward, ended, cut in reversed(list(every)):
            behind = key + width
            if ended:
                rest = 0.0
            elif cut or not follows.get(behind, False):
                rest = float("-inf")
            else:
                rest = self._discount * made[behind] if self._discount else 0.0
            made[key] = reward + self._bias + rest
        if (terminated | truncated)[-width:].astype(bool).all():
            self._kept[number] = made
        return made
