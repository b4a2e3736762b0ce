"""From steps of many environments to trajectories: the structures of RLinf's rollout worker.

    ChunkStepResult, one per step ─► EmbodiedRolloutResult ─► Trajectory [T, B, ...] ─► Channel ─► TrajectoryReplayBuffer

A rollout of E epochs has T steps in all. Dones, terminations and truncations have T + E rows: each epoch begins with the
row of its reset, so that the outcome of a step stands one row further down. Values have T + E rows as well, but theirs
is the last of each epoch, the bootstrap. `step_rows` takes exactly the T rows that belong to the steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from hilt.core.errors import ConfigError, SchemaError, suggest
from hilt.replay.torch import Tensor, as_bool, as_tensor, choose, concatenate, is_tensor, stack, tensor_to_numpy

Tree: TypeAlias = dict[str, Any]

RESET_ROW_FIRST = ("terminations", "truncations", "dones")
"""Fields whose additional row stands before an epoch's steps; in all others it stands behind them."""


@dataclass(kw_only=True, eq=False)
class ChunkStepResult:
    """What one step of B environments gave, without its observations. Tensors are moved to the CPU; arrays become tensors."""

    actions: Tensor | None = None
    """[B, chunks * action dimensions]"""
    prev_logprobs: Tensor | None = None
    """[B, ...], under the policy that acted"""
    prev_values: Tensor | None = None
    """[B, 1]"""
    dones: Tensor | None = None
    """[B, chunks or 1]"""
    truncations: Tensor | None = None
    """[B, chunks or 1]"""
    terminations: Tensor | None = None
    """[B, chunks or 1]"""
    rewards: Tensor | None = None
    """[B, chunks or 1]"""
    forward_inputs: Tree = field(default_factory=dict)
    """What the policy needs to see again for training, [B, ...] each"""
    versions: Tensor | None = None
    """[B, 1], of the weights that acted"""

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "forward_inputs":
                self.forward_inputs = _map(_on_cpu, value or {}, item.name)
            elif value is not None:
                value = _on_cpu(value, item.name)
                setattr(self, item.name, value)
                if value.dim() == 0:
                    raise SchemaError(f"{item.name} is a single number; give it one row for each environment.")
                sizes[item.name] = value.shape[0]
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise SchemaError(
                f"the fields of one step differ in their number of environments ({listed}); give each one row per environment."
            )


