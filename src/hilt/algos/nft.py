"""Negative-aware fine-tuning of flows (DiffusionNFT; Zheng et al. 2025, arXiv 2509.16117): what was done well is
imitated, and what was done badly is moved away from, on the forward process. It needs the actions that were drawn and
their advantages; it needs no log-probabilities, and does not depend on how the actions were drawn.

Time runs from 1 (noise) to 0 (action), as in `hilt.policies.vla.flow`. With the action a that was drawn, noise e, a
time t, x = t e + (1 - t) a, the velocity u = e - a, v = v(x, t) of the policy and v_old of the one before the update:

    o  = (1 + clip(A / c, -1, 1)) / 2                       c = max_advantage: optimality, from 0 to 1
    v+ = (1 - beta) v_old + beta v                          the implicit positive policy
    v- = (1 + beta) v_old - beta v                          the implicit negative policy
    L  = c / beta (o |v+ - u|^2 / w+  +  (1 - o) |v- - u|^2 / w-)
    w  = 1 (uniform), or mean |v+ - u| / t and mean |v- - u| / t over the chunk, without a gradient (adaptive)

The mean is over `draws` of e and t for each chunk, other ones in each epoch. adaptive is the squared error of the
predicted action over its mean absolute error, as DiffusionNFT's code has it, which also has the factor c / beta.

For the error e_old = v_old - u and the change d = v - v_old, the uniform loss is, with A clipped to [-c, c],

    L  = 2 A e_old d + c beta d^2 + what does not depend on v

whose minimum is d = -E[A e_old | x, t] / (c beta): a first step has the gradient of imitation weighted by A, and c beta
holds the velocity at the old one. Advantages of 0 leave the policy as it is.

The old policy is the one that is updated, as it was before the update, which is the one that acted unless groups were
carried over: a snapshot, as RLinf has it, and DiffusionNFT with eta = 0; its moving average of weights (eta > 0) would
have to act, too, and is not made. Of an update with a single step, v_old is v without its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hilt.algos.config import PolicyGradient
from hilt.algos.tables import FlowLoss, estimator

SMALLEST_WEIGHT = 1e-5
"""Of the mean absolute error that adaptive divides by"""


class NegativeAware(FlowLoss):
    """The contrast of the implicit positive and negative policies."""

    def figures(self, settings: PolicyGradient) -> list[str]:
        return ["flow_error", "velocity_change", "optimality"]

    def conflicts(self, settings: PolicyGradient, here: str) -> Iterator[str]:
        for name, given, default in (
            ("ratio", settings.ratio, "token"),
            ("recompute_log_prob", settings.recompute_log_prob, False),
            ("kl.where", settings.kl.where, "none"),
            ("entropy", settings.entropy, 0.0),
            ("target_kl", settings.target_kl, 0.0),
        ):
            if given != default:
                yield (
                    f"{here}{name}={given} with {here}loss={settings.loss}: this loss has no log-probabilities. "
                    f"Leave {name} out, or give {here}loss=clipped."
                )
        if estimator(settings.estimator).needs_critic:
            yield (
                f"{here}estimator={settings.estimator} with {here}loss={settings.loss}: a critic learns in the passes "
                "that compute log-probabilities, which this loss does without. Take grpo, dr_grpo, rloo, "
                "reinforce_plus_plus or remax."
            )

    def flow_terms(
        self, error: Tensor, old_error: Tensor, times: Tensor, advantage: Tensor, mask: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        how, old = settings.nft, old_error.detach()
        most = how.max_advantage
        optimality = ((advantage / most).clamp(-1, 1) + 1)[:, None, None, None] / 2
        positive = (1 - how.beta) * old + how.beta * error
        negative = (1 + how.beta) * old - how.beta * error
        losses = [self._squared(each, times, mask, how.weighting) for each in (positive, negative)]
        loss = most / how.beta * (optimality * losses[0] + (1 - optimality) * losses[1])
        shown = {
            "flow_error": error.detach().square().mean(1),
            "velocity_change": (error.detach() - old).square().mean(1),
            "optimality": optimality[:, 0].expand_as(loss[:, 0]),
        }
        return loss.mean(1), shown

    def _squared(self, error: Tensor, times: Tensor, mask: Tensor, weighting: str) -> Tensor:
        if weighting == "uniform":
            return error.square()
        there = mask[:, None].to(error.dtype)
        size = (error.detach().abs() * there).sum((2, 3)) / there.sum((2, 3)).clamp(min=1)
        t = times.to(error.dtype)
        weight = t.square() / (t * size).clamp(min=SMALLEST_WEIGHT)
        return torch.where(mask[:, None], error, 0.0).square() * weight[..., None, None]
