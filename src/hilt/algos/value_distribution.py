"""The value of a state as a distribution over what comes of it: failure, or a success after some number of steps.

A network gives logits l_0 ... l_(n-1) of n bins, p = softmax(l). Bin 0 is failure, with a value z_0 of its own. The
others are evenly spaced over the returns of successes, z_1 = low to z_(n-1) = high, w apart:

    steps to success   G_t = -min(T - t, H) / H     from -1 to 0       z_0 = -1 - failure_penalty
    discounted         G_t = discount^min(T - t, H) from discount^H to 1    z_0 = 0

where the episode succeeds with its step T - 1, the last of T, and H is the horizon: what takes longer counts as H.

    value                        V = sum_i p_i z_i
    probability of success       1 - p_0
    steps, if it succeeds        the same for E = sum_(i > 0) p_i z_i / (1 - p_0):  -E H,  or  log E / log discount

The loss is the cross-entropy -sum_i y_i log p_i with a target y: y_0 = 1 for a failure, and for a success of return G

    two-hot     the two bins next to G, so that sum_i y_i z_i = G:  y_i = 1 - |G - z_i| / w  where that is positive
    HL-Gauss    y_i = [F((z_i + w/2 - G) / s) - F((z_i - w/2 - G) / s)] / Z  (Farebrother et al., 2024), F the normal
                distribution function, s = smoothing * w, and Z what makes the sum over i > 0 one

The N-step advantage compares what was done with what was expected, with r = -1 / H per step, or r = 0 and a discount:

    A_t = sum_(k < m) discount^k r + discount^m B - V_t,   m = min(N, T - t)
    B = V_(t+m) before the end;  at the end the outcome: for a success 0 (steps) or 1 (discounted), for a failure z_0,
        and where it is not known V_(T-1)

Potential-based shaping (Ng, Harada and Russell, 1999) adds F = discount * V(s') - V(s) to a reward, with V(s') = 0
where the episode has terminated. It changes no optimal policy, however wrong V is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hilt.core.errors import ConfigError

RETURNS = ("steps", "discounted")
TARGETS = ("hl_gauss", "two_hot")


@dataclass(frozen=True)
class ValueSupport:
    """The values that the bins stand for."""

    horizon: int
    """H: steps to success that are distinguished"""
    bins: int = 201
    returns: str = "steps"
    """"steps" or "discounted" """
    discount: float = 1.0
    """Per step, of discounted returns"""
    failure_penalty: float = 1.0
    """Of steps: how far below the slowest success a failure lies"""

    def __post_init__(self) -> None:
        if self.returns not in RETURNS or self.bins < 3 or self.horizon < 1:
            raise ConfigError(f"expected returns of {RETURNS}, bins from 3 and a horizon from 1 up, got {self}.")
        if self.returns == "discounted" and not 0 < self.discount < 1:
            raise ConfigError(f"discount={self.discount}: discounted returns need one between 0 and 1.")

    @property
    def low(self) -> float:
        """The return of the slowest success."""
        return -1.0 if self.returns == "steps" else self.discount**self.horizon

    @property
    def high(self) -> float:
        """The return at the end of a success."""
        return 0.0 if self.returns == "steps" else 1.0

    @property
    def failure(self) -> float:
        """The value of failure, z_0."""
        return -1.0 - self.failure_penalty if self.returns == "steps" else 0.0

    @property
    def step_reward(self) -> float:
        """r, the reward of each step."""
        return -1.0 / self.horizon if self.returns == "steps" else 0.0

    @property
    def step_discount(self) -> float:
        """The discount of one step."""
        return 1.0 if self.returns == "steps" else self.discount

    @property
    def width(self) -> float:
        """w, the distance of two bins of successes."""
        return (self.high - self.low) / (self.bins - 2)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """z [bins]."""
        successes = torch.linspace(self.low, self.high, self.bins - 1, dtype=torch.float64)
        return torch.cat([torch.tensor([self.failure], dtype=torch.float64), successes]).to(dtype)

    def returns_of(self, remaining: Tensor) -> Tensor:
        """G [B] of successes, from the steps that were left, T - t [B]."""
        left = remaining.clamp(max=self.horizon).double()
        return -left / self.horizon if self.returns == "steps" else self.discount**left

    def targets(self, success: Tensor, remaining: Tensor, kind: str = "hl_gauss", smoothing: float = 0.75) -> Tensor:
        """y [B, bins], float32, of what came of states: bool [B], and T - t [B]."""
        if kind not in TARGETS:
            raise ConfigError(f"target={kind!r}: expected one of {', '.join(TARGETS)}.")
        found = self.returns_of(remaining)[:, None]
        centers = self.values(torch.float64)[1:]
        if kind == "two_hot":
            mass = (1 - (found - centers).abs() / self.width).clamp(min=0)
        else:
            scale = smoothing * self.width * math.sqrt(2)
            mass = torch.erf((centers + self.width / 2 - found) / scale)
            mass = mass - torch.erf((centers - self.width / 2 - found) / scale)
        mass = mass / mass.sum(-1, keepdim=True)
        good = success[:, None].double()
        return torch.cat([1 - good, mass * good], -1).float()

    def value(self, logits: Tensor) -> Tensor:
        """V [B]."""
        return torch.softmax(logits, -1) @ self.values(logits.dtype).to(logits.device)

    def success(self, logits: Tensor) -> Tensor:
        """The probability of success [B]."""
        return 1 - torch.softmax(logits, -1)[..., 0]

    def steps_left(self, logits: Tensor) -> Tensor:
        """The expected number of steps to success, if it succeeds [B], from 0 to the horizon."""
        mean = torch.softmax(logits[..., 1:], -1) @ self.values(logits.dtype)[1:].to(logits.device)
        steps = -mean * self.horizon if self.returns == "steps" else torch.log(mean) / math.log(self.discount)
        return steps.clamp(0, self.horizon)

    def advantages(self, values: Tensor, success: bool | None, steps: int) -> Tensor:
        """A [T], the N-step advantages of one episode from its values V [T] and its outcome; None: not known."""
        length = len(values)
        place = torch.arange(length)
        ahead = (length - place).clamp(max=steps)
        # a success is worth `high` at its end: 0, or 1
        outcome = float(values[-1]) if success is None else self.high if success else self.failure
        beyond = torch.cat([values.double(), torch.tensor([outcome], dtype=torch.float64)])[place + ahead]
        discount, count = self.step_discount, ahead.double()
        paid = self.step_reward * (count if discount == 1 else (1 - discount**count) / (1 - discount))
        return (paid + discount**count * beyond - values.double()).to(values.dtype)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of targets [B, bins]."""
    return F.cross_entropy(logits, targets)


