"""Learning from what others did: behaviour cloning. HG-DAgger is the same on demonstrations and take-overs together.

    nll:   -log pi(a | s), pi the tanh-Gaussian of the actor
    mse:   (tanh(mean(s)) - a)^2, the mean over the actions
    grasp: max_g [Q(s, g) + margin * (g != g_shown)] - Q(s, g_shown), so that the shown move of the gripper is best by a margin

Which rows are imitated is the caller's choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilt.algos.config import IMITATION_LOSSES
from hilt.algos.gaussian import log_prob_of
from hilt.core.errors import UnknownNameError


def imitation_loss(kind: str, mean: Tensor, std: Tensor, actions: Tensor) -> Tensor:
    """The loss of each row, ``[B]``."""
    if kind == "nll":
        return -log_prob_of(actions, mean, std)
    if kind == "mse":
        return (torch.tanh(mean) - actions).square().mean(-1)
    raise UnknownNameError("imitation loss", kind, IMITATION_LOSSES)


def grasp_margin_loss(q: Tensor, shown: Tensor, margin: float) -> Tensor:
    """The loss of each row, ``[B]``, of ``q [B, outcomes]`` where the outcome `shown` was demonstrated."""
    others = q + margin
    others = others.scatter(1, shown[:, None], q.gather(1, shown[:, None]))
    return others.max(dim=1).values - q.gather(1, shown[:, None]).squeeze(1)
