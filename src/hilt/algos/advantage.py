"""Advantages: by how much what was done was better than what could be expected.

Arrays are [B, T]: B episodes, each a row of T chunks, anything after its end; `mask` is 1 up to there. `r` are rewards,
`V` values, `R_i = sum_t discount^t r_it` the score of episode i, `G_t = r_t + discount G_(t+1)` what comes from chunk t
on, and V = 0 after the end, the time limit's too: the task is to succeed within it.

    grpo                  (R_i - mean of the group) / (deviation of the group + 1e-6)      the same for all
                          chunks; deviation over K - 1
    dr_grpo               R_i - mean of the group
    rloo                  R_i - mean of the others of the group
    reinforce_plus_plus   G_t, whitened over the batch
    remax                 G_t - R of a greedy episode from the same start
    gae                   sum_k (discount lam)^k d_(t+k),  d_t = r_t + discount V_(t+1) - V_t;  whitened over the batch

Where chunks pay for a divergence (`penalty`), r is less by that, but the deviation of a group is that of the task's
scores alone, and what the members paid is subtracted after the division, less its mean in the group: a group in which
all failed alike would otherwise be compared by its divergence, however small, as if it were success.

Whitened: (A - mean) / sqrt(variance + 1e-8), over all chunks of all ranks. A group of one has no
other member: its baseline is 0 and its deviation 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hilt.algos.config import PolicyGradient
from hilt.algos.tables import Estimator, ScoredEpisodes, estimator
from hilt.core.errors import ConfigError, SchemaError

Total = Callable[[Tensor], Tensor]
"""Adds a tensor up over all ranks, in place"""


def advantages(
    settings: PolicyGradient,
    rewards: Tensor,
    mask: Tensor,
    group: Tensor,
    values: Tensor | None = None,
    baseline: Tensor | None = None,
    total: Total = lambda tensor: tensor,
    penalty: Tensor | None = None,
    beside: tuple[Tensor, Tensor] | None = None,
    process: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages [B, T], and the returns [B, T] that a critic is to predict. `group` [B] is whose members are compared;
    `penalty` [B, T] is what each chunk pays. `beside`: the scores [M] and groups [M] of members that belong to other
    batches and are compared with, too. `process`: advantages of the terms of each chunk [B, T, N], and their mask,
    which are added before whitening (`hilt.algos.prime`); the result has their shape."""
    chosen, mask = estimator(settings.estimator), mask.to(rewards.dtype)
    how = chosen.normalization if settings.normalize == "auto" else settings.normalize
    task, paid = rewards * mask, (torch.zeros_like(rewards) if penalty is None else penalty) * mask
    rewards = task - paid
    seen = None if values is None else values * mask
    to_go = returns_to_go(rewards, settings.discount)
    episodes = ScoredEpisodes(rewards, task, paid, to_go, mask, group, how, seen, baseline, beside)
    found = chosen.estimate(episodes, settings)
    if found.shape != rewards.shape:
        raise SchemaError(
            f"algorithm.estimator={settings.estimator}: expected advantages of the shape {list(rewards.shape)}, "
            f"one for each chunk of each episode, got {list(found.shape)}."
        )
    returns = chosen.value_targets(episodes, settings, found)
    if process is not None:
        found, whole = found[..., None] + process[0], process[1].to(rewards.dtype)
    else:
        whole = mask
    return (whiten(found, whole, total) if how == "batch" else found) * whole, returns * mask


class Grpo(Estimator):
    """Scores compared with those of the group, over their deviation."""

    grouped = True
    normalization = "group"

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        group, beside = episodes.group, episodes.beside
        score, cost = (returns_to_go(each, settings.discount)[:, :1].sum(1) for each in (episodes.task, episodes.paid))
        scores, groups = (
            (score, group) if beside is None else (torch.cat([score, beside[0]]), torch.cat([group, beside[1]]))
        )
        scale = deviation(scores, groups)[: len(score)] if episodes.normalization == "group" else 1.0
        worth = compared(scores, groups, leave_one_out=self.leave_one_out)[: len(score)]
        return (worth / scale - compared(cost, group, leave_one_out=self.leave_one_out))[:, None].expand_as(
            episodes.rewards
        )


