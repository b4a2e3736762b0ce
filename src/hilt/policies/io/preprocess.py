"""How pictures come to a policy, without TensorFlow, PIL or torchvision: the
numbers of TensorFlow's and PIL's own functions.

    openvla_view(images)         what OpenVLA was trained on: a JPEG round trip, Lanczos3 to 224 pixels, a center crop
                                 of 0.9 of the area
    resize_with_pad(images, 224) what pi0 was trained on

Every function takes uint8 [..., H, W, 3], an array or a tensor on any device, and gives the same back;
`to_float` is the last step, on the device that consumes them. Arithmetic is on integers, or on float64 that
hold them exactly, so a GPU gives the bytes of a CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.nn import functional

from hilt.core.errors import SchemaError
from hilt.policies.io.jpeg import placed, round_trip

Images = TypeVar("Images", np.ndarray, torch.Tensor)
Kernel = Callable[[np.ndarray], np.ndarray]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of DINOv2's input, after the division by 255."""
SIGLIP = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def _pictures(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Leading dimensions become one, arrays become tensors, and both come back as they were."""

    @functools.wraps(function)
    def wrapped(images: object, *args: Any, **kwargs: Any) -> np.ndarray | torch.Tensor:
        array = isinstance(images, np.ndarray)
        given = torch.from_numpy(np.array(images)) if array else images
        if not isinstance(given, torch.Tensor) or given.dtype != torch.uint8 or given.ndim < 3 or given.shape[-1] != 3:
            what = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
            raise SchemaError(
                f"{function.__name__}() was given {what}; pictures are uint8 of shape [..., height, width, 3]."
            )
        result = function(given.reshape(-1, *given.shape[-3:]), *args, **kwargs)
        result = result.reshape(*given.shape[:-3], *result.shape[1:])
        return result.numpy() if array else result

    return wrapped


def openvla_view(images: Images, size: int = 224, crop: bool = True) -> Images:
    """What the OpenVLA family sees of a camera, in uint8 [..., size, size, 3]; the rotation
    of LIBERO's pictures is the suite's matter."""
    seen = lanczos3(jpeg_round_trip(images), size)
    result: Images = center_crop(seen, size=size) if crop else seen
    return result


@_pictures
def rotate180(images: torch.Tensor) -> torch.Tensor:
    return images.flip(-3, -2)


@_pictures
def jpeg_round_trip(images: torch.Tensor, quality: int = 95) -> torch.Tensor:
    """The picture after `tf.io.encode_jpeg` and `decode_image`: what a dataset that was stored as JPEG has of it."""
    return round_trip(images, quality)


# --- resizing ---


@_pictures
def lanczos3(images: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """`tf.image.resize(method="lanczos3", antialias=True)`, rounded and clipped to uint8."""
    pixels = images.to(torch.float32)
    for dim, wanted in ((1, _size(size)[0]), (2, _size(size)[1])):
        places, weights = _lanczos(images.shape[dim], wanted)
        summed = torch.zeros((), device=images.device)
        # one after the other, as there
        for place, weight in zip(placed(places, images), placed(weights, images), strict=True):
            summed = summed + pixels.index_select(dim, place) * weight.view(-1, *(1,) * (3 - dim))
        pixels = summed
    return pixels.round().clamp(0, 255).to(torch.uint8)


@_pictures
def bicubic(images: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """PIL's `resize(..., BICUBIC)`, as torchvision's Resize does it: antialiased, a uint8 after each direction."""
    return _pil(images, _size(size), _cubic)


@_pictures
def bilinear(images: torch.Tensor, size: int | tuple[int, int]) -> torch.Tensor:
    """PIL's `resize(..., BILINEAR)`, antialiased."""
    return _pil(images, _size(size), _triangle)


@_pictures
def resize_with_pad(
    images: torch.Tensor, size: int | tuple[int, int], anchor: Literal["center", "corner"] = "center"
) -> torch.Tensor:
    """PIL's BILINEAR to the largest picture of the same shape that fits, in the middle of
    black, or in its lower right corner (SmolVLA)."""
    height, width = _size(size)
    ratio = max(images.shape[2] / width, images.shape[1] / height)
    inner = int(images.shape[1] / ratio), int(images.shape[2] / ratio)
    resized = _pil(images, inner, _triangle)
    below, right = ((height - inner[0] + 1) // 2, (width - inner[1] + 1) // 2) if anchor == "center" else (0, 0)
    return functional.pad(resized, (0, 0, width - inner[1] - right, right, height - inner[0] - below, below))


@_pictures
def center_crop(images: torch.Tensor, area: float = 0.9, size: int | tuple[int, int] = 224) -> torch.Tensor:
    """The middle of the picture with this share of its area, resized by
    `tf.image.crop_and_resize` (bilinear, corner on corner)."""
    if not 0 < area <= 1:
        raise SchemaError(
            f"center_crop() was given area={area}; the share of the area that is kept is above 0 and at most 1."
        )
    height, width = _size(size)
    side = np.float32(math.sqrt(area))
    pixels = images.to(torch.float32) * np.float32(1 / 255)
    top, bottom, down = (placed(each, images) for each in _between(float(side), images.shape[1], height))
    left, right, across = (placed(each, images) for each in _between(float(side), images.shape[2], width))
    upper, lower = pixels[:, top], pixels[:, bottom]
    upper, lower = _mix(upper, left, right, across), _mix(lower, left, right, across)
    mixed = upper + (lower - upper) * down[:, None, None]
    return (mixed.clamp(0, 1) * 255.5).to(torch.uint8)  # TensorFlow scales by 255.5 and cuts, where one would round


def to_float(images: object, mean: Sequence[float] = SIGLIP[0], std: Sequence[float] = SIGLIP[1]) -> torch.Tensor:
    """float32 [..., 3, H, W]: divided by 255, less the mean, by the standard deviation."""
    given = torch.as_tensor(images)
    scaled = given.movedim(-1, -3).to(torch.float32) / 255
    return (scaled - _channels(mean, given.device)) / _channels(std, given.device)


def with_all_slots(images: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Pictures in their slots, where those that no row has were left out."""
    if (slots := present.any(0)).all():
        return images
    filled = np.zeros((*present.shape, *images.shape[2:]), np.uint8)
    filled[:, slots] = images
    return filled


def _channels(values: Sequence[float], device: torch.device) -> Any:
    """One number where all channels have the same, else [3, 1, 1]. A number can be part of a CUDA graph; a tensor would
    be copied to the device, which cannot."""
    same = len(set(values)) == 1
    return values[0] if same else torch.tensor(values, device=device).view(-1, 1, 1)


def _size(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _mix(rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    first = rows[:, :, left]
    return first + (rows[:, :, right] - first) * share[:, None]


@functools.lru_cache(maxsize=64)
def _between(share: float, size: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each wanted pixel its two neighbors and how far it is from the first, in
    float32 and in TensorFlow's order."""
    one, side = np.float32(1), np.float32(share)
    first = (one - side) / np.float32(2)
    step = (first + side - first) * np.float32(size - 1) / np.float32(max(wanted - 1, 1))
    place = first * np.float32(size - 1) + np.arange(wanted, dtype=np.float32) * step
    low = np.floor(place)
    return low.astype(np.int64), np.ceil(place).astype(np.int64), place - low


@functools.lru_cache(maxsize=64)
def _lanczos(size: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pixels that count for each of the `wanted`, and their weights, [taps, wanted]:
    TensorFlow's arithmetic, float32 in its order."""
    one, pi = np.float32(1), np.float32(np.pi)
    step = one / (np.float32(wanted) / np.float32(size))
    stretch = max(step, one)
    center = (np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * step
    first = np.ceil(center - 3 * stretch - np.float32(0.5)).clip(0, size - 1)
    last = np.floor(center + 3 * stretch - np.float32(0.5)).clip(0, size - 1)
    places = first + np.arange(int((last - first).max()) + 1, dtype=np.float32)[:, None]
    x = np.abs((places + np.float32(0.5) - center) * (one / stretch))
    safe = np.maximum(x, np.float32(1e-3))
    waves = [np.sin(angle.astype(np.float64)).astype(np.float32) for angle in (pi * safe, pi * safe / np.float32(3))]
    weights = 3 * waves[0] * waves[1] / (pi * pi * safe * safe)
    weights = np.where((places > last) | (x > 3), 0, np.where(x <= 1e-3, one, weights)).astype(np.float32)
    total = functools.reduce(np.add, weights)
    return places.clip(0, size - 1).astype(np.int64), weights * (one / total)


def _cubic(x: np.ndarray) -> np.ndarray:
    near = (1.5 * x - 2.5) * x * x + 1
    return np.where(x < 1, near, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * -0.5, 0.0))


def _triangle(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.maximum(1 - x, 0.0)
    return result


@functools.lru_cache(maxsize=64)
def _weights(kernel: Kernel, size: int, wanted: int) -> np.ndarray:
    """How much each of `size` pixels counts in each of the `wanted`, in parts of 2**22, float64 [wanted, size]; a
    smaller picture has wider kernels."""
    stretch = max(size / wanted, 1.0)
    center = (np.arange(wanted)[:, None] + 0.5) * (size / wanted)
    # in the order of PIL: it decides the last bit
    weights = kernel(np.abs((np.arange(size) - center + 0.5) * (1 / stretch)))
    whole = weights / weights.sum(axis=1, keepdims=True) * 2**22
    rounded: np.ndarray = np.trunc(whole + np.where(whole < 0, -0.5, 0.5))
    return rounded


def _pil(images: torch.Tensor, size: tuple[int, int], kernel: Kernel) -> torch.Tensor:
    """PIL's two passes, columns first. Its weights are integers of 22 bits; sums of them are exact in float64."""
    for equation, place in (("yx,bhxc->bhyc", 2), ("yx,bxwc->bywc", 1)):
        wanted = size[place - 1]
        if images.shape[place] == wanted:
            continue
        weights = placed(_weights(kernel, images.shape[place], wanted), images)
        summed = torch.einsum(equation, weights, images.to(torch.float64))
        images = ((summed + 2**21) / 2**22).floor().clamp(0, 255).to(torch.uint8)
    return images
