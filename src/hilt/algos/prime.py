"""PRIME's implicit process reward (Cui et al. 2025, arXiv 2502.01456): a reward for
every number, learned from outcomes alone.

A reward policy is trained so that its log-ratio to a reference adds up to the log-odds of
success. For each number k that was carried out:

    q_k = log p_reward(k) - log p_reference(k),      z_i = beta sum of q over episode i,      y_i = 1 where episode i
                                                     succeeded, else 0
    loss      mean over episodes of  -y log sigma(z) - (1 - y) log(1 - sigma(z))
    gradient  mean over episodes of  beta (sigma(z_i) - y_i) sum over k of grad log p_reward(k)

The reward of a term is q of one number (`granularity` "token"), its sum over a
"chunk", or over the "whole" episode, at its last chunk:

    scale "none"     p = beta q
    scale "batch"    p = q / max(1, largest |sum of q from a term to the end of its episode| in the
                     batch);  beta does not count

PRIME divides by the largest return + 1e-6. A reward policy that differs from its reference by rounding
alone, as at the beginning, would then give large rewards that are pure noise; a return of one nat, log-odds
of beta, is the least that is scaled up to 1 here.

Estimators that compare the members of a group add to each advantage what the term
and those after it earned more than others did:

    A_k = A of the outcome + coefficient sum over l from k on of discount^(chunks between) (p_l - b_i)
    b_i = mean over the others of the group (rloo), or over the group (grpo,
    dr_grpo), of the mean of p over an episode's terms

For rloo this is PRIME's formula. It is added after the division of grpo, which is by the deviation of
outcomes, and before whitening. For gae and reinforce_plus_plus coefficient x p is a part of each
chunk's reward, and everything else is as usual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hilt.algos.advantage import compared, returns_to_go
from hilt.algos.config import GROUPED, PolicyGradient, Prime
from hilt.algos.tables import FlowLoss, estimator, policy_loss
from hilt.core.errors import ConfigError


class Process(NamedTuple):
    """The process rewards (or advantages) of episodes: one for each of the N numbers of a
    chunk, or one for the whole chunk (N = 1)."""

    value: Tensor
    """[B, T, N]: rewards, or advantages"""
    mask: Tensor
    """bool [B, T, N]: the terms that there are"""


def check(algorithm: PolicyGradient, settings: Prime) -> None:
    """Refuses a process reward that does not go with how the policy is updated."""
    if not settings.coefficient:
        return
    chosen = estimator(algorithm.estimator)
    if isinstance(policy_loss(algorithm.loss), FlowLoss):
        raise ConfigError(
            f"prime.coefficient with algorithm.loss={algorithm.loss}: a process reward is made of log-probabilities, "
            "which this loss does without. Give prime.coefficient=0, or algorithm.loss=clipped."
        )
    if chosen.needs_greedy:
        raise ConfigError(
            f"prime.coefficient with algorithm.estimator={algorithm.estimator}: a greedy episode, its "
            "baseline, gets no process reward. Take rloo, grpo, dr_grpo, gae or reinforce_plus_plus."
        )
    if settings.granularity == "token" and (not chosen.grouped or algorithm.ratio != "token"):
        raise ConfigError(
            f"prime.granularity=token with algorithm.estimator={algorithm.estimator} and "
            f"algorithm.ratio={algorithm.ratio}: advantages of single numbers need one of {', '.join(GROUPED)}, and "
            "ratio=token. Give prime.granularity=chunk."
        )


def rewards(log_ratio: Tensor, mask: Tensor, granularity: str) -> Process:
    """The sums of q that are one term each, from those of numbers [B, T, N]."""
    log_ratio, mask = torch.where(mask, log_ratio, 0.0), mask.bool()
    if granularity == "token":
        return Process(log_ratio, mask)
    chunk, there = log_ratio.sum(2), mask.any(2)
    if granularity == "whole":
        there = there & (there.flip(1).cumsum(1).flip(1) == 1)  # the last chunk
        chunk = torch.where(there, chunk.sum(1, keepdim=True), 0.0)
    return Process(chunk[..., None], there[..., None])


def largest_return(process: Process) -> float:
    """The largest |sum of q from a term on|, which "batch" divides by; over ranks it is the largest of theirs."""
    found = _to_go(process.value, 1.0).abs()[process.mask.expand_as(process.value)]
    return float(found.max()) if len(found) else 0.0


def scaled(process: Process, settings: Prime, largest: float) -> Process:
    """Rewards p, from sums of q."""
    factor = settings.beta if settings.scale == "none" else 1 / max(1.0, largest)
    return process._replace(value=process.value * factor)


def advantages(process: Process, group: Tensor, discount: float, leave_one_out: bool) -> Process:
    """Returns the advantage of each term: the discounted sum of rewards from it on,
    compared with the mean of its group [B]."""
    value, mask = process.value, process.mask
    mean = torch.where(mask, value, 0.0).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)
    baseline = mean - compared(mean, group, leave_one_out)
    left = torch.where(mask, value - baseline[:, None, None], 0.0)
    # "whole" rewards the last chunk for all of them
    there = mask if mask.shape[2] > 1 else mask.flip(1).cumsum(1).flip(1) > 0
    return Process(_to_go(left, discount), there)


def outcome_loss(logit: Tensor, success: Tensor) -> Tensor:
    """The cross-entropy of each episode [B], from z and y."""
    return binary_cross_entropy_with_logits(logit, success.to(logit.dtype), reduction="none")


def slope(logit: Tensor, success: Tensor, beta: float, episodes: float) -> Tensor:
    """[B]: the factor of the log-probabilities of each episode with which their sum has the gradient of the mean
    loss. `episodes`: their number at all ranks."""
    return beta * (logit.sigmoid() - success.to(logit.dtype)) / episodes


def _to_go(x: Tensor, discount: float) -> Tensor:
    """[B, T, N]: what comes from a term on, the numbers of a chunk one after the
    other; a later chunk counts `discount` less."""
    later = torch.zeros_like(x[:, :, 0])
    later[:, :-1] = discount * returns_to_go(x.sum(2), discount)[:, 1:]
    return x.flip(2).cumsum(2).flip(2) + later[..., None]
