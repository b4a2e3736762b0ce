"""Advantage-conditioned policies: RECAP (Physical Intelligence, 2025, arXiv 2511.14759).

A policy imitates all that was logged, good and bad, conditioned on which it is; it acts conditioned on good. The
indicator of a step with the advantage A_t, of task l, is

    I_t = 1   where a person acted: a demonstration, or a correction
    I_t = [A_t > e_l]   elsewhere, e_l the q-quantile of the advantages of the steps of task l in which no person acted

so that about 1 - q of what the policy did in each task is positive, however hard the task is. The loss is that of
imitation, where the indicator is part of what is seen, and is left out with probability d:

    L = -E[ (1 - d) log pi(a | o, I) + d log pi(a | o) ]

(the paper's log pi(a | o) + alpha log pi(a | o, I) with alpha = (1 - d) / d). The indicator is seen as words behind the
instruction, as in the paper, or as a learned embedding e[I] that is added to the token of the state. By Bayes' rule

    pi(a | o, I = 1) = pi(a | o) p(I = 1 | o, a) / p(I = 1 | o)

which raises what is likely to be an improvement and stays near what was logged. Guidance with a weight w sharpens it:

    pi_w(a | o) ~ pi(a | o) [pi(a | o, I = 1) / pi(a | o)]^w ~ pi(a | o) p(I = 1 | o, a)^w

w = 0 is the behavior, 1 the conditional policy. With f(.) for what a policy computes without and with the condition,

    g_w = f(o) + w (f(o, I = 1) - f(o))

is the guided one: exactly so for the logits of tokens, and for the mean of Gaussians whose deviation does not depend on
the condition. For flows it is applied to the velocity at every step, as classifier-free guidance does (Ho and Salimans,
2022), which is an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hilt.core.errors import ConfigError


def thresholds(advantages: Tensor, tasks: Sequence[str], human: Tensor, quantile: float) -> dict[str, float]:
    """e_l of each task: of advantages [N] of steps of `tasks`, of which a person acted in `human`, bool [N]. A task
    in which nobody else acted has none."""
    if not 0 < quantile < 1:
        raise ConfigError(f"threshold={quantile}: expected a number between 0 and 1, the share of steps that are bad.")
    if len(tasks) != len(advantages) or human.shape != advantages.shape:
        raise ConfigError(f"{len(advantages)} advantages, {len(tasks)} tasks and {len(human)} sources must match.")
    found: dict[str, float] = {}
    for task in sorted(set(tasks)):
        mine = torch.tensor([other == task for other in tasks]) & ~human
        if mine.any():
            found[task] = float(torch.quantile(advantages[mine].double(), quantile))
    return found


def indicators(advantages: Tensor, tasks: Sequence[str], human: Tensor, limits: dict[str, float]) -> Tensor:
    """I [N], bool. `limits`: those of `thresholds`."""
    limit = torch.tensor([limits.get(task, float("inf")) for task in tasks], dtype=torch.float64)
    return human | (advantages.double() > limit)


def guided(without: Tensor, conditioned: Tensor, weight: float) -> Tensor:
    """g_w: of what a policy computes without and with the condition."""
    return without + weight * (conditioned - without)
