"""A problem with a known answer for values of chunks: an episode succeeds if and only if the sum of its first chunk has
the sign of its state. What is seen tells nothing of the outcome, and neither does any single chunk by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.algos.value_distribution import ValueSupport
from hilt.core.checksums import write_json
from hilt.core.tree import Array
from hilt.policies.base import Evaluation, Policy, Prefix, Record, check_temperature
from hilt.policies.io.tensor_files import write_tensors
from hilt.policies.io.weights_hash import weights_hash
from hilt.replay import Log, Schema
from hilt.replay.tensors import generator
from hilt.value.chunk_inputs import ChunkInputs
from hilt.value.value_config import ValueConfig
from hilt.value.value_episodes import ValueInputs
from hilt.value.value_model import ValueNetwork, inputs_json, model_id

ACTIONS = 2
COLUMNS = {"state": "state"}
QUICK = {
    **{"encoder": "none", "columns": COLUMNS, "actions": ACTIONS, "hidden": 64, "dropout": 0.0, "batch_size": 64},
    **{"steps": 200, "evaluate_every": 50, "learning_rate": 3e-3},
}


def is_right(states: Array, chunks: Array) -> Array:
    """Whether chunks [B, ..., ACTIONS, 1] are right for states [B]."""
    return np.sign(chunks.sum((-1, -2))) == np.sign(states).reshape(-1, *[1] * (chunks.ndim - 3))


def write_choices(path: Path, episodes: int, seed: int = 0, right: bool | None = None) -> Path:
    """Episodes of ACTIONS steps with random actions. `right`: the outcome of all of them; None: what came of it."""
    rng, log = np.random.default_rng(seed), None
    for number in range(episodes):
        state = np.full((ACTIONS, 1), rng.choice([-1.0, 1.0]), np.float32)
        actions = rng.normal(size=(ACTIONS, 1)).astype(np.float32)
        success = bool(is_right(state[0], actions[None])[0]) if right is None else right
        end = np.arange(ACTIONS) == ACTIONS - 1
        columns = {
            "observations": {"state": state[:, None]},
            "actions": actions[:, None],
            "rewards": (end & success).astype(np.float32)[:, None],
            "terminated": end[:, None],
            "truncated": (end & False)[:, None],
        }
        log = log or Log.create(path, Schema.of(columns, leading=2), durability="never")
        log.add(columns, facts={"task": "choose", "state": number, "success": success})
    assert log is not None
    log.close()
    return path


class RandomChunks(Policy):
    """Draws from a normal distribution; its likeliest chunk is 0. `fixed`: all draws are the same."""

    chunk, action_dim = ACTIONS, 1

    def __init__(self, fixed: bool = False):
        super().__init__()
        self.fixed, self.asked = fixed, list[tuple[int, bool, float]]()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(
        self,
        observations: Sequence[Mapping[str, Any]],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        check_temperature(temperature, sample)
        self.asked.append((len(observations), sample, temperature))
        drawn = torch.randn(len(observations), ACTIONS, 1, generator=generator) * temperature * sample
        if self.fixed:
            drawn = torch.ones_like(drawn)
        return drawn.numpy(), {"drawn": drawn.numpy()[:, 0, 0]}

    def evaluate(self, record: Record) -> Evaluation:
        raise NotImplementedError

    def supervised_loss(
        self, observations: Any, actions: np.ndarray, mask: np.ndarray, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        raise NotImplementedError


def states(count: int, seed: int) -> tuple[Array, list[dict[str, Any]]]:
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], count).astype(np.float32)
    return signs, [{"state": np.array([sign]), "instruction": "choose"} for sign in signs]


def save_verifier(
    folder: Path,
    columns: Mapping[str, str],
    state: int,
    actions: int,
    action_dim: int,
    policy: tuple[Path, int] | None = None,
) -> Path:
    """A value of chunks with random weights that looks at a state; or at the features of a policy, whose folder is
    given and their number."""
    config = ValueConfig(encoder="none", hidden=16, actions=actions, columns=dict(columns))
    support, features = ValueSupport(horizon=10), None
    if policy is not None:
        config.policy, features = str(policy[0]), {"width": policy[1], "weights": weights_hash(policy[0])}
    numbers = {} if policy else {"state": state}
    inputs = ValueInputs({}, numbers, ChunkInputs(actions, action_dim, "", dict(columns)))
    network = ValueNetwork(inputs, False, policy[1] if policy else 0, support.bins, config, generator(0))
    with torch.no_grad():
        network.out.weight.mul_(100)  # it has opinions
    metadata: dict[str, Any] = {
        "inputs": inputs_json(inputs),
        **{"words": False, "features": features, "support": asdict(support), "advantage_steps": 10, "tasks": {}},
        "settings": asdict(config),
    }
    folder.mkdir(parents=True)
    write_tensors(folder, network.state_dict())
    write_json(folder / "value.json", {**metadata, "id": model_id(network.state_dict(), metadata)})
    return folder
