"""A module that is trained, at one rank or at many: gradients of all ranks are added up, clipped, and AdamW moves the weights.

Every rank has the whole module, and makes the same moves: after each step the weights have the same bits everywhere. `shard.py` has the
one that is cut into pieces.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hilt.algos.adam import Adam
from hilt.algos.config import Optimiser
from hilt.core.errors import ConfigError, MissingFieldError
from hilt.runtime.ranks import Alone, Ranks

BUCKET = 1 << 23
"""Numbers that are added up over ranks in one call"""


class Trainee:
    """`backward` as often as it takes, then one `step`."""

    lockstep = False
    """Whether every forward and backward pass is a call that all ranks have to make together"""
    moments_on: str | None = None
    """Where AdamW's moments lie: beside the weights, or on this device"""

    def __init__(self, module: nn.Module, settings: Optimiser, ranks: Ranks | None = None):
        settings.check()
        self.module, self.settings, self.ranks = module, settings, ranks or Alone()
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.trained:
            raise ConfigError(f"{type(module).__name__} has no parameter that is trained: give it adapters, or let it require gradients.")
        self._adam = Adam(self._pieces(), 0.0, settings.weight_decay, settings.betas, apart=True, moments_on=self.moments_on)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this loss to what is there. Losses of all passes and ranks add up."""
        loss.backward()

    def step(self, progress: float) -> dict[str, float]:
        """One step down the gradient, at all ranks the same. `progress`: how much of the run is done with it, above 0 and up to 1."""
        gradients, rate = self._gradients(), learning_rate(self.settings, progress)
        length = self._norm([gradient for gradient in gradients if gradient is not None])
        if not math.isfinite(length):
            raise ConfigError(f"the gradient's length is {length}; lower optimiser.learning_rate={self.settings.learning_rate:g}.")
        if self.settings.gradient_clip and length > self.settings.gradient_clip:
            torch._foreach_mul_([g for g in gradients if g is not None], self.settings.gradient_clip / length)
        self._move(gradients, rate)
        for parameter in self.trained.values():
            parameter.grad = None
        return {"gradient_norm": length, "learning_rate": rate}

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """While it is entered, this rank can use the module by itself: it has all of it."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What was trained, and what AdamW remembers."""
        trained = {name: p.detach().cpu() for name, p in self.trained.items()}
        return {"trained": trained, "adam": {name: tensor.cpu() for name, tensor in self._adam.tensors().items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        pieces = dict(zip(self.trained, self._pieces(), strict=True))
        for part, known in (("trained", pieces), ("adam", self._adam.tensors())):
            if different := sorted(set(known) ^ set(state[part])):
                raise MissingFieldError(f"{part}: {different[0]} is in the checkpoint or in the module only; they are of two policies.")
            with torch.no_grad():
                for name, tensor in known.items():
                    tensor.copy_(self._part_of(state[part][name]) if name != "steps" or part == "trained" else state[part][name])

    # What is another for a module in pieces

    def _pieces(self) -> list[Tensor]:
        """What AdamW moves at this rank"""
        return list(self.trained.values())

    def _part_of(self, whole: Tensor) -> Tensor:
        """What this rank has of a tensor"""
        return whole

    def _gradients(self) -> list[Tensor | None]:
        """The gradients, added up over ranks. One that no rank has is None; one that some have not counts as zeros there."""
        parameters = list(self.trained.values())
        there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64)
        self.ranks.sum_(there)
        for parameter, ranks in zip(parameters, there.tolist(), strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters]
        if self.ranks.size > 1:
            for bucket in _buckets([gradient for gradient in gradients if gradient is not None]):
                flat = self.ranks.sum_(torch.cat([gradient.reshape(-1) for gradient in bucket]))
                for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))
        return gradients

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        lengths = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack(lengths))) if lengths else 0.0

    def _move(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        self._adam.learning_rate = rate
        self._adam.step(gradients)


def learning_rate(settings: Optimiser, progress: float) -> float:
    """Rises in a line during the warm-up; then stays, or falls as a half cosine until the end."""
    if progress < settings.warmup_ratio:
        return settings.learning_rate * progress / settings.warmup_ratio
    if settings.schedule == "constant":
        return settings.learning_rate
    passed = (progress - settings.warmup_ratio) / max(1e-9, 1 - settings.warmup_ratio)
    low = settings.min_lr_ratio
    return settings.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * min(1.0, passed))) / 2)


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    size = BUCKET
    for gradient in gradients:
        alike = buckets and buckets[-1][0].dtype == gradient.dtype and buckets[-1][0].device == gradient.device
        if size + gradient.numel() > BUCKET or not alike:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.numel()
    return buckets
