"""Frames of an mp4 file by the time at which they are shown, and mp4 files from frames."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
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
"""By name: the encoder, how it stores pixels, and its settings. AV1 has those of
LeRobot; the last one is H.264 that keeps every bit."""

ALONE = {
    "protocol_whitelist": "none",
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2",
    "enable_drefs": "0",
    "use_absolute_path": "0",
}
"""Options of FFmpeg: a file leads to no other"""


AHEAD_S, KEPT_FRAMES, KEPT_BYTES = 0.7, 32, 8 << 20
"""Of a `VideoReader`: how far ahead it decodes instead of searching, where the file does not say where its key frames
are; and how many decoded frames it keeps at most, and how many bytes of them."""


def file_name(path: Path) -> str:
    """A file as FFmpeg is to be given it: absolute, since it takes what stands before
    a colon in a relative path for a protocol."""
    return str(path.absolute())


def read_frames(path: Path, times: Array, height: int, width: int, tolerance: float) -> Array:
    """``[len(times), height, width, 3]``: the frames that are shown at these times in seconds, which never fall.

    Only what lies between the key frame before the first and the last of them is decoded.
    """
    av, needed = _av(), len(np.unique(times))
    try:
        # The file is opened here, and its format is given: FFmpeg would take a name for an address of any protocol,
        # and text for a list of further addresses.
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
                    f"{path}: {stream.frames} frames, fewer than the {needed} of the episode. "
                    "Restore the file from a copy."
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


class VideoReader:
    """Frames of an mp4 file in any order, for a person who looks at it.

    The file stays open. A frame a little ahead of the last one is decoded without a search, and the last frames are
    kept, so that steps backwards do not decode everything from the key frame on again. Several threads may use it.
    """

    def __init__(self, path: Path, height: int, width: int, tolerance: float):
        self.path, self._size, self._tolerance = path, (height, width), tolerance
        self._lock = threading.Lock()
        # as FFmpeg has them: a byte for the brightness of each pixel, and half a byte for its color
        kept = max(2, min(KEPT_FRAMES, KEPT_BYTES // max(1, height * width * 3 // 2)))
        self._recent: deque[Any] = deque(maxlen=kept)
        self._frames: Iterator[Any] = iter(())
        self._stack = contextlib.ExitStack()
        av = _av()
        self._reformatter = av.video.reformatter.VideoReformatter()  # one for all frames: making one takes longer
        with self._errors():
            file = self._stack.enter_context(path.open("rb"))
            self._container = self._stack.enter_context(
                av.open(file, format="mp4", options=ALONE, metadata_errors="replace")
            )
            stream = next(iter(self._container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise CorruptError(f"{path}: there is no video in it. Restore the file from a copy.")
            _check_size(path, stream, height, width)
            stream.codec_context.thread_count = 1  # threads delay the first frame after a search
            self._stream, self._rate = stream, float(stream.average_rate or 30)

    def frame(self, time: float) -> Array:
        """``[height, width, 3]``: the frame that is shown at this time in seconds."""
        with self._lock, self._errors():
            for kept in reversed(self._recent):
                if abs(kept.time - time) <= self._tolerance:
                    return self._pixels(kept)
            key = self._key_frame(time)
            if not self._is_near(time, key):
                self._recent.clear()
                self._frames = _frames_from(self._container, self._stream, time, self._tolerance, key)
            for frame in self._frames:
                self._recent.append(frame)
                if frame.time >= time - self._tolerance:
                    break
            else:
                self._recent.clear()
            if not self._recent or abs(self._recent[-1].time - time) > self._tolerance:
                raise CorruptError(f"{self.path}: no frame within {self._tolerance} s of {time:.4f} s.")
            return self._pixels(self._recent[-1])

    def close(self) -> None:
        with self._lock:
            self._recent.clear()
            self._frames = iter(())
            self._stack.close()

    def _key_frame(self, time: float) -> int | None:
        """When the key frame is shown from which this frame is decoded, in units of the file; None where the file has
        no index."""
        entries = getattr(self._stream, "index_entries", None)
        if not entries or not self._stream.time_base:
            return None
        # the index has times of decoding, which lie before those of showing by as much as the first one
        early = min(0, int(entries[0].timestamp))
        when = int((time + self._tolerance) / self._stream.time_base) + early
        place = entries.search_timestamp(when, backward=True, any_frame=False)
        return max(0, int(entries[place].timestamp) - early) if place >= 0 else None

    def _is_near(self, time: float, key: int | None) -> bool:
        """Whether a frame is reached with fewer decoded frames from the last one on than from its key frame on."""
        newest = self._recent[-1].time if self._recent else math.inf
        if not newest < time or key is None:
            return bool(newest < time <= newest + AHEAD_S)
        return bool(newest >= float(key * self._stream.time_base) - 1.5 / self._rate)

    def _pixels(self, frame: Any) -> Array:
        _check_size(self.path, frame, *self._size)
        pixels: Array = self._reformatter.reformat(frame, format="rgb24").to_ndarray()
        return pixels

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CorruptError(f"{self.path}: this video is missing. Restore it from a copy.") from None
        except (_av().FFmpegError, OSError, MemoryError) as error:
            raise CorruptError(
                f"{self.path}: not readable as a video ({error}). Restore the file from a copy."
            ) from error


class OpenVideos:
    """Videos that stay open for single frames: those that were used last."""

    def __init__(self, most: int = 8):
        self._most, self._lock = most, threading.Lock()
        self._readers: dict[Path, VideoReader] = {}

    def reader(self, path: Path, height: int, width: int, tolerance: float) -> VideoReader:
        """The reader of a video, which is opened if it is not open."""
        with self._lock:
            reader = self._readers.pop(path, None) or VideoReader(path, height, width, tolerance)
            while len(self._readers) >= self._most:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[path] = reader
            return reader

    def close(self) -> None:
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()


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
            # The AV1 encoder would print its settings, and not only errors; and run by root, it makes its threads, this
            # one and all processes to come real-time ones.
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


def _frames_at_once(container: Any, stream: Any) -> Iterator[Any]:
    """The frames from where the file stands on, each as early as it can be had. A decoder may hold back frames until it
    has seen later ones, which costs as much again where the next one is a key frame: before that one, it is told to
    give out what it holds. Not if frames that are shown before the key frame, and need older ones, come after it: then
    there is a gap before it."""
    decoder, held, newest = stream.codec_context, 0, -1
    for packet in container.demux(stream):
        follows = packet.pts is not None and 0 <= newest < packet.pts <= newest + 1.5 * (packet.duration or 0)
        if packet.is_keyframe and held > 0 and follows:
            for frame in decoder.decode(None):
                frame.time_base = stream.time_base
                yield frame
            decoder.flush_buffers()
            held = 0
        for frame in packet.decode():
            held -= 1
            yield frame
        held, newest = held + 1, max(newest, packet.pts if packet.pts is not None else -1)


def _frames_from(container: Any, stream: Any, time: float, tolerance: float, key: int | None = None) -> Iterator[Any]:
    """The frames from the key frame before a time on. `key`: when that one is shown. A file whose index
    leads too far is read from its beginning."""
    before = max(0, int((time - tolerance) / stream.time_base))
    for start in (before, 0) if key is None else (key, before, 0):
        container.seek(start, stream=stream)
        frames = (frame for frame in _frames_at_once(container, stream) if frame.pts is not None)
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
