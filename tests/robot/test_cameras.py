"""Cameras: a real video file through OpenCV, a simulation's over HTTP, and
RealSense's library replaced, for want of the hardware."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import (
    ConfigError,
    DeadlineError,
    MissingPackageError,
    RefusedError,
    RequestError,
    StorageError,
    UnknownNameError,
)
from hilt.robot.cameras import KINDS, CameraConfig, Frame, fitted, open_camera
from hilt.robot.robot_client import RobotClient
from tests.envs.toy_robot import ToyRobot, scene


def opened(config: CameraConfig, size: int = 32, url: str = "http://127.0.0.1:9") -> Any:
    return open_camera("front", config, size, lambda: RobotClient(url))


# --- OpenCV, with a real file ---


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten seconds at 20 Hz, red on top and blue below, each frame brighter than the last."""
    import cv2

    path = str(tmp_path_factory.mktemp("video") / "scene.avi")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"MJPG"), 20, (64, 48))
    for i in range(200):
        image = np.zeros((48, 64, 3), np.uint8)
        image[:24, :, 2], image[24:, :, 0] = 50 + i, 50 + i  # OpenCV's order: blue, green, red
        writer.write(image)
    writer.release()
    return path


def test_a_file_is_played_at_its_rate_and_the_newest_frame_is_rgb(video: str):
    camera = opened(CameraConfig(kind="opencv", source=video))
    first = camera.read()
    assert isinstance(first, Frame) and first.image.shape == (48, 64, 3) and first.image.dtype == np.uint8
    assert first.image[5, 5, 0] > 40 > first.image[5, 5, 2] and first.image[40, 5, 2] > 40 > first.image[40, 5, 0]
    later = read_until(camera, lambda frame: frame.image[5, 5, 0] > first.image[5, 5, 0] + 3)
    assert later.time > first.time
    camera.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "camera-front"]


