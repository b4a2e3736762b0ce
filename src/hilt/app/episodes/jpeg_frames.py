"""Frames of episodes as JPEG: any step of any camera, quickly, also many times over."""

from __future__ import annotations

import numpy as np

from hilt.app.episodes.byte_cache import ByteCache
from hilt.app.episodes.episode_index import EpisodeIndex
from hilt.core.errors import optional_module
from hilt.core.tree import Array
from hilt.formats.images import as_rgb, encode

CACHE_BYTES = 48 << 20
"""Of JPEG data that are kept in memory, of all data that are open together."""
QUALITY, SMALL_QUALITY = 92, 80
"""Of frames in full size, and of the small ones of a list."""


class JpegFrames:
    """The frames of an index of episodes. The ones used last stay in memory. Several threads may use it at once."""

    def __init__(self, index: EpisodeIndex, kept: ByteCache[bytes] | None = None):
        """`kept`: where frames stay in memory, which several indices may share."""
        self._index = index
        self._kept: ByteCache[bytes] = ByteCache(CACHE_BYTES) if kept is None else kept

    def jpeg(self, source: str, number: int, lane: int, step: int, camera: str = "", height: int = 0) -> bytes:
        """One frame. Step -1 is what was seen at the end, an empty camera the first one; a `height` makes an image that
        is larger smaller, without changing its proportions."""
        self._index.looking()
        found = self._index.source(source)
        recorded = found.first_step(number) + step if step >= 0 else step  # trimming changes the number of a step
        name = (source, number, lane, recorded, camera, height)
        if (kept := self._kept.get(name)) is not None:
            return kept
        image = found.frame(
            number, lane, step if step >= 0 else 1 << 30, camera or next(iter(found.cameras(number)), "")
        )
        data = encode(_shrink(as_rgb(image[None])[0], height), "jpeg", SMALL_QUALITY if height else QUALITY)
        if step >= 0:  # the end of an episode that goes on is another one soon
            self._kept.put(name, data, len(data))
        return data

    def close(self) -> None:
        """Forgets the frames of this index."""
        for source in self._index.sources:
            self._kept.drop(source.key)


def _shrink(image: Array, height: int) -> Array:
    if not 0 < height < image.shape[0]:
        return image
    pillow = optional_module("PIL.Image", "Small pictures of episodes", "images", "pillow")
    width = max(1, round(image.shape[1] * height / image.shape[0]))
    return np.asarray(pillow.fromarray(np.ascontiguousarray(image)).resize((width, height), pillow.Resampling.BILINEAR))
