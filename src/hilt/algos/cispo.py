"""Clipped importance weights (CISPO; MiniMax-M1 2025, arXiv 2506.13585): the policy gradient of every term, weighted by
a ratio that is truncated and has no gradient.

    r = p / p_old
    L = -A min(r, 1 + clip_high) log p,  without a gradient through min(r, ...)

PPO's clip takes a term out of the gradient once its ratio is beyond the bound; here such a term goes on counting, with
the weight of the bound. There is no lower bound, as in the paper's experiments. The loss that is computed has
log(p / p_old) in place of log p: the same gradient, and 0 where nothing has changed yet.

With recompute_log_prob the weight of an older policy multiplies it: min(p_old / p_drawn, cap) min(p / p_old,
1 + clip_high). Without, p_old is the policy that acted, and the ratio itself is the weight of an older policy. Where
nothing is truncated both are p / p_drawn, and the gradient is that of the expected reward.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hilt.algos.config import PolicyGradient
from hilt.algos.surrogate import MAX_LOG_RATIO
from hilt.algos.tables import PolicyLoss


class WeightedLogProbability(PolicyLoss):
    """The log-probability of each term, weighted by its truncated ratio and its advantage."""

    uses = frozenset({"clip_high"})

    def figures(self, settings: PolicyGradient) -> list[str]:
        return ["clip_fraction"]

    def terms(
        self, log_ratio: Tensor, advantage: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        ratio, limit = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 1 + settings.clip_high
        return -advantage * ratio.clamp(max=limit) * log_ratio, {"clip_fraction": (ratio > limit).to(log_ratio.dtype)}
