"""PNG and JPEG images, bit for bit as TensorFlow decodes them. Decoding lets other threads run."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError, CorruptError, optional_module
from hilt.core.tree import Array, ArraySpec
from hilt.replay.sampling.batch_memory import RecentMemory

PIXEL_LIMIT = 1 << 26
"""Pixels of one image whose size was not declared beforehand; more are refused."""

JPEG = b"\xff\xd8"
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
"""By the color type of a PNG."""
_NO_IMAGE = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, zlib.error)
"""What Pillow raises for images that are none."""


def decode(data: object, shape: Sequence[int | None] = (None, None, None), dtype: npt.DTypeLike = np.uint8) -> Array:
    """One image ``[height, width, channels]`` of the declared shape, where None stands for any number."""
    result: Array = decode_all([data], shape, dtype)[0]
    return result


def decode_all(
    images: Sequence[Any],
    shape: Sequence[int | None],
    dtype: npt.DTypeLike = np.uint8,
    *,
    fast: bool = True,
    memory: RecentMemory | None = None,
) -> Array:
    """Images side by side ``[count, height, width, channels]``, or an array of objects when they are not of one size.

    Gray becomes color and color gray, and transparency is dropped, as the declared channels require. The dtype is
    uint8, uint16, or float32, whose four bytes are stored as the four channels of a PNG. JPEG is decoded as by
    TensorFlow, or as by Pillow when not `fast`. `memory` lends the array.
    """
    if not images:
        return np.empty(0, object) if None in shape else np.empty((0, *(size or 0 for size in shape)), dtype)
    stored = np.dtype(np.uint8 if dtype == np.float32 else dtype)
    declared = (*shape[:2], 4) if dtype == np.float32 else tuple(shape)
    known = None not in declared  # then a JPEG shows when it is decoded whether it has this size
    sizes: list[Any] = [declared if known and data[:2] == JPEG else _size(data, declared) for data in images]
    if not known and len(set(sizes)) > 1:
        return np.fromiter((decode_all([data], shape, dtype, fast=fast)[0] for data in images), object)
    try:
        out = (memory.empty if memory else np.empty)((len(images), *sizes[0]), stored)
    except (MemoryError, ValueError):
        raise CorruptError(f"{len(images)} images of shape {sizes[0]} do not fit into memory.") from None
    for data, place in zip(images, out, strict=True):
        if data[:2] == JPEG:
            _jpeg(data, place, fast)
        else:
            _png(data, place)
    return out.view(np.float32) if dtype == np.float32 else out


def encode(image: Array, format: str = "png", quality: int = 95) -> bytes:
    """An image ``[height, width, channels]`` as PNG, which keeps every bit, or as JPEG of this quality."""
    kind, channels = image.dtype, image.shape[-1]
    deep = kind in (np.uint16, np.float32) and channels == 1
    fits = {"png": deep or (kind == np.uint8 and channels in _MODES), "jpeg": kind == np.uint8 and channels in (1, 3)}
    if not fits.get(format):
        raise ConfigError(f"images of {kind} with {channels} channels cannot be stored as {format!r}.")
    pixels = np.ascontiguousarray(image)
    if format == "jpeg":
        result: bytes = _simplejpeg().encode_jpeg(
            pixels, quality, "GRAY" if channels == 1 else "RGB", "Gray" if channels == 1 else "420"
        )
        return result
    pixels = pixels.view(np.uint8) if kind == np.float32 else pixels
    file = io.BytesIO()
    _pillow().fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "png", compress_level=3)
    return file.getvalue()


def is_image(spec: ArraySpec) -> bool:
    """Whether a column can be shown: uint8, height × width, with 1 or 3 channels last or first, or a stack of such."""
    return spec.dtype == np.uint8 and image_shape(spec.shape) is not None


def image_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(height, width) of what a column of this shape shows."""
    if len(shape) == 4:
        shape = shape[1:]
    if len(shape) == 3 and shape[-1] in (1, 3):
        shape = shape[:2]
    elif len(shape) == 3 and shape[0] in (1, 3):
        shape = shape[1:]
    return (shape[0], shape[1]) if len(shape) == 2 and min(shape) >= 8 else None


