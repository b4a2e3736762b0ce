"""Vision transformers with the names and the numbers of timm's: DINOv2 with registers and LayerScale, and SigLIP.

A VLA wants patch features, not classes: `Vit.forward` gives what the last block but one makes of an
image, without a final norm and without class and register tokens. The last block, the norm and
SigLIP's pooling are in the checkpoints but not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError, UnknownNameError

EPS = 1e-6


@dataclass(frozen=True)
class VitConfig:
    """A transformer in timm's words; a field that is not here has timm's default."""

    patch_size: int = 14
    """Pixels at the side of a patch"""
    embed_dim: int = 1024
    depth: int = 24
    """Blocks"""
    num_heads: int = 16
    mlp_ratio: float = 4.0
    """Width of a block's MLP over that of the block"""
    init_values: float | None = None
    """With a number, blocks have LayerScale"""
    class_token: bool = True
    reg_tokens: int = 0
    """Registers beside the class token"""
    no_embed_class: bool = False
    """Whether only patches have a position"""
    global_pool: str = "token"
    """`map`: there is a pooling by attention"""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> VitConfig:
        """From timm's keyword arguments."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownNameError("option of a vision transformer", name, known)
        return cls(**options)

    @classmethod
    def named(cls, timm_id: str) -> VitConfig:
        """From a name such as ``vit_so400m_patch14_siglip_224``; the part after a dot
        names the weights, and is ignored here."""
        name = timm_id.partition(".")[0]
        if name not in KNOWN:
            raise UnknownNameError("vision transformer", timm_id, KNOWN)
        return KNOWN[name]


def _dinov2(width: int, depth: int, heads: int) -> VitConfig:
    return VitConfig(embed_dim=width, depth=depth, num_heads=heads, init_values=1e-5, reg_tokens=4, no_embed_class=True)


_SO400M = VitConfig(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362, class_token=False, global_pool="map")
KNOWN = {
    "vit_small_patch14_reg4_dinov2": _dinov2(384, 12, 6),
    "vit_base_patch14_reg4_dinov2": _dinov2(768, 12, 12),
    "vit_large_patch14_reg4_dinov2": _dinov2(1024, 24, 16),
    "vit_so400m_patch14_siglip_224": _SO400M,
    "vit_so400m_patch14_siglip_384": _SO400M,
}


class Vit(nn.Module):
    """Images [B, 3, H, W], normalized, to patch features [B, patches, embed_dim]."""

    def __init__(self, config: VitConfig, image_size: int):
        super().__init__()
        side = image_size // config.patch_size
        if config.depth < 2:
            raise ConfigError(f"a vision transformer of {config.depth} blocks has no last but one; give it at least 2.")
        self.config, self.patches, width = config, side * side, config.embed_dim
        self.take = config.depth - 1
        """Blocks whose output is the features"""
        self.prefix_tokens = int(config.class_token) + config.reg_tokens
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.reg_tokens, width)) if config.reg_tokens else None
        placed = self.patches if config.no_embed_class else self.patches + self.prefix_tokens
        self.pos_embed = nn.Parameter(torch.zeros(1, placed, width))
        self.patch_embed = PatchEmbed(config.patch_size, width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.attn_pool = AttentionPool(config) if config.global_pool == "map" else None

    def forward(self, images: Tensor, language: Tensor | None = None, checkpointed: float = 0.0) -> Tensor:
        """`language` [B, text width], the mean of the words, is for blocks with FiLM; `checkpointed` as in `layers`."""
        x = self.patch_embed(images)
        if self.config.no_embed_class:
            x = x + self.pos_embed
        x = torch.cat(
            [*(token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None), x],
            dim=1,
        )
        if not self.config.no_embed_class:
            x = x + self.pos_embed
        for layer in layers(self.blocks[: self.take], checkpointed):
            x = layer(x) if language is None else layer(x, language)
        return x[:, self.prefix_tokens :]


def layers(modules: Sequence[nn.Module], checkpointed: float) -> Iterator[Callable[..., Tensor]]:
    """The modules one by one. That share of them, from 0 to 1, is computed once more for
    the gradient instead of being remembered."""
    for place, module in enumerate(modules):
        if torch.is_grad_enabled() and place < round(checkpointed * len(modules)):
            from torch.utils.checkpoint import checkpoint

            yield partial(checkpoint, module, use_reentrant=False, preserve_rng_state=False)
        else:
            yield module


class PatchEmbed(nn.Module):
    """One linear layer over the pixels of each patch, row by row."""

    def __init__(self, patch_size: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Attention, then an MLP, each with a norm before it and added to what came."""

    def __init__(self, config: VitConfig):
        super().__init__()
        width = config.embed_dim
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width, config.num_heads)
        self.ls1 = LayerScale(width) if config.init_values else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = Mlp(width, int(width * config.mlp_ratio))
        self.ls2 = LayerScale(width) if config.init_values else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.look(x))

    def look(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))

    def think(self, x: Tensor) -> Tensor:
        return x + self.ls2(self.mlp(self.norm2(x)))


class FilmBlock(nn.Module):
    """A block whose features are scaled and shifted by the words, between its two
    halves: ``x * (1 + scale) + shift``."""

    def __init__(self, block: Block, width: int, language_width: int):
        super().__init__()
        self.block = block
        self.scale = nn.Linear(language_width, width)
        self.shift = nn.Linear(language_width, width)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        x = self.block.look(x)
        return self.block.think(x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None])


class Attention(nn.Module):
    """Every token looks at every token."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(
            F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        )


class LayerScale(nn.Module):
    """timm calls the factor `gamma`; the checkpoints have `scale_factor`, because transformers renames every gamma."""

    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Mlp(nn.Module):
    """Two linear layers and the exact GELU: the one with tanh is 1e-4 off."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class AttentionPool(nn.Module):
    """SigLIP's pooling by attention: here for its weights only, for patch features are taken before it."""

    def __init__(self, config: VitConfig):
        super().__init__()
        width = config.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.mlp = Mlp(width, int(width * config.mlp_ratio))