@dataclass(eq=False)
class Trajectory:
    """Columns [T, B, ...] of B environments over T steps, possibly of many episodes."""

    max_episode_length: int = 0
    """Steps after which the environment ends an episode"""
    model_weights_id: str = ""
    """Names the weights that acted, by their versions"""
    actions: Tensor | None = None
    intervene_flags: Tensor | None = None
    """True where a person's action stands in `actions`; same shape"""
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
        """The shape that stands for the whole trajectory, [T, B, ...]: that of the log-probabilities, else of the rewards."""
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
                raise SchemaError(f"a trajectory has no field {name!r}{suggest(name, known)} It has {', '.join(known)}.")
        return cls(**values)

    def extract_intervene_traj(self, mode: str = "any") -> list[Trajectory] | None:
        """Only the steps on which a person acted, one trajectory [t, 1, ...] for each environment that has any; None if none has.

        `mode` says when a step of several chunks and action dimensions counts: when "any" of them is flagged, or "all".
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
        """The flagged steps of one environment. A reset row in front is kept, unless there are several and they would mix."""

        def keep(value: Tensor, name: str) -> Tensor:
            top = name.partition("/")[0]
            if top in RESET_ROW_FIRST and value.shape[0] == steps + 1:
                return concatenate([value[:1, column], value[1:, column][mask]], 0).unsqueeze(1)
            return step_rows(name, value, steps)[:, column][mask].unsqueeze(1)

        part = Trajectory(max_episode_length=self.max_episode_length, model_weights_id=self.model_weights_id)
        return _fill(part, self, keep)


@dataclass(kw_only=True, eq=False)
class EmbodiedRolloutResult:
    """Collects what a rollout gives, step by step, and makes a `Trajectory` of it."""

    max_episode_length: int = 0
    """Steps after which the environment ends an episode"""
    actions: list[Tensor] = field(default_factory=list)
    intervene_flags: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    terminations: list[Tensor] = field(default_factory=list)
    truncations: list[Tensor] = field(default_factory=list)
    dones: list[Tensor] = field(default_factory=list)
    prev_logprobs: list[Tensor] = field(default_factory=list)
    prev_values: list[Tensor] = field(default_factory=list)
    versions: list[Tensor] = field(default_factory=list)
    forward_inputs: list[Tree] = field(default_factory=list)
    curr_obs: list[Tree] = field(default_factory=list)
    next_obs: list[Tree] = field(default_factory=list)

    def append_step_result(self, result: ChunkStepResult) -> None:
        """Append every field that the result has. An action counts as the policy's until it is marked or replaced."""
        if not isinstance(result, ChunkStepResult):
            raise SchemaError(f"append_step_result was given a {type(result).__name__}; pass a ChunkStepResult.")
        for item in fields(result):
            value = getattr(result, item.name)
            if item.name == "forward_inputs":
                if value:
                    self.forward_inputs.append(dict(value))
            elif value is not None:
                getattr(self, item.name).append(value)
        if result.actions is not None:
            self.intervene_flags.append(as_bool(result.actions.new_zeros(result.actions.shape)))

    def append_transitions(self, curr_obs: Mapping[str, Any] | None = None, next_obs: Mapping[str, Any] | None = None) -> None:
        """What was seen before and after the last step, [B, ...] each. Task descriptions, which are text, are left out."""
        if curr_obs is None or next_obs is None:
            missing = "curr_obs" if curr_obs is None else "next_obs"
            raise SchemaError(f"append_transitions was given no {missing}; pass the observations before and after the step.")
        for name, observation, kept in (("curr_obs", curr_obs, self.curr_obs), ("next_obs", next_obs, self.next_obs)):
            tree = {key: value for key, value in observation.items() if key != "task_descriptions" and value is not None}
            kept.append(_map(as_tensor, tree, name))

    def mark_last_step_with_intervene_flags(self, intervene_flags: Tensor) -> None:
        """Say for which environments [B], or chunks [B, chunks], the last action was already a person's."""
        if self.actions:
            self.intervene_flags[-1] = self._spread(intervene_flags)

    def update_last_actions(self, intervene_actions: Tensor, intervene_flags: Tensor) -> None:
        """Put a person's actions [B, chunks * action dimensions] in place of the last ones where flagged, [B] or [B, chunks].

        The same goes into ``forward_inputs["action"]``; ``forward_inputs["model_action"]``, which was not done, is dropped.
        """
        if not self.actions:
            return
        last, person = self.actions[-1], as_tensor(intervene_actions, "intervene_actions").cpu()
        if tuple(person.shape) != tuple(last.shape):
            raise SchemaError(f"intervene_actions has shape {tuple(person.shape)}, the last actions have {tuple(last.shape)}; give these.")
        flags = self._spread(intervene_flags)
        self.actions[-1] = choose(flags, person, last)
        self.intervene_flags[-1] = flags
        if self.forward_inputs:
            if "action" in self.forward_inputs[-1]:
                self.forward_inputs[-1]["action"] = self.actions[-1].contiguous()
            self.forward_inputs[-1].pop("model_action", None)

    def _spread(self, flags: Tensor) -> Tensor:
        """[B] or [B, chunks] to the shape of the last actions."""
        last = self.actions[-1]
        flags = as_bool(as_tensor(flags, "intervene_flags").cpu())
        flags = flags[:, None] if flags.dim() == 1 else flags
        if last.dim() != 2 or flags.dim() != 2 or flags.shape[0] != last.shape[0] or not flags.shape[1] or last.shape[1] % flags.shape[1]:
            raise SchemaError(
                f"intervene_flags has shape {tuple(flags.shape)} for actions of shape {tuple(last.shape)}; give one flag for each "
                f"environment, [B], or for each of its chunks, [B, chunks], with actions [B, chunks * action dimensions]."
            )
        return flags.repeat_interleave(last.shape[1] // flags.shape[1], dim=1)

    def clear(self) -> None:
        """Forget all steps."""
        for item in fields(self):
            if item.name != "max_episode_length":
                getattr(self, item.name).clear()

    def to_trajectory(self) -> Trajectory:
        """All steps so far, stacked as [T, B, ...], on the CPU."""
        trajectory = Trajectory(max_episode_length=self.max_episode_length)
        for item in fields(self):
            rows = getattr(self, item.name)
            if item.name != "max_episode_length" and rows:
                setattr(trajectory, item.name, _stack(rows, item.name))
        trajectory.model_weights_id = get_model_weights_id(trajectory.versions)
        return trajectory

    def to_splited_trajectories(self, split_size: int) -> list[Trajectory]:
        """`split_size` trajectories of equally many environments; only the last may have fewer."""
        trajectory = self.to_trajectory()
        environments = _environments(trajectory)
        if isinstance(split_size, bool) or not isinstance(split_size, int) or split_size < 1:
            raise ConfigError(f"split_size is {split_size!r}; pass how many trajectories to make, 1 or more.")
        each = -(-environments // split_size)
        sizes = [min(each, environments - start) for start in range(0, environments, each)] if environments else [0] * split_size
        if len(sizes) != split_size:
            raise ConfigError(
                f"{environments} environments do not make {split_size} trajectories of {each}; choose a split_size that divides them, "
                f"or say how many go into each with to_splited_trajectories_by_sizes."
            )
        return _split(trajectory, sizes)

    def to_splited_trajectories_by_sizes(self, split_sizes: Sequence[int]) -> list[Trajectory]:
        """One trajectory for each size, of that many environments."""
        trajectory = self.to_trajectory()
        environments = _environments(trajectory)
        sizes = list(split_sizes)
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes)
        if not whole or (environments and sum(sizes) != environments):
            raise ConfigError(f"split_sizes are {sizes}, for {environments} environments; pass whole numbers that add up to these.")
        return _split(trajectory, sizes)


EmbodiedTrajectoryBuilder = EmbodiedRolloutResult
"""RLinf's later name for the same."""


def step_rows(name: str, value: Any, steps: int) -> Any:
    """The rows of a field [T + E, B, ...], tensor or array, that belong to the T steps: see the head of this file."""
    extra = int(value.shape[0]) - steps
    if extra == 0:
        return value
    if extra < 0 or steps % extra:
        raise SchemaError(
            f"{name} has {value.shape[0]} rows for {steps} steps; it may have one more for each rollout epoch, and epochs are equally long."
        )
    epochs = value.reshape(extra, steps // extra + 1, *value.shape[1:])
    kept = epochs[:, 1:] if name.partition("/")[0] in RESET_ROW_FIRST else epochs[:, :-1]
    return kept.reshape(steps, *value.shape[1:])


def get_model_weights_id(versions: Tensor | None) -> str:
    """A name for the weights that acted, made from the bytes of their versions."""
    array = np.zeros(1, np.float32) if versions is None else tensor_to_numpy(versions, "versions")
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, array.tobytes().hex()))