def as_rgb(frames: Array) -> Array:
    """``[n, ...]`` images of any of these kinds as ``[n, height, width, 3]``; of a stack, the newest."""
    if frames.ndim == 5:
        frames = frames[:, -1]
    if frames.ndim == 3:
        frames = frames[..., None]
    if frames.shape[-1] not in (1, 3):
        frames = np.moveaxis(frames, 1, -1)
    return np.repeat(frames, 3, axis=-1) if frames.shape[-1] == 1 else frames


def _size(data: Any, declared: Sequence[int | None]) -> tuple[int, int, int]:
    """Height, width and channels that an image will have, from its first bytes."""
    if data[:2] == JPEG:
        try:
            height, width, color, _ = _simplejpeg().decode_jpeg_header(data)
        except ValueError as error:
            raise CorruptError(f"not a readable JPEG image ({error}).") from error
        channels = 1 if color == "Gray" else 3
    elif data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 25 and data[25] in _PNG_CHANNELS:
        width, height, _, color = struct.unpack(">IIBB", data[16:26])
        channels = _PNG_CHANNELS[color]
    else:
        raise CorruptError(
            f"neither a PNG nor a JPEG image: {len(data)} bytes that begin with "
            f"{bytes(data[:8]).hex(' ') or 'nothing'}."
        )
    if any(wanted not in (None, found) for wanted, found in zip(declared[:2], (height, width), strict=True)):
        raise CorruptError(f"an image of {height} x {width} pixels, declared as {declared[0]} x {declared[1]}.")
    if None in declared[:2] and width * height > PIXEL_LIMIT:
        raise CorruptError(
            f"an image of {height} x {width} pixels; at most {PIXEL_LIMIT} are read when the size is not declared."
        )
    return height, width, declared[2] or channels


def _jpeg(data: Any, out: Array, fast: bool) -> None:
    color = {1: "GRAY", 3: "RGB"}.get(out.shape[-1] if out.dtype == np.uint8 else 0)
    if color is None:
        raise CorruptError(f"a JPEG image, declared with {out.shape[-1]} channels of {out.dtype}.")
    simplejpeg = _simplejpeg()
    try:
        found = simplejpeg.decode_jpeg(data, color, fastdct=fast, buffer=out)
        if found.shape != out.shape:
            _size(data, out.shape)
    except ValueError as error:
        _size(data, out.shape)
        if "premature" in str(error).lower():
            raise CorruptError(f"not a whole JPEG image ({error}).") from error
        try:  # stray bytes between its parts, which others pass over too
            simplejpeg.decode_jpeg(data, color, fastdct=fast, buffer=out, strict=False)
        except ValueError:
            raise CorruptError(f"not a readable JPEG image ({error}).") from error


def _png(data: Any, out: Array) -> None:
    channels, deep, Image = out.shape[-1], data[24] == 16, _pillow()
    if deep and out.dtype == np.uint16 and channels > 1:
        out[:] = _deep_color(data, channels)
        return
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.mode.startswith("I"):  # gray of 16 bits
                pixels = np.asarray(image).astype(np.uint16)[..., None]
                out[:] = pixels if out.dtype == np.uint16 else pixels >> 8
            else:
                pixels = np.asarray(image if image.mode == _MODES[channels] else image.convert(_MODES[channels]))
                out[:] = (
                    pixels.reshape(out.shape) if out.dtype == np.uint8 else pixels.reshape(out.shape) * np.uint16(257)
                )
    except (*_NO_IMAGE, Image.DecompressionBombError) as error:
        raise CorruptError(
            f"not a readable PNG image ({' '.join(str(error).split()) or type(error).__name__})."
        ) from error


def _deep_color(data: Any, channels: int) -> Array:
    """A color PNG of 16 bits a channel, which Pillow would cut to 8."""
    av = optional_module("av", "Reading color PNG images of 16 bits", "formats")
    try:
        frames = av.CodecContext.create("png", "r").decode(av.Packet(bytes(data)))
        result: Array = frames[0].to_ndarray(format={3: "rgb48le", 4: "rgba64le"}[channels])
        return result
    except (av.FFmpegError, LookupError, ValueError) as error:
        raise CorruptError(f"not a readable PNG image of {channels} channels and 16 bits ({error}).") from error


def _pillow() -> Any:
    return optional_module("PIL.Image", "Reading and writing PNG images", "images", "pillow")


def _simplejpeg() -> Any:
    """A wrapper of libjpeg-turbo: unlike Pillow it has TensorFlow's choice of the two
    cosine transforms, and half the overhead."""
    return optional_module("simplejpeg", "Reading and writing JPEG images", "images")
