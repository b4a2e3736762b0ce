"""Pictures as imitation sees them, each changed by chance as the published models
were trained: on their device, from a CPU generator.

    openvla(images, generator)
        OpenVLA and OpenVLA-OFT (`image_aug` of prismatic/vla/datasets): a square of 0.9 of the area anywhere, resized;
        then brightness + [-0.2, 0.2], contrast x [0.8, 1.2], saturation x [0.8, 1.2], hue + [-0.05, 0.05]
    openpi(images, wrist, generator)
        pi0 (openpi/models_pytorch/preprocessing_pytorch): a square of 0.95 of the side anywhere, resized,
        turned by up to 5 degrees, both not for a camera at the wrist; then brightness x [0.7, 1.3],
        contrast x [0.6, 1.4], saturation x [0.5, 1.5]

Every picture has draws of its own, as in openpi's JAX code; its torch code has one for a batch. Both
take uint8 [N, size, size, 3] and give the same back. What OpenVLA sees without chance,
`images.center_crop`, is the middle of what it may see here.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from hilt.core.errors import ConfigError

OPENVLA_AREA, OPENPI_SIDE, OPENPI_DEGREES = 0.9, 0.95, 5.0


def shifted(images: np.ndarray, pixels: int, generator: Generator | None) -> np.ndarray:
    """Each row's pictures, [B, cameras, H, W, 3], shifted together by up to `pixels`; new pixels repeat the edge."""
    if generator is None:
        raise ConfigError(f"shift={pixels} moves pictures at random: give supervised_loss a generator.")
    moves = torch.randint(0, 2 * pixels + 1, (len(images), 2), generator=generator).numpy()
    wide = np.pad(images, [(0, 0), (0, 0), (pixels, pixels), (pixels, pixels), (0, 0)], mode="edge")
    height, width = images.shape[2:4]
    return np.stack([each[:, y : y + height, x : x + width] for each, (y, x) in zip(wide, moves, strict=True)])


def openvla(images: Tensor, generator: Generator | None, crop: bool = True) -> Tensor:
    """`crop`: only for a policy that looks at the middle of a picture when it acts (`center_crop`)."""
    chance = _drawn(images, 6, generator)
    x = images.to(torch.float32) * (1 / 255)
    if crop:
        x = cropped(x, chance[:, 0], chance[:, 1])
    x = (x + _range(chance[:, 2], -0.2, 0.2)).clamp(0, 1)
    mean = x.mean((1, 2), keepdim=True)
    x = ((x - mean) * _range(chance[:, 3], 0.8, 1.2) + mean).clamp(0, 1)
    hue, saturation, value = to_hsv(x)
    saturation = (saturation * _range(chance[:, 4], 0.8, 1.2)[..., 0]).clamp(0, 1)
    hue = (hue + _range(chance[:, 5], -0.05, 0.05)[..., 0]) % 1.0
    return (to_rgb(hue, saturation, value).clamp(0, 1) * 255.5).to(torch.uint8)  # as TensorFlow makes bytes of numbers


def openpi(images: Tensor, wrist: Tensor, generator: Generator | None) -> Tensor:
    """`wrist` bool [N]: cameras that keep their frame."""
    chance, size = _drawn(images, 6, generator), images.shape[1]
    x, inner = images.to(torch.float32) / 255, int(size * OPENPI_SIDE)
    places = ((torch.arange(size, device=x.device) + 0.5) * (inner / size) - 0.5).clamp(0, inner - 1)
    first = (chance[:, :2] * (size - inner + 1)).floor()  # whole pixels, as many places as there are
    moved = turned(
        _resampled(x, first[:, :1] + places, first[:, 1:2] + places), (chance[:, 2] * 2 - 1) * OPENPI_DEGREES
    )
    x = torch.where(wrist.to(x.device)[:, None, None, None], x, moved)
    x = x * _range(chance[:, 3], 0.7, 1.3)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * _range(chance[:, 4], 0.6, 1.4) + mean
    gray = x.mean(3, keepdim=True)
    x = gray + (x - gray) * _range(chance[:, 5], 0.5, 1.5)
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


def cropped(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Crops numbers [N, size, size, 3] to a square of `OPENVLA_AREA`, at the relative positions [N] from 0 to 1,
    resized as `tf.image.crop_and_resize` does: bilinear, corner on corner. A half each way is the middle."""
    size = x.shape[1]
    side = torch.tensor(math.sqrt(OPENVLA_AREA), dtype=torch.float32, device=x.device)
    places = []
    for share in (down, right):
        start = (1 - side) * share[:, None]
        step = (start + side - start) * (size - 1) / max(size - 1, 1)
        places.append(start * (size - 1) + torch.arange(size, dtype=torch.float32, device=x.device) * step)
    return _resampled(x, *places)


def turned(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotates images about the center by these degrees [N]; new pixels are black."""
    angle = degrees * (math.pi / 180)
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cos, -sin, none], -1), torch.stack([sin, cos, none], -1)], 1)
    planes = x.permute(0, 3, 1, 2)
    grid = F.affine_grid(matrix, list(planes.shape), align_corners=False)
    return F.grid_sample(planes, grid, mode="bilinear", padding_mode="zeros", align_corners=False).permute(0, 2, 3, 1)


def to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue, saturation and value, each from 0 to 1, of red, green and blue [..., 3]."""
    value, strongest = x.max(-1)
    spread = value - x.min(-1).values
    safe = torch.where(spread > 0, spread, 1.0)
    red, green, blue = x.unbind(-1)
    angles = torch.stack([(green - blue) / safe, (blue - red) / safe + 2, (red - green) / safe + 4], -1)
    hue = torch.where(spread > 0, angles.gather(-1, strongest[..., None])[..., 0] / 6 % 1.0, 0.0)
    return hue, torch.where(value > 0, spread / torch.where(value > 0, value, 1.0), 0.0), value


def to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """[..., 3], the other way round."""
    shift = torch.tensor([5.0, 3.0, 1.0], device=hue.device)
    place = (shift + hue[..., None] * 6) % 6
    share = torch.minimum(place, 4 - place).clamp(0, 1)
    return value[..., None] * (1 - saturation[..., None] * share)


def _drawn(images: Tensor, numbers: int, generator: Generator | None) -> Tensor:
    """[N, numbers] from 0 to 1, the same on every device."""
    if generator is None:
        raise ConfigError(
            "augment=true changes pictures at random: give supervised_loss a generator (of the CPU), or augment=false."
        )
    return torch.rand(len(images), numbers, generator=generator).to(images.device)


def _range(chance: Tensor, low: float, high: float) -> Tensor:
    """[N, 1, 1, 1] within two bounds."""
    return (low + (high - low) * chance)[:, None, None, None]


def _resampled(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """What lies at these rows [N, h] and columns [N, w] of [N, H, W, 3], between pixels in a line."""
    for places, axis in ((columns, 2), (rows, 1)):
        lines, low = x.movedim(axis, 1), places.floor()
        near, far = (_picked(lines, at) for at in (low, places.ceil()))
        x = (near + (far - near) * (places - low)[:, :, None, None]).movedim(1, axis)
    return x


def _picked(lines: Tensor, at: Tensor) -> Tensor:
    """Returns the lines [N, l] of each of [N, L, ...]."""
    return lines[torch.arange(len(lines), device=lines.device)[:, None], at.long().clamp(0, lines.shape[1] - 1)]
