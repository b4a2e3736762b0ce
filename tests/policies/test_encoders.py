"""Encoders: the numbers that flax gives, crops, stacks, and where gradients reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.policies.agent.config import EncoderConfig
from hilt.policies.agent.encoders import Encoder, as_image, dropout, random_crop, shift_of, shifted
from hilt.replay.tensors import generator
from tests.policies.flax_weights import arrays, image, write

torch.set_num_threads(1)

FLAX = {
    (128, 128): (
        [0.000000, 0.122675, 0.569863, 3.023393, 0.799503],
        [-0.355025, 0.532732, 0.775151, 0.742206, 0.449156, -0.343058],
    ),
    (64, 64): (
        [0.474282, 0.000000, 0.487687, 4.414784, 0.779558],
        [-0.332410, 0.547138, 0.777824, 0.738950, 0.434570, -0.362407],
    ),
    (200, 160): (
        [1.646140, 0.000000, 0.605480, 3.064908, 0.825181],
        [-0.384349, 0.512827, 0.771328, 0.746267, 0.468021, -0.316663],
    ),
}
"""Five numbers of the trunk's maps and six of the result, by HIL-SERL's own modules (commit 5d02aed7,
flax 0.8.2, jax 0.4.25) on the weights and images of `flax_weights`: maps[0, 0, 0, 5], maps[1, 3, 2,
200], mean, largest, deviation; result[1, :6]."""


@pytest.mark.parametrize("size", FLAX)
def test_resnet10_gives_the_numbers_of_flax(tmp_path: Path, size: tuple[int, int]) -> None:
    config = EncoderConfig("resnet10", weights=str(write(tmp_path)), training="head", features=256)
    encoder = Encoder({"front": (*size, 3)}, config, generator(0))
    head = {
        key.removeprefix("head/"): torch.from_numpy(array) for key, array in arrays().items() if key.startswith("head/")
    }
    with torch.no_grad():
        own = dict(encoder.heads[0].named_parameters())
        own["masks"].copy_(head["SpatialLearnedEmbeddings_0/kernel"].permute(2, 0, 1, 3))
        own["out.linear.weight"].copy_(head["Dense_0/kernel"].T)
        own["out.linear.bias"].copy_(head["Dense_0/bias"])
        own["out.norm.weight"].copy_(head["LayerNorm_0/scale"])
        own["out.norm.bias"].copy_(head["LayerNorm_0/bias"])
        pixels = torch.from_numpy(image(*size))
        maps = encoder.trunks[0](pixels).permute(0, 2, 3, 1).numpy()
        result = encoder({"front": pixels}).numpy()
    found = [maps[0, 0, 0, 5], maps[1, 3, 2, 200], maps.mean(), maps.max(), maps.std()]
    np.testing.assert_allclose(found, FLAX[size][0], atol=3e-4)
    np.testing.assert_allclose(result[1, :6], FLAX[size][1], atol=3e-5)


def test_a_stack_is_folded_into_channels() -> None:
    stack = torch.arange(2 * 3 * 4 * 4 * 3).remainder(256).to(torch.uint8).reshape(2, 3, 4, 4, 3)
    folded = as_image(stack, (4, 4, 9), "front")
    for frame in range(3):
        assert torch.equal(folded[..., 3 * frame : 3 * frame + 3], stack[:, frame])
    with pytest.raises(
        ConfigError, match=r"front: expected uint8 images \[B, ...\] that fold to \(4, 4, 3\), got uint8 \(2, 4, 4, 9\)"
    ):
        as_image(stack, (4, 4, 3), "front")


def test_cameras_come_in_the_order_of_their_paths() -> None:
    encoder = Encoder({"wrist": (32, 32, 3), "front": (40, 32, 3)}, EncoderConfig(features=4), generator(0))
    r = np.random.default_rng(0)
    images = {
        "wrist": torch.from_numpy(r.integers(0, 256, (2, 32, 32, 3), np.uint8)),
        "front": torch.zeros(2, 40, 32, 3, dtype=torch.uint8),
    }
    both = encoder(images)
    other = encoder(images | {"wrist": images["wrist"].flip(0)})
    assert torch.equal(both[:, :4], other[:, :4]) and not torch.equal(both[:, 4:], other[:, 4:])


def test_a_trunk_that_rests_gets_no_gradient_and_is_shared(tmp_path: Path) -> None:
    config = EncoderConfig("resnet10", str(write(tmp_path)), "head", 4)
    encoder = Encoder({"a": (32, 32, 3), "b": (32, 32, 3)}, config, generator(0))
    assert len(encoder.trunks) == 1 and len(encoder.heads) == 2
    images = {name: torch.zeros(1, 32, 32, 3, dtype=torch.uint8) for name in "ab"}
    encoder(images, trunk=False).sum().backward()
    assert all(p.grad is None for p in encoder.trunks.parameters()) and all(
        p.grad is not None for p in encoder.heads.parameters()
    )
    assert set(encoder.trained_by_critic()) == set(encoder.trained_by_imitation()) == set(encoder.heads.parameters())
    tuned = Encoder({"a": (32, 32, 3), "b": (32, 32, 3)}, replace(config, training="critic"), generator(0))
    assert len(tuned.trunks) == 2 and set(tuned.trained_by_critic()) == set(tuned.parameters())
    assert all(
        torch.equal(a, b)
        for trunk in tuned.trunks
        for a, b in zip(trunk.parameters(), encoder.trunks.parameters(), strict=True)
    )


def test_dropout_is_the_callers() -> None:
    encoder = Encoder({"a": (32, 32, 3)}, EncoderConfig("resnet10", features=4), generator(0))
    image = {"a": torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8))}
    plain, once, again, other = encoder(image), *(encoder(image, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other) and not torch.equal(plain, once)
    dropped = dropout(torch.ones(10_000), 0.1, generator(0))
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.9])
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("stack", [(), (2,)])
def test_a_crop_is_a_cut_out_of_the_edge_padded_image(stack: tuple[int, ...]) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (300, *stack, 6, 7, 3), np.uint8))
    cropped = random_crop(images, 2, generator(0)).numpy()
    moves = []
    for before, after in zip(images.numpy(), cropped, strict=True):
        padded = np.pad(before, [(0, 0)] * len(stack) + [(2, 2), (2, 2), (0, 0)], mode="edge")
        moves += [
            [(y, x) for y in range(5) for x in range(5) if np.array_equal(padded[..., y : y + 6, x : x + 7, :], after)]
        ]
    assert all(len(found) == 1 for found in moves), "each image moves by itself, the frames of a stack together"
    assert {found[0] for found in moves} == {(y, x) for y in range(5) for x in range(5)}
    assert not np.array_equal(cropped, random_crop(images, 2, generator(1)).numpy())
    assert random_crop(images, 0, generator(0)) is images


@pytest.mark.parametrize("stack", [(), (2,)])
def test_a_shift_is_that_cut_out_of_the_edge_padded_images(stack: tuple[int, ...]) -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, *stack, 6, 7, 3), np.uint8))
    padded = np.pad(images.numpy(), [(0, 0)] * (1 + len(stack)) + [(2, 2), (2, 2), (0, 0)], mode="edge")
    for down, right in ((0, 0), (2, -1), (-2, 2), (1, 0)):
        cut = padded[..., 2 - down : 8 - down, 2 - right : 9 - right, :]
        assert np.array_equal(shifted(images, down, right).numpy(), cut)


def test_shifts_by_number_are_within_their_pixels_and_the_same_every_time() -> None:
    shifts = [shift_of(number, camera, 3) for camera in range(2) for number in range(40)]
    assert shifts[0] == shifts[40] == (0, 0) and len(set(shifts[:40])) == len(set(shifts[40:])) == 40
    assert shifts[:40] != shifts[40:] and {abs(each) for shift in shifts for each in shift} == {0, 1, 2, 3}
    assert shifts == [shift_of(number, camera, 3) for camera in range(2) for number in range(40)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EncoderConfig(kind="mobilenet"), "no encoder named 'mobilenet'"),
        (EncoderConfig(training="always"), "no encoder training named 'always'"),
        (EncoderConfig(features=0), "encoder.features=0: expected a whole number of at least 1"),
        (EncoderConfig(weights="x.pkl"), "only kind=resnet10 reads a file; kind is 'small'"),
        (
            EncoderConfig("resnet10", training="head"),
            "nothing has trained; set encoder.weights or encoder.pretrain_updates",
        ),
        (EncoderConfig("resnet10", training="frozen"), "keeps a trunk that nothing has trained"),
        (
            EncoderConfig(training="frozen", pretrain_updates=1, pretrain_crop=0, kept_shifts=2),
            "encoder.kept_shifts=2 with encoder.pretrain_crop=0, which has 1 shifts at most",
        ),
    ],
)
def test_encoder_refuses_wrong_settings(config: EncoderConfig, message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        Encoder({"a": (32, 32, 3)}, config, generator(0))


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a: expected images of shape \(H, W, 3\)"):
        Encoder({"a": (32, 32, 4)}, EncoderConfig(), generator(0))
    with pytest.raises(ConfigError, match="is for images of 3 channels; these are stacks of frames, 6"):
        Encoder({"a": (2, 32, 32, 3)}, EncoderConfig("resnet10", str(write(tmp_path)), "head"), generator(0))
    with pytest.raises(ConfigError, match="cameras that share a trunk have equal stacks"):
        shapes = {"a": (2, 32, 32, 3), "b": (32, 32, 3)}
        Encoder(shapes, EncoderConfig("resnet10", training="frozen", pretrain_updates=1), generator(0))
