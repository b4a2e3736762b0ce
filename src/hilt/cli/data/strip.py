"""A picture strip of an episode, as a PNG: evenly spaced frames of every camera, side by side, with labels."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hilt.core.files import DISK
from hilt.core.trajectory import Source
from hilt.core.tree import Array, ArraySpec

PAPER, INK, FAINT, ACCENT = (250, 250, 247), (35, 38, 46), (120, 124, 132), (202, 92, 22)
MARGIN, GAP, LEADING = 20, 8, 6
FRAMES = 8
"""So many of an episode are shown."""
SMALLEST, LARGEST = 96, 256
"""Frames are shown with a height between these, where whole factors allow."""

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ /_-.:,()=+%"
POINTS = (
    "75557 26227 71747 71717 55711 74717 74757 71244 75757 75717 "  # digits
    "25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 "  # A to M
    "65555 25552 65644 25563 65655 34216 72222 55557 55552 55775 55255 55222 71247 "  # N to Z
    "00000 11244 00007 00700 00002 02020 00024 12221 42224 07070 02720 51245"
)
"""Letters of three by five points: a digit is a row, its three bits are the points."""
FONT = {letter: POINTS[6 * i : 6 * i + 5] for i, letter in enumerate(LETTERS)}


@dataclass(frozen=True)
class Row:
    """One camera."""

    name: str
    frames: Array
    """``[n, height, width, 3]``, uint8."""


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


def save(target: Path, title: str, cameras: Mapping[str, Array], labels: Sequence[tuple[str, bool]]) -> Path:
    """Draws a strip of ``[n, ...]`` images by camera into a PNG file, and returns its path."""
    picture = draw_strip(title, [Row(name, as_rgb(frames)) for name, frames in cameras.items()], labels)
    DISK.replace(target, png(picture), durable=False)
    return target


def label(step: int, source: Source) -> tuple[str, bool]:
    """The step's number, and who acted if it was not the policy."""
    name = "" if source == Source.POLICY else f" {source.name.lower()}"
    return f"step {step}{name}", bool(name)


def draw_strip(title: str, rows: Sequence[Row], labels: Sequence[tuple[str, bool]]) -> Array:
    """The whole picture, ``[height, width, 3]``. `labels` go below the frames: the text, and whether to accent it."""
    sized = [Row(row.name, _fit(row.frames)) for row in rows]
    cell = max([row.frames.shape[2] for row in sized] + [_text_width(text, 2) for text, _ in labels])
    count = len(labels)
    inner = max(count * cell + (count - 1) * GAP, _text_width(title, 3))
    height = 2 * MARGIN + 15 + LEADING + sum(row.frames.shape[1] + 20 + 4 * LEADING for row in sized)
    canvas = np.full((height, inner + 2 * MARGIN, 3), PAPER, np.uint8)
    write(canvas, MARGIN, MARGIN, title, 3, INK)
    y = MARGIN + 15 + 3 * LEADING
    for row in sized:
        write(canvas, MARGIN, y, row.name, 2, FAINT)
        y += 10 + LEADING
        tall, wide = row.frames.shape[1:3]
        for i, (text, accented) in enumerate(labels):
            left = MARGIN + i * (cell + GAP)
            canvas[y : y + tall, left + (cell - wide) // 2 : left + (cell - wide) // 2 + wide] = row.frames[i]
            write(canvas, left + (cell - _text_width(text, 2)) // 2, y + tall + LEADING, text, 2, ACCENT if accented else INK)
        y += tall + 10 + 3 * LEADING
    return canvas


def write(canvas: Array, x: int, y: int, text: str, scale: int, color: tuple[int, int, int]) -> None:
    """Draws a line of text with its top left at (x, y); letters are shown as capitals, unknown ones as a gap."""
    for letter in text.upper():
        rows = [[int(digit) >> 2 & 1, int(digit) >> 1 & 1, int(digit) & 1] for digit in FONT.get(letter, "00000")]
        points = np.kron(np.array(rows, bool), np.ones((scale, scale), bool))
        canvas[y : y + 5 * scale, x : x + 3 * scale][points] = color
        x += 4 * scale


def png(image: Array) -> bytes:
    """An ``[height, width, 3]`` uint8 image as a PNG file."""
    height, width, _ = image.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # filter 0 before each line
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _text_width(text: str, scale: int) -> int:
    return max(0, 4 * len(text) - 1) * scale


def _fit(frames: Array) -> Array:
    """Frames enlarged or reduced by a whole factor, so that they can be looked at."""
    height = frames.shape[1]
    if height < SMALLEST:
        factor = -(-SMALLEST // height)
        return frames.repeat(factor, axis=1).repeat(factor, axis=2)
    factor = -(-height // LARGEST)
    if factor == 1:
        return frames
    tall, wide = height // factor, frames.shape[2] // factor
    blocks = frames[:, : tall * factor, : wide * factor].reshape(len(frames), tall, factor, wide, factor, 3)
    small: Array = blocks.mean(axis=(2, 4)).astype(np.uint8)
    return small
