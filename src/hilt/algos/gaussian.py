"""A diagonal Gaussian, and its tanh: samples and log-probabilities that stay exact where tanh is flat.

The tanh-Gaussian is for reinforcement learning, whose samples must stay within -1 and 1. A person's actions are
often at these limits (a key that is held, a gripper), where no finite number has them as its tanh: imitation
with an actor of its own takes the plain Gaussian.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

NEAREST = 1e-6
"""A given action is kept so far from -1 and 1, which no finite number has as its tanh"""


def sample(mean: Tensor, std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions ``tanh(mean + std * noise)`` and their log-probabilities ``[B]``."""
    raw = mean + std * noise
    return torch.tanh(raw), _log_prob(raw, noise, std)


def sample_backward(
    actions: Tensor, std: Tensor, noise: Tensor, dactions: Tensor, dlog_prob: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of mean and std ``[B, A]`` from those of what `sample` made, `dlog_prob` being one for all rows.

    With u = mean + std * noise: d tanh(u) / du = 1 - tanh(u)^2, and d log_prob / du = 2
    tanh(u); d log_prob / d std = -1 / std besides.
    """
    draw = dactions * (1 - actions.square()) + (2 * dlog_prob) * actions
    return draw, draw * noise - dlog_prob / std


def log_prob_of(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-probabilities ``[B]`` of given actions."""
    raw = torch.atanh(actions.clamp(-1 + NEAREST, 1 - NEAREST))
    return _log_prob(raw, (raw - mean) / std, std)


def plain_log_prob_of(actions: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-probabilities ``[B]`` of given actions by the Gaussian itself."""
    return _normal((actions - mean) / std, std).sum(-1)


def _normal(noise: Tensor, std: Tensor) -> Tensor:
    return -0.5 * noise.square() - std.log() - 0.5 * math.log(2 * math.pi)


def _log_prob(raw: Tensor, noise: Tensor, std: Tensor) -> Tensor:
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), without the difference that loses all digits for large u
    slope = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    return (_normal(noise, std) - slope).sum(-1)
