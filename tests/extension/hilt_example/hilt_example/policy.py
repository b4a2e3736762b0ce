"""A policy with a folder format of its own: Gaussian actions whose means are linear
in the state, kept as lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.core.errors import ConfigError
from hilt.policies.base import Evaluation, Observation, Policy, Record, to_imitate


class LinearPolicy(Policy):
    """``mean = A state + b`` of a chunk of actions, and one deviation."""

    learning_rate = 0.05

    def __init__(self, state_dim: int, action_dim: int, chunk: int = 2, seed: int = 0):
        super().__init__()
        self.state_dim, self.action_dim, self.chunk = state_dim, action_dim, chunk
        draws = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(0.01 * torch.randn(chunk * action_dim, state_dim, generator=draws))
        self.bias = torch.nn.Parameter(torch.zeros(chunk * action_dim))
        self.log_std = torch.nn.Parameter(torch.tensor(-0.5))

    # What acting and learning ask

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[np.ndarray, Record]:
        state = np.stack([np.asarray(seen["state"], np.float32) for seen in observations])
        with torch.no_grad():
            mean = self._mean(state)
            noise = torch.randn(mean.shape, generator=generator) * temperature if sample else torch.zeros(mean.shape)
            raw = mean + self.log_std.exp() * noise.to(mean)
        record = {"state": state, "raw": raw.cpu().numpy(), "temperature": np.full(len(state), temperature, np.float32)}
        record["log_prob"] = self.evaluate(record).log_prob.detach().cpu().numpy()
        return raw.clamp(-1, 1).cpu().numpy(), record

    def evaluate(self, record: Record) -> Evaluation:
        heat = torch.as_tensor(record["temperature"], device=self.device)[:, None, None]
        normal = torch.distributions.Normal(self._mean(record["state"]), self.log_std.exp() * heat)
        return Evaluation(normal.log_prob(torch.as_tensor(record["raw"], device=self.device)), normal.entropy(), None)

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        actions, mask = to_imitate(self, actions, mask)
        state = np.stack([np.asarray(seen["state"], np.float32) for seen in observations])
        error = (self._mean(state) - torch.as_tensor(actions, dtype=torch.float32, device=self.device)).square().mean(2)
        counted = torch.as_tensor(mask, dtype=torch.float32, device=self.device)
        loss = (error * counted).sum() / counted.sum().clamp(min=1)
        return loss, {"mse": loss.item()}

    def _mean(self, state: np.ndarray) -> torch.Tensor:
        return (torch.as_tensor(state, device=self.device) @ self.weight.T + self.bias).view(
            -1, self.chunk, self.action_dim
        )

    # How a new one is made

    @classmethod
    def create(cls, sizes: Mapping[str, Any], options: Mapping[str, Any], seed: int) -> LinearPolicy:
        return cls(sizes["state_dim"], sizes["action_dim"], **options, seed=seed)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - {"chunk"}:
            raise ConfigError(f"policy_options.{sorted(unknown)[0]}: a linear policy has no such option; it has chunk.")

    # How it is kept

    def save_pretrained(self, folder: str | Path) -> None:
        place = Path(folder)
        place.mkdir(parents=True)
        for name, parameter in self.named_parameters():
            (place / f"{name}.txt").write_text("\n".join(map(str, parameter.detach().flatten().tolist())) + "\n")
        sizes = {"state_dim": self.state_dim, "action_dim": self.action_dim, "chunk": self.chunk}
        (place / "config.json").write_text(json.dumps({"model_type": "linear", **sizes}))

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str = "cpu", **options: Any) -> LinearPolicy:
        document = json.loads(Path(folder, "config.json").read_text())
        policy = cls(document["state_dim"], document["action_dim"], document["chunk"])
        for name, parameter in policy.named_parameters():
            numbers = [float(line) for line in Path(folder, f"{name}.txt").read_text().split()]
            parameter.data = torch.tensor(numbers).view(parameter.shape)
        return policy.to(device)
