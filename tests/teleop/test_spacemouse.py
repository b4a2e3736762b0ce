"""A SpaceMouse below easyhid: reports as a SpaceMouse sends them come out of a stand-in for the C library hidapi."""

from __future__ import annotations

import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import DeviceError, MissingPackageError
from hilt.teleop import spacemouse
from hilt.teleop.devices import open_device
from hilt.teleop.spacemouse import SpaceMouse
from tests.teleop.played import Noting, until

pytest.importorskip("pyspacemouse")
import easyhid.easyhid
import pyspacemouse


def moved(x: int, y: int, z: int) -> bytes:
    """Report 1 of a SpaceMouse Compact: translation in its own axes (right, toward the person, down), full at 350."""
    return b"\x01" + struct.pack("<3h", x, y, z)


def turned(x: int, y: int, z: int) -> bytes:
    """Report 2: rotation about the same axes."""
    return b"\x02" + struct.pack("<3h", x, y, z)


def buttons(left: bool, right: bool) -> bytes:
    """Report 3, shorter than the others."""
    return bytes([3, left | right << 1, 0])


# A push to the right and up with a turn, in reports that alternate as a mouse's do, then let go.
PUSH = [
    bytes.fromhex(report)
    for report in (
        "010c000300fbff",
        "02000001000000",
        "01af000700a2fe",
        "020300fcff5e01",
        "01000000000000",
        "02000000000000",
    )
]


class Hidapi:
    """What easyhid calls of hidapi, with one SpaceMouse Compact that sends what is queued."""

    def __init__(self) -> None:
        self._ffi = easyhid.easyhid.ffi
        self.reports: list[bytes] = []
        self.plugged = self.allowed = True
        self._path = self._ffi.new("char[]", b"/dev/hidraw0")
        self.product = 0xC635

    def hid_enumerate(self, vendor: int, product: int) -> Any:
        if not self.plugged:
            return self._ffi.NULL
        self._info = self._ffi.new(
            "struct hid_device_info*", {"path": self._path, "vendor_id": 0x256F, "product_id": self.product}
        )
        return self._info

    def hid_free_enumeration(self, start: Any) -> None:
        pass

    def hid_open_path(self, path: bytes) -> Any:
        return self._ffi.cast("hid_device*", 1 if self.allowed and self.plugged else 0)

    def hid_set_nonblocking(self, device: Any, nonblock: int) -> None:
        assert nonblock, "a read that waits would stop the arm"

    def hid_read(self, device: Any, into: Any, length: int) -> int:
        if not self.plugged:
            return -1
        if not self.reports:
            return 0
        report = self.reports.pop(0)[:length]
        self._ffi.memmove(into, report, len(report))
        return len(report)

    def hid_close(self, device: Any) -> None:
        pass


@pytest.fixture
def hidapi(monkeypatch: pytest.MonkeyPatch) -> Hidapi:
    library = Hidapi()
    monkeypatch.setattr(easyhid.easyhid, "hidapi", library)
    monkeypatch.setattr(spacemouse, "REOPEN_SECONDS", 0.01)
    monkeypatch.setattr(spacemouse, "STALE_SECONDS", 60.0)
    return library


@pytest.fixture
def mouse(hidapi: Hidapi) -> Iterator[SpaceMouse]:
    with open_device("spacemouse") as device:
        device.attach(Noting(7))
        yield device  # type: ignore[misc]


def test_axes_are_those_of_hil_serl(mouse: SpaceMouse, hidapi: Hidapi):
    """Each report is parsed by pyspacemouse in the convention that HIL-SERL knew, and mapped with its formula."""
    spec = pyspacemouse.api.get_device_specs()["SpaceMouseCompact"]
    upstream = pyspacemouse.SpaceMouseDevice(spec)
    single = [
        moved(350, 0, 0),
        moved(0, 350, 0),
        moved(0, 0, 350),
        turned(350, 0, 0),
        turned(0, -200, 0),
        turned(0, 0, 100),
    ]
    for report in [*single, *PUSH]:
        upstream._process(report)
        s = upstream._state
        expected = np.clip([-s.y, s.x, s.z, -s.roll, -s.pitch, -s.yaw], -1, 1)
        hidapi.reports.append(report)
        reading = until(mouse, lambda r, expected=expected: np.allclose(r.motion, expected, atol=1e-9))  # type: ignore[misc]
        assert reading.engaged == (np.linalg.norm(expected) > 0.001)
    assert not mouse.read().engaged, "let go"


