"""An off-policy algorithm for the built-in agent: the actor regresses on the actions
of rewarded steps, and the critics on rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator

from hilt.algos.config import Rlpd
from hilt.algos.rlpd import Networks, Transitions
from hilt.algos.tables import OffPolicyAlgorithm


class Regression(OffPolicyAlgorithm):
    def __init__(self, strength: float = 1.0):
        self._strength, self._made = strength, 0

    def update(
        self,
        networks: Networks,
        batch: Transitions,
        settings: Rlpd,
        generator: Generator,
        which: frozenset[str],
        actor_updates: int,
        target_entropy: float,
    ) -> dict[str, float]:
        self._made += 1
        info = {"regressions": float(self._made)}
        if "critic" in which:
            error = (networks.critic(batch.z, batch.actions) - batch.rewards).square().mean()
            self._step(networks, "critic", error)
            networks.average("critic", settings.tau)
            info["critic_loss"] = error.item()
        if "actor" in which:
            mean, _ = networks.actor(batch.z.detach())
            error = (batch.rewards[:, None] * (torch.tanh(mean) - batch.actions).square()).mean()
            self._step(networks, "actor", self._strength * error)
            info["regression_loss"] = error.item()
        return info

    def _step(self, networks: Networks, name: str, loss: torch.Tensor) -> None:
        optimizer = networks.optimizers[name]
        gradients = torch.autograd.grad(loss, optimizer.parameters, allow_unused=True)
        optimizer.step(
            [torch.zeros_like(p) if g is None else g for p, g in zip(optimizer.parameters, gradients, strict=True)]
        )

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made = int(state["made"])