def read_until(camera: Any, wanted: Callable[[Frame], Any]) -> Frame:
    deadline = time.monotonic() + 120
    while not wanted(frame := camera.read()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return frame


def test_a_camera_that_stalls_is_named_with_its_cure(video: str):
    """Upstream asks on the console, and waits there for ever."""
    camera = opened(CameraConfig(kind="opencv", source=video, fps=2000, stale_seconds=0.1, deadline_seconds=2))
    with pytest.raises(
        DeadlineError,
        match=r"camera 'front', video file '.*scene.avi', gave no frame for \d\.\d s. A file ends: give a longer",
    ):
        read_until(camera, lambda frame: False)
    camera.close()


def test_camera_that_does_not_open_is_reported_with_the_fix(tmp_path: Path, video: str):
    with pytest.raises(
        StorageError, match=r"camera 'front', OpenCV device 97, does not open: /dev/video97 does not exist; there are"
    ):
        opened(CameraConfig(kind="opencv", source="97"))
    with pytest.raises(StorageError, match=r"no.mp4 does not exist; check the path"):
        opened(CameraConfig(kind="opencv", source=str(tmp_path / "no.mp4")))
    (tmp_path / "text.mp4").write_text("not a video")
    with pytest.raises(StorageError, match="it is no video that OpenCV reads"):
        opened(CameraConfig(kind="opencv", source=str(tmp_path / "text.mp4")))


def test_a_device_gets_the_size_and_rate_asked_for(monkeypatch: pytest.MonkeyPatch):
    """There is no device here: the class that would open it is replaced."""
    import cv2

    told: dict[Any, Any] = {}
    capture = SimpleNamespace(
        isOpened=lambda: True, set=told.__setitem__, read=lambda: (False, None), release=lambda: None
    )
    monkeypatch.setattr(cv2, "VideoCapture", lambda source: told.update(source=source) or capture)
    opened(CameraConfig(kind="opencv", source="3", width=320, height=240, fps=30)).close()
    assert told == {"source": 3, cv2.CAP_PROP_FRAME_WIDTH: 320, cv2.CAP_PROP_FRAME_HEIGHT: 240, cv2.CAP_PROP_FPS: 30}


def test_camera_without_permission_is_reported(monkeypatch: pytest.MonkeyPatch):
    from hilt.robot import cameras

    monkeypatch.setattr(cameras.os.path, "exists", lambda path: True)
    monkeypatch.setattr(cameras.os, "access", lambda path, mode: False)
    assert "add it to the group `video` and log in again" in cameras._why_not("0")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (CameraConfig(fps=5), "camera 'front': fps=5 has no effect on kind 'simulation'"),
        (CameraConfig(exposure=5), "exposure=5 has no effect on kind 'simulation'"),
        (CameraConfig(kind="opencv", source="0", exposure=5), "exposure=5 has no effect on kind 'opencv'"),
        (CameraConfig(kind="opencv", source="a.avi", width=5), "width and height have no effect on a video file"),
    ],
)
def test_settings_without_effect_are_refused(config: CameraConfig, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        opened(config)


def test_a_camera_of_ones_own(monkeypatch: pytest.MonkeyPatch):
    source = SimpleNamespace(
        label="my camera", cure="", grab=lambda: np.full((4, 4, 3), 7, np.uint8), close=lambda: None
    )
    monkeypatch.setitem(KINDS, "mine", lambda name, config: source)
    camera = opened(CameraConfig(kind="mine", exposure=3))
    assert camera.read().image[0, 0, 0] == 7
    camera.close()


def test_camera_read_returns_the_newest_frame_without_waiting(monkeypatch: pytest.MonkeyPatch):
    """Control is faster than many cameras."""
    second = threading.Event()
    waits = iter([lambda: None, *[lambda: second.wait(120)] * 1000])

    def grab() -> np.ndarray:
        next(waits)()
        return np.zeros((4, 4, 3), np.uint8)

    source = SimpleNamespace(label="my camera", cure="", grab=grab, close=lambda: None)
    monkeypatch.setitem(KINDS, "mine", lambda name, config: source)
    camera = opened(CameraConfig(kind="mine", stale_seconds=100))
    assert camera.read().time == camera.read().time
    second.set()
    camera.close()


def test_a_frame_stays_as_it_is_when_the_source_uses_its_memory_again(monkeypatch: pytest.MonkeyPatch):
    memory = np.zeros((4, 4, 3), np.uint8)

    def grab() -> np.ndarray:
        time.sleep(0.001)
        memory[:] += 1
        return memory

    source = SimpleNamespace(label="my camera", cure="", grab=grab, close=lambda: None)
    monkeypatch.setitem(KINDS, "mine", lambda name, config: source)
    camera = opened(CameraConfig(kind="mine"))
    first = camera.read()
    before = first.image.copy()
    while camera.read().time < first.time + 0.02:
        time.sleep(0.001)
    assert (first.image == before).all()
    camera.close()


def test_an_unknown_kind_lists_the_known():
    with pytest.raises(
        UnknownNameError, match=r"no kind of camera .* named 'webcam'. Known: opencv, realsense, simulation"
    ):
        opened(CameraConfig(kind="webcam"))


# --- crop and resize ---


def test_a_picture_is_cropped_then_resized():
    image = np.arange(40 * 60 * 3, dtype=np.uint32).reshape(40, 60, 3).astype(np.uint8)
    np.testing.assert_array_equal(fitted("a", image, [4, 24, 10, 30], 20), image[4:24, 10:30])
    assert fitted("a", image, [], 16).shape == (16, 16, 3)
    for crop in ([0, 41, 0, 10], [5, 5, 0, 10], [0, 10]):
        with pytest.raises(
            ConfigError, match=r"camera 'a': crop=.* is not \[top, bottom, left, right\] within a frame of \(40, 60\)"
        ):
            fitted("a", image, crop, 16)


# --- simulation ---


def test_a_simulations_picture_is_of_now_and_of_the_size_asked_for():
    with ToyRobot(scene()) as toy:
        camera = opened(CameraConfig(source="top", height=20), 10, toy.url)
        assert camera.read().image.shape == (20, 10, 3) and toy.bodies("image") == [
            {"camera": "top", "height": 20, "width": 10}
        ]
        toy.raw["image"] = ("application/octet-stream", b"1234")
        with pytest.raises(RequestError, match=r"camera 'front': the simulation's picture is not \(20, 10, 3\) bytes"):
            camera.read()
        del toy.raw["image"]
        toy.delays["image"] = 0.6
        slow = opened(CameraConfig(deadline_seconds=0.2), 10, toy.url)
        with pytest.raises(DeadlineError, match=r"/image: no reply within 0.2 s"):
            slow.read()
        camera.close()
        slow.close()
    with pytest.raises(RefusedError, match="no robot server answers"):
        opened(CameraConfig()).read()


# --- RealSense, its library replaced ---


class RealSense:
    """As much of pyrealsense2 as is called, and what a test wants to go wrong."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.serials, self.start_error, self.stalled = ["111", "222"], "", False
        self.camera_info, self.stream = SimpleNamespace(serial_number=0), SimpleNamespace(color="color")
        self.format, self.option = SimpleNamespace(rgb8="rgb8"), SimpleNamespace(exposure="exposure")
        self.memory = np.zeros((480, 640, 3), np.uint8)
        self.stopped = False

    def context(self) -> Any:
        return SimpleNamespace(
            devices=[SimpleNamespace(get_info=lambda _, serial=serial: serial) for serial in self.serials]
        )

    def config(self) -> Any:
        return SimpleNamespace(
            enable_device=lambda *a: self.calls.append(a), enable_stream=lambda *a: self.calls.append(a)
        )

    def pipeline(self) -> Any:
        return self

    def start(self, _: Any) -> Any:
        if self.start_error:
            raise RuntimeError(self.start_error)
        return self

    def get_device(self) -> Any:
        blind = SimpleNamespace(supports=lambda option: False)
        seeing = SimpleNamespace(
            supports=lambda option: option == "exposure", set_option=lambda *a: self.calls.append(a)
        )
        return SimpleNamespace(query_sensors=lambda: [blind, seeing])

    def wait_for_frames(self, milliseconds: int) -> Any:
        time.sleep(0.01)
        if self.stalled:
            raise RuntimeError("Frame didn't arrive within 1000")
        self.memory += 1  # the driver uses its memory again
        return SimpleNamespace(get_color_frame=lambda: SimpleNamespace(get_data=lambda: self.memory))

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> RealSense:
    library = RealSense()
    monkeypatch.setitem(sys.modules, "pyrealsense2", library)
    return library


def test_a_realsense_is_opened_by_its_serial_number(library: RealSense):
    camera = opened(CameraConfig(kind="realsense", source="222", width=424, height=240, fps=30, exposure=10000))
    assert library.calls == [("222",), ("color", 424, 240, "rgb8", 30), ("exposure", 10000)]
    first = camera.read()
    kept = first.image.copy()
    read_until(camera, lambda frame: frame.image[0, 0, 0] != kept[0, 0, 0])
    np.testing.assert_array_equal(first.image, kept)  # a copy: the driver's memory has changed
    camera.close()
    assert library.stopped


def test_defaults_of_a_realsense_and_automatic_exposure(library: RealSense):
    opened(CameraConfig(kind="realsense", source="111")).close()
    assert library.calls == [("111",), ("color", 640, 480, "rgb8", 15)]


def test_a_realsense_that_is_not_there_or_busy_or_stalled(library: RealSense):
    with pytest.raises(
        StorageError, match=r"camera 'front': no RealSense '333'; connected: 111, 222\. Plug it in; .*udev rules"
    ):
        opened(CameraConfig(kind="realsense", source="333"))
    library.serials = []
    with pytest.raises(StorageError, match="connected: none"):
        opened(CameraConfig(kind="realsense", source="111"))
    library.serials, library.start_error = ["111"], "Device or resource busy"
    with pytest.raises(
        StorageError, match=r"RealSense 111, does not start: Device or resource busy\. .*another program has it open"
    ):
        opened(CameraConfig(kind="realsense", source="111"))
    library.start_error, library.stalled = "", True
    camera = opened(CameraConfig(kind="realsense", source="111", deadline_seconds=2))
    with pytest.raises(
        DeadlineError, match=r"gave no frame within 2 s \(Frame didn't arrive within 1000\). Check its USB 3 cable"
    ):
        camera.read()
    library.stalled = False
    assert camera.read().image.shape == (480, 640, 3)  # it was plugged in again
    camera.close()


def test_camera_without_its_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyrealsense2", None)
    with pytest.raises(
        MissingPackageError,
        match=r"a RealSense camera needs the package 'pyrealsense2'.*pip install 'hilt\[realsense\]'",
    ):
        opened(CameraConfig(kind="realsense", source="111"))
