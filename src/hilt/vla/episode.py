"""One episode of a policy that answers with chunks: where it began, what was done, how it
ended. Every part of post-training has these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hilt.core.tree import Observation
from hilt.policies.base import Record
from hilt.replay.tensors import map_tree


@dataclass(frozen=True)
class Start:
    """Where an episode begins. The members of a group differ in `member` only."""

    task: str
    """Its full name: ``tabletop/pick_red``, ``libero_spatial/3``"""
    split: str
    """``train``, ``eval`` or ``test``"""
    state: int
    """The numbered initial state"""
    seed: int
    """Given to the environment's reset"""
    group: int = 0
    """Unique within a run"""
    member: int = 0

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What the members of a group share"""
        return self.task, self.split, self.state, self.seed


@dataclass
class RolloutEpisode:
    """What happened. `record` has one row for each CHUNK that the policy was asked for."""

    start: Start
    record: Record
    """What the policy needs to compute its log-probabilities once more; images uint8"""
    executed: np.ndarray
    """int32 [rows]: actions of each chunk that were carried out"""
    rewards: np.ndarray
    """float32 [rows]: the environment's reward, summed over the chunk"""
    success: bool
    steps: int
    """Actions that were carried out: the sum of `executed`"""
    truncated: bool
    version: int
    """Of the policy that acted"""
    first: bytes
    """`digest` of the first observation: the members of a group must agree"""
    ill_formed: str = ""
    """Why, when a chunk was ill-formed: a number that is not finite, a token
    outside the action range, or the policy raised"""
    instruction: str = ""
    trajectory: int = -1
    """In the rank's log, once it is there"""
    last: Mapping[str, Any] | None = None
    """The environment's own observation at the end, for a learned reward; not logged"""

    @property
    def rows(self) -> int:
        """Chunks that the policy was asked for"""
        return len(self.executed)


@dataclass
class LostEpisode:
    """An episode that ended by a fault: a simulator that raised, died or hung. It counts as an attempt."""

    start: Start
    error: str
    """The traceback of the process where it happened"""


def token_mask(episode: RolloutEpisode, action_dim: int, decides: np.ndarray | None = None) -> np.ndarray:
    """bool [rows, chunk, action_dim]: the numbers that were decided and carried out; what a success
    cut off was never done, and has no gradient. `decides`: that of the policy."""
    chunk = episode.record["log_prob"].shape[1]
    done = np.arange(chunk) < episode.executed[:, None]  # [rows, chunk]
    done = done if decides is None else done & decides
    return np.repeat(done[..., None], action_dim, axis=-1)


def digest(observation: Observation) -> bytes:
    """sha256 of all arrays of an observation, with their names, types and shapes."""
    total = hashlib.sha256()

    def take(name: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value):
                take(f"{name}/{key}", value[key])
            return
        array = np.ascontiguousarray(value)
        total.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
        total.update(array.data if array.dtype.kind in "biufc" else repr(value).encode())

    take("", observation)
    return total.digest()


PACKED_FIELDS = ("success", "steps", "truncated", "version", "ill_formed", "instruction", "trajectory")
"""What is neither an array nor where it began"""


def pack(episode: RolloutEpisode) -> dict[str, object]:
    """An episode as arrays and text, for a checkpoint."""
    fields = {"start": asdict(episode.start), **{name: getattr(episode, name) for name in PACKED_FIELDS}}
    arrays = {"executed": episode.executed, "rewards": episode.rewards, "first": np.frombuffer(episode.first, np.uint8)}
    last = {} if episode.last is None else {"last": episode.last}
    return {"fields": json.dumps(fields), "record": dict(episode.record), **arrays, **last}


def unpack(packed: Mapping[str, Any]) -> RolloutEpisode:
    """What `pack` was given; arrays may have become tensors meanwhile."""
    fields = json.loads(packed["fields"])
    executed, rewards, first = (np.asarray(packed[name]) for name in ("executed", "rewards", "first"))
    record = {name: np.asarray(array) for name, array in packed["record"].items()}
    last = map_tree(lambda array, path: np.asarray(array), packed["last"]) if "last" in packed else None
    return RolloutEpisode(
        Start(**fields.pop("start")), record, executed, rewards, first=first.tobytes(), last=last, **fields
    )
