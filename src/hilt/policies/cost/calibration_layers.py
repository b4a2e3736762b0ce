"""The layers by which a machine is measured: a plain one, as vision transformers have; a gated one, as Llama and Gemma
have; and a gated one with adapters on each linear layer, which alone are trained.

    layer = make_layer("adapted", 4096)
    counts = layer_counts("adapted", 4096, rows=16, tokens=400, dtype=torch.bfloat16, training=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.policies.cost.op_counts import OpCounts, counted
from hilt.policies.io.adapted_linear import adapted_linear

RANK = 32
"""Of the adapters"""
WIDER = 2.6875
"""Numbers in the middle of a gated layer, relative to its width: as in Llama"""


class PlainLayer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = max(4, width // 64)
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.joined(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class GatedLayer(nn.Module):
    """A layer of a language model: norms by the root of the mean square, rotary positions, and a gate."""

    def __init__(self, width: int, adapted: bool = False):
        super().__init__()
        kind = AdaptedLinear if adapted else _linear
        self.heads, hidden = max(4, width // 128), int(WIDER * width)
        self.before, self.behind = RootMeanSquareNorm(width), RootMeanSquareNorm(width)
        self.query, self.key, self.value, self.out = (kind(width, width) for _ in range(4))
        self.gate, self.up, self.down = kind(width, hidden), kind(width, hidden), kind(hidden, width)
        if adapted:
            self.before.requires_grad_(False)
            self.behind.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        place = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = place[:, None] / 10_000.0 ** (torch.arange(query.shape[-1], device=x.device) / query.shape[-1])
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        seen = F.scaled_dot_product_attention(_turned(query, *turn), _turned(key, *turn), value)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.behind(x)
        made: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return made


class AdaptedLinear(nn.Module):
    """A linear layer that is not trained, and its adapter, which is."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, width) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(out, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return adapted_linear(x, self.weight, None, self.down, self.up, 0.5)


class RootMeanSquareNorm(nn.Module):
    """The norm that transformers has for Llama: in float32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def make_layer(kind: str, width: int) -> nn.Module:
    """A layer of a kind: "plain", "gated" or "adapted"."""
    return PlainLayer(width) if kind == "plain" else GatedLayer(width, adapted=kind == "adapted")


def layer_counts(kind: str, width: int, rows: int, tokens: int, dtype: torch.dtype, training: bool) -> OpCounts:
    """Counts the operations of such a layer."""

    def build() -> Any:
        return make_layer(kind, width).to(dtype)

    def call(layer: Any) -> Tensor:
        made: Tensor = layer(torch.zeros(rows, tokens, width, dtype=dtype))
        return made

    return counted(build, call, training=training)


def trained_parameters(layer: nn.Module) -> Sequence[Tensor]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _linear(width: int, out: int) -> nn.Module:
    return nn.Linear(width, out, bias=False)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
