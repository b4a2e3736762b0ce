"""Learning from what others did: behavior cloning. HG-DAgger is the same on demonstrations and take-overs together.

    nll:   -log pi(a | s), pi the Gaussian of the actor, or the tanh of it where the actor is `squashed`
    mse:   (mean(s) - a)^2, the mean over the actions; or (tanh(mean(s)) - a)^2
    grasp: max_g [Q(s, g) + margin * (g != g_shown)] - Q(s, g_shown), so that the
    shown move of the gripper is best by a margin

Behavior cloning has the plain Gaussian, as HIL-SERL's has it: the tanh-Gaussian of reinforcement learning would have to
put its mean at atanh(1 - 1e-6) = 7.25 for an action at full deflection, and such actions would outweigh all others.

Which rows are imitated is the caller's choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hilt.algos.config import IMITATION_LOSSES
from hilt.algos.gaussian import log_prob_of, plain_log_prob_of
from hilt.core.errors import UnknownNameError


def imitation_loss(kind: str, mean: Tensor, std: Tensor, actions: Tensor, squashed: bool = True) -> Tensor:
    """The loss of each row, ``[B]``. `squashed`: the actor's actions are the tanh
    of the Gaussian of this mean and deviation."""
    if kind == "nll":
        return -(log_prob_of if squashed else plain_log_prob_of)(actions, mean, std)
    if kind == "mse":
        return ((torch.tanh(mean) if squashed else mean) - actions).square().mean(-1)
    raise UnknownNameError("imitation loss", kind, IMITATION_LOSSES)


def grasp_margin_loss(q: Tensor, shown: Tensor, margin: float) -> Tensor:
    """The loss of each row, ``[B]``, of ``q [B, outcomes]`` where the outcome `shown` was demonstrated."""
    others = q + margin
    others = others.scatter(1, shown[:, None], q.gather(1, shown[:, None]))
    return others.max(dim=1).values - q.gather(1, shown[:, None]).squeeze(1)
