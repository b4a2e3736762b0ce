"""A picture strip of an episode, as a PNG: evenly spaced frames of every camera, side by side, with labels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hilt.core.errors import optional_module
from hilt.core.files import DISK
from hilt.core.trajectory import Source
from hilt.core.tree import Array
from hilt.formats.images import as_rgb

if TYPE_CHECKING:
    from PIL import Image

PAPER, INK, FAINT, ACCENT = (250, 250, 247), (35, 38, 46), (120, 124, 132), (202, 92, 22)
MARGIN, GAP, LEADING = 20, 8, 6
PARTS = ("Image", "ImageDraw", "ImageFont")
TITLE, NAME, LABEL = 19, 14, 14
"""Sizes of letters, in pixels"""
FRAMES = 8
"""The number of frames of an episode that are shown."""
SMALLEST, LARGEST = 96, 256
"""Frames are shown with a height between these, where whole factors allow."""


@dataclass(frozen=True)
class Row:
    """One camera."""

    name: str
    frames: Array
    """``[n, height, width, 3]``, uint8."""


def save(target: Path, title: str, cameras: Mapping[str, Array], labels: Sequence[tuple[str, bool]]) -> Path:
    """Draws a strip of ``[n, ...]`` images by camera into a PNG file, and returns its path."""
    file = io.BytesIO()
    draw_strip(title, [Row(name, as_rgb(frames)) for name, frames in cameras.items()], labels).save(file, "PNG")
    DISK.replace(target, file.getvalue(), durable=False)
    return target


def label(step: int, source: Source) -> tuple[str, bool]:
    """The step's number, and who acted if it was not the policy."""
    name = "" if source == Source.POLICY else f" {source.name.lower()}"
    return f"step {step}{name}", bool(name)


def draw_strip(title: str, rows: Sequence[Row], labels: Sequence[tuple[str, bool]]) -> Image.Image:
    """The whole picture, an image of Pillow. `labels` go below the frames: the text, and whether to accent it."""
    image, draw, font = (optional_module(f"PIL.{part}", "A picture strip", "images", "pillow") for part in PARTS)
    fonts = {size: font.load_default(size) for size in (TITLE, NAME, LABEL)}
    sized = [(row.name, [_fit(image.fromarray(frame)) for frame in row.frames]) for row in rows]
    cell = max([frames[0].width for _, frames in sized] + [round(fonts[LABEL].getlength(text)) for text, _ in labels])
    inner = max(len(labels) * (cell + GAP) - GAP, round(fonts[TITLE].getlength(title)))
    height = 2 * MARGIN + TITLE + sum(frames[0].height + NAME + LABEL + 5 * LEADING for _, frames in sized)
    canvas = image.new("RGB", (inner + 2 * MARGIN, height), PAPER)
    on = draw.Draw(canvas)
    on.text((MARGIN, MARGIN), title, INK, fonts[TITLE])
    y = MARGIN + TITLE + 2 * LEADING
    for name, frames in sized:
        on.text((MARGIN, y), name, FAINT, fonts[NAME])
        y += NAME + LEADING
        for i, (text, accented) in enumerate(labels):
            middle = MARGIN + i * (cell + GAP) + cell // 2
            canvas.paste(frames[i], (middle - frames[i].width // 2, y))
            on.text(
                (middle, y + frames[i].height + LEADING), text, ACCENT if accented else INK, fonts[LABEL], anchor="ma"
            )
        y += frames[0].height + LABEL + 4 * LEADING
    return canvas


def _fit(frame: Any) -> Any:
    """A frame enlarged or reduced by a whole factor, so that it can be looked at."""
    if frame.height < SMALLEST:
        factor = -(-SMALLEST // frame.height)
        return frame.resize((factor * frame.width, factor * frame.height), resample=0)  # each pixel becomes a square
    return frame.reduce(-(-frame.height // LARGEST))