class DrGrpo(Grpo):
    """The same, not divided."""

    normalization = "none"


class Rloo(DrGrpo):
    """Scores compared with those of the others of the group."""

    leave_one_out = True


class ReinforcePlusPlus(Estimator):
    """Returns, whitened over the batch."""

    normalization = "batch"
    filtered = "their mean is the baseline"

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        return episodes.returns


class Remax(Estimator):
    """Returns less the score of a greedy episode."""

    needs_greedy = True
    filtered = "the baseline, a greedy episode, is not one of those"

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        if episodes.baseline is None:
            raise ConfigError(
                "estimator=remax needs the score of a greedy episode for each start: let the run collect them."
            )
        return episodes.returns - episodes.baseline[:, None]


class Gae(Estimator):
    """Generalized advantages of a critic."""

    needs_critic = True
    normalization = "batch"
    filtered = "the critic would learn what the kept ones earn, not what a state is worth"

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        if episodes.values is None:
            raise ConfigError("estimator=gae needs values: give the policy a value head, or the run a critic.")
        return gae(episodes.rewards, episodes.values, settings.discount, settings.lam)[0]

    def value_targets(self, episodes: ScoredEpisodes, settings: PolicyGradient, advantages: Tensor) -> Tensor:
        assert episodes.values is not None
        return advantages + episodes.values


def gae(rewards: Tensor, values: Tensor, discount: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns ``A + V``, both [B, T]. Beyond T nothing more comes."""
    found, ahead, value = (
        torch.zeros_like(rewards),
        torch.zeros_like(rewards[:, :1].sum(1)),
        torch.zeros_like(rewards[:, :1].sum(1)),
    )
    for t in reversed(range(rewards.shape[1])):
        ahead = rewards[:, t] + discount * value - values[:, t] + discount * lam * ahead
        value = values[:, t]
        found[:, t] = ahead
    return found, found + values


def returns_to_go(rewards: Tensor, discount: float) -> Tensor:
    """[B, T]: gae of a critic that expects nothing."""
    return gae(rewards, torch.zeros_like(rewards), discount, 1.0)[0]


def compared(scores: Tensor, group: Tensor, leave_one_out: bool = False) -> Tensor:
    """Scores [B] less the mean of their group, or of the others in it."""
    _, of, size = _groups(scores, group)
    mean = torch.zeros_like(size).index_add_(0, of, scores) / size
    centered = (scores - mean[of]) * (size / (size - 1).clamp(min=1) if leave_one_out else torch.ones_like(size))[of]
    return torch.where(size[of] > 1, centered, scores)


def deviation(scores: Tensor, group: Tensor) -> Tensor:
    """[B]: of the scores in each one's group, plus 1e-6."""
    _, of, size = _groups(scores, group)
    squares = torch.zeros_like(size).index_add_(0, of, compared(scores, group).square())
    return torch.where(size[of] > 1, (squares / (size - 1).clamp(min=1)).sqrt()[of] + 1e-6, 1.0)


def whiten(x: Tensor, mask: Tensor, total: Total = lambda tensor: tensor) -> Tensor:
    """Mean 0 and variance 1 over what the mask lets through, at all ranks together; summed in float64."""
    wide, mask = x.double(), mask.double()
    count, summed = total(torch.stack([mask.sum(), (wide * mask).sum()])).unbind()
    mean = summed / count.clamp(min=1)
    squares = total(((wide - mean).square() * mask).sum())
    return ((wide - mean) * torch.rsqrt(squares / (count - 1).clamp(min=1) + 1e-8)).to(x.dtype)


def _groups(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the identifier of each group, the index of the group to which each
    score belongs, and the size of each group."""
    names, of, size = torch.unique(group, return_inverse=True, return_counts=True)
    return names, of, size.to(scores.dtype)
