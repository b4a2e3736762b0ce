"""The parts of OpenVLA around its language model, under upstream's names: vision,
projectors, and heads on the action slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError
from hilt.policies.vla.vit import FilmBlock, Vit, VitConfig


class VisionBackbone(nn.Module):
    """DINOv2 (`featurizer`) and SigLIP (`fused_featurizer`) on the same images, their features side by side."""

    def __init__(self, configs: Sequence[VitConfig], image_size: int):
        super().__init__()
        if len(configs) not in (1, 2):
            raise ConfigError(f"expected one or two vision transformers, got {len(configs)}.")
        self.featurizer = Vit(configs[0], image_size)
        self.fused_featurizer = Vit(configs[1], image_size) if len(configs) == 2 else None
        self.width = sum(config.embed_dim for config in configs)
        self.patches = self.featurizer.patches

    def forward(self, pixels: Tensor, language: Tensor | None = None, checkpointed: float = 0.0) -> Tensor:
        """Pixels [B, images, 3 per transformer, H, W] to [B, images * patches, width]: all images in one pass."""
        batch, images = pixels.shape[:2]
        if language is not None:
            language = language.repeat_interleave(images, dim=0)
        seen = pixels.flatten(0, 1).split(3, dim=1)
        vits = [vit for vit in (self.featurizer, self.fused_featurizer) if vit is not None]
        features = [vit(part, language, checkpointed) for vit, part in zip(vits, seen, strict=True)]
        return torch.cat(features, dim=-1).view(batch, images * self.patches, self.width)


class FilmBackbone(nn.Module):
    """A `VisionBackbone` whose blocks listen to the words."""

    def __init__(self, backbone: VisionBackbone, language_width: int):
        super().__init__()
        self.vision_backbone = backbone
        self.width, self.patches = backbone.width, backbone.patches
        for vit in (backbone.featurizer, backbone.fused_featurizer):
            if vit is not None:
                vit.blocks = nn.ModuleList(
                    [FilmBlock(block, vit.config.embed_dim, language_width) for block in vit.blocks]
                )

    def forward(self, pixels: Tensor, language: Tensor, checkpointed: float = 0.0) -> Tensor:
        return self.vision_backbone(pixels, language, checkpointed)


class Projector(nn.Module):
    """Patch features to the width of the language model."""

    def __init__(self, vision_width: int, width: int, fused: bool):
        super().__init__()
        first = 4 * vision_width if fused else width
        self.fc1, self.fc2 = nn.Linear(vision_width, first), nn.Linear(first, width)
        self.fc3 = nn.Linear(width, width) if fused else None

    def forward(self, patches: Tensor) -> Tensor:
        x = self.fc2(F.gelu(self.fc1(patches)))
        return x if self.fc3 is None else self.fc3(F.gelu(x))


class ProprioProjector(nn.Module):
    """The robot's state as one more token."""

    def __init__(self, proprio_dim: int, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(proprio_dim, width), nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(proprio)))


class MlpResNet(nn.Module):
    """A linear layer, residual blocks, a linear layer; with norms and ReLU. The body of both heads."""

    def __init__(self, inputs: int, width: int, outputs: int, blocks: int = 2):
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList([_ResidualBlock(width) for _ in range(blocks)])
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class L1Head(nn.Module):
    """Hidden states at the slots [B, chunk * action_dim, width] to actions [B,
    chunk, action_dim]: one MLP for each action."""

    def __init__(self, width: int, chunk: int, action_dim: int):
        super().__init__()
        self.chunk = chunk
        self.model = MlpResNet(action_dim * width, width, action_dim)

    def forward(self, slots: Tensor) -> Tensor:
        return self.model(slots.reshape(len(slots), self.chunk, -1))


class ScaleHead(nn.Module):
    """The logarithm of a Laplace distribution's scale around the L1 head's action, as RIPT-VLA learns it."""

    START = -3.0
    """What a new head answers, nearly"""

    def __init__(self, width: int, chunk: int, action_dim: int):
        super().__init__()
        self.chunk = chunk
        self.trunk = MlpResNet(action_dim * width, width, width)
        self.log_b_head = nn.Linear(width, action_dim)

    def forward(self, slots: Tensor) -> Tensor:
        return self.log_b_head(self.trunk(slots.reshape(len(slots), self.chunk, -1)))


class ValueHead(nn.Module):
    """The return to come [B], from the hidden state at the end of the prompt: it has seen everything and no action."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(hidden)))).squeeze(-1)
