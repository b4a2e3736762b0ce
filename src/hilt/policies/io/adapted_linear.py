"""A linear layer and its adapter as one operation: ``x W' + b + s (x A') B'``.

peft computes the two parts one after the other, with a copy of the input in the type of the adapter: of a layer with
float32 adapters and products in bfloat16 it makes two copies of the input and three of the output, and remembers the
input twice. Here the adapter's part is added by the product that makes it, and what is remembered is the input, which
other layers remember as well, and the few numbers of ``x A'``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.policies.float8 import Float8Linear


@functools.cache
def adapted_layer() -> Any:
    """The class of peft's linear layers that compute in this way where they can, and as peft does elsewhere."""
    from peft.tuners.lora.layer import Linear

    class AdaptedLinear(Linear):
        """A linear layer with one adapter."""

        def forward(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
            base, (name, *others) = self.base_layer, self.active_adapters
            plain = not (given or named or others or self.disable_adapters or self.merged or self.lora_variant)
            linear = type(base) is nn.Linear or (isinstance(base, Float8Linear) and not base.computes_in_float8())
            if plain and linear and type(self.lora_dropout[name]) is nn.Identity:
                tensors = base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight
                if _simple(x, *tensors):
                    return adapted_linear(x, *tensors, self.scaling[name])
            result: Tensor = super().forward(x, *given, **named)
            return result

    return AdaptedLinear


def _simple(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> bool:
    """Whether the layer's own weight is in one piece and not trained, and autocast or the caller has made all numbers
    of one type."""
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    kinds = {each.dtype for each in (x, weight, a, b)}
    alike = torch.float64 not in kinds if torch.is_autocast_enabled(x.device.type) else len(kinds) == 1
    return frozen and alike and _in_one_piece(weight) and _in_one_piece(a)


def _in_one_piece(tensor: Tensor) -> bool:
    """Whether all of a tensor is here; one without memory stands for such a one, where operations are counted."""
    return type(tensor.data) is Tensor or hasattr(tensor, "fake_mode")


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """[..., out] of [..., in], a weight [out, in] that is not trained, and an adapter of `a` [rank, in] and
    `b` [out, rank]. All of one type; under autocast, of any."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        wanted = torch.get_autocast_dtype(kind)
        x, weight, a, b = (each.to(wanted) for each in (x, weight, a, b))
        bias = None if bias is None else bias.to(wanted)
    if torch.compiler.is_compiling():  # which joins the sums by itself
        return F.linear(x, weight, bias) + F.linear(F.linear(x, a), b) * scale
    result: Tensor = _AdaptedLinear.apply(x, weight, bias, a, b, scale)
    return result


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1])
            low = flat @ a.t()
            out = F.linear(flat, weight, bias).addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(flat, weight, a, b, low)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat, weight, a, b, low = ctx.saved_tensors
        with torch.autocast(flat.device.type, enabled=False):
            grad = gradients[0].reshape(-1, len(weight))
            narrow = grad @ b * ctx.scale
            of_x = (grad @ weight).addmm_(narrow, a).view(ctx.shape) if ctx.needs_input_grad[0] else None
            of_a = narrow.t() @ flat if ctx.needs_input_grad[3] else None
            of_b = grad.t() @ low * ctx.scale if ctx.needs_input_grad[4] else None
        return of_x, None, None, of_a, of_b, None
