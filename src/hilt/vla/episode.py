"""One episode of a policy that answers with chunks: where it began, what was done, how it
ended. Every part of post-training has these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hilt.core.trajectory import STOPPED
from hilt.core.tree import Observation
from hilt.policies.base import Record
from hilt.replay.tensors import map_tree
from hilt.value.rollout_watch import Outlook


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
    """At its time limit, or ended early by a value model"""
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
    stopped_by_value: float | None = None
    """Where a value model ended it before its outcome was known: the probability of success. It counts as a failure"""
    outlook: Outlook | None = None
    """What a value model expected of it, if there is one; not logged"""
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


def episode_summary(episode: RolloutEpisode, step: int, step_limit: int = 0) -> dict[str, object]:
    """Returns the summary of an episode for the controller: a few hundred bytes. `step_limit`: that of its task, of
    which an early end left some steps."""
    start = {"task": episode.start.task, "state": episode.start.state, "group": episode.start.group}
    outcome = {
        "success": episode.success,
        "length": episode.steps,
        "return": float(episode.rewards.sum()),
        "truncated": episode.truncated,
    }
    ill = {"ill_formed": episode.ill_formed.strip().splitlines()[-1]} if episode.ill_formed else {}
    if (outlook := episode.outlook) is not None:
        outcome |= {"value_expected": round(outlook.expected, 4), "value_checked": outlook.checked}
    if episode.stopped_by_value is not None:
        saved = max(0, step_limit - episode.steps)
        outcome |= {STOPPED: round(episode.stopped_by_value, 4), "steps_saved": saved}
    return {**start, **outcome, **ill, "trajectory": episode.trajectory, "training_step": step + 1}


PACKED_FIELDS = ("success", "steps", "truncated", "version", "ill_formed", "instruction", "trajectory", STOPPED)
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
