"""Critics that do not overrate what the data does not show: CQL, and Cal-QL's bound from the log's own returns.

    CQL      R_i(s, a) = log (1 / 3K sum_j exp(Q_i(s, a_j)) / mu(a_j)) - Q_i(s, a)                    (arXiv 2006.04779)

             loss += weight * mean over i and the batch of R_i. Of the actions a_j, K are uniform, with the density
             mu = 2^-A; K are drawn from pi(s), and K from pi(s'), with the density of pi there. The first term is the
             log of an estimate of the integral of exp Q over all actions, so that R pushes down Q where it is large,
             and up that of what was done.

    Cal-QL   max(Q_i(s, a_j), V(s)) in the place of Q_i(s, a_j) for the actions of the policy               (2303.05479)

             V(s) is the return that the log has from this step on, the discounted sum of rewards to the end of the
             task. Values of the policy are not pushed below it, so that they are of the right size when the policy
             goes on online, where plain CQL has to unlearn values that are far too low. Where the log does not know it,
             because a time limit or the end of what is recorded cut the episode, there is no bound: V(s) = -infinity.

    dR_i / dQ_i(s, a_j) = softmax_j (Q_i(s, a_j) - log mu(a_j)), and 0 where the bound holds;   dR_i / dQ_i(s, a) = -1

The policy is not trained by this term. Rows that are not `valid` (`hilt.algos.chunks`) do not count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor

from hilt.algos.gaussian import sample


def candidates(nets: Any, batch: Any, samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Actions ``[3K, B, A]``, uniform and of the policy in the states and in the next states, and the logs of their
    densities ``[3K, B]``."""
    rows, size = batch.actions.shape
    like = batch.actions
    uniform = torch.rand(samples, rows, size, generator=generator, dtype=like.dtype).to(like.device) * 2 - 1
    noise = torch.randn(samples, 2 * rows, size, generator=generator, dtype=like.dtype).to(like.device)
    tape = nets.actor.run(torch.cat([batch.z.detach(), batch.next_z]), learns=False)
    mean, std = nets.actor.gaussian(tape.out[0])
    drawn, log_prob = sample(mean, std, noise)  # [K, 2B, A], [K, 2B]
    actions = torch.cat([uniform, drawn[:, :rows], drawn[:, rows:]])
    plain = torch.full((samples, rows), -size * math.log(2), dtype=like.dtype, device=like.device)
    return actions, torch.cat([plain, log_prob[:, :rows], log_prob[:, rows:]])


def conservative_gradients(
    nets: Any, batch: Any, weight: float, samples: int, returns: Tensor | None, generator: Generator
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The gradients of `weight` times the term with respect to what the critics' optimizer trains, and figures.
    `returns`: Cal-QL's V(s) ``[B]``; none: plain CQL."""
    actions, log_density = candidates(nets, batch, samples, generator)
    count, rows, _ = actions.shape
    together = torch.cat([actions.reshape(count * rows, -1), batch.actions])
    with torch.enable_grad():  # an encoder that is trained learns from this term, too
        z = batch.z.repeat(count + 1, 1)
    tape = nets.critic.run(z, together)
    q = nets.head.values(tape.out).view(-1, count + 1, rows)  # [E, 3K + 1, B], the last of what was done
    judged, done = q[:, :-1], q[:, -1]
    bounded = torch.zeros_like(judged, dtype=torch.bool)
    if returns is not None:
        bounded[:, samples:] = judged[:, samples:] < returns
        judged = torch.where(bounded, returns.expand_as(judged), judged)
    scores = judged - log_density
    gaps = torch.logsumexp(scores, dim=1) - math.log(count) - done  # [E, B]
    counted = torch.ones_like(gaps[0]) if batch.valid is None else batch.valid
    share = counted / (len(gaps) * counted.sum().clamp(min=1))  # [B]
    dq = torch.cat([torch.where(bounded, 0.0, torch.softmax(scores, dim=1)), torch.full_like(done, -1.0)[:, None]], 1)
    dout = nets.head.values_backward(tape.out, (weight * share * dq).reshape(len(gaps), -1))
    trained = nets.optimizers["critic"].parameters
    # copies: the critics reuse the memory of their gradients; and an encoder's graph is needed again
    found = [each.clone() for each in nets.critic.gradients(tape, dout, trained, again=True)]
    figures = {"conservative_loss": weight * (gaps * share).sum()}
    if returns is not None:
        figures["bounded_share"] = bounded[:, samples:].to(gaps.dtype)
    return found, figures
