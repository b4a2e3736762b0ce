"""Videos: every frame is found by its time, from wherever it is read, and what is damaged is named."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import CorruptError, StorageError
from hilt.core.tree import Array
from hilt.formats import video
from hilt.formats.video import AHEAD_S, CODECS, KEPT_FRAMES, VideoReader, VideoWriter, read_frames
from tests.effort import rounds

av = pytest.importorskip("av")
FPS, TOLERANCE = 10, 1e-4


def drawn(count: int, height: int = 32, width: int = 48) -> Array:
    """Soft shading, and a square that moves: neighboring frames differ."""
    y, x = np.mgrid[:height, :width]
    pictures = np.repeat(np.stack([40 + x, 30 + y, 90 + 0 * x], axis=-1)[None], count, axis=0)
    for i in range(count):
        pictures[i, 8:20, 2 * i % (width - 12) :][:, :12] = (230, 220 - 3 * i, 40)
    return pictures.clip(0, 255).astype(np.uint8)


def written(path: Path, frames: Array, codec: str = "lossless", fps: float = FPS) -> Path:
    writer = VideoWriter(path, fps, *frames.shape[1:3], codec)
    writer.add(frames[:3])
    writer.add(frames[3:])
    writer.close()
    assert 0 < writer.nbytes < path.stat().st_size
    return path


def shown(path: Path, first: int, end: int, fps: float = FPS, size: tuple[int, int] = (32, 48)) -> Array:
    return read_frames(path, np.arange(first, end) / fps, *size, TOLERANCE)


def decibels(a: Array, b: Array) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, np.mean((a.astype(float) - b) ** 2))))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fps", [10, 29.97])
def test_what_is_written_is_read(tmp_path: Path, codec: str, fps: float) -> None:
    frames = drawn(20)
    path = written(tmp_path / "a.mp4", frames, codec, fps)
    back = shown(path, 0, 20, Fraction(fps).limit_denominator(1001).__float__())
    if codec == "lossless":
        assert np.array_equal(back, frames)
    for i in range(20):
        others = max(decibels(back[i], frames[j]) for j in range(20) if j != i)
        assert decibels(back[i], frames[i]) > max(28, others)


@settings(max_examples=rounds(8, 100), deadline=None)
@given(st.integers(0, 29), st.integers(1, 30))
def test_any_part_is_the_same_as_in_the_whole(tmp_path_factory: pytest.TempPathFactory, first: int, count: int) -> None:
    path, end = long_distance(tmp_path_factory), min(30, first + count)
    whole = shown(path, 0, 30)
    assert np.array_equal(shown(path, first, end), whole[first:end])
    assert decibels(whole, drawn(30)) > 35


def long_distance(factory: pytest.TempPathFactory) -> Path:
    """A video with few key frames, and with frames that are stored in another order than shown."""
    path = factory.getbasetemp() / "long.mp4"
    if not path.exists():
        with av.open(str(path), "w") as container:
            stream = container.add_stream(
                "libx264", FPS, options={"g": "12", "bf": "3", "b_strategy": "0", "crf": "5", "preset": "medium"}
            )
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            for frame in drawn(30):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
        with av.open(str(path)) as container:
            kinds = [int(frame.pict_type) for frame in container.decode(video=0)]
        assert 3 in kinds and kinds.count(1) < 5  # predicted from both sides; key frames
    return path


def test_the_same_time_twice_is_the_same_frame_twice(tmp_path: Path) -> None:
    path = written(tmp_path / "a.mp4", drawn(6))
    back = read_frames(path, np.array([0.3, 0.4, 0.5, 0.5]), 32, 48, TOLERANCE)
    assert np.array_equal(back, drawn(6)[[3, 4, 5, 5]])


def test_an_index_that_leads_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the file is read from its beginning."""
    frames = [SimpleNamespace(pts=i, time=i / 10) for i in range(9)]
    seeks: list[int] = []
    monkeypatch.setattr(video, "_frames_at_once", lambda *_: iter(frames[6:] if seeks[-1] else frames))
    container = SimpleNamespace(seek=lambda start, stream: seeks.append(start))
    got = list(video._frames_from(container, SimpleNamespace(time_base=Fraction(1, 100)), 0.4, TOLERANCE))
    assert got == frames and seeks == [39, 0]


