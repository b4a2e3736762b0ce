"""Adam (Kingma and Ba, 2015), on gradients that it is given; with a decay, AdamW (Loshchilov and Hutter, 2019).

    m <- 0.9 m + 0.1 g,  v <- 0.999 v + 0.001 g^2,  p <- p (1 - rate * decay) - rate * m / (1 - 0.9^n) / (sqrt(v / (1 - 0.999^n)) + 1e-8)

``torch.optim`` does the same with the same kernel, but its first use imports torch's compiler: as long again as torch itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Adam:
    """Moves its parameters, and nothing else, when `step` is called."""

    def __init__(self, parameters: Iterable[Tensor], learning_rate: float, weight_decay: float = 0.0):
        self.parameters, self.learning_rate, self._decay = list(parameters), learning_rate, weight_decay
        self._first = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._second = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self._steps = torch.zeros((), device=self.parameters[0].device)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step down these gradients, which are in the order of the parameters."""
        with torch.no_grad():
            self._steps += 1
            torch._fused_adamw_(
                self.parameters,
                list(gradients),
                self._first,
                self._second,
                [],
                [self._steps] * len(self.parameters),
                lr=self.learning_rate,
                beta1=0.9,
                beta2=0.999,
                weight_decay=self._decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )

    def descend(self, loss: Tensor) -> None:
        """One step down the gradient of a loss. Nobody else's parameters get any."""
        self.step(torch.autograd.grad(loss, self.parameters))

    def tensors(self) -> dict[str, Tensor]:
        """All that it remembers, by name, to be copied from or into."""
        moments = {"first": self._first, "second": self._second}
        return {"steps": self._steps} | {f"{name}.{i}": m for name, kept in moments.items() for i, m in enumerate(kept)}