def test_spacemouse_reads_more_reports_than_the_kernel_buffers(mouse: SpaceMouse, hidapi: Hidapi):
    hidapi.reports += [moved(number, 0, 0) for number in range(300)] + [moved(0, 0, -700)]
    assert until(mouse, lambda r: r.motion[2] != 0).motion.tolist() == [0, 0, 1, 0, 0, 0]


def test_buttons_close_and_open(mouse: SpaceMouse, hidapi: Hidapi):
    for left, right, gripper in ((True, False, -1), (False, False, 0), (False, True, 1)):
        hidapi.reports.append(buttons(left, right))
        assert until(mouse, lambda r, gripper=gripper: r.gripper == gripper).engaged == (gripper != 0)  # type: ignore[misc]
    mouse.attach(Noting(6))
    assert not mouse.read().engaged, "a button is nothing where there is no gripper"


def test_spacemouse_both_buttons_toggle_without_moving_the_gripper(
    mouse: SpaceMouse, hidapi: Hidapi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spacemouse, "TOGETHER_SECONDS", 5.0)  # longer than this machine is ever stopped
    hidapi.reports.append(buttons(True, False))
    until(mouse, lambda r: mouse._button == -1)
    assert mouse.read().gripper == 0, "the other one may follow"
    hidapi.reports += [buttons(True, True), buttons(False, True)]
    assert until(mouse, lambda r: r.events != ()).events == ("toggle",)
    monkeypatch.setattr(spacemouse, "TOGETHER_SECONDS", 0.0)
    assert mouse.read().gripper == 0, "until both are released"
    hidapi.reports += [buttons(False, False), buttons(False, True)]
    assert until(mouse, lambda r: r.gripper != 0).gripper == 1


def test_pulled_out_and_in_again(mouse: SpaceMouse, hidapi: Hidapi):
    hidapi.reports.append(moved(0, 350, 0))
    until(mouse, lambda r: r.engaged)
    hidapi.plugged = False
    reading = until(mouse, lambda r: r.lost)
    assert not reading.engaged and not reading.motion.any()
    hidapi.plugged = True
    assert not until(mouse, lambda r: not r.lost).engaged
    hidapi.reports.append(moved(350, 0, 0))
    until(mouse, lambda r: r.engaged)


def test_one_that_falls_silent_while_pushed_is_lost(mouse: SpaceMouse, hidapi: Hidapi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spacemouse, "STALE_SECONDS", 0.2)
    hidapi.reports.append(moved(0, 350, 0))
    until(mouse, lambda r: r.lost)
    hidapi.reports.append(moved(0, 0, 0))
    until(mouse, lambda r: not r.lost)
    time.sleep(2 * spacemouse.STALE_SECONDS)
    assert not mouse.read().lost, "at rest it says nothing"


def test_a_reader_that_fails_is_lost(mouse: SpaceMouse, hidapi: Hidapi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    hidapi.reports.append(moved(0, 350, 0))
    until(mouse, lambda r: r.engaged)
    monkeypatch.setattr(mouse, "_buttons", None)
    hidapi.reports.append(moved(0, 340, 0))
    assert not until(mouse, lambda r: r.lost).motion.any()


# --- what is lacking, with its cure
# -----------------------------------------------------------------------------------------------


def test_no_permission(hidapi: Hidapi):
    hidapi.allowed = False
    with pytest.raises(
        DeviceError, match=r'may not be opened: echo .KERNEL=="hidraw\*".*uaccess.*udev/rules\.d/70-spacemouse'
    ):
        open_device("spacemouse")


def test_none_is_there(hidapi: Hidapi, capsys: pytest.CaptureFixture[str]):
    hidapi.plugged = False
    with pytest.raises(DeviceError, match="no SpaceMouse is found"):
        open_device("spacemouse")
    hidapi.plugged, hidapi.product = True, 0x1234
    with pytest.raises(DeviceError, match="no SpaceMouse is found"):
        open_device("spacemouse")
    with pytest.raises(DeviceError, match=r"no SpaceMouse is named 'Compact': .*SpaceMouseCompact"):
        open_device("spacemouse", device="Compact")
    assert capsys.readouterr().out == ""


def test_the_library_is_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(easyhid.easyhid, "hidapi", object())
    with pytest.raises(
        DeviceError, match="needs the library hidapi, which is not there: apt-get install libhidapi-hidraw0"
    ):
        open_device("spacemouse")


def test_pyspacemouse_is_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyspacemouse", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'hilt\[teleop\]'"):
        open_device("spacemouse")
