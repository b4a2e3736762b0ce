"""Images become numbers: a small convolutional network, or HIL-SERL's ResNet-10. One per camera.

    encoder = Encoder({"images/front": (64, 64, 3)}, EncoderConfig(features=64), generator(0))
    encoder({"images/front": frames})  # uint8 [B, 64, 64, 3] -> float32 [B, 64]

A camera's encoder is a trunk, which sees, and a head, which sums up what it saw. The frames of a stack are channels of
one image. Everything random comes from the caller's generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError
from hilt.core.validate import check
from hilt.policies.agent.config import EncoderConfig
from hilt.policies.agent.mlp import LAYER_NORM_EPS
from hilt.policies.agent.resnet10_file import read_resnet10
from hilt.policies.precision import in_bfloat16

DROPOUT = 0.1
SPATIAL_FEATURES = 8
RESNET_PIXELS = 128


class Linear(nn.Linear):
    """torch's linear layer, without the values that it would draw from the global
    generator; `initialize` gives it some."""

    def reset_parameters(self) -> None:
        pass


class Conv(nn.Conv2d):
    """The same for convolutions."""

    def reset_parameters(self) -> None:
        pass


class Encoder(nn.Module):
    """All the cameras of an agent: ``{path: uint8 [B, (stack,) H, W, C]}`` to float32
    ``[B, width]``, in the order of the paths."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], config: EncoderConfig, generator: Generator | None):
        """`generator` draws the first weights; without one, weights must be loaded."""
        super().__init__()
        check(config, "encoder", idle=False)
        self.config = config
        self.paths = sorted(shapes) if config.kind != "none" else []
        self.width = config.features * len(self.paths)
        self.shapes = {path: image_shape(path, shapes[path]) for path in self.paths}
        trunk = SmallTrunk if config.kind == "small" else ResNet10
        shared = config.kind == "resnet10" and config.training != "critic"
        channels = {path: shape[2] for path, shape in self.shapes.items()}
        if shared and len(set(channels.values())) > 1:
            raise ConfigError(
                f"cameras that share a trunk have equal stacks of frames; given {self.shapes}. Set training=critic."
            )
        trunks: list[Any] = [trunk(channels[path]) for path in self.paths[: 1 if shared else None]]
        self.trunks = nn.ModuleList(trunks)
        self.heads = nn.ModuleList()
        for trunk_, path in zip(trunks * (len(self.paths) if shared else 1), self.paths, strict=True):
            made = trunk_.map_shape(*self.shapes[path][:2])
            self.heads.append((SmallHead if config.kind == "small" else SpatialHead)(made, config.features))
        if generator is not None:
            initialize(self.heads if config.weights else self, generator)
        if config.weights:
            tensors = read_resnet10(config.weights)
            for each in trunks:
                each.load_from(tensors, config.weights)

    def forward(self, images: Mapping[str, Tensor], generator: Generator | None = None, trunk: bool = True) -> Tensor:
        """`generator` draws the dropout in training; without one nothing is
        dropped. `trunk`: whether gradients reach it."""
        features = []
        for number, path in enumerate(self.paths):
            pixels = as_image(images[path], self.shapes[path], path)
            with torch.set_grad_enabled(torch.is_grad_enabled() and trunk):
                with torch.autocast(
                    pixels.device.type, torch.bfloat16, enabled=in_bfloat16(self.config.precision, pixels.device)
                ):
                    maps = self.trunks[min(number, len(self.trunks) - 1)](pixels)
                maps = maps.float()
            features.append(self.heads[number](maps, generator))
        if not features:
            raise ConfigError("this encoder has no cameras (kind=none, or no image among the observations).")
        return torch.cat(features, dim=-1)  # [B, width]

    @property
    def trunk_rests(self) -> bool:
        """Whether the trunk stays as it is whatever is trained: it came from a file, to be kept."""
        return bool(self.config.weights) and self.config.training != "critic"

    def trained_by_critic(self) -> list[nn.Parameter]:
        training = self.config.training
        return [] if training == "frozen" else list((self.heads if training == "head" else self).parameters())

    def trained_by_imitation(self) -> list[nn.Parameter]:
        return list((self.heads if self.trunk_rests else self).parameters())


