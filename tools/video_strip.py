"""Makes a PNG of evenly spaced frames of a video, one beside the other: ``python
tools/video_strip.py VIDEO PICTURE [FRAMES]``.

The picture in the README is made by it, from the ``before-after.mp4`` that `hilt demo vla` writes.
"""

from __future__ import annotations

import sys

import av
import numpy as np
from PIL import Image

COLUMNS, GAP, PAPER = 3, 8, 24


def main(video: str, picture: str, wanted: str = "6") -> None:
    with av.open(video) as opened:
        frames = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
    chosen = [frames[int(number)] for number in np.linspace(0, len(frames) - 1, int(wanted))]
    height, width = chosen[0].shape[:2]
    rows = -(-len(chosen) // COLUMNS)
    sheet = np.full((rows * (height + GAP) - GAP, COLUMNS * (width + GAP) - GAP, 3), PAPER, np.uint8)
    for number, frame in enumerate(chosen):
        row, column = divmod(number, COLUMNS)
        sheet[row * (height + GAP) :, column * (width + GAP) :][:height, :width] = frame
    Image.fromarray(sheet).save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
