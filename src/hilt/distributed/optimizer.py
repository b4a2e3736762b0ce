"""A module that is trained, at one rank or at many: gradients of all ranks are
added up, clipped, and AdamW moves the weights.

A value head on a policy is a critic, and may have an optimizer of its own: a rate, a clip and a schedule. It begins
untrained, and learns too slowly at the rate of a policy that was trained before.

Every rank has the whole module, and makes the same moves: after each step the weights have the same bits
everywhere. `shard.py` has the one that is cut into pieces.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hilt.algos.adam import Adam
from hilt.algos.config import Optimizer
from hilt.algos.schedule import learning_rate_factor
from hilt.core.errors import ConfigError, MissingFieldError
from hilt.distributed.ranks import Alone, Ranks

HEAD = "value_head"
"""What the module of a value head is called in every policy"""
BUCKET = 1 << 23
"""Numbers that are added up over ranks in one call"""


class DataParallelOptimizer:
    """`backward` as often as it takes, then one `step`."""

    lockstep = False
    """Whether every forward and backward pass is a call that all ranks have to make together"""
    moments_on: str | None = None
    """Where AdamW's moments lie: beside the weights, or on this device"""

    def __init__(
        self, module: nn.Module, settings: Optimizer, ranks: Ranks | None = None, head: Optimizer | None = None
    ):
        """`head`: how a value head is trained; none: like the rest."""
        for each in (settings, *([] if head is None else [head])):
            each.check()
            if each.learning_rate is None:
                raise ConfigError(
                    "optimizer.learning_rate is none, which only a run's settings can choose: "
                    "give a number, such as 5e-6."
                )
        self.module, self.settings, self.head, self.ranks = module, settings, head, ranks or Alone()
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.trained:
            raise ConfigError(
                f"{type(module).__name__} has no parameter that is trained: give it adapters, or "
                "let it require gradients."
            )
        self._of_head = [HEAD in name.split(".") for name in self.trained]
        if head is not None and not any(self._of_head):
            raise ConfigError(
                f"{type(module).__name__} has no {HEAD} that is trained, for which an optimizer "
                "was given: leave that out."
            )
        self.skipped_in_a_row = 0
        """Steps, the last ones, that were left out because the gradient was not finite"""
        self._adam = Adam(self._pieces(), 0.0, settings.weight_decay, settings.betas, moments_on=self.moments_on)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this loss to what is there. Losses of all passes and ranks add up."""
        loss.backward()

    def step(self, progress: float, head_only: bool = False) -> dict[str, float]:
        """One step down the gradient, at all ranks the same. `progress`: how much of the
        run is done with it, above 0 and up to 1.

        `head_only`: what is not the value head stays as it is, whatever its gradient. Figures of a head with an
        optimizer of its own begin with ``critic_``. Where the gradient of all ranks together is not finite, its norm is
        returned, and the step is skipped: weights and moments stay as they are, at every rank.
        """
        parts: list[tuple[str, Optimizer, tuple[bool, ...]]] = [
            ("", self.settings, (True,) if head_only else (True, False))
        ]
        if self.head is not None:
            parts = [("critic_", self.head, (True,)), *([] if head_only else [("", self.settings, (False,))])]
        gradients, figures, moves = self._gradients(), dict[str, float](), []
        for prefix, settings, heads in parts:
            chosen = [
                gradient if head in heads else None for gradient, head in zip(gradients, self._of_head, strict=True)
            ]
            # over all ranks, so that all decide alike
            length = self._norm([gradient for gradient in chosen if gradient is not None])
            moves.append((chosen, settings, length, learning_rate(settings, progress)))
            figures |= {f"{prefix}gradient_norm": length, f"{prefix}learning_rate": moves[-1][3]}
        self.skipped_in_a_row = (
            0 if all(math.isfinite(length) for *_, length, _ in moves) else self.skipped_in_a_row + 1
        )
        for chosen, settings, length, rate in [] if self.skipped_in_a_row else moves:
            if settings.gradient_clip and length > settings.gradient_clip:
                torch._foreach_mul_(
                    [gradient for gradient in chosen if gradient is not None], settings.gradient_clip / length
                )
            self._adam.weight_decay, self._adam.betas = settings.weight_decay, settings.betas
            self._move(chosen, rate)
        self.clear()
        return figures

    def clear(self) -> None:
        """Forgets the gradient that is there: no step is made with it."""
        for parameter in self.trained.values():
            parameter.grad = None

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
                raise MissingFieldError(
                    f"{part}: {different[0]} is in the checkpoint or in the module only; they are of two policies."
                )
            with torch.no_grad():
                for name, tensor in known.items():
                    tensor.copy_(
                        self._part_of(state[part][name]) if name != "steps" or part == "trained" else state[part][name]
                    )

    # What is another for a module in pieces

    def _pieces(self) -> list[Tensor]:
        """What AdamW moves at this rank"""
        return list(self.trained.values())

    def _part_of(self, whole: Tensor) -> Tensor:
        """What this rank has of a tensor"""
        return whole

    def _gradients(self) -> list[Tensor | None]:
        """The gradients, added up over ranks. One that no rank has is None; one
        that some have not counts as zeros there."""
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


def learning_rate(settings: Optimizer, progress: float) -> float:
    """The learning rate of a step with which this share of the run is done."""
    assert settings.learning_rate is not None
    return settings.learning_rate * learning_rate_factor(
        progress, settings.warmup_ratio, settings.schedule, settings.min_lr_ratio
    )


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
