"""A JPEG round trip as arithmetic on tensors, byte for byte that of libjpeg as
TensorFlow calls it, for a batch at once, on any device.

Packing bits loses nothing, so it is left out. What does lose: the colors as integers, half the
resolution of two of them, the cosine transform in 13-bit integers (libjpeg's ISLOW), the division by
the tables; and on the way back its fast transform with 8-bit constants (IFAST, TensorFlow's choice),
and the colors' resolution doubled by a triangle filter.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch.nn import functional

from hilt.core.errors import SchemaError

LUMINANCE = """16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"""
CHROMINANCE = """17 18 24 47 99 99 99 99 18 21 26 66 99 99 99 99 24 26 56 99 99 99 99 99 47 66 99 99 99 99 99 99
99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99 99"""
"""The tables of the standard's annex K, at quality 50."""


_ON_DEVICE: dict[tuple[int, torch.device], tuple[np.ndarray, torch.Tensor]] = {}


def placed(constant: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A constant array, which its maker keeps, on the device of a tensor. On a GPU it is kept too: nothing waits for a
    copy, and a CUDA graph can read it."""
    if type(like) is not torch.Tensor or like.device.type != "cuda":
        return torch.from_numpy(constant).to(like.device)
    key = id(constant), like.device
    if key not in _ON_DEVICE:
        _ON_DEVICE[key] = constant, torch.from_numpy(constant).to(like.device)
    return _ON_DEVICE[key][1]


def round_trip(images: torch.Tensor, quality: int = 95) -> torch.Tensor:
    """uint8 [B, H, W, 3] as it comes back from a JPEG of this quality with halved chroma."""
    if not 1 <= quality <= 100:
        raise SchemaError(f"a JPEG of quality {quality} was asked for; it is a number from 1 to 100.")
    height, width = images.shape[1:3]
    red, green, blue = images.to(torch.int32).unbind(-1)
    y = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
    cb = (-11059 * red - 21709 * green + 32768 * blue + (128 << 16) + 32767) >> 16
    cr = (32768 * red - 27439 * green - 5329 * blue + (128 << 16) + 32767) >> 16
    y = _through(y, _tables(LUMINANCE, quality))[:, :height, :width]
    tables = _tables(CHROMINANCE, quality)
    cb, cr = (
        _doubled(_through(_halved(plane), tables)[:, : (height + 1) // 2, : (width + 1) // 2]) for plane in (cb, cr)
    )
    cb, cr = cb[:, :height, :width] - 128, cr[:, :height, :width] - 128
    red = y + ((91881 * cr + 32768) >> 16)
    green = y + ((-22554 * cb - 46802 * cr + 32768) >> 16)
    blue = y + ((116130 * cb + 32768) >> 16)
    return torch.stack([red, green, blue], -1).clamp(0, 255).to(torch.uint8)


def _through(plane: torch.Tensor, tables: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    """One color, in blocks of 8 by 8, to whole numbers of a table's steps and back; padded to whole blocks."""
    plane = _padded(plane, -plane.shape[2] % 8, -plane.shape[1] % 8)
    count, height, width = plane.shape
    blocks = (plane - 128).reshape(count, height // 8, 8, width // 8, 8).transpose(2, 3)
    divisor, multipliers = (placed(each, plane) for each in tables)
    coefficients = _cosines(blocks)
    steps = coefficients.sign() * ((coefficients.abs() + divisor // 2) // divisor)
    back = _inverse(steps * multipliers)
    return back.transpose(2, 3).reshape(count, height, width)


def _padded(plane: torch.Tensor, right: int, below: int) -> torch.Tensor:
    """With its last column and row repeated."""
    if not right and not below:
        return plane
    return functional.pad(plane.to(torch.float32)[None], (0, right, 0, below), mode="replicate")[0].to(torch.int32)


def _halved(plane: torch.Tensor) -> torch.Tensor:
    """Means of two by two; the halves are rounded down in even columns and up in odd ones."""
    plane = _padded(plane, -plane.shape[2] % 16, plane.shape[1] % 2)
    summed = plane[:, ::2, ::2] + plane[:, ::2, 1::2] + plane[:, 1::2, ::2] + plane[:, 1::2, 1::2]
    return (summed + 1 + torch.arange(summed.shape[2], device=plane.device, dtype=torch.int32) % 2) >> 2


def _doubled(plane: torch.Tensor) -> torch.Tensor:
    """Twice the resolution: three parts of the nearest and one of the next, in both
    directions; libjpeg repeats what is very narrow."""
    if plane.shape[2] <= 2:
        return plane.repeat_interleave(2, 1).repeat_interleave(2, 2)
    tall = torch.stack([3 * plane + _shifted(plane, 1, -1), 3 * plane + _shifted(plane, 1, 1)], 2).flatten(1, 2)
    left, right = (3 * tall + _shifted(tall, 2, -1) + 8) >> 4, (3 * tall + _shifted(tall, 2, 1) + 7) >> 4
    return torch.stack([left, right], 3).flatten(2, 3)


def _shifted(plane: torch.Tensor, dim: int, by: int) -> torch.Tensor:
    """The neighbor before or after each number; at the border the number itself."""
    size = plane.shape[dim]
    return plane.index_select(dim, (torch.arange(size, device=plane.device) + by).clamp(0, size - 1))


# --- the transforms ---


def _cosines(blocks: torch.Tensor) -> torch.Tensor:
    """libjpeg's accurate transform: each pass is a matrix of integers, a sum and a rounding, all exact in float64."""
    matrix = placed(_matrix(), blocks)
    rows = torch.floor((blocks.to(torch.float64) @ matrix.T + 2**10) / 2**11)
    return torch.floor((matrix @ rows + 2**14) / 2**15).to(torch.int32)


@functools.cache
def _matrix() -> np.ndarray:
    """Loeffler's factors as libjpeg has them, in 13 bits, multiplied out: row k
    gives 8192 times the k-th cosine, about."""
    even, odd = np.zeros((4, 4)), np.zeros((4, 4))
    even[0], even[2] = [8192] * 4, [8192, -8192, -8192, 8192]
    even[1] = [4433 + 6270, 4433, -4433, -4433 - 6270]
    even[3] = [4433, 4433 - 15137, 15137 - 4433, -4433]
    t4, t5, t6, t7 = np.eye(4)[::-1]  # x3-x4, x2-x5, x1-x6, x0-x7
    z1, z2, z3, z4 = (t4 + t7) * -7373, (t5 + t6) * -20995, (t4 + t6) * -16069, (t5 + t7) * -3196
    z5 = (t4 + t5 + t6 + t7) * 9633
    odd[3], odd[2] = t4 * 2446 + z1 + z3 + z5, t5 * 16819 + z2 + z4 + z5
    odd[1], odd[0] = t6 * 25172 + z2 + z3 + z5, t7 * 12299 + z1 + z4 + z5
    matrix = np.empty((8, 8))
    matrix[::2], matrix[1::2] = np.hstack([even, even[:, ::-1]]), np.hstack([odd, -odd[:, ::-1]])
    return matrix


def _inverse(coefficients: torch.Tensor) -> torch.Tensor:
    """libjpeg's fast inverse: down the columns, along the rows, and from five bits of fraction to 0..255."""
    columns = _fast(coefficients.unbind(-2), -2)
    return ((_fast(columns.unbind(-1), -1) >> 5) + 128).clamp(0, 255)


def _fast(x: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    """Arai, Agui and Nakajima's eight points, every product cut to whole numbers."""
    sum02, difference02, sum13 = x[0] + x[4], x[0] - x[4], x[2] + x[6]
    difference13 = ((x[2] - x[6]) * 362 >> 8) - sum13
    even = sum02 + sum13, difference02 + difference13, difference02 - difference13, sum02 - sum13
    z13, z10, z11, z12 = x[5] + x[3], x[5] - x[3], x[1] + x[7], x[1] - x[7]
    odd0 = z11 + z13
    z5 = (z10 + z12) * 473 >> 8
    odd1 = (z10 * -669 >> 8) + z5 - odd0
    odd2 = ((z11 - z13) * 362 >> 8) - odd1
    odd3 = -((z12 * 277 >> 8) - z5 + odd2)
    pairs = list(zip(even, (odd0, odd1, odd2, odd3), strict=True))
    return torch.stack([*(e + o for e, o in pairs), *(e - o for e, o in reversed(pairs))], dim)


@functools.cache
def _tables(base: str, quality: int) -> tuple[np.ndarray, np.ndarray]:
    """What the coefficients are divided by and multiplied with, int32 [8, 8]. libjpeg's transform is 8 times too
    large."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    table = np.clip((np.array(base.split(), np.int32).reshape(8, 8) * scale + 50) // 100, 1, 255)
    return table * 8, _multipliers(table)


def _multipliers(table: np.ndarray) -> np.ndarray:
    """The table with the factors that the fast transform leaves out, with two bits of fraction."""
    factors = np.array([1, 1.387039845, 1.306562965, 1.175875602, 1, 0.785694958, 0.541196100, 0.275899379])
    scaled = np.round(2**14 * np.outer(factors, factors)).astype(np.int64)
    return ((table * scaled + 2**11) >> 12).astype(np.int32)
