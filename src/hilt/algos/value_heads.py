"""How a critic states a value: as one number, or as a distribution over a stated range.

    scalar      Q = the output,    loss = (Q - y)^2,                       y = backup(min_i Q'_i(s', a'))

Both categorical heads have K outputs l, probabilities p = softmax(l), and a value v_j for each:

    Q = sum_j p_j v_j,    loss = -sum_j t_j log p_j,    dloss / dl = p - t,    dQ / dl_j = p_j (v_j - Q)

    c51         v_j = low + j * width,  width = (high - low) / (K - 1).  t is the distribution of the next state, which
                is that of the critic with the least Q', with every value moved by the backup and kept within the range;
                what comes to lie between two values is shared by both, the nearer one having more:

                t_j = sum_k p'_k max(0, 1 - |backup(v_k) - v_j| / width)          (Bellemare et al., arXiv 1707.06887)

    hl_gauss    t is a Gaussian around y, the target of a scalar critic kept within the range, cut into K bins of the
                edges e_0 ... e_K and normalized, and v_j is the middle of bin j:

                t_j = (Phi((e_j+1 - y) / s) - Phi((e_j - y) / s)) / (Phi((e_K - y) / s) - Phi((e_0 - y) / s)),
                s = sigma * width, Phi the normal distribution function         (Farebrother et al., arXiv 2403.03950)

                The outermost ceil(3 sigma) bins at either side lie outside of the range, so that the Gaussian of a
                target at its end is not cut off, which would move its mean inwards: width = (high - low) / (K - 2 *
                ceil(3 sigma)).

The backup maps a value v of the next state to r + discount^n * mask * v, as `hilt.algos.rlpd` has it.

How far E critics disagree about actions, by which a policy asks for help (`hilt.hil.contact`), is

    disagreement = mean over the batch of sqrt(sum_i (Q_i(s, a) - m)^2 / (E - 1)),   m = sum_i Q_i(s, a) / E
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hilt.algos.config import CriticConfig, Rlpd, margin_bins, value_range

Backup = Callable[[Tensor], Tensor]
"""Values of the next states ``[..., B]`` to targets of the same shape"""
START = 0.05
"""A categorical critic begins around the value 0, or the nearest in its range: probabilities fall to 1 / e over this
share of the range. A scalar one does so without help"""


class CriticHead(ABC):
    """Turns the outputs of the critics ``[E, B, K]`` into values, targets and losses."""

    bias: tuple[float, ...] = (0.0,)
    """The biases that the critics' last layer begins with: one for each output"""

    @abstractmethod
    def values(self, out: Tensor) -> Tensor:
        """Returns ``Q [E, B]``."""

    @abstractmethod
    def values_backward(self, out: Tensor, dq: Tensor) -> Tensor:
        """The gradient of the outputs ``[E, B, K]`` from that of the values ``[E, B]``."""

    @abstractmethod
    def target(self, next_out: Tensor, backup: Backup) -> Any:
        """What the critics are to learn, from the outputs of the target networks for the next states."""

    @abstractmethod
    def mean(self, target: Any) -> Tensor:
        """The values ``[B]`` of a target."""

    @abstractmethod
    def loss(self, out: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """The loss of each row ``[E, B]``, and the gradient of its sum with respect to the outputs ``[E, B, K]``."""

    def figures(self, next_out: Tensor, backup: Backup) -> dict[str, Tensor]:
        """Further figures of an update, for the metrics."""
        return {}


class ScalarHead(CriticHead):
    """One number."""

    def values(self, out: Tensor) -> Tensor:
        return out.squeeze(-1)

    def values_backward(self, out: Tensor, dq: Tensor) -> Tensor:
        return dq[..., None]

    def target(self, next_out: Tensor, backup: Backup) -> Tensor:
        return backup(self.values(next_out).amin(dim=0))

    def mean(self, target: Tensor) -> Tensor:
        return target

    def loss(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        errors = self.values(out) - target
        return errors.square(), (2 * errors)[..., None]


class CategoricalHead(CriticHead):
    """Probabilities of `centers`, from `low` to `high`."""

    def __init__(self, low: float, high: float, centers: Tensor):
        self.low, self.high, self.centers = low, high, centers
        start = min(max(0.0, low), high)
        self.bias = tuple((-(centers - start).abs() / (START * (high - low))).tolist())

    def values(self, out: Tensor) -> Tensor:
        return self._expected(torch.softmax(out, dim=-1))

    def values_backward(self, out: Tensor, dq: Tensor) -> Tensor:
        p = torch.softmax(out, dim=-1)
        return dq[..., None] * p * (self._centers(out) - self._expected(p)[..., None])

    def mean(self, target: Tensor) -> Tensor:
        return self._expected(target)

    def loss(self, out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(out, dim=-1)
        return -(target * log_p).sum(-1), log_p.exp() - target

    def figures(self, next_out: Tensor, backup: Backup) -> dict[str, Tensor]:
        y = backup(self.values(next_out).amin(dim=0))
        return {"target_clipped": ((y < self.low) | (y > self.high)).to(y.dtype)}

    def _expected(self, p: Tensor) -> Tensor:
        return p @ self._centers(p)

    def _centers(self, like: Tensor) -> Tensor:
        if self.centers.device != like.device or self.centers.dtype != like.dtype:
            self.centers = self.centers.to(like)
        return self.centers


class C51Head(CategoricalHead):
    """The projected distribution of the next state's value."""

    def __init__(self, low: float, high: float, bins: int):
        super().__init__(low, high, torch.linspace(low, high, bins, dtype=torch.float64))
        self.width = (high - low) / (bins - 1)

    def target(self, next_out: Tensor, backup: Backup) -> Tensor:
        least = self.values(next_out).argmin(dim=0)  # [B]
        p = torch.softmax(next_out[least, torch.arange(len(least), device=least.device)], dim=-1)  # [B, K]
        centers = self._centers(p)
        moved = backup(centers[:, None].expand(-1, len(p))).clamp(self.low, self.high).T  # [B, K]
        # where the task ended all values are moved to one, and whatever is behind the end, a NaN too, does not count
        p = torch.where(moved.amax(1, keepdim=True) == moved.amin(1, keepdim=True), 1 / p.shape[1], p)
        place = ((moved - self.low) / self.width).clamp(0, len(centers) - 1)
        below = place.floor().clamp(max=len(centers) - 2)
        above_share = place - below
        first = below.long()
        made = torch.zeros_like(p).scatter_add_(1, first, p * (1 - above_share))
        return made.scatter_add_(1, first + 1, p * above_share)


class HlGaussHead(CategoricalHead):
    """A Gaussian around the target, in bins."""

    def __init__(self, low: float, high: float, bins: int, sigma: float):
        margin = margin_bins(sigma)
        self.width = (high - low) / (bins - 2 * margin)
        self.edges = low + self.width * (torch.arange(bins + 1, dtype=torch.float64) - margin)
        self.deviation = sigma * self.width
        super().__init__(low, high, (self.edges[1:] + self.edges[:-1]) / 2)

    def target(self, next_out: Tensor, backup: Backup) -> Tensor:
        return self.histogram(backup(self.values(next_out).amin(dim=0)))

    def histogram(self, y: Tensor) -> Tensor:
        """``[B]`` to ``[B, K]``."""
        edges = self.edges.to(y)
        below = torch.erf((edges - y.clamp(self.low, self.high)[:, None]) / (math.sqrt(2) * self.deviation))
        return below.diff(dim=1) / (below[:, -1:] - below[:, :1])


def disagreement(critic: Any, head: CriticHead, z: Tensor, actions: Tensor) -> float:
    """The standard deviation of Q over an ensemble of critics, the mean of all rows; by the formula above."""
    return float(head.values(critic.run(z, actions, learns=False).out).std(0).mean())


def critic_head(critic: CriticConfig, rlpd: Rlpd) -> CriticHead:
    """The head that the settings of an agent ask for."""
    if critic.head == "scalar":
        return ScalarHead()
    low, high = value_range(critic, rlpd)
    if critic.head == "c51":
        return C51Head(low, high, critic.bins)
    return HlGaussHead(low, high, critic.bins, critic.sigma)
