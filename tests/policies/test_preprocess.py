"""Pictures beside the programs that they are to equal: PIL, and libjpeg through
simplejpeg. TensorFlow's own numbers are golden."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch._subclasses import FakeTensorMode

from hilt.core.errors import SchemaError
from hilt.policies.io import preprocess as images

SIZES = st.integers(3, 70)


def picture(height: int, width: int, seed: int = 0, smooth: bool = True) -> Any:
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(noise[::4, ::4]).resize((width, height))) if smooth else noise


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_resizing_is_pils(height: int, width: int, wanted: int, rows: bool, smooth: bool):
    """One direction at a time: which of the two comes first is another matter in each version of PIL."""
    given_picture, size = picture(height, width, height * width, smooth), (wanted, width) if rows else (height, wanted)
    for ours, theirs in ((images.bicubic, Image.Resampling.BICUBIC), (images.bilinear, Image.Resampling.BILINEAR)):
        assert np.array_equal(
            ours(given_picture, size), np.asarray(Image.fromarray(given_picture).resize(size[::-1], theirs))
        )


def test_columns_are_resized_first():
    """As all versions of PIL before the thirteenth did it."""
    seen = picture(40, 50, smooth=False)
    assert np.array_equal(images.bicubic(seen, (30, 60)), images.bicubic(images.bicubic(seen, (40, 60)), (30, 60)))
    assert not np.array_equal(images.bicubic(seen, (30, 60)), images.bicubic(images.bicubic(seen, (30, 50)), (30, 60)))


@settings(max_examples=25, deadline=None)
@given(SIZES, SIZES, st.integers(1, 100), st.booleans())
def test_a_jpeg_round_trip_is_libjpegs(height: int, width: int, quality: int, smooth: bool):
    given_picture, file = picture(height, width, quality, smooth), io.BytesIO()
    Image.fromarray(given_picture).save(file, "JPEG", quality=quality, subsampling=2)
    expected = simplejpeg.decode_jpeg(file.getvalue(), fastdct=True)
    assert np.array_equal(images.jpeg_round_trip(given_picture, quality), expected)


def test_leading_dimensions_stay_and_a_tensor_gives_a_tensor():
    batch = np.stack([picture(40, 30, seed) for seed in range(6)]).reshape(2, 3, 40, 30, 3)
    for function in (
        images.openvla_view,
        images.rotate180,
        lambda x: images.resize_with_pad(x, 32),
        lambda x: images.bicubic(x, 20),
    ):
        whole, tensor = function(batch), function(torch.from_numpy(batch))
        assert isinstance(whole, np.ndarray) and isinstance(tensor, torch.Tensor) and whole.dtype == np.uint8
        assert np.array_equal(whole, tensor.numpy())
        assert np.array_equal(whole[1, 2], function(batch[1, 2]))
    assert np.array_equal(images.rotate180(batch), batch[..., ::-1, ::-1, :])


def test_padding_is_in_the_middle_or_at_the_corner():
    tall = np.full((40, 20, 3), 200, np.uint8)
    middle, corner = images.resize_with_pad(tall, 41), images.resize_with_pad(tall, 41, anchor="corner")
    assert [int((each[20, :, 0] > 0).argmax()) for each in (middle, corner)] == [10, 21]
    assert (middle > 0).sum() == (corner > 0).sum() == 41 * 20 * 3


def test_openvla_sees_a_cropped_jpeg():
    seen = picture(64, 64, smooth=False)
    assert images.openvla_view(seen).shape == (224, 224, 3)
    uncropped = images.lanczos3(images.jpeg_round_trip(seen), 224)
    assert np.array_equal(images.openvla_view(seen, crop=False), uncropped)
    assert np.array_equal(images.openvla_view(seen), images.center_crop(uncropped, 0.9))
    assert np.array_equal(images.center_crop(uncropped, 1.0), uncropped)
    assert not np.array_equal(images.openvla_view(seen), uncropped)


def test_floats_are_normalized_per_color():
    mean, std = images.IMAGENET
    made = images.to_float(np.full((2, 5, 4, 3), 51, np.uint8), mean, std)
    assert made.shape == (2, 3, 5, 4) and made.dtype == torch.float32
    assert torch.allclose(made[0, :, 0, 0], torch.tensor([(0.2 - m) / s for m, s in zip(mean, std, strict=True)]))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: images.bicubic(np.zeros((4, 4, 3), np.float32), 8),
            "bicubic() was given torch.float32 [4, 4, 3]; pictures are uint8",
        ),
        (
            lambda: images.rotate180([1]),
            "rotate180() was given list; pictures are uint8 of shape [..., height, width, 3].",
        ),
        (
            lambda: images.center_crop(np.zeros((4, 4, 3), np.uint8), area=1.5),
            "area=1.5; the share of the area that is kept is above 0",
        ),
        (lambda: images.jpeg_round_trip(np.zeros((4, 4, 3), np.uint8), quality=0), "a JPEG of quality 0 was asked for"),
    ],
)
def test_preprocess_refuses_what_is_no_image(call: Any, says: str):
    with pytest.raises(SchemaError) as caught:
        call()
    assert says in str(caught.value)


def test_to_float_is_not_changed_by_an_estimate_of_memory_before_it():
    pictures = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    with FakeTensorMode():
        images.to_float(torch.empty(2, 4, 4, 3, dtype=torch.uint8))
    found = images.to_float(pictures)
    assert found.shape == (2, 3, 4, 4) and type(found) is torch.Tensor
    np.testing.assert_array_equal(found.numpy(), (np.moveaxis(pictures, -1, 1).astype(np.float32) / 255 - 0.5) / 0.5)
