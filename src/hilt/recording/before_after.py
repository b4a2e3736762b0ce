"""A video of two sides: what a policy did before, and after it has learned."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hilt.core.errors import ConfigError, optional_module
from hilt.core.files import replacing
from hilt.core.progress import Report, silent
from hilt.core.tree import Array
from hilt.formats.video import VideoWriter, file_name
from hilt.recording.film import INK, PAPER

TITLE, SPACE = 36, 8
"""In pixels: the height of the titles, and what lies between the two"""


def before_after(
    before: Sequence[Path],
    after: Sequence[Path],
    out: Path,
    titles: tuple[str, str] = ("before", "after"),
    report: Report = silent,
) -> None:
    """One video of two sides, each of which shows its videos one after the other. Two that are compared begin at the
    same moment: the one that is over first keeps its last frame."""
    av = optional_module("av", "A video", "formats")
    image, draw, font = (
        optional_module(f"PIL.{part}", "A video with titles", "images", "pillow")
        for part in ("Image", "ImageDraw", "ImageFont")
    )
    with contextlib.ExitStack() as opened:
        sides = [[opened.enter_context(av.open(file_name(path))) for path in side] for side in (before, after)]
        rates = {float(one.streams.video[0].average_rate) for side in sides for one in side}
        if len(rates) != 1 or not all(sides):
            raise ConfigError(
                f"videos of {', '.join(map(str, sorted(rates))) or 'no'} frames a second: expected some "
                "on each side, of one rate."
            )
        pairs = [
            [
                (frame.to_ndarray(format="rgb24") for one in side[number : number + 1] for frame in one.decode(video=0))
                for side in sides
            ]
            for number in range(max(map(len, sides)))
        ]
        shown: list[Array] = [next(side) for side in pairs[0]]
        following: list[Array | None] = list(shown)
        left, height = shown[0].shape[1] + SPACE, TITLE + max(picture.shape[0] for picture in shown)
        wide = left + shown[1].shape[1]
        canvas = image.new("RGB", (wide + wide % 2, height + height % 2), PAPER)
        for number, title in enumerate(titles):
            draw.Draw(canvas).text((6 + number * left, 8), title, INK, font.load_default(18))
        blank = np.asarray(canvas)
        place = opened.enter_context(replacing(out, sole_writer=True))
        writer = VideoWriter(place, rates.pop(), blank.shape[0], blank.shape[1], "h264")
        for number, pair in enumerate(pairs):
            report(f"making {out.name}, episodes", number, len(pairs))
            following = following if pair is pairs[0] else [next(side, None) for side in pair]
            while any(picture is not None for picture in following):
                shown = [old if new is None else new for old, new in zip(shown, following, strict=True)]
                whole = blank.copy()
                for number, picture in enumerate(shown):
                    whole[TITLE : TITLE + picture.shape[0], number * left : number * left + picture.shape[1]] = picture
                writer.add(whole[None])
                following = [next(side, None) for side in pair]
        writer.close()
