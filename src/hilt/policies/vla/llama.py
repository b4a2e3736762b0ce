"""The language model: transformers' Llama, with an attention of our own.

Its decoder layers are called one by one with a `AttentionLayout`, which defines which tokens attend
to which. So nothing depends on which attention a
version of transformers chooses: with the wrong one OpenVLA-OFT is silently causal, and its actions are noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.policies.vla.vit import layers

if TYPE_CHECKING:
    from torch import nn

NAME = "hilt_openvla"
"""Of our attention among those that transformers knows"""
DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "pad_token_id": 32000,
    "tie_word_embeddings": False,
}
"""Values that the configs of OpenVLA's checkpoints omit; fixed here, because defaults of a library may change"""


@dataclass
class AttentionLayout:
    """Defines which tokens attend to which in a pass; by default all to all."""

    causal: bool = False
    """Whether a token sees only what stands before it"""
    mask: Tensor | None = None
    """bool [B or 1, 1, queries or 1, keys]: True where a query may look, instead of `causal`"""
    past: list[tuple[Tensor, Tensor]] | None = None
    """Keys and values of an earlier pass, by layer, that stand before the ones of this"""
    kept: list[tuple[Tensor, Tensor]] | None = None
    """Is given the keys and values of this pass, those of the past included"""
    packing: Packing | None = None


@dataclass
class Packing:
    """Rows of different length one behind the other, without padding: ``place`` is
    where each token would lie in [rows * length]."""

    place: Tensor
    rows: int
    length: int

    def pack(self, padded: Tensor) -> Tensor:
        """[rows, length, ...] to [1, tokens, ...]."""
        return padded.flatten(0, 1)[self.place][None]

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, tokens, ...] to [rows, length, ...], with zeros where no token is."""
        empty = packed.new_zeros(self.rows * self.length, *packed.shape[2:])
        return empty.index_copy(0, self.place, packed[0]).unflatten(0, (self.rows, self.length))


def make(text_config: Mapping[str, object]) -> nn.Module:
    """A `LlamaForCausalLM` of these sizes."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(NAME, attend)
    left_out = ("torch_dtype", "dtype", "model_type", "architectures", "_attn_implementation")
    config = LlamaConfig(**{**DEFAULTS, **{key: value for key, value in text_config.items() if key not in left_out}})
    model = LlamaForCausalLM(config)
    model.config._attn_implementation = model.model.config._attn_implementation = NAME
    return model


def run(model: nn.Module, x: Tensor, positions: Tensor, layout: AttentionLayout, checkpointed: float = 0.0) -> Tensor:
    """Embeddings [B, S, width] at `positions` [B or 1, S] through all layers and the
    final norm; `checkpointed` as in `vit.layers`."""
    trunk = model.model
    if layout.packing is not None:
        x, positions = layout.packing.pack(x), layout.packing.pack(positions.expand(x.shape[:2]))
    rotary = trunk.rotary_emb(x, positions)
    for layer in layers(trunk.layers, checkpointed):
        x = layer(x, position_embeddings=rotary, layout=layout)
    x = trunk.norm(x)
    return x if layout.packing is None else layout.packing.unpack(x)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    layout: AttentionLayout,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention of every layer, as transformers calls it: [B, heads, S, d] in, [B, S, heads, d] out."""
    if layout.past is not None:
        key, value = (torch.cat(pair, dim=2) for pair in zip(layout.past[module.layer_idx], (key, value), strict=True))
    if layout.kept is not None:
        layout.kept[module.layer_idx : module.layer_idx + 1] = [(key, value)]
    packing = layout.packing
    if packing is not None:  # products are most of the work and need no padding; attention is done row by row, with it
        query, key, value = (packing.unpack(part.transpose(1, 2)).transpose(1, 2) for part in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=layout.mask, is_causal=layout.causal and layout.mask is None, scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    ).transpose(1, 2)  # fmt: skip
    return (out if packing is None else packing.pack(out)), None
