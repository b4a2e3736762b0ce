"""MLPs with LayerNorm, alone or as an ensemble whose members see the same rows, and their gradients without autograd.

    h = x W + b,    n = (h - mean h) / sqrt(var h + eps),    x' = act(scale n + shift)         for each hidden layer
    y = x W + b

    backward:    da = act'(x') dx',    dscale = sum_B n da,    dshift = sum_B da,    dW = x^T
                 dh,    db = sum_B dh,    dx = dh W^T

An update of RLPD makes five passes through networks so small that autograd's own work takes as long as
theirs. Written out, a pass has a third of the operations, and computes no gradient that is not needed:
none of the states where only actions are optimized, none of the parameters there, and none for rows that
are only evaluated. Nothing here records a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYER_NORM_EPS = 1e-6  # as in flax
_aten = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "tanh": (torch.tanh_, _aten.tanh_backward.default),
    "relu": (torch.relu_, lambda grad, out: _aten.threshold_backward.default(grad, out, 0)),
}
"""In place; and the gradient, from that of the output and the output"""


class MlpLayer(NamedTuple):
    """The parameters of a layer: of one network as `torch.nn` has them, or of an
    ensemble of E members in one tensor each."""

    weight: Any
    """``[outputs, inputs]``, or ``[E, inputs, outputs]``"""
    bias: Any
    """``[outputs]``, or ``[E, 1, outputs]``; `scale` and `shift` are like it"""
    scale: Any = None
    """Of the LayerNorm. The last layer has none, and no activation."""
    shift: Any = None


class Hidden(NamedTuple):
    """What a hidden layer of one member made on its way, ``[B, H]``; mean and
    reciprocal deviation of its product ``[B, 1]``."""

    product: Tensor
    mean: Tensor
    rstd: Tensor
    out: Tensor


class Tape(NamedTuple):
    """A pass, for its gradients."""

    x: Tensor
    """``[B, n]``, perhaps with a graph to where it comes from"""
    more: Tensor | None
    """Further inputs ``[B, m]``"""
    hidden: list[list[Hidden]]
    """Of each member"""
    out: Tensor
    """``[E, B, outputs]``, E = 1 for one network"""


class Network:
    """An MLP or an ensemble of them, of parameters that somebody else owns and may change in place.

    `further`: how many of its inputs, the last ones, are given apart from the others.
    """

    def __init__(self, layers: Sequence[MlpLayer], activation: str, further: int = 0):
        self.parameters: list[Tensor] = [tensor for layer in layers for tensor in layer if tensor is not None]
        self.gradients: dict[int, Tensor] = {}
        """Of each parameter, by its id, as the last call of `backward` made them"""
        self._activation, self._further = activation, further
        self._where: list[int] = []
        self._views: list[_Member] = []

    def run(self, x: Tensor, more: Tensor | None = None, first: Sequence[Tensor] | None = None) -> Tape:
        """The outputs for ``x [B, n]`` and further inputs ``[B, m]``. `first`: what the
        method of this name made of the same `x`."""
        members, (act, _) = self._members(), _ACTIVATIONS[self._activation]
        whole = _joined(x, more) if first is None else None
        out, made = x.new_empty(len(members), x.shape[0], members[0].layers[-1].bias.shape[0]), []
        for number, (layers, *_) in enumerate(members):
            below, hidden = whole, list[Hidden]()
            for layer in layers[:-1]:
                if first is not None and not hidden:
                    product = torch.addmm(first[number], more, members[number].of_more)
                else:
                    product = torch.addmm(layer.bias, below, layer.weight)
                below, mean, rstd = torch.native_layer_norm(
                    product, layer.scale.shape, layer.scale, layer.shift, LAYER_NORM_EPS
                )
                hidden.append(Hidden(product, mean, rstd, act(below)))
            torch.addmm(layers[-1].bias, below, layers[-1].weight, out=out[number])
            made.append(hidden)
        return Tape(x, more, made, out)

    def first(self, x: Tensor) -> list[Tensor]:
        """What `x` contributes to the first product of each member, for several passes with other further inputs."""
        return [torch.addmm(member.layers[0].bias, x.detach(), member.of_x) for member in self._members()]

    def backward(
        self,
        tape: Tape,
        dout: Tensor,
        rows: int | None = None,
        learns: bool = True,
        of_x: bool = False,
        of_more: bool = False,
    ) -> Tensor | None:
        """The gradients of the parameters, into `gradients`, if it `learns`; and those of
        one part of the inputs, if it is asked for.

        ``dout [E, B, outputs]`` is that of the outputs; or of the first `rows` of them, and then the others have none.
        """
        x = _joined(tape.x, tape.more)[:rows] if learns else None
        dinputs = None
        for member, hidden, dy in zip(self._members(), tape.hidden, dout, strict=True):
            made = hidden if rows is None else [Hidden(*(part[:rows] for part in each)) for each in hidden]
            dh = self._backward(member, made, x, dy)
            if of_x or of_more:
                weight = (member.of_x if of_x else member.of_more).t()
                dinputs = torch.mm(dh, weight) if dinputs is None else torch.addmm(dinputs, dh, weight)
        return dinputs

    def _backward(self, member: _Member, hidden: Sequence[Hidden], x: Tensor | None, dh: Tensor) -> Tensor:
        """The gradient of a member's first product, from that of its output; and of
        its parameters, if its input is given."""
        _, act_backward = _ACTIVATIONS[self._activation]
        learns = x is not None
        for depth in reversed(range(len(member.layers))):
            layer, into = member.layers[depth], member.gradients[depth]
            if depth < len(hidden):
                product, mean, rstd, out = hidden[depth]
                dh, dscale, dshift = _aten.native_layer_norm_backward.default(
                    act_backward(dh, out),
                    product,
                    layer.scale.shape,
                    mean,
                    rstd,
                    layer.scale,
                    layer.shift,
                    [True, learns, learns],
                )
                if learns:
                    into.scale.copy_(dscale)
                    into.shift.copy_(dshift)
            if x is not None:
                torch.mm((hidden[depth - 1].out if depth else x).t(), dh, out=into.weight)
                torch.sum(dh, 0, out=into.bias)
            if depth:
                dh = torch.mm(dh, member.transposed[depth])
        return dh

    def _members(self) -> list[_Member]:
        """Views of the parameters and of their gradients, made once and wherever the parameters
        were moved to another device or type."""
        where = [tensor.data_ptr() for tensor in self.parameters]
        if where != self._where:
            gradients = [torch.zeros_like(tensor, requires_grad=False) for tensor in self.parameters]
            self.gradients = {id(tensor): gradient for tensor, gradient in zip(self.parameters, gradients, strict=True)}
            pairs = zip(_split([tensor.detach() for tensor in self.parameters]), _split(gradients), strict=True)
            self._views, self._where = [_Member.of(layers, found, self._further) for layers, found in pairs], where
        return self._views


class _Member(NamedTuple):
    """One network: its weights ``[inputs, outputs]`` and the others ``[outputs]``."""

    layers: list[MlpLayer]
    gradients: list[MlpLayer]
    transposed: list[Tensor]
    """The weights ``[outputs, inputs]``"""
    of_x: Tensor
    """The rows of the first weight for ``x``, and those for further inputs"""
    of_more: Tensor

    @classmethod
    def of(cls, layers: list[MlpLayer], gradients: list[MlpLayer], further: int) -> _Member:
        first = layers[0].weight
        return cls(
            layers, gradients, [layer.weight.t() for layer in layers], *first.split([len(first) - further, further])
        )


def _split(tensors: Sequence[Tensor]) -> list[list[MlpLayer]]:
    """The layers of each member, as views of the tensors of all: four for each layer, two for the last."""
    views: list[Sequence[Tensor]] = []
    for i, tensor in enumerate(tensors):
        matrix = i % 4 == 0
        views.append(
            (tensor if matrix else tensor[:, 0]).unbind() if tensor.ndim == 3 else [tensor.t() if matrix else tensor]
        )
    return [[MlpLayer(*parts[i : i + 4]) for i in range(0, len(parts), 4)] for parts in zip(*views, strict=True)]


def _joined(x: Tensor, more: Tensor | None) -> Tensor:
    return x.detach() if more is None else torch.cat([x.detach(), more], dim=1)
