"""Batches with labels: further columns, which are made from the keys of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hilt.core.tree import Array, ArraySpec
from hilt.replay import Schema
from hilt.replay.sampling import Assembly
from hilt.replay.snapshot import Snapshot

GOOD = "good"
"""The column of a batch with which a policy is conditioned: whether the action of a step is good"""


@dataclass(frozen=True)
class Labelled:
    """An assembly with further columns, each made from the keys of the steps."""

    own: Assembly
    more: Mapping[str, Callable[[Array], Array]]
    added: ClassVar[tuple[str, ...]] = ("future", "imitated", GOOD)

    def leaves(self, schema: Schema, columns: Sequence[str] | None, n: int) -> dict[str, ArraySpec]:
        return self.own.leaves(schema, columns, n)

    def batch(
        self, steps: Snapshot, keys: Array, columns: Sequence[str] | None, out: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        return {**self.own.batch(steps, keys, columns, out), **{name: make(keys) for name, make in self.more.items()}}
