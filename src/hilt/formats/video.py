"""Frames of an mp4 file by the time at which they are shown, and mp4 files from frames."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.errors import CorruptError, StorageError, optional_module
from hilt.core.platform import environment, scheduling_kept
from hilt.core.tree import Array

CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "av1": ("libsvtav1", "yuv420p", {"crf": "30", "preset": "12"}),
    "h264": ("libx264", "yuv420p", {"crf": "20", "preset": "veryfast"}),
    "lossless": ("libx264rgb", "rgb24", {"qp": "0", "preset": "veryfast"}),
}
"""By name: the encoder, how it stores pixels, and its settings. AV1 has those of LeRobot; the last one is H.264 that keeps every bit."""

ALONE = {
    "protocol_whitelist": "none",
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2",
    "enable_drefs": "0",
    "use_absolute_path": "0",
}
"""Options of FFmpeg: a file leads to no other"""


def file_name(path: Path) -> str:
    """A file as FFmpeg is to be given it: absolute, since it takes what stands before a colon in a relative path for a protocol."""
    return str(path.absolute())


def read_frames(path: Path, times: Array, height: int, width: int, tolerance: float) -> Array:
    """``[len(times), height, width, 3]``: the frames that are shown at these times in seconds, which never fall.

    Only what lies between the key frame before the first and the last of them is decoded.
    """
    av, needed = _av(), len(np.unique(times))
    try:
        # The file is opened here, and its format is given: FFmpeg would take a name for an address of any protocol, and text for a list
        # of further addresses.
        with (
            path.open("rb") as file,
            av.open(file, format="mp4", options=ALONE, metadata_errors="replace") as container,
        ):
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise CorruptError(f"{path}: there is no video in it. Restore the file from a copy.")
            _check_size(path, stream, height, width)
            if 0 < stream.frames < needed:
                raise CorruptError(
                    f"{path}: {stream.frames} frames, fewer than the {needed} of the episode. Restore the file from a copy."
                )
            stream.codec_context.thread_count = 1  # several episodes are decoded at once instead
            out, place = np.empty((len(times), height, width, 3), np.uint8), 0
            for frame in _frames_from(container, stream, float(times[0]), tolerance):
                if frame.time > times[place] + tolerance:
                    break
                if frame.time >= times[place] - tolerance:
                    _check_size(path, frame, height, width)
                    end = int(np.searchsorted(times, frame.time + tolerance, side="right"))
                    out[place:end] = frame.to_ndarray(format="rgb24")
                    place = end
                if place == len(times):
                    return out
    except FileNotFoundError:
        raise CorruptError(f"{path}: this video is missing. Restore it from a copy.") from None
    except (av.FFmpegError, OSError, MemoryError) as error:
        raise CorruptError(f"{path}: not readable as a video ({error}). Restore the file from a copy.") from error
    raise CorruptError(
        f"{path}: no frame within {tolerance} s of {times[place]:.4f} s, where frame {place} of the episode belongs."
    )


class VideoWriter:
    """An mp4 file that grows by frames; every other one is a key frame, so that any is quickly found."""

    def __init__(self, path: Path, fps: float, height: int, width: int, codec: str):
        self.path, self._frames, self._rate, self._av = path, 0, Fraction(fps).limit_denominator(10**5), _av()
        self.nbytes = 0
        encoder, pixels, options = CODECS[codec]
        try:
            self._container = self._av.open(file_name(path), "w", format="mp4")
            self._stream = self._container.add_stream(encoder, self._rate, options={"g": "2", **options})
            self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, pixels
            # The AV1 encoder would print its settings, and not only errors; and run by root, it makes its threads, this one and all
            # processes to come real-time ones.
            with environment({"SVT_LOG": os.environ.get("SVT_LOG", "1")}), scheduling_kept():
                self._stream.codec_context.open()
        except (self._av.FFmpegError, ValueError) as error:
            raise StorageError(
                f"{path}: {height} x {width} pixels cannot be stored with the codec {codec} ({error})."
            ) from error

    def add(self, frames: Array) -> None:
        """Appends ``[N, height, width, 3]``."""
        for pixels in frames:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = self._frames, 1 / self._rate
            self._frames += 1
            self._encode(frame)

    def close(self, complete: bool = True) -> None:
        """The end of the file; one that is not complete is useless afterwards."""
        if complete:
            self._encode(None)
        with self._errors():
            self._container.close()

    def _encode(self, frame: Any) -> None:
        with self._errors():
            packets = self._stream.encode(frame)
            self.nbytes += sum(packet.size for packet in packets)
            self._container.mux(packets)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._av.FFmpegError as error:
            raise StorageError(f"{self.path}: the video could not be written ({error}).") from error


def _frames_from(container: Any, stream: Any, time: float, tolerance: float) -> Iterator[Any]:
    """The frames from the key frame before a time on. A file whose index leads too far is read from its beginning."""
    for start in (max(0, int((time - tolerance) / stream.time_base)), 0):
        container.seek(start, stream=stream)
        frames = (frame for frame in container.decode(stream) if frame.pts is not None)
        first = next(frames, None)
        if first is not None and (first.time <= time + tolerance or not start):
            yield first
            yield from frames
            return


def _check_size(path: Path, found: Any, height: int, width: int) -> None:
    if (found.height, found.width) != (height, width):
        raise CorruptError(
            f"{path}: its frames have {found.height} x {found.width} pixels, meta/info.json has {height} x {width}."
        )


def _av() -> Any:
    return optional_module("av", "Reading and writing videos", "formats")