def test_what_is_missing_or_of_another_size_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.mp4", drawn(6))
    with pytest.raises(CorruptError, match=r"none.mp4: this video is missing. Restore it"):
        shown(tmp_path / "none.mp4", 0, 2)
    with pytest.raises(CorruptError, match=r"a.mp4: its frames have 32 x 48 pixels, meta/info.json has 32 x 64"):
        shown(path, 0, 2, size=(32, 64))
    with pytest.raises(CorruptError, match=r"a.mp4: 6 frames, fewer than the 7 of the episode"):
        shown(path, 0, 7)
    with pytest.raises(
        CorruptError, match=r"a.mp4: no frame within 0.0001 s of 0.6000 s, where frame 2 of the episode belongs"
    ):
        shown(path, 4, 7)
    with pytest.raises(CorruptError, match=r"no frame within 0.0001 s of 0.1500 s, where frame 1 of"):
        read_frames(path, np.array([0.1, 0.15, 0.2]), 32, 48, TOLERANCE)
    assert len(read_frames(path, np.array([0.1, 0.203]), 32, 48, 0.01)) == 2


def test_damaged_files(tmp_path: Path) -> None:
    path = written(tmp_path / "a.mp4", drawn(6))
    data = path.read_bytes()
    for cut in (0, 20, len(data) // 2):
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptError, match=r"a.mp4: not readable as a video"):
            shown(path, 0, 6)
    path.write_text("no video at all")
    with pytest.raises(CorruptError, match=r"a.mp4: not readable as a video"):
        shown(path, 0, 6)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", 8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    with pytest.raises(CorruptError, match=r"a.mp4: there is no video in it"):
        shown(path, 0, 6)


def test_what_a_codec_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a.mp4: 21 x 33 pixels cannot be stored with the codec h264"):
        VideoWriter(tmp_path / "a.mp4", FPS, 21, 33, "h264")
    writer = VideoWriter(tmp_path / "none" / "a.mp4", FPS, 32, 48, "lossless")
    with pytest.raises(StorageError, match=r"a.mp4: the video could not be written .*No such file or directory"):
        writer.add(drawn(60))
    writer.close(complete=False)


