"""From steps of many environments to trajectories: the structures of RLinf's rollout worker.

ChunkStepResult, one per step ─► EmbodiedRolloutResult ─► Trajectory [T, B, ...] ─► Channel ─► TrajectoryReplayBuffer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hilt.core.errors import ConfigError, SchemaError, explained_calls
from hilt.core.tree import flatten, unflatten
from hilt.formats.rlinf_trajectory import Trajectory, get_model_weights_id
from hilt.replay.tensors import as_tensor, concatenate, import_torch, is_tensor

if TYPE_CHECKING:
    from torch import Tensor

Tree: TypeAlias = dict[str, Any]


@explained_calls
@dataclass(kw_only=True, eq=False)
class ChunkStepResult:
    """What one step of B environments gave, without its observations. Tensors are
    moved to the CPU; arrays become tensors."""

    actions: Tensor | None = None  # [B, chunks * action dimensions]
    prev_logprobs: Tensor | None = None  # [B, ...], under the policy that acted
    prev_values: Tensor | None = None  # [B, 1]
    dones: Tensor | None = None  # [B, chunks or 1]
    truncations: Tensor | None = None  # [B, chunks or 1]
    terminations: Tensor | None = None  # [B, chunks or 1]
    rewards: Tensor | None = None  # [B, chunks or 1]
    forward_inputs: Tree = field(default_factory=dict)  # what the policy needs to see again for training, [B, ...] each
    versions: Tensor | None = None  # [B, 1], of the weights that acted

    def __post_init__(self) -> None:
        self.forward_inputs = _map(_on_cpu, self.forward_inputs or {}, "forward_inputs")
        sizes: dict[str, int] = {}
        for name, value in vars(self).items():
            if name != "forward_inputs" and value is not None:
                tensor = _on_cpu(value, name)
                setattr(self, name, tensor)
                if tensor.dim() == 0:
                    raise SchemaError(f"{name} is a single number; give it one row for each environment.")
                sizes[name] = tensor.shape[0]
        _same_environments(sizes, "the fields of one step")


@explained_calls
@dataclass(kw_only=True, eq=False)
class EmbodiedRolloutResult:
    """Collects what a rollout gives, step by step, and makes a `Trajectory` of it."""

    max_episode_length: int = 0  # steps after which the environment ends an episode
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
        for name, value in vars(result).items():
            if is_tensor(value) or value:
                getattr(self, name).append(dict(value) if name == "forward_inputs" else value)
        if result.actions is not None:
            self.intervene_flags.append(result.actions.new_zeros(result.actions.shape).bool())

    def append_transitions(
        self, curr_obs: Mapping[str, object] | None = None, next_obs: Mapping[str, object] | None = None
    ) -> None:
        """What was seen before and after the last step, [B, ...] each. Task
        descriptions, which are text, are left out."""
        trees: list[Tree] = []
        for name, observation in (("curr_obs", curr_obs), ("next_obs", next_obs)):
            if observation is None:
                raise SchemaError(
                    f"append_transitions was given no {name}; pass the observations before and after the step."
                )
            trees.append(
                _map(as_tensor, {key: value for key, value in observation.items() if key != "task_descriptions"}, name)
            )
        self.curr_obs.append(trees[0])
        self.next_obs.append(trees[1])

    def mark_last_step_with_intervene_flags(self, intervene_flags: Tensor) -> None:
        """Say for which environments [B], or chunks [B, chunks], the last action was already a person's."""
        if self.actions:
            self.intervene_flags[-1] = self._spread(intervene_flags)

    def update_last_actions(self, intervene_actions: Tensor, intervene_flags: Tensor) -> None:
        """Put a person's actions [B, chunks * action dimensions] in place of the
        last ones where flagged, [B] or [B, chunks].

        The same goes into ``forward_inputs["action"]``;
        ``forward_inputs["model_action"]``, which was not done, is dropped.
        """
        if not self.actions:
            return
        last, person = self.actions[-1], as_tensor(intervene_actions, "intervene_actions").cpu()
        if tuple(person.shape) != tuple(last.shape):
            raise SchemaError(
                f"intervene_actions has shape {tuple(person.shape)}, the last actions have "
                f"{tuple(last.shape)}; give these."
            )
        flags = self._spread(intervene_flags)
        self.actions[-1] = person.where(flags, last)
        self.intervene_flags[-1] = flags
        if self.forward_inputs:
            if "action" in self.forward_inputs[-1]:
                self.forward_inputs[-1]["action"] = self.actions[-1].contiguous()
            self.forward_inputs[-1].pop("model_action", None)

    def _spread(self, flags: Tensor) -> Tensor:
        """[B] or [B, chunks] to the shape of the last actions."""
        last = self.actions[-1]
        flags = as_tensor(flags, "intervene_flags").cpu().bool()
        flags = flags[:, None] if flags.dim() == 1 else flags
        if (
            last.dim() != 2
            or flags.dim() != 2
            or flags.shape[0] != last.shape[0]
            or not flags.shape[1]
            or last.shape[1] % flags.shape[1]
        ):
            raise SchemaError(
                f"intervene_flags has shape {tuple(flags.shape)} for actions of shape "
                f"{tuple(last.shape)}; give one flag for each environment, [B], or for each of its chunks, [B, "
                "chunks], with actions [B, chunks * action dimensions]."
            )
        return flags.repeat_interleave(last.shape[1] // flags.shape[1], dim=1)

    def clear(self) -> None:
        """Forget all steps."""
        for rows in self._rows().values():
            rows.clear()

    def _rows(self) -> dict[str, list[Any]]:
        return {name: rows for name, rows in vars(self).items() if name != "max_episode_length"}

    def to_trajectory(self) -> Trajectory:
        """All steps so far, stacked as [T, B, ...], on the CPU."""
        columns: Tree = {}
        for name, rows in self._rows().items():
            steps = [flatten({name: row}) for row in rows]
            for number, step in enumerate(steps):
                if odd := sorted(set(steps[0]) ^ set(step)):
                    has, lacks = (0, number) if odd[0] in steps[0] else (number, 0)
                    raise SchemaError(
                        f"{odd[0]} is in step {has} but not in step {lacks}; give it to every step or to none."
                    )
            columns.update({path: _stack([step[path] for step in steps], path) for path in (steps[0] if steps else ())})
        weights = get_model_weights_id(columns.get("versions"))
        return Trajectory(max_episode_length=self.max_episode_length, model_weights_id=weights, **unflatten(columns))

    def to_splited_trajectories(self, split_size: int) -> list[Trajectory]:
        """`split_size` trajectories of equally many environments; only the last may have fewer."""
        if isinstance(split_size, bool) or not isinstance(split_size, int) or split_size < 1:
            raise ConfigError(f"split_size is {split_size!r}; pass how many trajectories to make, 1 or more.")
        trajectory = self.to_trajectory()
        environments = _environments(trajectory)
        each = -(-environments // split_size)
        sizes = (
            [min(each, environments - start) for start in range(0, environments, each)]
            if environments
            else [0] * split_size
        )
        if len(sizes) != split_size:
            raise ConfigError(
                f"{environments} environments do not make {split_size} trajectories of {each}; choose a "
                f"split_size that divides them, or give the number for each with to_splited_trajectories_by_sizes."
            )
        return _split(trajectory, sizes)

    def to_splited_trajectories_by_sizes(self, split_sizes: Sequence[int]) -> list[Trajectory]:
        """One trajectory for each size, of that many environments."""
        trajectory, sizes = self.to_trajectory(), list(split_sizes)
        environments = _environments(trajectory)
        whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes)
        if not whole or (environments and sum(sizes) != environments):
            raise ConfigError(
                f"split_sizes are {sizes}, for {environments} environments; pass whole numbers that add up to these."
            )
        return _split(trajectory, sizes)


EmbodiedTrajectoryBuilder = EmbodiedRolloutResult
"""RLinf's later name for the same."""


def convert_trajectories_to_batch(trajectories: Sequence[Trajectory]) -> Tree:
    """One batch [T, B, ...] of trajectories of equal length, their environments side by side."""
    parts = [trajectory.tensors() for trajectory in trajectories]
    batch: Tree = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        if missing := [number for number, part in enumerate(parts) if path not in part]:
            raise SchemaError(
                f"{path} is in some trajectories but not in number {missing[0]}; give it to all of them or to none."
            )
        shapes = [tuple(part[path].shape) for part in parts]
        if len({(shape[0], *shape[2:]) for shape in shapes}) > 1:
            listed = ", ".join(map(str, shapes))
            raise SchemaError(
                f"{path} has the shapes {listed}; only the second dimension, the environments, may differ."
            )
        batch[path] = concatenate([part[path] for part in parts], 1)
    return unflatten(batch)


def _split(trajectory: Trajectory, sizes: list[int]) -> list[Trajectory]:
    pieces = {path: value.split(sizes, dim=1) for path, value in trajectory.tensors().items()}
    return [
        trajectory.replaced({path: piece[i].contiguous() for path, piece in pieces.items()}) for i in range(len(sizes))
    ]


def _environments(trajectory: Trajectory) -> int:
    """B, which every field must have; 0 for an empty trajectory."""
    sizes = {path: int(value.shape[1]) if value.dim() > 1 else 0 for path, value in trajectory.tensors().items()}
    _same_environments(sizes, "the fields")
    return next(iter(sizes.values()), 0)


def _same_environments(sizes: Mapping[str, int], what: str) -> None:
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise SchemaError(
            f"{what} have different numbers of environments ({listed}); give each field one row per environment."
        )


def _map(function: Callable[[Any, str], Any], tree: Mapping[str, Any], name: str) -> Tree:
    """The same nested dictionary with `function(leaf, path)` for each leaf that is not None."""
    if not isinstance(tree, Mapping):
        raise SchemaError(f"{name} is a {type(tree).__name__}; pass a dictionary of tensors.")
    return unflatten(
        {path: function(leaf, f"{name}/{path}") for path, leaf in flatten(tree).items() if leaf is not None}
    )


def _on_cpu(value: Any, path: str) -> Tensor:
    return as_tensor(value, path).cpu().contiguous()


def _stack(rows: list[Tensor], path: str) -> Tensor:
    """Equal tensors along a new first dimension."""
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise SchemaError(
                f"{path} has shape {tuple(row.shape)} in step {number} and {tuple(rows[0].shape)} "
                "in step 0; keep one shape."
            )
    return import_torch().stack(rows).cpu().contiguous()