def convert_trajectories_to_batch(trajectories: Sequence[Trajectory]) -> Tree:
    """One batch [T, B, ...] of trajectories of equal length, their environments side by side."""
    if not trajectories:
        return {}
    dicts = [{name: value for name, value in t.to_dict().items() if _holds(value)} for t in trajectories]
    names = ["curr_obs", "next_obs", "forward_inputs", *(item.name for item in fields(Trajectory))]
    return {name: _join([d.get(name) for d in dicts], name) for name in dict.fromkeys(names) if any(name in d for d in dicts)}


def _holds(value: Any) -> bool:
    return is_tensor(value) or (isinstance(value, Mapping) and bool(value))


def _join(values: list[Any], name: str) -> Any:
    if missing := [i for i, value in enumerate(values) if not _holds(value)]:
        raise SchemaError(f"{name} is in some trajectories but not in number {missing[0]}; give it to all of them or to none.")
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _join([value.get(key) for value in values], f"{name}/{key}") for key in keys}
    if len({(value.shape[0], *value.shape[2:]) for value in values}) > 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise SchemaError(f"{name} has the shapes {shapes}; only the second dimension, the environments, may differ.")
    return concatenate(values, 1)


def _split(trajectory: Trajectory, sizes: list[int]) -> list[Trajectory]:
    def part(start: int, size: int) -> Trajectory:
        empty = Trajectory(max_episode_length=trajectory.max_episode_length, model_weights_id=trajectory.model_weights_id)
        return _fill(empty, trajectory, lambda value, _: value[:, start : start + size].contiguous())

    return [part(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _fill(part: Trajectory, whole: Trajectory, take: Callable[[Tensor, str], Tensor]) -> Trajectory:
    """Give `part` what `take` makes of each tensor of `whole`."""
    for name, value in whole.to_dict().items():
        if is_tensor(value):
            setattr(part, name, take(value, name))
        elif isinstance(value, Mapping):
            setattr(part, name, _map(take, value, name))
    return part


def _map(function: Callable[[Any, str], Any], tree: Mapping[str, Any], path: str) -> Tree:
    """The same nested dictionary with `function(leaf, path)` for each leaf."""
    if not isinstance(tree, Mapping):
        raise SchemaError(f"{path} is a {type(tree).__name__}; pass a dictionary of tensors.")
    return {
        key: _map(function, value, f"{path}/{key}") if isinstance(value, Mapping) else function(value, f"{path}/{key}")
        for key, value in tree.items()
        if value is not None
    }


def _on_cpu(value: Any, path: str) -> Tensor:
    return as_tensor(value, path).cpu().contiguous()


def _stack(rows: list[Any], path: str) -> Any:
    """Tensors, or nested dictionaries of them, along a new first dimension."""
    first = rows[0]
    if isinstance(first, Mapping):
        for i, row in enumerate(rows):
            if odd := set(first) ^ set(row):
                key = sorted(odd)[0]
                has, lacks = (0, i) if key in first else (i, 0)
                raise SchemaError(f"{path}/{key} is in step {has} but not in step {lacks}; give it to every step or to none.")
        return {key: _stack([row[key] for row in rows], f"{path}/{key}") for key in first}
    for i, row in enumerate(rows):
        if row.shape != first.shape:
            raise SchemaError(f"{path} has shape {tuple(row.shape)} in step {i} and {tuple(first.shape)} in step 0; keep one shape.")
    return stack(rows).cpu().contiguous()


def _environments(trajectory: Trajectory) -> int:
    """B, which every field must have; 0 for an empty trajectory."""
    sizes: dict[str, int] = {}

    def note(value: Tensor, path: str) -> Tensor:
        sizes[path] = int(value.shape[1]) if value.dim() > 1 else 0
        return value

    _fill(Trajectory(), trajectory, note)
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise SchemaError(f"the fields have different numbers of environments ({listed}); give each field one row per environment.")
    return next(iter(sizes.values()), 0)
