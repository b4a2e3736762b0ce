"""The chunks of a rank's episodes as the rows of one update, and what each of them counts in its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Generator, Tensor

from hilt.algos.config import PolicyGradient
from hilt.algos.surrogate import importance, weights
from hilt.core.errors import ConfigError, MissingFieldError
from hilt.distributed.ranks import Ranks
from hilt.policies.base import Record, join, select
from hilt.policies.vla.flow import training_times
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
    flow: list[FlowDraws] = field(default_factory=list)
    """Of each epoch, for a loss of velocities: where they are looked at"""

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

    def weigh(self, terms: Terms, cap: float, total: Callable[..., list[float]], ranks: Ranks) -> dict[str, float]:
        """Fills in what each term counts because another policy drew it than the one that is updated, truncated at
        `cap`; and figures of that. `total` adds numbers up over ranks."""
        (old, there), (drawn, _) = (terms(x, self.mask) for x in (self.old, self.drawn))
        free = importance(old, drawn)
        self.importance = free.clamp(max=cap)
        capped, apart = (free > cap) & there, torch.where(there, drawn - old, 0.0)
        sums = (there.sum(), self.importance[there].double().sum(), capped.sum(), apart.double().sum())
        count, weight, over, kl = total(*sums)
        most = max(ranks.gather(float(free[there].max()) if bool(there.any()) else 0.0))
        return {
            "importance_weight": weight / count,
            "importance_weight_max": most,
            "importance_capped": over / count,
            "behavior_kl": kl / count,
        }

    def figures(self, total: Callable[..., list[float]], critic: bool) -> dict[str, float]:
        """Scores, advantages and, with a `critic`, how well it predicts; `total` adds numbers up over ranks."""
        score = (self.rewards - self.penalty).sum()
        returns, error = self.returns.double(), (self.returns - self.values).double()
        size = self.advantage.abs()
        size = size.mean(1) if size.dim() > 1 else size
        sums = (score, size.sum(), returns.sum(), returns.square().sum(), error.sum(), error.square().sum())
        scored, sized, first, second, wrong, squares = total(*sums)
        episodes, chunks = total(len(self.episodes), len(self))
        figures = {"score": scored / episodes, "advantage_size": sized / chunks}
        if critic:
            left, spread = squares / chunks - (wrong / chunks) ** 2, second / chunks - (first / chunks) ** 2
            figures |= {"returns": first / chunks, "explained_variance": 1 - left / spread if spread > 1e-12 else 0.0}
        return figures

    def realized(self, returns: Tensor, total: Callable[..., list[float]]) -> dict[str, float]:
        """What the critic expects of each chunk on the average, and what came: `returns` [episodes, chunks]."""
        value, came, chunks = total(self.values.double().sum(), returns[self.of, self.at].double().sum(), len(self))
        return {"value": value / chunks, "realized_return": came / chunks}

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


@dataclass
class FlowDraws:
    """The noises and times at which the velocity of each row is looked at in one epoch, K of them."""

    noise: Tensor
    """[R, K, ...], of the shape of an answer"""
    times: Tensor
    """[R, K]"""
    old: Tensor | None = None
    """[R, K, chunk, action_dim]: the errors before the update; none where its only step computes them"""

    @classmethod
    def of_rows(cls, rows: Rows, draws: int, generator: Generator, blank: Record | None) -> FlowDraws:
        """Draws them. `blank`: a record, of the shapes of a rank that has rows."""
        for episode in rows.episodes:
            if "answer" not in episode.record:
                raise MissingFieldError(
                    "an episode has no answer in its records, whose velocity is learned: give the policy "
                    "keeps_answers=True before it acts, or another algorithm.loss."
                )
        records = [episode.record for episode in rows.episodes] + ([] if blank is None else [blank])
        shape = records[0]["answer"].shape[1:] if records else ()
        noise = torch.randn(len(rows), draws, *shape, generator=generator)
        return cls(noise, training_times(len(rows) * draws, generator).view(len(rows), draws))

    def of(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Those of some rows; for none, of the one row of a blank record."""
        if not len(part):
            return torch.zeros(1, *self.noise.shape[1:]), torch.ones(1, self.times.shape[1])
        return self.noise[part], self.times[part]


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


def mean_of_finite(values: Sequence[float]) -> float:
    """NaN where none is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def added(x: Tensor, mask: Tensor, share: Tensor | float) -> Tensor:
    """The sum over rows of what the mask lets through, times each row's share."""
    return (per_row(torch.where(mask, x, 0.0)) * share).sum()


def loss_weights(
    rows: Rows,
    chosen: Tensor,
    part: float,
    settings: PolicyGradient,
    terms: Terms,
    total: Callable[..., list[float]],
) -> LossWeights | None:
    """What each term, token and chunk of the chosen rows counts; none if no rank has any. `total` adds numbers up over
    ranks."""
    mask, of = rows.mask[chosen], rows.of[chosen]
    tokens = mask.sum((1, 2)).float()
    counts = per_row(terms(rows.old[chosen], mask)[1]).float()
    sums = (counts.sum(), tokens.sum(), (tokens > 0).sum(), len(of[tokens > 0].unique()))
    all_terms, all_tokens, all_chunks, trajectories = total(*sums)
    if not all_tokens:
        return None
    term = weights(settings.reduction, counts, of, all_terms, trajectories, settings.horizon)
    token = weights(settings.reduction, tokens, of, all_tokens, trajectories, settings.horizon)
    shares = torch.zeros(3, len(rows))
    shares[:, chosen] = torch.stack([term, token, (tokens > 0) / all_chunks])
    return LossWeights(shares[0], shares[1], shares[2], part, 1 / max(all_terms, 1), 1 / all_tokens)
