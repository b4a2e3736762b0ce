"""The chunks of a rank's episodes as the rows of one update, and what each of them counts in its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hilt.algos.surrogate import importance
from hilt.core.errors import ConfigError
from hilt.policies.base import Record, join, select
from hilt.vla.episode import RolloutEpisode

Terms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Log-probabilities and mask of the terms of a loss, from those of numbers: `hilt.algos.surrogate.terms`"""


@dataclass
class Rows:
    """The chunks of all episodes of this rank, one after the other."""

    episodes: list[RolloutEpisode]
    of: Tensor
    """int64 [R]: whose"""
    at: Tensor
    """int64 [R]: which of its chunks"""
    mask: Tensor
    """bool [R, chunk, action_dim]: the numbers that were carried out"""
    drawn: Tensor
    """Log-probabilities of the policy that drew them, at that time (the behavior policy's), like `mask`"""
    old: Tensor
    """Log-probabilities that ratios begin with (the proximal policy's): `drawn`, or
    those of the policy before this update"""
    rewards: Tensor
    """float64 [R]"""
    penalty: Tensor
    """float64 [R]: what each chunk pays for its divergence from the reference, with kl.where=reward"""
    values: Tensor
    """[R]: what was expected of each; 0 without a critic"""
    success: Tensor
    """float64 [episodes]: 1 where it succeeded"""
    advantage: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[R]; with a process reward [R, N], N: 1, or the numbers of a chunk"""
    returns: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[R]: what the critic should have expected"""
    given: Tensor | None = None
    """[R]: advantages that the caller has computed"""
    reference: Tensor | None = None
    """The reference's log-probabilities, like `mask`"""
    importance: Tensor | None = None
    """The importance weight of each term, [R, ...]; none where ratios begin with `drawn`"""
    seen_late: bool = False
    """Whether `old` and `importance` of a row are filled in by the pass that learns from it"""

    def __len__(self) -> int:
        return len(self.of)

    def padded(self, x: Tensor) -> Tensor:
        """[episodes, longest, ...], zeros after the end of each, from [R, ...]."""
        whole = torch.zeros(
            len(self.episodes), int(self.at.max()) + 1 if len(self) else 0, *x.shape[1:], dtype=torch.float64
        )
        whole[self.of, self.at] = x.double()
        return whole

    def record(self, part: Tensor, blank: Record | None) -> Record:
        """Returns the record of some rows; for none, the blank one."""
        if not len(part):
            assert blank is not None, "only a policy in lockstep is asked about nothing"
            return blank
        of, at = self.of[part].numpy(), self.at[part].numpy()
        cuts = np.flatnonzero(np.diff(of)) + 1
        return join(
            [
                select(self.episodes[i[0]].record, rows)
                for i, rows in zip(np.split(of, cuts), np.split(at, cuts), strict=True)
            ]
        )

    def see(self, part: Tensor, log_prob: Tensor, terms: Terms, cap: float) -> None:
        """Fills in what some rows begin with, of the pass that computes it: their log-probabilities, and the weights
        of their terms, which are truncated at `cap`."""
        self.old[part] = torch.where(self.mask[part], log_prob.detach().float().cpu(), 0)
        (old, _), (drawn, _) = (terms(x[part], self.mask[part]) for x in (self.old, self.drawn))
        weight = importance(old, drawn).clamp(max=cap)
        if self.importance is None:
            self.importance = weight.new_ones(len(self), *weight.shape[1:])
        self.importance[part] = weight

    def packed(self, chosen: Tensor, limit: int) -> list[Tensor]:
        """Rows of like length together, as many as the limit on tokens lets."""
        size = self.mask[0].numel() if len(self) else 0
        prompts = np.concatenate([np.zeros(0, np.int64), *(e.record["prompt_length"] for e in self.episodes)])
        tokens, parts, room = prompts + size, list[list[int]](), 0
        for row in sorted(chosen.tolist(), key=lambda row: (tokens[row], row)):
            if tokens[row] > limit:
                raise ConfigError(
                    f"batch.tokens_per_pass={limit}: one chunk with its prompt has {tokens[row]} "
                    "tokens; give at least as many."
                )
            if tokens[row] > room:
                parts.append([])
                room = limit
            parts[-1].append(row)
            room -= tokens[row]
        return [torch.tensor(part) for part in parts]


@dataclass(frozen=True)
class LossWeights:
    """What counts how much in the loss of one step, [R] each; and how much of a whole step's loss that is."""

    term: Tensor
    token: Tensor
    chunk: Tensor
    part: float
    mean_term: float
    """What each term counts in figures that are means over terms, whatever the reduction of the loss is"""
    mean_token: float
    """The same of each token"""


def per_row(x: Tensor) -> Tensor:
    """[R], from [R, ...]: what is in each row, added up."""
    return x.flatten(1).sum(1) if x.dim() > 1 else x
