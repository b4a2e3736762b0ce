"""Images, words and the state of an arm become tokens: what `small_vla` and ACT see.

Images are looked at where the words ask for it (`Keypoints`), or in squares (`Patches`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.policies.base import Record
from hilt.policies.precision import in_bfloat16
from hilt.policies.vla.flow import embed_times
from hilt.policies.vla.tokens import ByteTokenizer

CHANNELS, TEXT_WIDTH = 32, 64
MAX_DEVIATIONS = 5.0
"""From the mean of a number of the state, beyond which it makes no difference"""


def observation_tokens(
    eyes: nn.Module, text: nn.Module, words: nn.Module, summary: nn.Module, record: Record, state: Tensor | None
) -> Tensor:
    """Returns a token for the places that were found together with the normalized state, one for the words, and those
    of the images, [B, tokens, width]. Instructions that several rows have are read once."""
    device = next(words.parameters()).device
    unique, prompt_of = np.unique(record["prompt"], axis=0, return_inverse=True)
    said = text(torch.from_numpy(unique).to(device))[torch.from_numpy(prompt_of.reshape(-1)).to(device)]
    tokens, places = eyes(torch.from_numpy(record["images"]).to(device), said)
    if state is not None:
        places = torch.cat([places, state.clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)], dim=-1)
    return torch.cat([summary(places)[:, None], words(said)[:, None], tokens], dim=1)


class Text(nn.Module):
    """Bytes of the words, int [B, L] padded with 0, to [B, TEXT_WIDTH]: two
    convolutions, then what is most attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(ByteTokenizer.size, TEXT_WIDTH)
        self.near = nn.ModuleList([nn.Conv1d(TEXT_WIDTH, TEXT_WIDTH, 5, padding=2) for _ in range(2)])
        self.asked = nn.Linear(TEXT_WIDTH, 4)
        self.out = nn.Linear(4 * TEXT_WIDTH, TEXT_WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        there = (ids != ByteTokenizer.pad)[:, None]  # [B, 1, L]
        order = embed_times(torch.arange(ids.shape[1], device=ids.device).float(), TEXT_WIDTH, 8.0, 512.0)
        x = (self.bytes(ids.long()) + order).transpose(1, 2) * there
        for convolution in self.near:
            x = x + F.relu(convolution(x)) * there
        weights = self.asked(x.transpose(1, 2)).transpose(1, 2).masked_fill(~there, -math.inf).softmax(-1)  # [B, 4, L]
        return self.out((weights @ x.transpose(1, 2)).flatten(1))


class Stem(nn.Module):
    """Convolutions of (size, stride): pictures, uint8 [B, cameras, H, W, 3], to what is at
    each place, [B * cameras, h, w, CHANNELS]."""

    def __init__(self, layers: Sequence[tuple[int, int]], precision: str):
        super().__init__()
        self.precision = precision
        inputs = [3, *[CHANNELS] * len(layers)]
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(i, CHANNELS, size, stride=stride, padding=size // 2)
                for i, (size, stride) in zip(inputs, layers, strict=False)
            ]
        )

    def forward(self, images: Tensor) -> Tensor:
        kind = self.layers[0].weight.dtype
        # its memory still in the order of the picture
        x = images.flatten(0, 1).to(kind).mul_(1 / 255).sub_(0.5).permute(0, 3, 1, 2)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=in_bfloat16(self.precision, x.device)):
            for layer in self.layers:
                x = F.relu(layer(x))
        return x.to(kind).permute(0, 2, 3, 1)


class Keypoints(nn.Module):
    """Pictures and words to a token for each place that the words make it look at, and to the places, from -1 to 1."""

    def __init__(self, width: int, cameras: int, keypoints: int, precision: str):
        super().__init__()
        self.cameras, self.keypoints = cameras, keypoints
        self.places = 2 * cameras * keypoints
        self.stem = Stem([(5, 4), (3, 1), (3, 1)], precision)
        self.keys = nn.Linear(CHANNELS, CHANNELS)
        self.queries = nn.Linear(TEXT_WIDTH, cameras * keypoints * CHANNELS)
        self.out = nn.Linear(CHANNELS + 2, width)
        self.which = nn.Parameter(torch.empty(cameras * keypoints, width))

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(images)
        maps, logits = self.looks(images, words)
        h, w = maps.shape[1:3]
        seen, found = maps.flatten(1, 2), logits.softmax(-1)  # [B * cameras, h w, C], [B * cameras, keypoints, h w]
        y, x = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([x, y], dim=-1).view(h * w, 2).to(maps)
        looked = torch.cat([found @ seen, found @ grid], dim=-1).view(rows, len(self.which), CHANNELS + 2)
        tokens, places = self.out(looked), looked[..., CHANNELS:]
        return tokens + self.which, places.flatten(1)

    def looks(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """What is at each place, [B * cameras, h, w, C], and how much each keypoint looks there,
        logits [B * cameras, keypoints, h w]."""
        maps = self.stem(images)
        queries = self.queries(words).view(len(maps), self.keypoints, CHANNELS)
        return maps, queries @ self.keys(maps.flatten(1, 2)).transpose(1, 2) * CHANNELS**-0.5


class Patches(nn.Module):
    """Pictures to a token for each square of 16 pixels. No places are named."""

    places = 0

    def __init__(self, width: int, cameras: int, image_size: int, precision: str):
        super().__init__()
        self.stem = Stem([(5, 4), (3, 2), (3, 2)], precision)
        self.out = nn.Linear(CHANNELS, width)
        self.which = nn.Parameter(torch.empty(cameras * (image_size // 16) ** 2, width))

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.out(self.stem(images)).reshape(len(images), *self.which.shape)
        return tokens + self.which, tokens.new_zeros(len(images), 0)
