"""Small logs of successes and failures: what is seen tells how far an episode is, and half-way how it will end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.algos.value_distribution import ValueSupport
from hilt.core.checksums import write_json
from hilt.core.tree import Array
from hilt.policies.io.tensor_files import write_tensors
from hilt.policies.io.weights_hash import weights_hash
from hilt.replay import Log, Schema
from hilt.replay.tensors import generator
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueInputs
from hilt.value.value_model import ValueNetwork, model_id

QUICK = {"features": 8, "hidden": 32, "steps": 60, "evaluate_every": 20, "batch_size": 32, "learning_rate": 3e-3}
BLIND = {"encoder": "none", "hidden": 16, "steps": 30, "evaluate_every": 10, "batch_size": 16, "learning_rate": 3e-3}
SIZE = 16
LENGTH = 12
LIMIT = 20
"""Steps of a success, about, and of a failure"""


def episode(number: int, success: bool, rng: np.random.Generator, pictures: bool = True) -> dict[str, Any]:
    """The columns of an episode, [T, 1, ...]. From a third of it on, its color is its outcome."""
    length = LENGTH + number % 3 if success else LIMIT
    steps = np.arange(length + 1)
    far = steps / LENGTH if success else np.minimum(steps, 4) / LENGTH
    seen = steps >= 4
    state = np.stack([far, seen * (1.0 if success else -1.0)], 1) + rng.normal(0, 0.02, (length + 1, 2))
    observations: dict[str, Any] = {"state": state.astype(np.float32)}
    if pictures:
        image = rng.integers(0, 40, (length + 1, SIZE, SIZE, 3), dtype=np.uint8)
        image[..., 0] += (150 * np.clip(far, 0, 1)).astype(np.uint8)[:, None, None]
        image[seen, :, :, 1 if success else 2] += 150
        observations["images"] = {"front": image}
    end = np.arange(length) == length - 1
    columns = {
        "observations": _cut(observations, slice(0, -1)),
        "next_observations": _cut(observations, slice(1, None)),
        "actions": np.zeros((length, 2), np.float32),
        "rewards": (end & success).astype(np.float32),
        "terminated": end & success,
        "truncated": end & (not success),
        "source": np.full(length, 2 if number % 4 == 0 else 0, np.uint8),
    }
    return _cut(columns, np.s_[:, None])


def write_log(
    path: Path,
    episodes: int = 24,
    outcomes: tuple[bool | None, ...] = (True, False),
    tasks: tuple[str, ...] = ("lift",),
    pictures: bool = True,
    seed: int = 0,
    states: int = 0,
) -> Path:
    """Episodes with these outcomes and tasks in turn, each from an initial state of its own, or from some `states`."""
    rng, log = np.random.default_rng(seed), None
    for number in range(episodes):
        success, task = outcomes[number % len(outcomes)], tasks[number // 2 % len(tasks)]
        columns = episode(number, bool(success), rng, pictures)
        log = log or Log.create(path, Schema.of(columns, leading=2), durability="never")
        facts = {"task": task, "split": "train", "state": number % states if states else number}
        facts |= {"language_instruction": f"{task} it" if task else ""}
        facts |= {} if success is None else {"success": success}
        log.add(columns, facts=facts)
    assert log is not None
    log.close()
    return path


def _cut(tree: Any, part: Any) -> Any:
    return {key: _cut(value, part) for key, value in tree.items()} if isinstance(tree, dict) else _array(tree)[part]


def _array(given: Array) -> Array:
    return np.asarray(given)


def save_untrained(
    folder: Path,
    state: dict[str, int],
    task: str | tuple[str, ...] = "",
    policy: tuple[Path, int] | None = None,
    **settings: Any,
) -> Path:
    """A value model with random weights that looks at these columns of numbers, of a task or of several; or at the
    features of a policy, whose folder is given and their number."""
    config, support = ValueConfig(encoder="none", hidden=16, **settings), ValueSupport(horizon=10)
    features = None
    if policy is not None:
        config.policy, features = str(policy[0]), {"width": policy[1], "weights": weights_hash(policy[0])}
    network = ValueNetwork(
        ValueInputs({}, state), False, policy[1] if policy else 0, support.bins, config, generator(0)
    )
    with torch.no_grad():
        network.out.weight.mul_(100)  # it has opinions
    metadata: dict[str, Any] = {
        "inputs": {"cameras": {}, "state": state},
        "words": False,
        "features": features,
        "support": asdict(support),
        "advantage_steps": 10,
        "tasks": {
            name: {"steps_at_start": 10.0, "advantage_quantiles": [0.0] * 101}
            for name in ([task] if isinstance(task, str) else task)
        },
        "settings": asdict(config),
    }
    folder.mkdir(parents=True)
    write_tensors(folder, network.state_dict())
    write_json(folder / "value.json", {**metadata, "id": model_id(network.state_dict(), metadata)})
    return folder
