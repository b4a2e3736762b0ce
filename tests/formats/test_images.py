"""Images as TensorFlow decodes them; what is none is refused. Against TensorFlow's own numbers: test_tfds.py."""

from __future__ import annotations

import contextlib
import io
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hilt.core.errors import ConfigError, CorruptError, MissingPackageError
from hilt.formats.images import decode, decode_all, encode
from tests.effort import rounds

rng = np.random.default_rng(0)


def noise(*shape: int, dtype: Any = np.uint8) -> Any:
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_keeps_every_bit(channels: int):
    image = noise(7, 5, channels)
    assert (decode(encode(image), image.shape) == image).all()
    assert (decode(encode(image)) == image).all()


def test_png_of_depth_and_of_floats_keeps_every_bit():
    depth, floats = noise(7, 5, 1, dtype=np.uint16), rng.normal(size=(7, 5, 1)).astype(np.float32)
    assert (decode(encode(depth), depth.shape, np.uint16) == depth).all()
    assert (decode(encode(floats), floats.shape, np.float32) == floats).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_comes_near(channels: int):
    image = np.repeat(np.add.outer(np.arange(40), 2 * np.arange(50))[..., None], channels, axis=2).astype(np.uint8)
    assert np.abs(decode(encode(image, "jpeg"), image.shape).astype(int) - image).max() <= 3
    assert len(encode(image, "jpeg", quality=30)) < len(encode(image, "jpeg"))


def test_what_a_format_cannot_hold_is_refused():
    for image, format in (
        (noise(3, 3, 4), "jpeg"),
        (noise(3, 3, 1, dtype=np.uint16), "jpeg"),
        (noise(3, 3, 3, dtype=np.uint16), "png"),
        (noise(3, 3, 5), "png"),
        (noise(3, 3, 3), "gif"),
        (np.zeros((3, 3, 1)), "png"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"images of {image.dtype} with {image.shape[-1]} channels cannot be stored as '{format}'",
        ):
            encode(image, format)


def test_channels_are_those_that_were_declared():
    gray, color, clear = noise(4, 6, 1), noise(4, 6, 3), noise(4, 6, 4)
    assert (decode(encode(gray), (4, 6, 3)) == gray).all()
    assert (decode(encode(clear), (4, 6, 3)) == clear[..., :3]).all()
    assert (decode(encode(color), (4, 6, 4)) == np.dstack([color, np.full((4, 6), 255)])).all()
    assert decode(encode(color, "jpeg"), (4, 6, 1)).shape == (4, 6, 1)
    assert (decode(encode(gray, "jpeg"), (4, 6, 3)) == decode(encode(gray, "jpeg"))).all()
    with pytest.raises(CorruptError, match="a JPEG image, declared with 4 channels of uint8"):
        decode(encode(color, "jpeg"), (4, 6, 4))
    with pytest.raises(CorruptError, match="a JPEG image, declared with 3 channels of uint16"):
        decode(encode(color, "jpeg"), (4, 6, 3), np.uint16)


def test_several_images_side_by_side_or_apart():
    same = [noise(4, 6, 3) for _ in range(3)]
    out = decode_all([memoryview(encode(image)) for image in same], (None, None, 3))
    assert out.shape == (3, 4, 6, 3) and (out == same).all()
    mixed = [*same, noise(5, 6, 3)]
    apart = decode_all([encode(image) for image in mixed], (None, None, 3))
    assert apart.dtype == object and all((a == b).all() for a, b in zip(apart, mixed, strict=True))
    assert decode_all([], (4, 6, 3)).shape == (0, 4, 6, 3)


def test_another_size_than_declared_is_refused_before_it_is_decoded():
    with pytest.raises(CorruptError, match="an image of 4 x 6 pixels, declared as 4 x 7"):
        decode(encode(noise(4, 6, 3)), (4, 7, 3))
    with pytest.raises(CorruptError, match="an image of 4 x 6 pixels, declared as 5 x None"):
        decode(encode(noise(4, 6, 3), "jpeg"), (5, None, 3))


def test_a_bomb_is_refused():
    """A PNG of a few bytes that says it has 10 ** 10 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
    bomb = head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    with pytest.raises(CorruptError, match="an image of 100000 x 100000 pixels; at most 67108864 are read"):
        decode(bomb)
    with pytest.raises(CorruptError, match="declared as 4 x 4"):
        decode(bomb, (4, 4, 3))


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"GIF89a", b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0" + bytes(50), bytes(100)]
)
def test_what_is_no_image_is_refused(data: bytes):
    with pytest.raises(CorruptError, match=r"neither a PNG nor a JPEG image|not a readable"):
        decode(data)


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_every_cut_is_refused(format: str):
    data = encode(noise(8, 8, 3), format)
    for size in range(0, len(data) - 24, 7):  # a PNG without its last checksums has all its pixels
        with pytest.raises(CorruptError):
            decode(data[:size], (8, 8, 3))


@pytest.mark.parametrize("format", ["png", "jpeg"])
@settings(max_examples=rounds(20, 300), deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_is_decoded_or_refused(format: str, position: float, byte: int):
    data = bytearray(encode(np.full((8, 8, 3), 9, np.uint8), format))
    data[int(position * len(data))] = byte
    with contextlib.suppress(CorruptError):
        assert decode(bytes(data), (8, 8, 3)).shape == (8, 8, 3)


def test_stray_bytes_between_the_parts_of_a_jpeg_are_passed_over():
    image = noise(16, 16, 3)
    data = encode(image, "jpeg")
    assert (decode(data[:-2] + b"\x00\x00" + data[-2:], image.shape) == decode(data)).all()


def test_a_palette_and_gray_of_16_bits():
    image = Image.fromarray(noise(4, 6, 3)).quantize(8)
    file = io.BytesIO()
    image.save(file, "png")
    assert (decode(file.getvalue(), (4, 6, 3)) == np.asarray(image.convert("RGB"))).all()
    depth = noise(4, 6, 1, dtype=np.uint16)
    assert (decode(encode(depth), (4, 6, 1)) == depth >> 8).all()
    assert (decode(encode(depth), (4, 6, 3)) == depth >> 8).all()
    small = noise(4, 6, 1)
    assert (decode(encode(small), (4, 6, 1), np.uint16) == small.astype(np.uint16) * 257).all()


@pytest.mark.parametrize(
    ("module", "package", "format"), [("PIL.Image", "pillow", "png"), ("simplejpeg", "simplejpeg", "jpeg")]
)
def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, module: str, package: str, format: str):
    data = encode(noise(4, 6, 3), format)
    monkeypatch.setitem(sys.modules, module, None)
    for call in (lambda: decode(data), lambda: encode(noise(4, 6, 3), format)):
        with pytest.raises(
            MissingPackageError, match=rf"images needs the package '{package}', .* pip install 'hilt\[images\]'"
        ):
            call()
