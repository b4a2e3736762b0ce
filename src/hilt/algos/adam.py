"""Adam (Kingma and Ba, 2015), on gradients that it is given; with a decay, AdamW (Loshchilov and Hutter, 2019).

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  p <- p (1 - rate * decay) - rate * m / (1 - b1^n) / (sqrt(v /
                             (1 - b2^n)) + 1e-8)

The arithmetic is that of `torch.optim`, in the form of its function: the class `torch.optim.AdamW`
takes gradients from ``.grad`` alone, keeps moments where their parameters are, and imports torch's
compiler when it is made, which an actor has no use for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hilt.core.errors import NotFiniteError


class Adam:
    """Moves its parameters, and nothing else, when `step` is called.

    `moments_on`: the device on which the moments are made, if it is not that of their parameters.
    `decayed`: those of the parameters that have a decay; none: all of them.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.999),
        moments_on: str | None = None,
        decayed: Iterable[Tensor] | None = None,
    ):
        self.parameters, self.learning_rate, self.weight_decay, self.betas = (
            list(parameters),
            learning_rate,
            weight_decay,
            betas,
        )
        self._first, self._second = (
            [torch.zeros_like(p, requires_grad=False, device=moments_on) for p in self.parameters] for _ in range(2)
        )
        self._steps = torch.zeros(len(self.parameters), device=self.parameters[0].device)
        self._step_of = list(self._steps.unbind())
        self._decayed = None if decayed is None else {id(parameter) for parameter in decayed}

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step down these gradients, which are in the order of the parameters.
        One without a gradient is left as it is."""
        every = zip(self.parameters, gradients, self._first, self._second, self._step_of, strict=True)
        parts = [(p, _laid_out_as(p, gradient), *state) for p, gradient, *state in every if gradient is not None]
        if not parts:
            return
        parameters, laid_out, first, second, steps = (list(part) for part in zip(*parts, strict=True))
        with torch.no_grad():
            if self._decayed is not None and self.weight_decay:
                some = [parameter for parameter in parameters if id(parameter) in self._decayed]
                torch._foreach_mul_(some, 1 - self.learning_rate * self.weight_decay)
            adamw(
                parameters,
                laid_out,
                first,
                second,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=self.learning_rate,
                weight_decay=self.weight_decay if self._decayed is None else 0.0,
                eps=1e-8,
                maximize=False,
            )
        for parameter in parameters:  # the fused kernel does not tell who watches for changes (`hilt.policies.float8`)
            torch.autograd.graph.increment_version(parameter)

    def descend(self, loss: Tensor) -> None:
        """One step down the gradient of a loss. No other parameters receive gradients."""
        gradients = torch.autograd.grad(loss, self.parameters)
        if not torch.stack([gradient.norm() for gradient in gradients]).sum().isfinite():
            raise NotFiniteError(f"the gradient of a loss of {loss.item():g} is not finite. Nothing was changed by it.")
        self.step(gradients)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Forgets the gradients of these parameters, as if it had seen none: they begin anew."""
        known = {id(parameter) for parameter in parameters}
        every = zip(self.parameters, self._first, self._second, self._step_of, strict=True)
        for parameter, *state in every:
            for tensor in state if id(parameter) in known else ():
                tensor.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """All that it remembers, by name, to be copied from or into."""
        moments = {"first": self._first, "second": self._second}
        return {"steps": self._steps} | {f"{name}.{i}": m for name, kept in moments.items() for i, m in enumerate(kept)}


@contextlib.contextmanager
def denormals_flushed() -> Iterator[None]:
    """Computes with 0 in the place of numbers below 1.2e-38, in this thread, until it is left.

    The first moment of a weight whose gradient has become 0, behind a unit that is never active any more, shrinks by
    a tenth with every step until it is such a number, and stays there: 0.9 times the smallest is rounded to itself.
    On x86-64 an operation with one takes many times as long as with another number, so that a learner
    would become slower, the more of its units are idle. A weight does not change by such a moment.
    """
    done = torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if done:
            torch.set_flush_denormal(False)


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A convolution's gradient may have its channels last where its weights have them first: ``.grad`` would
    have the layout of the weights, which torch's fused kernels rely on. The one on the GPU refuses another; the
    one on the CPU takes each number for another's."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
