"""Cameras behind one protocol: ``read()`` returns the newest RGB frame and its time, or raises an error with the fix.

Real cameras are read by a thread of their own that keeps only the newest frame, so a slow camera does not
slow the control loop and an old picture is never taken for a new one: a frame older than
``stale_seconds`` is waited for, then an error names the camera.
"""

from __future__ import annotations

import glob
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from hilt.core.errors import (
    ConfigError,
    DeadlineError,
    HiltError,
    RequestError,
    StorageError,
    UnknownNameError,
    optional_module,
)
from hilt.core.platform import DEVICE_NODES
from hilt.envs.rate import Rate
from hilt.robot.robot_client import RobotClient

Array = np.ndarray[Any, Any]


@dataclass
class CameraConfig:
    """Where pictures come from. What a kind cannot use is refused."""

    kind: str = "simulation"
    """``simulation`` (the robot server's), ``opencv``, ``realsense``, or a name that you added to ``KINDS``"""
    source: str = ""
    """The simulation's camera (empty: the camera's own name), OpenCV's device number or
    a video file, or RealSense's serial number"""
    width: int | None = None
    """Pixels of a frame before the crop; None: what is needed in simulation, 640
    for RealSense, the device's own for OpenCV"""
    height: int | None = None
    """Pixels; None: what is needed in simulation, 480 for RealSense, the device's own for OpenCV"""
    fps: float | None = None
    """Frames in a second; None: 15 for RealSense, the device's or the file's own for OpenCV; not for simulation"""
    exposure: float | None = None
    """Microseconds, RealSense only; None: automatic"""
    crop: list[int] = field(default_factory=list)
    """``[top, bottom, left, right]`` of the part that is kept, in pixels of the frame; empty: all of it"""
    stale_seconds: float = 1.0
    """A frame older than this is not used"""
    deadline_seconds: float = 5.0
    """How long to wait for a frame before the camera counts as stalled"""


class Frame(NamedTuple):
    """A picture and when it arrived."""

    image: Array  # [H, W, 3] uint8 RGB
    time: float  # seconds of time.monotonic()


class Camera(Protocol):
    """What an environment asks of a camera."""

    def read(self) -> Frame: ...

    def close(self) -> None: ...


def open_camera(name: str, config: CameraConfig, size: int, client: Callable[[], RobotClient]) -> Camera:
    """The camera of a configuration; `size` is what its pictures become, and
    `client` makes a connection to the robot server."""
    if config.kind not in ("simulation", *KINDS):
        raise UnknownNameError(f"kind of camera (camera {name!r})", config.kind, ["simulation", *KINDS])
    unused = {"simulation": ["fps", "exposure"], "opencv": ["exposure"]}.get(config.kind, [])
    if given := [key for key in unused if getattr(config, key) is not None]:
        raise ConfigError(
            f"camera {name!r}: {given[0]}={getattr(config, given[0])} has no effect on kind "
            f"{config.kind!r}. Leave it out."
        )
    if config.kind == "simulation":
        return SimulatedCamera(name, client(), config, size)
    return NewestFrame(name, KINDS[config.kind](name, config), config)


def fitted(name: str, image: Array, crop: list[int], size: int) -> Array:
    """``[size, size, 3]``: the part of a frame that is kept, resized as upstream does it."""
    if crop:
        top, bottom, left, right = crop if len(crop) == 4 else (0, 0, 0, 0)
        if not (0 <= top < bottom <= image.shape[0] and 0 <= left < right <= image.shape[1]):
            raise ConfigError(
                f"camera {name!r}: crop={crop} is not [top, bottom, left, right] within a frame of "
                f"{image.shape[:2]} pixels."
            )
        image = image[top:bottom, left:right]
    if image.shape[:2] != (size, size):
        image = optional_module("cv2", "resizing a camera's image", "robot", "opencv-python-headless").resize(
            image, (size, size)
        )
    return np.ascontiguousarray(image)


class SimulatedCamera:
    """Asks the robot server for a picture: always of now, so without a thread."""

    def __init__(self, name: str, client: RobotClient, config: CameraConfig, size: int):
        self._name, self._client, self._config = name, client, config
        self._shape = (config.height or size, config.width or size, 3)

    def read(self) -> Frame:
        request = {"camera": self._config.source or self._name, "height": self._shape[0], "width": self._shape[1]}
        data = self._client.post("image", request, self._config.deadline_seconds)
        if not isinstance(data, bytes) or len(data) != np.prod(self._shape):
            raise RequestError(
                f"camera {self._name!r}: the simulation's picture is not {self._shape} bytes. Is "
                "it a robot server of Hilt?"
            )
        return Frame(np.frombuffer(data, np.uint8).reshape(self._shape), time.monotonic())

    def close(self) -> None:
        self._client.close()


