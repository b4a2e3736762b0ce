"""What a value model of chunks looks at: observations and actions by the names and in the units of a policy, so that it
can judge what a policy is about to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hilt.core.errors import MissingFieldError, SchemaError
from hilt.core.tree import Array
from hilt.formats.images import as_rgb, image_shape
from hilt.policies.vla.observation_adapters import Suite, columns, suite
from hilt.replay.log import Log

STATE = "state"
"""The name under which a policy sees numbers"""


@dataclass(frozen=True)
class ChunkInputs:
    """The chunk of a step: the actions from there on."""

    actions: int
    """How many"""
    action_dim: int
    """Numbers in each, as a policy gives them"""
    suite: str = ""
    """How observations and actions are named; empty: as the task of an episode"""
    columns: dict[str, str] = field(default_factory=dict)
    """Instead of a suite: a policy's names to paths in the observations"""

    def adapter(self, task: str) -> Suite:
        """How a policy sees and acts in a task."""
        return views_of(self.suite, self.columns, task)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def views_of(name: str, names: Mapping[str, str], task: str) -> Suite:
    """How a policy sees and acts: by the columns that are given, in a suite, or in that of the task."""
    if names:
        return columns(names)
    return suite(name or task)


def observed_sizes(adapter: Suite, log: Log, key: Array) -> tuple[dict[str, tuple[int, int]], dict[str, int], int]:
    """What a policy sees in the step of a log: the sizes of its pictures by name, how many numbers its state has, and
    how many an action has."""
    for name in ("observations", "actions"):
        if not any(path.partition("/")[0] == name for path in log.schema.columns):
            raise SchemaError(
                f"{log.path}: it has no {name}, which a value of chunks looks at. Give a log with observations and "
                "actions of every step, such as a recording, a run with a person, or the log of hilt eval."
            )
    read = log.read(key, ["observations", "actions"])
    try:
        seen = adapter.views(read["observations"])
    except MissingFieldError as error:
        cure = "Give suite=NAME, or columns={full_image: PATH, state: PATH}."
        raise MissingFieldError(f"{log.path}: {error} {cure}") from None
    pictures = {name: image_shape(np.shape(value)[1:]) for name, value in seen.items() if name != STATE}
    cameras = {name: size for name, size in pictures.items() if size is not None}
    numbers = {STATE: int(np.size(seen[STATE]))} if STATE in seen else {}
    return cameras, numbers, int(np.shape(adapter.taught(np.asarray(read["actions"])))[-1])


def rows_of(
    seen: Sequence[Mapping[str, Any]], cameras: Mapping[str, Any], count: int
) -> tuple[dict[str, Array], Array]:
    """Pictures by name, uint8 [B, H, W, 3], and states, float32 [B, count], of observations by a policy's names."""
    images = {name: np.stack([as_rgb(np.asarray(row[name])[None])[0] for row in seen]) for name in cameras}
    if not count:
        return images, np.zeros((len(seen), 0), np.float32)
    return images, np.stack([np.asarray(row[STATE], np.float32).reshape(count) for row in seen])
