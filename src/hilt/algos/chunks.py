"""Q-chunking (Li et al., arXiv 2507.07969): actor and critics decide and judge h actions at once, which are executed
one after the other without looking.

    critics      Q(s_t, a_t ... a_t+h-1),    y = sum_i<h discount^i r_t+i + discount^h * mask * min_i Q'_i(s_t+h, a'),
                 a' a chunk of the policy in s_t+h. The rewards are those of the very actions that Q judges, so that the
                 backup over h steps is unbiased, other than n-step returns of one action.

    the end      Where the task ends in a step k < h, y = sum_i<=k discount^i r_t+i, and what would have followed does
                 not matter: these actions are drawn uniformly from [-1, 1], anew in each update. A row that is cut
                 short for another reason (a time limit, the end of what is recorded, a gap) is of no chunk of h
                 actions, and is left out of the critics' loss: valid = (n_steps = h or mask = 0).

    best of N    a = argmax_j Q(s, a_j) of N chunks a_j ~ pi(s), Q the mean or the minimum of the critics (`actor_q`):
                 to act, and for a' in the target. With the actor "behavior", pi imitates all that was executed, and the
                 choice alone improves on it; with "soft", pi maximizes Q as in `hilt.algos.rlpd`.

    spread       of K chunks that a policy draws in one state, how little it knows what to do there, whatever kind of
                 policy it is: sqrt(mean over steps and numbers of var_k a_k), var with K - 1 in the denominator.

    imitation    the loss of each action of the chunk that was executed, averaged over these.

With h = 1 all of this is the update of `hilt.algos.rlpd`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from hilt.algos.imitation import imitation_loss
from hilt.algos.value_heads import CriticHead


def executed(n_steps: Tensor, steps: int) -> Tensor:
    """Tells which actions of chunks of `steps` were executed, ``[B, h]``: the first `n_steps` of each."""
    return torch.arange(steps, device=n_steps.device) < n_steps[:, None]


def valid(n_steps: Tensor, masks: Tensor, steps: int) -> Tensor:
    """Returns 1 for rows that the critics learn from, 0 for chunks that were cut short by anything but the task's end;
    ``[B]``."""
    return ((n_steps == steps) | (masks == 0)).to(masks.dtype)


def filled(actions: Tensor, taken: Tensor, generator: Generator) -> Tensor:
    """Chunks ``[B, h * A]`` in which the actions that were not executed are drawn uniformly; `taken`: ``[B, h]``."""
    drawn = torch.rand(actions.shape, generator=generator, dtype=actions.dtype).to(actions.device) * 2 - 1
    return torch.where(taken.repeat_interleave(actions.shape[1] // taken.shape[1], dim=1), actions, drawn)


def uninterrupted(taken: Tensor, source: Tensor) -> Tensor:
    """The executed actions of each chunk, up to where somebody else took over; both are ``[B, h]``."""
    return torch.logical_and(taken, source == source[:, :1]).long().cumprod(dim=1).bool()


def spread(drawn: Tensor) -> float:
    """The spread of chunks that were drawn in one state, ``[K, h, A]``."""
    return float(drawn.double().var(dim=0).mean().sqrt())


def chunk_imitation_loss(
    kind: str, mean: Tensor, std: Tensor, actions: Tensor, counted: Tensor, squashed: bool = True
) -> Tensor:
    """The loss of each row, ``[B]``: the average over the actions that are `counted`, ``[B, h]``."""
    mean, std, actions = (part.reshape(counted.numel(), -1) for part in (mean, std, actions))
    losses = imitation_loss(kind, mean, std, actions, squashed).view(counted.shape)
    return torch.where(counted, losses, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def best_of(critic: Any, head: CriticHead, z: Tensor, actions: Tensor, actor_q: str) -> Tensor:
    """Returns the one of N actions in each state, ``[N, B, A]``, that the critics judge best, ``[B, A]``."""
    n, rows, _ = actions.shape
    out = critic.run(z.repeat(n, 1), actions.reshape(n * rows, -1), learns=False).out
    q = head.values(out)
    best = (q.mean(0) if actor_q == "mean" else q.amin(0)).view(n, rows).argmax(0)
    return actions[best, torch.arange(rows, device=best.device)]
