"""A chunk of actions as a few of them, its knots, and straight lines between.

    knots = Knots(chunk=10, count=4)
    knots.actions(drawn)                   # [B, 4, numbers] -> [B, 10, numbers]
    knots.shown(actions, mask)             # back again, by least squares: what to imitate

Where every action of a chunk is drawn by itself, the draws mostly cancel out, and hundreds of decisions share the
outcome of an episode. With knots what is drawn is a smooth motion, and there are fewer decisions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

RIDGE = 1e-4
"""Added to the diagonal of the normal equations: knots that nothing was shown of become 0"""


class Knots:
    """`count` knots, the first at the first action of a chunk and the last at the last one."""

    def __init__(self, chunk: int, count: int):
        self.chunk, self.count = chunk, count
        places = torch.linspace(0, chunk - 1, count, dtype=torch.float64)
        apart = (torch.arange(chunk)[:, None] - places).abs() * (count - 1) / (chunk - 1)
        self.weights = (1 - apart).clamp(min=0).float()
        """Of each knot in each action, [chunk, count]"""
        self.first = self.weights.gt(0).int().argmax(0)
        """The first action that depends on each knot: it is decided once that one is executed"""

    def actions(self, knots: Tensor) -> Tensor:
        """The chunk, ``[B, chunk, numbers]``, of knots ``[B, count, numbers]``."""
        return self.weights.to(knots) @ knots

    def shown(self, actions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the knots whose chunk is nearest to the actions ``[B, chunk, numbers]`` that the mask ``[B, chunk]``
        lets through; and how much of each knot these show, from 0 to 1, ``[B, count]``."""
        weights, there = self.weights.to(actions), mask.to(actions)
        seen = weights.T * there[:, None]  # [B, count, chunk]
        square = seen @ weights + RIDGE * torch.eye(self.count, device=actions.device)
        share = there @ weights / weights.sum(0)
        return torch.linalg.solve(square, seen @ actions), share

    def placed(self, numbers: Tensor) -> Tensor:
        """Numbers of each knot ``[..., count, numbers]`` as those of a chunk ``[..., chunk, numbers]``: at the first
        action that depends on the knot, and 0 elsewhere."""
        index = self.first.to(numbers.device)
        empty = numbers.new_zeros(*numbers.shape[:-2], self.chunk, numbers.shape[-1])
        return empty.index_copy(-2, index, numbers)

    @property
    def decides(self) -> np.ndarray:
        """bool [chunk]: where `placed` puts numbers."""
        return np.isin(np.arange(self.chunk), self.first.numpy())
