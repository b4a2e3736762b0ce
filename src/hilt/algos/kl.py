"""How far a policy is from its reference, and what that costs. With d = log p - log p_ref of what was done:

    kl          d                      its mean is the divergence
    abs         |d|
    mse         1/2 d^2
    low_var_kl  exp(-d) + d - 1        the same mean as kl, never below 0

In a loss it is the gradient that counts, which for f(d) is the mean of f'(d) grad log p over what p drew. For mse that
is the mean of d grad log p, the gradient of KL(p || p_ref). For low_var_kl it is the mean of (1 - p_ref / p) grad log p
= - sum p_ref grad log p, the gradient of KL(p_ref || p). For kl it is the mean of grad log p, which is 0.

After n trajectories an adaptive coefficient c becomes ``c (1 + clip(kl / target - 1,
-0.2, 0.2) n / horizon)`` (Ziegler et al., 2019).
"""

from __future__ import annotations

from torch import Tensor

from hilt.algos.config import KL_ESTIMATES, Kl
from hilt.core.errors import UnknownNameError

MAX_LOG_RATIO = 20.0
"""The exponent of low_var_kl is kept within this"""


def divergence(log_prob: Tensor, reference: Tensor, estimate: str) -> Tensor:
    """Estimates the divergence from the reference for each number of an action, from log-probabilities."""
    apart = log_prob - reference
    if estimate == "kl":
        return apart
    if estimate == "abs":
        return apart.abs()
    if estimate == "mse":
        return 0.5 * apart.square()
    if estimate == "low_var_kl":
        return (-apart).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() + apart - 1
    raise UnknownNameError("estimate", estimate, KL_ESTIMATES)


class KLController:
    """The coefficient of the divergence: fixed, or adapted so that the divergence stays near a target."""

    def __init__(self, settings: Kl):
        self._settings, self.coefficient = settings, settings.coefficient

    def follow(self, kl: float, trajectories: int) -> None:
        """Adapts the coefficient to the divergence that was measured over this many trajectories."""
        if self._settings.controller == "adaptive":
            error = min(0.2, max(-0.2, kl / self._settings.target - 1))
            self.coefficient *= 1 + error * trajectories / self._settings.horizon
