"""Readers for the numbers under tests/golden/rlinf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hilt.compat.rlinf.rollout_result import ChunkStepResult, EmbodiedRolloutResult, Trajectory
from hilt.replay.tensors import to_torch

FOLDER = Path(__file__).parent.parent / "golden" / "rlinf"
EPOCHS = (1, 1, 1, 2)
"""Of each of the four trajectories."""


def packed(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Arrays (and strings) by name, from a file that holds one flat array for each dtype."""
    with np.load(folder / name) as file:
        blobs = dict(file)
    values: dict[str, Any] = {}
    for key, entry in json.loads(str(blobs["index"])).items():
        if isinstance(entry, str):
            values[key] = entry
        else:
            dtype, shape, start = entry
            values[key] = blobs[dtype][start : start + int(np.prod(shape, dtype=int))].reshape(shape)
    return values


def under(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries below a prefix, with the rest of their names."""
    return {key[len(prefix) + 1 :]: value for key, value in values.items() if key.startswith(f"{prefix}/")}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """``{"curr_obs/states": a}`` to ``{"curr_obs": {"states": a}}``."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def trajectory_of(values: dict[str, Any]) -> Trajectory:
    tree = nested(values)
    plain = {
        "max_episode_length": int(tree.pop("max_episode_length")),
        "model_weights_id": tree.pop("model_weights_id"),
    }
    return Trajectory(
        **plain,
        **to_torch({k: v for k, v in tree.items() if not isinstance(v, dict)}),
        **{k: to_torch(v) for k, v in tree.items() if isinstance(v, dict)},
    )


def builder_of(trajectory: Trajectory, epochs: int) -> EmbodiedRolloutResult:
    """Feed a trajectory to the builder step by step, in the order of RLinf's environment worker."""
    builder = EmbodiedRolloutResult(max_episode_length=trajectory.max_episode_length)
    steps = trajectory.rewards.shape[0]  # type: ignore[union-attr]
    each = steps // epochs
    ends = ("dones", "terminations", "truncations")
    for t in range(steps):
        epoch = t // each
        if t % each == 0:
            builder.append_step_result(ChunkStepResult(**{name: getattr(trajectory, name)[t + epoch] for name in ends}))
        fields = {
            name: getattr(trajectory, name)[t]
            for name in ("actions", "rewards", "prev_logprobs", "prev_values", "versions")
        }
        inputs = {key: value[t] for key, value in trajectory.forward_inputs.items()}
        builder.append_step_result(
            ChunkStepResult(
                **fields, forward_inputs=inputs, **{name: getattr(trajectory, name)[t + epoch + 1] for name in ends}
            )
        )
        builder.intervene_flags[-1] = trajectory.intervene_flags[t]  # type: ignore[index]
        builder.append_transitions(
            *(
                {**{k: v[t] for k, v in tree.items()}, "task_descriptions": ["x"]}
                for tree in (trajectory.curr_obs, trajectory.next_obs)
            )
        )
    return builder