class SmallTrunk(nn.Module):
    """Three convolutions of 32 channels: 5x5 in steps of 4, 3x3 in steps of 2, 3x3. Quick on a CPU."""

    def __init__(self, channels: int):
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                Conv(channels, 32, 5, stride=4, padding=2),
                Conv(32, 32, 3, stride=2, padding=1),
                Conv(32, 32, 3, padding=1),
            ]
        ).to(memory_format=torch.channels_last)

    def forward(self, pixels: Tensor) -> Tensor:
        dtype = torch.bfloat16 if torch.is_autocast_enabled(pixels.device.type) else torch.float32
        # [B, C, H, W], its memory still in the order of the image
        x = pixels.to(dtype).mul_(1 / 255).sub_(0.5).permute(0, 3, 1, 2)
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        return x

    def map_shape(self, height: int, width: int) -> tuple[int, int, int]:
        return 32, -(-height // 8), -(-width // 8)


class SmallHead(nn.Module):
    def __init__(self, shape: tuple[int, int, int], features: int):
        super().__init__()
        self.out = Projection(math.prod(shape), features)

    def forward(self, maps: Tensor, generator: Generator | None = None) -> Tensor:
        return self.out(maps.flatten(1))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a short cut; each is normalized over 4 groups of channels."""

    def __init__(self, inputs: int, filters: int, stride: int):
        super().__init__()
        self.stride = stride
        self.conv_0 = Conv(inputs, filters, 3, stride=stride, padding=0 if stride > 1 else 1, bias=False)
        self.norm_0 = nn.GroupNorm(4, filters, eps=1e-5)
        self.conv_1 = Conv(filters, filters, 3, padding=1, bias=False)
        self.norm_1 = nn.GroupNorm(4, filters, eps=1e-5)
        self.conv_proj = Conv(inputs, filters, 1, stride=stride, bias=False) if inputs != filters else None
        self.norm_proj = nn.GroupNorm(4, filters, eps=1e-5) if inputs != filters else None

    def forward(self, x: Tensor) -> Tensor:
        # flax pads an even image on its far side only where the stride is 2; torch would pad both sides
        y = self.conv_0(F.pad(x, (0, 1, 0, 1)) if self.stride > 1 else x)
        y = self.norm_1(self.conv_1(F.relu(self.norm_0(y))))
        if self.conv_proj is not None and self.norm_proj is not None:
            x = self.norm_proj(self.conv_proj(x))
        return F.relu(x + y)


class ResNet10(nn.Module):
    """HIL-SERL's trunk: one block in each of four stages, 64 to 512 filters; 128 x 128 pixels become 4 x 4 places."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv_init = Conv(channels, 64, 7, stride=2, padding=3, bias=False)
        self.norm_init = nn.GroupNorm(4, 64, eps=1e-5)
        self.blocks = nn.ModuleList(
            [ResidualBlock(64 * max(1, 2**i // 2), 64 * 2**i, stride=2 if i else 1) for i in range(4)]
        )
        # of ImageNet, in the unit of pixels
        self.register_buffer("mean", 255 * torch.tensor([0.485, 0.456, 0.406]).repeat(channels // 3), persistent=False)
        self.register_buffer("std", 255 * torch.tensor([0.229, 0.224, 0.225]).repeat(channels // 3), persistent=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, pixels: Tensor) -> Tensor:
        x = ((pixels.float() - self.mean) / self.std).permute(0, 3, 1, 2)
        if x.shape[-2:] != (RESNET_PIXELS, RESNET_PIXELS):
            x = F.interpolate(x, (RESNET_PIXELS, RESNET_PIXELS), mode="bilinear", antialias=True)
        x = F.max_pool2d(F.relu(self.norm_init(self.conv_init(x))), 3, stride=2, ceil_mode=True)
        for block in self.blocks:
            x = block(x)
        return x  # [B, 512, 4, 4]

    def map_shape(self, height: int, width: int) -> tuple[int, int, int]:
        return 512, RESNET_PIXELS // 32, RESNET_PIXELS // 32

    def load_from(self, tensors: Mapping[str, Tensor], where: str) -> None:
        channels = self.conv_init.in_channels
        if channels != 3:
            raise ConfigError(
                f"{where} is for images of 3 channels; these are stacks of frames, {channels}. Leave "
                "out the stacks or the file."
            )
        self.load_state_dict(tensors)


class SpatialHead(nn.Module):
    """Spatial learned embeddings: each channel's map is summed with 8 learned masks. Then dropout, and a projection."""

    def __init__(self, shape: tuple[int, int, int], features: int):
        super().__init__()
        self.masks = nn.Parameter(torch.empty(*shape, SPATIAL_FEATURES))  # [C, H, W, 8]
        self.out = Projection(shape[0] * SPATIAL_FEATURES, features)

    def forward(self, maps: Tensor, generator: Generator | None = None) -> Tensor:
        x = torch.einsum("bchw,chwf->bcf", maps, self.masks).flatten(1)
        return self.out(x if generator is None else dropout(x, DROPOUT, generator))


class Projection(nn.Module):
    """Linear, LayerNorm, tanh."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def initialize(module: nn.Module, generator: Generator) -> None:
    """First values as flax gives them: convolutions for ReLU, linear layers Xavier's, norms and biases neutral."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            fan_in = math.prod(part.weight.shape[1:])
            _truncated(part.weight, math.sqrt(2 / fan_in), generator)
        elif isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight, generator=generator)
        elif isinstance(part, SpatialHead):
            _truncated(part.masks, 1 / math.sqrt(math.prod(part.masks.shape[:3])), generator)
        elif isinstance(part, (nn.LayerNorm, nn.GroupNorm)):
            nn.init.ones_(part.weight)
        if isinstance(part, (nn.Conv2d, nn.Linear, nn.LayerNorm, nn.GroupNorm)) and part.bias is not None:
            nn.init.zeros_(part.bias)


def _truncated(tensor: Tensor, std: float, generator: Generator) -> None:
    """Draws numbers beyond two deviations again, and only those: `nn.init.trunc_normal_` of torch 2.13 draws the whole
    tensor again, in a second for each ResNet-10, and other versions draw other numbers."""
    wide = std / 0.8796256610342398  # cut off at two of its deviations, a normal of this one has the wanted one
    if tensor.is_meta:
        return
    with torch.no_grad():
        drawn = torch.empty(tensor.numel()).normal_(0.0, wide, generator=generator)
        while len(beyond := torch.nonzero(drawn.abs() > 2 * wide).squeeze(1)):
            drawn[beyond] = torch.empty(len(beyond)).normal_(0.0, wide, generator=generator)
        tensor.copy_(drawn.view(tensor.shape))


def dropout(x: Tensor, share: float, generator: Generator) -> Tensor:
    kept = torch.rand(x.shape, generator=generator) >= share
    return x * kept.to(x.device) / (1 - share)


def random_crop(images: Tensor, pixels: int, generator: Generator) -> Tensor:
    """``[B, (stack,) H, W, C]`` images, each shifted by up to `pixels` in each direction; new pixels repeat the edge.

    Equal to padding with the edge by `pixels` and cutting out anywhere, as DrQ has
    it. The frames of a stack move together.
    """
    if not pixels:
        return images
    moves = torch.randint(0, 2 * pixels + 1, (len(images), 2), generator=generator).numpy()
    array = images.cpu().numpy()
    margin = [(0, 0)] * (array.ndim - 3) + [(pixels, pixels), (pixels, pixels), (0, 0)]
    padded = np.pad(array, margin, mode="edge")
    height, width = array.shape[-3:-1]
    cut = np.empty_like(array)
    for i, (y, x) in enumerate(moves):
        cut[i] = padded[i, ..., y : y + height, x : x + width, :]
    return torch.from_numpy(cut).to(images.device)


def shifted(images: Tensor, down: int, right: int) -> Tensor:
    """``[B, (stack,) H, W, C]`` images, all shifted by the same number of pixels; new pixels repeat the edge."""
    height, width = images.shape[-3:-1]
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    return images.index_select(-3, rows).index_select(-2, columns)


def shift_of(number: int, camera: int, pixels: int) -> tuple[int, int]:
    """The shift of this number of a camera's images, down and to the right, in pixels, of which there are at most
    `pixels`. Number 0 leaves them as they are; all are different, and the same in every run."""
    reach = range(-pixels, pixels + 1)
    others = [(down, right) for down in reach for right in reach if down or right]
    order = np.random.default_rng(camera).permutation(len(others))
    return others[order[number - 1]] if number else (0, 0)


def image_shape(path: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """(H, W, channels of the whole stack) of an image or a stack of images."""
    if len(shape) not in (3, 4) or shape[-1] != 3:
        raise ConfigError(f"{path}: expected images of shape (H, W, 3) or (stack, H, W, 3), got {tuple(shape)}.")
    return int(shape[-3]), int(shape[-2]), 3 * (int(shape[0]) if len(shape) == 4 else 1)


def as_image(images: Tensor, shape: tuple[int, int, int], path: str) -> Tensor:
    """``[B, H, W, channels]``, the stack folded into the channels."""
    if images.ndim == 5:
        images = images.movedim(1, 3).flatten(3) if images.shape[1] > 1 else images[:, 0]
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != shape:
        given = f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"
        raise ConfigError(f"{path}: expected uint8 images [B, ...] that fold to {shape}, got {given}.")
    return images
