"""Small agents and batches for the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hilt.core.tree import ArraySpec
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig, EncoderConfig, Rlpd

torch.set_num_threads(1)
PIXELS = 32
MODES = {
    "single-arm-learned-gripper": 7,
    "dual-arm-learned-gripper": 14,
    "single-arm-fixed-gripper": 7,
    "dual-arm-fixed-gripper": 14,
}


def spaces(actions: int = 7, stack: int = 0) -> tuple[dict[str, Any], ArraySpec]:
    image = ArraySpec(np.dtype(np.uint8), (*([stack] if stack else []), PIXELS, PIXELS, 3))
    state = {"pose": ArraySpec(np.dtype(np.float32), (3,)), "grip": ArraySpec(np.dtype(np.float32), ())}
    return {"images": {"front": image, "wrist": image}, "state": state}, ArraySpec(np.dtype(np.float32), (actions,))


def config(mode: str = "single-arm-fixed-gripper", encoder: EncoderConfig | None = None, **rlpd: Any) -> AgentConfig:
    return AgentConfig(
        mode, encoder or EncoderConfig(features=8), hidden=[16, 16], rlpd=replace(Rlpd(learning_rate=1e-3), **rlpd)
    )


def make(
    mode: str = "single-arm-fixed-gripper", encoder: EncoderConfig | None = None, seed: int = 0, **rlpd: Any
) -> Agent:
    return Agent.make(*spaces(MODES[mode]), config(mode, encoder, **rlpd), seed=seed)


def observations(r: np.random.Generator, n: int, features: int = 0) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "state": {"pose": r.normal(size=(n, 3)).astype(np.float32), "grip": r.random(n).astype(np.float32)}
    }
    if features:
        return seen | {"features": r.normal(size=(n, features)).astype(np.float32)}
    return seen | {
        "images": {name: r.integers(0, 256, (n, PIXELS, PIXELS, 3), np.uint8) for name in ("front", "wrist")}
    }


def batch(seed: int = 0, n: int = 8, actions: int = 7, features: int = 0) -> dict[str, Any]:
    r = np.random.default_rng(seed)
    return {
        "observations": observations(r, n, features),
        "next_observations": observations(r, n, features),
        "actions": r.uniform(-1, 1, (n, actions)).astype(np.float32),
        "rewards": r.random(n).astype(np.float32),
        "masks": np.ones(n, np.float32),
        "demo": np.arange(n) >= n // 2,
        "source": np.where(np.arange(n) >= n - 2, 1, np.where(np.arange(n) >= n // 2, 2, 0)),
        "grasp_penalty": np.full(n, -0.02, np.float32),
    }


def numbers(agent: Agent) -> dict[str, np.ndarray]:
    """Every number of every network, by name."""
    parts = {**agent.networks, **{f"target {name}": net for name, net in agent.targets.items()}}
    return {
        f"{name}.{key}": value.detach().numpy().copy()
        for name, net in parts.items()
        for key, value in net.state_dict().items()
    }


def moved(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    """The networks of which a number has changed."""
    return {key.split(".")[0] for key, value in after.items() if not np.array_equal(value, before[key])}
