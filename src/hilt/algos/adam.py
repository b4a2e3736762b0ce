"""Adam (Kingma and Ba, 2015), on gradients that it is given; with a decay, AdamW (Loshchilov and Hutter, 2019).

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  p <- p (1 - rate * decay) - rate * m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + 1e-8)

``torch.optim`` does the same with the same kernel, but its first use imports torch's compiler: as long again as torch itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hilt.core.errors import NotFiniteError


class Adam:
    """Moves its parameters, and nothing else, when `step` is called.

    `apart`: each counts its own steps, so that some may be left out. `moments_on`: a device on which the moments are born, not theirs.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.999),
        apart: bool = False,
        moments_on: str | None = None,
    ):
        self.parameters, self.learning_rate, self.weight_decay, self.betas = list(parameters), learning_rate, weight_decay, betas
        self._first, self._second = (
            [torch.zeros_like(p, requires_grad=False, device=moments_on) for p in self.parameters] for _ in range(2)
        )
        self._steps = torch.zeros(len(self.parameters) if apart else (), device=self.parameters[0].device)
        self._step_of = list(self._steps.unbind()) if apart else [self._steps] * len(self.parameters)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step down these gradients, which are in the order of the parameters. One without a gradient is left as it is."""
        parts: tuple[Any, ...] = (self.parameters, list(gradients), self._first, self._second, self._step_of)
        moved: Any = 1
        if any(gradient is None for gradient in gradients):
            there = [i for i, gradient in enumerate(gradients) if gradient is not None]
            where = torch.tensor(there, dtype=torch.int64, device=self._steps.device)
            moved = torch.zeros_like(self._steps).index_fill_(0, where, 1)
            parts = tuple([part[i] for i in there] for part in parts)
        with torch.no_grad():
            self._steps += moved
            torch._fused_adamw_(
                parts[0],
                [_laid_out_as(p, gradient) for p, gradient in zip(*parts[:2], strict=True)],
                *parts[2:4],
                [],
                parts[4],
                lr=self.learning_rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )

    def descend(self, loss: Tensor) -> None:
        """One step down the gradient of a loss. Nobody else's parameters get any."""
        gradients = torch.autograd.grad(loss, self.parameters)
        if not torch.stack([gradient.norm() for gradient in gradients]).sum().isfinite():
            raise NotFiniteError(f"the gradient of a loss of {loss.item():g} is not finite. Nothing was changed by it.")
        self.step(gradients)

    def tensors(self) -> dict[str, Tensor]:
        """All that it remembers, by name, to be copied from or into."""
        moments = {"first": self._first, "second": self._second}
        return {"steps": self._steps} | {f"{name}.{i}": m for name, kept in moments.items() for i, m in enumerate(kept)}


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A convolution's gradient may have its channels last where its weights have them first. torch's kernel on the GPU refuses that; the
    one on the CPU takes each number for another's."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
