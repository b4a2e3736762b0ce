"""It really learns, and a refactor that changes a number is caught."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hilt.core.tree import ArraySpec
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig, EncoderConfig, Rlpd
from tests.golden.kinds.openvla import weight
from tests.policies.agents import batch, make, numbers

FLOAT = np.dtype(np.float32)


def walk(position: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A point on a line that is to be brought to 0.3."""
    after = np.clip(position + 0.2 * action, -1, 1).astype(np.float32)
    return after, np.abs(after - 0.3) < 0.07


def success(learning_rate: float, updates: int) -> float:
    """The share of starts from which the goal is reached in 12 steps, after learning from random steps alone."""
    settings = Rlpd(discount=0.9, tau=0.02, learning_rate=learning_rate, target_range=[0.0, 1.0])
    config = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[32, 32], rlpd=settings)
    agent = Agent.make({"state": ArraySpec(FLOAT, (1,))}, ArraySpec(FLOAT, (1,)), config, seed=0)
    r = np.random.default_rng(0)
    position, action = r.uniform(-1, 1, (4000, 1)).astype(np.float32), r.uniform(-1, 1, (4000, 1)).astype(np.float32)
    after, reached = walk(position, action)
    for _ in range(updates):
        rows = r.integers(0, 4000, 64)
        done = reached[rows, 0].astype(np.float32)
        seen = {"observations": {"state": position[rows]}, "next_observations": {"state": after[rows]}}
        agent.update({**seen, "actions": action[rows], "rewards": done, "masks": 1 - done})
    position, ever = np.linspace(-1, 1, 41, dtype=np.float32)[:, None], np.zeros(41, bool)
    for _ in range(12):
        position, reached = walk(position, agent.sample_actions({"state": position}, argmax=True))
        ever |= reached[:, 0]
    return float(ever.mean())


def test_agent_learns_and_with_learning_rate_zero_it_does_not() -> None:
    assert success(3e-3, 300) > 0.9
    assert success(0.0, 10) < 0.6


TRACE = {
    "single-arm-fixed-gripper": [9.951010, -1.765801, -0.199288, 70.50653, 4.771479, 19.26730, 151.8599, 0.304068],
    "dual-arm-learned-gripper": [23.36906, -3.169835, -0.213865, 70.50631, 4.678794, 20.80560, 152.2261, 0.327848],
}


@pytest.mark.parametrize("mode", TRACE)
def test_a_numeric_trace_guards_refactors(mode: str) -> None:
    """Losses, and how far each network went in an imitation (at the agent's own
    rate and crop) and five updates, as of writing.

    The weights come from a rule of this repository, since torch 2.13 draws them otherwise than 2.11 (`trunc_normal_`).
    What is left is rounding: CPUs and versions differ by less than the tolerance,
    and a term that is forgotten does not.
    """
    agent, n = (
        make(mode, critics=3, subset=2, backup_entropy=True, imitation_weight=0.1),
        14 if mode.startswith("dual") else 7,
    )
    with torch.no_grad():
        for name, net in agent.networks.items():
            for key, value in net.state_dict().items():
                value.copy_(torch.as_tensor(weight(f"{name}.{key}", tuple(value.shape), seed=0)))
        for name, net in agent.targets.items():
            net.load_state_dict(agent.networks[name].state_dict())
    agent.generator.manual_seed(0)
    before = numbers(agent)
    agent.imitate(batch(9, actions=n), encoder=True)
    for seed in range(5):
        which = None if seed % 2 == 0 else {"critic"}
        _, info = agent.update(batch(seed, actions=n), which)
    ways: dict[str, float] = {}
    for key, value in numbers(agent).items():
        name = key.split(".")[0]
        ways[name] = ways.get(name, 0.0) + float(np.abs(value - before[key]).sum(dtype=np.float64))
    losses = [info["critic_loss"], info["actor_loss"], info["q"], 100 * info["temperature"]]
    told = losses + [ways[name] for name in ("actor", "critic", "encoder", "target critic")]
    np.testing.assert_allclose(told, TRACE[mode], rtol=5e-3)