def test_an_encoder_takes_no_priority_over_others(tmp_path: Path) -> None:
    """Run by root, SVT-AV1 makes its threads, and whoever made it, real-time."""
    before = os.sched_getscheduler(0)
    video = VideoWriter(tmp_path / "a.mp4", 10, 64, 64, "av1")
    video.add(np.zeros((4, 64, 64, 3), np.uint8))
    assert {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")} == {before}
    video.close()
    assert os.sched_getscheduler(0) == before


# Frames one by one


def with_key_frames(path: Path, frames: Array, apart: int) -> Path:
    """A video whose key frames lie far apart, as other programs write them."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264rgb", FPS, options={"g": str(apart), "bf": "0", "qp": "0", "sc_threshold": "0"}
        )
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "rgb24"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("apart", [2, 100])
def test_video_reader_finds_any_frame_in_any_order(tmp_path: Path, apart: int) -> None:
    frames = drawn(60)
    reader = VideoReader(with_key_frames(tmp_path / "a.mp4", frames, apart), 32, 48, TOLERANCE)
    for step in [0, 1, 2, 30, 29, 28, 59, 58, 3, 3, 40, 41, 60 - KEPT_FRAMES, 0, *range(10, 10 + int(AHEAD_S * FPS))]:
        assert np.array_equal(reader.frame(step / FPS), frames[step]), step
    for absent in (6.0, 2.05, 60.0):
        with pytest.raises(CorruptError, match="no frame within"):
            reader.frame(absent)
    assert np.array_equal(reader.frame(0.5), frames[5])
    reader.close()


def test_video_reader_goes_back_without_decoding_from_the_key_frame_again(tmp_path: Path) -> None:
    frames = drawn(60)
    reader = VideoReader(with_key_frames(tmp_path / "a.mp4", frames, 100), 32, 48, TOLERANCE)
    searched: list[float] = []
    search = reader._container.seek
    reader._container = SimpleNamespace(
        seek=lambda *a, **k: (searched.append(a[0]), search(*a, **k)), demux=reader._container.demux
    )
    for step in range(50, 50 - KEPT_FRAMES, -1):
        assert np.array_equal(reader.frame(step / FPS), frames[step])
    assert len(searched) == 1


def counted_packets(reader: VideoReader) -> list[float]:
    """When each packet is shown that this reader has its decoder decode."""
    decoded: list[float] = []
    container = reader._container

    def counted(packet: Any) -> Any:
        def decode() -> Any:
            if packet.pts is not None:
                decoded.append(packet.pts)
            return packet.decode()

        facts = {name: getattr(packet, name) for name in ("pts", "duration", "is_keyframe")}
        return SimpleNamespace(**facts, decode=decode)

    reader._container = SimpleNamespace(seek=container.seek, demux=lambda stream: map(counted, container.demux(stream)))
    return decoded


def test_video_reader_decodes_no_more_than_from_the_key_frame_before(tmp_path: Path) -> None:
    frames = drawn(60)
    reader = VideoReader(with_key_frames(tmp_path / "a.mp4", frames, 2), 32, 48, TOLERANCE)
    decoded = counted_packets(reader)
    for step, most in [(10, 1), (11, 1), (15, 2), (16, 1), (22, 1), (21, 2), (22, 1), (21, 0)]:
        decoded.clear()
        assert np.array_equal(reader.frame(step / FPS), frames[step]), step
        assert len(decoded) <= most, (step, decoded)


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_video_reader_decodes_no_key_frame_behind_the_frame_that_is_shown(tmp_path: Path, codec: str) -> None:
    """A decoder of H.264 holds a frame back until it has another one, and every other one is a key frame."""
    path = written(tmp_path / "a.mp4", drawn(40), codec)
    with av.open(str(path)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    reader = VideoReader(path, 32, 48, TOLERANCE)
    decoded = counted_packets(reader)
    for step in [11, 30, 29, 28, 27, 2, 17, 39, 38, 0, *range(4, 12)]:
        decoded.clear()
        assert np.array_equal(reader.frame(step / FPS), plain[step]), step
        assert len(decoded) <= 2, (step, decoded)
    reader.close()


@pytest.mark.parametrize(
    "options",
    [{"g": "6", "bf": "3"}, {"g": "6", "bf": "3", "x264-params": "open-gop=1"}, {"g": "5", "bf": "0"}],
    ids=str,
)
def test_video_reader_shows_what_a_decoder_gives_that_reads_on(tmp_path: Path, options: dict[str, str]) -> None:
    """Also where frames that are shown before a key frame come after it, and need what was before."""
    frames, path = drawn(40), tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", FPS, options={"sc_threshold": "0", "b_strategy": "0", **options})
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(plain) == 40 and np.array_equal(shown(path, 0, 40), np.stack(plain))
    reader = VideoReader(path, 32, 48, TOLERANCE)
    for step in [*range(40), 13, 26, 25, 24]:
        assert np.array_equal(reader.frame(step / FPS), plain[step]), step
    reader.close()


def test_video_reader_keeps_large_frames_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hilt.formats.video.KEPT_BYTES", 5 * 32 * 48 * 3 // 2)
    frames = drawn(20)
    reader = VideoReader(with_key_frames(tmp_path / "a.mp4", frames, 100), 32, 48, TOLERANCE)
    assert np.array_equal(reader.frame(1.5), frames[15]) and len(reader._recent) == 5


def test_video_reader_names_what_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"not a video")
    with pytest.raises(CorruptError, match="not readable as a video"):
        VideoReader(tmp_path / "a.mp4", 32, 48, TOLERANCE)
    with pytest.raises(CorruptError, match="is missing"):
        VideoReader(tmp_path / "b.mp4", 32, 48, TOLERANCE)
    path = written(tmp_path / "c.mp4", drawn(5))
    with pytest.raises(CorruptError, match="32 x 48 pixels"):
        VideoReader(path, 64, 64, TOLERANCE)
