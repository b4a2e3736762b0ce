"""The smallest policy of the protocol: bins that are linear in what is seen, and a
value; in float64, with episodes of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hilt.algos.config import Optimizer
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.policies.base import Evaluation, Policy, Record
from hilt.vla.episode import RolloutEpisode, Start

CHUNK, DIM, BINS, SEEN = 2, 2, 3, 2


class Toy(Policy):
    chunk, action_dim = CHUNK, DIM

    def __init__(self, seed: int = 0, value: bool = True):
        super().__init__()
        draws = np.random.default_rng(seed)
        self.weight = torch.nn.Parameter(torch.from_numpy(draws.normal(size=(CHUNK, DIM, BINS, SEEN))))
        self.value = torch.nn.Parameter(torch.from_numpy(draws.normal(size=SEEN))) if value else None
        self.asked = list[int]()

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        raise NotImplementedError

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        raise NotImplementedError

    def evaluate(self, record: Record) -> Evaluation:
        seen = torch.from_numpy(record["seen"])
        self.asked.append(len(seen))
        logs = torch.log_softmax(torch.einsum("cdkf,rf->rcdk", self.weight, seen), -1)
        tokens = torch.from_numpy(record["tokens"]).long()
        value = None if self.value is None else seen @ self.value
        return Evaluation(logs.gather(-1, tokens[..., None])[..., 0], -(logs.exp() * logs).sum(-1), value)


class Plain(DataParallelOptimizer):
    """Moves straight down the gradient, and keeps what it was."""

    def __init__(self, module: torch.nn.Module, rate: float = 0.1, ranks: Any = None, lockstep: bool = False):
        super().__init__(module, Optimizer(learning_rate=rate, gradient_clip=0), ranks)
        self.seen = list[dict[str, np.ndarray]]()
        self.lockstep = lockstep

    def _move(self, gradients: Sequence[torch.Tensor | None], rate: float) -> None:
        given = zip(self.trained.items(), gradients, strict=True)
        self.seen.append({name: np.zeros(p.shape) if g is None else g.numpy().copy() for (name, p), g in given})
        with torch.no_grad():
            for parameter, gradient in zip(self.trained.values(), gradients, strict=True):
                if gradient is not None:
                    parameter -= rate * gradient


def episodes(lengths: Sequence[int], group_size: int = 3, seed: int = 1, away: float = 0.5) -> list[dict[str, Any]]:
    """Drawn by a policy that is `away` from `Toy()`, as the slow reference has them. The
    last chunk of each is carried out in part."""
    draws, (old, ref) = np.random.default_rng(seed), others(away)
    made = []
    for i, length in enumerate(lengths):
        seen, tokens = draws.normal(size=(length, SEEN)), draws.integers(0, BINS, (length, CHUNK, DIM)).astype(np.int32)
        record = {"seen": seen, "tokens": tokens}
        with torch.no_grad():
            was, kept = old.evaluate(record), ref.evaluate(record)
        executed = np.full(length, CHUNK, np.int32)
        executed[-1] = 1 + i % CHUNK
        rewards = np.where(
            np.arange(length) == length - 1, float(draws.random() < 0.5) + 0.1 * draws.normal(), 0.05 * draws.normal()
        )
        facts: dict[str, Any] = {"rewards": rewards, "group": i // group_size, "baseline": float(draws.random())}
        assert was.value is not None
        facts |= {
            "executed": executed,
            "old": was.log_prob.float().numpy(),
            "value": was.value.float().numpy(),
            "ref": kept.log_prob.numpy(),
        }
        made.append(record | facts)
    return made


def others(away: float = 0.5) -> tuple[Toy, Toy]:
    """The policy that acted, and the reference."""
    draws, old, ref = np.random.default_rng(7), Toy(), Toy()
    for other, size in ((old, away), (ref, 0.3)):
        for p in other.requires_grad_(False).parameters():
            p += size * torch.from_numpy(draws.normal(size=p.shape))
    return old, ref


def collected(made: Sequence[dict[str, Any]]) -> tuple[list[RolloutEpisode], list[np.ndarray]]:
    """The same as the trainer has them."""
    found = []
    for i, e in enumerate(made):
        record = {"seen": e["seen"], "tokens": e["tokens"], "log_prob": e["old"], "value": e["value"]}
        record["prompt_length"] = np.full(len(e["seen"]), 3 + i % 4, np.int32)
        start = Start("toy", "train", e["group"], 0, e["group"], i)
        steps, won = int(e["executed"].sum()), bool(e.get("success", True))
        found.append(
            RolloutEpisode(
                start, record, e["executed"], np.zeros(len(e["seen"]), np.float32), won, steps, False, 0, b""
            )
        )
    return found, [e["rewards"] for e in made]
