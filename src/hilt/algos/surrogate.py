"""What an update minimizes: a clipped surrogate of the policy's gain, and the error of
a critic. All per term; a reduction adds them up.

    ratio      r = exp(log p - log p_old), of each number ("token"), of each action, or of each chunk:
               log-probabilities of a term add up; a loss with `mean_ratio` (`hilt.algos.gspo`) takes their mean
    surrogate  L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  with dual_clip c, where A < 0:  min(L, -A c)
    weight     w = min(exp(log p_old - log p_drawn), cap), which multiplies L: p_drawn drew the term,
               p_old is the policy before the update
    critic     L = 1/2 max((v - G)^2, (clip(v, v_old - value_clip, v_old + value_clip) - G)^2)

Terms become a loss in one of three ways:

    token_mean        sum of all terms / how many there are
    trajectory_mean   mean over trajectories of the mean of their terms
    trajectory_sum    mean over trajectories of the sum of their terms / horizon
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hilt.algos.config import PolicyGradient
from hilt.algos.tables import PolicyLoss

MAX_LOG_RATIO = 20.0
"""The logarithm of a ratio is kept within this either way, so that no number overflows"""
_ADDED = {"token": 0, "action": 1, "chunk": 2}
"""Trailing dimensions of [R, chunk, action_dim] that are one term"""


class ClippedSurrogate(PolicyLoss):
    """PPO's surrogate, with bounds of their own below and above, and a dual clip."""

    uses = frozenset({"clip_low", "clip_high", "dual_clip"})

    def figures(self, settings: PolicyGradient) -> list[str]:
        return ["clip_fraction"] + ["dual_clip_fraction"] * bool(settings.dual_clip)

    def terms(
        self, log_ratio: Tensor, advantage: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        found = surrogate(log_ratio, advantage, settings.clip_low, settings.clip_high, settings.dual_clip)
        shown = {"clip_fraction": found.clipped, "dual_clip_fraction": found.dual_clipped}
        return found.loss, {name: shown[name] for name in self.figures(settings)}


class Surrogate(NamedTuple):
    """The surrogate of each term, and what was clipped."""

    loss: Tensor
    clipped: Tensor
    """1 where the clip decided"""
    dual_clipped: Tensor
    """1 where the dual clip did"""


def terms(log_prob: Tensor, mask: Tensor, ratio: str, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities and mask of the terms, ``[R, ...]``, from those of numbers
    [R, chunk, action_dim]; 0 under the mask. `mean`: over the numbers of a term, instead of their sum."""
    log_prob, count = torch.where(mask, log_prob, 0.0), mask.to(log_prob.dtype)
    for _ in range(_ADDED[ratio]):
        log_prob, count, mask = log_prob.sum(-1), count.sum(-1), mask.any(-1)
    return log_prob / count.clamp(min=1) if mean else log_prob, mask


def surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Surrogate:
    """Returns the surrogate of terms of any shape."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free, held = -advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, limit = torch.maximum(free, held), -advantage * dual_clip
    dual = (advantage < 0) & (loss > limit) & (dual_clip > 0)
    return Surrogate(torch.where(dual, limit, loss), (held > free).to(loss.dtype), dual.to(loss.dtype))


def importance(old: Tensor, drawn: Tensor) -> Tensor:
    """What a term is likelier under the policy before the update than under the one
    that drew it, not yet truncated. No gradient."""
    return (old - drawn).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()


def value_loss(value: Tensor, old: Tensor, returns: Tensor, clip: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the loss of each chunk [R], and 1 where the clip decided."""
    free = (value - returns).square()
    held = (old + (value - old).clamp(-clip, clip) - returns).square() if clip else free
    return 0.5 * torch.maximum(free, held), (held > free).to(free.dtype)


def weights(
    reduction: str, terms: Tensor, of: Tensor, all_terms: float, all_trajectories: float, horizon: int
) -> Tensor:
    """Returns the weight in the loss of each term of a row, [R]. `terms` [R]: the number of terms of a row;
    `of` [R]: the trajectory that a row belongs to."""
    if reduction == "token_mean":
        return torch.full_like(terms, 1 / max(all_terms, 1))
    if reduction == "trajectory_sum":
        return torch.full_like(terms, 1 / (max(all_trajectories, 1) * horizon))
    own = torch.zeros(int(of.max()) + 1 if len(of) else 0, dtype=terms.dtype).index_add_(0, of, terms)[of]
    return 1 / (max(all_trajectories, 1) * own.clamp(min=1))
