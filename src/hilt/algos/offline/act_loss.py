"""The loss of ACT, action chunking with transformers (Zhao et al., 2023, arXiv 2304.13705).

A conditional variational autoencoder over chunks of k actions. A style z is inferred from what was shown, and the
decoder predicts the chunk from the observation s and z:

    posterior   q(z | s, a) = N(mean, diag(exp(log_variance))),    z = mean + exp(log_variance / 2) * noise
    loss        L = |a_hat(s, z) - a|, the mean over all numbers that were shown, + beta * KL
    KL          KL(q || N(0, 1)) = 1/2 sum_j (mean_j^2 + exp(log_variance_j) - 1 - log_variance_j)

KL is the mean over the rows, in which a row counts by the number of its actions that were shown: near the end of an
episode there are fewer than k. So the parts of a batch, weighted by their actions, add up to the loss of the whole.

It acts with z = 0, the mean of the prior N(0, 1): a_hat(s, 0). How a control step combines the chunks that were
predicted for it, temporal ensembling, is part of their execution: `hilt.envs.chunk_executor`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hilt.core.errors import SchemaError


class ActLoss(NamedTuple):
    """The loss and its two parts, numbers with gradients."""

    loss: Tensor
    l1: Tensor
    """The mean absolute error of the numbers that were shown"""
    kl: Tensor
    """From the posterior to the prior, in nats"""


def style(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    """Returns a draw z of the posterior, ``[B, latent]``, through which gradients go."""
    return mean + (0.5 * log_variance).exp() * noise


def prior_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL from N(mean, exp(log_variance)) to N(0, 1) of each row, ``[B]``, in nats."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)


def act_loss(
    predicted: Tensor, shown: Tensor, mask: Tensor, mean: Tensor, log_variance: Tensor, beta: float
) -> ActLoss:
    """Returns the loss of chunks ``[B, k, A]`` beside those that were shown, where `mask`, ``[B, k]``, is true. `mean`
    and `log_variance`, ``[B, latent]``, are those of the posterior; `beta` is the weight of its KL."""
    if not predicted.shape == shown.shape == (*mask.shape, shown.shape[-1]) or mean.shape != log_variance.shape:
        raise SchemaError(
            f"chunks of {list(predicted.shape)} were predicted and {list(shown.shape)} shown, with a mask of "
            f"{list(mask.shape)}, a mean of {list(mean.shape)} and a log-variance of {list(log_variance.shape)}; "
            "expected [B, k, A] twice, [B, k], and [B, latent] twice."
        )
    counted = mask.to(predicted.dtype)
    actions = counted.sum().clamp(min=1)
    errors = torch.where(mask[..., None].bool(), (predicted - shown).abs(), 0.0)
    l1 = errors.sum() / (actions * shown.shape[-1])
    kl = (counted.sum(1) * prior_kl(mean, log_variance)).sum() / actions
    return ActLoss(l1 + beta * kl, l1, kl)
