"""TensorFlow's picture path of OpenVLA: ``N.raw``, rotated and through a JPEG
(``decoded``), ``lanczos224``, ``center_crop``.

A JPEG is exact, and so is a crop of the picture that they cropped; ``jpeg`` is their file, which holds the picture that
we have without one. Lanczos3 is a sum of floats, of which one in a hundred thousand may be rounded to the next level.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from tests import golden


def matches(path: Path) -> Path | None:
    return path if path.suffix == ".npz" and path.parent.name == "image" else None


def compare(case: Path) -> golden.Result:
    from hilt.policies.io import preprocess as images

    with np.load(case) as file:
        theirs = dict(file)
    raw = {key.partition(".")[0]: theirs.pop(key) for key in list(theirs) if key.endswith(".raw")}
    ours: dict[str, Any] = {}
    for number, picture in raw.items():
        decoded = ours[f"{number}.decoded"] = images.jpeg_round_trip(images.rotate180(picture))
        resized = ours[f"{number}.lanczos224"] = images.lanczos3(decoded, 224)
        ours[f"{number}.center_crop"] = images.center_crop(theirs[f"{number}.lanczos224"])
        ours[f"{number}.whole"], theirs[f"{number}.whole"] = (
            images.center_crop(resized),
            theirs[f"{number}.center_crop"],
        )
        ours[f"{number}.jpeg"] = decoded
        theirs[f"{number}.jpeg"] = simplejpeg.decode_jpeg(theirs[f"{number}.jpeg"].tobytes(), fastdct=True)
    return golden.compare(ours, theirs, lambda key: nearly if key.endswith(("lanczos224", "whole")) else golden.exact)


def nearly(ours: Any, theirs: Any) -> golden.Difference:
    """Within one level, and the same in all but one of a hundred thousand numbers."""
    largest, wrong = golden._arrays(ours, theirs, lambda apart: apart <= 1)
    if wrong is None and (others := int(np.sum(ours != theirs))) > max(1, ours.size // 100_000):
        wrong = f": {others} numbers are not what is expected"
    return largest, wrong
