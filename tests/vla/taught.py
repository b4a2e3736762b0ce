"""A log of small demonstrations, and a policy that is one row of numbers, for tests of supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.core.files import DISK
from hilt.formats import create
from hilt.formats.episodes import Episode
from hilt.policies.base import Policy
from tests.formats.toy_episodes import made

NAMES = {"full_image": "front", "state": "state"}


def write_log(
    path: Path, episodes: Sequence[tuple[int, str, bool | None]], action: Callable[[int], float] | None = None
) -> Path:
    """Of (steps, instruction, success); an action of episode `n` is `action(n)`, or at random."""
    writer = create(path, "log")
    for number, (steps, words, success) in enumerate(episodes):
        episode = made(steps, number)
        if action is not None:
            episode.columns["actions"][:] = action(number)
        writer.add(
            number,
            Episode(
                episode.columns, {"success": success, "language_instruction": words} if words else {"success": success}
            ),
        )
    writer.finish()
    return path


class Row(Policy):
    """Answers everything with the same numbers; its loss is their mean square
    error, with a little noise while it trains."""

    chunk, action_dim = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.row, self.idle = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
        self.seen: list[int] = []
        self.used: Any = None

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None) -> Any:
        noise = torch.randn(self.chunk, 2, generator=generator) if sample else torch.zeros(self.chunk, 2)
        return (self.row.detach() + torch.arange(3.0)[:, None] + noise).expand(len(observations), 3, 2).numpy(), {}

    def evaluate(self, record: Any) -> Any:
        raise NotImplementedError

    def supervised_loss(self, observations: Any, actions: Any, mask: Any, generator: Any = None) -> Any:
        self.seen.append(len(observations))
        noise = 0.1 * torch.randn(2, generator=generator) if self.training else 0.0
        errors = (self.row + noise - torch.from_numpy(actions)).square()
        share = torch.from_numpy(mask)[..., None].expand_as(errors).float()
        loss = (errors * share).sum() / share.sum()
        return loss, {"far": float(errors.detach().max())}

    def use_statistics(self, statistics: Any, name: str) -> None:
        self.used = statistics, name

    def save_pretrained(self, folder: Path) -> None:
        DISK.make_folder(Path(folder))
        (Path(folder) / "row.json").write_text(json.dumps(self.row.tolist()))


def kept(run: Path) -> np.ndarray:
    """What a run of `Row` has made."""
    return np.array(json.loads((run / "policy" / "row.json").read_text()))