def shaped(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, discount: float) -> Tensor:
    """Rewards [B] with the shaping F of a potential: that of the states, and of those that followed."""
    return rewards + discount * next_values * (1 - terminated.to(rewards.dtype)) - values


def auc(scores: Tensor, positive: Tensor) -> float | None:
    """The probability that a positive one has a higher score than a negative one, ties counted half: the area under
    the ROC curve. None where one of both kinds is missing."""
    yes, no = scores[positive].double(), scores[~positive].double()
    if not len(yes) or not len(no):
        return None
    ordered, _ = no.sort()
    below = torch.searchsorted(ordered, yes, right=False)
    up_to = torch.searchsorted(ordered, yes, right=True)
    return float((below + up_to).double().mean() / (2 * len(no)))


@dataclass(frozen=True)
class Reliability:
    """Predictions of about the same probability: how often they came true."""

    predicted: float
    """Their mean probability"""
    observed: float
    """The share that came true"""
    count: int


def reliability(probability: Tensor, truth: Tensor, bins: int = 10) -> list[Reliability]:
    """Probabilities [N] in bins of equal width, without the empty ones."""
    number = (probability * bins).long().clamp(0, bins - 1)
    groups = [number == place for place in range(bins)]
    return [
        Reliability(float(probability[rows].double().mean()), float(truth[rows].double().mean()), int(rows.sum()))
        for rows in groups
        if rows.any()
    ]


def calibration_error(probability: Tensor, truth: Tensor, bins: int = 10) -> float:
    """The expected calibration error: sum over the bins of n_b / N * |mean probability - share that came true|."""
    groups = reliability(probability, truth, bins)
    return sum(group.count * abs(group.predicted - group.observed) for group in groups) / max(1, len(probability))
