"""RLinf's `Trajectory`: the steps of many environments as columns [T, B, ...], as its files and its channels have them.

A rollout of E epochs has T steps in all. Dones, terminations and truncations have T + E rows: each epoch begins with
the row of its reset, so that the outcome of a step stands one row further down. Values have T + E rows as well, but
theirs is the last of each epoch, the bootstrap. `step_rows` takes exactly the T rows that belong to the steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, explained_calls, suggest
from hilt.core.tree import Array, flatten, unflatten
from hilt.replay.tensors import concatenate, is_tensor, raw_array

if TYPE_CHECKING:
    from hilt.replay.tensors import Tensor

Tree: TypeAlias = dict[str, Any]

RESET_ROW_FIRST = ("terminations", "truncations", "dones")
"""Fields whose additional row stands before an epoch's steps; in all others it stands behind them."""


@explained_calls
@dataclass(eq=False)
class Trajectory:
    """Columns [T, B, ...] of B environments over T steps, possibly of many episodes."""

    max_episode_length: int = 0  # steps after which the environment ends an episode
    model_weights_id: str = ""  # names the weights that acted, by their versions
    actions: Tensor | None = None
    intervene_flags: Tensor | None = None  # true where a person's action stands in `actions`; same shape
    rewards: Tensor | None = None
    terminations: Tensor | None = None
    truncations: Tensor | None = None
    dones: Tensor | None = None
    prev_logprobs: Tensor | None = None
    prev_values: Tensor | None = None
    versions: Tensor | None = None
    forward_inputs: Tree = field(default_factory=dict)
    curr_obs: Tree = field(default_factory=dict)
    next_obs: Tree = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape that stands for the whole trajectory, [T, B, ...]: that of the
        log-probabilities, else of the rewards."""
        reference = self.rewards if self.prev_logprobs is None else self.prev_logprobs
        return None if reference is None else tuple(reference.shape)

    def to_dict(self) -> Tree:
        """Every field that is there, in the order in which RLinf's files have them."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trajectory:
        """The trajectory that `to_dict` came from."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise SchemaError(
                    f"a trajectory has no field {name!r}{suggest(name, known)} It has {', '.join(known)}."
                )
        return cls(**values)

    def extract_intervene_traj(self, mode: str = "any") -> list[Trajectory] | None:
        """Only the steps on which a person acted, one trajectory [t, 1, ...] for each
        environment that has any; None if none has.

        `mode` determines when a step of several chunks and action dimensions
        counts: if "any" of them is flagged, or "all".
        """
        if mode not in ("any", "all"):
            raise ConfigError(f"mode is {mode!r}; pass 'any' or 'all'.")
        if self.intervene_flags is None or not bool(self.intervene_flags.any()):
            return None
        flags = self.intervene_flags
        steps = int(flags.shape[0] if self.rewards is None else self.rewards.shape[0])
        flags = step_rows("intervene_flags", flags, steps)
        if flags.dim() > 2:
            flat = flags.reshape(*flags.shape[:2], -1)
            flags = flat.any(dim=-1) if mode == "any" else flat.all(dim=-1)
        parts = [self._column(i, flags[:, i], steps) for i in range(flags.shape[1]) if bool(flags[:, i].any())]
        return parts or None

    def _column(self, column: int, mask: Tensor, steps: int) -> Trajectory:
        """The flagged steps of one environment. A reset row in front is kept, unless
        there are several and they would mix."""

        def keep(value: Tensor, path: str) -> Tensor:
            if path in RESET_ROW_FIRST and value.shape[0] == steps + 1:
                return concatenate([value[:1, column], value[1:, column][mask]], 0).unsqueeze(1)
            return step_rows(path, value, steps)[:, column][mask].unsqueeze(1)

        return self.replaced({path: keep(value, path) for path, value in self.tensors().items()})

    def replaced(self, tensors: Mapping[str, Tensor]) -> Trajectory:
        return Trajectory(self.max_episode_length, self.model_weights_id, **unflatten(tensors))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by path, those of the nested fields first."""
        values = {
            **{name: getattr(self, name) for name in ("curr_obs", "next_obs", "forward_inputs")},
            **self.to_dict(),
        }
        return {path: value for path, value in flatten(values).items() if is_tensor(value)}


def step_rows(name: str, value: Any, steps: int) -> Any:
    """The rows of a field [T + E, B, ...], tensor or array, that belong to the T steps: see the head of this file."""
    extra = int(value.shape[0]) - steps
    if extra == 0:
        return value
    if extra < 0 or steps % extra:
        raise SchemaError(
            f"{name} has {value.shape[0]} rows for {steps} steps; it may have one more for each rollout epoch, "
            "and epochs are equally long."
        )
    epochs = value.reshape(extra, steps // extra + 1, *value.shape[1:])
    kept = epochs[:, 1:] if name.partition("/")[0] in RESET_ROW_FIRST else epochs[:, :-1]
    return kept.reshape(steps, *value.shape[1:])


def get_model_weights_id(versions: Tensor | None) -> str:
    """A name for the weights that acted, made from the bytes of their versions."""
    array = np.zeros(1, np.float32) if versions is None else raw_array(versions, "versions")[0]
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, array.tobytes().hex()))


def ends_and_source(columns: dict[str, Array]) -> dict[str, Array]:
    """The log's own columns: what of a chunk step ended it, who acted, and with which weights."""

    def any_of(path: str) -> Array:
        array = columns[path]
        return np.asarray((array != 0).reshape(*array.shape[:2], -1).any(axis=2))

    shape = next(iter(columns.values())).shape[:2]
    none = np.zeros(shape, bool)
    truncated = any_of("truncations") if "truncations" in columns else none
    if "terminations" in columns:
        terminated = any_of("terminations")
    else:
        terminated = any_of("dones") & ~truncated if "dones" in columns else none
    human = any_of("intervene_flags") if "intervene_flags" in columns else none
    versions = columns["versions"].reshape(*shape, -1)[:, :, 0] if "versions" in columns else np.full(shape, -1)
    return {
        "terminated": terminated,
        "truncated": truncated,
        "source": human.astype(np.uint8),
        "policy_version": np.asarray(versions, np.float64).astype(np.int64),
    }
