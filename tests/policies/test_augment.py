"""Pictures that imitation sees: each change within its published bounds and
reaching for them, the same for the same generator."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from hilt.core.errors import ConfigError
from hilt.policies.io.preprocess import center_crop
from hilt.policies.vla import augment
from tests.effort import devices

SIDE = math.sqrt(augment.OPENVLA_AREA)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(rows: int = 4, size: int = 32) -> Tensor:
    return torch.randint(0, 256, (rows, size, size, 3), generator=chance(9), dtype=torch.uint8)


def flat(*color: float, rows: int = 300, size: int = 4) -> Tensor:
    """Pictures of one color."""
    return (torch.tensor(color) * 255).round().to(torch.uint8).expand(rows, size, size, 3)


def within(found: Tensor, low: float, high: float, tolerance: float) -> None:
    """Nowhere beyond the bounds, and near to both of them."""
    width = high - low
    assert (
        low - tolerance <= float(found.min()) < low + 0.1 * width
        and high - 0.1 * width < float(found.max()) <= high + tolerance
    )


@pytest.mark.parametrize("device", devices())
def test_the_same_draws_give_the_same_bytes_and_each_picture_has_its_own(device: str):
    images, wrist = noise().to(device), torch.tensor([False, True, False, True])
    both = {
        "openvla": lambda seed: augment.openvla(images, chance(seed)),
        "openpi": lambda seed: augment.openpi(images, wrist, chance(seed)),
    }
    for change in both.values():
        found = change(0)
        assert found.shape == images.shape and found.dtype == torch.uint8
        assert torch.equal(found, change(0)) and not torch.equal(found, change(1))
    alike = augment.openvla(images[:1].expand(3, -1, -1, -1), chance())
    assert not torch.equal(alike[0], alike[1]) and not torch.equal(alike[1], alike[2])
    with pytest.raises(ConfigError, match="augment=true changes pictures at random: give supervised_loss a generator"):
        augment.openvla(images, None)


@pytest.mark.parametrize("size", [32, 224])
def test_the_middle_of_what_may_be_cropped_is_what_is_seen_without_chance(size: int):
    images, half = noise(2, size), torch.full((2,), 0.5)
    found = (augment.cropped(images.float() * (1 / 255), half, half).clamp(0, 1) * 255.5).to(torch.uint8)
    assert torch.equal(found, center_crop(images, size=size))


def test_a_crop_has_nine_tenths_of_the_area_anywhere_within():
    rows = torch.arange(64.0)[None, :, None, None].expand(300, 64, 64, 3)
    draws = torch.rand(300, 2, generator=chance())
    for axis, picture in ((1, rows), (2, rows.transpose(1, 2))):
        seen = augment.cropped(picture, draws[:, 0], draws[:, 1]).movedim(axis, 1)[:, :, 0, 0] / 63
        assert torch.allclose(seen[:, -1] - seen[:, 0], torch.full((300,), SIDE), atol=1e-5)
        within(seen[:, 0], 0.0, 1 - SIDE, 1e-5)


def test_colors_of_openvla():
    byte = 2 / 255
    gray = augment.openvla(flat(0.5, 0.5, 0.5), chance()).float() / 255
    within(gray[:, 0, 0, 0] - 128 / 255, -0.2, 0.2, byte)
    halves = flat(0.4, 0.4, 0.4, size=8).clone()
    halves[:, :, 4:] = 153  # 0.6
    apart = augment.openvla(halves, chance(), crop=False).float() / 255
    within((apart[:, 0, 7, 0] - apart[:, 0, 0, 0]) / 0.2, 0.8, 1.2, 0.05)
    red = augment.openvla(flat(0.6, 0.4, 0.4), chance()).float() / 255
    hue, saturation, value = (each[:, 0, 0] for each in augment.to_hsv(red))
    within((hue + 0.5) % 1.0 - 0.5, -0.05, 0.05, 0.01)
    within(saturation * value / 0.2, 0.8, 1.2, 0.05)  # brightness moves all three, so that it leaves their spread


def test_colors_of_openpi():
    gray = augment.openpi(flat(0.5, 0.5, 0.5), torch.ones(300, dtype=torch.bool), chance()).float() / 255
    within(gray[:, 0, 0, 0] / (128 / 255), 0.7, 1.3, 0.01)
    halves = flat(0.4, 0.4, 0.4, size=8).clone()
    halves[:, :, 4:] = 153
    seen = augment.openpi(halves, torch.ones(300, dtype=torch.bool), chance()).float() / 255
    bright = seen.mean((1, 2, 3)) / 0.5
    within((seen[:, 0, 7, 0] - seen[:, 0, 0, 0]) / 0.2 / bright, 0.6, 1.4, 0.06)
    red = augment.openpi(flat(0.5, 0.4, 0.3), torch.ones(300, dtype=torch.bool), chance()).float() / 255
    spread = (red[:, 0, 0, 0] - red[:, 0, 0, 2]) / 0.2 / (red[:, 0, 0].mean(-1) / 0.4)
    contrast = 0.6 + 0.8 * torch.rand(300, 6, generator=chance())[:, 4]  # which widens the colors of one pixel too
    within(spread / contrast, 0.5, 1.5, 0.06)


def test_openpi_moves_what_is_not_at_the_wrist():
    """At the wrist a pixel stays where it is: what was alike is alike afterwards.
    Elsewhere the frame is cropped and turned."""
    levels = (torch.arange(40)[None, :, None, None] * 6).expand(2, 40, 40, 3).to(torch.uint8)  # each row has one value
    still, moved = augment.openpi(levels, torch.tensor([True, False]), chance(3)).int()
    assert (still == still[:, :1]).all() and not (moved == moved[:, :1]).all()
    slope = torch.arange(101.0)[None, :, None, None].expand(200, 101, 101, 3).clone()
    degrees = (torch.rand(200, generator=chance()) * 2 - 1) * augment.OPENPI_DEGREES
    seen = augment.turned(slope, degrees)[:, 50, :, 0]
    tilt = torch.atan((seen[:, 60] - seen[:, 40]) / 20) * 180 / math.pi
    assert torch.allclose(tilt.abs(), degrees.abs(), atol=0.05)


def test_a_turn_is_a_turn():
    picture = noise(1, 8).float()
    assert torch.allclose(augment.turned(picture, torch.zeros(1)), picture, atol=1e-3)
    quarter = augment.turned(picture, torch.tensor([90.0]))
    assert any(torch.allclose(quarter, torch.rot90(picture, k, (1, 2)), atol=0.1) for k in (1, 3))


def test_hue_saturation_and_value_are_pythons():
    colors = np.random.default_rng(0).random((50, 3)).astype(np.float32)
    colors[:3] = [[0, 0, 0], [0.5, 0.5, 0.5], [1, 1, 0]]
    hsv = torch.stack(augment.to_hsv(torch.from_numpy(colors)), -1)
    assert np.allclose(hsv.numpy(), [colorsys.rgb_to_hsv(*map(float, each)) for each in colors], atol=1e-5)
    assert np.allclose(augment.to_rgb(*hsv.unbind(-1)).numpy(), colors, atol=1e-5)
