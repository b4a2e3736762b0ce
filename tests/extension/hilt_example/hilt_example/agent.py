"""A per-step agent: one Gaussian for all states, which moves towards the actions that were rewarded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.layout import ActionLayout, Seen, fit
from hilt.policies.agent.step_agent import StepAgent


class BanditAgent(StepAgent):
    def __init__(self, seen: Seen, config: AgentConfig, seed: int):
        self.proprio = seen.proprio
        self.layout = ActionLayout(config.setup_mode, seen.actions, config.action_indices)
        self._mean, self._rate = torch.zeros(seen.actions), float(config.options.get("rate", 0.1))
        self._draws = torch.Generator().manual_seed(seed)

    @classmethod
    def make(
        cls,
        observation_space: Any,
        action_space: Any,
        config: AgentConfig | None = None,
        image_keys: Sequence[str] = (),
        proprio_keys: Sequence[str] = (),
        seed: int = 42,
        squashed: bool = True,
    ) -> BanditAgent:
        config = config or AgentConfig()
        return cls(fit(observation_space, action_space, config, image_keys, proprio_keys), config, seed)

    def sample_actions(
        self, observations: Mapping[str, Any], seed: int | None = None, argmax: bool = False
    ) -> np.ndarray:
        rows = np.shape(observations["state"])[:-1]
        draws = self._draws if seed is None else torch.Generator().manual_seed(seed)
        noise = 0.0 if argmax else 0.5 * torch.randn(*rows, len(self._mean), generator=draws)
        return (self._mean.expand(*rows, -1) + noise).clamp(-1, 1).numpy().astype(np.float32)

    def update(
        self, batch: Mapping[str, Any], networks_to_update: Iterable[str] | None = None, details: bool = False
    ) -> tuple[BanditAgent, dict[str, float]]:
        actions, rewards = torch.as_tensor(batch["actions"]).float(), torch.as_tensor(batch["rewards"]).float()
        self._mean += self._rate * (rewards[:, None] * (actions - self._mean)).mean(0)
        self.updates += 1
        return self, {"bandit_reward": float(rewards.mean())}

    def acting_state(self, slow: bool = False) -> dict[str, np.ndarray]:
        return {"mean": self._mean.numpy().copy()}

    def load_acting_state(self, state: Mapping[str, Any]) -> None:
        self._mean = torch.tensor(np.asarray(state["mean"]))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean.clone(), "updates": self.updates, "draws": self._draws.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mean, self.updates = state["mean"].clone(), int(state["updates"])
        self._draws.set_state(state["draws"])