class NewestFrame:
    """A thread that keeps the newest frame of a source."""

    def __init__(self, name: str, source: Any, config: CameraConfig):
        self._name, self._source, self._config = name, source, config
        self._changed, self._newest, self._problem = (
            threading.Condition(),
            Frame(np.empty((0, 0, 3), np.uint8), -np.inf),
            "",
        )
        self._open = True
        self._thread = threading.Thread(target=self._read, name=f"camera-{name}", daemon=True)
        self._thread.start()

    def read(self) -> Frame:
        with self._changed:
            if self._changed.wait_for(self._fresh, self._config.deadline_seconds):
                return self._newest
        age = time.monotonic() - self._newest.time
        since = f"for {age:.1f} s" if np.isfinite(age) else f"within {self._config.deadline_seconds:g} s"
        problem = f" ({self._problem})" if self._problem else ""
        raise DeadlineError(
            f"camera {self._name!r}, {self._source.label}, gave no frame {since}{problem}. {self._source.cure}"
        )

    def close(self) -> None:
        self._open = False
        self._thread.join(timeout=5)
        self._source.close()

    def _fresh(self) -> bool:
        return time.monotonic() - self._newest.time <= self._config.stale_seconds

    def _read(self) -> None:
        while self._open:
            try:
                image = self._source.grab()
            except (HiltError, OSError, RuntimeError) as error:
                self._problem, image = str(error).strip(), None
            if image is None:
                time.sleep(0.02)  # a source that fails at once must not keep a core busy
                continue
            with self._changed:
                self._newest = Frame(np.array(image), time.monotonic())  # a copy: a source may use its memory again
                self._changed.notify_all()


class _OpenCV:
    """A device by its number, or a video file, which is played at its own rate."""

    def __init__(self, name: str, config: CameraConfig):
        cv2 = optional_module("cv2", "a camera through OpenCV", "robot", "opencv-python-headless")
        self._file = not config.source.isdigit()
        self.label = f"video file {config.source!r}" if self._file else f"OpenCV device {config.source}"
        self.cure = (
            "A file ends: give a longer one."
            if self._file
            else "Check its cable, and whether another program has it open."
        )
        if self._file and (config.width or config.height):
            raise ConfigError(f"camera {name!r}: width and height have no effect on a video file. Leave them out.")
        self._capture = cv2.VideoCapture(config.source if self._file else int(config.source))
        if not self._capture.isOpened():
            raise StorageError(f"camera {name!r}, {self.label}, does not open: {_why_not(config.source)}")
        wanted = {
            cv2.CAP_PROP_FRAME_WIDTH: config.width,
            cv2.CAP_PROP_FRAME_HEIGHT: config.height,
            cv2.CAP_PROP_FPS: config.fps,
        }
        for key, value in wanted.items():
            if value is not None and not self._file:
                self._capture.set(key, value)
        self._rate = Rate(config.fps or self._capture.get(cv2.CAP_PROP_FPS) or 30.0) if self._file else None

    def grab(self) -> Array | None:
        got, image = self._capture.read()
        if self._rate:
            self._rate.wait()
        return image[..., ::-1] if got else None

    def close(self) -> None:
        self._capture.release()


class _RealSense:
    """A color stream by serial number."""

    def __init__(self, name: str, config: CameraConfig):
        rs = optional_module("pyrealsense2", "a RealSense camera", "realsense")
        self.label, self.cure = (
            f"RealSense {config.source}",
            "Check its USB 3 cable, and whether another program has it open.",
        )
        found = [device.get_info(rs.camera_info.serial_number) for device in rs.context().devices]
        if config.source not in found:
            rules = (
                "Plug it in; if it is, this user may not read it: install librealsense's udev rules "
                "(99-realsense-libusb.rules)."
            )
            raise StorageError(
                f"camera {name!r}: no RealSense {config.source!r}; connected: {', '.join(found) or 'none'}. {rules}"
            )
        settings, self._pipeline = rs.config(), rs.pipeline()
        settings.enable_device(config.source)
        settings.enable_stream(
            rs.stream.color, config.width or 640, config.height or 480, rs.format.rgb8, int(config.fps or 15)
        )
        try:
            device = self._pipeline.start(settings).get_device()
        except RuntimeError as error:
            raise StorageError(f"camera {name!r}, {self.label}, does not start: {error}. {self.cure}") from error
        for sensor in device.query_sensors():
            if config.exposure is not None and sensor.supports(rs.option.exposure):
                sensor.set_option(rs.option.exposure, config.exposure)

    def grab(self) -> Array | None:
        frame = self._pipeline.wait_for_frames(1000).get_color_frame()  # milliseconds; then it raises RuntimeError
        return np.array(frame.get_data()) if frame else None  # a copy: the memory is the driver's

    def close(self) -> None:
        self._pipeline.stop()


KINDS: dict[str, Callable[[str, CameraConfig], Any]] = {"opencv": _OpenCV, "realsense": _RealSense}
"""Makes a source from a camera's name and settings. Add your own: it has ``label`` and ``cure`` for errors, ``grab()``,
which gives an RGB picture, or None, within a second, and ``close()``."""


def _why_not(source: str) -> str:
    """Why OpenCV could not open a device or a file, and the cure."""
    if source.isdigit() and not DEVICE_NODES:
        return (
            "no camera has this number, another program has it open, or this terminal may not use cameras "
            "(System Settings, Privacy)."
        )
    path = f"/dev/video{source}" if source.isdigit() else source
    if not os.path.exists(path):
        there = (
            f"there are {', '.join(sorted(glob.glob('/dev/video*'))) or 'no video devices'}"
            if source.isdigit()
            else "check the path"
        )
        return f"{path} does not exist; {there}."
    if not os.access(path, os.R_OK):
        group = "add it to the group `video` and log in again" if source.isdigit() else "change its permissions"
        return f"this user may not read {path}; {group}."
    cause = "another program may have it open" if source.isdigit() else "it is no video that OpenCV reads"
    return f"{path} is there and readable; {cause}."
